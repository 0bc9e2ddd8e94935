"""What every file of the project must keep to, and what must be the same in two places."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

import greyhound
from dsl_kernels import manifest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LIBRARIES = ("greyhound", "dsl_kernels")


def tracked() -> list[Path]:
    """Return the files that git has or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def requirement(name: str, requirements: list[str]) -> str:
    """Return what is demanded of a distribution, without its name and extras."""
    (found,) = [text for text in requirements if re.match(rf"{name}(\[\w+\])?(?![\w-])", text)]
    return re.sub(r"^[\w-]+(\[\w+\])?", "", found)


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_a_tool_has_the_same_version_in_the_extra_and_in_the_hooks(tool: str) -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    in_hooks = set(re.findall(rf"additional_dependencies: \[{tool}(==[\d.]+)\]", hooks))
    assert in_hooks == {requirement(tool, PROJECT["project"]["optional-dependencies"]["test"])}


@pytest.mark.parametrize("name", [manifest.DSL_DISTRIBUTION, manifest.TVM_FFI_DISTRIBUTION])
def test_what_compiles_kernels_is_pinned_exactly(name: str) -> None:
    assert re.fullmatch(r"==[\w.]+", requirement(name, PROJECT["project"]["dependencies"]))


def test_the_constraints_pin_a_torch_that_the_package_accepts() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    least = requirement("torch", PROJECT["project"]["dependencies"]).removeprefix(">=")
    assert [int(part) for part in pins["torch"].split(".")] >= [int(part) for part in least.split(".")]


def test_the_matrix_tries_every_python_and_the_least_torch_that_the_package_claims() -> None:
    matrix = runpy.run_path(str(ROOT / ".ci" / "matrix.py"))
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert found is not None
    accepted = [f"3.{minor}" for minor in range(int(found[1]), int(found[2]))]
    classifiers = PROJECT["project"]["classifiers"]
    assert [text.split(" :: ")[-1] for text in classifiers if "Python :: 3." in text] == accepted
    assert list(matrix["PYTHONS"]) == accepted
    assert f"{requirement('torch', PROJECT['project']['dependencies'])}.0" == f">={matrix['OLDER_TORCHES'][0]}"


def test_what_the_faults_change_stands_in_the_sources() -> None:
    faults = runpy.run_path(str(ROOT / ".ci" / "mutations.py"))["FAULTS"]
    gone = [fault for fault in faults if fault.right not in (ROOT / fault.path).read_text(encoding="utf-8")]
    of_kernels = runpy.run_path(str(ROOT / ".ci" / "kernel_mutations.py"))
    for edit in (*of_kernels["FAULTS"], *of_kernels["FOLLOWED"]):
        source = (ROOT / "dsl_kernels" / edit.path).read_text(encoding="utf-8")
        gone += [edit] * (source.count(edit.right) != 1)
    assert gone == []


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "greyhound.__version__"}
    sources = [path for path in tracked() if path.suffix == ".py"]
    defining = [
        path for path in sources if re.search(r"^__version__ =", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert defining == [ROOT / "greyhound" / "__init__.py"]


def test_the_changelog_starts_with_the_current_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == greyhound.__version__


@pytest.mark.parametrize("package", LIBRARIES)
def test_a_library_says_that_it_is_typed_and_ships_the_mark(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


def test_every_folder_of_a_library_is_a_package() -> None:
    folders = {path.parent for package in LIBRARIES for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"(?<![\w.}/-])/(?:root|work|home|Users|opt|mnt|srv)/", id="a path of one machine"),
        pytest.param(r"pypi[.]org|pythonhosted|npmjs[.]|[.]debian[.]org|download[.]pytorch", id="a registry's host"),
        pytest.param(r"--(?:extra-)?index-url|--find-links|--trusted-host", id="an index to install from"),
    ],
)
def test_no_file_names(pattern: str) -> None:
    found = []
    for path in tracked():
        if path != Path(__file__).resolve():
            lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
            name = path.relative_to(ROOT)
            found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, 1) if re.search(pattern, line)]
    assert found == []


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "helpers", "common", "misc"}
    assert [path for path in tracked() if vague & {part.split(".")[0] for part in path.relative_to(ROOT).parts}] == []
