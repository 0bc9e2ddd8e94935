"""Rows whose columns are in several shards: the launcher that makes of what each shard tells the loss of all.

A shard's kernel of rows (`options`, `Outputs.shard_sums`) tells SHARD_SUMS numbers of each row; gathered, rank after
rank, they are read here, a thread a row, in the order of the ranks: the same bits on every rank, and every time. With M
the largest m_r, and formulas and units as in `losses`:

    d      = sum_r d_r * exp(unit * (m_r - M))              lse = unit * M + log d
    nll    = log d - (unit * (m_t - M) + gap_t)             t the one shard that has the target
    spread = V * log d + sum_r (V_r * unit * (M - m_r) + fall_r)

(M, d) is left for the shards' gradients (`Options.row_sums`), the row's losses for `options.finish`. A valid row whose
target no shard has, or two have, is NaN; and so is every row where a shard's last entry, which says what columns and
how many rows it is about, and has a mark of the options, is not what is expected: its rank was at another call.

Bytes: 16 a row and shard, 8 of label, 8 for the gradient, an entry of 16, and 4 for each number of a row that is asked
for.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsl_kernels import reduce
from dsl_kernels.cross_entropy import device, losses
from dsl_kernels.cross_entropy.device import NAN
from dsl_kernels.cross_entropy.losses import INFINITY
from dsl_kernels.cross_entropy.options import OptionsCrossEntropy
from dsl_kernels.cross_entropy.spec import SHARD_SUMS, VECTOR_BYTES, Options, Outputs, Spec


class CombineShards(OptionsCrossEntropy):
    """Launcher of the losses of rows in shards."""

    def __init__(self, spec: Spec) -> None:
        self.threads = spec.threads

    @cute.jit
    def __call__(
        self,
        shard_sums: cute.Tensor,  # (shards * (B + 1), SHARD_SUMS) fp32, contiguous
        shard_heads: cute.Tensor,  # (shards, SHARD_SUMS) int32, contiguous: (columns, first column, B, mark) of each
        labels: cute.Tensor,  # (B,) int64, any stride, counted from the first column of all
        sums: cute.Tensor,  # (SUMS_HEAD + 4B,) fp32, as for `OptionsCrossEntropy`
        row_sums: cute.Tensor,  # (B, 2) fp32, contiguous
        options: Options,
        outputs: Outputs,  # of all rows, and row_loss, row_z_loss and lse
        stream: cuda.CUstream,
    ):
        B = labels.shape[0]
        self.combine(shard_sums, shard_heads, labels, sums, row_sums, options, outputs).launch(
            grid=[(B + self.threads - 1) // self.threads, 1, 1], block=[self.threads, 1, 1], stream=stream
        )
        cluster = device.sum_cluster(B)
        device.launch_sum(self.finish(labels, sums, options, outputs, B, cluster), cluster, stream)

    @cute.kernel
    def combine(
        self,
        shard_sums: cute.Tensor,
        shard_heads: cute.Tensor,
        labels: cute.Tensor,
        sums: cute.Tensor,
        row_sums: cute.Tensor,
        options: Options,
        outputs: Outputs,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, B, shards = block * self.threads + tid, labels.shape[0], shard_heads.shape[0]
        if row < B:
            self.combine_row(row, B, shards, shard_sums, shard_heads, labels[row], sums, row_sums, options, outputs)

    @cute.jit
    def combine_row(
        self,
        row: Int32,
        B: Int32,
        shards: Int32,
        shard_sums: cute.Tensor,
        shard_heads: cute.Tensor,
        label: Int64,
        sums: cute.Tensor,
        row_sums: cute.Tensor,
        options: Options,
        outputs: Outputs,
    ):
        unit = options.logit_scale
        if options.softcap != Float32(0.0):
            unit = options.softcap
        exponent_unit = unit * reduce.LOG2E
        columns = Float32(options.vocab_size)
        m = Float32(-INFINITY)
        for shard in cutlass.range(shards, unroll=4):
            m = cute.arch.fmax(m, self.told(shard_sums, shard, row, B)[0])
        d, target, fall, owners, fits = Float32(0.0), Float32(0.0), Float32(0.0), Int32(0), Int32(1)
        for shard in cutlass.range(shards, unroll=4):
            told = self.told(shard_sums, shard, row, B)
            d = d + told[1] * reduce.exp2((told[0] - m) * exponent_unit)
            if told[2] != Float32(INFINITY):
                target = unit * (told[0] - m) + told[2]
                owners = owners + 1
            columns_here = shard_heads[shard, 0]
            # Not 0 * inf of a shard without columns.
            if options.label_smoothing != Float32(0.0) and columns_here != 0:
                fall = fall + (Float32(columns_here) * (unit * (m - told[0])) + told[3])
            head = self.told(shard_sums, shard, B, B)
            for place in cutlass.range_constexpr(SHARD_SUMS):
                if head[place].bitcast(Int32) != shard_heads[shard, place]:
                    fits = Int32(0)
        is_valid = label != options.ignore_index
        is_wrong = fits == 0 or (is_valid and owners != 1)
        if is_wrong:
            d = Float32(NAN)
        log_d = cute.math.log(d)
        lse = unit * m + log_d
        ce, z, n = Float32(0.0), Float32(0.0), Float32(0.0)
        if is_valid:
            n = Float32(1.0)
            weight = losses.row_number(options.row_weight, options.row_weight_stride, row, 1.0)
            if weight != Float32(0.0):
                ce = (1.0 - options.label_smoothing) * (log_d - target)
                if options.label_smoothing != Float32(0.0):
                    ce = ce + options.label_smoothing / columns * (columns * log_d + fall)
                ce, z = ce * weight, lse * lse * weight
        if is_wrong:
            ce, n = Float32(NAN), Float32(1.0)
        device.write_entry(sums, row, ce, z, n, n)
        z_loss = Float32(0.0)
        # Not 0 * z: that is NaN where z overflowed.
        if options.z_loss_multiplier != Float32(0.0):
            z_loss = options.z_loss_multiplier * z
        losses.write_number(outputs.row_loss, row, ce + z_loss)
        losses.write_number(outputs.row_z_loss, row, z_loss)
        losses.write_number(outputs.lse, row, lse)
        row_sums[row, 0] = m
        row_sums[row, 1] = d

    @cute.jit
    def told(self, shard_sums: cute.Tensor, shard: Int32, row: Int32, B: Int32):
        """What a shard tells of a row."""
        address = Int64(shard_sums.iterator.toint()) + (Int64(shard) * (B + 1) + row) * VECTOR_BYTES
        numbers = cute.make_rmem_tensor((SHARD_SUMS,), Float32)
        vectors = device.vectors(Float32, address, cute.AddressSpace.gmem, cute.make_layout(SHARD_SUMS))
        cute.autovec_copy(vectors, numbers)
        return numbers
