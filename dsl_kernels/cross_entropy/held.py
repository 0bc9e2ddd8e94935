"""Rows so narrow that some lanes of a warp hold one in their registers, exponentials included: each is computed once.

Geometry: L lanes share a row (`spec.lanes`, 16 or 32), so a warp works on 32 / L rows at once, which share the
instructions that a row costs besides its elements. A block takes consecutive rows, R times one for each of its groups
of L lanes. Lane l takes the row's whole vectors whole_begin + l, + L, ..., `spec.held` of them, straight from device
memory, and one element of the row's ragged ends.

    1  load `held` vectors a lane              3  exponentials, their sum over the lanes
    2  the maximum, over the lanes             4  times the factor, rounded, stored with 16-byte stores

Ordering and aliasing: lanes read and write their own row only, and a barrier of the warp lies between their reads of it
and their writes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce, vector
from dsl_kernels.cross_entropy import device
from dsl_kernels.cross_entropy.device import IGNORED, NAN, OUT_OF_RANGE
from dsl_kernels.cross_entropy.losses import PlainRequest
from dsl_kernels.cross_entropy.spec import VECTOR_BYTES, Spec


class HeldRows(device.RowsKernel):
    """The device function of rows held in registers."""

    def __init__(self, spec: Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.held, self.lanes = spec.held, spec.lanes

    @cute.jit
    def launch(self, mX, labels, mG, sums, request, numbers, stream):
        turns, blocks, _, _, _, _ = numbers
        self.rows(mX, labels, mG, sums, request, turns).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.resident_blocks,
            preferred_smem_carveout=0,
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
        request: PlainRequest,
        turns: Int32,
    ):
        device.start_beside_neighbours(request.counted)
        L, T = const_expr(self.lanes), const_expr(self.threads)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        B = mX.shape[0]
        first_row = block * (T // L * turns) + tid // L
        few_valid = Float32(0.0)
        if const_expr(self.grad):
            few_valid = device.count_few(labels, request)
        ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        for turn in cutlass.range(turns, unroll=1):
            row = first_row + turn * (T // L)
            ce, z, n = self.one_row(mX, labels, mG, cutlass.min(row, B - 1), row < B, sums, request, few_valid)
            ce_sum, z_sum, n_valid = ce_sum + ce, z_sum + z, n_valid + n
        W = const_expr(self.warps)
        partials = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((4, W)), byte_alignment=16)
        if tid % L != 0:
            ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        device.add_warps(sums, (ce_sum, z_sum, n_valid, Float32(0.0)), partials, W)

    @cute.jit
    def one_row(self, mX, labels, mG, row: Int32, exists, sums: cute.Tensor, request, few_valid: Float32):
        """L lanes: what the row adds to (ce_sum, z_sum, n_valid), the same in each; its gradient is written.

        Where the row does not exist no logit is read, and nothing is written or added.
        """
        E, H, L = const_expr(self.vector_elements), const_expr(self.held), const_expr(self.lanes)
        pairs, poly = const_expr(self.math.packed_fp32), const_expr(self.math.polynomial)
        lane = cute.arch.lane_idx() % L
        V = mX.shape[1]
        label = labels[row]
        lead, part, line = device.whole_row(mX, row, E)
        first, end = part.whole_begin + lane, part.whole_end
        ragged = device.ragged_element(part, lead, V, E, L)
        column = device.target_column(label, request.ignore_index, V)
        if not exists:
            end, ragged, column = Int32(0), Int32(-1), Int32(IGNORED)
        valid, in_range = column != IGNORED, column != OUT_OF_RANGE
        layout = layouts.slice_layout(L, E, H, 1)
        gX = device.elements(self.dtype, line)
        x_whole = line + Int64(part.whole_begin * VECTOR_BYTES)
        tXgX = device.vectors(self.dtype, x_whole, cute.AddressSpace.gmem, layout)[lane, None, None, 0]
        rX = cute.make_rmem_tensor((E, H), self.dtype)
        for step in cutlass.range_constexpr(H):
            if first + step * L < end:
                cute.autovec_copy(tXgX[None, step], rX[None, step])
            else:
                rX[None, step].fill(-float("inf"))
        ragged_logit, target_logit = Float32(-float("inf")), Float32(0.0)
        if ragged >= 0:
            ragged_logit = Float32(gX[ragged])
        target = column + lead
        if column >= 0:
            target_logit = Float32(gX[target])

        values = vector.widen(rX)
        m = cute.arch.fmax(vector.maximum(rX, values), cute.arch.fmax(ragged_logit, Float32(reduce.LOWEST)))
        m = cute.arch.warp_reduction(m, cute.arch.fmax, threads_in_group=L)
        exps = vector.exp_shifted(values, m, pairs=pairs, polynomial=poly)
        ragged_exp = reduce.exp_shifted(ragged_logit, m)
        even, odd = vector.add(exps, (ragged_exp, Float32(0.0)), pairs=pairs)
        d = cute.arch.warp_reduction(even + odd, lambda a, b: a + b, threads_in_group=L)

        scale = Float32(1.0)
        if const_expr(self.grad):
            scale = device.gradient_scale(sums, request, few_valid)
        lse, z_factor, factor = device.row_numbers(m, d, column, scale, request)
        ce, z, n = cute.math.log(d) - (target_logit - m), lse * lse, Float32(1.0)
        if not in_range:
            ce = Float32(NAN)
        if not valid:
            ce, z, n = Float32(0.0), Float32(0.0), Float32(0.0)

        if const_expr(self.grad):
            # Orders all lanes' reads of the row before any lane's stores: the gradient may lie in its place, and every
            # lane has read the target's logit, which only one of them writes.
            cute.arch.sync_warp()
            g_line = device.row_address(mG, row) - Int64(lead * self.item_bytes)
            gG = device.elements(self.dtype, g_line)
            rG = cute.make_rmem_tensor((E, H), self.dtype)
            if valid:
                vector.round_to(vector.scale(exps, factor, pairs=pairs), rG)
                ragged_exp = ragged_exp * factor
            else:
                rG.fill(0.0)
                ragged_exp = Float32(0.0)
            if ((line ^ g_line) & (VECTOR_BYTES - 1)) != 0:
                # The gradient's vectors do not line up with the logits': element by element.
                for step in cutlass.range_constexpr(H):
                    if first + step * L < end:
                        for e in cutlass.range_constexpr(E):
                            gG[(first + step * L) * E + e] = rG[e, step]
            else:
                g_whole = g_line + Int64(part.whole_begin * VECTOR_BYTES)
                tXgG = device.vectors(self.dtype, g_whole, cute.AddressSpace.gmem, layout)[lane, None, None, 0]
                for step in cutlass.range_constexpr(H):
                    if first + step * L < end:
                        cute.autovec_copy(rG[None, step], tXgG[None, step])
            if ragged >= 0:
                gG[ragged] = ragged_exp.to(self.dtype)
            # The lane that wrote the target's element writes it again: one thread's stores to an address keep their
            # order.
            is_whole = target >= part.whole_begin * E and target < part.whole_end * E
            owns_target = target == ragged or (is_whole and (target // E - part.whole_begin) % L == lane)
            if column >= 0 and owns_target:
                gG[target] = device.target_gradient(target_logit, m, d, z_factor, scale).to(self.dtype)
        return ce, z, n
