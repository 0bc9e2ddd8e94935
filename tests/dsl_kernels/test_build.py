"""The ahead-of-time build: one real build of two kernels for two archs, and the build's own logic over a compiler that
is quick because it compiles an empty function.
"""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import greyhound
from dsl_kernels import build, manifest
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ARCHS, Spec

ROOT = Path(build.__file__).parents[1]
SCALE = next(spec for spec in plan.SPECS if spec.op == "scale")
LOSS = next(spec for spec in plan.SPECS if spec.op == "fused" and not spec.grad and not spec.streamed)
BUILT = (SCALE, LOSS)
"""One kernel of each class."""
BUILT_ARCHS = ("sm_90a", "sm_120a")
"""The first and the last, which has less shared memory."""


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return everything in a folder, leftovers included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_whole(folder: Path) -> bool:
    """Return whether a folder's manifest names this source and files that are there, as they were built."""
    found = manifest.read(folder)
    return (
        found is not None
        and found["source_hash"] == manifest.source_hash()
        and all(manifest.file_hash(folder / entry["file"]) == entry["sha256"] for entry in found["archs"].values())
    )


def exported(library: Path) -> set[str]:
    """Return the kernels that a shared object offers to the loader."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r" T __tvm_ffi_(\w+)$", listed, re.MULTILINE))


def gpu_archs(library: Path) -> set[int]:
    """Return the compute capabilities (90 for 9.0) of the GPU objects inside a shared object."""
    content = library.read_bytes()
    starts = [found.start() for found in re.finditer(rb"\x7fELF", content)]
    cuda_machine = 190
    return {
        struct.unpack_from("<I", content, start + 48)[0] >> 8 & 0xFF
        for start in starts
        if struct.unpack_from("<H", content, start + 18)[0] == cuda_machine
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that the command line wrote, started elsewhere, and the lines it printed."""
    folder = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "dsl_kernels.build", "-j", "2", "--out", "out", "--arch", *BUILT_ARCHS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--spec", *(spec.name for spec in BUILT)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout.splitlines()


def test_a_build_leaves_a_whole_manifest_and_the_files_it_names_and_nothing_else(real: tuple[Path, list[str]]) -> None:
    folder, _ = real
    assert is_whole(folder)
    assert sorted(snapshot(folder.parent)) == sorted(
        f"out/{name}" for name in (manifest.MANIFEST_NAME, *map(manifest.object_name, BUILT_ARCHS))
    )


def test_a_build_records_the_versions_that_it_was_made_with(real: tuple[Path, list[str]]) -> None:
    found = manifest.read(real[0])
    assert found is not None
    assert found["dsl"] == manifest.installed_version(manifest.DSL_LIBRARIES_DISTRIBUTION)
    assert found["tvm_ffi"] == manifest.installed_version(manifest.TVM_FFI_DISTRIBUTION)


@pytest.mark.parametrize("arch", BUILT_ARCHS)
def test_the_shared_object_of_an_arch_exports_every_function_that_the_manifest_lists(
    real: tuple[Path, list[str]], arch: str
) -> None:
    found = manifest.read(real[0])
    assert found is not None
    names = [spec.name for spec in BUILT]
    assert found["archs"][arch]["functions"] == sorted(names)
    assert exported(real[0] / found["archs"][arch]["file"]) == set(names)


@pytest.mark.parametrize("arch", BUILT_ARCHS)
def test_the_shared_object_of_an_arch_holds_machine_code_of_that_arch_alone(
    real: tuple[Path, list[str]], arch: str
) -> None:
    assert gpu_archs(real[0] / manifest.object_name(arch)) == {int(arch[len("sm_") : -1])}


def test_a_build_prints_a_line_for_each_kernel_and_a_last_one(real: tuple[Path, list[str]]) -> None:
    _, lines = real
    parsed = [re.fullmatch(r"\[ +(\d+)/4\] (\w+) (\w+) \d+\.\d s", line) for line in lines[:-1]]
    assert all(parsed), lines
    assert [int(line[1]) for line in parsed if line] == [1, 2, 3, 4]
    assert {(line[2], line[3]) for line in parsed if line} == {(a, spec.name) for a in BUILT_ARCHS for spec in BUILT}
    assert re.fullmatch(r"2 kernels for sm_90a, sm_120a in out: \d+ s", lines[-1])


Install = Callable[[str], None]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replace `compile_object` by the given body, in a module that the worker processes can import too."""

    def install(body: str) -> None:
        folder = tmp_path / "compiler"
        folder.mkdir(exist_ok=True)
        source = "import os, signal, subprocess, time\n\ndef compile_object(job):\n    spec, arch, path = job\n"
        source += textwrap.indent(textwrap.dedent(body), "    ")
        (folder / "stand_in_compiler.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("stand_in_compiler", None)
        import stand_in_compiler

        monkeypatch.setattr(build, "compile_object", stand_in_compiler.compile_object)

    return install


EMPTY_FUNCTION = """
source = f"int __tvm_ffi_{spec.name}(void) {{ return 0; }}"
subprocess.run(["cc", "-fPIC", "-c", "-x", "c", "-", "-o", path], input=source, text=True, check=True)
return spec, arch, 0.25
"""


@pytest.fixture
def out(tmp_path: Path, compiler: Install) -> Path:
    """A folder with one kernel for two archs; builds into it are quick."""
    compiler(EMPTY_FUNCTION)
    build.build([SCALE], ["sm_90a", "sm_100a"], tmp_path / "out", 1, progress=False)
    return tmp_path / "out"


def linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Link with a shell script; return its path."""
    path = tmp_path / "linker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    return path


