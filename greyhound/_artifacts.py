"""Finds the compiled launcher of a spec for an arch: the only search order. Knows no kernel facts and no tensors.

1. The folder `GREYHOUND_ARTIFACTS`, where set, else `greyhound/artifacts` beside this file: built ahead of time,
   shipped in a wheel.
2. Where the DSL is installed, the user's cache (`GREYHOUND_CACHE`, else `XDG_CACHE_HOME/greyhound`, else
   `~/.cache/greyhound`): one folder per (spec, arch, source, versions). No one else may write there.
3. The one spec is compiled into that cache by a process of its own.

Nothing is loaded whose hash, source or versions differ from what the manifest and this installation say, nor where the
DSL's parts are installed in several versions: it is refused by name, never silently compiled again.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
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
LOCK_NAME = ".lock"

_DSL_DISTRIBUTIONS = (
    manifest.DSL_DISTRIBUTION,
    *(f"{manifest.DSL_DISTRIBUTION}-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
)
_PACKAGE_FOLDER = Path(__file__).parent / "artifacts"
_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
_lock = threading.Lock()
_modules: dict[tuple[Path, str], Any] = {}
_runtime_libraries: list[ctypes.CDLL] = []


class ArtifactError(RuntimeError):
    """A compiled kernel is missing, altered, or from another source or version."""


def arch_for_capability(major: int, minor: int) -> str | None:
    """Return the arch whose kernels run on a GPU of this compute capability, or None."""
    return _ARCH_OF_CAPABILITY.get((major, minor))


def artifacts_folder() -> Path:
    """Return the folder of kernels built ahead of time; it need not exist."""
    chosen = os.environ.get(ARTIFACTS_VARIABLE)
    return Path(chosen).absolute() if chosen else _PACKAGE_FOLDER


def cache_folder() -> Path:
    """Return the folder of kernels compiled on first use; it need not exist.

    Raises:
        ArtifactError: no variable names one and this user has no home folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache").absolute() / "greyhound"
    except RuntimeError as error:
        raise ArtifactError(
            f"no home folder for a cache of compiled kernels ({error}); set {CACHE_VARIABLE} to a folder"
        ) from error


def load(arch: str, spec: Spec) -> Callable[..., Any]:
    """Return the launcher of `spec` for `arch`, compiling it if that is the only way.

    Raises:
        ArtifactError: it exists nowhere and cannot be compiled here, a file is not what its manifest says, or parts of
            the DSL are installed in several versions.
    """
    with _lock:
        if not _modules:
            _check_dsl_is_of_one_version()
        folder = artifacts_folder()
        function = _load_from(folder, arch, spec)
        if function is not None:
            return function
        if manifest.installed_version(manifest.DSL_DISTRIBUTION) is None:
            raise ArtifactError(
                f"{folder / manifest.object_name(arch)}: no kernel {spec.name} for {arch}, and the DSL that could "
                f"compile it is not installed; build it with `{manifest.BUILD_COMMAND} --arch {arch}` where "
                f"{manifest.DSL_DISTRIBUTION} is installed, or set {ARTIFACTS_VARIABLE}"
            )
        return _load_cached(arch, spec)


def describe() -> list[str]:
    """Return a line for each place that holds kernels, saying for which archs, or why they are not usable."""
    lines = []
    try:
        _check_dsl_is_of_one_version()
    except ArtifactError as error:
        lines.append(str(error))
    folder = artifacts_folder()
    try:
        archs = (_checked_manifest(folder) or {"archs": {}})["archs"]
        if not archs:
            lines.append(f"{folder}: none; build with `{manifest.BUILD_COMMAND}`")
        for arch, entry in archs.items():
            path = folder / entry["file"]
            try:
                _check_object(path, entry["sha256"])
                lines.append(f"{path}: {_kernels(len(entry['functions']))} for {arch}")
            except ArtifactError as error:
                lines.append(str(error))
    except ArtifactError as error:
        lines.append(str(error))
    try:
        lines.append(_describe_cache(cache_folder()))
    except ArtifactError as error:
        lines.append(str(error))
    return lines


