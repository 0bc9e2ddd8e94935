"""The launch numbers: each one fits its arch, for every size, and each choice is a kernel that exists."""

import pytest

from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, MAX_BLOCKS, MAX_COLUMNS, MAX_ROWS, VECTOR_BYTES

MULTIPROCESSORS = 132


def sizes() -> list[int]:
    """Return every V up to 2000, then steps of about a hundredth, each with its neighbours, up to the largest."""
    found = set(range(1, 2001))
    V = 2000
    while V < MAX_COLUMNS:
        found |= {V - 1, V, V + 1}
        V += max(1, V // 100)
    found |= {MAX_COLUMNS - 1, MAX_COLUMNS}
    found |= {row_bytes // 2 + d for row_bytes, _ in plan.SHAPES for d in (-1, 0, 1)}
    found |= {row_bytes // 4 + d for row_bytes, _ in plan.SHAPES for d in (-1, 0, 1)}
    return sorted(V for V in found if 1 <= V <= MAX_COLUMNS)


SIZES = sizes()
EVERY_KIND = pytest.mark.parametrize(
    ("arch", "dtype", "grad"), [(a, d, g) for a in ARCHS for d in DTYPE_NAMES for g in (True, False)]
)


@EVERY_KIND
def test_every_row_is_served_by_a_kernel_that_exists_and_a_launch_that_fits(arch, dtype, grad):
    for V in SIZES:
        spec, launch = plan.select_fused(arch, dtype, V, grad)
        assert spec in plan.SPECS
        assert (spec.op, spec.dtype, spec.grad) == ("fused", dtype, grad)
        assert plan.fits(arch, spec, launch), (V, spec, launch)
        assert 1 <= launch.cluster <= plan.CLUSTER_LIMIT[arch] <= plan.MAX_CLUSTER
        assert launch.rows >= 1
        assert launch.smem_bytes <= plan.SMEM_LIMIT_BYTES[arch]


@EVERY_KIND
def test_a_block_holds_the_longest_slice_at_any_alignment_and_has_a_barrier_for_each_chunk(arch, dtype, grad):
    for V in SIZES:
        spec, launch = plan.select_fused(arch, dtype, V, grad)
        if spec.streamed:
            assert launch.smem_bytes >= plan.slice_offset_bytes(spec.threads)
            continue
        E = spec.vector_elements
        for lead in (0, 1, E - 1):
            slices = [geometry.row_slice(lead, V, launch.cluster, rank, E).vectors for rank in range(launch.cluster)]
            assert plan.slice_offset_bytes(spec.threads) + max(slices) * VECTOR_BYTES <= launch.smem_bytes, (V, lead)
            chunks = geometry.ceil_div(max(slices), plan.STEPS * spec.threads)
            assert chunks <= plan.MAX_CHUNKS <= 32, (V, lead)  # the lanes of one warp start the copies


@EVERY_KIND
def test_only_rows_that_no_cluster_holds_are_read_twice(arch, dtype, grad):
    streamed = [plan.select_fused(arch, dtype, V, grad)[0].streamed for V in SIZES]
    assert streamed == sorted(streamed)
    assert streamed[-1]
    widest = SIZES[streamed.index(True) - 1]
    item_bytes = VECTOR_BYTES // plan.select_fused(arch, dtype, 1, grad)[0].vector_elements
    # Most of the shared memory of the largest cluster: a wider row would not fit it.
    assert widest * item_bytes >= 0.95 * plan.CLUSTER_LIMIT[arch] * plan.SMEM_LIMIT_BYTES[arch]


def test_the_start_of_the_slice_leaves_room_for_barriers_and_pairs_and_is_aligned():
    for spec in plan.SPECS:
        if spec.op == "fused":
            offset = plan.slice_offset_bytes(spec.threads)
            assert offset % 128 == 0
            assert offset >= plan.BARRIER_BYTES + 8 * (spec.threads // 32) * plan.MAX_CLUSTER


def test_a_launch_that_does_not_fit_is_seen_as_such():
    spec, launch = plan.select_fused("sm_90a", "bfloat16", 128256, True)
    assert plan.fits("sm_90a", spec, launch)
    assert not plan.fits("sm_90a", spec, launch._replace(cluster=plan.MAX_CLUSTER + 1))
    assert not plan.fits("sm_120a", spec, launch._replace(cluster=plan.CLUSTER_LIMIT["sm_120a"] + 1))
    limit = plan.SMEM_LIMIT_BYTES["sm_90a"]
    assert not plan.fits("sm_90a", spec, launch._replace(smem_bytes=limit + 16))
    narrow = min((spec for spec in plan.SPECS if spec.op == "fused"), key=lambda spec: spec.threads)
    all_chunks = plan.MAX_CHUNKS * plan.STEPS * narrow.threads * VECTOR_BYTES
    full = launch._replace(cluster=1, smem_bytes=plan.slice_offset_bytes(narrow.threads) + all_chunks)
    assert plan.fits("sm_90a", narrow, full)
    assert full.smem_bytes + VECTOR_BYTES <= limit
    assert not plan.fits("sm_90a", narrow, full._replace(smem_bytes=full.smem_bytes + VECTOR_BYTES))


@pytest.mark.parametrize("V", [1, 1000, 32000, 50257, 128256, 200_064, 2_000_000])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_clusters_of_a_grid_share_all_rows_and_take_no_more_in_turn_than_planned(dtype, V):
    _, launch = plan.select_fused("sm_90a", dtype, V, True)
    for B in [*range(1, 300), 1023, 1024, 4097, 8192, 10_559, 10_560, 10_561, 65_535, 65_536, 131_072, 1 << 20]:
        clusters = launch.clusters(B, MULTIPROCESSORS)
        assert 1 <= clusters <= B
        assert clusters * launch.cluster <= MAX_BLOCKS
        assert -(-B // clusters) <= launch.rows
        if clusters < B:
            assert clusters * launch.cluster >= plan.TURNS_MIN_BLOCKS * MULTIPROCESSORS


def test_more_rows_than_a_grid_holds_are_refused_with_the_limit():
    _, launch = plan.select_fused("sm_90a", "bfloat16", 32000, True)
    assert launch.cluster > 1
    one_row_each = launch._replace(rows=1)
    most = MAX_BLOCKS // launch.cluster
    assert one_row_each.clusters(most, MULTIPROCESSORS) == most
    with pytest.raises(ValueError, match=f"^logits: expected at most {most} rows of this width, got {most + 1}"):
        one_row_each.clusters(most + 1, MULTIPROCESSORS)
    _, launch = plan.select_fused("sm_90a", "bfloat16", 1, True)
    assert launch.clusters(MAX_ROWS, MULTIPROCESSORS) <= MAX_BLOCKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm_80", "bfloat16", 10, True), "arch: expected one of sm_90a, .*got sm_80"),
        (("sm_90", "bfloat16", 10, True), "arch: expected one of sm_90a, .*got sm_90"),
        (("sm_90a", "float64", 10, True), "dtype: expected one of float16, bfloat16, float32, got float64"),
        (("sm_90a", "bf16", 10, True), "dtype: expected one of .*got bf16"),
        (("sm_90a", "bfloat16", 0, True), "V: expected 1 to 2147483647, got 0"),
        (("sm_90a", "bfloat16", -1, True), "V: expected 1 to 2147483647, got -1"),
        (("sm_90a", "bfloat16", 2**31, True), "V: expected 1 to 2147483647, got 2147483648"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_what_came(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plan.select_fused(*arguments)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_scaling_is_served_by_a_kernel_that_exists(dtype):
    for multiprocessors in (1, 78, 132, 148):
        spec, launch = plan.select_scale(dtype, multiprocessors)
        assert spec in plan.SPECS
        assert (spec.op, spec.dtype) == ("scale", dtype)
        assert 1 <= launch.blocks <= MAX_BLOCKS
        assert launch.blocks % multiprocessors == 0


def test_no_kernel_is_built_that_nothing_chooses():
    chosen = {
        plan.select_fused(a, d, V, g)[0] for a in ARCHS for d in DTYPE_NAMES for g in (True, False) for V in SIZES
    }
    chosen |= {plan.select_scale(dtype, MULTIPROCESSORS)[0] for dtype in DTYPE_NAMES}
    assert chosen == set(plan.SPECS)