def test_building_one_arch_keeps_the_others_of_the_same_source(out: Path) -> None:
    before = snapshot(out)
    build.build([LOSS], ["sm_90a"], out, 1, progress=False)
    found = manifest.read(out)
    assert found is not None
    assert {arch: entry["functions"] for arch, entry in found["archs"].items()} == {
        "sm_90a": [LOSS.name],  # an arch's shared object is replaced as a whole
        "sm_100a": [SCALE.name],
    }
    assert is_whole(out)
    assert snapshot(out)["greyhound_sm_100a.so"] == before["greyhound_sm_100a.so"]


@pytest.mark.parametrize("field", ["source_hash", "dsl", "tvm_ffi"])
def test_building_one_arch_drops_the_others_of_another_source_or_version(out: Path, field: str) -> None:
    earlier = manifest.read(out)
    assert earlier is not None
    manifest.write(out, earlier | {field: "another"})
    build.build([SCALE], ["sm_90a"], out, 1, progress=False)
    found = manifest.read(out)
    assert found is not None
    assert list(found["archs"]) == ["sm_90a"]
    assert sorted(snapshot(out)) == ["greyhound_sm_90a.so", manifest.MANIFEST_NAME]  # none left to be shipped


def test_a_manifest_that_cannot_be_read_does_not_keep_a_folder_from_being_built(out: Path) -> None:
    (out / manifest.MANIFEST_NAME).write_text("garbage")
    build.build([SCALE], ["sm_90a"], out, 1, progress=False)
    assert is_whole(out)


def test_files_that_are_no_kernels_are_left_alone(out: Path) -> None:
    (out / "notes.so").write_text("mine")
    build.build([SCALE], ["sm_90a"], out, 1, progress=False)
    assert (out / "notes.so").read_text() == "mine"


