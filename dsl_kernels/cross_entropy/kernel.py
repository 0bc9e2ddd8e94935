"""Cross entropy and its gradient: one cluster of blocks per row, the row kept in shared memory between its two uses.

Formula, for a row x of V logits with label y, everything in fp32:

    m      = max_j x_j                    d = sum_j exp(x_j - m)            lse = m + log d
    ce     = log d - (x_y - m)            z = lse^2
    dx_j   = scale * ((1 + 2 * z_loss_multiplier * lse) * exp(x_j - m) / d - [j = y])

Geometry: C blocks, a cluster, share a row; `geometry.row_slice` cuts it on 16-byte addresses into C contiguous slices
and `layouts.slice_layout` deals a slice to the threads. A block has one warp that copies and T / 32 warps that compute.
The copying warp starts bulk asynchronous copies of the whole slice into shared memory, an mbarrier per chunk. As chunks
land, each computing thread keeps a running (m, d); the cluster combines the pairs; the second pass reads shared memory
again, writes the gradient with 16-byte stores, and releases each chunk's place, into which the copying warp at once
fetches the same chunk of the cluster's next row. A cluster takes only a few rows (`plan.Blocks.rows`): the hardware's
scheduler deals the rest, which evens out fast and slow multiprocessors. Rows wider than a cluster holds are streamed:
the same code reads device memory in both passes.

Bytes: V * item read and V * item written per row (streamed: twice V * item read), 8 label, 8 row losses.

Numerics: the shift is subtracted before it is scaled by log2(e), so a large common offset costs nothing; the loss is
formed from two shifted terms, so it keeps its fraction where lse has lost it; the target's 1 is subtracted in fp32 and
the gradient rounded to the logits' dtype once. exp2 is the hardware's (2 ulp), the loss's log the accurate one.

Ordering and aliasing: the gradient may overwrite the logits. A block uses only its own slice's columns. A bulk copy
moves whole 16-byte granules, so at ragged ends it also loads up to 14 bytes beside the row, of its neighbours or of
nobody, which are never used: they share a granule with an element of the row, and memory is allocated in granules no
smaller. Every element is written after its last read: by the thread that read it, or from shared memory. No row waits
for another row's store. Row losses go to a workspace of the call; a dependent kernel adds them in a fixed order: no
atomics, no counter to reset, the same bits every time.

Source: online softmax normaliser, Milakov and Gimelshein 2018 (arXiv:1805.02867), per thread; pairs combined as there.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce
from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import CE_SUM, LOSS, N_VALID, SUMS_HEAD, VECTOR_BYTES, Z_SUM, Spec

LN2 = 1.0 / reduce.LOG2E
NAN = float("nan")
IGNORED, OUT_OF_RANGE = -1, -2
SUM_WARPS = plan.SUM_THREADS // reduce.WARP


class Work(NamedTuple):
    """What a block works on: its part of every `clusters`-th row from `first_row` on."""

    cluster: Int32
    """Blocks that share a row."""
    first_row: Int32
    clusters: Int32
    rows: Int32
    """Rows of this block's cluster."""
    chunks: Int32
    """Chunks of a row's slice, the same for all rows."""
    smem: Int32
    """Address of the block's shared memory."""


class Factors(NamedTuple):
    """What the caller said of the loss, as for the launcher."""

    ignore_index: Int64
    z_loss_multiplier: Float32
    grad_scale: Float32
    grad_by_mean: Int32


