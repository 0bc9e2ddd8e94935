"""Ahead-of-time build: specs -> objects -> one shared object per arch and a manifest. Needs no GPU.

    python -m dsl_kernels.build [--arch sm_90a ...] [--spec NAME ...] [--out DIR] [-j N]

Needs the DSL (`nvidia-cutlass-dsl[cu13]`) and a C compiler to link (`CC`, else `cc`).
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsl_kernels import manifest, runtime
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ARCHS, Spec

DEFAULT_OUT = Path("greyhound") / "artifacts"


def compile_object(job: tuple[Spec, str, str]) -> tuple[Spec, str, float]:
    """Compile one spec for one arch into an object file; returns the spec, the arch and the seconds it took."""
    spec, arch, path = job
    start = time.perf_counter()
    import cutlass.cute as cute

    from dsl_kernels.cross_entropy import kernel

    launcher, arguments = kernel.launcher(spec)
    compiled: Any = cute.compile(launcher, *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch}")
    compiled.export_to_c(path, function_name=spec.name)
    return spec, arch, time.perf_counter() - start


def link(objects: Sequence[Path], out: Path) -> None:
    """Link objects and the DSL's static runtime into one shared object, whole or not at all."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler found to link the kernels: install gcc or set CC")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".link.") as folder:
        linked = Path(folder) / out.name
        archive = runtime.library_folder() / runtime.STATIC_LIBRARY
        command = [compiler, "-shared", "-o", str(linked), *map(str, objects), str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} could not link {out.name}:\n{done.stderr}")
        os.replace(linked, out)


def build(specs: Sequence[Spec], archs: Sequence[str], out: Path, jobs: int, progress: bool = True) -> None:
    """Compile `specs` for each of `archs` into `out`. Archs built there earlier from the same source are kept."""
    dsl = manifest.installed_version(manifest.DSL_DISTRIBUTION)
    tvm_ffi = manifest.installed_version(manifest.TVM_FFI_DISTRIBUTION)
    if dsl is None or tvm_ffi is None:
        missing = manifest.DSL_DISTRIBUTION if dsl is None else manifest.TVM_FFI_DISTRIBUTION
        raise ModuleNotFoundError(
            f"building kernels needs {missing}: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        )
    out.mkdir(parents=True, exist_ok=True)
    written = manifest.new(dsl, tvm_ffi)
    try:
        earlier = manifest.read(out)
    except ValueError:
        earlier = None
    if earlier is not None and {**earlier, "archs": {}} == written:
        written["archs"] = {arch: entry for arch, entry in earlier["archs"].items() if arch not in archs}
    with tempfile.TemporaryDirectory(prefix="greyhound_build_") as folder:
        work = [(spec, arch, str(Path(folder) / f"{spec.name}.{arch}.o")) for arch in archs for spec in specs]
        context = multiprocessing.get_context("spawn")
        # A worker is replaced now and then: each compile leaves idle threads of the compiler behind.
        with context.Pool(min(jobs, len(work)), maxtasksperchild=64) as pool:
            for count, (spec, arch, seconds) in enumerate(pool.imap_unordered(compile_object, work), 1):
                if progress:
                    print(f"[{count:3d}/{len(work)}] {arch} {spec.name} {seconds:.1f} s", flush=True)
        for arch in archs:
            library = out / manifest.object_name(arch)
            link([Path(path) for _, of_arch, path in work if of_arch == arch], library)
            written["archs"][arch] = {
                "file": library.name,
                "sha256": manifest.file_hash(library),
                "functions": sorted(spec.name for spec in specs),
            }
    manifest.write(out, written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    names = {spec.name: spec for spec in plan.SPECS}
    parser = argparse.ArgumentParser(
        prog="python -m dsl_kernels.build", description="Compile the kernels ahead of time."
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS), help="default: all")
    parser.add_argument(
        "--spec", nargs="+", choices=sorted(names), default=list(names), metavar="NAME", help="default: all"
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder to write, default {DEFAULT_OUT}")
    parser.add_argument(
        "-j", type=int, default=os.cpu_count() or 1, dest="jobs", help="processes, default one per core"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"-j: expected at least 1, got {options.jobs}")
    start = time.perf_counter()
    build([names[name] for name in options.spec], options.arch, options.out, options.jobs)
    print(
        f"{len(options.spec)} kernels for {', '.join(options.arch)} in {options.out}: {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
