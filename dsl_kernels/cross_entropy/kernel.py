"""Cross entropy and its gradient in one pass over the logits: the launchers.

Formula, for a row x of V logits with label y, everything in fp32:

    m      = max_j x_j                    d = sum_j exp(x_j - m)            lse = m + log d
    ce     = log d - (x_y - m)            z = lse^2
    dx_j   = scale * ((1 + 2 * z_loss_multiplier * lse) * exp(x_j - m) / d - [j = y])

Three kernels: `count_valid`, only where the gradient is divided by the number of valid rows and the rows are more than
`plan.FEW_LABELS` or narrow (else each warp counts them by itself before its first row); the rows themselves (`wide`,
`narrow` and `held` have their geometry); `add_rows`, which adds what the rows left. Each may start while the kernel
before still runs (programmatic dependent launch) and waits on the device for what it needs of it: the count is
hidden behind the rows' first pass, and the sum's launch behind the rows. A gradient for backward is not summed.

Bytes: V * item read and V * item written per row (streamed: twice V * item read), 8 of label (16 with the count); an
entry of 16, written and read, for each wide row, else for each block.

Numerics: the shift is subtracted before it is scaled by log2(e), so a large common offset costs nothing; the loss is
formed from two shifted terms, so it keeps its fraction where lse has lost it; the target's 1 is subtracted in fp32 and
the gradient rounded to the logits' dtype once. exp2 is the hardware's (2 ulp), the loss's log the accurate one.

Repeatability: entries go to a workspace of the call and are added in a fixed order: no atomics, no counter to reset,
the same bits every time.

Source: online softmax normaliser, Milakov and Gimelshein 2018 (arXiv:1805.02867), per thread; pairs combined as there.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import reduce
from dsl_kernels.cross_entropy import device, losses, plan
from dsl_kernels.cross_entropy.device import cute_dtype
from dsl_kernels.cross_entropy.held import HeldRows
from dsl_kernels.cross_entropy.narrow import NarrowRows
from dsl_kernels.cross_entropy.options import OptionsCrossEntropy
from dsl_kernels.cross_entropy.shards import CombineShards
from dsl_kernels.cross_entropy.spec import (
    CE_SUM,
    LOSS,
    N_VALID,
    SHARD_SUMS,
    VECTOR_BYTES,
    Z_SUM,
    Options,
    Outputs,
    Spec,
)
from dsl_kernels.cross_entropy.wide import WideRows

OPTION_TYPES = {
    **dict.fromkeys(("z_loss_multiplier", "label_smoothing", "logit_scale", "softcap", "divisor"), Float32),
    "mean": Int32,
}
"""Of the fields of `Options` that are not Int64."""


class FusedCrossEntropy:
    """Launcher of the loss and, if `spec.grad`, dlogits: counts labels where asked, runs the rows, adds their
    losses.
    """

    def __init__(self, spec: Spec, arch: str) -> None:
        self.entry_per_row = not (spec.narrow or spec.held)
        device_function = HeldRows if spec.held else NarrowRows if spec.narrow else WideRows
        self.rows = device_function(spec, arch)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (B, V) fp16|bf16|fp32, row stride any, column stride 1
        labels: cute.Tensor,  # (B,) int64, any stride
        grad_logits: cute.Tensor,  # (B, V) dtype of logits, row stride any, column stride 1; may be logits
        sums: cute.Tensor,  # (SUMS_HEAD + 4B,) fp32: ce_sum, z_sum, n_valid, loss; the entries
        loss: cute.Tensor,  # () fp32, written before the totals of sums, of which it may be a view
        incoming: cute.Tensor,  # () fp32
        ignore_index: Int64,
        z_loss_multiplier: Float32,
        mean: Int32,  # 1: loss is divided by max(n_valid, 1)
        grad_by_mean: Int32,  # 1: the gradient is too
        grad_by_incoming: Int32,  # 1: the gradient is multiplied by incoming; of the totals only n_valid may be written
        n0: Int32,  # this and the next five: the numbers of plan.WideLaunch, NarrowLaunch or HeldLaunch, in their order
        n1: Int32,
        n2: Int32,
        n3: Int32,
        n4: Int32,
        smem_bytes: Int32,
        stream: cuda.CUstream,
    ):
        B = logits.shape[0]
        counted = Int32(0)
        if grad_by_mean != 0 and (B > plan.FEW_LABELS or const_expr(not self.rows.counts_few)):
            counted = Int32(1)
        request = losses.PlainRequest(
            incoming, ignore_index, z_loss_multiplier, grad_by_mean, grad_by_incoming, counted
        )
        if counted != 0:
            cluster = device.sum_cluster(B)
            device.launch_sum(self.count_valid(labels, sums, ignore_index, cluster), cluster, stream)
        self.rows.launch(logits, labels, grad_logits, sums, request, (n0, n1, n2, n3, n4, smem_bytes), stream)
        if grad_by_incoming == 0:
            count = B if const_expr(self.entry_per_row) else n1
            cluster = device.sum_cluster(count)
            device.launch_sum(self.add_rows(sums, loss, count, z_loss_multiplier, mean, cluster), cluster, stream)

    @cute.kernel
    def count_valid(self, labels: cute.Tensor, sums: cute.Tensor, ignore_index: Int64, cluster: Int32):
        partials, arrived = device.sum_places(1)
        reduce.begin_cluster_add(arrived)
        # Orders all that a stranger's kernel does, the logits it may still write among it, before what follows here and
        # in the rows, which may start now and wait for nothing but this count.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        n_valid = device.valid_labels(labels, first, stride, ignore_index)
        (n_valid,) = reduce.cluster_add([n_valid], partials, arrived, device.SUM_WARPS, cluster)
        if rank == 0 and tid == 0:
            sums[N_VALID] = n_valid

    @cute.kernel
    def add_rows(
        self,
        sums: cute.Tensor,
        loss: cute.Tensor,
        count: Int32,
        z_loss_multiplier: Float32,
        mean: Int32,
        cluster: Int32,
    ):
        partials, arrived = device.sum_places(3)
        reduce.begin_cluster_add(arrived)
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        # Orders the entries, and the reads of the earlier count's n_valid, before the accesses below: this grid may
        # start while rows are still being worked on, and would add what is not there yet.
        cute.arch.griddepcontrol_wait()
        # The next call, or backward, may take its place: it waits for the end of this.
        cute.arch.griddepcontrol_launch_dependents()
        ce_sum, z_sum, n_valid = Float32(0.0), Float32(0.0), Float32(0.0)
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        for entry in cutlass.range(first, count, stride * plan.SUM_ENTRIES, unroll=1):
            numbers = device.load_entries(sums, entry, stride, count)
            for step in cutlass.range_constexpr(plan.SUM_ENTRIES):
                ce_sum = ce_sum + numbers[0, step]
                z_sum = z_sum + numbers[1, step]
                n_valid = n_valid + numbers[2, step]
        ce_sum, z_sum, n_valid = reduce.cluster_add(
            [ce_sum, z_sum, n_valid], partials, arrived, device.SUM_WARPS, cluster
        )
        if rank == 0 and tid == 0:
            total = ce_sum
            # Not 0 * z_sum: that is NaN where z overflowed.
            if z_loss_multiplier != Float32(0.0):
                total = total + z_loss_multiplier * z_sum
            if mean != 0:
                total = total / cute.arch.fmax(n_valid, Float32(1.0))
            loss[()] = total
            # After the loss, which may be one of these.
            sums[CE_SUM] = ce_sum
            sums[Z_SUM] = z_sum
            sums[N_VALID] = n_valid
            sums[LOSS] = total


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
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.scale(source, out, grad_loss, blocks).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def scale(
        self,
        source: cute.Tensor,
        out: cute.Tensor,
        grad_loss: cute.Tensor,
        blocks: Int32,
    ):
        E, T, S = const_expr(self.vector_elements), const_expr(self.threads), const_expr(plan.SCALE_STEPS)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # Orders all that the kernel before does, the gradient it may write among it, before what follows.
        cute.arch.griddepcontrol_wait()
        factor = grad_loss[()]
        elements = Int64(source.shape[0]) * Int64(source.shape[1])
        if factor == Float32(1.0) and source.iterator.toint() == out.iterator.toint():
            elements = Int64(0)
        vectors = elements // E
        tiles = Int32((vectors + T * S - 1) // (T * S))
        source_address, out_address = Int64(source.iterator.toint()), Int64(out.iterator.toint())
        policy = device.read_policy()
        rX = cute.make_rmem_tensor((E, S), self.dtype)
        for tile in cutlass.range(block, tiles, blocks, unroll=1):
            first = Int64(tile) * (T * S) + tid
            # All loads of a tile before its first store: the compiler must take each store for one into what is loaded
            # next.
            for step in cutlass.range_constexpr(S):
                if first + step * T < vectors:
                    device.load_vector(source_address + (first + step * T) * VECTOR_BYTES, rX[None, step], policy)
            for step in cutlass.range_constexpr(S):
                if first + step * T < vectors:
                    offset = (first + step * T) * VECTOR_BYTES
                    rG = rX[None, step]
                    rG.store((rG.load().to(Float32) * factor).to(self.dtype))
                    out_vector = device.vectors(
                        self.dtype, out_address + offset, cute.AddressSpace.gmem, cute.make_layout(E)
                    )
                    cute.autovec_copy(rG, out_vector)
        first_tail = block * T + tid
        tail = elements - vectors * E
        if Int64(first_tail) < tail:
            offset = vectors * VECTOR_BYTES + Int64(first_tail) * (self.dtype.width // 8)
            x = device.elements(self.dtype, source_address + offset)
            g = device.elements(self.dtype, out_address + offset)
            g[0] = (Float32(x[0]) * factor).to(self.dtype)


def launcher(spec: Spec, arch: str) -> tuple[Any, tuple[Any, ...]]:
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
    sums = fake(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=VECTOR_BYTES)
    if spec.op == "scale":
        gradients = matrix(VECTOR_BYTES), matrix(VECTOR_BYTES)
        return ScaleGradient(spec), (*gradients, scalar, Int32(1), stream)
    item = dtype.width // 8
    labels = fake(Int64, (B,), stride=(cute.sym_int64(),), assumed_align=8)
    options = Options(*(OPTION_TYPES.get(name, Int64)(0) for name in Options._fields))
    outputs = Outputs(*(Int64(0) for _ in Outputs._fields))
    if spec.op == "combine":
        return CombineShards(spec), (
            fake(Float32, (cute.sym_int(), SHARD_SUMS), stride=(SHARD_SUMS, 1), assumed_align=VECTOR_BYTES),
            fake(Int32, (cute.sym_int(), SHARD_SUMS), stride=(SHARD_SUMS, 1), assumed_align=4),
            labels,
            sums,
            fake(Float32, (B, 2), stride=(2, 1), assumed_align=8),
            options,
            outputs,
            stream,
        )
    if spec.options:
        return OptionsCrossEntropy(spec, arch), (
            matrix(item),
            labels,
            matrix(item),
            sums,
            options,
            outputs,
            Int32(0),
            Int32(0),
            tuple(Int32(1) for _ in range(6)),
            stream,
        )
    return FusedCrossEntropy(spec, arch), (
        matrix(item),
        labels,
        matrix(item),
        sums,
        scalar,
        scalar,
        Int64(-100),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(0),
        *(Int32(1) for _ in range(6)),
        stream,
    )
