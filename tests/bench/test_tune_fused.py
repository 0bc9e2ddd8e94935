from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bench import tune_fused
from bench.cases import Shape, make_inputs
from bench.tune_fused import Plan, chosen_plan, fits, forced, held_plan, narrow_plan, wide_plan
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Spec, sums_elements
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as kernels

ARCH, MULTIPROCESSORS = "sm_90a", tune_fused.CPU_MULTIPROCESSORS
ON_CPU = ["--device", "cpu", "--budget", "0", "--dtypes", "fp32"]


def chosen(shape: Shape, dtype: torch.dtype = torch.float32, grad: bool = True) -> Plan:
    return chosen_plan(ARCH, dtype, shape.vocab, grad, shape.rows, MULTIPROCESSORS)


def kernel(kind: str, grad: bool = True, streamed: bool = False) -> Spec:
    """The last bf16 kernel of a kind: of those held, the one for the longest rows."""
    return [
        spec
        for spec in plan.SPECS
        if (spec.op, spec.dtype, spec.grad, spec.streamed) == ("fused", "bfloat16", grad, streamed)
        and Plan(spec, (0, 0, 0, 0, 0, 0)).kind == kind
    ][-1]


def swept(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert tune_fused.main([*ON_CPU, *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def marked(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("* ")]


def timed(lines: list[str]) -> list[str]:
    return [line for line in lines if ".." in line and "low" not in line]


SHAPES = pytest.mark.parametrize(
    "shape",
    [Shape(4, 20), Shape(300, 3000), Shape(4, 20_000), Shape(500, 9000)],  # held; narrow; wide, few rows and many
    ids=str,
)


@SHAPES
@pytest.mark.parametrize("grad", [True, False])
def test_a_sweep_times_the_chosen_plan_even_where_it_is_no_candidate(
    capsys: pytest.CaptureFixture[str], shape: Shape, grad: bool
) -> None:
    expected = chosen(shape, grad=grad)
    other = {"held": "wide", "narrow": "wide", "wide": "narrow"}[expected.kind]
    asked = ["--kernel", other, "--clusters", "5", "--turns", "5", "--slots", "1"]
    lines = swept(capsys, "--shapes", str(shape), *asked, *([] if grad else ["--loss-only"]))
    assert [line.endswith(str(expected)) for line in marked(lines)] == [True]
    assert lines[-1].endswith(" plans timed, 0 failed")
    assert len(timed(lines)) >= 1


@SHAPES
def test_without_a_choice_the_kind_that_serves_the_shape_is_swept(
    capsys: pytest.CaptureFixture[str], shape: Shape
) -> None:
    kind = chosen(shape).kind
    lines = swept(capsys, "--shapes", str(shape), "--clusters", "2", "--turns", "1,3", "--slots", "1,2")
    assert len(timed(lines)) >= 2
    assert all(f"  {kind} " in f"{line} " for line in timed(lines))


@pytest.mark.parametrize(
    ("option", "one", "two", "arguments"),
    [
        ("--clusters", "2", "2,4", ["--kernel", "wide", "--turns", "1"]),
        ("--turns", "2", "2,3", ["--kernel", "wide", "--clusters", "2", "--tail", "0"]),
        ("--tail", "0", "0,0.02", ["--kernel", "wide", "--clusters", "2", "--turns", "3"]),
        ("--places", "2", "2,3", ["--kernel", "wide", "--clusters", "2", "--turns", "1", "--loss-only"]),
        ("--slots", "1", "1,2", ["--kernel", "narrow", "--turns", "5"]),
        ("--turns", "5", "5,3", ["--kernel", "narrow", "--slots", "2"]),
        ("--turns", "5", "5,3", ["--kernel", "held"]),
        ("--kernel", "held", "held,wide", ["--clusters", "2", "--turns", "5"]),
        ("--dtypes", "fp32", "fp32,bf16", ["--kernel", "wide", "--clusters", "2", "--turns", "1"]),
    ],
)
def test_every_option_changes_what_is_swept(
    capsys: pytest.CaptureFixture[str], option: str, one: str, two: str, arguments: list[str]
) -> None:
    shape = ["--shapes", "40x16"]
    few, many = (timed(swept(capsys, *shape, *arguments, option, value)) for value in (one, two))
    assert len(many) > len(few)


def test_streamed_kernels_are_swept_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "4x16", "--kernel", "wide", "--clusters", "2", "--turns", "1", "--places", "3"]
    assert not [line for line in swept(capsys, *arguments) if "streamed" in line]
    assert [line for line in swept(capsys, *arguments, "--streamed") if "streamed, cluster 2, places 3" in line]


def test_only_the_best_and_the_chosen_plan_are_shown_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "40x16", "--kernel", "wide", "--clusters", "1,2,3,4"]
    lines = swept(capsys, *arguments, "--top", "1")
    assert 1 <= len(timed(lines)) <= 2
    assert len(marked(lines)) == 1


def test_a_plan_that_does_not_fit_is_named_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    lines = swept(capsys, "--shapes", "1x400000", "--clusters", "1", "--turns", "1")
    assert any(line.startswith("  does not fit: wide ") and "cluster 1," in line for line in lines)


def test_a_wrong_result_fails_the_sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "launch", lambda *arguments: arguments[4].zero_())
    assert tune_fused.main([*ON_CPU, "--shapes", "2x10", "--turns", "1"]) == 1
    assert f"FAILED {chosen(Shape(2, 10))}: wrong result" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "text"), [("--kernel", "wide,tall"), ("--tail", "half"), ("--tail", "-1"), ("--slots", "0")]
)
def test_a_wrong_option_is_refused_with_what_came(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    with pytest.raises(SystemExit):
        tune_fused.main(["--shapes", "2x10", option, text])
    assert f"argument {option}: expected" in (error := capsys.readouterr().err)
    assert repr(text) in error


@pytest.mark.parametrize("grad", [True, False])
def test_kernels_with_options_are_not_swept(monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    asked = []
    monkeypatch.setattr(
        tune_fused, "sweep", lambda arch, shape, dtype, chosen, plans, timer: asked.extend(plans) or (1.0, [], [])
    )
    arguments = ["--shapes", "300x3000", "--kernel", "wide,narrow,held", "--streamed"]
    assert tune_fused.main([*ON_CPU, *arguments, *([] if grad else ["--loss-only"])]) == 0
    assert {each.kind for each in asked} == set(tune_fused.KINDS)
    assert not [each for each in asked if each.spec.options]


# --- Plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 7, 100, 8192])
def test_the_numbers_of_a_plan_are_those_of_the_launch_it_stands_for(B: int) -> None:
    spec, launch = plan.select_fused(ARCH, "bfloat16", 128256, True, B, MULTIPROCESSORS)
    assert isinstance(launch, plan.WideLaunch)
    tail = int(launch.tail_waves * max(1, MULTIPROCESSORS * launch.resident // launch.cluster))
    numbers = launch.numbers(B, MULTIPROCESSORS)
    assert wide_plan(ARCH, spec, 128256, B, launch.cluster, launch.turns, tail).numbers == numbers
    spec, narrow = plan.select_fused(ARCH, "bfloat16", 3000, False, B, MULTIPROCESSORS)
    slots, _, _, turns, *_ = narrow.numbers(B, MULTIPROCESSORS)
    assert narrow_plan(spec, 3000, B, slots, turns).numbers == narrow.numbers(B, MULTIPROCESSORS)
    spec, held = plan.select_fused(ARCH, "bfloat16", 100, True, B, MULTIPROCESSORS)
    turns = held.numbers(B, MULTIPROCESSORS)[0]
    assert held_plan(spec, B, turns).numbers == held.numbers(B, MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("turns", "tail", "tail_turns"), [(1, 0, 1), (3, 0, 1), (3, 4, 1), (3, 4, 2), (7, 0, 1), (3, 7, 7)]
)
def test_the_clusters_of_a_forced_plan_take_all_rows(turns: int, tail: int, tail_turns: int) -> None:
    forced_plan = wide_plan(ARCH, kernel("wide"), 1000, 7, 2, turns, tail, tail_turns=tail_turns)
    cluster, clusters, long, long_turns, short_turns, _ = forced_plan.numbers
    assert cluster == 2
    assert long * long_turns + (clusters - long) * short_turns == 7
    assert (clusters - long) * short_turns >= min(tail, 7)


def test_a_tail_that_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tail_turns: expected a divisor of 7, got 2"):
        wide_plan(ARCH, kernel("wide"), 1000, 7, 2, 1, 0, tail_turns=2)


def test_what_fits_is_what_a_block_can_hold() -> None:
    held = kernel("held")
    longest = held.held * held.lanes * held.vector_elements
    assert fits(ARCH, held_plan(held, 7, 1), longest)
    assert not fits(ARCH, held_plan(held, 7, 1), longest + 1)
    narrow = kernel("narrow")
    bytes_of_slots = plan.SMEM_LIMIT_BYTES[ARCH] - plan.narrow_slots_offset(narrow.threads // 32, 2)
    longest = bytes_of_slots // (narrow.threads // 32 * 2 * 16) * narrow.vector_elements
    assert fits(ARCH, narrow_plan(narrow, longest, 7, 2, 1), longest)
    assert not fits(ARCH, narrow_plan(narrow, longest + 8, 7, 2, 1), longest + 8)
    assert fits(ARCH, narrow_plan(narrow, longest + 8, 7, 1, 1), longest + 8)
    wide = kernel("wide")
    assert fits(ARCH, wide_plan(ARCH, wide, 300_007, 7, 8, 1, 0), 300_007)
    assert not fits(ARCH, wide_plan(ARCH, wide, 300_007, 7, 1, 1, 0), 300_007)
    limit = plan.CLUSTER_LIMIT["sm_120a"]
    assert fits("sm_120a", wide_plan("sm_120a", wide, 1000, 7, limit, 1, 0), 1000)
    assert not fits("sm_120a", wide_plan("sm_120a", wide, 1000, 7, limit + 1, 1, 0), 1000)
    loss = kernel("wide", grad=False)
    assert fits(ARCH, wide_plan(ARCH, loss, 10**9, 7, 1, 1, 0, places=plan.MAX_CHUNKS), 10**9)
    assert not fits(ARCH, wide_plan(ARCH, loss, 10**9, 7, 1, 1, 0, places=plan.MAX_CHUNKS + 1), 10**9)


def test_a_forced_plan_is_the_one_that_the_kernel_is_launched_with_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []

    def load(arch: str, spec: Spec) -> Callable[..., None]:
        return lambda *arguments: taken.append(Plan(spec, arguments[-6:]))

    monkeypatch.setattr(kernels, "arch_or_warn", lambda device: ARCH)
    monkeypatch.setattr(_artifacts, "load", load)
    monkeypatch.setattr(kernels, "on_device", lambda device, function, *arguments: function(*arguments))
    gpu = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    inputs = make_inputs(Shape(4, 1000), torch.bfloat16, torch.device("cpu"))
    sums, loss = torch.empty(sums_elements(4)), torch.empty(())

    def run() -> None:
        kernels.launch(inputs.logits, inputs.labels, inputs.logits, loss, sums, 0.0, -100, False, False)

    other = wide_plan(ARCH, kernel("wide"), 1000, 4, 16, 3, 0)
    usual = chosen(Shape(4, 1000), torch.bfloat16)
    assert other != usual
    run()
    with forced(other):
        run()
        run()
    run()
    kernels._compiled_fused.cache_clear()
    assert taken == [usual, other, other, usual]


@pytest.mark.parametrize("grad", [True, False])
def test_a_forced_plan_serves_calls_of_its_kind_alone(grad: bool) -> None:
    spec = next(each for each in plan.SPECS if each.op == "fused" and each.narrow and each.grad == grad)
    taken = narrow_plan(spec, 769, 7, 1, 3)
    with forced(taken):
        assert plan.select_fused(ARCH, spec.dtype, 128_256, grad, 8192, 132)[0] == spec
        other, _ = plan.select_fused(ARCH, spec.dtype, 128_256, not grad, 8192, 132)
    assert other == plan.select_fused(ARCH, spec.dtype, 128_256, not grad, 8192, 132)[0] != spec
