"""What a manifest says, what is refused as none, and that a reader never sees half of one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsl_kernels import manifest

ENTRY = {"file": "greyhound_sm_90a.so", "sha256": "0" * 64, "functions": ["ce_scale_float32_t256"]}


def complete() -> dict[str, Any]:
    """Return a manifest of one arch."""
    return manifest.new("4.8.1", "0.1.15.post2") | {"archs": {"sm_90a": ENTRY}}


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    manifest.write(tmp_path, complete())
    assert manifest.read(tmp_path) == complete()


def test_a_new_manifest_names_this_source_and_no_arch() -> None:
    new = manifest.new("1.2", "3.4")
    assert new["source_hash"] == manifest.source_hash()
    assert (new["format"], new["dsl"], new["tvm_ffi"], new["archs"]) == (manifest.FORMAT, "1.2", "3.4", {})


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected JSON"),  # cut short at once
        (b'{"format": 1, "arc', "expected JSON"),  # cut short
        (b"\xff\xfe\xfd", "expected JSON"),  # no text at all
        (b"[]", f"expected a manifest of format {manifest.FORMAT}, got list"),
        (b"{}", f"expected a manifest of format {manifest.FORMAT}, got None"),
        (b'{"format": 2}', f"expected a manifest of format {manifest.FORMAT}, got 2"),
    ],
)
def test_what_is_no_manifest_of_this_format_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / manifest.MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=reason) as refused:
        manifest.read(tmp_path)
    assert str(tmp_path / manifest.MANIFEST_NAME) in str(refused.value)


@pytest.mark.parametrize("field", ["dsl", "tvm_ffi", "source_hash", "archs"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    (tmp_path / manifest.MANIFEST_NAME).write_text(json.dumps({k: v for k, v in complete().items() if k != field}))
    with pytest.raises(ValueError, match=f"called {field}$"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("field", sorted(ENTRY))
def test_a_missing_field_of_an_arch_is_named(tmp_path: Path, field: str) -> None:
    cut = {"archs": {"sm_90a": {k: v for k, v in ENTRY.items() if k != field}}}
    (tmp_path / manifest.MANIFEST_NAME).write_text(json.dumps(complete() | cut))
    with pytest.raises(ValueError, match=f"called {field}$"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("archs", [[], None, {"sm_90a": []}, {"sm_90a": None}])
def test_archs_of_another_type_are_refused(tmp_path: Path, archs: object) -> None:
    (tmp_path / manifest.MANIFEST_NAME).write_text(json.dumps(complete() | {"archs": archs}))
    with pytest.raises(ValueError, match=r"called archs$"):
        manifest.read(tmp_path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    manifest.write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        manifest.write_atomically(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_others_may_read_what_is_written_whatever_the_mode_of_temporary_files(tmp_path: Path) -> None:
    manifest.write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in place of the real one."""
    (tmp_path / "op").mkdir()
    (tmp_path / "manifest.py").write_text("one")
    (tmp_path / "op" / "kernel.py").write_text("two")
    monkeypatch.setattr(manifest, "__file__", str(tmp_path / "manifest.py"))
    return tmp_path


def test_the_source_hash_changes_with_every_change_of_a_source_file(source: Path) -> None:
    hashes = [manifest.source_hash()]
    (source / "op" / "kernel.py").write_text("three")  # an edit
    hashes.append(manifest.source_hash())
    (source / "op" / "kernel.py").rename(source / "op" / "other.py")  # a name
    hashes.append(manifest.source_hash())
    (source / "op" / "plan.py").touch()  # a new file, though empty
    hashes.append(manifest.source_hash())
    (source / "op" / "plan.py").unlink()
    (source / "op" / "other.py").unlink()
    (source / "manifest.py").write_text("oneop/other.pythree")  # the same bytes in one file
    hashes.append(manifest.source_hash())
    assert len(set(hashes)) == len(hashes)


def test_the_source_hash_does_not_depend_on_what_a_run_leaves_behind(source: Path) -> None:
    before = manifest.source_hash()
    (source / "op" / "__pycache__").mkdir()
    (source / "op" / "__pycache__" / "kernel.cpython-311.pyc").write_bytes(b"bytecode")
    os.utime(source / "manifest.py", (0, 0))
    assert manifest.source_hash() == before


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert manifest.installed_version("pytest") == pytest.__version__
    assert manifest.installed_version("greyhound-no-such-distribution") is None
