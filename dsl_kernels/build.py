"""Ahead-of-time build: specs -> objects -> one shared object per arch and a manifest. Needs no GPU.

    python -m dsl_kernels.build [--arch sm_90a ...] [--spec NAME ...] [--out DIR] [-j N]

Needs the DSL (`nvidia-cutlass-dsl[cu13]`) and a C compiler to link (`CC`, else `cc`, else `gcc`).

Everything is compiled and linked aside first: a build that fails or is killed until then leaves the folder as it was.
Then the shared objects are moved in and the manifest is written; what a kill in between leaves, the loader refuses.
"""

import argparse
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from dsl_kernels import manifest, runtime
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ARCHS, Spec

DEFAULT_OUT = Path(__file__).parents[1] / "greyhound" / "artifacts"
"""Where the loader looks first, wherever the command is run."""

TASKS_PER_WORKER = 64
"""Compiles after which worker processes are replaced: each leaves idle threads of the compiler behind."""

Job = tuple[Spec, str, str]
"""A spec, an arch, and the path of the object to write."""


def compile_object(job: Job) -> tuple[Spec, str, float]:
    """Compile one spec for one arch into an object file; returns the spec, the arch and the seconds it took."""
    spec, arch, path = job
    start = time.perf_counter()
    import cutlass.cute as cute

    from dsl_kernels.cross_entropy import kernel

    launcher, arguments = kernel.launcher(spec, arch)
    compiled: Any = cute.compile(launcher, *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch}")
    compiled.export_to_c(path, function_name=spec.name)
    return spec, arch, time.perf_counter() - start


def exit_with_parent() -> None:
    """Let this worker process end with the build: the pool's own would wait for ever on a build that was killed."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_objects(work: Sequence[Job], jobs: int) -> Iterator[tuple[Spec, str, float]]:
    """Compile in `jobs` processes; yields what `compile_object` returns as each is done.

    Raises:
        RuntimeError: a compile failed, or its process died; the rest is given up.
    """
    context = multiprocessing.get_context("spawn")
    batch = jobs * TASKS_PER_WORKER
    for first in range(0, len(work), batch):
        workers = min(jobs, len(work) - first)
        with ProcessPoolExecutor(workers, mp_context=context, initializer=exit_with_parent) as pool:
            futures = {pool.submit(compile_object, job): job for job in work[first : first + batch]}
            for future in as_completed(futures):
                spec, arch, _ = futures[future]
                try:
                    done = future.result()
                except BrokenProcessPool as error:
                    raise RuntimeError("a compiling process died; if memory ran out, try a smaller -j") from error
                except Exception as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise RuntimeError(f"{spec.name} could not be compiled for {arch}: {error}") from error
                yield done


def link(objects: Sequence[Path], out: Path) -> None:
    """Link objects and the DSL's static runtime into one shared object."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0] or shutil.which(compiler[0]) is None:
        what = f"CC: {compiler[0]!r} not found" if compiler[0] else "no C compiler found to link the kernels"
        raise FileNotFoundError(f"{what}; install gcc or set CC")
    archive = runtime.library_folder() / runtime.STATIC_LIBRARY
    command = [*compiler, "-shared", "-o", str(out), *map(str, objects), str(archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(compiler)} could not link {out.name}:\n{done.stderr}")


def build(specs: Sequence[Spec], archs: Sequence[str], out: Path, jobs: int, progress: bool = True) -> None:
    """Compile `specs` for each of `archs` into `out`.

    Other archs built there earlier from the same source and versions are kept; those of another source are deleted.
    """
    versions = {
        name: manifest.installed_version(name)
        for name in (
            manifest.DSL_DISTRIBUTION,
            manifest.DSL_LIBRARIES_DISTRIBUTION,
            manifest.TVM_FFI_DISTRIBUTION,
        )
    }
    missing = ", ".join(name for name, version in versions.items() if version is None)
    if missing:
        raise ModuleNotFoundError(
            f"building kernels needs {missing}: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        )
    out.mkdir(parents=True, exist_ok=True)
    # Hashed before the first compile: a source file changed meanwhile makes the manifest a mismatch, not a lie.
    written = manifest.new(
        str(versions[manifest.DSL_LIBRARIES_DISTRIBUTION]), str(versions[manifest.TVM_FFI_DISTRIBUTION])
    )
    try:
        earlier = manifest.read(out)
    except ValueError:
        earlier = None
    if earlier is not None and {**earlier, "archs": {}} == written:
        written["archs"] = {arch: entry for arch, entry in earlier["archs"].items() if arch not in archs}
    # Inside `out`: a move within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=out, prefix=".build.") as folder:
        aside = Path(folder)
        work = [(spec, arch, str(aside / f"{spec.name}.{arch}.o")) for arch in archs for spec in specs]
        for count, (spec, arch, seconds) in enumerate(compile_objects(work, jobs), 1):
            if progress:
                print(f"[{count:3d}/{len(work)}] {arch} {spec.name} {seconds:.1f} s", flush=True)
        for arch in archs:
            library = aside / manifest.object_name(arch)
            link([Path(path) for _, of_arch, path in work if of_arch == arch], library)
            written["archs"][arch] = {
                "file": library.name,
                "sha256": manifest.file_hash(library),
                "functions": sorted(spec.name for spec in specs),
            }
        for arch in archs:
            os.replace(aside / manifest.object_name(arch), out / manifest.object_name(arch))
        manifest.write(out, written)
    named = {entry["file"] for entry in written["archs"].values()}
    for library in out.glob(manifest.object_name("*")):
        if library.name not in named:
            library.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    names = {spec.name: spec for spec in plan.SPECS}
    parser = argparse.ArgumentParser(
        prog="python -m dsl_kernels.build", description="Compile the kernels ahead of time."
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS, help="default: all")
    parser.add_argument("--spec", nargs="+", choices=names, default=tuple(names), metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write, default: %(default)s")
    parser.add_argument(
        "-j", type=int, default=os.cpu_count() or 1, dest="jobs", help="processes, default: one per core"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"-j: expected at least 1, got {options.jobs}")
    start = time.perf_counter()
    specs = [names[name] for name in dict.fromkeys(options.spec)]  # each once, however often it is named
    archs = list(dict.fromkeys(options.arch))
    build(specs, archs, options.out, options.jobs)
    kernels = f"{len(specs)} kernel{'s' if len(specs) != 1 else ''}"
    print(f"{kernels} for {', '.join(archs)} in {options.out}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
