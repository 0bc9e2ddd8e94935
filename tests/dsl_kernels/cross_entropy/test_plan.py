"""The launch numbers: each fits its arch, for every size, each choice is a kernel that exists, and no row is lost."""

import itertools
import math

import numpy as np
import pytest

from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.plan import HeldLaunch, NarrowLaunch, WideLaunch
from dsl_kernels.cross_entropy.spec import (
    ARCHS,
    DTYPE_NAMES,
    ENTRY_ELEMENTS,
    ITEM_BYTES,
    MAX_BLOCKS,
    MAX_COLUMNS,
    MAX_ROWS,
    OPTIONS,
    SUMS_HEAD,
    VECTOR_BYTES,
    sums_elements,
)

MULTIPROCESSORS = 132
BATCHES = (1, 7, 64, 256, 8192, 200_000)
FUSED = [spec for spec in plan.SPECS if spec.op == "fused"]
WIDE = [spec for spec in FUSED if not spec.narrow and not spec.held]


def chosen(arch, dtype, V, grad, B=8192, options=""):
    """Return the spec and launch that serve a shape on a GPU with as many multiprocessors as an H200."""
    return plan.select_fused(arch, dtype, V, grad, B, MULTIPROCESSORS, options)


def sizes() -> list[int]:
    """Return every V up to 1000, steps of about a twentieth with their neighbours up to the largest, and, found by
    bisection between the steps, both sides of every change of plan.
    """
    found = set(range(1, 1001))
    V = 1000
    while V < MAX_COLUMNS:
        found |= {V - 1, V, V + 1}
        V += V // 20
    found |= {MAX_COLUMNS - 1, MAX_COLUMNS}
    steps = sorted(found)
    for arch, dtype, grad, B in itertools.product(ARCHS, DTYPE_NAMES, (True, False), (1, 8192)):
        for low, high in itertools.pairwise(steps):
            before, after = kind(arch, dtype, low, grad, B), kind(arch, dtype, high, grad, B)
            while before != after and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if kind(arch, dtype, middle, grad, B) == before else (low, middle)
            if before != after:
                found |= {low, high}
    return sorted(found)


def kind(arch, dtype, V, grad, B):
    """Return what of a plan is compiled in, and its cluster."""
    spec, launch = chosen(arch, dtype, V, grad, B)
    return spec, getattr(launch, "cluster", 0)


SIZES = sizes()
EVERY_KIND = pytest.mark.parametrize(
    ("arch", "dtype", "grad"), [(a, d, g) for a in ARCHS for d in DTYPE_NAMES for g in (True, False)]
)


