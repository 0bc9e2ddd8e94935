"""Narrow rows: a warp per row, several rows in flight in a block.

Geometry: block b has W warps and takes W * R consecutive rows; warp w takes its rows b * W * R + w, + W, + 2 W, ..., R
of them, one after the other. Each warp has `slots` slots of shared memory of its own and fetches its rows into them by
bulk asynchronous copies, an mbarrier each, so that while it works on one row the next ones are on their way. Nothing
in a block waits for another warp before the end, where the warps' losses are added to one entry a block. The plans give
a warp one slot and one row, which measured fastest: the hardware's scheduler then fetches ahead.

A row's whole vectors go to the lanes in turn: lane l takes vectors whole_begin + l, + 32, ..., `plan.STEPS` at a time.
The row's ragged ends are read and written one element a lane.

Ordering and aliasing: as for wide rows; a warp reads and writes its own rows only.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce
from dsl_kernels.cross_entropy import device, losses, plan
from dsl_kernels.cross_entropy.spec import VECTOR_BYTES, Spec

LANES = reduce.WARP


class NarrowRows(device.RowsKernel):
    """The device function of narrow rows."""

    counts_few = False
    """With a gradient rows are narrow where there are many; not to have the code for few is 1 to 1.5 points faster."""

    def __init__(self, spec: Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.loss = losses.loss_of(spec, arch)

    @cute.jit
    def launch(self, mX, labels, mG, sums, request, numbers, stream):
        slots, blocks, slot_bytes, turns, _, smem_bytes = numbers
        self.rows(mX, labels, mG, sums, request, slots, slot_bytes, turns).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
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
        slots: Int32,
        slot_bytes: Int32,
        turns: Int32,
    ):
        device.start_beside_neighbours(self.loss.waits_for_count(request))
        W = const_expr(self.warps)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        block, _, _ = cute.arch.block_idx()
        B = mX.shape[0]
        # Shared memory: the warps' partial sums | mbarriers | slots.
        smem = Int32(cute.arch.get_dyn_smem(Int64, alignment=128).toint())
        barriers = smem + plan.NARROW_PARTIAL_BYTES + warp * slots * 8
        slots_begin = smem + plan.narrow_slots_offset(W, slots) + warp * slots * slot_bytes
        first_row = block * (W * turns) + warp
        rows = cutlass.min(cutlass.max((B - 1 - first_row) // W + 1, 0), turns)
        if first_row >= B:
            rows = Int32(0)
        policy = device.read_policy()
        if lane < slots:
            cute.arch.mbarrier_init(cute.make_ptr(Int64, barriers + lane * 8, cute.AddressSpace.smem), 1)
        # Orders the initialisation before the copy engine's arrival, which would otherwise be lost, and before any lane
        # waits: a wait on garbage could end at once.
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if lane < slots and lane < rows:
            self.copy_row(mX, first_row + lane * W, slots_begin + lane * slot_bytes, barriers + lane * 8, policy)

        entry = tuple(Float32(0.0) for _ in range(4))
        next_label = labels[cutlass.min(first_row, B - 1)]
        slot, lap = Int32(0), Int32(0)
        for turn in cutlass.range(rows, unroll=1):
            row = first_row + turn * W
            label = next_label
            next_label = labels[cutlass.min(row + W, B - 1)]
            contribution = self.one_row(
                mX, mG, row, label, sums, request, slots_begin + slot * slot_bytes, barriers + slot * 8, lap & 1
            )
            entry = tuple(a + b for a, b in zip(entry, contribution, strict=True))
            # Orders all lanes' reads of the slot before the copy that overwrites it.
            cute.arch.sync_warp()
            if lane == 0 and turn + slots < rows:
                self.copy_row(mX, row + slots * W, slots_begin + slot * slot_bytes, barriers + slot * 8, policy)
            slot = slot + 1
            if slot == slots:
                slot, lap = Int32(0), lap + 1
        partials = cute.make_tensor(
            cute.make_ptr(Float32, smem, cute.AddressSpace.smem, assumed_align=16), cute.make_layout((4, W))
        )
        device.add_warps(sums, entry, partials, W)

    @cute.jit
    def copy_row(self, mX: cute.Tensor, row: Int32, place: Int32, barrier: Int32, policy: Int64):
        """One thread: start the bulk copy of a row's whole vectors into a slot."""
        _, part, line = device.whole_row(mX, row, self.vector_elements)
        device.bulk_copy(
            place,
            line + Int64(part.whole_begin * VECTOR_BYTES),
            (part.whole_end - part.whole_begin) * VECTOR_BYTES,
            barrier,
            policy,
        )

    @cute.jit
    def one_row(
        self,
        mX: cute.Tensor,
        mG: cute.Tensor,
        row: Int32,
        label: Int64,
        sums: cute.Tensor,
        request,
        place: Int32,
        barrier: Int32,
        phase: Int32,
    ):
        """A warp: what the row adds to the block's entry, in one lane; its gradient is written."""
        E, S = const_expr(self.vector_elements), const_expr(plan.STEPS)
        lane = cute.arch.lane_idx()
        V = mX.shape[1]
        column = self.loss.target_column(request, label, V)
        inputs = self.loss.inputs(request, row, column, self.loss.peek(mX, row))
        lead, part, line = device.whole_row(mX, row, E)
        gX = device.elements(self.dtype, line)
        ragged = device.ragged_element(part, lead, V, E)
        rEnd = cute.make_rmem_tensor((1,), self.dtype)
        rEnd.fill(0.0)
        if ragged >= 0:
            rEnd[0] = gX[ragged]
        # Vectors and elements that follow count from the first whole vector.
        whole = part.whole_end - part.whole_begin
        first_element = part.whole_begin * E
        target = column + lead - first_element
        if column < 0:
            target = Int32(-(1 << 30))
        target_is_whole = target >= 0 and target < whole * E
        owns_target = (column >= 0 and target + first_element == ragged) or (
            target_is_whole and (target // E) % LANES == lane
        )
        layout = layouts.slice_layout(LANES, E, S, 1 << 20)
        tXsX = device.vectors(self.dtype, place, cute.AddressSpace.smem, layout)[lane, None, None, None]
        sX = cute.make_tensor(
            cute.make_ptr(self.dtype, place, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES),
            cute.make_layout(1 << 20),
        )
        ragged_column = Int32(-1)
        if ragged >= 0:
            ragged_column = ragged - lead
        first_column = first_element - lead
        places = losses.Places(first_column, lane * E, S * LANES * E, LANES * E, Int32(0), whole * E)
        full = whole // (LANES * S)
        rest = whole - full * (LANES * S)

        # Orders the copy engine's writes of the row before the reads below.
        cute.arch.mbarrier_wait(cute.make_ptr(Int64, barrier, cute.AddressSpace.smem), phase)
        state = self.loss.begin()
        rX = cute.make_rmem_tensor((E, S), self.dtype)
        for i in cutlass.range(full, unroll=1):
            for step in cutlass.range_constexpr(S):
                cute.autovec_copy(tXsX[None, step, i], rX[None, step])
            state = self.loss.accumulate(rX, state, inputs, places, i, ())
        if rest > 0:
            present = ()
            for step in cutlass.range_constexpr(S):
                exists = step * LANES + lane < rest
                present = (*present, exists)
                if exists:
                    cute.autovec_copy(tXsX[None, step, full], rX[None, step])
                else:
                    rX[None, step].fill(-float("inf"))
            state = self.loss.accumulate(rX, state, inputs, places, full, present)
        totals = self.loss.totals(state, inputs)
        exact = self.loss.exact(state, totals, inputs)
        if const_expr(not self.loss.always_exact):
            if not exact:
                totals = self.totals_one_by_one(sX, full + 1, inputs, places)
        candidates = self.loss.candidates(state, totals, exact, full + 1)
        ragged_logit, target_logit = Float32(rEnd[0]), Float32(rEnd[0])
        if owns_target and target_is_whole:
            target_logit = Float32(sX[target])
        if ragged >= 0:
            totals = self.loss.combine(totals, self.loss.single(ragged_logit, inputs, ragged_column), inputs)
        totals = self.loss.warp_combine(totals, inputs)

        scale = self.loss.unscaled()
        if const_expr(self.grad):
            scale = self.loss.scale(sums, request, V, ())
        numbers = self.loss.row(totals, row, column, inputs, scale, request, V)
        wanted = numbers.wanted
        self.loss.predict(request, row, candidates, numbers, inputs, sX, places, ragged_logit, ragged_column)
        contribution = tuple(Float32(0.0) for _ in range(4))
        # One lane speaks for the row: the target's, if there is one.
        if owns_target or (column < 0 and lane == 0):
            contribution = self.loss.contribution(numbers, column, target_logit, inputs, request, V)
            self.loss.write_shard(request, row, column, target_logit, numbers, inputs, V)
            self.loss.write_row(request, row, contribution, numbers)

        if const_expr(self.grad):
            g_line = device.row_address(mG, row) - Int64(lead * self.item_bytes)
            gG = device.elements(self.dtype, g_line)
            one_by_one = ((line ^ g_line) & (VECTOR_BYTES - 1)) != 0
            if const_expr(not self.loss.always_exact):
                one_by_one = one_by_one or not numbers.ordinary
            if one_by_one:
                # The gradient's vectors do not line up with the logits', or these are near the largest floats: element
                # by element, without the target, which another lane may own.
                for element in cutlass.range(lane, whole * E, LANES):
                    if element != target:
                        g = self.loss.other_gradient(Float32(sX[element]), numbers, inputs, first_column + element)
                        gG[element + first_element] = g.to(self.dtype)
            else:
                g_whole = g_line + Int64(part.whole_begin * VECTOR_BYTES)
                tXgG = device.vectors(self.dtype, g_whole, cute.AddressSpace.gmem, layout)[lane, None, None, None]
                rG = cute.make_rmem_tensor((E, S), self.dtype)
                if wanted:
                    for i in cutlass.range(full, unroll=1):
                        for step in cutlass.range_constexpr(S):
                            cute.autovec_copy(tXsX[None, step, i], rX[None, step])
                        self.loss.gradients(rX, rG, numbers, inputs, places, i, 0)
                        for step in cutlass.range_constexpr(S):
                            cute.autovec_copy(rG[None, step], tXgG[None, step, i])
                    if rest > 0:
                        for step in cutlass.range_constexpr(S):
                            if step * LANES + lane < rest:
                                cute.autovec_copy(tXsX[None, step, full], rX[None, step])
                                self.loss.gradients(rX[None, step], rG[None, step], numbers, inputs, places, full, step)
                                cute.autovec_copy(rG[None, step], tXgG[None, step, full])
                else:
                    rG.fill(0.0)
                    for vector in cutlass.range(lane, whole, LANES):
                        zeros = device.vectors(
                            self.dtype,
                            g_line + Int64((part.whole_begin + vector) * VECTOR_BYTES),
                            cute.AddressSpace.gmem,
                            cute.make_layout(E),
                        )
                        cute.autovec_copy(rG[None, 0], zeros)
            if ragged >= 0:
                gG[ragged] = self.loss.other_gradient(ragged_logit, numbers, inputs, ragged_column).to(self.dtype)
            if owns_target:
                # After the vector that holds it: one thread's stores to an address keep their order.
                g = self.loss.target_gradient(target_logit, numbers, inputs, column)
                gG[target + first_element] = g.to(self.dtype)
        return contribution
