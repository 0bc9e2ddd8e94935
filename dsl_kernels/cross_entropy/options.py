"""Cross entropy with options: its launcher. The rows are those of `kernel`, their loss is `losses.OptionsLoss`.

Three kernels, as there: `count`, only where the gradient is divided by what only the labels tell; the rows; `finish`,
which adds what the rows left and makes of it the loss and the other results of all rows. A gradient for backward has
nothing to finish. The order between them and the repeatability are those of `kernel`, but for the predicted token: an
integer maximum, whose order does not matter, in a buffer that is 0 before.

Bytes, besides the logits and the gradient: those of `kernel`, and 4 a row for each number of the row that is given or
wanted, 24 for the predicted token.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import reduce
from dsl_kernels.cross_entropy import device, losses, plan
from dsl_kernels.cross_entropy.narrow import NarrowRows
from dsl_kernels.cross_entropy.spec import (
    CE_SUM,
    LOSS,
    N_VALID,
    WEIGHT_SUM,
    Z_SUM,
    Options,
    Outputs,
    Spec,
)
from dsl_kernels.cross_entropy.wide import WideRows


class OptionsCrossEntropy:
    """Launcher of the loss with options and, if `spec.grad`, dlogits."""

    def __init__(self, spec: Spec, arch: str) -> None:
        self.entry_per_row = not spec.narrow
        self.rows = (NarrowRows if spec.narrow else WideRows)(spec, arch)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (B, V) fp16|bf16|fp32, row stride any, column stride 1
        labels: cute.Tensor,  # (B,) int64, any stride
        grad_logits: cute.Tensor,  # (B, V) dtype of logits, row stride any, column stride 1; may be logits
        sums: cute.Tensor,  # (SUMS_HEAD + 4B,) fp32: the totals, the entries
        options: Options,
        outputs: Outputs,
        counted: Int32,  # 1: the labels are counted for the gradient first
        finished: Int32,  # 1: there are results besides the gradient
        numbers: tuple[Int32, Int32, Int32, Int32, Int32, Int32],  # of plan.WideLaunch or NarrowLaunch
        stream: cuda.CUstream,
    ):
        B = logits.shape[0]
        request = losses.OptionsRequest(options, outputs, counted)
        if counted != 0:
            cluster = device.sum_cluster(B)
            device.launch_sum(self.count(labels, sums, options, logits.shape[1], cluster), cluster, stream)
        self.rows.launch(logits, labels, grad_logits, sums, request, numbers, stream)
        if finished != 0:
            entries = B if const_expr(self.entry_per_row) else numbers[1]
            cluster = device.sum_cluster(entries)
            device.launch_sum(self.finish(labels, sums, options, outputs, entries, cluster), cluster, stream)

    @cute.kernel
    def count(self, labels: cute.Tensor, sums: cute.Tensor, options: Options, V: Int32, cluster: Int32):
        partials, arrived = device.sum_places(2)
        reduce.begin_cluster_add(arrived)
        # As in `kernel.FusedCrossEntropy.count_valid`.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        n_valid, weight_sum = Float32(0.0), Float32(0.0)
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        for row in cutlass.range(first, labels.shape[0], stride * plan.SUM_LABELS, unroll=1):
            loaded = device.load_labels(labels, row, stride, options.ignore_index)
            for step in cutlass.range_constexpr(plan.SUM_LABELS):
                column = device.target_column(loaded[step], options.ignore_index, V)
                if column != device.IGNORED:
                    n_valid = n_valid + Float32(1.0)
                    if options.class_weight != 0 and column >= 0:
                        weight_sum = weight_sum + losses.number(options.class_weight, Int64(column))
        n_valid, weight_sum = reduce.cluster_add([n_valid, weight_sum], partials, arrived, device.SUM_WARPS, cluster)
        if rank == 0 and tid == 0:
            sums[N_VALID] = n_valid
            sums[WEIGHT_SUM] = weight_sum

    @cute.kernel
    def finish(
        self,
        labels: cute.Tensor,
        sums: cute.Tensor,
        options: Options,
        outputs: Outputs,
        entries: Int32,
        cluster: Int32,
    ):
        partials, arrived = device.sum_places(5)
        reduce.begin_cluster_add(arrived)
        tid, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        # Orders all that the rows leave before the accesses below: this grid may start while they are still being
        # worked on.
        cute.arch.griddepcontrol_wait()
        # As in `kernel.FusedCrossEntropy.add_rows`.
        cute.arch.griddepcontrol_launch_dependents()
        ce_sum, z_sum, n_valid, weight_sum = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        first, stride = rank * plan.SUM_THREADS + tid, cluster * plan.SUM_THREADS
        for entry in cutlass.range(first, entries, stride * plan.SUM_ENTRIES, unroll=1):
            numbers = device.load_entries(sums, entry, stride, entries)
            for step in cutlass.range_constexpr(plan.SUM_ENTRIES):
                ce_sum, z_sum = ce_sum + numbers[0, step], z_sum + numbers[1, step]
                n_valid, weight_sum = n_valid + numbers[2, step], weight_sum + numbers[3, step]
        hits = Float32(0.0)
        if outputs.predicted != 0:
            # Not several together: each writes its own key, which might be the next one's label for all that is known.
            for row in cutlass.range(first, labels.shape[0], stride, unroll=1):
                hits = hits + self.decode(outputs.predicted + Int64(row) * 8, labels[row], options.ignore_index)
        ce_sum, z_sum, n_valid, weight_sum, hits = reduce.cluster_add(
            [ce_sum, z_sum, n_valid, weight_sum, hits], partials, arrived, device.SUM_WARPS, cluster
        )
        if rank == 0 and tid == 0:
            ce_normalizer, z_normalizer = Float32(1.0), Float32(1.0)
            if options.mean != 0:
                ce_normalizer, z_normalizer = losses.normalizers(options, n_valid, weight_sum)
            ce, z_loss = Float32(0.0), Float32(0.0)
            # Without a valid row both are 0 whatever the normalizer. Not 0 * z: that is NaN where z overflowed.
            if n_valid != Float32(0.0):
                ce = ce_sum / ce_normalizer
                if options.z_loss_multiplier != Float32(0.0):
                    z_loss = options.z_loss_multiplier * z_sum / z_normalizer
            losses.write_number(outputs.loss, Int32(0), ce + z_loss)
            losses.write_number(outputs.z_loss, Int32(0), z_loss)
            losses.write_number(outputs.token_accuracy, Int32(0), hits / cute.arch.fmax(n_valid, Float32(1.0)))
            sums[CE_SUM] = ce_sum
            sums[Z_SUM] = z_sum
            sums[N_VALID] = n_valid
            sums[LOSS] = ce + z_loss
            sums[WEIGHT_SUM] = weight_sum

    @cute.jit
    def decode(self, address: Int64, label: Int64, ignore_index: Int64):
        """Make the predicted column of a row's `losses.OptionsLoss.predict`; 1 if it is the label, else 0."""
        key = cute.make_tensor(
            cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8), cute.make_layout(1)
        )
        column = Int64(-1)
        if key[0] != 0 and key[0] != -1:
            column = Int64(0x7FFFFFFF) - (key[0] & Int64(0xFFFFFFFF))
        key[0] = column
        hit = Float32(0.0)
        if column == label and label >= 0 and label != ignore_index:
            hit = Float32(1.0)
        return hit
