"""The raw helper and the launch behind it: values at every size and alignment, what is written, refusals, streams."""

import itertools
import math

import pytest
import reference
import torch
from plans import narrow_from

from bench.tune_fused import Plan, fits, forced, held_plan, narrow_plan, wide_plan
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.plan import SPECS
from dsl_kernels.cross_entropy.spec import DTYPE_NAMES, ITEM_BYTES, MAX_COLUMNS, Spec, sums_elements
from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

pytestmark = pytest.mark.usefixtures("narrow_in_small_batches")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_COLUMNS = 5_000
"""Widest rows of the boundary tests on the CPU, where the plans have no meaning."""

NARROW_ROWS = plan.NARROW_MIN_ROWS
"""Before the fixture of this module changes it."""

MULTIPROCESSORS = 132
"""Of an H200, whose plans the sizes and batches below go round; on another GPU they are sizes like any other."""

FUSED = [spec for spec in SPECS if spec.op == "fused" and not spec.options]  # the options have tests of their own

GUARD = 96.0
"""Stands around a matrix in its buffer; exact in every dtype."""


def run_and_check(
    logits: torch.Tensor, labels: torch.Tensor, z_loss_multiplier: float = 0.0, ignore_index: int = -100
) -> kernels.Totals:
    """Run the raw helper on `logits`, check gradient and sums against float64, and return the sums."""
    original = logits.clone()
    totals = cross_entropy_with_grad_kernel(logits, labels, z_loss_multiplier, ignore_index)
    options = {"ignore_index": ignore_index, "z_loss_multiplier": z_loss_multiplier}
    assert reference.gradient_roundings(logits, original, labels, **options) <= 1
    assert all(total.shape == () and total.dtype == torch.float32 for total in totals)
    assert all(total.device == logits.device for total in totals)
    expected = reference.rows(original, labels, ignore_index)
    assert int(totals.n_valid) == int((labels != ignore_index).sum())
    loss = float(totals.ce_sum) + z_loss_multiplier * float(totals.z_sum)
    expected_loss = float(expected.ce.sum() + z_loss_multiplier * expected.z.sum())
    assert abs(loss - expected_loss) <= reference.loss_tolerance(original, labels, reduction="sum", **options)
    return totals


