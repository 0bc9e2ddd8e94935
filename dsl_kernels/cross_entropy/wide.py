"""Rows wide enough for a block or more: one cluster of blocks per row, the row kept in shared memory between its uses.

Geometry: C blocks, a cluster, share a row; `geometry.row_slice` cuts it on whole lines into C contiguous slices and
`layouts.slice_layout` deals a slice to the threads. A block has one warp that copies and T / 32 warps that compute. The
copying warp starts bulk asynchronous copies of a slice into places in shared memory, a chunk and an mbarrier each. As
chunks land, each computing thread keeps running totals, (maximum, sum) first; the cluster combines them; the second
pass reads the places again, writes the gradient with 16-byte stores, and releases each place, into which the copying
warp at once fetches the same chunk of the cluster's next row. A cluster takes only a few rows: the hardware's scheduler
deals the rest, which evens out fast and slow multiprocessors, and the clusters that come last take fewer, in the plans
one each, so that all end at about the same time.

Where no gradient is written a place is released after the first pass, so any slice streams through few places. A row
whose slices no cluster can keep (`spec.streamed`) streams through them twice.

Ordering and aliasing: the gradient may overwrite the logits. A block uses only its own slice's columns, and only they
are read, but for the row's first logit where a loss takes it for a reference: no block writes before it has the totals
of all, which hold it. Every element is written after its last read: by the thread that read it, after the copy of its
chunk has landed, or, where a row is not kept and done element by element, after a barrier. No row waits for another
row's store.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce
from dsl_kernels.cross_entropy import device, geometry, losses, plan
from dsl_kernels.cross_entropy.spec import VECTOR_BYTES, Spec


class Work(NamedTuple):
    """What a block works on: its part of the rows first_row, first_row + stride, ..."""

    cluster: Int32
    """Blocks that share a row."""
    first_row: Int32
    stride: Int32
    rows: Int32
    """Rows of this block's cluster."""
    chunks: Int32
    """Chunks of a row's slice, the same for all rows."""
    places: Int32
    """Chunks that shared memory holds; `chunks` where a slice is kept."""
    smem: Int32
    """Address of the block's shared memory."""
    zero: Int32
    """0, which the compiler does not know."""
    policy: Int64
    """L2 cache policy of the copies."""


