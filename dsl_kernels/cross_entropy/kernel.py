"""draft"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import layouts, reduce
from dsl_kernels.cross_entropy import geometry, plan


class FusedCrossEntropy:
    def __init__(self, dtype, threads: int, grad: bool, streamed: bool) -> None:
        self.dtype, self.threads, self.grad, self.streamed = dtype, threads, grad, streamed
        self.item_bytes = dtype.width // 8
        self.vector_elements = 128 // dtype.width
        self.warps = threads // reduce.WARP

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (B, V) fp16|bf16|fp32, row stride any, column stride 1
        labels: cute.Tensor,  # (B,) int64, any stride
        grad_logits: cute.Tensor,  # (B, V) dtype of logits, row stride any, column stride 1; may be logits
        row_losses: cute.Tensor,  # (2, B) fp32 workspace: ce and z of each row
        totals: cute.Tensor,  # (3,) fp32: ce_sum, z_sum, n_valid
        loss: cute.Tensor,  # () fp32
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        grad_scale: Float32,
        mean: Int32,
        grad_by_mean: Int32,
        cluster: Int32,
        smem_bytes: Int32,
        stream: cuda.CUstream,
    ):
        B = logits.shape[0]
        sum_cluster = 1 + (plan.SUM_CLUSTER - 1) * cutlass.min(B // plan.SUM_CLUSTER_ROWS, 1)
        sum_grid = {"grid": [sum_cluster, 1, 1], "block": [plan.SUM_THREADS, 1, 1], "cluster": [sum_cluster, 1, 1]}
        if grad_by_mean != 0:
            self.count_valid(labels, totals, ignore_index, sum_cluster).launch(**sum_grid, stream=stream)
        self.fused(
            logits, labels, grad_logits, row_losses, totals, ignore_index, z_loss_multiplier, grad_scale, grad_by_mean, cluster
        ).launch(
            grid=[cluster * B, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[cluster, 1, 1],
            smem=smem_bytes,
            stream=stream,
        )
        self.add_rows(
            row_losses, labels, totals, loss, ignore_index, z_loss_multiplier, mean, sum_cluster
        ).launch(**sum_grid, stream=stream, use_pdl=True)

    @cute.kernel
    def fused(
        self,
        mX: cute.Tensor,
        labels: cute.Tensor,
        mG: cute.Tensor,
        row_losses: cute.Tensor,
        totals: cute.Tensor,
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        grad_scale: Float32,
        grad_by_mean: Int32,
        cluster: Int32,
    ):
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.STEPS)
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.cluster_idx()
        rank = cute.arch.block_idx_in_cluster()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        V = mX.shape[1]

        x_row = Int64((mX.iterator + Int64(row) * Int64(mX.stride[0])).toint())
        g_row = Int64((mG.iterator + Int64(row) * Int64(mG.stride[0])).toint())
        lead = Int32(x_row & 15) // self.item_bytes
        part = geometry.row_slice(lead, V, cluster, rank, E, cutlass.min, cutlass.max)
        offset = Int64(part.first_vector) * 16 - Int64(lead * self.item_bytes)
        x_slice, g_slice = x_row + offset, g_row + offset
        n_chunks = geometry.ceil_div(part.vectors, S * T)

        smem = Int32(cute.arch.get_dyn_smem(Int64, alignment=128).toint())
        barriers = cute.make_ptr(Int64, smem, cute.AddressSpace.smem, assumed_align=8)
        arrived = barriers + plan.MAX_CHUNKS
        sPairs = cute.make_tensor(
            cute.make_ptr(Float32, smem + plan.BARRIER_BYTES, cute.AddressSpace.smem, assumed_align=8),
            cute.make_layout((2, self.warps * plan.MAX_CLUSTER)),
        )
        slice_address = smem + plan.slice_offset(T)
        layout = layouts.slice_layout(T, E, S, plan.MAX_CHUNKS)
        sX_ptr = cute.make_ptr(self.dtype, slice_address, cute.AddressSpace.smem, assumed_align=128)
        gX_ptr = cute.make_ptr(self.dtype, x_slice, cute.AddressSpace.gmem, assumed_align=16)
        source = gX_ptr if const_expr(self.streamed) else sX_ptr
        tXsX = cute.make_tensor(source, layout)[tid, None, None, None]
        gX1 = cute.make_tensor(
            cute.make_ptr(self.dtype, x_slice, cute.AddressSpace.gmem, assumed_align=self.item_bytes)
            if const_expr(self.streamed) else sX_ptr, cute.make_layout(1))
        gG1 = cute.make_tensor(
            cute.make_ptr(self.dtype, g_slice, cute.AddressSpace.gmem, assumed_align=self.item_bytes), cute.make_layout(1))

        if const_expr(not self.streamed):
            if tid < n_chunks:
                cute.arch.mbarrier_init(barriers + tid, 1)
                cute.arch.mbarrier_init_fence()
                begin = tid * (S * T)
                copy_bytes = cutlass.min(part.vectors - begin, S * T) * 16
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + tid, copy_bytes)
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[slice_address + begin * 16, x_slice + Int64(begin) * 16, copy_bytes, smem + tid * 8],
                )
        if tid == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, reduce.PAIR_BYTES * self.warps * cluster)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier()

        label = labels[row]
        m, d = Float32(reduce.LOWEST), Float32(0.0)
        rX = cute.make_rmem_tensor((E, S), self.dtype)
        for c in cutlass.range(n_chunks, unroll=1):
            if const_expr(not self.streamed):
                cute.arch.mbarrier_wait(barriers + c, 0)
            for s in cutlass.range_constexpr(S):
                i = (c * S + s) * T + tid
                if i >= part.whole_begin and i < part.whole_end:
                    cute.autovec_copy(tXsX[(None, s, c)], rX[None, s])
                else:
                    rX[None, s].fill(-float("inf"))
            x = rX.load().to(Float32)
            m_new = cute.arch.fmax(m, x.reduce(cute.ReductionOp.MAX, Float32(reduce.LOWEST), 0))
            e = cute.math.exp2((x - m_new) * reduce.LOG2E, fastmath=True)
            d = d * reduce.exp_shifted(m, m_new) + e.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            m = m_new

        ragged = Int32(-1)
        if warp == 0:
            begin, end = geometry.ragged_range(part, lead, V, lane, E, cutlass.min)
            element = geometry.ragged_element(part, lane, E, cutlass.min)
            if element >= begin and element < end:
                ragged = element
        if ragged >= 0:
            m, d = reduce.combine(m, d, Float32(gX1[ragged]), Float32(1.0))
        m, d = reduce.warp_combine(m, d)
        m, d = reduce.cluster_combine(m, d, sPairs, arrived, self.warps, cluster)

        valid = label != ignore_index
        in_range = label >= 0 and label < Int64(V)
        lse = m + cute.math.log2(d, fastmath=True) / reduce.LOG2E
        scale = grad_scale
        if grad_by_mean != 0:
            scale = scale / cute.arch.fmax(totals[2], Float32(1.0))
        coef = (Float32(1.0) + Float32(2.0) * z_loss_multiplier * lse) * scale / d
        target64 = label - Int64(part.first_column)
        target = Int32(-1)
        if valid and in_range and target64 >= 0 and target64 < Int64(part.vectors * E):
            target = Int32(target64)
        if not in_range:
            coef = Float32(float("nan"))
        target_vector = target // E
        owns_target = target >= 0 and (ragged == target or (
            target_vector >= part.whole_begin and target_vector < part.whole_end and target_vector % T == tid))
        x_target = Float32(0.0)
        if owns_target:
            x_target = Float32(gX1[target])
            row_losses[0, row] = cute.math.log(d) - (x_target - m)
            row_losses[1, row] = lse * lse
        if rank == 0 and tid == 0:
            if not valid:
                row_losses[0, row] = Float32(0.0)
                row_losses[1, row] = Float32(0.0)
            elif not in_range:
                row_losses[0, row] = Float32(float("nan"))
                row_losses[1, row] = lse * lse

        if const_expr(self.grad):
            tXgG = cute.make_tensor(cute.make_ptr(self.dtype, g_slice, cute.AddressSpace.gmem, assumed_align=16), layout)[tid, None, None, None]
            rG = cute.make_rmem_tensor((E,), self.dtype)
            if not valid:
                self.store_zeros(gG1, part, ragged, tid)
            elif ((x_slice ^ g_slice) & 15) != 0:
                self.store_by_element(gX1, gG1, part, ragged, m, coef, tid)
            else:
                for c in cutlass.range(n_chunks, unroll=1):
                    for s in cutlass.range_constexpr(S):
                        i = (c * S + s) * T + tid
                        if i >= part.whole_begin and i < part.whole_end:
                            cute.autovec_copy(tXsX[(None, s, c)], rX[None, s])
                            x = rX[None, s].load().to(Float32)
                            rG.store((cute.math.exp2((x - m) * reduce.LOG2E, fastmath=True) * coef).to(self.dtype))
                            cute.autovec_copy(rG, tXgG[(None, s, c)])
                if ragged >= 0:
                    gG1[ragged] = (reduce.exp_shifted(Float32(gX1[ragged]), m) * coef).to(self.dtype)
            if owns_target:
                gG1[target] = (reduce.exp_shifted(x_target, m) * coef - scale).to(self.dtype)

    @cute.jit
    def store_zeros(self, gG1: cute.Tensor, part, ragged: Int32, tid: Int32):
        E = const_expr(self.vector_elements)
        for e in cutlass.range(part.whole_begin * E + tid, part.whole_end * E, self.threads):
            gG1[e] = self.dtype(0.0)
        if ragged >= 0:
            gG1[ragged] = self.dtype(0.0)

    @cute.jit
    def store_by_element(self, gX1, gG1, part, ragged, m, coef, tid):
        E = const_expr(self.vector_elements)
        for e in cutlass.range(part.whole_begin * E + tid, part.whole_end * E, self.threads):
            gG1[e] = (reduce.exp_shifted(Float32(gX1[e]), m) * coef).to(self.dtype)
        if ragged >= 0:
            gG1[ragged] = (reduce.exp_shifted(Float32(gX1[ragged]), m) * coef).to(self.dtype)

    @cute.kernel
    def count_valid(self, labels: cute.Tensor, totals: cute.Tensor, ignore_index: Int64, cluster: Int32):
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        n_valid = Float32(0.0)
        for r in cutlass.range(rank * plan.SUM_THREADS + tid, labels.shape[0], cluster * plan.SUM_THREADS, unroll=4):
            if labels[r] != ignore_index:
                n_valid = n_valid + Float32(1.0)
        (n_valid,) = reduce.cluster_add([n_valid], self.partials(1), plan.SUM_THREADS // reduce.WARP, plan.SUM_CLUSTER, cluster)
        if rank == 0 and tid == 0:
            totals[2] = n_valid

    @cute.kernel
    def add_rows(self, row_losses: cute.Tensor, labels: cute.Tensor, totals: cute.Tensor, loss: cute.Tensor, ignore_index: Int64, z_loss_multiplier: Float32, mean: Int32, cluster: Int32):
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        cute.arch.griddepcontrol_wait()
        ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        for r in cutlass.range(rank * plan.SUM_THREADS + tid, labels.shape[0], cluster * plan.SUM_THREADS, unroll=4):
            ce_sum = ce_sum + row_losses[0, r]
            z_sum = z_sum + row_losses[1, r]
            if labels[r] != ignore_index:
                n_valid = n_valid + Float32(1.0)
        ce_sum, z_sum, n_valid = reduce.cluster_add([ce_sum, z_sum, n_valid], self.partials(3), plan.SUM_THREADS // reduce.WARP, plan.SUM_CLUSTER, cluster)
        if rank == 0 and tid == 0:
            totals[0] = ce_sum
            totals[1] = z_sum
            totals[2] = n_valid
            total = ce_sum
            if z_loss_multiplier != Float32(0.0):
                total = total + z_loss_multiplier * z_sum
            if mean != 0:
                total = total / cute.arch.fmax(n_valid, Float32(1.0))
            loss[()] = total

    def partials(self, n: int):
        return cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((n, 32)), byte_alignment=16)


def compile_fused(dtype, threads, grad, streamed, opts=""):
    B, V = cute.sym_int(), cute.sym_int()
    align = dtype.width // 8
    fake = cute.runtime.make_fake_tensor
    matrix = lambda: fake(dtype, (B, V), stride=(cute.sym_int64(), 1), assumed_align=align)
    return cute.compile(
        FusedCrossEntropy(dtype, threads, grad, streamed),
        matrix(), fake(Int64, (B,), stride=(cute.sym_int64(),), assumed_align=8), matrix(),
        fake(Float32, (2, B), stride=(cute.sym_int64(), 1), assumed_align=4), fake(Float32, (3,), stride=(1,), assumed_align=4),
        fake(Float32, (), stride=(), assumed_align=4),
        Int64(-100), Float32(0.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi " + opts)


if __name__ == "__main__":
    import sys, time
    t = time.time()
    f = compile_fused(getattr(cutlass, sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4] == "1", " ".join(sys.argv[5:]))
    print("compiled", time.time() - t)
    f.export_to_c("/tmp/x.o", function_name="x")