class FusedCrossEntropy:
    """Launcher of the loss and, if `spec.grad`, dlogits: counts labels where asked, runs the rows, adds their
    losses.
    """

    def __init__(self, spec: Spec) -> None:
        self.dtype = cute_dtype(spec)
        self.threads, self.grad, self.streamed = spec.threads, spec.grad, spec.streamed
        self.item_bytes = self.dtype.width // 8
        self.vector_elements = spec.vector_elements
        self.warps = spec.threads // reduce.WARP
        self.resident_blocks = plan.resident_blocks(spec)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (B, V) fp16|bf16|fp32, row stride any, column stride 1
        labels: cute.Tensor,  # (B,) int64, any stride
        grad_logits: cute.Tensor,  # (B, V) dtype of logits, row stride any, column stride 1; may be logits
        sums: cute.Tensor,  # (SUMS_HEAD + 2B,) fp32: ce_sum, z_sum, n_valid, loss; ce of each row; z of each row
        loss: cute.Tensor,  # () fp32
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        grad_scale: Float32,
        mean: Int32,  # 1: loss is divided by max(n_valid, 1)
        grad_by_mean: Int32,  # 1: the gradient is too
        cluster: Int32,  # blocks that share a row
        clusters: Int32,  # clusters that share the rows
        smem_bytes: Int32,
        stream: cuda.CUstream,
    ):
        B = logits.shape[0]
        sum_cluster = 1 + (plan.SUM_CLUSTER - 1) * cutlass.min(B // plan.SUM_CLUSTER_ROWS, 1)
        sum_shape = {"grid": [sum_cluster, 1, 1], "block": [plan.SUM_THREADS, 1, 1], "cluster": [sum_cluster, 1, 1]}
        if grad_by_mean != 0:
            self.count_valid(labels, sums, ignore_index, sum_cluster).launch(**sum_shape, stream=stream)
        self.rows(
            logits,
            labels,
            grad_logits,
            sums,
            ignore_index,
            z_loss_multiplier,
            grad_scale,
            grad_by_mean,
            cluster,
            clusters,
        ).launch(
            grid=[cluster * clusters, 1, 1],
            block=[self.threads + reduce.WARP, 1, 1],
            cluster=[cluster, 1, 1],
            min_blocks_per_mp=self.resident_blocks,
            preferred_smem_carveout=100,
            smem=smem_bytes,
            stream=stream,
        )
        # Its launch overlaps the end of the rows; it waits for them on the device before it reads.
        self.add_rows(sums, labels, loss, ignore_index, z_loss_multiplier, mean, sum_cluster).launch(
            **sum_shape, stream=stream, use_pdl=True
        )

    @cute.kernel
    def rows(
        self,
        mX: cute.Tensor,
        labels: cute.Tensor,
        mG: cute.Tensor,
        sums: cute.Tensor,
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        grad_scale: Float32,
        grad_by_mean: Int32,
        cluster: Int32,
        clusters: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first_row, _, _ = cute.arch.cluster_idx()
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.STEPS)
        B, V = mX.shape[0], mX.shape[1]
        rows = (B - 1 - first_row) // clusters + 1
        # The chunks of the longest slice at the alignment of these rows, or at any if that changes from row to row:
        # the same number for every row, so that all mbarriers go through one phase a row.
        lead = Int32(Int64(mX.iterator.toint()) & (VECTOR_BYTES - 1)) // self.item_bytes
        if ((Int64(mX.stride[0]) * self.item_bytes) & (VECTOR_BYTES - 1)) != 0:
            lead = Int32(E - 1)
        chunks = geometry.ceil_div(geometry.slice_vectors(V, cluster, E, lead), S * T)

        # Shared memory: mbarriers | two buffers of sPairs | the slice, to its exact length.
        smem = Int32(cute.arch.get_dyn_smem(Int64, alignment=128).toint())
        landed, released, arrived = mbarriers(smem)
        work = Work(cluster, first_row, clusters, rows, chunks, smem)
        factors = Factors(ignore_index, z_loss_multiplier, grad_scale, grad_by_mean)
        if const_expr(not self.streamed):
            if cute.arch.warp_idx() == self.warps:
                # One lane a chunk: the first row's copies start before anything is waited for.
                chunk = cute.arch.lane_idx()
                if chunk < chunks:
                    cute.arch.mbarrier_init(landed + chunk, 1)
                    cute.arch.mbarrier_init(released + chunk, self.warps)
                # Orders the initialisation of a chunk's mbarriers before the copy engine's arrival on them, which would
                # otherwise be lost, and the block wait for ever.
                cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()
                if chunk < chunks:
                    _, part, offset, address = self.slice_of(mX, first_row, cluster)
                    self.copy_chunk(part, address + offset, chunk, smem)
        if tid == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(arrived + 1, 1)
            cute.arch.mbarrier_init_fence()
        # Early, and waited for before the first exchange of pairs: by then every block has come, so the wait costs
        # nothing.
        cute.arch.cluster_arrive_relaxed()
        # Orders the initialisation of this block's mbarriers before any of its threads waits on one: a wait on garbage
        # could end at once, and the thread read what has not landed.
        cute.arch.barrier()

        if cute.arch.warp_idx() == self.warps:
            if const_expr(not self.streamed):
                if cute.arch.lane_idx() == 0:
                    self.produce(mX, work)
        else:
            self.consume(mX, labels, mG, sums, factors, work)

    @cute.jit
    def slice_of(self, mX: cute.Tensor, row: Int32, cluster: Int32):
        """The block's part of a row: (lead, part, byte offset of the slice from the row's start, the row's address)."""
        # The row index is widened before it meets a stride: more than 2^31 elements are common.
        address = Int64((mX.iterator + Int64(row) * Int64(mX.stride[0])).toint())
        lead = Int32(address & (VECTOR_BYTES - 1)) // self.item_bytes
        rank = cute.arch.block_idx_in_cluster()
        part = geometry.row_slice(lead, mX.shape[1], cluster, rank, self.vector_elements, cutlass.min, cutlass.max)
        offset = Int64(part.first_vector) * VECTOR_BYTES - Int64(lead * self.item_bytes)
        return lead, part, offset, address

    @cute.jit
    def copy_chunk(self, part, x_slice: Int64, chunk: Int32, smem: Int32):
        """One thread: start the bulk copy of a chunk (perhaps an empty one) of the slice at `x_slice`."""
        chunk_vectors = const_expr(plan.STEPS * self.threads)
        begin = chunk * chunk_vectors
        copy_bytes = cutlass.max(cutlass.min(part.vectors - begin, chunk_vectors), 0) * VECTOR_BYTES
        landed, _, _ = mbarriers(smem)
        cute.arch.mbarrier_arrive_and_expect_tx(landed + chunk, copy_bytes)
        if copy_bytes > 0:
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[
                    smem + plan.slice_offset_bytes(self.threads) + begin * VECTOR_BYTES,
                    x_slice + Int64(begin) * VECTOR_BYTES,
                    copy_bytes,
                    smem + chunk * 8,
                ],
            )

    @cute.jit
    def produce(self, mX: cute.Tensor, work):
        """One thread: copy the slices of the rows after the first, each chunk once its place has been released."""
        _, released, _ = mbarriers(work.smem)
        for turn in cutlass.range(1, work.rows, unroll=1):
            _, part, offset, address = self.slice_of(mX, work.first_row + turn * work.clusters, work.cluster)
            for chunk in cutlass.range(work.chunks, unroll=1):
                # Orders the row before's last read of this chunk, by every warp, before the copy overwrites it: that
                # row's gradient would otherwise be made of the next row's logits.
                cute.arch.mbarrier_wait(released + chunk, (turn - 1) & 1)
                self.copy_chunk(part, address + offset, chunk, work.smem)

    @cute.jit
    def consume(self, mX: cute.Tensor, labels: cute.Tensor, mG: cute.Tensor, sums: cute.Tensor, factors, work):
        """The threads that compute: two passes over each row of this block."""
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.STEPS)
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        rank = cute.arch.block_idx_in_cluster()
        B, V = mX.shape[0], mX.shape[1]
        landed, released, arrived = mbarriers(work.smem)
        # A streamed slice goes on past these chunks: the last mode's stride is what matters, its extent is not checked.
        layout = layouts.slice_layout(T, E, S, plan.MAX_CHUNKS)
        scale = factors.grad_scale
        if factors.grad_by_mean != 0:
            scale = scale / cute.arch.fmax(sums[N_VALID], Float32(1.0))
        row_ce, row_z = row_losses(sums, B)
        next_target = target_column(labels[work.first_row], factors.ignore_index, V)
        for turn in cutlass.range(work.rows, unroll=1):
            row = work.first_row + turn * work.clusters
            column = next_target
            next_label = labels[cutlass.min(row, B - 1 - work.clusters) + work.clusters]
            lead, part, offset, x_row = self.slice_of(mX, row, work.cluster)
            x_slice = x_row + offset
            if const_expr(self.streamed):
                source = cute.make_ptr(self.dtype, x_slice, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
            else:
                s_slice = work.smem + plan.slice_offset_bytes(T)
                source = cute.make_ptr(self.dtype, s_slice, cute.AddressSpace.smem, assumed_align=128)
            tXsX = cute.make_tensor(source, layout)[tid, None, None, None]
            # The slice, element by element; without a gradient the shared memory is released before these are wanted.
            if const_expr(self.grad and not self.streamed):
                xs = cute.make_tensor(source, cute.make_layout(1 << 30))
            else:
                xs = self.elements(x_slice)

            valid, in_range = column != IGNORED, column != OUT_OF_RANGE
            target64 = Int64(column) - Int64(part.first_column)
            target = Int32(-1)
            if column >= 0 and target64 >= 0 and target64 < Int64(part.vectors * E):
                target = Int32(target64)
            ragged = self.ragged_element(part, lead, V, lane, warp)
            target_vector = target // E
            # The thread that writes the target's vector also writes the target, after it: one thread's stores to an
            # address keep their order.
            owns_target = target >= 0 and (
                target == ragged
                or (target_vector >= part.whole_begin and target_vector < part.whole_end and (target_vector % T) == tid)
            )
            row_max, row_sum = Float32(reduce.LOWEST), Float32(0.0)
            rX = cute.make_rmem_tensor((E, S), self.dtype)
            for chunk in cutlass.range(work.chunks, unroll=1):
                if const_expr(not self.streamed):
                    # Orders the copy engine's writes of this chunk before the reads below, which would otherwise see
                    # the row before or nothing.
                    cute.arch.mbarrier_wait(landed + chunk, turn & 1)
                for step in cutlass.range_constexpr(S):
                    vector = (chunk * S + step) * T + tid
                    if vector >= part.whole_begin and vector < part.whole_end:
                        cute.autovec_copy(tXsX[(None, step, chunk)], rX[None, step])
                    else:
                        rX[None, step].fill(-float("inf"))
                if const_expr(not self.streamed and not self.grad):
                    self.release(released + chunk, lane)
                x = rX.load().to(Float32)
                new_max = cute.arch.fmax(row_max, x.reduce(cute.ReductionOp.MAX, Float32(reduce.LOWEST), 0))
                exps = cute.math.exp2((x - new_max) * reduce.LOG2E, fastmath=True)
                row_sum = row_sum * reduce.exp_shifted(row_max, new_max) + exps.reduce(
                    cute.ReductionOp.ADD, Float32(0.0), 0
                )
                row_max = new_max
            # Only now: by this time the label has come.
            next_target = target_column(next_label, factors.ignore_index, V)
            target_logit, ragged_logit = Float32(0.0), Float32(0.0)
            if owns_target:
                target_logit = Float32(xs[target])
            if ragged >= 0:
                ragged_logit = Float32(xs[ragged])
                row_max, row_sum = reduce.combine(row_max, row_sum, ragged_logit, Float32(1.0))
            row_max, row_sum = reduce.warp_combine(row_max, row_sum)
            if turn == 0:
                # Orders the initialisation of every peer's `arrived` before any store that completes on it: a store
                # could otherwise reach a block that has not started, or a barrier that is then initialised again.
                cute.arch.cluster_wait()
            buffer = turn & 1
            if tid == 0 and work.cluster > 1:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived + buffer, reduce.PAIR_BYTES * self.warps * work.cluster)
            sPairs = cute.make_tensor(
                cute.make_ptr(
                    Float32,
                    work.smem + plan.BARRIER_BYTES + buffer * plan.pairs_bytes(T),
                    cute.AddressSpace.smem,
                    assumed_align=8,
                ),
                cute.make_layout((2, self.warps * plan.MAX_CLUSTER)),
            )
            row_max, row_sum = reduce.cluster_combine(
                row_max, row_sum, sPairs, arrived + buffer, (turn >> 1) & 1, self.warps, work.cluster
            )

            lse = row_max + cute.math.log2(row_sum, fastmath=True) * LN2
            if owns_target:
                row_ce[row] = cute.math.log(row_sum) - (target_logit - row_max)
                row_z[row] = lse * lse
            if rank == 0 and tid == 0 and not (valid and in_range):
                row_ce[row] = Float32(NAN) if valid else Float32(0.0)
                row_z[row] = lse * lse if valid else Float32(0.0)

            if const_expr(self.grad):
                g_row = Int64((mG.iterator + Int64(row) * Int64(mG.stride[0])).toint())
                g_slice = g_row + offset
                gG = self.elements(g_slice)
                z_factor = Float32(2.0) * factors.z_loss_multiplier * lse
                factor = (Float32(1.0) + z_factor) * scale / row_sum
                if not in_range:
                    factor = Float32(NAN)
                if ((x_slice ^ g_slice) & (VECTOR_BYTES - 1)) != 0:
                    # The gradient's vectors do not line up with the logits': element by element, without the target,
                    # which another thread may own.
                    for element in cutlass.range(part.whole_begin * E + tid, part.whole_end * E, T):
                        if element != target:
                            gG[element] = self.gradient(Float32(xs[element]), row_max, factor, valid)
                    if const_expr(not self.streamed):
                        for chunk in cutlass.range(work.chunks, unroll=1):
                            self.release(released + chunk, lane)
                else:
                    tXgG = cute.make_tensor(
                        cute.make_ptr(self.dtype, g_slice, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES), layout
                    )[tid, None, None, None]
                    rG = cute.make_rmem_tensor((E,), self.dtype)
                    rG.fill(0.0)
                    for chunk in cutlass.range(work.chunks, unroll=1):
                        for step in cutlass.range_constexpr(S):
                            vector = (chunk * S + step) * T + tid
                            if vector >= part.whole_begin and vector < part.whole_end:
                                if valid:
                                    cute.autovec_copy(tXsX[(None, step, chunk)], rX[None, step])
                                    x = rX[None, step].load().to(Float32)
                                    exps = cute.math.exp2((x - row_max) * reduce.LOG2E, fastmath=True)
                                    rG.store((exps * factor).to(self.dtype))
                                cute.autovec_copy(rG, tXgG[(None, step, chunk)])
                        if const_expr(not self.streamed):
                            self.release(released + chunk, lane)
                if ragged >= 0:
                    gG[ragged] = self.gradient(ragged_logit, row_max, factor, valid)
                if owns_target:
                    p = reduce.exp_shifted(target_logit, row_max) / row_sum
                    gG[target] = (((p - Float32(1.0)) + z_factor * p) * scale).to(self.dtype)

    @cute.jit
    def release(self, released, lane: Int32):
        """Say that this warp has read a chunk for the last time; the barrier counts one arrival per warp."""
        # Orders all lanes' reads before the arrival of the one that speaks for them: a slower lane could otherwise read
        # the next row.
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(released)

    def elements(self, address: Int64) -> cute.Tensor:
        """Device memory from `address` on, element by element."""
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=self.item_bytes)
        return cute.make_tensor(pointer, cute.make_layout(1 << 30))

    @cute.jit
    def ragged_element(self, part, lead: Int32, V: Int32, lane: Int32, warp: Int32):
        """The element of the slice's ragged ends that this thread looks after, or -1."""
        E = const_expr(self.vector_elements)
        begin, end = geometry.ragged_range(part, lead, V, lane, E, cutlass.min)
        element = geometry.ragged_element(part, lane, E, cutlass.min)
        ragged = Int32(-1)
        if warp == 0 and element >= begin and element < end:
            ragged = element
        return ragged

    @cute.jit
    def gradient(self, x: Float32, row_max: Float32, factor: Float32, valid):
        """The gradient of one column that is not the target, rounded."""
        g = Float32(0.0)
        if valid:
            g = reduce.exp_shifted(x, row_max) * factor
        return g.to(self.dtype)

    @cute.kernel
    def count_valid(self, labels: cute.Tensor, sums: cute.Tensor, ignore_index: Int64, cluster: Int32):
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        n_valid = Float32(0.0)
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        for row in cutlass.range(first, labels.shape[0], stride, unroll=4):
            n_valid = n_valid + one_if_valid(labels[row], ignore_index)
        (n_valid,) = reduce.cluster_add([n_valid], sum_partials(1), SUM_WARPS, plan.SUM_CLUSTER, cluster)
        if rank == 0 and tid == 0:
            sums[N_VALID] = n_valid

    @cute.kernel
    def add_rows(
        self,
        sums: cute.Tensor,
        labels: cute.Tensor,
        loss: cute.Tensor,
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        mean: Int32,
        cluster: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        # Orders the row losses, and the reads of the earlier count's n_valid, before the accesses below: this grid may
        # start while rows are still being worked on, and would add what is not there yet.
        cute.arch.griddepcontrol_wait()
        row_ce, row_z = row_losses(sums, labels.shape[0])
        ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        for row in cutlass.range(first, labels.shape[0], stride, unroll=4):
            ce_sum = ce_sum + row_ce[row]
            z_sum = z_sum + row_z[row]
            n_valid = n_valid + one_if_valid(labels[row], ignore_index)
        ce_sum, z_sum, n_valid = reduce.cluster_add(
            [ce_sum, z_sum, n_valid], sum_partials(3), SUM_WARPS, plan.SUM_CLUSTER, cluster
        )
        if rank == 0 and tid == 0:
            sums[CE_SUM] = ce_sum
            sums[Z_SUM] = z_sum
            sums[N_VALID] = n_valid
            total = ce_sum
            # Not 0 * z_sum: that is NaN where z overflowed.
            if z_loss_multiplier != Float32(0.0):
                total = total + z_loss_multiplier * z_sum
            if mean != 0:
                total = total / cute.arch.fmax(n_valid, Float32(1.0))
            sums[LOSS] = total
            loss[()] = total


class ScaleGradient:
    """Launcher of out = source * factor for backward: a flat pass, or nothing where the factor is 1 and out is
    source.
    """

    def __init__(self, spec: Spec) -> None:
        self.dtype = cute_dtype(spec)
        self.threads, self.vector_elements = spec.threads, spec.vector_elements

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,  # (B, V) fp16|bf16|fp32, contiguous, 16-byte aligned
        out: cute.Tensor,  # like source, or source itself
        grad_loss: cute.Tensor,  # () fp32
        sums: cute.Tensor,  # as for FusedCrossEntropy
        by_mean: Int32,
        constant: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.scale(source, out, grad_loss, sums, by_mean, constant, blocks).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def scale(
        self,
        source: cute.Tensor,
        out: cute.Tensor,
        grad_loss: cute.Tensor,
        sums: cute.Tensor,
        by_mean: Int32,
        constant: Float32,
        blocks: Int32,
    ):
        E, T = const_expr(self.vector_elements), const_expr(self.threads)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        factor = grad_loss[()] * constant
        if by_mean != 0:
            factor = factor / cute.arch.fmax(sums[N_VALID], Float32(1.0))
        elements = Int64(source.shape[0]) * Int64(source.shape[1])
        if factor == Float32(1.0) and source.iterator.toint() == out.iterator.toint():
            elements = Int64(0)
        first, stride = block * T + tid, blocks * T
        vectors = elements // E
        rounds = Int32((vectors - Int64(first) + Int64(stride) - 1) // Int64(stride))
        source_address, out_address = Int64(source.iterator.toint()), Int64(out.iterator.toint())
        rX = cute.make_rmem_tensor((E,), self.dtype)
        for step in cutlass.range(rounds, unroll=4):
            offset = (Int64(first) + Int64(step) * Int64(stride)) * VECTOR_BYTES
            cute.autovec_copy(self.vector(source_address + offset, VECTOR_BYTES, E), rX)
            rX.store((rX.load().to(Float32) * factor).to(self.dtype))
            cute.autovec_copy(rX, self.vector(out_address + offset, VECTOR_BYTES, E))
        tail = elements - vectors * E
        if Int64(first) < tail:
            offset = vectors * VECTOR_BYTES + Int64(first) * (self.dtype.width // 8)
            x = self.vector(source_address + offset, self.dtype.width // 8, 1)
            g = self.vector(out_address + offset, self.dtype.width // 8, 1)
            g[0] = (Float32(x[0]) * factor).to(self.dtype)

    def vector(self, address: Int64, align: int, elements: int) -> cute.Tensor:
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, cute.make_layout((elements,)))


def mbarriers(smem: Int32) -> tuple[cute.Pointer, cute.Pointer, cute.Pointer]:
    """The mbarriers of a block: for each chunk `landed` and `released`, for each buffer of pairs `arrived`."""
    landed = cute.make_ptr(Int64, smem, cute.AddressSpace.smem, assumed_align=8)
    return landed, landed + plan.MAX_CHUNKS, landed + 2 * plan.MAX_CHUNKS


@cute.jit
def target_column(label: Int64, ignore_index: Int64, V: Int32):
    """The target's column, IGNORED or OUT_OF_RANGE; compared as 64-bit numbers, before any narrowing."""
    column = Int32(OUT_OF_RANGE)
    if label >= 0 and label < Int64(V):
        column = Int32(label)
    if label == ignore_index:
        column = Int32(IGNORED)
    return column


@cute.jit
def one_if_valid(label: Int64, ignore_index: Int64):
    """1.0 for a row that counts, else 0.0."""
    return Float32(1.0) if label != ignore_index else Float32(0.0)


def row_losses(sums: cute.Tensor, B: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """The workspace behind the sums: ce and z of each row."""
    layout = cute.make_layout(B)
    return tuple(cute.make_tensor(sums.iterator + SUMS_HEAD + q * Int64(B), layout) for q in range(2))


def sum_partials(n: int) -> cute.Tensor:
    """sPartials of `reduce.cluster_add` for n sums."""
    layout = cute.make_layout((n, max(SUM_WARPS, plan.SUM_CLUSTER)))
    return cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)


def cute_dtype(spec: Spec) -> Any:
    """The DSL's type of a spec's logits."""
    return {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}[spec.dtype]


def launcher(spec: Spec) -> tuple[Any, tuple[Any, ...]]:
    """Return the launcher of a spec and the fake arguments to compile it with: every size, stride and factor is
    dynamic.

    No more alignment is promised than the callers check: that of one element for the user's tensors.
    """
    fake = cute.runtime.make_fake_tensor
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    dtype = cute_dtype(spec)
    B, V = cute.sym_int(), cute.sym_int()

    def matrix(align: int) -> Any:
        return fake(dtype, (B, V), stride=(cute.sym_int64(), 1), assumed_align=align)

    scalar = fake(Float32, (), stride=(), assumed_align=4)
    sums = fake(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=4)
    if spec.op == "scale":
        gradients = matrix(VECTOR_BYTES), matrix(VECTOR_BYTES)
        return ScaleGradient(spec), (*gradients, scalar, sums, Int32(0), Float32(1.0), Int32(1), stream)
    item = dtype.width // 8
    return FusedCrossEntropy(spec), (
        matrix(item),
        fake(Int64, (B,), stride=(cute.sym_int64(),), assumed_align=8),
        matrix(item),
        sums,
        scalar,
        Int64(-100),
        Float32(0.0),
        Float32(1.0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        Int32(1),
        stream,
    )