def launched(
    x: torch.Tensor,
    labels: torch.Tensor,
    grad: torch.Tensor | None,
    *,
    z_loss_multiplier: float = 0.0,
    mean: bool = False,
    grad_by_mean: bool = False,
    incoming: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the launch that the raw helper and the operators share; return the loss and (ce_sum, z_sum, n_valid)."""
    loss = torch.full((), math.nan, device=x.device)
    sums = torch.full((sums_elements(x.shape[0]),), math.nan, device=x.device)
    kernels.launch(
        x,
        labels,
        grad,
        loss if incoming is None else None,
        sums,
        z_loss_multiplier=z_loss_multiplier,
        ignore_index=-100,
        mean=mean,
        grad_by_mean=grad_by_mean,
        incoming=incoming,
    )
    return loss, sums[:3]


def embedded(values: torch.Tensor, offset: int, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a matrix in a guarded buffer, `offset` elements in and `pad` between rows, and the buffer."""
    B, V = values.shape
    buffer = torch.full((offset + B * (V + pad) + 16,), GUARD, dtype=values.dtype, device=values.device)
    view = buffer.as_strided((B, V), (V + pad, 1), offset)
    view.copy_(values)
    return view, buffer


def offsets(dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Return every start within a 16-byte vector; on the CPU, where none is special, three of them."""
    elements = 16 // dtype.itemsize
    return tuple(range(elements)) if device.type == "cuda" else (0, 1, elements - 1)


def outside(view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return the elements of a buffer that are not in its view."""
    inside = torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return buffer[~inside]


def bisected(chosen, low: int, high: int) -> int:
    """Return a number in (low, high] where `chosen` differs from its value at `low` and from the number before."""
    before = chosen(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen(middle) == before else (low, middle)
    return high


def steps_to(last: int, factor: float) -> list[int]:
    """Return integers from 1 to `last`, each about `factor` times the one before."""
    count = math.ceil(math.log(last) / math.log(factor)) + 1
    return sorted({min(int(factor**i), last) for i in range(count)})


def plan_changes(dtype: str, grad: bool, B: int, narrow_rows: int) -> list[int]:
    """Return a V for every change of plan: there the kernel that serves a row, or its cluster, differs from V - 1's.

    Where two plans take turns many times, one V for each direction. Rows are narrow as `narrow_from(narrow_rows)` says.
    """

    def chosen(V: int) -> tuple[Spec, int, int]:
        spec, launch = plan.select_fused("sm_90a", dtype, V, grad, B, MULTIPROCESSORS)
        return (spec, launch.cluster, launch.turns) if isinstance(launch, plan.WideLaunch) else (spec, 0, 0)

    found = {}
    with narrow_from(narrow_rows):
        for low, high in itertools.pairwise(steps_to(MAX_COLUMNS, 1.005)):
            if chosen(low) != chosen(high):
                V = bisected(chosen, low, high)
                found.setdefault((chosen(V - 1), chosen(V)), V)
    return sorted(found.values())


def is_narrow(dtype: str, V: int, grad: bool) -> bool:
    """Return whether rows are narrow where there are many."""
    return plan.select_fused("sm_90a", dtype, V, grad, 1 << 20, MULTIPROCESSORS)[0].narrow


def boundary_sizes(grad: bool) -> list[object]:
    """Return (device, dtype, V, narrow_rows) for V on both sides of each change of plan and of each chunk of a block.

    Rows are narrow as `narrow_from(narrow_rows)` says: those that are narrow in large batches take either kernel.
    """
    cases = []
    for name in DTYPE_NAMES:
        specs = [spec for spec in FUSED if spec.dtype == name and spec.grad == grad]
        chunks = {plan.STEPS * spec.threads * spec.vector_elements for spec in specs}
        chunks |= {plan.STEPS * plan.WARP * spec.vector_elements for spec in specs}  # what a warp takes at a time
        changes = {V for rows in (0, NARROW_ROWS) for V in plan_changes(name, grad, 3, rows)}
        for V in sorted({V + d for V in changes | chunks for d in (-1, 0, 1)}):
            dtype = getattr(torch, name)
            if V <= CPU_COLUMNS:
                cases.append(pytest.param("cpu", dtype, V, 0, id=f"cpu-{name}-{V}"))
            for rows in (0, NARROW_ROWS) if grad and is_narrow(name, V, grad) else (0,):
                label = f"cuda-{name}-{V}-{rows}"
                cases.append(pytest.param("cuda:0", dtype, V, rows, id=label, marks=pytest.mark.gpu))
    return cases


@pytest.mark.parametrize(("device", "dtype", "V", "narrow_rows"), boundary_sizes(grad=True), indirect=["device"])
def test_gradient_and_sums_are_right_on_both_sides_of_every_plan_boundary(draw, device, dtype, V, narrow_rows):
    x, labels = draw.logits(3, V, dtype, device), draw.labels(3, V, device)
    labels[1] = V - 1  # the last column is where a wrong end shows
    with narrow_from(narrow_rows):
        run_and_check(x, labels, z_loss_multiplier=1e-4)


@pytest.mark.parametrize(("device", "dtype", "V", "narrow_rows"), boundary_sizes(grad=False), indirect=["device"])
def test_loss_without_gradient_is_right_on_both_sides_of_every_plan_boundary(draw, device, dtype, V, narrow_rows):
    x, labels = draw.logits(3, V, dtype, device), draw.labels(3, V, device)
    original = x.clone()
    with narrow_from(narrow_rows):
        loss = launched(x, labels, None, z_loss_multiplier=1e-4, mean=True)[0]
    options = {"z_loss_multiplier": 1e-4}
    expected = reference.loss(original, labels, **options)
    assert abs(float(loss) - float(expected)) <= reference.loss_tolerance(original, labels, **options)
    assert torch.equal(x, original)


AROUND_POWERS = [
    *(2, 3, 31),  # less than a vector and less than a line
    *(255, 256, 257, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025),  # what 16 or 32 lanes hold in registers
    *(8191, 8192, 8193),  # what a warp takes
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", AROUND_POWERS)
def test_rows_around_what_lanes_hold_are_right_at_any_base_and_row_stride(draw, device, dtype, V):
    vector = 16 // dtype.itemsize
    options = {"z_loss_multiplier": 1e-3}
    for B in (1, 5, 61) if device.type == "cuda" else (1, 5):
        values, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.2)
        labels[0] = V - 1
        for offset, pad in ((0, 0), (1, 0), (0, 1), (vector - 1, vector), (vector, 3)):
            view, buffer = embedded(values, offset, pad)
            run_and_check(view, labels, **options)
            assert (outside(view, buffer) == GUARD).all(), (B, offset, pad)
            view.copy_(values)
            reference.check(cross_entropy, view, labels, grad_output=3.0, **options)  # its gradient lies contiguous
            with torch.no_grad():
                loss = cross_entropy(view, labels, **options)
            tolerance = reference.loss_tolerance(values, labels, **options)
            assert abs(float(loss) - float(reference.loss(values, labels, **options))) <= tolerance, (B, offset, pad)


def every_kernel() -> list[object]:
    """Return (device, dtype, V, V's kernel) for a V of each kernel and cluster that a small batch can meet."""
    cases = []
    for name in DTYPE_NAMES:
        for V in (1, *plan_changes(name, True, 5, 0)):
            with narrow_from(0):
                spec, launch = plan.select_fused("sm_90a", name, V, True, 5, MULTIPROCESSORS)
            label = f"{spec.name}-{getattr(launch, 'cluster', 0)}-{V}"
            if V <= CPU_COLUMNS:
                cases.append(pytest.param("cpu", getattr(torch, name), V, id=f"cpu-{label}"))
            cases.append(pytest.param("cuda:0", getattr(torch, name), V, id=f"cuda-{label}", marks=pytest.mark.gpu))
    return cases


@pytest.mark.parametrize(("device", "dtype", "V"), every_kernel(), indirect=["device"])
def test_ignored_rows_get_zeros_and_add_nothing_in_every_kernel(draw, device, dtype, V):
    x, labels = draw.logits(5, V, dtype, device), draw.labels(5, V, device)
    labels[1], labels[4], labels[2] = -100, -100, V - 1
    without = launched(x, labels, None)[1]
    x[4] = math.nan  # whatever an ignored row holds
    grad = torch.full_like(x, GUARD)
    _, totals = launched(x, labels, grad, z_loss_multiplier=1e-3)
    assert (grad[[1, 4]] == 0).all()
    assert totals[2] == without[2] == 3
    assert totals.isfinite().all()
    kept = torch.tensor([0, 2, 3], device=device)
    assert reference.gradient_roundings(grad[kept], x[kept], labels[kept], z_loss_multiplier=1e-3) <= 1
    expected = float(reference.loss(x[kept], labels[kept], reduction="sum"))
    tolerance = reference.loss_tolerance(x[kept], labels[kept], reduction="sum")
    assert abs(float(totals[0]) - expected) <= tolerance
    assert abs(float(without[0]) - expected) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "V"),
    [pytest.param(*case.values[1:], id=case.id) for case in every_kernel() if case.values[0] != "cpu"],
)
def test_a_label_out_of_range_makes_its_row_nan_and_no_other_in_every_kernel(draw, cuda, dtype, V):
    x, labels = draw.logits(5, V, dtype, cuda), draw.labels(5, V, cuda)
    labels[4] = -100
    clean = torch.empty_like(x)
    _, clean_totals = launched(x, labels, clean, z_loss_multiplier=1e-3)
    others = torch.tensor([0, 1, 3, 4], device=cuda)
    for wrong in (V, -1, 2**32):
        labels[2] = wrong
        grad = torch.full_like(x, GUARD)
        loss, totals = launched(x, labels, grad, z_loss_multiplier=1e-3)
        assert grad[2].isnan().all(), wrong
        assert torch.equal(grad[others], clean[others]), wrong
        assert loss.isnan()
        assert totals[0].isnan()
        assert totals[1] == clean_totals[1]  # the row's log-sum-exp does not depend on its label
        assert totals[2] == 4
        assert launched(x, labels, None)[0].isnan(), wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 127, 129])  # within a few 16-byte vectors
def test_narrow_rows_are_right(draw, device, dtype, V):
    run_and_check(draw.logits(77, V, dtype, device), draw.labels(77, V, device, ignored=0.3), z_loss_multiplier=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 4, 37, 289])
