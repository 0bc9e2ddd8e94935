"""Finds the compiled launcher of a spec for an arch: the only search order. Knows no kernel facts and no tensors.

1. `GREYHOUND_ARTIFACTS`, where set, else `greyhound/artifacts` beside this file: built ahead of time, shipped in a wheel.
2. The user's cache (`GREYHOUND_CACHE`, else `XDG_CACHE_HOME/greyhound`, else `~/.cache/greyhound`): one folder per
   (spec, arch, source, versions), readable by the user alone.
3. Where the DSL is installed, the one spec is compiled into that cache by a process of its own.

Nothing is loaded whose hash, source or versions differ from what the manifest and this installation say.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsl_kernels import manifest, runtime
from dsl_kernels.cross_entropy.spec import ARCHS, Spec

ARTIFACTS_VARIABLE = "GREYHOUND_ARTIFACTS"
CACHE_VARIABLE = "GREYHOUND_CACHE"

_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
_lock = threading.Lock()
_modules: dict[Path, Any] = {}
_runtime_libraries: list[ctypes.CDLL] = []


class ArtifactError(RuntimeError):
    """A compiled kernel is missing, altered, or from another source or version."""


def arch_for_capability(major: int, minor: int) -> str | None:
    """Return the arch whose kernels run on a GPU of this compute capability, or None."""
    return _ARCH_OF_CAPABILITY.get((major, minor))


def artifacts_folder() -> Path:
    """Return the folder of kernels built ahead of time; it need not exist."""
    chosen = os.environ.get(ARTIFACTS_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).parent / "artifacts"


def cache_folder() -> Path:
    """Return the folder of kernels compiled on first use; it need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "greyhound"


def load(arch: str, spec: Spec) -> Callable[..., Any]:
    """Return the launcher of `spec` for `arch`, compiling it if that is the only way.

    Raises:
        ArtifactError: it exists nowhere and cannot be compiled here, or a file is not what its manifest says.
    """
    with _lock:
        for folder in (artifacts_folder(), _cache_entry(arch, spec)):
            function = _load_from(folder, arch, spec)
            if function is not None:
                return function
        if manifest.installed_version(manifest.DSL_DISTRIBUTION) is None:
            raise ArtifactError(
                f"{artifacts_folder() / manifest.object_name(arch)}: no kernel {spec.name} for {arch}, and the DSL that could "
                f"compile it is not installed; build it with `{manifest.BUILD_COMMAND} --arch {arch}` where "
                f"{manifest.DSL_DISTRIBUTION} is installed, or set {ARTIFACTS_VARIABLE}"
            )
        folder = _cache_entry(arch, spec)
        _compile_into(folder, arch, spec)
        function = _load_from(folder, arch, spec)
        if function is None:
            raise ArtifactError(f"{folder}: the build of {spec.name} for {arch} left no kernel there")
        return function


def describe() -> list[str]:
    """Return a line for each place that holds kernels, saying for which archs, or why they are not usable."""
    lines = []
    folder = artifacts_folder()
    try:
        found = _checked_manifest(folder)
        if found is None:
            lines.append(f"{folder}: none; build with `{manifest.BUILD_COMMAND}`")
        for arch, entry in (found or {"archs": {}})["archs"].items():
            lines.append(f"{folder / entry['file']}: {len(entry['functions'])} kernels for {arch}")
    except (ArtifactError, ValueError) as error:
        lines.append(str(error))
    cache = cache_folder()
    entries = sum(1 for _ in cache.glob(f"*/{manifest.MANIFEST_NAME}")) if cache.is_dir() else 0
    lines.append(f"{cache}: {entries} kernels compiled on first use")
    return lines


def _load_from(folder: Path, arch: str, spec: Spec) -> Callable[..., Any] | None:
    try:
        found = _checked_manifest(folder)
    except ValueError as error:
        raise ArtifactError(str(error)) from error
    entry = found["archs"].get(arch) if found else None
    if entry is None or spec.name not in entry["functions"]:
        return None
    path = folder / manifest.object_name(arch)
    if path not in _modules:
        _modules[path] = _load_module(path, entry["sha256"])
    function: Callable[..., Any] = _modules[path][spec.name]
    return function


def _checked_manifest(folder: Path) -> dict[str, Any] | None:
    """Read a manifest and refuse one that another source or another version of the run time wrote."""
    found = manifest.read(folder)
    if found is None:
        return None
    expected = {
        "source_hash": manifest.source_hash(),
        "tvm_ffi": manifest.installed_version(manifest.TVM_FFI_DISTRIBUTION),
        "dsl": manifest.installed_version(f"{manifest.DSL_DISTRIBUTION}-libs-cu13"),
    }
    for field, value in expected.items():
        if found[field] != value:
            raise ArtifactError(
                f"{folder / manifest.MANIFEST_NAME}: built with {field} {found[field]}, but this installation has {value}; "
                f"rebuild with `{manifest.BUILD_COMMAND}`"
            )
    return found


def _load_module(path: Path, sha256: str) -> Any:
    try:
        found = manifest.file_hash(path)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}; rebuild with `{manifest.BUILD_COMMAND}`") from error
    if found != sha256:
        raise ArtifactError(
            f"{path}: sha256 {found} is not the {sha256} of its manifest: the file was altered or cut short; "
            f"rebuild with `{manifest.BUILD_COMMAND}`"
        )
    import tvm_ffi

    if not _runtime_libraries:
        # Global: the kernels' objects look up the DSL's symbols in it.
        library = runtime.library_folder() / runtime.SHARED_LIBRARY
        _runtime_libraries.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    return tvm_ffi.load_module(str(path))


def _cache_entry(arch: str, spec: Spec) -> Path:
    key = "\n".join(
        (
            arch,
            spec.name,
            manifest.source_hash(),
            str(manifest.installed_version(manifest.DSL_DISTRIBUTION)),
            str(manifest.installed_version(manifest.TVM_FFI_DISTRIBUTION)),
        )
    )
    return cache_folder() / f"{spec.name}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _compile_into(folder: Path, arch: str, spec: Spec) -> None:
    cache = folder.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ArtifactError(
            f"{cache}: expected a folder of this user that no one else can write, got owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o}; set {CACHE_VARIABLE} to another one"
        )
    with _exclusive(cache / ".lock"):
        if (folder / manifest.MANIFEST_NAME).exists():  # another process was first
            return
        command = [
            sys.executable,
            "-m",
            "dsl_kernels.build",
            "--arch",
            arch,
            "--spec",
            spec.name,
            "--out",
            str(folder),
            "-j",
            "1",
        ]
        root = Path(runtime.__file__).parents[1]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise ArtifactError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


if set(_ARCH_OF_CAPABILITY.values()) != set(ARCHS):
    raise AssertionError("every arch that is built must be one that is looked for")
