"""Where compiled kernels are looked for, what is refused before it is loaded, and the compile on first use.

Most tests put a stand-in for the last step, `tvm_ffi.load_module`, and see what reaches it. The last section compiles
one kernel and loads it, which needs no GPU.
"""

import ctypes
import errno
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tvm_ffi

from dsl_kernels import build, manifest
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Spec
from greyhound import _artifacts

ROOT = Path(_artifacts.__file__).parents[1]
ARCH = "sm_90a"
SPEC = next(spec for spec in plan.SPECS if spec.op == "scale")  # the quickest to compile
OTHER_SPEC = next(spec for spec in plan.SPECS if spec.op == "fused")
CONTENT = b"not machine code"
HEX_12 = "[0-9a-f]{12}"
PYTHON = sys.executable  # tests put others in its place


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder without kernels, a cache of the test's own, and nothing loaded yet."""
    for name in (_artifacts.ARTIFACTS_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(_artifacts.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(_artifacts, "_PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr(_artifacts, "_modules", {})
    return tmp_path / "package"


def write_folder(folder: Path, archs: tuple[str, ...] = (ARCH,), content: bytes = CONTENT, **fields: Any) -> Path:
    """Write a folder as the build does, with fields of its manifest replaced; return the first shared object."""
    folder.mkdir(parents=True, exist_ok=True)
    functions = fields.pop("functions", [SPEC.name])
    entries = {}
    for arch in archs:
        path = folder / manifest.object_name(arch)
        path.write_bytes(content)
        entries[arch] = {"file": path.name, "sha256": manifest.file_hash(path), "functions": functions}
    versions = (manifest.DSL_LIBRARIES_DISTRIBUTION, manifest.TVM_FFI_DISTRIBUTION)
    new = manifest.new(*(str(manifest.installed_version(name)) for name in versions))
    manifest.write(folder, new | {"archs": entries} | fields)
    return folder / manifest.object_name(archs[0])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that were handed to the dynamic loader; what it returns says which path it came from."""
    paths: list[Path] = []

    def load_module(path: str) -> dict[str, Callable[[], Path]]:
        time.sleep(0.02)  # long enough for another thread to come in between
        paths.append(Path(path))
        return {SPEC.name: lambda: Path(path)}

    monkeypatch.setattr(tvm_ffi, "load_module", load_module)
    monkeypatch.setattr(_artifacts, "_runtime_libraries", [object()])
    return paths


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything reaches the dynamic loader."""

    def load(*arguments: object, **_: object) -> None:
        pytest.fail(f"loaded {arguments}")

    monkeypatch.setattr(tvm_ffi, "load_module", load)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(_artifacts, "_runtime_libraries", [])


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run to compile a kernel; each writes the folder that it names."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        arch, name, out = (command[command.index(option) + 1] for option in ("--arch", "--spec", "--out"))
        write_folder(Path(out), (arch,), functions=[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(_artifacts.subprocess, "run", run)
    return commands


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a compiler is started."""
    monkeypatch.setattr(_artifacts.subprocess, "run", lambda command, **_: pytest.fail(f"ran {command}"))


@pytest.fixture
def without_dsl(monkeypatch: pytest.MonkeyPatch, nothing_is_compiled: None) -> None:
    """Installed without the compiler, with the libraries that compiled kernels need."""
    real = manifest.installed_version
    monkeypatch.setattr(manifest, "installed_version", lambda n: None if n == manifest.DSL_DISTRIBUTION else real(n))


def refusal() -> str:
    """Return why the kernel is refused."""
    with pytest.raises(_artifacts.ArtifactError) as refused:
        _artifacts.load(ARCH, SPEC)
    return str(refused.value)


# Search order


def test_the_variable_comes_first_then_the_package_then_the_cache_then_a_compile(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path], compiles: list[list[str]]
) -> None:
    chosen_object = write_folder(tmp_path / "chosen")
    package_object = write_folder(package)
    monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, str(tmp_path / "chosen"))
    assert _artifacts.load(ARCH, SPEC)() == chosen_object
    monkeypatch.delenv(_artifacts.ARTIFACTS_VARIABLE)
    assert _artifacts.load(ARCH, SPEC)() == package_object
    assert not (tmp_path / "cache").exists()
    assert not compiles
    shutil.rmtree(package)
    compiled = _artifacts.load(ARCH, SPEC)()
    assert compiled.parents[1] == tmp_path / "cache"
    assert len(compiles) == 1
    monkeypatch.setattr(_artifacts, "_modules", {})  # as in the next process
    assert _artifacts.load(ARCH, SPEC)() == compiled
    assert len(compiles) == 1


def test_a_kernel_is_loaded_once_from_the_path_that_was_checked(package: Path, loaded: list[Path]) -> None:
    path = write_folder(package)
    assert _artifacts.load(ARCH, SPEC) is _artifacts.load(ARCH, SPEC)
    assert loaded == [path]


def test_a_folder_that_was_rebuilt_is_loaded_anew(package: Path, loaded: list[Path]) -> None:
    write_folder(package)
    _artifacts.load(ARCH, SPEC)
    write_folder(package, content=b"other machine code")
    _artifacts.load(ARCH, SPEC)
    assert len(loaded) == 2


@pytest.mark.parametrize(
    "built",
    [
        {"archs": ("sm_100a",)},  # another arch
        {"functions": [OTHER_SPEC.name]},  # another kernel
    ],
    ids=["arch", "kernel"],
)
@pytest.mark.parametrize("where", ["variable", "package"])
def test_a_folder_without_this_kernel_is_passed_over(
    tmp_path: Path,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[Path],
    compiles: list[list[str]],
    built: dict[str, Any],
    where: str,
) -> None:
    if where == "variable":
        monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, str(tmp_path / "chosen"))
    write_folder(_artifacts.artifacts_folder(), **built)
    assert _artifacts.load(ARCH, SPEC)().parents[1] == tmp_path / "cache"
    assert len(compiles) == 1


def test_one_kernel_for_one_arch_is_compiled_and_each_has_a_folder_of_its_own(
    tmp_path: Path, loaded: list[Path], compiles: list[list[str]]
) -> None:
    _artifacts.load(ARCH, SPEC)
    _artifacts.load("sm_120a", SPEC)
    asked = [[command[command.index(option) + 1] for option in ("--arch", "--spec")] for command in compiles]
    assert asked == [[ARCH, SPEC.name], ["sm_120a", SPEC.name]]
    assert len({path.parent for path in loaded}) == 2


def test_a_change_of_source_or_version_is_compiled_into_another_folder(
    monkeypatch: pytest.MonkeyPatch, loaded: list[Path], compiles: list[list[str]]
) -> None:
    _artifacts.load(ARCH, SPEC)
    real = manifest.installed_version
    for changed in (manifest.DSL_DISTRIBUTION, manifest.TVM_FFI_DISTRIBUTION):  # the DSL with all its libraries
        with monkeypatch.context() as patch:
            patch.setattr(
                manifest, "installed_version", lambda name, c=changed: "0.0" if name.startswith(c) else real(name)
            )
            _artifacts.load(ARCH, SPEC)
    monkeypatch.setattr(manifest, "source_hash", lambda: "f" * 64)
    _artifacts.load(ARCH, SPEC)
    assert len(compiles) == len({path.parent for path in loaded}) == 4


def test_without_the_compiler_a_missing_kernel_is_named_with_the_command_that_builds_it(
    package: Path, nothing_is_loaded: None, without_dsl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_artifacts.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", "/dev/null")  # no cache could be kept, and none is asked for
    message = refusal()
    assert message.startswith(f"{package / 'greyhound_sm_90a.so'}: no kernel {SPEC.name} for {ARCH}")
    assert f"`{manifest.BUILD_COMMAND} --arch {ARCH}`" in message
    assert _artifacts.ARTIFACTS_VARIABLE in message


def test_without_the_compiler_a_kernel_that_was_built_ahead_is_loaded(
    package: Path, loaded: list[Path], without_dsl: None
) -> None:
    path = write_folder(package)
    assert _artifacts.load(ARCH, SPEC)() == path


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
def test_a_folder_that_the_user_chose_must_hold_kernels(
    tmp_path: Path,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_is_loaded: None,
    nothing_is_compiled: None,
    exists: bool,
) -> None:
    chosen = tmp_path / "a folder"
    if exists:
        chosen.mkdir()
    write_folder(package)  # would serve, but is not what was asked for
    monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, str(chosen))
    message = refusal()
    assert message.startswith(f"{chosen}: expected kernels there, as {_artifacts.ARTIFACTS_VARIABLE} says")
    assert f"`{manifest.BUILD_COMMAND} --out '{chosen}'`" in message
    assert _artifacts.describe()[0] == message


def test_an_empty_variable_counts_as_unset(
    package: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path], tmp_path: Path
) -> None:
    path = write_folder(package)
    monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, "")
    assert _artifacts.load(ARCH, SPEC)() == path
    monkeypatch.setenv(_artifacts.CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _artifacts.cache_folder() == tmp_path / ".cache" / "greyhound"


def test_a_relative_folder_is_loaded_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path]
) -> None:
    # The dynamic loader looks a bare file name up in the system's folders.
    write_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, ".")
    _artifacts.load(ARCH, SPEC)
    assert loaded == [tmp_path / "greyhound_sm_90a.so"]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((8, 9), None),  # the last one that is too old
        ((12, 1), None),  # machine code with an arch's own features runs on no other
    ],
)
def test_a_gpu_gets_the_kernels_of_its_own_capability_only(capability: tuple[int, int], arch: str | None) -> None:
    assert _artifacts.arch_for_capability(*capability) == arch


# Refused before it is loaded


def flip(position: int) -> Callable[[bytes], bytes]:
    """Return a change of one bit of one byte."""

    def change(content: bytes) -> bytes:
        altered = bytearray(content)
        altered[position] ^= 1
        return bytes(altered)

    return change


ALTERATIONS = {
    "first byte": flip(0),
    "last byte": flip(-1),
    "cut short": lambda content: content[:-1],
    "empty": lambda _: b"",
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_an_altered_shared_object_is_refused_by_name_before_it_is_loaded(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None, alter: Callable[[bytes], bytes]
) -> None:
    path = write_folder(package)
    path.write_bytes(alter(CONTENT))
    message = refusal()
    assert re.match(
        rf"{path}: expected sha256 {HEX_12}, as in its manifest, got {HEX_12} \(altered or cut short\);", message
    )
    assert message.endswith(f"rebuild with `{manifest.BUILD_COMMAND}`")


def test_a_shared_object_that_is_gone_is_named(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    path = write_folder(package)
    path.unlink()
    assert refusal() == f"{path}: No such file or directory; rebuild with `{manifest.BUILD_COMMAND}`"


@pytest.mark.parametrize(
    ("field", "got", "shown", "expected"),
    [
        ("source_hash", "ab" * 32, "ab" * 6, f"source hash {manifest.source_hash()[:12]}"),
        (
            "dsl",
            "4.8.0",
            "4.8.0",
            f"{manifest.DSL_LIBRARIES_DISTRIBUTION} {manifest.installed_version(manifest.DSL_LIBRARIES_DISTRIBUTION)}",
        ),
        (
            "tvm_ffi",
            "0.1.0",
            "0.1.0",
            f"{manifest.TVM_FFI_DISTRIBUTION} {manifest.installed_version(manifest.TVM_FFI_DISTRIBUTION)}",
        ),
    ],
)
def test_kernels_of_another_source_or_version_are_refused_saying_what_was_expected_and_what_came(
    package: Path,
    nothing_is_loaded: None,
    nothing_is_compiled: None,
    field: str,
    got: str,
    shown: str,
    expected: str,
) -> None:
    write_folder(package, **{field: got})
    assert refusal() == (
        f"{package / manifest.MANIFEST_NAME}: expected {expected}, as in this installation, got {shown}; "
        f"rebuild with `{manifest.BUILD_COMMAND}`"
    )


def test_libraries_that_are_not_installed_are_named(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(package)
    monkeypatch.setattr(manifest, "installed_version", lambda _: None)
    assert f"expected {manifest.DSL_LIBRARIES_DISTRIBUTION} none, as in this installation" in refusal()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected JSON"),
        (b"\xff", "expected JSON"),
        (b"[]", "expected a manifest of format 1, got list"),
        (b'{"format": 2}', "expected a manifest of format 1, got 2"),
        (b'{"format": 1}', "expected all fields of format 1, got none called archs"),
    ],
)
def test_what_is_no_manifest_of_this_format_is_refused_by_name(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None, content: bytes, reason: str
) -> None:
    write_folder(package)
    (package / manifest.MANIFEST_NAME).write_bytes(content)
    message = refusal()
    assert message.startswith(f"{package / manifest.MANIFEST_NAME}: {reason}")
    assert message.endswith(f"rebuild with `{manifest.BUILD_COMMAND}`")


@pytest.mark.parametrize("file", ["greyhound_sm_100a.so", "../elsewhere.so", "/elsewhere.so", None])
def test_a_manifest_that_names_another_file_than_the_arch_s_own_is_refused_by_name(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None, file: str | None
) -> None:
    path = write_folder(package, ("sm_100a",))  # a whole file, but of another arch
    entry = {"file": file, "sha256": manifest.file_hash(path), "functions": [SPEC.name]}
    found = manifest.read(package)
    assert found is not None
    manifest.write(package, found | {"archs": {ARCH: entry}})
    message = refusal()
    assert message == (
        f"{package / manifest.MANIFEST_NAME}: expected greyhound_{ARCH}.so as the file of {ARCH}, got {file}; "
        f"rebuild with `{manifest.BUILD_COMMAND}`"
    )
    assert _artifacts.describe()[0] == message


@pytest.mark.parametrize("what", ["the manifest is a folder", "the folder is a file"])
def test_a_manifest_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, package: Path, nothing_is_loaded: None, nothing_is_compiled: None, what: str
) -> None:
    if what == "the folder is a file":
        package.touch()
    else:
        (package / manifest.MANIFEST_NAME).mkdir(parents=True)
    assert str(package / manifest.MANIFEST_NAME) in refusal()


def test_another_folder_than_the_package_s_is_rebuilt_by_a_command_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    write_folder(tmp_path / "chosen", source_hash="0" * 64)
    monkeypatch.setenv(_artifacts.ARTIFACTS_VARIABLE, str(tmp_path / "chosen"))
    assert refusal().endswith(f"rebuild with `{manifest.BUILD_COMMAND} --out {tmp_path / 'chosen'}`")


def test_an_altered_kernel_in_the_cache_is_refused_with_what_to_delete(
    monkeypatch: pytest.MonkeyPatch, loaded: list[Path], compiles: list[list[str]]
) -> None:
    path = _artifacts.load(ARCH, SPEC)()
    path.write_bytes(flip(0)(path.read_bytes()))
    monkeypatch.setattr(_artifacts, "_modules", {})
    message = refusal()
    assert message.startswith(f"{path}: expected sha256")
    assert message.endswith("delete that folder to have the kernel compiled again")
    assert len(compiles) == len(loaded) == 1
    shutil.rmtree(path.parent)
    assert _artifacts.load(ARCH, SPEC)() == path


def test_a_file_that_the_dynamic_loader_refuses_is_named(package: Path) -> None:
    path = write_folder(package)  # its hash is right, but it is no shared object
    assert refusal().startswith(f"{path}: cannot be loaded: ")


# The DSL's wheels


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put distributions before those that are really installed: a name's suffix and its version."""

    def install(**versions: str) -> None:
        for suffix, version in versions.items():
            name = "-".join([manifest.DSL_DISTRIBUTION, *(["libs", suffix] if suffix != "dsl" else [])])
            folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return install


EQUAL = {"dsl": "9.1", "base": "9.1", "core": "9.1", "cu12": "9.1", "cu13": "9.1"}


@pytest.mark.parametrize("other", ["base", "core", "cu12", "cu13"])
def test_libraries_of_the_dsl_in_several_versions_are_refused_by_name_with_what_to_do(
    package: Path,
    nothing_is_loaded: None,
    nothing_is_compiled: None,
    installed: Callable[..., None],
    other: str,
) -> None:
    installed(**EQUAL | {other: "9.0"})
    write_folder(package)
    message = refusal()
    assert message.startswith("expected the DSL in one version, since its wheels write into one folder, got ")
    for suffix in ("base", "core", "cu12", "cu13"):
        assert f"{manifest.DSL_DISTRIBUTION}-libs-{suffix} {'9.0' if suffix == other else '9.1'}" in message
    names = " ".join(re.findall(rf"({manifest.DSL_DISTRIBUTION}\S*) 9", message))
    assert message.endswith(
        f"`python -m pip uninstall {names}`, then `python -m pip install '{manifest.DSL_DISTRIBUTION}[cu13]==9.1'`"
    )
    assert _artifacts.describe()[0] == message


def test_the_dsl_in_one_version_is_accepted_whichever_it_is(
    package: Path, loaded: list[Path], installed: Callable[..., None]
) -> None:
    installed(**EQUAL)
    path = write_folder(package)
    assert _artifacts.load(ARCH, SPEC)() == path
    assert _artifacts.describe()[0] == f"{path}: 1 kernel for {ARCH}"


def test_a_library_of_the_dsl_that_is_not_installed_clashes_with_none(
    package: Path, loaded: list[Path], without_dsl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = manifest.installed_version
    absent = f"{manifest.DSL_DISTRIBUTION}-libs-cu12"
    monkeypatch.setattr(manifest, "installed_version", lambda name: None if name == absent else present(name))
    path = write_folder(package)
    assert _artifacts.load(ARCH, SPEC)() == path


def test_the_versions_of_the_dsl_s_libraries_are_compared_before_the_first_kernel_only(
    package: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = manifest.installed_version
    monkeypatch.setattr(manifest, "installed_version", lambda name: asked.append(name) or real(name))
    write_folder(package)
    _artifacts.load(ARCH, SPEC)
    assert f"{manifest.DSL_DISTRIBUTION}-libs-cu12" in asked
    asked.clear()
    _artifacts.load(ARCH, SPEC)
    assert f"{manifest.DSL_DISTRIBUTION}-libs-cu12" not in asked


# The cache


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Let nothing but the code itself keep others out."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask", "loaded", "compiles")
def test_the_cache_is_made_for_this_user_alone() -> None:
    folder = _artifacts.load(ARCH, SPEC)().parent
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_the_cache_is_under_the_user_s_cache_folder_unless_a_variable_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _artifacts.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv(_artifacts.CACHE_VARIABLE)
    assert _artifacts.cache_folder() == tmp_path / "xdg" / "greyhound"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _artifacts.cache_folder() == tmp_path / "home" / ".cache" / "greyhound"


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "with a kernel"])
@pytest.mark.parametrize("level", ["cache", "entry"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])  # the group, anyone, anyone as in /tmp
def test_a_cache_that_others_may_write_is_refused_before_anything_is_loaded_or_compiled(
    tmp_path: Path, loaded: list[Path], compiles: list[list[str]], mode: int, level: str, filled: bool
) -> None:
    entry = _artifacts.load(ARCH, SPEC)().parent
    if not filled:
        for path in entry.iterdir():
            path.unlink()
    _artifacts._modules.clear()
    open_folder = tmp_path / "cache" if level == "cache" else entry
    open_folder.chmod(mode)
    message = refusal()
    assert message.startswith(f"{open_folder}: expected a folder of user {os.getuid()} that no one else can write")
    assert f"mode {mode:o}; set {_artifacts.CACHE_VARIABLE}" in message
    assert len(compiles) == len(loaded) == 1  # those of the set-up


def test_a_cache_that_others_may_read_is_used(tmp_path: Path, loaded: list[Path], compiles: list[list[str]]) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    assert _artifacts.load(ARCH, SPEC)().parents[1] == tmp_path / "cache"


def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    message = refusal()
    assert message.startswith(f"{tmp_path / 'cache'}: expected a folder of user {owner + 1}")
    assert f"got owner {owner}, mode 700" in message
    assert _artifacts.describe()[1] == message


def test_a_link_of_this_user_to_a_folder_of_this_user_is_used_as_the_cache(
    tmp_path: Path, loaded: list[Path], compiles: list[list[str]]
) -> None:
    (tmp_path / "large disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "large disk")
    assert _artifacts.load(ARCH, SPEC)().is_file()
    assert len(list((tmp_path / "large disk").iterdir())) == 1


def test_a_link_of_another_user_is_refused_wherever_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    # Its owner could point it elsewhere once it was checked.
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "mine")
    real = Path.lstat
    owner = os.getuid() + 1

    def lstat(path: Path) -> os.stat_result:
        fields = list(real(path))
        fields[stat.ST_UID] = owner if stat.S_ISLNK(fields[stat.ST_MODE]) else fields[stat.ST_UID]
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", lstat)
    message = refusal()
    assert message.startswith(f"{tmp_path / 'cache'}: expected a folder of user {os.getuid()}")
    assert f"got a link of user {owner}; set {_artifacts.CACHE_VARIABLE}" in message
    assert _artifacts.describe()[1] == message


@pytest.mark.parametrize("level", [".", ".cache", ".cache/greyhound"])
def test_a_home_folder_that_cannot_be_searched_is_named_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None, nothing_is_compiled: None, level: str
) -> None:
    # As in a container that runs under another user than its image was made for.
    closed = (tmp_path / level).resolve()
    real = os.stat

    def no_permission(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if closed in Path(os.fspath(path) if not isinstance(path, int) else "/").parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    def no_folder(path: Any, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.delenv(_artifacts.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "greyhound" / "entry").mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(os, "stat", no_permission)
    monkeypatch.setattr(os, "mkdir", no_folder)
    monkeypatch.setattr(os, "scandir", no_folder)
    message = refusal()
    assert "Permission denied" in message
    assert f"set {_artifacts.CACHE_VARIABLE} to a folder that can" in message
    line = _artifacts.describe()[1]
    assert line.startswith(str(tmp_path / ".cache" / "greyhound"))


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as in some containers."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", _artifacts.CACHE_VARIABLE):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_folder_the_variable_for_the_cache_is_named(
    homeless: None, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    message = refusal()
    assert re.match(rf"no home folder for a cache .*; set {_artifacts.CACHE_VARIABLE} to a folder", message)
    assert _artifacts.describe()[1] == message


def test_kernels_built_ahead_need_no_home_folder(package: Path, homeless: None, loaded: list[Path]) -> None:
    path = write_folder(package)
    assert _artifacts.load(ARCH, SPEC)() == path


def test_a_home_folder_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    def read_only(path: str, mode: int = 0o777) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.delenv(_artifacts.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "mkdir", read_only)
    message = refusal()
    assert message.startswith(str(tmp_path / ".cache" / "greyhound"))
    assert "Read-only file system" in message
    assert f"set {_artifacts.CACHE_VARIABLE} to a folder that can" in message


def test_a_cache_that_is_a_file_is_refused_by_name(
    tmp_path: Path, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    (tmp_path / "cache").touch()
    assert "File exists" in refusal()


def test_a_kernel_in_a_cache_that_cannot_be_written_any_more_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path], compiles: list[list[str]]
) -> None:
    path = _artifacts.load(ARCH, SPEC)()
    _artifacts._modules.clear()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_artifacts, "_exclusive", read_only)
    assert _artifacts.load(ARCH, SPEC)() == path
    assert len(compiles) == 1


# Compiling


def test_a_failing_compile_says_what_was_run_and_what_it_printed_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho to stdout\necho ptxas is out of sorts >&2\nexit 3\n")
    python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        message = refusal()
    assert message.startswith(f"no kernel {SPEC.name} for {ARCH}: `{python} -P -m dsl_kernels.build --arch {ARCH}")
    assert message.endswith("failed with exit code 3:\nto stdout\nptxas is out of sorts\n")
    monkeypatch.setattr(_artifacts, "_compile_into", lambda folder, *_: write_folder(folder))
    assert _artifacts.load(ARCH, SPEC)().parents[1] == tmp_path / "cache"


def test_a_python_that_cannot_be_started_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")  # as where Python is embedded
    assert "/nonexistent/python" in refusal()


def test_a_build_that_leaves_no_kernel_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None
) -> None:
    monkeypatch.setattr(_artifacts, "_compile_into", lambda folder, *_: write_folder(folder, functions=[]))
    assert f"expected kernel {SPEC.name} for {ARCH}, got none" in refusal()


def test_eight_threads_at_once_compile_once_and_load_once(loaded: list[Path], compiles: list[list[str]]) -> None:
    together = threading.Barrier(8)
    functions: list[Callable[..., Any]] = []

    def load() -> None:
        together.wait()
        functions.append(_artifacts.load(ARCH, SPEC))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(functions) == 8
    assert len(set(functions)) == len(loaded) == len(compiles) == 1


# Several processes, and killed ones


BUILDER = """
    import os, pathlib, signal, time
    from dsl_kernels import build

    at, log = os.environ["TEST_AT"], os.environ["TEST_LOG"]
    out = sys.argv[sys.argv.index("--out") + 1]

    def note(what):
        with open(log, "a") as stream:
            stream.write(f"{what} {out}\\n")

    def reach(stage):
        if at == f"builder killed {stage}":
            os.kill(os.getpid(), signal.SIGKILL)
        if at == f"caller killed {stage}":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.5)

    def compile_objects(work, jobs):
        for spec, arch, path in work:
            pathlib.Path(path).write_text(spec.name[:4])
            reach("compiling")
            pathlib.Path(path).write_text(spec.name)
            yield spec, arch, 0.0

    def link(objects, library):
        library.write_bytes(b"".join(path.read_bytes() for path in objects))

    def replace(source, target):
        reach(f"before {os.path.basename(target)} is there")
        real_replace(source, target)

    build.compile_objects, build.link = compile_objects, link
    real_replace, os.replace = os.replace, replace
    note("begin")
    time.sleep(0.1)
    try:
        build.main(sys.argv[sys.argv.index("dsl_kernels.build") + 1 :])
    finally:
        note("end")
"""
"""The real build with a compiler and a linker that write the kernel's name."""

LOADER = """
    import json, os, types
    from dsl_kernels import manifest
    from dsl_kernels.cross_entropy import plan
    from greyhound import _artifacts

    sys.executable, n_processes, *names = sys.argv[1:]
    specs = [spec for spec in plan.SPECS if spec.name in names]
    sys.modules["tvm_ffi"] = types.SimpleNamespace(load_module=lambda path: {spec.name: path for spec in specs})
    _artifacts._runtime_libraries.append(None)
    begin, hold = os.pipe()
    children = []
    for number in range(int(n_processes)):
        answers, answer = os.pipe()
        if os.fork() == 0:
            os.close(hold)
            os.read(begin, 1)  # until the parent closes the other end
            paths = [_artifacts.load("sm_90a", spec) for spec in specs[number % len(specs) :] + specs]
            os.write(answer, json.dumps(sorted(set(paths))).encode())
            os._exit(0)
        os.close(answer)
        children.append(answers)
    os.close(hold)
    print(json.dumps([json.loads(open(answers).read()) for answers in children]))
"""


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Compile with `BUILDER`; return what it noted, and for which folder."""
    (tmp_path / "builder.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(BUILDER)}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/builder.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TEST_AT", "never")
    return lambda: (tmp_path / "log").read_text().splitlines()


def start_loader(folder: Path, n_processes: int, *specs: Spec) -> subprocess.Popen[str]:
    """Start processes that ask for the same kernels; nothing is really loaded."""
    path = folder / "loader.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(LOADER)}")
    write_folder(folder / "other", functions=[])  # a checkout may hold kernels that were built ahead
    return subprocess.Popen(
        [PYTHON, str(path), sys.executable, str(n_processes), *(spec.name for spec in specs)],
        env=os.environ | {_artifacts.ARTIFACTS_VARIABLE: str(folder / "other")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_at_once_compile_each_kernel_once_and_agree(
    tmp_path: Path, builds: Callable[[], list[str]]
) -> None:
    out, error = start_loader(tmp_path, 8, *plan.SPECS[:3]).communicate(timeout=60)
    assert not error
    answers = json.loads(out)
    assert len(answers) == 8
    assert [len(paths) for paths in answers] == [3] * 8
    assert all(paths == answers[0] for paths in answers)
    folders = sorted(line.removeprefix("begin ") for line in builds() if line.startswith("begin"))
    assert folders == sorted(str(Path(path).parent) for path in answers[0])


STAGES = ("compiling", f"before greyhound_{ARCH}.so is there", f"before {manifest.MANIFEST_NAME} is there")


@pytest.mark.parametrize("stage", STAGES)
def test_a_builder_that_is_killed_leaves_nothing_that_is_loaded_or_in_the_way(
    tmp_path: Path, loaded: list[Path], builds: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TEST_AT", f"builder killed {stage}")
        assert f"failed with exit code {-signal.SIGKILL}" in refusal()
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.iterdir())) > 1  # beside the lock
    assert manifest.read(folder) is None
    assert not loaded
    path = _artifacts.load(ARCH, SPEC)()
    assert path.read_text() == SPEC.name
    assert sorted(left.name for left in folder.iterdir()) == [".lock", path.name, manifest.MANIFEST_NAME]


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_caller_is_killed_no_second_builder_starts_while_its_own_still_writes(
    tmp_path: Path, loaded: list[Path], builds: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TEST_AT", f"caller killed {stage}")
        start_loader(tmp_path, 1, SPEC).communicate(timeout=60)
    assert _artifacts.load(ARCH, SPEC)().read_text() == SPEC.name
    noted = [line.split()[0] for line in builds()]
    assert noted == ["begin", "end"] * (len(noted) // 2)


def test_a_rebuild_writes_into_no_file_that_a_process_has_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process has its kernels mapped: written in place they would change under it.
    monkeypatch.setattr(build, "compile_objects", lambda work, jobs: iter(()))
    monkeypatch.setattr(build, "link", lambda objects, library: library.write_bytes(b"first"))
    build.build([SPEC], [ARCH], tmp_path, 1)
    files = [tmp_path / manifest.object_name(ARCH), tmp_path / manifest.MANIFEST_NAME]
    before = [path.read_bytes() for path in files]
    opened = [path.open("rb") for path in files]
    monkeypatch.setattr(build, "link", lambda objects, library: library.write_bytes(b"second"))
    build.build([SPEC], [ARCH], tmp_path, 1)
    for path, content, stream in zip(files, before, opened, strict=True):
        with stream:
            assert stream.read() == content
        assert path.read_bytes() != content


# What it says of a machine


def test_describe_says_where_there_is_nothing_and_how_to_build(tmp_path: Path, package: Path) -> None:
    assert _artifacts.describe() == [
        f"{package}: none; build with `{manifest.BUILD_COMMAND}`",
        f"{tmp_path / 'cache'}: 0 kernels compiled on first use",
    ]


def test_describe_counts_kernels_without_loading_them(
    package: Path, nothing_is_loaded: None, nothing_is_compiled: None
) -> None:
    write_folder(package, ("sm_100a", ARCH), functions=[SPEC.name, OTHER_SPEC.name])
    lines = _artifacts.describe()
    assert lines[:-1] == [f"{package / manifest.object_name(arch)}: 2 kernels for {arch}" for arch in ("sm_100a", ARCH)]
    write_folder(package)
    assert _artifacts.describe()[0] == f"{package / manifest.object_name(ARCH)}: 1 kernel for {ARCH}"


def test_describe_names_an_altered_file_beside_a_whole_one(package: Path) -> None:
    altered = write_folder(package, ("sm_100a", ARCH))
    altered.write_bytes(b"")
    first, second, _ = _artifacts.describe()
    assert first.startswith(f"{altered}: expected sha256")
    assert second == f"{package / manifest.object_name(ARCH)}: 1 kernel for {ARCH}"


@pytest.mark.parametrize("problem", ["source", "object"])
def test_describe_says_why_kernels_are_refused_in_a_short_line(package: Path, problem: str) -> None:
    path = write_folder(package, **({"source_hash": "ab" * 32} if problem == "source" else {}))
    if problem == "object":
        path.write_bytes(b"")
    line = _artifacts.describe()[0]
    assert line == refusal()
    assert not re.search("[0-9a-f]{13}", line.replace(str(package), ""))
    assert len(line.replace(str(package), "")) <= 160


def test_describe_counts_what_was_compiled_on_first_use_and_what_is_left_of_older_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path], compiles: list[list[str]]
) -> None:
    _artifacts.load(ARCH, SPEC)
    assert _artifacts.describe()[1] == f"{tmp_path / 'cache'}: 1 kernel compiled on first use"
    _artifacts.load("sm_100a", SPEC)
    write_folder(tmp_path / "cache" / "old", source_hash="0" * 64)
    assert _artifacts.describe()[1] == (
        f"{tmp_path / 'cache'}: 2 kernels compiled on first use, 1 from another source or version"
    )


# One kernel compiled and loaded


COMPILE_IN_TWO_PROCESSES = """
    import json, os, pathlib, subprocess, time
    started, log, name = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    real_run = subprocess.run

    def run(command, **options):
        with open(log, "a") as stream:
            print(*command, file=stream)
        return real_run(command, **options)

    subprocess.run = run
    from dsl_kernels.cross_entropy import plan
    from greyhound import _artifacts
    import tvm_ffi  # so that both arrive at the lock together
    (started / str(os.getpid())).touch()
    while len(list(started.iterdir())) < 2:
        time.sleep(0.005)
    (spec,) = [spec for spec in plan.SPECS if spec.name == name]
    function = _artifacts.load("sm_90a", spec)
    try:
        function()
    except TypeError as error:
        signature = str(error)
    print(json.dumps({"signature": signature, "compiler": "cutlass" in sys.modules}))
"""

LOAD_THEN_COMPILE = """
    import json
    from dsl_kernels import manifest
    from dsl_kernels.cross_entropy import plan
    from greyhound import _artifacts
    (spec,) = [spec for spec in plan.SPECS if spec.name == sys.argv[1]]
    real_version = manifest.installed_version
    manifest.installed_version = lambda name: None if name == manifest.DSL_DISTRIBUTION else real_version(name)
    function = _artifacts.load("sm_90a", spec)
    report = {"compiler": "cutlass" in sys.modules}
    from dsl_kernels import build
    build.compile_object((spec, "sm_90a", sys.argv[2]))
    print(json.dumps(report | {"path": [str(path) for path, _ in _artifacts._modules]}))
"""


def start(script: str, *arguments: object, cwd: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start Python on a script, in a folder whose modules must not stand in for the standard library's."""
    path = cwd / "script" / "script.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(script)}")
    (cwd / "argparse.py").write_text("raise SystemExit('the current folder was searched for modules')")
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a process and return what it printed."""
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    report: dict[str, Any] = json.loads(out)
    return report


class FirstUse(NamedTuple):
    """What two processes did that asked for one kernel at once, the cache being empty."""

    cache: Path
    reports: list[dict[str, Any]]
    commands: list[str]


@pytest.fixture(scope="module")
def first_use(tmp_path_factory: pytest.TempPathFactory) -> FirstUse:
    """Compile one kernel on first use."""
    folder = tmp_path_factory.mktemp("first_use")
    (folder / "started").mkdir()
    # A checkout may hold kernels that were built ahead; a chosen folder without this one is passed over.
    write_folder(folder / "other", functions=[])
    environment = {
        _artifacts.CACHE_VARIABLE: str(folder / "cache"),
        _artifacts.ARTIFACTS_VARIABLE: str(folder / "other"),
    }
    arguments = (folder / "started", folder / "log", SPEC.name)
    processes = [start(COMPILE_IN_TWO_PROCESSES, *arguments, cwd=folder, environment=environment) for _ in range(2)]
    reports = [report_of(process) for process in processes]
    return FirstUse(folder / "cache", reports, (folder / "log").read_text().splitlines())


def test_a_compile_on_first_use_gives_the_launcher(first_use: FirstUse) -> None:
    for report in first_use.reports:
        assert "source: Tensor" in report["signature"]
        assert "grad_loss: Tensor" in report["signature"]


def test_two_processes_at_once_compile_once(first_use: FirstUse) -> None:
    (command,) = first_use.commands
    (folder,) = first_use.cache.iterdir()
    assert f"--arch {ARCH} --spec {SPEC.name} --out {folder}" in command
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "greyhound_sm_90a.so", manifest.MANIFEST_NAME]


def test_a_compile_on_first_use_imports_no_compiler_into_the_calling_process(first_use: FirstUse) -> None:
    assert [report["compiler"] for report in first_use.reports] == [False, False]


def test_a_compiled_kernel_loads_without_the_compiler_and_lets_the_compiler_be_imported_later(
    first_use: FirstUse, tmp_path: Path
) -> None:
    # Kernels and compiler share a library: other packages of the process may compile theirs.
    (folder,) = first_use.cache.iterdir()
    environment = {_artifacts.ARTIFACTS_VARIABLE: str(folder), _artifacts.CACHE_VARIABLE: str(tmp_path / "unused")}
    report = report_of(
        start(LOAD_THEN_COMPILE, SPEC.name, tmp_path / "compiled.o", cwd=tmp_path, environment=environment)
    )
    assert report == {"compiler": False, "path": [str(folder / "greyhound_sm_90a.so")]}
    assert (tmp_path / "compiled.o").stat().st_size > 0
    assert not (tmp_path / "unused").exists()