@pytest.mark.parametrize(
    "V",
    [
        41,  # odd and shorter than a warp's vectors
        192,
        668,
        1128,
        4094,  # even, not a multiple of a vector
        32000,  # Llama 2
    ],
)
def test_common_shapes_are_right(draw, device, dtype, B, V):
    if device.type == "cpu":
        B = min(B, 400_000 // V)
    x = draw.logits(B, V, dtype, device, scale=3.0)
    run_and_check(x, draw.labels(B, V, device, ignored=0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("B", "V"),
    [
        (4096, 50257),  # GPT-2, odd
        (4096, 50264),
        (2048, 100352),
        (2048, 102400),
        (1269, 128256),  # Llama 3, a batch that is no multiple of anything
        (1024, 151936),  # Qwen
        (1024, 200064),
        (512, 262144),  # Gemma
        (16384, 1000),
        (16384, 4096),
        (8192, 8192),
    ],
)
def test_large_shapes_are_right(draw, cuda, dtype, B, V):
    run_and_check(draw.logits(B, V, dtype, cuda, scale=3.0), draw.labels(B, V, cuda, ignored=0.1))


def batches_around_the_sum_cluster() -> list[object]:
    """Return (device, V, B) on both sides of where several blocks add the entries, for each kind of kernel."""
    cases = []
    for V, devices in ((8, ("cpu", "cuda:0")), (plan.NARROW[0][0] // 2, ("cuda:0",)), (9001, ("cuda:0",))):

        def entries(B: int, V: int = V) -> bool:
            spec, launch = plan.select_fused("sm_90a", "bfloat16", V, True, B, MULTIPROCESSORS)
            blocks = launch.numbers(B, MULTIPROCESSORS)[1]
            return (blocks if spec.held or spec.narrow else B) >= plan.SUM_CLUSTER_ENTRIES

        B = bisected(entries, 1, 1 << 17)
        for device, d in itertools.product(devices, (-1, 0, 1)):
            marks = [pytest.mark.gpu] if device != "cpu" else []
            cases.append(pytest.param(device, V, B + d, marks=marks, id=f"{device}-{V}-{B + d}"))
    return cases


@pytest.mark.parametrize(("device", "V", "B"), batches_around_the_sum_cluster(), indirect=["device"])
def test_batches_around_the_first_whose_sums_a_cluster_adds_are_right(draw, device, V, B):
    x, labels = draw.logits(B, V, torch.bfloat16, device), draw.labels(B, V, device, ignored=0.2)
    run_and_check(x, labels, z_loss_multiplier=1e-3)


@pytest.mark.parametrize(
    "B",
    [
        *(1023, 1024, 1025),  # the threads that add the losses
        # One block counts the valid rows of a mean, or several.
        *(plan.SUM_CLUSTER_ENTRIES - 1, plan.SUM_CLUSTER_ENTRIES, plan.SUM_CLUSTER_ENTRIES + 1),
        *(8191, 8192, 8193),
        *(65535, 65536, 70000),  # a grid's y and z stop at 65535
    ],
)
def test_any_batch_is_right(draw, device, B):
    x, labels = draw.logits(B, 8, torch.bfloat16, device), draw.labels(B, 8, device, ignored=0.2)
    reference.check(cross_entropy, x, labels, z_loss_multiplier=1e-3)
    run_and_check(x, labels, z_loss_multiplier=1e-3)


def test_rows_narrower_than_a_vector_are_right_in_a_large_batch(draw, device):
    run_and_check(draw.logits(200_000, 3, torch.float16, device), draw.labels(200_000, 3, device, ignored=0.5))


@pytest.mark.gpu
def test_more_rows_than_fp32_counts_exactly_are_right(draw, cuda):
    B = (1 << 24) + 3  # from 2^24 on an fp32 counter that is raised by one stands still
    x, labels = draw.logits(B, 2, torch.bfloat16, cuda), draw.labels(B, 2, cuda)
    original = x.clone()
    totals = cross_entropy_with_grad_kernel(x, labels)
    assert abs(float(totals.n_valid) - B) <= 4  # spacing of fp32 there is 2
    assert float(totals.ce_sum) == pytest.approx(float(reference.loss(original, labels, reduction="sum")), rel=1e-5)
    assert reference.gradient_roundings(x, original, labels) <= 1


def test_a_single_logit_gives_loss_zero_and_gradient_zero(device):
    x = torch.tensor([[3.5], [-7.0]], device=device)
    totals = cross_entropy_with_grad_kernel(x, torch.tensor([0, 0], device=device))
    assert totals.ce_sum == 0
    assert not x.any()


@pytest.mark.parametrize("shape", [(0, 1), (0, 1000), (0, 128256)])
def test_an_empty_batch_gives_zeros(device, shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    totals = cross_entropy_with_grad_kernel(x, torch.empty(0, dtype=torch.int64, device=device))
    assert [float(total) for total in totals] == [0, 0, 0]
    assert all(total.shape == () and total.dtype == torch.float32 for total in totals)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "V",
    [
        1,
        5,  # within one vector at some offsets, across two at others
        8,
        9,
        257,
        3000,  # a warp a row, in every dtype
        4096,  # rows keep one alignment
        4097,  # every row has its own
        33001,  # several blocks per row
    ],
)
def test_every_alignment_of_base_and_rows_is_right_and_writes_only_the_rows(draw, device, dtype, V):
    elements = 16 // dtype.itemsize
    B = 9 if V < 1000 else 2
    values, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device)
    labels[0], labels[-1] = 0, V - 1
    options = {"z_loss_multiplier": 1e-3}
    for offset in offsets(dtype, device):
        for pad in (0, 1, 3, elements) if V < 1000 else (0, 3):
            view, buffer = embedded(values, offset, pad)
            cross_entropy_with_grad_kernel(view, labels, **options)
            assert reference.gradient_roundings(view, values, labels, **options) <= 1, (offset, pad)
            assert (outside(view, buffer) == GUARD).all(), (offset, pad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [3, 1000, 3001, 4097, 33001])
def test_an_ignored_row_gets_zeros_and_its_neighbours_keep_theirs_at_every_alignment(draw, device, dtype, V):
    values = draw.logits(3, V, dtype, device)
    labels = torch.tensor([V // 2, -100, V - 1], device=device)
    for offset in offsets(dtype, device):
        view, buffer = embedded(values, offset)
        cross_entropy_with_grad_kernel(view, labels)
        assert reference.gradient_roundings(view, values, labels) <= 1, offset
        assert (outside(view, buffer) == GUARD).all(), offset


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [5, 1000, 3001, 4097, 33001])
def test_in_place_equals_out_of_place_bit_for_bit_wherever_the_output_lies(draw, device, dtype, V):
    values, labels = draw.logits(5, V, dtype, device), draw.labels(5, V, device)
    labels[1], labels[2], labels[3] = -100, 0, V - 1
    in_place, _ = embedded(values, 1)
    totals = cross_entropy_with_grad_kernel(in_place, labels, z_loss_multiplier=1e-3)
    for offset in offsets(dtype, device):
        for pad in (0, 1):
            source, source_buffer = embedded(values, 1)
            out, buffer = embedded(torch.full_like(values, GUARD), offset, pad)
            _, other = launched(source, labels, out, z_loss_multiplier=1e-3)
            assert torch.equal(out, in_place), (offset, pad)
            assert torch.equal(torch.stack(totals), other), (offset, pad)
            assert (outside(out, buffer) == GUARD).all(), (offset, pad)
            assert torch.equal(source, values)
            assert (outside(source, source_buffer) == GUARD).all()


@pytest.mark.parametrize("V", [100, 1000, 5000, 20_000])  # each kind of kernel
# What a warp counts at a time, and where a kernel counts instead.
@pytest.mark.parametrize("B", [1, 31, 32, 33, 255, 256, 257])
def test_the_incoming_gradient_and_the_mean_are_applied_before_the_only_rounding(draw, device, V, B):
    x, labels = draw.logits(B, V, torch.bfloat16, device), draw.labels(B, V, device, ignored=0.4)
    for by_mean in (True, False):
        grad = torch.full_like(x, GUARD)
        _, totals = launched(
            x, labels, grad, mean=True, grad_by_mean=by_mean, incoming=torch.tensor(3.0, device=device)
        )
        options = {"reduction": "mean" if by_mean else "sum", "grad_output": 3.0}
        assert reference.gradient_roundings(grad, x, labels, **options) <= 1
        assert totals[:2].isnan().all()  # nothing is summed


def test_the_mean_of_a_launch_is_applied_before_the_only_rounding(draw, device):
    x, labels = draw.logits(37, 1000, torch.bfloat16, device), draw.labels(37, 1000, device, ignored=0.4)
    grad = torch.empty_like(x)
    loss, totals = launched(x, labels, grad, mean=True, grad_by_mean=True)
    assert reference.gradient_roundings(grad, x, labels, reduction="mean") <= 1
    assert float(loss) == pytest.approx(float(totals[0] / totals[2]), rel=1e-6)
    loss_only, totals_only = launched(x, labels, None, mean=True)
    assert float(loss_only) == pytest.approx(float(loss), rel=1e-6)
    assert totals_only[2] == totals[2]


def every_plan(arch: str, spec: Spec, V: int, B: int) -> list[Plan]:
    """Return plans of a kernel that fit rows of V elements: any number that a launch may have, whoever chooses it."""
    if spec.held:
        plans = [held_plan(spec, B, turns) for turns in (1, 3)]
    elif spec.narrow:
        plans = [narrow_plan(spec, V, B, slots, turns) for slots in (1, 2) for turns in (1, 3)]
    else:
        kept = spec.grad and not spec.streamed
        # One row each; three with a rest of single rows, of more of them, of two at a time; all rows by one cluster.
        tails = [(1, 0, 1), (3, 0, 1), (3, 3, 1), (3, 4, 2), (B, 0, 1)]
        plans = [
            wide_plan(arch, spec, V, B, cluster, turns, tail, tail_turns=tail_turns, places=places)
            for cluster in (1, 2, 3, 6, 8, 16)
            for turns, tail, tail_turns in tails
            for places in ((0,) if kept else (1, 3, plan.MAX_CHUNKS))
        ]
    return [each for each in dict.fromkeys(plans) if fits(arch, each, V)]


PLAN_SIZES = [
    1,  # less than a vector
    37,  # than a line
    250,
    500,
    1000,
    3000,  # a warp's
    40_001,  # a block's
    300_007,  # several blocks'
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_every_compiled_kernel_has_launches_to_be_forced_for_some_of_the_sizes(arch):
    for spec in FUSED:
        assert any(every_plan(arch, spec, V, 7) for V in PLAN_SIZES), spec.name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "V"),
    [
        pytest.param(spec, V, id=f"{spec.name}-{V}")
        for spec, V in itertools.product(FUSED, PLAN_SIZES)
        if every_plan("sm_90a", spec, V, 7)
    ],
)
def test_every_compiled_kernel_is_right_with_every_launch_it_fits(draw, cuda, spec, V):
    arch, reason = kernels.implementation(cuda)
    if arch is None:
        pytest.skip(reason)
    dtype, options = getattr(torch, spec.dtype), {"z_loss_multiplier": 1e-4}
    B = 7
    plans = every_plan(arch, spec, V, B)
    if not plans:
        pytest.skip(f"no launch of this kernel holds such a row on {arch}")
    x, labels = draw.logits(B, V, dtype, cuda), draw.labels(B, V, cuda)
    labels[2], labels[5] = -100, V - 1
    expected = float(reference.loss(x, labels, reduction="sum", **options))
    tolerance = reference.loss_tolerance(x, labels, reduction="sum", **options)
    for each in plans:
        grad = torch.full_like(x, GUARD) if spec.grad else None
        with forced(each):
            loss, totals = launched(x, labels, grad, **options)
        assert abs(float(loss) - expected) <= tolerance, each
        assert totals[2] == B - 1, each
        if grad is not None:
            assert reference.gradient_roundings(grad, x, labels, **options) <= 1, each


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Held; by a warp, rows of every alignment; by a block; by several.
@pytest.mark.parametrize("V", [100, 1025, 4097, 33001])
def test_rows_that_are_taken_in_turn_get_the_bits_they_get_alone(draw, cuda, dtype, V):
    arch, reason = kernels.implementation(cuda)
    if arch is None:
        pytest.skip(reason)
    B, name = 50, str(dtype).removeprefix("torch.")
    spec, launch = plan.select_fused(arch, name, V, True, B, MULTIPROCESSORS)
    x, labels = draw.logits(B, V, dtype, cuda), draw.labels(B, V, cuda, ignored=0.1)
    x[3, 5], x[7] = math.nan, -math.inf  # rows after such a row are not touched by it
    if spec.held:
        plans = [held_plan(spec, B, turns) for turns in (1, 2, 3, 50)]
    elif spec.narrow:
        plans = [narrow_plan(spec, V, B, slots, turns) for slots in (1, 2, 3) for turns in (1, 2, 3, 50)]
    else:
        plans = [
            wide_plan(arch, spec, V, B, launch.cluster, turns, tail) for turns in (1, 2, 3, 4, 50) for tail in (0, 9)
        ]
    assert all(fits(arch, each, V) for each in plans)
    results = []
    for each in plans:
        grad = torch.full_like(x, GUARD)
        with forced(each):
            _, totals = launched(x, labels, grad)
        results.append((each, grad, totals))
    for each, grad, totals in results[1:]:
        assert reference.same_bits(grad, results[0][1]), each
        if not spec.held and not spec.narrow:
            assert reference.same_bits(totals, results[0][2]), each
        # Rows of a block are added to one entry, so which they are decides the order of the sum.
        torch.testing.assert_close(totals, results[0][2], rtol=2e-6, atol=0, equal_nan=True)


def batches_around_changes() -> list[object]:
    """Return (dtype, V, B) on both sides of each batch at which an H200's plan for some V changes.

    That is: another cluster, or someone takes rows in turn for the first time.
    """
    cases = []
    for name in DTYPE_NAMES:
        for V in (100, 400, 900, 3000, 9001, 32000, 50257, 128256):

            def chosen(B: int, V: int = V, name: str = name) -> tuple[Spec, int, bool]:
                spec, launch = plan.select_fused("sm_90a", name, V, True, B, MULTIPROCESSORS)
                numbers = launch.numbers(B, MULTIPROCESSORS)
                in_turn = numbers[2] > 0 if isinstance(launch, plan.WideLaunch) else numbers[0] > 1
                return spec, getattr(launch, "cluster", 0), in_turn

            most = min(40_000, (1 << 31) // (V * ITEM_BYTES[name]))  # 2 GiB
            for low, high in itertools.pairwise(steps_to(most, 1.05)):
                if chosen(low) != chosen(high):
                    B = bisected(chosen, low, high)
                    cases += [(getattr(torch, name), V, B + d) for d in (-1, 0, 1) if B + d > 0]
    return sorted(set(cases), key=str)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "V", "B"), batches_around_changes(), ids=str)
def test_batches_around_those_that_change_the_plan_are_right(draw, cuda, dtype, V, B):
    with narrow_from(NARROW_ROWS):
        run_and_check(draw.logits(B, V, dtype, cuda), draw.labels(B, V, cuda, ignored=0.1))


def test_some_batches_change_the_plan():
    assert len(batches_around_changes()) > 3 * len(DTYPE_NAMES)


def test_labels_may_have_any_stride_and_alignment(draw, device):
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device, ignored=0.2)
    spread = torch.full((16, 3), 1 << 40, device=device)  # wrong labels between the right ones
    spread[:, 1] = labels
    run_and_check(x.clone(), spread[:, 1])
    run_and_check(x.clone(), torch.tensor(7, device=device).expand(16))


# Counted by each warp, by a block, by several; the last more than a thread has in flight.
@pytest.mark.parametrize("B", [250, 300, 9000, 70_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_of_any_stride_are_counted_for_a_mean(draw, device, B, weighted):
    x, labels = draw.logits(B, 20, torch.float32, device), draw.labels(B, 20, device, ignored=0.2)
    spread = torch.full((B, 3), -100, device=device)
    spread[:, 1] = labels
    weight = torch.rand(20, device=device, generator=draw.generator(device))
    for given in (spread[:, 1], torch.tensor(7, device=device).expand(B), labels.flip(0)[::2]):
        rows = x[: len(given)]
        if weighted:
            one = reference.Incoming(torch.ones((), device=device))
            reference.check_options(cross_entropy, rows, given, incoming=one, weight=weight)
        else:
            reference.check(cross_entropy, rows, given)


def test_one_row_may_have_any_row_stride(draw, device):
    x = draw.logits(1, 100, torch.float32, device)
    for row_stride in (0, 1, 99, 1000):
        run_and_check(x.clone().as_strided((1, 100), (row_stride, 1)), torch.tensor([5], device=device))


def test_one_column_may_have_any_column_stride(draw, device):
    buffer = draw.logits(4, 4, torch.float32, device)
    before = buffer.clone()
    for view in (buffer[:, 1:2], buffer.t()[:, :1], buffer[:1].t()):
        labels = torch.zeros(view.shape[0], dtype=torch.int64, device=device)
        assert cross_entropy_with_grad_kernel(view, labels).ce_sum == 0
        assert not view.any()
        buffer.copy_(before)


def test_rows_of_a_wider_buffer_are_right(draw, device):
    buffer = draw.logits(20, 300, torch.bfloat16, device)
    before = buffer.clone()
    run_and_check(buffer[::2, 7:207], draw.labels(10, 200, device))
    before[::2, 7:207] = buffer[::2, 7:207]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("V", [10, 1000, 40001])
def test_nan_and_infinite_rows_touch_no_other_row(draw, device, V):
    x, labels = draw.logits(9, V, torch.float32, device), draw.labels(9, V, device)
    clean = x.clone()
    cross_entropy_with_grad_kernel(clean, labels)
    x[1, V // 2], x[3, 0], x[5, V - 1] = math.nan, math.inf, math.nan
    x[7] = -math.inf
    totals = cross_entropy_with_grad_kernel(x, labels)
    bad = torch.tensor([1, 3, 5, 7], device=device)
    good = torch.tensor([0, 2, 4, 6, 8], device=device)
    assert x[bad].isnan().all()
    assert torch.equal(x[good], clean[good])
    assert totals.ce_sum.isnan()
    assert totals.n_valid == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 0, 5, 999, 1000, -1, 2**62, -(2**63), 2**63 - 1, 2**32 + 5])
def test_ignore_index_drops_rows_and_no_class_wherever_it_lies(draw, device, dtype, ignore_index):
    x, labels = draw.logits(8, 1000, dtype, device), draw.labels(8, 1000, device)
    labels[0], labels[1] = 5, 0  # 2^32 + 5 narrowed to 32 bits would be 5
    labels[2:4] = ignore_index
    run_and_check(x, labels, z_loss_multiplier=1e-3, ignore_index=ignore_index)


def test_minus_100_is_an_ordinary_wrong_label_under_another_ignore_index(device):
    x, labels = torch.zeros(2, 10, device=device), torch.tensor([-100, 3], device=device)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="got -100 in row 0"):
            cross_entropy_with_grad_kernel(x, labels, ignore_index=-1)
    else:
        assert cross_entropy_with_grad_kernel(x, labels, ignore_index=-1).ce_sum.isnan()
        assert x[0].isnan().all()


WRONG_LABELS = [-1, 10, 11, 2**31, 2**31 + 3, 2**32 + 1, 2**32 - 1, -(2**31) - 1, -(2**32) + 3, 2**63 - 1, -(2**63)]
"""For V = 10; several would be right ones, or -100, if they were narrowed to 32 bits."""


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", WRONG_LABELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_label_out_of_range_makes_its_row_nan_and_touches_no_other_on_the_gpu(draw, cuda, dtype, wrong):
    x, labels = draw.logits(4, 10, dtype, cuda), torch.tensor([3, 9, 0, -100], device=cuda)
    clean = x.clone()
    cross_entropy_with_grad_kernel(clean, labels)
    labels[1] = wrong
    totals = cross_entropy_with_grad_kernel(x, labels)
    assert totals.ce_sum.isnan()
    assert totals.n_valid == 3
    assert x[1].isnan().all()
    others = torch.tensor([0, 2, 3], device=cuda)
    assert torch.equal(x[others], clean[others])


@pytest.mark.parametrize("wrong", WRONG_LABELS)
def test_a_label_out_of_range_raises_before_anything_is_written_on_the_cpu(draw, wrong):
    cpu = torch.device("cpu")
    x, labels = draw.logits(4, 10, torch.float32, cpu), torch.tensor([3, wrong, 0, -100])
    before, version = x.clone(), x._version
    with pytest.raises(IndexError, match=f"labels: expected 0 to 9 or ignore_index=-100, got {wrong} in row 1"):
        cross_entropy_with_grad_kernel(x, labels)
    assert torch.equal(x, before)
    assert x._version == version


def test_z_sum_may_overflow_without_harm_where_the_multiplier_is_zero(device):
    x = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3.2e38]], device=device)
    labels = torch.tensor([0, 1], device=device)
    totals = cross_entropy_with_grad_kernel(x, labels, z_loss_multiplier=0.0)
    assert float(totals.ce_sum) == pytest.approx(math.log(2), rel=1e-6)
    assert totals.z_sum == math.inf
    assert torch.allclose(x, torch.tensor([[0.0, 0, 0], [0.5, -0.5, 0]], device=device), atol=1e-6)


