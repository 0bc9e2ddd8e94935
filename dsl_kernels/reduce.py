"""Combining (max, sum) pairs over a warp and a cluster, and plain sums over a cluster. Knows no labels.

A pair (m, d) stands for a multiset of numbers with maximum m and d = sum exp(x - m). Maxima start from the most
negative finite number, never from -inf, so that no difference of two maxima is inf - inf.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
"""In place of it, where it is called `unit`, any factor above 0: then exp(x - m) stands for 2^((x - m) * unit)."""

LOWEST = -3.4028234663852886e38
WORD_BYTES = 4
WARP = 32


@cute.jit
def exp2(x: Float32):
    """2^x by the hardware, to 2 ulp."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp_shifted(x: Float32, shift: Float32, unit=LOG2E):
    """exp(x - shift). Subtracted before it is scaled: two rounded products would lose what large numbers differ by."""
    return exp2((x - shift) * unit)


@cute.jit
def combine_pairs(m: Float32, d: Float32, m_other: Float32, d_other: Float32):
    """The pair of the union of two multisets."""
    m_new = cute.arch.fmax(m, m_other)
    return m_new, d * exp_shifted(m, m_new) + d_other * exp_shifted(m_other, m_new)


@cute.jit
def warp_combine_pairs(m: Float32, d: Float32):
    """The pair over a warp, in every lane: one maximum for all, then one sum."""
    m_warp = cute.arch.warp_reduction(m, cute.arch.fmax)
    return m_warp, warp_add(d * exp_shifted(m, m_warp))


@cute.jit
def warp_add(value):
    """The sum over a warp, in every lane, in a fixed order."""
    return cute.arch.warp_reduction(value, lambda a, b: a + b)


@cute.jit
def store_async(address: Int32, value: Float32, barrier: Int32):
    """Store a number into a block of the cluster, on whose mbarrier its bytes complete."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, value, barrier],
    )


@cute.jit
def cluster_combine(
    totals,
    combine: cutlass.Constexpr,
    warp_combine: cutlass.Constexpr,
    context,
    slots: cute.Tensor,
    arrived,
    phase: Int32,
    warps: cutlass.Constexpr,
    cluster: Int32,
):
    """The totals over `warps` warps of every block of a cluster, in all their threads.

    Args:
        totals: n fp32 numbers of this warp, of which the first is a maximum; equal in all its lanes.
        combine: gives from (totals, others, context) those of both. The totals of nothing are (LOWEST, 0, ...).
        warp_combine: gives from (totals, context) those over the lanes of a warp, in every lane.
        context: passed on.
        slots: sTotals (n, at least warps * cluster) fp32 in shared memory. Warp w of block r writes slot
            r * warps + w of every block; each block's warps read all of its own slots. Callers alternate between two
            buffers: a warp stores into a buffer again only after it has received, through the other one, what each
            peer sent after its last read of the first.
        arrived: mbarrier of this block for this buffer; where cluster > 1 one thread of the block arrives on it and
            expects WORD_BYTES * n * warps * cluster bytes, once per use, before or after the first bytes come.
        phase: parity of this use of `arrived`.
        warps: warps of a block that take part.
        cluster: blocks of the cluster, all of which have initialised `arrived`.
    """
    n = const_expr(len(totals))
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    slot = cute.arch.block_idx_in_cluster() * warps + warp
    if cluster == 1:
        if lane == 0:
            for q in cutlass.range_constexpr(n):
                slots[q, slot] = totals[q]
        # Orders the warps' stores before the reads below, which would otherwise miss those of a slower warp. Barrier 0
        # belongs to the whole block.
        cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)
    else:
        if lane < cluster:
            target = Int32(cute.arch.map_dsmem_ptr(slots.iterator + n * slot, lane).toint())
            barrier = Int32(cute.arch.map_dsmem_ptr(arrived, lane).toint())
            for q in cutlass.range_constexpr(n):
                store_async(target + q * WORD_BYTES, totals[q], barrier)
        # Orders all the stores into this block's slots before the reads below: the barrier completes when their bytes
        # have come. It also keeps every block alive until nothing more will be stored into it.
        cute.arch.mbarrier_wait(arrived, phase)
    every = (Float32(LOWEST), *(Float32(0.0) for _ in range(n - 1)))
    for read in cutlass.range(lane, warps * cluster, WARP):
        every = combine(every, tuple(slots[q, read] for q in range(n)), context)
    return warp_combine(every, context)


@cute.jit
def begin_cluster_add(arrived):
    """What every thread of a cluster does before `cluster_add`, as early as it can."""
    tid, _, _ = cute.arch.thread_idx()
    if tid == 0 and cute.arch.block_idx_in_cluster() == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def cluster_add(values, partials: cute.Tensor, arrived, warps: cutlass.Constexpr, cluster: Int32):
    """The sums over all threads of a cluster, valid in warp 0 of its block 0 only; always added in the same order.

    Args:
        values: a list of n per-thread values.
        partials: sPartials (n, at least warps * cluster) fp32 in shared memory. Warp w of block r writes column
            r * warps + w of block 0's array.
        arrived: mbarrier of the block; block 0's completes when all columns have come, where there are several blocks.
        warps: warps of a block.
        cluster: blocks of the cluster.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    rank = cute.arch.block_idx_in_cluster()
    n = const_expr(len(values))
    sums = [warp_add(value) for value in values]
    column = rank * warps + warp
    # Orders block 0's start, and the initialisation of its mbarrier, before its peers store into it.
    cute.arch.cluster_wait()
    if cluster == 1:
        if lane == 0:
            for q in cutlass.range_constexpr(n):
                partials[q, warp] = sums[q]
        # Orders the warps' sums before the reads below.
        cute.arch.barrier()
    else:
        if lane == 0:
            barrier = Int32(cute.arch.map_dsmem_ptr(arrived, Int32(0)).toint())
            for q in cutlass.range_constexpr(n):
                place = partials.iterator + cute.crd2idx((q, column), partials.layout)
                store_async(Int32(cute.arch.map_dsmem_ptr(place, Int32(0)).toint()), sums[q], barrier)
    totals = [Float32(0.0) for _ in range(n)]
    if rank == 0 and warp == 0:
        if cluster > 1:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, WORD_BYTES * n * warps * cluster)
            # Orders the sums of all blocks before the reads below, and keeps block 0 alive until they are there.
            cute.arch.mbarrier_wait(arrived, 0)
        for read in cutlass.range(lane, warps * cluster, WARP):
            for q in cutlass.range_constexpr(n):
                totals[q] = totals[q] + partials[q, read]
        for q in cutlass.range_constexpr(n):
            totals[q] = warp_add(totals[q])
    return totals
