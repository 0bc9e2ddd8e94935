"""What README.md says, as far as it can be run or looked up: examples, commands, variables, paths."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

from dsl_kernels.cross_entropy.spec import ARCHS
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("example", blocks("python"), ids=lambda text: text.splitlines()[1].split()[-1])
def test_an_example_runs_on_the_cpu_and_takes_about_ten_lines(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, torch.Tensor] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert len(example.splitlines()) <= 10
    assert 9 < names["loss"].item() < 13  # normal logits over 32000 columns: about log 32000 + 0.5


def test_there_is_an_example_of_every_entry_point_and_of_options() -> None:
    plain, options, linear, own, raw, shards = blocks("python")
    assert "greyhound.nn.functional" in plain
    assert "return_lse=True" in options
    assert "chunked_linear_cross_entropy(" in linear
    assert "chunked_linear_loss(" in own
    assert "greyhound.kernels.cross_entropy" in raw
    assert "vocab_parallel_cross_entropy(" in shards


def test_every_option_of_the_loss_has_a_row_in_the_table() -> None:
    parameters = inspect.signature(cross_entropy).parameters.values()
    options = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} | {"z_loss_multiplier"}
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section("Contract"), re.MULTILINE)
        for name in re.findall(r"`(\w+)", row)
    }
    assert options <= named


def test_what_the_linear_form_takes_and_leaves_out_is_said() -> None:
    part = section("Contract").partition("### With the projection")[2]
    named = set(re.findall(r"`(\w+)", part))
    linear, plain = (
        {each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY}
        for function in (chunked_linear_cross_entropy, cross_entropy)
    )
    of_outputs = {name for name in plain if name.startswith("return_")}
    assert linear - of_outputs - {"bias"} <= named
    assert of_outputs <= linear
    assert plain - linear == {"weight", "valid_vocab", "shift", "inplace", "inplace_backward"}
    assert {"valid_vocab", "shift"} <= named


@pytest.mark.parametrize(("module", "extra"), [("greyhound", "."), ("pytest", ".[test]")])
def test_one_command_sets_up_a_fresh_clone_and_runs(module: str, extra: str) -> None:
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if line.endswith(f" -m {module}")]
    assert [shlex.split(part) for part in command.split(" && ")] == [
        ["python3", "-m", "venv", ".venv"],
        [".venv/bin/pip", "install", "-c", "constraints.txt", "-e", extra],
        [".venv/bin/python", "-m", module],
    ]


def test_every_environment_variable_that_is_read_has_a_row() -> None:
    read = {"GREYHOUND_WHEEL_ARCHS"}
    for path in [ROOT / "setup.py", *(ROOT / "greyhound").rglob("*.py"), *(ROOT / "dsl_kernels").rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        read |= set(re.findall(r'(?:environ\.get\(|environ\[|getenv\()"([A-Z_]+)"', source))
        read |= set(re.findall(r'^[A-Z_]+_VARIABLE = "([A-Z_]+)"', source, re.MULTILINE))
    read.discard("PYTHONPATH")  # handed on to the compiler's process, not asked what it says
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", section("Environment variables"), re.MULTILINE)) == read


def test_every_arch_that_is_built_has_a_row() -> None:
    assert tuple(re.findall(r"\| `(sm_\w+)` \|", section("GPUs"))) == ARCHS


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_exists(text: str) -> None:
    named = re.findall(r"`((?:bench|tests|greyhound|dsl_kernels|\.ci)/[\w/.]+)`", text)
    named += re.findall(r"\]\(([\w.]+)\)", text)
    built = {"greyhound/artifacts", "bench/results"}
    missing = [name for name in named if name not in built and not (ROOT / name).exists()]
    assert named
    assert missing == []


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README.md", "CONTRIBUTING.md"])
def test_every_module_that_is_run_exists(text: str) -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", text)) - {"pytest"}
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