def test_a_target_at_minus_infinity_gives_an_infinite_loss_and_a_finite_gradient(device):
    x = torch.tensor([[0.0, -math.inf, 0.0]], device=device)
    totals = cross_entropy_with_grad_kernel(x, torch.tensor([1], device=device))
    assert totals.ce_sum == math.inf
    assert x.tolist() == [[0.5, -1.0, 0.5]]


def test_an_operation_that_saved_the_logits_raises_in_backward(draw, device):
    for operation in (torch.tanh, lambda leaf: leaf.softmax(dim=-1), torch.exp):
        leaf = draw.logits(4, 7, torch.float32, device).requires_grad_()
        y = operation(leaf)
        cross_entropy_with_grad_kernel(y, torch.tensor([1, 2, 3, 4], device=device))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_the_version_is_raised_on_a_view_and_under_every_grad_mode(draw, device):
    labels = torch.tensor([1, 2, 3, 4], device=device)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        base = draw.logits(5, 7, torch.float32, device)
        version = base._version
        with mode():
            cross_entropy_with_grad_kernel(base[1:], labels)
        assert base._version > version, mode


def test_the_version_is_raised_by_a_launch_that_pytorch_does_not_see(draw, monkeypatch):
    monkeypatch.setattr(kernels.portable, "cross_entropy", lambda *_, **__: None)
    x = draw.logits(4, 7, torch.float32, torch.device("cpu"))
    version = x._version
    cross_entropy_with_grad_kernel(x, torch.tensor([1, 2, 3, 4]))
    assert x._version > version