class WideRows(device.RowsKernel):
    """The device function of wide rows."""

    def __init__(self, spec: Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.streamed = spec.streamed
        self.kept = spec.grad and not spec.streamed
        self.loss = losses.loss_of(spec, arch)
        self.slice_offset = plan.slice_offset_bytes(spec)

    @cute.jit
    def launch(self, mX, labels, mG, sums, request, numbers, stream):
        cluster, clusters, long_clusters, long_turns, short_turns, smem_bytes = numbers
        self.rows(
            mX,
            labels,
            mG,
            sums,
            request,
            cluster,
            clusters,
            long_clusters,
            long_turns,
            short_turns,
            smem_bytes,
        ).launch(
            grid=[cluster * clusters, 1, 1],
            block=[self.threads + reduce.WARP, 1, 1],
            cluster=[cluster, 1, 1],
            min_blocks_per_mp=self.resident_blocks,
            preferred_smem_carveout=100,
            smem=smem_bytes,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def rows(
        self,
        mX: cute.Tensor,  # all as for `kernel.FusedCrossEntropy`
        labels: cute.Tensor,
        mG: cute.Tensor,
        sums: cute.Tensor,
        request: NamedTuple,  # losses.PlainRequest or OptionsRequest
        cluster: Int32,
        clusters: Int32,
        long_clusters: Int32,
        long_turns: Int32,
        short_turns: Int32,
        smem_bytes: Int32,
    ):
        device.start_beside_neighbours(self.loss.waits_for_count(request))
        tid, _, _ = cute.arch.thread_idx()
        cluster_id, _, _ = cute.arch.cluster_idx()
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.STEPS)
        V = mX.shape[1]
        first_row, stride, rows = cluster_id, long_clusters, long_turns
        if cluster_id >= long_clusters:
            first_row, stride, rows = (
                cluster_id + (long_turns - 1) * long_clusters,
                clusters - long_clusters,
                short_turns,
            )
        # The chunks of the longest slice at the alignment of these rows, or at any if that changes from row to row:
        # the same number for every row, so that all mbarriers go through one phase a row.
        lead = device.row_lead(Int64(mX.iterator.toint()), self.item_bytes)
        if ((Int64(mX.stride[0]) * self.item_bytes) & (device.LINE_BYTES - 1)) != 0:
            lead = Int32(geometry.worst_lead(E))
        chunks = geometry.ceil_div(geometry.slice_vectors(V, cluster, E, lead), S * T)
        places = chunks
        if const_expr(not self.kept):
            places = (smem_bytes - self.slice_offset) // (S * T * VECTOR_BYTES)

        # Shared memory: mbarriers | two buffers of sTotals | the places, to the exact length of a kept slice.
        smem = device.held(Int32(cute.arch.get_dyn_smem(Int64, alignment=128).toint()))
        landed, released, arrived = mbarriers(smem)
        policy = device.read_policy()
        work = Work(cluster, first_row, stride, rows, chunks, places, smem, smem_bytes % VECTOR_BYTES, policy)
        started = cutlass.min(chunks, places)
        if cute.arch.warp_idx() == self.warps:
            # One lane a chunk: the first row's copies start before anything is waited for.
            chunk = cute.arch.lane_idx()
            if chunk < places:
                cute.arch.mbarrier_init(landed + chunk, 1)
                cute.arch.mbarrier_init(released + chunk, self.warps)
            # Orders the initialisation of a chunk's mbarriers before the copy engine's arrival on them, which would
            # otherwise be lost, and the block wait for ever.
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            if chunk < started:
                _, part, offset, address = self.slice_of(mX, first_row, cluster)
                self.copy_chunk(part, address + offset, chunk, chunk, work)
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
            if cute.arch.lane_idx() == 0:
                self.produce(mX, work, started)
        else:
            self.consume(mX, labels, mG, sums, request, work)

    @cute.jit
    def slice_of(self, mX: cute.Tensor, row: Int32, cluster: Int32):
        """The block's part of a row: (lead, part, byte offset of the slice from the row's start, the row's address)."""
        address = device.row_address(mX, row)
        lead = device.row_lead(address, self.item_bytes)
        rank = cute.arch.block_idx_in_cluster()
        part = geometry.row_slice(lead, mX.shape[1], cluster, rank, self.vector_elements, cutlass.min, cutlass.max)
        offset = Int64(part.first_vector) * VECTOR_BYTES - Int64(lead * self.item_bytes)
        return lead, part, offset, address

    @cute.jit
    def copy_chunk(self, part, x_slice: Int64, chunk: Int32, place: Int32, work):
        """One thread: start the bulk copy of a chunk's whole vectors of the slice at `x_slice` into a place."""
        chunk_vectors = const_expr(plan.STEPS * self.threads)
        begin, end = geometry.chunk_range(part, chunk, chunk_vectors, cutlass.min, cutlass.max)
        vector_in_places = begin + (place - chunk) * chunk_vectors
        device.bulk_copy(
            work.smem + self.slice_offset + vector_in_places * VECTOR_BYTES,
            x_slice + Int64(begin) * VECTOR_BYTES,
            (end - begin) * VECTOR_BYTES,
            work.smem + place * 8,
            work.policy,
        )

    @cute.jit
    def produce(self, mX: cute.Tensor, work, started: Int32):
        """One thread: copy what comes after the first `started` chunks, each once its place has been released."""
        _, released, _ = mbarriers(work.smem)
        place, lap = started, Int32(0)
        if started == work.places:
            place, lap = Int32(0), Int32(1)
        first = started
        for turn in cutlass.range(work.rows, unroll=1):
            _, part, offset, address = self.slice_of(mX, work.first_row + turn * work.stride, work.cluster)
            for _read in cutlass.range_constexpr(2 if self.streamed and self.grad else 1):
                for chunk in cutlass.range(first, work.chunks, unroll=1):
                    if lap > 0:
                        # Orders the last read of what lies in this place, by every warp, before the copy overwrites it:
                        # a gradient would otherwise be made of the logits of another chunk.
                        cute.arch.mbarrier_wait(released + place, (lap - 1) & 1)
                    self.copy_chunk(part, address + offset, chunk, place, work)
                    place = place + 1
                    if place == work.places:
                        place, lap = Int32(0), lap + 1
                first = Int32(0)

    @cute.jit
    def consume(self, mX, labels, mG, sums: cute.Tensor, request, work):
        """The threads that compute: two passes over each row of this block."""
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.STEPS)
        chunk_vectors = const_expr(S * T)
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        rank = cute.arch.block_idx_in_cluster()
        B, V = mX.shape[0], mX.shape[1]
        landed, _, arrived = mbarriers(work.smem)
        s_slice = work.smem + self.slice_offset
        layout = layouts.slice_layout(T, E, S, plan.MAX_CHUNKS)
        s_mine = device.held(s_slice + tid * VECTOR_BYTES)
        tXsX = device.vectors(self.dtype, s_mine, cute.AddressSpace.smem, layout)[0, None, None, None]
        scale, early = self.loss.unscaled(), ()
        if const_expr(self.grad):
            early = self.loss.early(labels, request)
        next_target = self.loss.target_column(request, labels[work.first_row], V)
        next_peeked = self.loss.peek(mX, work.first_row)
        place, lap = Int32(0), Int32(0)
        for turn in cutlass.range(work.rows, unroll=1):
            row = work.first_row + turn * work.stride
            column = next_target
            next_row = cutlass.min(row, B - 1 - work.stride) + work.stride
            next_label, peeked = labels[next_row], next_peeked
            # In the last turn of a row of another cluster, which may be overwriting it: then nobody uses it.
            next_peeked = self.loss.peek(mX, next_row)
            lead, part, offset, x_row = self.slice_of(mX, row, work.cluster)
            x_slice = x_row + offset
            begin, end = device.held(part.whole_begin), device.held(part.whole_end)
            # The slice, element by element: where it is kept, and where it came from.
            sX = cute.make_tensor(tXsX.iterator - tid * E, cute.make_layout(1 << 30))
            gX = device.elements(self.dtype, x_slice)

            inputs = self.loss.inputs(request, row, column, peeked)
            places = losses.Places(part.first_column, tid * E, S * T * E, T * E, begin * E, end * E)
            target64 = Int64(column) - Int64(part.first_column)
            target = Int32(-1)
            if column >= 0 and target64 >= 0 and target64 < Int64(part.vectors * E):
                target = Int32(target64)
            ragged = Int32(-1)
            if warp == 0:
                ragged = device.ragged_element(part, lead, V, E)
            target_vector = target // E
            target_is_whole = target >= 0 and target_vector >= begin and target_vector < end
            # The thread that writes the target's vector also writes the target, after it: one thread's stores to an
            # address keep their order.
            owns_target = (target >= 0 and target == ragged) or (target_is_whole and (target_vector % T) == tid)
            # Loaded now and used after the first pass, when they have long come.
            rEnds = cute.make_rmem_tensor((2,), self.dtype)
            rEnds.fill(0.0)
            if ragged >= 0:
                rEnds[0] = gX[ragged]
            if const_expr(not self.kept):
                if owns_target:
                    rEnds[1] = gX[target]
            state = self.loss.begin()
            rX = cute.make_rmem_tensor((E, S), self.dtype)
            for chunk in cutlass.range(work.chunks, unroll=1):
                if const_expr(self.kept):
                    place, lap = chunk, turn
                # Orders the copy engine's writes of this chunk before the reads below, which would otherwise see what
                # lay there before.
                cute.arch.mbarrier_wait(landed + place, lap & 1)
                first_vector = chunk * chunk_vectors
                if first_vector >= begin and first_vector + chunk_vectors <= end:
                    for step in cutlass.range_constexpr(S):
                        cute.autovec_copy(tXsX[(None, step, place)], rX[None, step])
                    state = self.loss.accumulate(rX, state, inputs, places, chunk, ())
                else:
                    present = ()
                    for step in cutlass.range_constexpr(S):
                        vector = first_vector + step * T + tid
                        exists = vector >= begin and vector < end
                        present = (*present, exists)
                        if exists:
                            cute.autovec_copy(tXsX[(None, step, place)], rX[None, step])
                        else:
                            rX[None, step].fill(-float("inf"))
                    state = self.loss.accumulate(rX, state, inputs, places, chunk, present)
                if const_expr(not self.kept):
                    # The maximum is of all that was loaded: it is a number only when the loads have ended. Loads that
                    # are merely issued may be overtaken by the release, and by the copy that follows it, where other
                    # kernels keep the multiprocessor's loads waiting.
                    release(work.smem + (state[0].bitcast(Int32) & work.zero), place, lane)
                    place = place + 1
                    if place == work.places:
                        place, lap = Int32(0), lap + 1
            totals = self.loss.totals(state, inputs)
            exact = self.loss.exact(state, totals, inputs)
            if const_expr(not self.loss.always_exact):
                if not exact:
                    totals = self.totals_one_by_one(sX if const_expr(self.kept) else gX, work.chunks, inputs, places)
            candidates = self.loss.candidates(state, totals, exact, work.chunks)
            # Only now: by this time the label has come.
            next_target = self.loss.target_column(request, next_label, V)
            ragged_logit, target_logit = Float32(rEnds[0]), Float32(rEnds[1])
            if const_expr(self.kept):
                if owns_target:
                    target_logit = ragged_logit
                    if target != ragged:
                        target_logit = Float32(sX[target])
            if ragged >= 0:
                totals = self.loss.combine(
                    totals, self.loss.single(ragged_logit, inputs, part.first_column + ragged), inputs
                )
            totals = self.loss.warp_combine(totals, inputs)
            if turn == 0:
                # Orders the initialisation of every peer's `arrived` before any store that completes on it: a store
                # could otherwise reach a block that has not started, or a barrier that is then initialised again.
                cute.arch.cluster_wait()
            buffer = turn & 1
            if tid == 0 and work.cluster > 1:
                cute.arch.mbarrier_arrive_and_expect_tx(
                    arrived + buffer, reduce.WORD_BYTES * self.loss.words * self.warps * work.cluster
                )
            sTotals = cute.make_tensor(
                cute.make_ptr(
                    Float32,
                    work.smem + plan.BARRIER_BYTES + buffer * plan.totals_bytes(self.loss.words, T),
                    cute.AddressSpace.smem,
                    assumed_align=8,
                ),
                cute.make_layout((self.loss.words, self.warps * plan.MAX_CLUSTER)),
            )
            totals = reduce.cluster_combine(
                totals,
                self.loss.combine,
                self.loss.warp_combine,
                inputs,
                sTotals,
                arrived + buffer,
                (turn >> 1) & 1,
                self.warps,
                work.cluster,
            )

            if const_expr(self.grad):
                if turn == 0:
                    scale = self.loss.scale(sums, request, V, early)
            numbers = self.loss.row(totals, row, column, inputs, scale, request, V)
            wanted = numbers.wanted
            ragged_column = Int32(-1)
            if ragged >= 0:
                ragged_column = part.first_column + ragged
            self.loss.predict(
                request,
                row,
                candidates,
                numbers,
                inputs,
                sX if const_expr(self.kept) else gX,
                places,
                ragged_logit,
                ragged_column,
            )
            # One thread of the cluster speaks for the row: the target's, if there is one.
            if owns_target or (column < 0 and rank == 0 and tid == 0):
                contribution = self.loss.contribution(numbers, column, target_logit, inputs, request, V)
                device.write_entry(sums, row, *contribution)
                self.loss.write_shard(request, row, column, target_logit, numbers, inputs, V)
                self.loss.write_row(request, row, contribution, numbers)

            if const_expr(self.grad):
                g_slice = device.row_address(mG, row) + offset
                gG = device.elements(self.dtype, g_slice)
                one_by_one = ((x_slice ^ g_slice) & (VECTOR_BYTES - 1)) != 0
                if const_expr(not self.loss.always_exact):
                    one_by_one = one_by_one or not numbers.ordinary
                if one_by_one:
                    if const_expr(not self.kept and not self.loss.always_exact):
                        # Orders the warps' search for the predicted token, which reads the row where it came from,
                        # before the elements below are overwritten by whichever thread takes them.
                        cute.arch.barrier(barrier_id=1, number_of_threads=T)
                    # The gradient's vectors do not line up with the logits', or these are near the largest floats:
                    # element by element, without the target, which another thread may own.
                    for element in cutlass.range(begin * E + tid, end * E, T):
                        if element != target:
                            x = Float32(sX[element]) if const_expr(self.kept) else Float32(gX[element])
                            gG[element] = self.loss.other_gradient(x, numbers, inputs, part.first_column + element).to(
                                self.dtype
                            )
                    for chunk in cutlass.range(work.chunks, unroll=1):
                        if const_expr(self.kept):
                            place, lap = chunk, turn
                        else:
                            cute.arch.mbarrier_wait(landed + place, lap & 1)
                        release(work.smem, place, lane)
                        if const_expr(not self.kept):
                            place = place + 1
                            if place == work.places:
                                place, lap = Int32(0), lap + 1
                else:
                    g_mine = device.held(g_slice + tid * VECTOR_BYTES)
                    tXgG = device.vectors(self.dtype, g_mine, cute.AddressSpace.gmem, layout)[0, None, None, None]
                    rG = cute.make_rmem_tensor((E, S), self.dtype)
                    rG.fill(0.0)
                    for chunk in cutlass.range(work.chunks, unroll=1):
                        if const_expr(self.kept):
                            place, lap = chunk, turn
                        else:
                            cute.arch.mbarrier_wait(landed + place, lap & 1)
                        first_vector = chunk * chunk_vectors
                        if wanted and first_vector >= begin and first_vector + chunk_vectors <= end:
                            for step in cutlass.range_constexpr(S):
                                cute.autovec_copy(tXsX[(None, step, place)], rX[None, step])
                            self.loss.gradients(rX, rG, numbers, inputs, places, chunk, 0)
                            for step in cutlass.range_constexpr(S):
                                cute.autovec_copy(rG[None, step], tXgG[(None, step, chunk)])
                        else:
                            for step in cutlass.range_constexpr(S):
                                vector = first_vector + step * T + tid
                                if vector >= begin and vector < end:
                                    if wanted:
                                        cute.autovec_copy(tXsX[(None, step, place)], rX[None, step])
                                        self.loss.gradients(
                                            rX[None, step], rG[None, step], numbers, inputs, places, chunk, step
                                        )
                                    else:
                                        rG[None, step].fill(0.0)
                                    cute.autovec_copy(rG[None, step], tXgG[(None, step, chunk)])
                        release(work.smem, place, lane)
                        if const_expr(not self.kept):
                            place = place + 1
                            if place == work.places:
                                place, lap = Int32(0), lap + 1
                if ragged >= 0:
                    gG[ragged] = self.loss.other_gradient(ragged_logit, numbers, inputs, ragged_column).to(self.dtype)
                if owns_target:
                    g = self.loss.target_gradient(target_logit, numbers, inputs, column)
                    gG[target] = g.to(self.dtype)


@cute.jit
def release(smem: Int32, place: Int32, lane: Int32):
    """Say that this warp has read a place for the last time; its barrier counts one arrival per warp."""
    # Orders all lanes' reads before the arrival of the one that speaks for them: a slower lane could otherwise read
    # what is copied there next.
    cute.arch.sync_warp()
    if lane == 0:
        # Not `cute.arch.mbarrier_arrive`, which first works out the address in the cluster's window again.
        cute.arch.inline_ptx(
            "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[smem + (plan.MAX_CHUNKS + place) * 8]
        )


def mbarriers(smem: Int32) -> tuple[cute.Pointer, cute.Pointer, cute.Pointer]:
    """The mbarriers of a block: for each place `landed` and `released`, for each buffer of pairs `arrived`."""
    landed = cute.make_ptr(Int64, smem, cute.AddressSpace.smem, assumed_align=8)
    return landed, landed + plan.MAX_CHUNKS, landed + 2 * plan.MAX_CHUNKS
