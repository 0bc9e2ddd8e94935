"""Who may import whom, and what importing the library does to a process: nothing but define it."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("greyhound", "dsl_kernels", "bench")

STDLIB_ROOMS = {"spec", "plan", "geometry", "manifest", "runtime"}
"""Rooms of `dsl_kernels` that anyone may import without a compiler or PyTorch."""

MAY_IMPORT = {
    "bench": {"bench", "greyhound", "distributed", "nn", "ops", "kernels", "artifacts"} | STDLIB_ROOMS,
    "main": {"greyhound", "nn", "ops", "kernels", "artifacts", "spec", "plan"},
    "distributed": {"nn"},
    "nn": {"nn", "ops", "kernels", "spec"},
    "ops": {"ops", "kernels", "spec"},
    "kernels": {"kernels", "artifacts", "spec", "plan"},
    "artifacts": {"spec", "manifest", "runtime"},
    "greyhound": set(),
    "build": {"kernel"} | STDLIB_ROOMS,
    "kernel": {"options", "shards", "wide", "narrow", "held", "losses", "device", "reduce", "plan", "spec"},
    "shards": {"options", "losses", "device", "reduce", "spec"},
    "options": {"wide", "narrow", "losses", "device", "reduce", "plan", "spec"},
    "wide": {"losses", "device", "layouts", "reduce", "geometry", "plan", "spec"},
    "narrow": {"losses", "device", "layouts", "reduce", "plan", "spec"},
    "held": {"losses", "device", "layouts", "vector", "reduce", "spec"},
    "losses": {"device", "vector", "reduce", "plan", "spec"},
    "device": {"vector", "reduce", "geometry", "plan", "spec"},
    "vector": {"reduce"},
    "reduce": {"spec"},
    "layouts": {"spec"},
    "plan": {"geometry", "spec"},
    "geometry": {"spec"},
    "manifest": set(),
    "runtime": set(),
    "spec": set(),
    "dsl_kernels": set(),
}
"""Room -> rooms that it may import. Only `bench`, and the tests, see nearly everything; nothing sees the tests."""

THIRD_PARTY = {
    "bench": None,  # peers and plots
    "main": {"torch"},
    "nn": {"torch"},
    "ops": {"torch"},
    "kernels": {"torch"},
    "artifacts": {"tvm_ffi"},
    "build": {"cutlass"},
    "kernel": {"cutlass", "cuda"},
    "shards": {"cutlass", "cuda"},
    "options": {"cutlass", "cuda"},
    "losses": {"cutlass"},
    "wide": {"cutlass"},
    "narrow": {"cutlass"},
    "held": {"cutlass"},
    "device": {"cutlass"},
    "vector": {"cutlass"},
    "reduce": {"cutlass"},
    "layouts": {"cutlass"},
}
"""Room -> packages from outside that it may import, None for any; the other rooms use the standard library alone."""


def sources() -> list[Path]:
    """Return every source file of the packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in sources()}


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere in it, functions included."""
    package = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source


def room(module: str) -> str:
    """Return the room of a module of this project."""
    parts = module.split(".")
    if parts[0] in ("tests", "bench"):
        return parts[0]
    if parts[0] == "greyhound":
        return "greyhound" if len(parts) == 1 else parts[1].strip("_")
    return parts[-1] if parts[-1] in MAY_IMPORT else "dsl_kernels"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path):
    here = room(module_name(path))
    outside = THIRD_PARTY.get(here, set())
    for name in imported(path):
        top = name.split(".")[0]
        if top in (*PACKAGES, "tests"):
            assert room(name) in MAY_IMPORT[here], f"{path.relative_to(ROOT)} imports {name}"
        elif outside is not None:
            allowed = top in sys.stdlib_module_names or top in outside
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_rooms_point_one_way():
    rooms = list(MAY_IMPORT)
    order: list[str] = []
    while len(order) < len(rooms):
        ready = [room for room in rooms if room not in order and MAY_IMPORT[room] - {room} <= set(order)]
        assert ready, f"a cycle among {set(rooms) - set(order)}"
        order += ready


def test_every_module_has_a_room_and_every_room_a_module():
    assert {room(module) for module in MODULES} == set(MAY_IMPORT)


def test_the_compiler_is_named_in_kernel_files_alone():
    named = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if path.parts[len(ROOT.parts)] != "bench" and any(name.split(".")[0] == "cutlass" for name in imported(path))
    }
    shared = {f"dsl_kernels/{name}.py" for name in ("reduce", "layouts", "vector", "build")}
    rooms = ("kernel", "options", "shards", "losses", "device", "wide", "narrow", "held")
    operator = {f"dsl_kernels/cross_entropy/{name}.py" for name in rooms}
    assert named == shared | operator


UNPICKLING = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "runpy",
    "code",
    "imp",
}
"""Modules that run what a file says."""

RUNNING = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that do, where called by their bare name."""


