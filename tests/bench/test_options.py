"""The cost of options: every option is checked, timed beside the plain loss, and written as a row."""

from pathlib import Path

import pytest
import torch

from bench import options
from bench.cases import Shape
from bench.check import Mismatch
from bench.results import read_folder
from greyhound.nn.functional import cross_entropy

CPU = torch.device("cpu")


def test_each_option_has_rows_of_its_own_and_a_provider_that_is_not_there_is_a_printed_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--shapes", "8x50", "--dtypes", "fp32", "--budget", "0.001", "--out", str(tmp_path)]
    assert options.main(arguments) == 0
    rows = read_folder(tmp_path)
    names = {row.op.removeprefix("cross_entropy, ") for row in rows if row.provider == "greyhound"}
    assert names == set(options.options_for(50, 8, CPU))
    assert {row.mode for row in rows} == {"fwd", "fwd+bwd"}
    printed = capsys.readouterr().out
    assert "times_plain 1.000" in printed
    assert "quack" in printed


def test_a_wrong_gradient_is_refused_before_it_is_timed() -> None:
    logits, target = torch.randn(8, 20), torch.arange(8)

    def twice(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return 2.0 * cross_entropy(x, t, reduction="none")

    right = {"reduction": "none"}
    options.verify(lambda x, t: cross_entropy(x, t, reduction="none"), options.QUACK, right, logits, target)
    with pytest.raises(Mismatch, match="a gradient is off by"):
        options.verify(twice, options.QUACK, right, logits, target)


def test_the_overwriting_options_overwrite_and_the_others_do_not() -> None:
    for name, arguments in options.options_for(20, 8, CPU).items():
        logits, target = torch.randn(8, 20).requires_grad_(), torch.arange(8)
        before = logits.detach().clone()
        options.gradient(lambda x, t, a=arguments: cross_entropy(x, t, **a), logits, target, torch.ones(8))
        assert torch.equal(logits, before) is ("inplace" not in name), name


def test_shapes_are_named_on_the_command_line() -> None:
    assert Shape(8, 50) == options.parse_shapes("8x50")[0]