def _describe_cache(cache: Path) -> str:
    try:
        if cache.is_dir():
            _check_private(cache)
        entries = [path.parent for path in cache.glob(f"*/{manifest.MANIFEST_NAME}")]
    except OSError as error:
        raise _unusable_cache(cache, error) from error
    usable = sum(map(_is_usable, entries))
    others = f", {len(entries) - usable} from another source or version" if usable < len(entries) else ""
    return f"{cache}: {_kernels(usable)} compiled on first use{others}"


def _unusable_cache(folder: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{folder}: cannot keep a compiled kernel there: {error}; set {CACHE_VARIABLE} to a folder that can"
    )


def _kernels(count: int) -> str:
    return f"{count} kernel{'s' if count != 1 else ''}"


def _is_usable(folder: Path) -> bool:
    try:
        return _checked_manifest(folder) is not None
    except ArtifactError:
        return False


def _load_from(folder: Path, arch: str, spec: Spec) -> Callable[..., Any] | None:
    found = _checked_manifest(folder)
    entry = found["archs"].get(arch) if found else None
    if entry is None or spec.name not in entry["functions"]:
        return None
    key = folder / entry["file"], entry["sha256"]
    if key not in _modules:
        _modules[key] = _load_module(*key)
    function: Callable[..., Any] = _modules[key][spec.name]
    return function


def _checked_manifest(folder: Path) -> dict[str, Any] | None:
    """Read a manifest and refuse one that another source or another version of the run time wrote."""
    try:
        found = manifest.read(folder)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{error}; {_remedy(folder)}") from error
    if found is None:
        if os.environ.get(ARTIFACTS_VARIABLE) and folder == artifacts_folder():
            raise ArtifactError(
                f"{folder}: expected kernels there, as {ARTIFACTS_VARIABLE} says, got no {manifest.MANIFEST_NAME}; "
                f"{_remedy(folder)}, or unset {ARTIFACTS_VARIABLE}"
            )
        return None
    for field, name, here in (
        ("source_hash", "source hash", manifest.source_hash()),
        ("dsl", manifest.DSL_LIBRARIES_DISTRIBUTION, _version(manifest.DSL_LIBRARIES_DISTRIBUTION)),
        ("tvm_ffi", manifest.TVM_FFI_DISTRIBUTION, _version(manifest.TVM_FFI_DISTRIBUTION)),
    ):
        if found[field] != here:
            raise ArtifactError(
                f"{folder / manifest.MANIFEST_NAME}: expected {name} {_short(here)}, as in this installation, got "
                f"{_short(found[field])}; {_remedy(folder)}"
            )
    for arch, entry in found["archs"].items():
        if entry["file"] != manifest.object_name(arch):
            raise ArtifactError(
                f"{folder / manifest.MANIFEST_NAME}: expected {manifest.object_name(arch)} as the file of {arch}, got "
                f"{entry['file']}; {_remedy(folder)}"
            )
    return found


def _check_dsl_is_of_one_version() -> None:
    """Refuse parts of the DSL of several versions: they share a folder, where one may have replaced another's files."""
    found = {name: version for name in _DSL_DISTRIBUTIONS if (version := manifest.installed_version(name)) is not None}
    if len(set(found.values())) > 1:
        wanted = found.get(manifest.DSL_DISTRIBUTION) or found.get(manifest.DSL_LIBRARIES_DISTRIBUTION)
        wheels = ", ".join(f"{name} {version}" for name, version in found.items())
        again = f"{manifest.DSL_DISTRIBUTION}[cu13]" + (f"=={wanted}" if wanted else "")
        raise ArtifactError(
            f"expected the DSL in one version, since its wheels write into one folder, got {wheels}; "
            f"`python -m pip uninstall {' '.join(found)}`, then `python -m pip install '{again}'`"
        )