def test_the_sizes_lie_on_both_sides_of_the_boundaries_that_are_written_down():
    longest = {held * lanes * VECTOR_BYTES for held, lanes in {(spec.held, spec.lanes) for spec in FUSED if spec.held}}
    longest |= {each[0] for each in plan.NARROW} | {plan.NARROW_GRAD_BYTES}
    for row_bytes, item_bytes in itertools.product(longest, set(ITEM_BYTES.values())):
        assert {row_bytes // item_bytes, row_bytes // item_bytes + 1} <= set(SIZES)


@EVERY_KIND
@pytest.mark.parametrize("B", BATCHES)
def test_every_row_is_served_by_a_kernel_that_exists_and_a_launch_that_fits(arch, dtype, grad, B):
    kinds = {(False, False): WideLaunch, (True, False): NarrowLaunch, (False, True): HeldLaunch}
    for V in SIZES:
        spec, launch = chosen(arch, dtype, V, grad, B)
        assert spec in plan.SPECS
        assert (spec.op, spec.dtype, spec.grad) == ("fused", dtype, grad)
        assert type(launch) is kinds[spec.narrow, spec.held > 0]
        assert plan.fits(arch, spec, launch), (V, spec, launch)
        if isinstance(launch, WideLaunch):
            assert 1 <= launch.cluster <= plan.CLUSTER_LIMIT[arch] <= plan.MAX_CLUSTER
            assert launch.turns >= 1
        if not isinstance(launch, HeldLaunch):
            assert launch.smem_bytes <= plan.SMEM_LIMIT_BYTES[arch]


def test_no_kernel_is_built_that_nothing_chooses():
    every = itertools.product(ARCHS, DTYPE_NAMES, SIZES, (True, False), (1, 8192))
    found = {chosen(arch, dtype, V, grad, B)[0] for arch, dtype, V, grad, B in every}
    found |= {plan.select_scale(dtype, 1, MULTIPROCESSORS)[0] for dtype in DTYPE_NAMES}
    found.add(plan.COMBINE)
    for options, dtype, V, grad in itertools.product(OPTIONS, DTYPE_NAMES, SIZES[::5], (True, False)):
        if options and (grad or options != "entropy_backward"):
            found.add(chosen("sm_90a", dtype, V, grad, options=options)[0])
    assert found == set(plan.SPECS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [kind for kind in OPTIONS if kind])
def test_every_size_has_a_kernel_with_options_that_exists_and_fits(arch, options):
    for dtype, V, grad, B in itertools.product(DTYPE_NAMES, SIZES[::3], (True, False), (1, 8192)):
        if options == "entropy_backward" and not grad:
            continue  # only gradients take what comes in
        spec, launch = chosen(arch, dtype, V, grad, B, options)
        assert spec in plan.SPECS
        assert spec.options == ("any" if spec.streamed else options)
        assert plan.fits(arch, spec, launch), V
        if isinstance(launch, WideLaunch):
            assert launch.resident * (launch.smem_bytes + plan.BLOCK_RESERVED_BYTES) <= (
                plan.SMEM_LIMIT_BYTES[arch] + plan.BLOCK_RESERVED_BYTES
            )
        assert max(launch.numbers(B, MULTIPROCESSORS)) < 2**31


@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_gradient_no_cluster_takes_more_rows_than_there_are_waves(arch):
    for V, B in itertools.product((16384, 32000, 128256), (1, 256, 500, 1024, 2048, 4096, 200_000)):
        _, launch = chosen(arch, "bfloat16", V, False, B)
        at_once = launch.resident * MULTIPROCESSORS // launch.cluster
        assert launch.turns <= max(1, -(-B // at_once))
        assert launch.turns <= plan.LOSS_TURNS


# --- What a block holds ---------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("B", [1, 8192])
def test_a_block_of_wide_rows_holds_the_longest_slice_and_has_a_barrier_for_each_chunk(arch, dtype, grad, B):
    for V in SIZES:
        spec, launch = chosen(arch, dtype, V, grad, B)
        if not isinstance(launch, WideLaunch):
            continue
        place_vectors = plan.STEPS * spec.threads
        vectors, rest = divmod(launch.smem_bytes - plan.slice_offset_bytes(spec), VECTOR_BYTES)
        assert rest == 0
        if not grad or spec.streamed:  # chunks come and go
            places, rest = divmod(vectors, place_vectors)
            assert rest == 0
            assert 1 <= places <= plan.MAX_CHUNKS <= 32  # the lanes of one warp start the copies
            continue
        E = spec.vector_elements
        for lead in (0, 1, E - 1, E, geometry.worst_lead(E)):
            slices = [geometry.row_slice(lead, V, launch.cluster, rank, E).vectors for rank in range(launch.cluster)]
            assert max(slices) <= vectors, (V, lead)
        assert geometry.ceil_div(vectors, place_vectors) <= plan.MAX_CHUNKS <= 32, V


@EVERY_KIND
def test_a_slot_of_a_narrow_row_holds_its_whole_vectors_at_any_alignment(arch, dtype, grad):
    seen = 0
    for V in SIZES:
        spec, launch = chosen(arch, dtype, V, grad)
        if not isinstance(launch, NarrowLaunch):
            continue
        seen += 1
        E = spec.vector_elements
        for lead in range(geometry.LINE_VECTORS * E):
            part = geometry.row_slice(lead, V, 1, 0, E)
            assert (part.whole_end - part.whole_begin) * VECTOR_BYTES <= launch.slot_bytes, (V, lead)
        slots, _, slot_bytes, _, _, smem_bytes = launch.numbers(1, MULTIPROCESSORS)
        assert slot_bytes == launch.slot_bytes
        assert smem_bytes >= plan.narrow_slots_offset(launch.warps, slots) + launch.warps * slots * slot_bytes
    assert seen


@EVERY_KIND
def test_the_lanes_that_share_a_held_row_hold_its_whole_vectors_at_any_alignment(arch, dtype, grad):
    seen = 0
    for V in SIZES:
        spec, launch = chosen(arch, dtype, V, grad)
        if not isinstance(launch, HeldLaunch):
            continue
        seen += 1
        E = spec.vector_elements
        for lead in range(geometry.LINE_VECTORS * E):
            part = geometry.row_slice(lead, V, 1, 0, E)
            assert part.whole_end - part.whole_begin <= spec.held * spec.lanes, (V, lead)
        assert launch.block_rows * spec.lanes == spec.threads
    assert seen


def test_a_row_is_held_by_as_few_vectors_as_will_do():
    for dtype, grad in itertools.product(DTYPE_NAMES, (True, False)):
        held = [spec for spec in FUSED if spec.held and (spec.dtype, spec.grad) == (dtype, grad)]
        for V in SIZES:
            fitting = [each for each in held if each.held * each.lanes * each.vector_elements >= V]
            spec, _ = chosen("sm_90a", dtype, V, grad)
            if fitting:
                assert spec.held * spec.lanes == min(each.held * each.lanes for each in fitting)
            else:
                assert not spec.held


@EVERY_KIND
def test_only_rows_that_no_cluster_holds_are_read_twice(arch, dtype, grad):
    streamed = [V for V in SIZES if chosen(arch, dtype, V, grad)[0].streamed]
    if not grad:
        assert not streamed
        return
    narrowest, before = streamed[0], SIZES[SIZES.index(streamed[0]) - 1]
    assert streamed == SIZES[SIZES.index(narrowest) :]
    assert before == narrowest - 1  # found by bisection: the boundary itself
    kept = next(spec for spec in WIDE if spec.dtype == dtype and spec.grad and not spec.streamed)
    launches = [plan.wide_launch(arch, kept, narrowest, cluster, 1) for cluster in range(1, plan.MAX_CLUSTER + 1)]
    assert not any(plan.fits(arch, kept, launch) for launch in launches)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_rows_with_a_gradient_are_narrow_in_large_batches_up_to_a_length_of_their_own(arch, dtype):
    few = plan.NARROW_MIN_ROWS * MULTIPROCESSORS
    longest = {grad: bytes_ // ITEM_BYTES[dtype] for grad, bytes_ in ((True, 15 << 10), (False, 16 << 10))}
    for grad in (True, False):
        V = longest[grad]
        assert chosen(arch, dtype, V, grad, few + 1)[0].narrow
        assert not chosen(arch, dtype, V + 1, grad, few + 1)[0].narrow
        assert chosen(arch, dtype, V, grad, few)[0].narrow is not grad
    for options in ("rows", "softcap"):  # their kernels were not tuned
        assert chosen(arch, dtype, 4096 // ITEM_BYTES[dtype], True, 1, options)[0].narrow


@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_are_shared_by_more_blocks(arch):
    def cluster(V, B, grad=True):
        return chosen(arch, "bfloat16", V, grad, B)[1].cluster

    few = plan.FEW_BLOCKS * MULTIPROCESSORS  # blocks
    many = {V: cluster(V, 1 << 20) for V in (16384, 32000, 50257, 65536, 128256)}
    assert many == {16384: 1, 32000: 2, 50257: 4, 65536: 4, 128256: 8}
    for V, more in ((32000, 3), (50257, 5), (65536, 6)):
        B = -(-few // many[V])
        assert (cluster(V, B - 1), cluster(V, B)) == (more, many[V])
    for V in (16384, 128256):  # not shared; shared by as many as an even cluster has
        assert cluster(V, 256) == many[V]
    assert cluster(50257, 256, grad=False) == cluster(50257, 1 << 20, grad=False)


def test_blocks_are_added_until_each_multiprocessor_has_some_but_never_without_a_chunk():
    def cluster(V, B, grad=True):
        return chosen("sm_90a", "bfloat16", V, grad, B)[1].cluster

    enough = math.ceil(plan.FILL_BLOCKS * MULTIPROCESSORS)
    for grad in (True, False):
        assert (cluster(16384, enough, grad), cluster(16384, enough - 1, grad)) == (1, 2)
        assert cluster(128256, 1, grad) == plan.MAX_CLUSTER
    V = plan.CHUNK_BYTES // ITEM_BYTES["bfloat16"]
    assert [cluster(chunks * V, 1) for chunks in (1, 2, 3, 4, 8, 16)] == [1, 2, 2, 4, 8, 16]
    assert cluster(2 * V - 1, 1) == 1


@EVERY_KIND
def test_a_wider_row_never_has_a_smaller_cluster_where_it_is_kept(arch, dtype, grad):
    plans = [chosen(arch, dtype, V, grad) for V in SIZES]
    clusters = [launch.cluster for spec, launch in plans if isinstance(launch, WideLaunch) and not spec.streamed]
    assert clusters == sorted(clusters)


@EVERY_KIND
def test_a_smaller_batch_never_has_a_smaller_cluster(arch, dtype, grad):
    for V in SIZES[::7]:
        plans = [chosen(arch, dtype, V, grad, B) for B in (*range(1, 100), *BATCHES[3:])]
        clusters = [launch.cluster for spec, launch in plans if isinstance(launch, WideLaunch)]
        assert clusters == sorted(clusters, reverse=True)


def test_the_parts_of_shared_memory_before_the_rows_have_room_and_are_aligned():
    for spec in FUSED:
        warps = spec.threads // plan.WARP
        if spec.narrow:
            assert ENTRY_ELEMENTS * 4 * warps <= plan.NARROW_PARTIAL_BYTES
            assert plan.NARROW_PARTIAL_BYTES % 8 == 0  # the mbarriers follow
            for slots in (1, 2, 3):
                offset = plan.narrow_slots_offset(warps, slots)
                assert offset % 128 == 0
                assert offset >= plan.NARROW_PARTIAL_BYTES + 8 * warps * slots
        elif not spec.held:
            offset = plan.slice_offset_bytes(spec)
            assert offset % 128 == 0
            assert plan.BARRIER_BYTES >= 8 * (2 * plan.MAX_CHUNKS + 2)
            buffer = plan.totals_bytes(plan.total_words(spec), spec.threads)
            assert buffer >= 4 * plan.total_words(spec) * warps * plan.MAX_CLUSTER
            assert offset >= plan.BARRIER_BYTES + 2 * buffer


@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_blocks_as_a_plan_counts_on_have_room_together(arch):
    one_block_more = plan.SMEM_LIMIT_BYTES[arch] + plan.BLOCK_RESERVED_BYTES  # all of a multiprocessor's
    for V, grad in itertools.product(SIZES, (True, False)):
        spec, launch = chosen(arch, "bfloat16", V, grad)
        if isinstance(launch, WideLaunch):
            assert 1 <= launch.resident <= plan.resident_blocks(arch, spec)
            assert launch.resident * (launch.smem_bytes + plan.BLOCK_RESERVED_BYTES) <= one_block_more, V


def test_a_launch_that_does_not_fit_is_seen_as_such():
    spec, launch = chosen("sm_90a", "bfloat16", 128256, True)
    assert plan.fits("sm_90a", spec, launch)
    assert not plan.fits("sm_90a", spec, launch._replace(cluster=plan.MAX_CLUSTER + 1))
    at_limit = launch._replace(cluster=plan.CLUSTER_LIMIT["sm_120a"])
    assert plan.fits("sm_120a", spec, at_limit)
    assert not plan.fits("sm_120a", spec, at_limit._replace(cluster=at_limit.cluster + 1))
    limit = plan.SMEM_LIMIT_BYTES["sm_90a"]
    all_chunks = plan.slice_offset_bytes(spec) + plan.MAX_CHUNKS * plan.STEPS * spec.threads * VECTOR_BYTES
    most = min(limit, all_chunks)
    assert plan.fits("sm_90a", spec, launch._replace(smem_bytes=most))
    assert not plan.fits("sm_90a", spec, launch._replace(smem_bytes=most + VECTOR_BYTES))
    smaller = plan.SMEM_LIMIT_BYTES["sm_120a"]
    assert smaller < all_chunks
    assert plan.fits("sm_120a", spec, at_limit._replace(smem_bytes=smaller))
    assert not plan.fits("sm_120a", spec, at_limit._replace(smem_bytes=smaller + VECTOR_BYTES))
    spec, launch = chosen("sm_90a", "bfloat16", 4096, True)
    assert plan.fits("sm_90a", spec, launch._replace(smem_bytes=limit))
    assert not plan.fits("sm_90a", spec, launch._replace(smem_bytes=limit + VECTOR_BYTES))


# --- Which rows a block takes ---------------------------------------------------------------------------


def rows_of_wide(numbers, B):
    """Return every row that a cluster takes, as `wide.WideRows.rows` counts them."""
    _, clusters, long, long_turns, short_turns, _ = numbers
    rows = []
    for first, stride, turns, count in (
        (0, long, long_turns, long),
        (long_turns * long, clusters - long, short_turns, clusters - long),
    ):
        each = np.arange(count)
        rows += [first + each + turn * stride for turn in range(turns)]
    return np.concatenate(rows)


def rows_of_narrow(numbers, warps, B):
    """Return every row that a warp takes, as `narrow.NarrowRows.rows` counts them."""
    _, blocks, _, turns, _, _ = numbers
    first = np.arange(blocks)[:, None] * (warps * turns) + np.arange(warps)
    rows = first[..., None] + np.arange(turns) * warps
    return rows[rows < B]


def rows_of_held(numbers, block_rows, B):
    """Return every row that a group of lanes takes, as `held.HeldRows.rows` counts them."""
    turns, blocks, *_ = numbers
    first = np.arange(blocks)[:, None] * (block_rows * turns) + np.arange(block_rows)
    rows = first[..., None] + np.arange(turns) * block_rows
    return rows[rows < B]


def rows_taken(launch, numbers, B):
    """Return every row that the launch works on."""
    if isinstance(launch, WideLaunch):
        return rows_of_wide(numbers, B)
    if isinstance(launch, NarrowLaunch):
        return rows_of_narrow(numbers, launch.warps, B)
    return rows_of_held(numbers, launch.block_rows, B)


def every_launch():
    """Return a launch of each family and cluster that is chosen, once."""
    found = {}
    for arch, dtype, grad, B in itertools.product(ARCHS, DTYPE_NAMES, (True, False), (1, 8192)):
        for V in SIZES:
            _, launch = chosen(arch, dtype, V, grad, B)
            if isinstance(launch, WideLaunch):
                found.setdefault((launch.cluster, launch.turns, launch.resident, launch.tail_waves), launch)
            elif isinstance(launch, NarrowLaunch):
                found.setdefault(launch.warps, launch)
            else:
                found.setdefault(launch, launch)
    return list(found.values())


LAUNCHES = every_launch()
FAMILIES = pytest.mark.parametrize("launch", LAUNCHES, ids=str)


def test_the_launches_looked_at_are_of_every_kind():
    assert {type(launch) for launch in LAUNCHES} == {WideLaunch, NarrowLaunch, HeldLaunch}


@FAMILIES
@pytest.mark.parametrize("multiprocessors", [1, 4, MULTIPROCESSORS, 148])
def test_every_row_is_taken_exactly_once(launch, multiprocessors):
    batches = {*range(1, 200), *range(190, 6000, 97)}
    batches |= {8192, 65_535, 65_536, 65_537, 200_000}
    batches |= {B + d for B in first_batches_in_turn(launch, multiprocessors) for d in (-1, 0, 1) if B + d > 0}
    for B in sorted(batches):
        numbers = launch.numbers(B, multiprocessors)
        assert len(numbers) == 6
        rows = rows_taken(launch, numbers, B)
        assert rows.size == B, (B, numbers)
        assert (np.bincount(rows, minlength=B) == 1).all(), (B, numbers)


def takes_turns(launch, B, multiprocessors):
    """Return whether anyone takes more than one row in turn."""
    numbers = launch.numbers(B, multiprocessors)
    if isinstance(launch, WideLaunch):
        return (numbers[2] > 0 and numbers[3] > 1) or numbers[4] > 1
    return numbers[3 if isinstance(launch, NarrowLaunch) else 0] > 1


def first_batches_in_turn(launch, multiprocessors):
    """Return the smallest batch in which someone takes rows in turn, where there is one."""
    low, high = 0, 1 << 22
    if not takes_turns(launch, high, multiprocessors):
        return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if takes_turns(launch, middle, multiprocessors) else (middle, high)
    return [high]


@FAMILIES
def test_no_block_is_idle_and_there_are_no_more_entries_than_the_workspace_has(launch):
    for B in (*range(1, 300), 8192, 200_000, MAX_ROWS):
        if isinstance(launch, WideLaunch) and B == MAX_ROWS:
            continue  # an entry a row, of more than a grid holds
        numbers = launch.numbers(B, MULTIPROCESSORS)
        entries = B
        if isinstance(launch, WideLaunch):
            cluster, clusters, long, long_turns, short_turns, smem_bytes = numbers
            assert (cluster, smem_bytes) == (launch.cluster, launch.smem_bytes)
            assert 0 <= long <= clusters <= B
            assert min(long_turns, short_turns) >= 1
            assert long * long_turns + (clusters - long) * short_turns == B
            assert clusters * cluster <= MAX_BLOCKS
        else:
            rows = launch.warps * numbers[3] if isinstance(launch, NarrowLaunch) else launch.block_rows * numbers[0]
            entries = numbers[1]
            assert 1 <= entries <= MAX_BLOCKS
            assert (entries - 1) * rows < B <= entries * rows
            assert entries * rows < 2**31  # the kernels count rows in 32 bits
        assert sums_elements(B) >= SUMS_HEAD + 4 * entries


@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_more_rows_than_a_grid_holds_are_refused_with_a_limit_that_holds(cluster, turns):
    launch = WideLaunch(cluster, turns, 1 << 16, 2, 0.5)

    def refusal(B):
        try:
            numbers = launch.numbers(B, MULTIPROCESSORS)
        except ValueError as error:
            return str(error)
        assert numbers[0] * numbers[1] <= MAX_BLOCKS
        return None

    low, high = 1, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refusal(middle) else (middle, high)
    text = refusal(high)
    assert text is not None
    prefix, got = f"logits: expected at most {{}} rows of this width, got {high}".split("{}")
    assert text.startswith(prefix)
    assert text.endswith(got)
    most = int(text.removeprefix(prefix).split()[0])
    assert most < high
    assert most >= MAX_BLOCKS // cluster  # no fewer than a cluster a row would allow
    assert all(refusal(most - d) is None for d in range(2 * turns)), most


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_as_many_rows_as_are_accepted_fit_a_grid_where_they_are_not_wide(dtype, grad):
    for V in SIZES:
        _, launch = chosen("sm_90a", dtype, V, grad, MAX_ROWS)
        if not isinstance(launch, WideLaunch):
            assert launch.numbers(MAX_ROWS, MULTIPROCESSORS)[1] <= MAX_BLOCKS


# --- Refusals and scaling -------------------------------------------------------------------------------


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
        plan.select_fused(*arguments, 8, MULTIPROCESSORS)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("elements", [1, 10**6, 8192 * 128256, 2**40])
def test_scaling_is_served_by_a_kernel_that_exists_and_a_grid_that_fits(dtype, elements):
    for multiprocessors in (1, 78, 132, 148):
        spec, launch = plan.select_scale(dtype, elements, multiprocessors)
        assert spec in plan.SPECS
        assert (spec.op, spec.dtype) == ("scale", dtype)
        assert multiprocessors <= launch.blocks <= MAX_BLOCKS


def test_a_larger_gradient_is_scaled_by_more_blocks():
    few, many = (plan.select_scale("bfloat16", elements, 132)[1].blocks for elements in (1000, 1 << 33))
    assert few < many
