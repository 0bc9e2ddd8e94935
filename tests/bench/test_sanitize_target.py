import collections
import re
from collections.abc import Callable

import pytest
import torch

from bench import sanitize_target
from bench.cases import Shape, dtype_name, parse_dtypes
from bench.sanitize_target import Case, forced_cases, sum_cases
from bench.tune_fused import fits
from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import ARCHS, OPTIONS
from greyhound.kernels import cross_entropy as kernels

ROWS = 7
DTYPES = parse_dtypes("bf16,fp16,fp32")
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def cases(arch: str, dtype: torch.dtype) -> list[Case]:
    return [*forced_cases(arch, dtype, ROWS), *sum_cases(arch, dtype)]


@EVERY_DTYPE
@pytest.mark.parametrize("arch", ARCHS)
def test_every_fused_kernel_of_a_dtype_is_forced_with_plans_that_fit(arch: str, dtype: torch.dtype) -> None:
    found = cases(arch, dtype)
    fused = {spec for spec in plan.SPECS if spec.op == "fused" and spec.dtype == dtype_name(dtype)}
    # Those with options take the plans that are chosen for them.
    assert {case.plan.spec for case in found if case.plan} == {spec for spec in fused if not spec.options}
    assert all(case.plan and fits(arch, case.plan, case.shape.vocab) for case in found)
    assert len(found) == len(set(found))


@EVERY_DTYPE
def test_rows_are_taken_in_turn_and_shared_by_clusters_of_every_size(dtype: torch.dtype) -> None:
    turns = collections.defaultdict(set)
    clusters = collections.defaultdict(set)
    slots = set()
    for case in forced_cases("sm_90a", dtype, ROWS):
        assert case.plan is not None
        spec, numbers = case.plan
        if case.plan.kind == "wide":
            turns[spec].add(numbers[3])
            clusters[spec].add(numbers[0])
        elif case.plan.kind == "narrow":
            turns[spec].add(numbers[3])
            slots.add(numbers[0])
        else:
            turns[spec].add(numbers[0])
    assert all(each == {1, 3} for each in turns.values())
    assert all(each == {1, 2, 8, 16} for each in clusters.values())
    assert len(clusters) == 3  # with a gradient, without, and streamed
    assert slots == {1, 2}


@EVERY_DTYPE
def test_a_wide_slice_has_several_chunks_of_which_some_are_whole_and_places_are_used_again(dtype: torch.dtype) -> None:
    for case in forced_cases("sm_90a", dtype, ROWS):
        assert case.plan is not None
        if case.plan.kind != "wide":
            continue
        spec, numbers = case.plan
        chunk_vectors = plan.STEPS * spec.threads
        for lead in (0, 1):
            part = geometry.row_slice(lead, case.shape.vocab, numbers[0], 0, spec.vector_elements)
            bounds = [geometry.chunk_range(part, chunk, chunk_vectors) for chunk in range(plan.MAX_CHUNKS)]
            moved = [end - begin for begin, end in bounds if begin < end]
            assert len(moved) >= 2
            assert (chunk_vectors in moved) or lead
            assert min(moved) < chunk_vectors
            if not spec.grad or spec.streamed:
                places = (numbers[5] - plan.slice_offset_bytes(spec)) // (chunk_vectors * 16)
                assert len(moved) * ROWS > places


@EVERY_DTYPE
def test_sums_are_added_by_one_block_and_by_several(dtype: torch.dtype) -> None:
    entries = {case.shape.rows for case in sum_cases("sm_90a", dtype)}
    assert min(entries) < plan.SUM_CLUSTER_ENTRIES <= max(entries)


def test_labels_are_counted_by_the_rows_by_one_block_and_by_several() -> None:
    rows = sorted(case.shape.rows for case in sanitize_target.counted_cases())
    assert ROWS <= plan.FEW_LABELS < rows[0] < plan.SUM_CLUSTER_ENTRIES <= rows[-1]


def test_on_the_cpu_everything_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize_target.main(["--device", "cpu", "--rows", "4", "--vocabs", "3", "--dtypes", "fp32"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(" calls on cpu, 0 wrong results")
    assert int(last.split()[0]) > 50


def test_options_change_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def plans(*arguments: str) -> str:
        sanitize_target.main(["--device", "cpu", *arguments])
        return capsys.readouterr().out

    few = plans("--rows", "4", "--vocabs", "3", "--dtypes", "fp32")
    assert "4x3 held" in few
    assert "5x3 held" in plans("--rows", "5", "--vocabs", "3", "--dtypes", "fp32")
    assert "4x77 held" in plans("--rows", "4", "--vocabs", "77", "--dtypes", "fp32")
    assert few != plans("--rows", "4", "--vocabs", "3", "--dtypes", "bf16")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x, grad, sums: grad.add_(0.5) if grad is not None else None, "gradient"),
        (lambda x, grad, sums: sums[0].add_(1.0), "raw, .*mean loss"),
        (lambda x, grad, sums: x.add_(1.0), "fwd, .*the logits changed"),
        (
            lambda x, grad, sums: x.as_strided((1,), (1,), 0).fill_(0.0),
            "raw, .*wrote outside its rows",
        ),
    ],
    ids=["gradient", "loss", "logits", "outside"],
)
def test_a_wrong_result_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: Callable[..., object], reason: str
) -> None:
    right = kernels.launch

    def launch(x: torch.Tensor, labels: object, grad: object, loss: object, sums: object, *rest: object) -> None:
        right(x, labels, grad, loss, sums, *rest)
        spoil(x, grad, sums)

    monkeypatch.setattr(kernels, "launch", launch)
    monkeypatch.setattr(sanitize_target, "forced_cases", lambda *_: [])
    monkeypatch.setattr(sanitize_target, "sum_cases", lambda *_: [])
    assert sanitize_target.main(["--device", "cpu", "--rows", "4", "--vocabs", "5", "--dtypes", "fp32"]) == 1
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("WRONG ")]
    assert any(re.search(reason, line) for line in lines), lines
    assert not output.splitlines()[-1].endswith(" 0 wrong results")


def test_every_group_has_cases_and_every_case_a_group() -> None:
    cases = [
        sanitize_target.Case(Shape(7, 9), None),
        *sanitize_target.forced_cases("sm_90a", torch.bfloat16, 7),
        *sanitize_target.sum_cases("sm_90a", torch.bfloat16),
    ]
    assert {sanitize_target.group_of(case) for case in cases} | {"options"} == set(sanitize_target.GROUPS)


def test_the_options_take_every_kind_of_kernel_narrow_and_wide_and_are_right_on_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(sanitize_target.OPTIONS) | {"entropy_backward"} == {kind for kind in OPTIONS if kind}
    for vocab, narrow in zip(sanitize_target.OPTIONS_VOCABS, (True, False), strict=True):
        assert plan.select_fused("sm_90a", "float32", vocab, True, ROWS, 132, "rows")[0].narrow is narrow
    assert sanitize_target.main(["--device", "cpu", "--groups", "options", "--dtypes", "fp32"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "40 calls on cpu, 0 wrong results"