def test_inference_tensors_work(draw, device):
    with torch.inference_mode():
        x = draw.logits(4, 100, torch.bfloat16, device)
        run_and_check(x, draw.labels(4, 100, device))


def test_a_leaf_that_requires_grad_is_refused_while_gradients_are_recorded(draw, device):
    labels = torch.tensor([1, 2, 3, 4], device=device)
    for leaf in (
        draw.logits(4, 7, torch.float32, device).requires_grad_(),
        torch.nn.Parameter(torch.ones(4, 7).to(device)),
    ):
        before = leaf.detach().clone()
        with pytest.raises(ValueError, match=r"^logits: .*leaf that requires grad"):
            cross_entropy_with_grad_kernel(leaf, labels)
        assert torch.equal(leaf, before)
        with torch.no_grad():
            cross_entropy_with_grad_kernel(leaf, labels)
        assert reference.gradient_roundings(leaf.detach(), before, labels) <= 1
        assert leaf.requires_grad


def test_a_view_of_a_leaf_that_requires_grad_is_refused_while_gradients_are_recorded(draw, device):
    leaf = draw.logits(5, 7, torch.float32, device).requires_grad_()
    with pytest.raises(ValueError, match=r"^logits: .*leaf that requires grad"):
        cross_entropy_with_grad_kernel(leaf[1:], torch.tensor([1, 2, 3, 4], device=device))


