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

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce
from dsl_kernels.cross_entropy import device, plan
from dsl_kernels.cross_entropy.device import IGNORED, NAN, OUT_OF_RANGE
from dsl_kernels.cross_entropy.spec import VECTOR_BYTES

LANES = reduce.WARP


class NarrowRows(device.RowsKernel):
    """The device function of narrow rows."""

    @cute.jit
    def launch(self, mX, labels, mG, sums, incoming, factors, numbers, stream):
        slots, blocks, slot_bytes, turns, _, smem_bytes = numbers
        self.rows(mX, labels, mG, sums, incoming, *factors, slots, slot_bytes, turns).launch(
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
        incoming: cute.Tensor,
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        grad_by_mean: Int32,
        grad_by_incoming: Int32,
        slots: Int32,
        slot_bytes: Int32,
        turns: Int32,
    ):
        device.start_beside_neighbours(grad_by_mean)
        W = const_expr(self.warps)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        block, _, _ = cute.arch.block_idx()
        B = mX.shape[0]
        factors = device.Factors(ignore_index, z_loss_multiplier, grad_by_mean, grad_by_incoming)
        # Shared memory: the warps' partial sums | mbarriers | slots.
        smem = Int32(cute.arch.get_dyn_smem(Int64, alignment=128).toint())
        barriers = smem + plan.NARROW_PARTIAL_BYTES + warp * slots * 8
        places = smem + plan.narrow_slots_offset(W, slots) + warp * slots * slot_bytes
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
            self.copy_row(mX, first_row + lane * W, places + lane * slot_bytes, barriers + lane * 8, policy)

        ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        next_label = labels[cutlass.min(first_row, B - 1)]
        slot, lap = Int32(0), Int32(0)
        for turn in cutlass.range(rows, unroll=1):
            row = first_row + turn * W
            label = next_label
            next_label = labels[cutlass.min(row + W, B - 1)]
            ce, z, n = self.one_row(
                mX, mG, row, label, sums, incoming, factors, places + slot * slot_bytes, barriers + slot * 8, lap & 1
            )
            ce_sum, z_sum, n_valid = ce_sum + ce, z_sum + z, n_valid + n
            # Orders all lanes' reads of the slot before the copy that overwrites it.
            cute.arch.sync_warp()
            if lane == 0 and turn + slots < rows:
                self.copy_row(mX, row + slots * W, places + slot * slot_bytes, barriers + slot * 8, policy)
            slot = slot + 1
            if slot == slots:
                slot, lap = Int32(0), lap + 1
        partials = cute.make_tensor(
            cute.make_ptr(Float32, smem, cute.AddressSpace.smem, assumed_align=16), cute.make_layout((3, W))
        )
        device.add_warps(sums, (ce_sum, z_sum, n_valid), partials, W)

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
        incoming: cute.Tensor,
        factors,
        place: Int32,
        barrier: Int32,
        phase: Int32,
    ):
        """A warp: what the row adds to (ce_sum, z_sum, n_valid), in one lane; its gradient is written."""
        E, S = const_expr(self.vector_elements), const_expr(plan.STEPS)
        pairs, poly = const_expr(self.math.packed_fp32), const_expr(self.math.polynomial)
        lane = cute.arch.lane_idx()
        V = mX.shape[1]
        column = device.target_column(label, factors.ignore_index, V)
        valid, in_range = column != IGNORED, column != OUT_OF_RANGE
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
        full = whole // (LANES * S)
        rest = whole - full * (LANES * S)

        # Orders the copy engine's writes of the row before the reads below.
        cute.arch.mbarrier_wait(cute.make_ptr(Int64, barrier, cute.AddressSpace.smem), phase)
        m, even, odd = Float32(reduce.LOWEST), Float32(0.0), Float32(0.0)
        rX = cute.make_rmem_tensor((E, S), self.dtype)
        for i in cutlass.range(full, unroll=1):
            for step in cutlass.range_constexpr(S):
                cute.autovec_copy(tXsX[None, step, i], rX[None, step])
            m, even, odd = device.accumulate(rX, m, even, odd, pairs, poly)
        if rest > 0:
            for step in cutlass.range_constexpr(S):
                if step * LANES + lane < rest:
                    cute.autovec_copy(tXsX[None, step, full], rX[None, step])
                else:
                    rX[None, step].fill(-float("inf"))
            m, even, odd = device.accumulate(rX, m, even, odd, pairs, poly)
        d = even + odd
        ragged_logit, target_logit = Float32(rEnd[0]), Float32(rEnd[0])
        if owns_target and target_is_whole:
            target_logit = Float32(sX[target])
        if ragged >= 0:
            m, d = reduce.combine(m, d, ragged_logit, Float32(1.0))
        m, d = reduce.warp_combine(m, d)

        scale = Float32(1.0)
        if const_expr(self.grad):
            scale = device.gradient_scale(sums, incoming, factors)
        lse, z_factor, factor = device.row_numbers(m, d, column, scale, factors)
        ce, z, n = Float32(0.0), Float32(0.0), Float32(0.0)
        if owns_target:
            ce, z, n = cute.math.log(d) - (target_logit - m), lse * lse, Float32(1.0)
        if not in_range and lane == 0:
            ce, z, n = Float32(NAN), lse * lse, Float32(1.0)

        if const_expr(self.grad):
            g_line = device.row_address(mG, row) - Int64(lead * self.item_bytes)
            gG = device.elements(self.dtype, g_line)
            if ((line ^ g_line) & (VECTOR_BYTES - 1)) != 0:
                # The gradient's vectors do not line up with the logits': element by element, without the target, which
                # another lane may own.
                for element in cutlass.range(lane, whole * E, LANES):
                    if element != target:
                        g = device.other_gradient(Float32(sX[element]), m, factor, valid)
                        gG[element + first_element] = g.to(self.dtype)
            else:
                g_whole = g_line + Int64(part.whole_begin * VECTOR_BYTES)
                tXgG = device.vectors(self.dtype, g_whole, cute.AddressSpace.gmem, layout)[lane, None, None, None]
                rG = cute.make_rmem_tensor((E, S), self.dtype)
                if valid:
                    for i in cutlass.range(full, unroll=1):
                        for step in cutlass.range_constexpr(S):
                            cute.autovec_copy(tXsX[None, step, i], rX[None, step])
                        device.gradients(rX, rG, m, factor, pairs, poly)
                        for step in cutlass.range_constexpr(S):
                            cute.autovec_copy(rG[None, step], tXgG[None, step, i])
                    if rest > 0:
                        for step in cutlass.range_constexpr(S):
                            if step * LANES + lane < rest:
                                cute.autovec_copy(tXsX[None, step, full], rX[None, step])
                                device.gradients(rX[None, step], rG[None, step], m, factor, pairs, poly)
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
                gG[ragged] = device.other_gradient(ragged_logit, m, factor, valid).to(self.dtype)
            if owns_target:
                # After the vector that holds it: one thread's stores to an address keep their order.
                g = device.target_gradient(target_logit, m, d, z_factor, scale)
                gG[target + first_element] = g.to(self.dtype)
        return ce, z, n