def _check_object(path: Path, sha256: str) -> None:
    """Refuse a shared object that is not the file that was built."""
    try:
        found = manifest.file_hash(path)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}; {_remedy(path.parent)}") from error
    if found != sha256:
        raise ArtifactError(
            f"{path}: expected sha256 {_short(sha256)}, as in its manifest, got {_short(found)} (altered or cut "
            f"short); {_remedy(path.parent)}"
        )


def _version(distribution: str) -> str:
    return manifest.installed_version(distribution) or "none"


def _short(value: object) -> str:
    """Return the first 12 characters of a sha256, anything else as it is."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _remedy(folder: Path) -> str:
    if folder == _PACKAGE_FOLDER:
        return f"rebuild with `{manifest.BUILD_COMMAND}`"
    if folder == artifacts_folder():
        return f"rebuild with `{manifest.BUILD_COMMAND} --out {shlex.quote(str(folder))}`"
    return "delete that folder to have the kernel compiled again"


def _load_module(path: Path, sha256: str) -> Any:
    _check_object(path, sha256)
    import tvm_ffi

    try:
        if not _runtime_libraries:
            # Global: the kernels' objects look up the DSL's symbols in it.
            library = runtime.library_folder() / runtime.SHARED_LIBRARY
            _runtime_libraries.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: cannot be loaded: {error}") from error


def _load_cached(arch: str, spec: Spec) -> Callable[..., Any]:
    key = "\n".join(
        (
            platform.machine(),
            manifest.source_hash(),
            _version(manifest.DSL_LIBRARIES_DISTRIBUTION),
            _version(manifest.TVM_FFI_DISTRIBUTION),
        )
    )
    cache = cache_folder()
    folder = cache / f"{spec.name}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        for private in (cache, folder):
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(private)
        if not (folder / manifest.MANIFEST_NAME).exists():
            with _exclusive(folder / LOCK_NAME) as lock:
                if not (folder / manifest.MANIFEST_NAME).exists():  # unless another process was first
                    _clear(folder)
                    _compile_into(folder, arch, spec, lock)
    except OSError as error:
        raise _unusable_cache(folder, error) from error
    function = _load_from(folder, arch, spec)
    if function is None:
        raise ArtifactError(f"{folder}: expected kernel {spec.name} for {arch}, got none; {_remedy(folder)}")
    return function


def _check_private(folder: Path) -> None:
    """Refuse a folder that another user could have written: what is loaded from it runs as this user."""
    link = folder.lstat()  # a link's owner could point it elsewhere once it was checked
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.getuid():
        raise ArtifactError(
            f"{folder}: expected a folder of user {os.getuid()} that no one else can write, got a link of user "
            f"{link.st_uid}; set {CACHE_VARIABLE} to another one"
        )
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ArtifactError(
            f"{folder}: expected a folder of user {os.getuid()} that no one else can write, got owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o}; set {CACHE_VARIABLE} to another one"
        )


def _clear(folder: Path) -> None:
    """Remove what a killed build left in a folder that this process has locked."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK_NAME:
            path.unlink()


def _compile_into(folder: Path, arch: str, spec: Spec, lock: int) -> None:
    arguments = ["--arch", arch, "--spec", spec.name, "--out", str(folder), "-j", "1"]
    # -P: nothing in the current folder stands in for a module of the build.
    command = [sys.executable, "-P", "-m", "dsl_kernels.build", *arguments]
    root = str(Path(runtime.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root])}
    # The builder holds the lock too, in case this process is killed: no other may write there meanwhile.
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, pass_fds=(lock,))
    if done.returncode != 0:
        raise ArtifactError(
            f"no kernel {spec.name} for {arch}: `{shlex.join(command)}` failed with exit code {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    """Hold a lock between processes; the system gives it back when all that have its file descriptor have ended."""
    with open(path, "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield stream.fileno()


if set(_ARCH_OF_CAPABILITY.values()) != set(ARCHS):
    raise AssertionError("every arch that is built must be one that is looked for")
