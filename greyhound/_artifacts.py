"""stub until written"""
def arch_for_capability(major, minor): return None
def load(arch, spec): raise NotImplementedError