def test_the_manifest_is_written_when_every_file_it_names_is_there(
    out: Path, compiler: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    real_write = manifest.write

    def write(folder: Path, content: dict) -> None:
        for entry in content["archs"].values():
            assert manifest.file_hash(folder / entry["file"]) == entry["sha256"]
        written.append(sorted(content["archs"]))
        real_write(folder, content)

    monkeypatch.setattr(manifest, "write", write)
    build.build([LOSS, SCALE], ["sm_90a", "sm_120a"], out, 2, progress=False)
    assert written == [["sm_100a", "sm_120a", "sm_90a"]]


def test_a_failing_link_says_why_and_leaves_the_folder_as_it_was(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(out)
    # The first arch links, the second does not.
    path = linker(tmp_path, monkeypatch, 'case "$*" in *sm_100a.so*) echo no space >&2; exit 1;; esac; exec cc "$@"')
    with pytest.raises(RuntimeError, match=rf"{path} could not link greyhound_sm_100a.so:\nno space"):
        build.build([LOSS], ["sm_90a", "sm_100a"], out, 1, progress=False)
    assert snapshot(out) == before
    assert is_whole(out)


def test_a_failing_compile_names_kernel_and_arch_and_leaves_the_folder_as_it_was(out: Path, compiler: Install) -> None:
    before = snapshot(out)
    compiler("raise ValueError('no such type')")
    with pytest.raises(RuntimeError, match=f"{LOSS.name} could not be compiled for sm_120a: no such type"):
        build.build([LOSS], ["sm_120a"], out, 1, progress=False)
    assert snapshot(out) == before


def test_a_compiling_process_that_dies_ends_the_build_instead_of_hanging_it(out: Path, compiler: Install) -> None:
    before = snapshot(out)
    compiler("os.kill(os.getpid(), signal.SIGKILL)")  # as the system does when memory runs out
    with pytest.raises(RuntimeError, match="a compiling process died"):
        build.build([LOSS], ["sm_90a"], out, 1, progress=False)
    assert snapshot(out) == before


def test_a_killed_build_leaves_the_old_folder_usable_and_no_process_behind(out: Path, tmp_path: Path) -> None:
    before = snapshot(out)
    script = tmp_path / "killed.py"
    worker = tmp_path / "worker"
    script.write_text(
        textwrap.dedent(f"""
            import os, time
            from pathlib import Path
            from dsl_kernels import build

            def compile_object(job):
                Path({str(worker)!r}).write_text(str(os.getpid()))
                time.sleep(300)

            if __name__ == "__main__":
                build.compile_object = compile_object
                build.main(["--arch", "sm_90a", "--spec", {SCALE.name!r}, "--out", {str(out)!r}, "-j", "1"])
        """)
    )
    process = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: worker.exists() and bool(worker.read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(int(worker.read_text())))
    after = snapshot(out)
    assert {name: after.get(name) for name in before} == before
    build.build([LOSS], ["sm_90a"], out, 1, progress=False)  # and the next build works
    assert is_whole(out)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll; fail where the condition never holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether a process runs: one that ended may still wait to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_source_file_changed_during_the_build_makes_a_mismatch(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = iter(["before", "after"])
    current = [next(hashes)]
    monkeypatch.setattr(manifest, "source_hash", lambda: current[0])
    real_objects = build.compile_objects

    def edited_meanwhile(*arguments: object) -> object:
        current[0] = next(hashes)
        return real_objects(*arguments)

    monkeypatch.setattr(build, "compile_objects", edited_meanwhile)
    build.build([SCALE], ["sm_90a"], out, 1, progress=False)
    found = manifest.read(out)
    assert found is not None
    assert found["source_hash"] == "before"


def test_the_linker_may_be_named_with_options(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linker(tmp_path, monkeypatch, f'echo "$1" > {tmp_path}/seen; shift; exec cc "$@"')
    monkeypatch.setenv("CC", f"{path} --an-option")
    build.build([SCALE], ["sm_90a"], out, 1, progress=False)
    assert (tmp_path / "seen").read_text() == "--an-option\n"


def test_a_missing_linker_is_named_with_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"no C compiler found.*install gcc or set CC"):
        build.link([], tmp_path / "greyhound_sm_90a.so")


@pytest.mark.parametrize(
    "name", [manifest.DSL_DISTRIBUTION, manifest.DSL_LIBRARIES_DISTRIBUTION, manifest.TVM_FFI_DISTRIBUTION]
)
def test_a_missing_distribution_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(manifest, "installed_version", lambda asked: None if asked == name else "1.0")
    with pytest.raises(ModuleNotFoundError, match=f"needs {name}: pip install"):
        build.build([SCALE], ["sm_90a"], tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Spec], list[str], Path, int]]:
    """Return what the command line asks to be built; nothing is."""
    calls: list[tuple[list[Spec], list[str], Path, int]] = []
    monkeypatch.setattr(build, "build", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--arch", "sm_80"], "argument --arch: invalid choice: 'sm_80'"),  # older than any that is served
        (["--arch", "sm_90"], "argument --arch: invalid choice: 'sm_90'"),  # an arch, but not with its features
        (["--arch"], "argument --arch: expected at least one argument"),
        (["--spec", "ce_fused_float64"], "argument --spec: invalid choice: 'ce_fused_float64'"),
        (["-j", "0"], "-j: expected at least 1, got 0"),
        (["-j", "-1"], "-j: expected at least 1, got -1"),
        (["-j", "two"], "argument -j: invalid int value: 'two'"),
        (["sm_90a"], "unrecognized arguments: sm_90a"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_before_anything_is_built(
    asked: list, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        build.main(arguments)
    assert exit_code.value.code == 2
    assert reason in capsys.readouterr().err
    assert not asked


def test_without_arguments_every_kernel_is_built_for_every_arch_where_the_loader_looks_first(asked: list) -> None:
    assert build.main([]) == 0
    ((specs, archs, out, jobs),) = asked
    assert (specs, archs) == (list(plan.SPECS), list(ARCHS))
    assert out == Path(greyhound.__file__).parent / "artifacts"
    assert jobs == os.cpu_count()


def test_what_is_named_twice_is_built_once(asked: list, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--arch", "sm_100a", "sm_90a", "sm_100a", "--spec", SCALE.name, SCALE.name, "--out", "o", "-j", "3"]
    assert build.main(twice) == 0
    assert asked == [([SCALE], ["sm_100a", "sm_90a"], Path("o"), 3)]
    assert capsys.readouterr().out.startswith("1 kernel for sm_100a, sm_90a in o: ")


def test_more_kernels_than_workers_are_kept_for_are_all_compiled(
    out: Path, compiler: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TASKS_PER_WORKER", 1)
    compiler("return spec, arch, float(os.getpid())")
    specs = plan.SPECS[:3]
    done = list(build.compile_objects([(spec, "sm_90a", "") for spec in specs], 2))
    assert {spec for spec, _, _ in done} == set(specs)
    # Two workers take two kernels (or one of them both), a fresh one the third.
    assert done[2][2] not in {done[0][2], done[1][2]}


def test_a_failing_compile_gives_up_the_rest(tmp_path: Path, compiler: Install) -> None:
    started = tmp_path / "started"
    started.mkdir()
    compiler(f"""
        first = not os.listdir({str(started)!r})
        open(os.path.join({str(started)!r}, spec.name), "x").close()
        if first:
            raise ValueError("no such type")
        time.sleep(0.1)
        return spec, arch, 0.1
    """)
    with pytest.raises(RuntimeError, match="no such type"):
        list(build.compile_objects([(spec, "sm_90a", "") for spec in plan.SPECS], 1))
    assert len(list(started.iterdir())) <= 4  # those that the worker held by then