def test_works_inside_an_autograd_function(draw, device):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            logits = hidden @ weight.t()
            totals = cross_entropy_with_grad_kernel(logits, labels)
            ctx.save_for_backward(logits, hidden, weight)
            return totals.ce_sum

        @staticmethod
        def backward(ctx, grad):
            logits, hidden, weight = ctx.saved_tensors
            return grad * (logits @ weight), grad * (logits.t() @ hidden), None

    hidden = draw.logits(12, 16, torch.float32, device).requires_grad_()
    weight = torch.nn.Parameter(draw.logits(40, 16, torch.float32, device))
    labels = draw.labels(12, 40, device)
    loss = Loss.apply(hidden, weight, labels)
    actual = torch.autograd.grad(loss, (hidden, weight))
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    plain = torch.nn.functional.cross_entropy(h @ w.t(), labels, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for a, b in zip(actual, torch.autograd.grad(plain, (h, w)), strict=True):
        # 1e-5: fp32 products over 40 classes or 12 rows, whose terms are at most a few units.
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


GOOD = torch.zeros(4, 10)
GOOD_LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[0.0]], GOOD_LABELS), TypeError, "logits: expected a torch.Tensor, got list"),
        ((GOOD, [0, 1, 2, 3]), TypeError, "labels: expected a torch.Tensor, got list"),
        ((GOOD, None), TypeError, "labels: expected a torch.Tensor, got NoneType"),
        ((GOOD.double(), GOOD_LABELS), TypeError, "logits: expected dtype .*got torch.float64"),
        ((GOOD.long(), GOOD_LABELS), TypeError, "logits: expected dtype .*got torch.int64"),
        ((GOOD.to(torch.complex64), GOOD_LABELS), TypeError, "logits: expected dtype .*got torch.complex64"),
        ((GOOD.to(torch.float8_e4m3fn), GOOD_LABELS), TypeError, "logits: expected dtype .*got torch.float8_e4m3fn"),
        *(
            ((GOOD, GOOD_LABELS.to(wrong)), TypeError, f"labels: expected dtype int64, got {wrong}")
            for wrong in (torch.int32, torch.uint8, torch.int16, torch.bool, torch.float32, torch.float64)
        ),
        ((GOOD.to_sparse(), GOOD_LABELS), TypeError, "logits, labels: expected dense tensors, got torch.sparse_coo"),
        ((GOOD[0], GOOD_LABELS), ValueError, r"logits: expected shape \(B, V\), got \(10,\)"),
        (
            (GOOD[None], GOOD_LABELS),
            ValueError,
            r"logits: expected shape \(B, V\), which flatten\(0, -2\) gives, got \(1, 4, 10\)",
        ),
        ((GOOD[0, 0], GOOD_LABELS), ValueError, r"logits: expected shape \(B, V\), got \(\)"),
        ((GOOD, GOOD_LABELS[:3]), ValueError, r"labels: expected shape \(4,\).*got \(3,\)"),
        ((GOOD, GOOD_LABELS[:, None]), ValueError, r"labels: expected shape \(4,\).*got \(4, 1\)"),
        ((GOOD, GOOD_LABELS[0]), ValueError, r"labels: expected shape \(4,\).*got \(\)"),
        ((GOOD, torch.zeros(5, dtype=torch.int64)), ValueError, r"labels: expected shape \(4,\).*got \(5,\)"),
        ((GOOD, GOOD_LABELS.to("meta")), ValueError, "labels: expected device cpu, that of logits, got meta"),
        ((torch.zeros(4, 0), GOOD_LABELS), ValueError, "logits: expected 1 to 2147483647 columns, got 0"),
        ((torch.zeros(0, 0), GOOD_LABELS[:0]), ValueError, "logits: expected 1 to 2147483647 columns, got 0"),
        (
            (torch.zeros(10, 4).t(), GOOD_LABELS),
            ValueError,
            r"logits: expected the last stride to be 1, got strides \(1, 4\)",
        ),
        ((torch.zeros(4, 20)[:, ::2], GOOD_LABELS), ValueError, "logits: expected the last stride to be 1"),
        ((torch.zeros(10).expand(4, 10), GOOD_LABELS), ValueError, "logits: expected rows that do not overlap"),
        (
            (torch.zeros(40).as_strided((4, 10), (9, 1)), GOOD_LABELS),
            ValueError,
            r"logits: expected rows that do not overlap \(row stride at least 10\), got strides \(9, 1\)",
        ),
        ((GOOD, GOOD_LABELS, torch.tensor(1.0)), TypeError, "z_loss_multiplier: expected a float, got Tensor"),
        ((GOOD, GOOD_LABELS, "1"), TypeError, "z_loss_multiplier: expected a float, got str"),
        ((GOOD, GOOD_LABELS, None), TypeError, "z_loss_multiplier: expected a float, got NoneType"),
        ((GOOD, GOOD_LABELS, 0.0, None), TypeError, "ignore_index: expected an int, got NoneType"),
        ((GOOD, GOOD_LABELS, 0.0, -100.0), TypeError, "ignore_index: expected an int, got float"),
        ((GOOD, GOOD_LABELS, 0.0, True), TypeError, "ignore_index: expected an int, got bool"),
        ((GOOD, GOOD_LABELS, 0.0, 2**63), ValueError, "ignore_index: expected an int64, got 9223372036854775808"),
    ],
)
def test_a_bad_argument_is_named_with_what_came_and_nothing_is_written(arguments, error, message):
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments[:2]]
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy_with_grad_kernel(*arguments)
    for a, b in zip(arguments[:2], before, strict=True):
        if isinstance(a, torch.Tensor) and a.layout == torch.strided and a.device.type == "cpu":
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_labels_on_another_device_than_the_logits_are_refused(cuda):
    with pytest.raises(ValueError, match="labels: expected device cuda:0, that of logits, got cpu"):
        cross_entropy_with_grad_kernel(GOOD.to(cuda), GOOD_LABELS)
    with pytest.raises(ValueError, match="labels: expected device cpu, that of logits, got cuda:0"):
        cross_entropy_with_grad_kernel(GOOD, GOOD_LABELS.to(cuda))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_inputs_give_the_same_bits(draw, device, dtype):
    x, labels = draw.logits(300, 1000, dtype, device), draw.labels(300, 1000, device, ignored=0.1)
    first = x.clone()
    first_totals = cross_entropy_with_grad_kernel(first, labels, 1e-4)
    for _ in range(5):
        again = x.clone()
        totals = cross_entropy_with_grad_kernel(again, labels, 1e-4)
        assert torch.equal(again, first)
        assert torch.equal(torch.stack(totals), torch.stack(first_totals))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "V"),
    [
        (65536, 1000),  # more row losses than one block adds
        (8192, 128256),  # the shape that users train
    ],
)
def test_twenty_runs_give_the_same_bits(draw, cuda, B, V):
    x, labels = draw.logits(B, V, torch.bfloat16, cuda), draw.labels(B, V, cuda, ignored=0.1)
    first = x.clone()
    first_totals = torch.stack(cross_entropy_with_grad_kernel(first, labels, 1e-4))
    again = torch.empty_like(x)
    for _ in range(20):
        again.copy_(x)
        totals = cross_entropy_with_grad_kernel(again, labels, 1e-4)
        assert torch.equal(torch.stack(totals), first_totals)
        assert torch.equal(again, first)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [65536, 131072, 262144])  # clusters of several sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_clusters_give_the_same_bits_under_memory_load(draw, cuda, V, dtype):
    x, labels = draw.logits(1000, V, dtype, cuda), draw.labels(1000, V, cuda)
    first = x.clone()
    first_totals = torch.stack(cross_entropy_with_grad_kernel(first, labels))
    load = torch.empty(2, 1 << 28, dtype=torch.uint8, device=cuda)
    again, other = torch.empty_like(x), torch.cuda.Stream(cuda)
    differs = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(50):
        again.copy_(x)
        with torch.cuda.stream(other):
            load[0].copy_(load[1])
        totals = cross_entropy_with_grad_kernel(again, labels)
        differs += (again != first).any()
        differs += (torch.stack(totals) != first_totals).any()
    torch.cuda.synchronize()
    assert differs == 0


