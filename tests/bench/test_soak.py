import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import soak
from bench.cases import DTYPES, dtype_name, parse_shapes
from bench.check import Mismatch
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ITEM_BYTES, OPTIONS, options_kind
from greyhound.kernels import cross_entropy as kernels

KINDS = ("inplace", "linear", "loss", "mean", "options", "raw", "rows")
"""Of the CPU, which has no graphs."""


def run(*arguments: str, seconds: float = 1.0) -> int:
    few = ("--device", "cpu", "--threads", "2", "--streams", "2", "--minutes", str(seconds / 60))
    return soak.main([*few, "--dtypes", "fp32", "--shapes", "4x100,2x301", "--check-every", "5", *arguments])


def failures(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("FAILED ")]


def test_on_the_cpu_every_kind_of_call_is_made_and_checked_and_nothing_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--dtypes", "bf16,fp16,fp32", seconds=2.0) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("soak passed: ")
    assert last.endswith(" 0 failures")
    counted = {line.split()[0]: line.split() for line in lines if line.endswith("checked in float64")}
    assert tuple(sorted(counted)) == KINDS
    for _, calls, _, checked, *_ in counted.values():
        # The first of each thread, and every fifth.
        assert 2 <= int(checked) <= int(calls)
        assert int(checked) >= int(calls) / 5


def test_the_shapes_and_options_take_every_kind_of_kernel() -> None:
    taken = set()
    for shape, dtype in itertools.product(parse_shapes(soak.SHAPES), map(dtype_name, DTYPES.values())):
        spec, launch = plan.select_fused("sm_90a", dtype, shape.vocab, True, shape.rows, 132)
        cluster = getattr(launch, "cluster", 0)
        taken.add("held" if spec.held else "narrow" if spec.narrow else "streamed" if spec.streamed else cluster)
        assert shape.rows * shape.vocab * ITEM_BYTES[dtype] < 1 << 26  # which threads times streams may hold at once
    assert {"held", "narrow", "streamed", 1, 16} <= taken
    assert max(shape.rows for shape in parse_shapes(soak.SHAPES)) >= plan.SUM_CLUSTER_ENTRIES
    kinds = set()
    for each in soak.OPTIONS:
        entropy = bool(each.get("return_entropy"))
        for gradient in (False, entropy):
            kinds.add(options_kind("softcap" in each, "label_smoothing" in each, False, entropy, gradient))
    assert kinds == {kind for kind in OPTIONS if kind}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("--check-every", "1001"), "--check-every"), (("--threads", "0"), "--threads")],
)
def test_fewer_checks_than_one_in_a_thousand_and_no_threads_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], name: str
) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    assert f"{name}: expected 1 to " in capsys.readouterr().err


def after_the_first(count: int, spoil: Callable[..., object]) -> Callable[..., None]:
    """Return a launch that is right `count` times, and spoilt from then on."""
    right, calls = kernels.launch, itertools.count()

    def launch(x: Any, labels: Any, grad: Any, loss: Any, sums: Any, *rest: Any) -> None:
        right(x, labels, grad, loss, sums, *rest)
        if next(calls) >= count:
            spoil(grad, sums, loss)

    return launch


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda grad, sums, loss: None if loss is None else loss.add_(1e-6 * loss),
            "another loss than that of the same",
        ),
        (lambda grad, sums, loss: None if grad is None else grad.mul_(1.1), r"(raw|mean) .* call \d+: gradient"),
    ],
    ids=["a bit of the loss", "gradient"],
)
def test_a_result_that_goes_wrong_after_a_while_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: Callable[..., object], reason: str
) -> None:
    monkeypatch.setattr(kernels, "launch", after_the_first(150, spoil))
    assert run("--check-every", "1", seconds=20.0) == 1
    found = failures(capsys.readouterr().out)
    assert any(re.search(reason, line) for line in found), found


def test_a_first_result_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launch", after_the_first(0, lambda grad, sums, loss: sums.add_(1.0)))
    with pytest.raises(Mismatch, match="raw 4x100 float32, first call: mean loss"):
        run()


def test_memory_that_grows_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(
        kernels,
        "launch",
        after_the_first(150, lambda *_: kept.append(torch.ones(1 << 18)) if len(kept) < 150 else None),
    )
    assert run(seconds=4.0) == 1
    assert any(line.startswith("FAILED resident_mib: ") for line in failures(capsys.readouterr().out))


def test_threads_that_stay_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[threading.Thread] = []
    ends = threading.Event()

    def start(*_: object) -> None:
        if len(started) < 3:
            started.append(threading.Thread(target=ends.wait))
            started[-1].start()

    monkeypatch.setattr(kernels, "launch", after_the_first(150, start))
    try:
        assert run(seconds=4.0) == 1
    finally:
        ends.set()
    assert any(line.startswith("FAILED threads: ") for line in failures(capsys.readouterr().out))


def test_a_call_that_raises_ends_all_threads_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(kernels, "launch", after_the_first(150, fail))
    start = time.monotonic()
    assert run(seconds=120.0) == 1
    assert time.monotonic() - start < 60
    assert any("RuntimeError: out of order" in line for line in failures(capsys.readouterr().out))
