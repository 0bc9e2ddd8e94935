"""What a folder of built kernels says of itself. Standard library only: the builder writes it, the loader checks it.

A folder holds one shared object per arch and `manifest.json`, written last:

    {"format": 1, "dsl": "4.8.1", "tvm_ffi": "0.1.15.post2", "source_hash": "...",
     "archs": {"sm_90a": {"file": "greyhound_sm_90a.so", "sha256": "...", "functions": ["ce_fused_...", ...]}, ...}}
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST_NAME = "manifest.json"
DSL_DISTRIBUTION = "nvidia-cutlass-dsl"
DSL_LIBRARIES_DISTRIBUTION = "nvidia-cutlass-dsl-libs-cu13"
"""Brings the libraries that kernels are linked with and loaded beside: its version is the manifest's `dsl`."""
TVM_FFI_DISTRIBUTION = "apache-tvm-ffi"
BUILD_COMMAND = "python -m dsl_kernels.build"


def object_name(arch: str) -> str:
    """Return the file name of an arch's shared object."""
    return f"greyhound_{arch}.so"


def source_hash() -> str:
    """Return the sha256 of every source file of this package, by name and content."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def new(dsl: str, tvm_ffi: str) -> dict[str, Any]:
    """Return a manifest of this source with no arch yet."""
    return {"format": FORMAT, "dsl": dsl, "tvm_ffi": tvm_ffi, "source_hash": source_hash(), "archs": {}}


def read(folder: Path) -> dict[str, Any] | None:
    """Return a folder's manifest, or None where it has none.

    Raises:
        ValueError: the file is not a manifest of this format.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        got = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path}: expected a manifest of format {FORMAT}, got {got}")
    try:
        missing = {"dsl", "tvm_ffi", "source_hash"} - found.keys()
        for entry in found["archs"].values():
            missing |= {"file", "sha256", "functions"} - entry.keys()
    except (KeyError, TypeError, AttributeError):
        missing = {"archs"}
    if missing:
        raise ValueError(
            f"{path}: expected all fields of format {FORMAT}, got none called {', '.join(sorted(missing))}"
        )
    return found


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, whenever the writer is killed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a folder's manifest; the caller has written all files it names."""
    write_atomically(folder / MANIFEST_NAME, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