def runs_what_it_reads(source: str) -> set[str]:
    """Return how a source text could run the content of a file as Python."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLING:
            found.add(str(node.module))
        elif isinstance(node, ast.Name) and node.id in RUNNING:
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in {"torch.load", "numpy.load", "np.load", "importlib.util.spec_from_file_location"} or (
                name.split(".")[0] == "builtins" and node.attr in RUNNING
            ):
                found.add(name)
    return found


def test_no_library_runs_the_content_of_a_file_as_python() -> None:
    libraries = [path for path in sources() if path.relative_to(ROOT).parts[0] != "bench"]
    found = {path.relative_to(ROOT): runs_what_it_reads(path.read_text(encoding="utf-8")) for path in libraries}
    assert {path: ways for path, ways in found.items() if ways} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    import pickle", {"pickle"}),
        ("from marshal import loads", {"marshal"}),
        ("import dill.source as json", {"dill.source"}),
        ("exec(open(path).read())", {"exec"}),
        ("run = eval", {"eval"}),
        ("import builtins\nbuiltins.exec(text)", {"builtins.exec"}),
        ("import torch\ntorch.load(path)", {"torch.load"}),
        ("model.eval()\nre.compile(text)\ncute.compile(launcher)\njson.loads(text)", set()),
    ],
)
def test_what_runs_the_content_of_a_file_is_seen(source: str, expected: set[str]) -> None:
    assert runs_what_it_reads(source) == expected


def test_no_folder_or_file_has_a_name_that_decides_nothing():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    for path in [*sources(), *(ROOT / "tests").rglob("*.py")]:
        assert not vague & set(path.relative_to(ROOT).with_suffix("").parts), path


IMPORT_AND_REPORT = """
import json, os, sys, threading, time, warnings
import torch, torch.nn.functional

before_environment, before_modules = dict(os.environ), set(sys.modules)
before = {
    "sys.path": list(sys.path), "warnings": list(warnings.filters), "dtype": str(torch.get_default_dtype()),
    "threads": threading.active_count(), "excepthook": repr(sys.excepthook),
    "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
}
owners = (torch, torch.Tensor, torch.nn.functional, torch.autograd)
namespaces = [(owner.__name__, owner, dict(vars(owner))) for owner in owners]
reads, events = [], []

class Environment(type(os.environ)):
    def _note(self, key):
        frame = sys._getframe(2)
        while frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc", __name__):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").split(".")[0] in ("greyhound", "dsl_kernels"):
            reads.append(str(key))
    def __getitem__(self, key):
        self._note(key)
        return super().__getitem__(key)

os.environ.__class__ = Environment

def audit(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.putenv",
                 "os.unsetenv", "socket.connect", "_thread.start_new_thread", "os.mkdir", "os.remove", "os.rename"):
        events.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        events.append(f"open {arguments[0]} {arguments[1]}")

sys.addaudithook(audit)
start = time.perf_counter()
import greyhound
import greyhound.nn
seconds = time.perf_counter() - start
import greyhound.nn.functional, greyhound.kernels.cross_entropy, greyhound.ops.cross_entropy, greyhound._artifacts
os.environ.__class__ = Environment.__mro__[1]
after = {
    "sys.path": list(sys.path), "warnings": list(warnings.filters), "dtype": str(torch.get_default_dtype()),
    "threads": threading.active_count(), "excepthook": repr(sys.excepthook),
    "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
}
patched = [
    f"{name}.{key}" for name, owner, values in namespaces for key, value in values.items()
    if key != "__warningregistry__" and vars(owner).get(key) is not value
]
patched += sorted(set(vars(torch.Tensor)) - set(namespaces[1][2]))
print(json.dumps({
    "seconds": seconds, "reads": reads, "events": events, "patched": patched,
    "changed": [key for key in before if before[key] != after[key]],
    "environment": dict(os.environ) != before_environment,
    "compiler": sorted(
        name for name in set(sys.modules) - before_modules if name.split(".")[0] in ("cutlass", "tvm_ffi", "triton")
    ),
    "cuda": torch.cuda.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    """What importing the library did in each of three fresh processes in which PyTorch was there already."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", IMPORT_AND_REPORT]
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        for _ in range(3)
    ]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    return [json.loads(run.stdout) for run in runs]


def test_importing_loads_no_compiler_and_makes_no_cuda_context(imports):
    assert not imports[0]["compiler"]
    assert not imports[0]["cuda"]


def test_importing_starts_and_writes_nothing(imports):
    assert not imports[0]["events"]


def test_importing_changes_nothing_outside_the_library(imports):
    assert not imports[0]["environment"]
    assert not imports[0]["changed"]
    assert not imports[0]["patched"]


def test_importing_reads_no_environment_variable(imports):
    assert not imports[0]["reads"]


def test_importing_adds_less_than_50_ms_to_importing_pytorch(imports):
    assert min(run["seconds"] for run in imports) < 0.05


@pytest.mark.gpu
def test_the_first_loss_waits_for_no_compiler_where_its_kernel_is_built() -> None:
    program = """
import time
import torch
import greyhound.nn.functional as functional

logits, target = torch.randn(64, 32000, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
torch.nn.functional.cross_entropy(logits, target)  # the CUDA context, and the device's own first launch
torch.cuda.synchronize()
start = time.perf_counter()
functional.cross_entropy(logits, target)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
    run = [sys.executable, "-c", program]
    seconds = [float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    # 0.10 to 0.13 s on an H200, 2026-11-30; a compile takes seconds.
    assert min(seconds) < 0.3, seconds
