"""Linear cross entropy: who is right gives rows, who is wrong gives a reason, and a run that is cut goes on."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import linear_cross_entropy as benchmark
from bench.check import Mismatch
from bench.linear_cross_entropy import (
    EXACT,
    FILTERED,
    PROVIDERS,
    Apart,
    Inputs,
    Loss,
    Outcome,
    Provider,
    Reference,
    Shape,
    format_table,
    make_inputs,
    parse_shapes,
)
from bench.provenance import Provenance
from bench.providers import Unsupported
from bench.results import Row, row_from

CPU = torch.device("cpu")
HERE = "products,greyhound,greyhound-weight,torch"
"""Providers that need neither a GPU nor a package."""

OLDER = """
import torch

def chunked_linear_cross_entropy(inputs, weight, target):
    print("noise on stdout")
    return torch.nn.functional.cross_entropy((inputs @ weight.T).float(), target)
"""


def run(out: Path, *arguments: str, providers: str | None = HERE) -> int:
    fixed = ["--device", "cpu", "--budget", "0", "--out", str(out), "--shapes", "40x16x70", "--commit", "abc"]
    named = [] if providers is None else ["--providers", providers]
    return benchmark.main([*fixed, *named, *arguments])


def written(out: Path) -> list[Row]:
    path = out / "cpu.json"
    return [row_from(record) for record in json.loads(path.read_text())] if path.exists() else []


def broken(name: str, loss: Loss | Exception) -> Provider:
    def build(shape: Shape) -> Loss:
        if isinstance(loss, Exception):
            raise loss
        return loss

    return Provider(name, build)


def eager(inputs: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((inputs @ weight.T).float(), target)


def outcome_of(loss: Loss, inputs: Inputs) -> Outcome:
    x, weight = inputs.inputs.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    value = loss(x, weight, inputs.target)
    return Outcome(value.detach(), *torch.autograd.grad(value, (x, weight)))


def test_the_reference_is_what_float64_autograd_gives() -> None:
    inputs = make_inputs(Shape(40, 16, 70), CPU)
    reference = Reference(inputs)
    x, weight = inputs.inputs.double().requires_grad_(), inputs.weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ weight.T, inputs.target)
    grad_inputs, grad_weight = torch.autograd.grad(loss, (x, weight))
    assert reference.loss == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(reference.grad_inputs, grad_inputs[reference.rows])
    torch.testing.assert_close(reference.grad_labels, grad_weight[reference.labels])
    torch.testing.assert_close(reference.grad_others, grad_weight[reference.others])
    assert not set(reference.others.tolist()) & set(inputs.target.tolist())
    assert len(reference.rows) == benchmark.SAMPLED_ROWS
    assert torch.equal(reference.ignored, inputs.target == -100)


def test_blocks_do_not_change_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Shape(40, 16, 70), CPU)
    whole = Reference(inputs)
    monkeypatch.setattr(benchmark, "BLOCK_ELEMENTS", 70 * 7)  # 40 is no multiple of 7
    assert Reference(inputs).loss == pytest.approx(whole.loss)


def test_some_rows_are_ignored_and_logits_are_about_normal() -> None:
    inputs = make_inputs(Shape(200, 256, 500), CPU)
    assert int((inputs.target == -100).sum()) == 12
    assert float((inputs.inputs.float() @ inputs.weight.float().T).std()) == pytest.approx(1.0, abs=0.05)


def test_the_softmax_part_of_grad_inputs_is_judged_though_it_hardly_shows_in_the_norm() -> None:
    inputs = make_inputs(Shape(40, 4096, 70), CPU)
    reference, right = Reference(inputs), outcome_of(eager, inputs)
    labels = -inputs.weight[inputs.target.clamp(min=0)]
    labels[inputs.target == -100] = 0
    without = (labels / (inputs.target != -100).sum()).to(torch.bfloat16)
    # In a large vocabulary the softmax's mean of the weight's rows is x / H.
    softmax = reference.directions / int((inputs.target != -100).sum()) ** 2 / 4096
    reference.grad_inputs = without[reference.rows].double() + softmax
    assert float((softmax.norm(dim=1) / reference.grad_inputs.norm(dim=1)).max()) < EXACT.inputs
    with pytest.raises(Mismatch, match=r"along the inputs, allowed 0\.1"):
        reference.verify(right._replace(grad_inputs=without))
    reference.verify(right._replace(grad_inputs=without), FILTERED)


def test_every_part_of_a_result_is_judged() -> None:
    inputs = make_inputs(Shape(40, 16, 70), CPU)
    reference, right = Reference(inputs), outcome_of(eager, inputs)
    assert right.grad_inputs is not None
    assert right.grad_weight is not None
    reference.verify(right)
    reference.verify(Outcome(right.loss, None, None))
    not_ignored = right.grad_inputs.clone()
    not_ignored[0] = 1e-6
    no_labels, no_others = right.grad_weight.clone(), right.grad_weight.clone()
    no_labels[reference.labels[3]] *= 1.06
    no_others[reference.others[3]] *= 1.08
    for wrong, reason in (
        (right._replace(loss=right.loss * 1.002), "loss: expected"),
        (right._replace(loss=right.loss * float("nan")), "loss: expected"),
        (right._replace(grad_inputs=right.grad_inputs * 1.03), "grad_inputs: off by"),
        (right._replace(grad_inputs=right.grad_inputs * float("nan")), "grad_inputs: not zero in an ignored row"),
        (right._replace(grad_inputs=not_ignored), "grad_inputs: not zero in an ignored row"),
        (right._replace(grad_inputs=right.grad_inputs.float()), "grad_inputs: expected torch.bfloat16"),
        (right._replace(grad_weight=right.grad_weight.T), "grad_weight: expected torch.bfloat16"),
        (right._replace(grad_weight=no_labels), "grad_weight of labels: off by"),
        (right._replace(grad_weight=no_others), "grad_weight of other columns: off by"),
        (right._replace(grad_weight=right.grad_weight * float("nan")), "grad_weight of labels: off by nan"),
    ):
        with pytest.raises(Mismatch, match=reason):
            reference.verify(wrong)
    reference.verify(right._replace(grad_weight=no_others), FILTERED)


def test_a_vocabulary_of_labels_alone_is_judged_by_them() -> None:
    inputs = make_inputs(Shape(60, 16, 3), CPU)
    reference = Reference(inputs)
    assert len(reference.others) == 0
    reference.verify(outcome_of(eager, inputs))


def test_who_is_right_gives_rows_whose_baseline_is_the_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--modes", "fwd,fwd+bwd") == 0
    rows = written(tmp_path)
    expected = {(name, mode) for name in HERE.split(",") for mode in ("fwd", "fwd+bwd")}
    assert {(row.provider, row.mode) for row in rows} == expected
    floor = {row.mode: row.ms for row in rows if row.provider == "products"}
    for row in rows:
        assert (row.op, row.rows, row.vocab) == ("linear_cross_entropy, H=16", 40, 70)
        assert (row.dtype, row.commit, row.peak_mib) == ("bfloat16", "abc", None)
        assert row.copy_ms == floor[row.mode]
        assert row.of_copy == pytest.approx(row.copy_ms / row.ms, rel=0.05)
    assert "8 rows in" in capsys.readouterr().out


def test_rows_of_other_hidden_sizes_stay_apart(tmp_path: Path) -> None:
    run(tmp_path, "--shapes", "40x16x70,40x32x70", providers="products")
    assert [row.op for row in written(tmp_path)] == ["linear_cross_entropy, H=16", "linear_cross_entropy, H=32"]


def test_the_products_are_timed_for_all_and_written_where_asked_for(tmp_path: Path) -> None:
    assert run(tmp_path, providers="torch") == 0
    (row,) = written(tmp_path)
    assert (row.provider, row.mode) == ("torch", "fwd+bwd")


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="not in this version of torch")
def test_pytorchs_own_function_is_right(tmp_path: Path) -> None:
    assert run(tmp_path, providers="torch-linear") == 0
    assert [row.provider for row in written(tmp_path)] == ["torch-linear"]


def test_pytorchs_own_function_is_skipped_where_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    assert run(tmp_path, providers="torch-linear") == 0
    assert "skipped torch-linear fwd+bwd 40x16x70: torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda x, weight, target: eager(x, weight, target) * 1.5, "Mismatch: loss: expected"),
        (lambda x, weight, target: eager(x, weight.detach() + 0 * weight, target), "Mismatch: grad_weight"),
        (RuntimeError("it broke\nfor long"), "RuntimeError: it broke\n"),
        (ImportError("No module named 'peer'"), "ImportError: No module named 'peer'"),
    ],
)
def test_who_fails_gives_a_reason_no_row_and_exit_code_1(
    loss: Loss | Exception,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PROVIDERS, "broken", broken("broken", loss))
    assert run(tmp_path, providers="broken,torch") == 1
    assert f"FAILED broken fwd+bwd 40x16x70: {reason}" in capsys.readouterr().out
    assert [row.provider for row in written(tmp_path)] == ["torch"]


def test_wrong_products_are_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: right(a, b, out=out).mul_(2.0))
    assert run(tmp_path, providers="products,torch") == 1
    assert "FAILED products fwd+bwd 40x16x70: Mismatch: logits: off by 1" in capsys.readouterr().out
    assert written(tmp_path) == []


def test_what_is_not_supported_is_skipped_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROVIDERS, "broken", broken("broken", Unsupported("too odd")))
    assert run(tmp_path, providers="broken,torch") == 0
    assert "skipped broken fwd+bwd 40x16x70: too odd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("liger-cute", Shape(129, 64, 256), "tokens that are a multiple of 128"),
        ("liger-cute", Shape(128, 64, 257), "a vocabulary that is one of 256"),
        ("quack", Shape(128, 64, 50257), "multiples of 8"),
        ("quack-scaled", Shape(128, 64, 50257), "a vocabulary that is a multiple of 128"),
    ],
)
def test_limits_of_the_peers_are_told_before_they_are_imported(name: str, shape: Shape, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        PROVIDERS[name].loss(shape)


def test_without_names_a_missing_package_is_skipped_once_and_the_others_run_on_every_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(PROVIDERS):
        if name not in ("products", "torch"):
            monkeypatch.delitem(PROVIDERS, name)
    monkeypatch.setitem(PROVIDERS, "peer", broken("peer", ImportError("No module named 'peer'")))
    assert run(tmp_path, "--shapes", "40x16x70,30x16x70", providers=None) == 0
    assert capsys.readouterr().out.count("skipped peer fwd+bwd: ImportError: No module named 'peer'") == 1
    assert {(row.provider, row.rows) for row in written(tmp_path)} == {
        (name, rows) for name in ("products", "torch") for rows in (40, 30)
    }


def test_resuming_measures_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, providers="products,torch")
    before = written(tmp_path)
    capsys.readouterr()
    assert run(tmp_path, "--resume", providers="products,torch,greyhound") == 0
    output = capsys.readouterr().out
    assert "greyhound fwd+bwd 40x16x70" in output
    assert "torch fwd+bwd 40x16x70" not in output
    assert "products fwd+bwd 40x16x70" not in output
    assert "3 rows in" in output
    assert [row for row in written(tmp_path) if row.provider != "greyhound"] == before
    run(tmp_path, "--resume", "--commit", "def", providers="torch")
    assert [row.commit for row in written(tmp_path) if row.provider == "torch"] == ["def"]


def test_a_run_whose_time_is_up_exits_with_0_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: Iterator[bool] = iter([False, False, True, True])  # a shape, its two providers, the next shape
    monkeypatch.setattr(benchmark.Run, "time_is_up", lambda self: next(looks))
    assert run(tmp_path, "--shapes", "40x16x70,30x16x70", providers="greyhound,torch") == 0
    assert "time is up, 3 measurements left" in capsys.readouterr().out
    assert [(row.provider, row.rows) for row in written(tmp_path)] == [("greyhound", 40)]
    monkeypatch.undo()
    assert run(tmp_path, "--minutes", "0", providers="torch") == 0
    assert "time is up, 1 measurements left" in capsys.readouterr().out


def test_the_older_greyhound_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "_older_greyhound"
    (folder / "greyhound" / "nn").mkdir(parents=True)
    (folder / "greyhound" / "__init__.py").write_text('VERSION = "0.1.0"\n')
    (folder / "greyhound" / "nn" / "__init__.py").touch()
    (folder / "greyhound" / "nn" / "functional.py").write_text(OLDER)
    arguments = ["--older-greyhound", str(folder), "--shapes", "40x16x70,30x16x70"]
    assert run(tmp_path / "out", *arguments, providers="products,older") == 0
    rows = written(tmp_path / "out")
    floor = {row.rows: row.ms for row in rows if row.provider == "products"}
    assert {row.rows: row.copy_ms for row in rows if row.provider == "older"} == floor
    assert {row.commit for row in rows} == {"abc"}


def test_without_the_older_greyhound_the_reason_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--older-greyhound", str(tmp_path / "none"), providers="older") == 1
    assert "FAILED older fwd+bwd 40x16x70: no folder _older" in capsys.readouterr().out


def test_a_process_that_does_not_answer_in_time_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROVIDERS, "slow", replace(broken("slow", eager), apart=True))
    monkeypatch.setattr(benchmark, "APART_TIMEOUT_S", 0.05)  # less than the interpreter takes to start
    assert run(tmp_path, "--shapes", "40x16x70,30x16x70", providers="slow") == 1
    assert capsys.readouterr().out.count("FAILED slow fwd+bwd") == 2  # when it happens, and at the end


def test_a_process_says_what_is_missing() -> None:
    worker = Apart()
    request = {
        **{"provider": "older", "modes": ["fwd+bwd"], "tokens": 20, "hidden": 8, "vocab": 30, "device": "cpu"},
        **{"budget_s": 0.0, "about": Provenance("a GPU", None, "torch", None, "abc")._asdict()},
        "floor_ms": {"fwd+bwd": 1.0},
    }
    answer = worker.ask(request)
    worker.close()
    assert answer["missing"] == ["fwd+bwd"]
    assert "not version 0.1" in answer["failures"]["fwd+bwd"]


def test_the_table_is_grouped_by_shape_and_each_group_fastest_first() -> None:
    about = Provenance("NVIDIA H200", None, "2.11.0", None, "abc")

    def row(provider: str, ms: float, vocab: int = 70) -> Row:
        times = {"ms": ms, "ms_low": ms, "ms_high": ms, "copy_ms": 10.0, "of_copy": 10.0 / ms, "peak_mib": 12.34}
        size = {"op": "linear_cross_entropy, H=4096", "mode": "fwd+bwd", "rows": 8192, "vocab": vocab}
        rest = {"dtype": "bfloat16", "host_us": None, "graph": None, "date": "2026-11-30", **about._asdict()}
        return row_from({"provider": provider, **times, **size, **rest})

    rows = [row("liger", 40.0), row("greyhound", 12.5), row("products", 10.0), row("torch", 50.0, 128256)]
    title, rule, *lines = format_table(rows).splitlines()
    assert {len(line) for line in (title, rule, *lines) if line} == {len(title)}
    assert [line.split()[5:] for line in lines] == [
        ["fwd+bwd", "products", "1.000", "10.0000", "10.0000..10.0000", "12.3", "0.800"],
        ["fwd+bwd", "greyhound", "0.800", "12.5000", "12.5000..12.5000", "12.3", "1.000"],
        ["fwd+bwd", "liger", "0.250", "40.0000", "40.0000..40.0000", "12.3", "3.200"],
        [],
        ["fwd+bwd", "torch", "0.200", "50.0000", "50.0000..50.0000", "12.3"],
    ]


def test_shapes_have_three_sizes() -> None:
    assert parse_shapes("8192x4096x128256, 4x5X6") == [Shape(8192, 4096, 128256), Shape(4, 5, 6)]
    assert len(parse_shapes(benchmark.DEFAULT_SHAPES)) == 6
    for text in ("8x16", "8x16x32x64", "8x0x32", "8xax32", "8x16x32,"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected TOKENSxHIDDENxVOCAB"):
            parse_shapes(text)


@pytest.mark.parametrize("arguments", [["--providers", "nobody"], ["--modes", "raw"], ["--shapes", "8x16"]])
def test_an_unknown_name_ends_the_command_before_anything_runs(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_bounds_of_approximate_providers_are_the_wider_ones() -> None:
    assert {name for name, each in PROVIDERS.items() if each.bounds != EXACT} == {"cce", "cce-exact"}
    assert {name for name, each in PROVIDERS.items() if each.apart} == {"older", "quack", "quack-scaled", "liger-cute"}