@pytest.mark.gpu
def test_a_launch_on_a_side_stream_waits_for_that_stream_alone(draw, cuda):
    source, labels = draw.logits(64, 5000, torch.float32, cuda), draw.labels(64, 5000, cuda)
    cross_entropy_with_grad_kernel(
        source.clone(), labels
    )  # what is loaded here must not tie a later call to this stream
    x = torch.full_like(source, math.nan)
    side = torch.cuda.Stream(cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a launch elsewhere would read NaN and be overwritten by the copy
        x.copy_(source)
        totals = cross_entropy_with_grad_kernel(x, labels)
    torch.cuda.default_stream(cuda).synchronize()
    side.synchronize()
    assert totals.ce_sum.isfinite()
    assert reference.gradient_roundings(x, source, labels) <= 1


@pytest.mark.gpu
def test_two_streams_at_once_do_not_disturb_each_other(draw, cuda):
    sources = [draw.logits(512, V, torch.bfloat16, cuda) for V in (32000, 5003)]
    labels = [draw.labels(512, V, cuda) for V in (32000, 5003)]
    expected, expected_totals = [x.clone() for x in sources], []
    for x, t in zip(expected, labels, strict=True):
        expected_totals.append(torch.stack(cross_entropy_with_grad_kernel(x, t)))
    results: list[list[torch.Tensor]] = [[], []]
    streams = [torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)]
    torch.cuda.synchronize()
    buffers = [[x.clone() for _ in range(10)] for x in sources]
    torch.cuda.synchronize()
    for i in range(10):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[k].append(torch.stack(cross_entropy_with_grad_kernel(buffers[k][i], labels[k])))
    torch.cuda.synchronize()
    for k in range(2):
        assert all(torch.equal(buffer, expected[k]) for buffer in buffers[k])
        assert all(torch.equal(totals, expected_totals[k]) for totals in results[k])


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "V"), [(64, 32000), (5000, 1000), (3, 300_007)])  # plain, many rows, a wide cluster
def test_a_captured_call_follows_its_inputs_when_replayed(draw, cuda, B, V):
    source, labels = draw.logits(B, V, torch.bfloat16, cuda), draw.labels(B, V, cuda, ignored=0.2)
    x = source.clone()
    cross_entropy_with_grad_kernel(x, labels, 1e-4)  # modules are loaded outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source)
        totals = cross_entropy_with_grad_kernel(x, labels, 1e-4)
    for _ in range(3):
        source.copy_(draw.logits(B, V, torch.bfloat16, cuda))
        labels.copy_(draw.labels(B, V, cuda, ignored=0.2))
        graph.replay()
        eager = source.clone()
        eager_totals = cross_entropy_with_grad_kernel(eager, labels, 1e-4)
        assert torch.equal(x, eager)
        assert torch.equal(torch.stack(totals), torch.stack(eager_totals))


@pytest.mark.gpu
def test_a_call_uses_the_device_of_its_tensors(draw, cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for current, other in ((0, 1), (1, 0)):
        there = torch.device("cuda", other)
        with torch.cuda.device(current):
            x, labels = draw.logits(16, 1000, torch.bfloat16, there), draw.labels(16, 1000, there)
            run_and_check(x, labels)
            assert torch.cuda.current_device() == current


def test_a_gpu_without_a_kernel_runs_the_portable_code_and_warns_once(monkeypatch):
    reason = "an old GPU (compute capability 8.0) has no compiled kernel"
    monkeypatch.setattr(kernels, "implementation", lambda device: (None, reason))
    kernels.arch_or_warn.cache_clear()
    try:
        with pytest.warns(UserWarning, match="an old GPU .*portable PyTorch implementation") as caught:
            found = [kernels.arch_or_warn(torch.device("cuda", 0)) for _ in range(2)]
        assert found == [None, None]
        assert len(caught) == 1
    finally:
        kernels.arch_or_warn.cache_clear()


def test_the_cpu_needs_no_kernel_and_is_not_warned_about(draw, recwarn):
    cpu = torch.device("cpu")
    assert kernels.implementation(cpu) == (None, "device cpu has no compiled kernel")
    kernels.arch_or_warn.cache_clear()
    run_and_check(draw.logits(4, 10, torch.float32, cpu), draw.labels(4, 10, cpu))
    assert not recwarn.list


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_and_the_portable_code_agree(draw, cuda, monkeypatch, dtype):
    x, labels = draw.logits(37, 5003, dtype, cuda, scale=2.0), draw.labels(37, 5003, cuda, ignored=0.2)
    ours = x.clone()
    totals = torch.stack(cross_entropy_with_grad_kernel(ours, labels, 1e-4))
    monkeypatch.setattr(kernels, "_compiled_fused", lambda *_: None)
    portable = x.clone()
    portable_totals = torch.stack(cross_entropy_with_grad_kernel(portable, labels, 1e-4))
    torch.testing.assert_close(totals, portable_totals, rtol=2e-6, atol=0)  # fp32 sums in another order
    # Both within one rounding of the truth, so at most one spacing apart.
    torch.testing.assert_close(ours, portable, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("argument", ["logits", "labels"])
def test_a_tensor_without_memory_of_its_own_is_refused(draw, device, argument):
    tensors = {"logits": draw.logits(4, 7, torch.float32, device), "labels": torch.tensor([1, 2, 3, 4], device=device)}
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        tensors[argument] = mode.from_tensor(tensors[argument])
    with pytest.raises(TypeError, match=f"{argument}: expected a plain tensor, got FakeTensor"):
        cross_entropy_with_grad_kernel(**tensors)


def test_the_scale_pass_takes_gradients_of_any_stride(draw, device):
    padded = draw.logits(5, 12, torch.float32, device)
    source = padded[:, :9]
    expected, beside = source * 3, padded[:, 9:].clone()
    kernels.launch_scale(source, source, torch.tensor(3.0, device=device))
    assert torch.equal(source, expected)
    assert torch.equal(padded[:, 9:], beside)
