"""Small faults put into the compiled kernels, one at a time: which of them do the tests on a GPU not see?

    python .ci/kernel_mutations.py build OUT [--only NUMBER ...]     needs the DSL, no GPU
    python .ci/kernel_mutations.py run OUT [--jobs N] [--only ...]   needs a GPU, no compiler

`build` makes each fault of `FAULTS` in a copy of `dsl_kernels`, OUT/NN, and compiles there the few kernels that its
tests need; OUT/00 holds those of all tests without a fault, OUT/followed those that racecheck watches. `run` takes each
copy for `dsl_kernels`: where there is no fault every test must pass and none be skipped; with one, a test must fail.
Prints a line for each and returns 1 if one survived, or if something else than a fault kept the tests from passing.
Both take minutes, and are run by hand.

What a dropped barrier does depends on luck. Those whose harm is likely are left to the tests, on many rows, some of the
others to compute-sanitizer's racecheck. Where one of these is among the chosen, racecheck also goes through
OUT/followed, every group of cases in `RACECHECK`, in bf16 and without options, and must find nothing. A fault that
hangs its tests is seen too, and is said to hang.

Two things racecheck (2025.3) does not follow, so that it calls the kernel of wide rows wrong, or never ends. The copies
that it watches have them written in a way it follows (`FOLLOWED`). One lane says that its warp has read a place: the
compiler drops the warp's barrier before that, where the warp is together anyway, and racecheck misses it. And it lets
no block past the cluster's barrier before every thread that has not ended waits at it, the copying one too, which has
only to arrive.
"""

import argparse
import contextlib
import lzma
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
OBJECT = f"greyhound_{ARCH}.so"
HANGS_AFTER_S = 120
RACECHECK_S = 400
RACECHECK = ("wide", "streamed", "narrow", "held", "sums", "chosen")
"""Groups of `bench.sanitize_target` that racecheck goes through on bf16 rows."""
FOUND = "Race reported"
"""What racecheck prints where it finds a hazard."""

RAW, CASES = "tests/greyhound/kernels/test_cross_entropy.py::test_", "tests/test_cases.py::test_"
OPTIONS, SCALING = "tests/greyhound/nn/test_options.py::test_", "tests/greyhound/ops/test_cross_entropy.py::test_"

WIDE = "ce_fused_bfloat16_grad_t128"
WIDE_FP32 = "ce_fused_float32_grad_t128"
NARROW = "ce_fused_bfloat16_grad_narrow_t64"
NARROW_SHORT, NARROW_SHORT_LOSS = "ce_fused_bfloat16_grad_narrow_t128", "ce_fused_bfloat16_loss_narrow_t128"
NARROW_FP32 = "ce_fused_float32_grad_narrow_t128"
HELD = "ce_fused_bfloat16_grad_held4x16_t128"
HELD_TINY = "ce_fused_bfloat16_grad_held2x16_t128"
HELD_WARP = "ce_fused_bfloat16_grad_held4x32_t256"
HELD_WARP_LOSS = "ce_fused_bfloat16_loss_held4x32_t256"
HELD_FP32 = "ce_fused_float32_grad_held3x32_t256"
SCALE, SCALE_FP32 = "ce_scale_bfloat16_t256", "ce_scale_float32_t256"
ROWS_LOSS, ROWS = "ce_fused_float32_loss_narrow_with_rows_t128", "ce_fused_float32_grad_narrow_with_rows_t128"
SMOOTHING = "ce_fused_float32_grad_narrow_with_smoothing_t128"
ENTROPY = (
    "ce_fused_float32_loss_narrow_with_entropy_t128",
    "ce_fused_float32_grad_narrow_with_entropy_backward_t128",
)
COMBINE = "ce_combine_float32_t128"
_BY_KIND = {
    "narrow": [f"{kind}_narrow_t{threads}" for kind in ("grad", "loss") for threads in (64, 128)],
    "held": [
        f"{kind}_held{held}"
        for kind in ("grad", "loss")
        for held in ("2x16_t128", "4x16_t128", "3x32_t256", "4x32_t256")
    ],
    "wide": ["grad_t128", "loss_t128"],
    "streamed": ["grad_streamed_t128"],
}
OF_GROUP = {
    group: (*(f"ce_fused_bfloat16_{name}" for name in names), SCALE)
    for group, names in {
        **_BY_KIND,
        "sums": _BY_KIND["wide"],
        "chosen": [*_BY_KIND["narrow"], *_BY_KIND["held"], "grad_t128"],
    }.items()
}
"""The kernels that each group in `RACECHECK` needs."""
SHARDS_SPECS = (
    "ce_fused_bfloat16_loss_narrow_with_rows_t128",
    "ce_fused_bfloat16_grad_narrow_with_rows_t128",
    COMBINE,
)
SMOOTHED_SPECS = (
    "ce_fused_bfloat16_loss_narrow_with_smoothing_t128",
    "ce_fused_bfloat16_grad_narrow_with_smoothing_t128",
    COMBINE,
)

ALIGNED = RAW + "every_alignment_of_base_and_rows_is_right_and_writes_only_the_rows[cuda:0-{}-torch.{}]"
IGNORED = RAW + "an_ignored_row_gets_zeros_and_its_neighbours_keep_theirs_at_every_alignment[cuda:0-{}-torch.bfloat16]"
IN_SHARDS = "tests/greyhound/kernels/test_shards.py::test_"
TOGETHER = IN_SHARDS + "shards_together_are_the_whole[cuda:0-torch.bfloat16-{}-(0, 100, 301)]"
SHARDS = (TOGETHER.format("{}"),)
SMOOTHED_SHARDS = (TOGETHER.format("{'label_smoothing': 0.1}"),)
WIDE_ROWS = (ALIGNED.format(33001, "bfloat16"),)
NARROW_ROWS = (ALIGNED.format(4097, "bfloat16"),)
UNDER_LOAD = ("tests/test_order.py::test_500_repeats_give_the_same_bits_while_another_stream_copies[narrow]",)
HELD_ROWS = (ALIGNED.format(257, "bfloat16"),)
SEVERAL_ROWS = (RAW + "common_shapes_are_right[cuda:0-32000-289-torch.bfloat16]",)
MANY_ROWS = (*SEVERAL_ROWS, RAW + "large_shapes_are_right[4096-50257-torch.bfloat16]")
TURNS = (RAW + "rows_that_are_taken_in_turn_get_the_bits_they_get_alone[33001-torch.bfloat16]",)
MEAN = (RAW + "the_mean_of_a_launch_is_applied_before_the_only_rounding[cuda:0]",)
ENTROPIES = (OPTIONS + "entropy_is_that_of_the_softmax[cuda:0-torch.float32]",)
OUT_OF_RANGE = RAW + "a_label_out_of_range_makes_its_row_nan_and_touches_no_other_on_the_gpu[torch.bfloat16-{}]"


def batch(B: int) -> tuple[str, ...]:
    """Return the test of so many tiny rows."""
    return (RAW + f"any_batch_is_right[cuda:0-{B}]",)


class Edit(NamedTuple):
    """A piece of source that is changed."""

    path: str
    """In `dsl_kernels`."""
    right: str
    """Stands there once."""
    wrong: str


class Fault(NamedTuple):
    """A piece of source that is changed, and who should see it."""

    what: str
    path: str
    right: str
    wrong: str
    """Like the two before, as in `Edit`."""
    specs: tuple[str, ...]
    """The kernels that `tests`, or the group of `racecheck`, need."""
    tests: tuple[str, ...]
    racecheck: str = ""
    """The group of `bench.sanitize_target`, on bf16 rows, that is to be seen by racecheck instead of by tests."""


FOLLOWED = (
    Edit(
        "cross_entropy/wide.py",
        "cute.arch.mbarrier_init(released + chunk, self.warps)",
        "cute.arch.mbarrier_init(released + chunk, self.threads)",
    ),
    Edit("cross_entropy/wide.py", "    if lane == 0:\n        # Not `", "    if lane >= 0:\n        # Not `"),
    Edit(
        "cross_entropy/wide.py",
        "                first = Int32(0)\n",
        "                first = Int32(0)\n"
        "                if const_expr(_read == 0):\n"
        "                    if turn == 0:\n"
        '                        cute.arch.inline_ptx("barrier.cluster.wait;")\n',
    ),
)
"""What racecheck follows, in place of what it does not."""

FAULTS = (
    Fault(
        "a row's last vector is taken for its own where the next row shares it",
        "cross_entropy/geometry.py",
        "has_tail = minimum((lead + V % vector_elements) % vector_elements, 1) * is_last",
        "has_tail = 0 * is_last",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "a row's last element is left out",
        "cross_entropy/geometry.py",
        "tail_elements = (lead + V % vector_elements) % vector_elements",
        "tail_elements = (lead + V % vector_elements) % vector_elements - 1",
        (NARROW,),
        NARROW_ROWS,
    ),
    Fault(
        "a slice's chunks overlap",
        "layouts.py",
        "steps * step_elements)",
        "step_elements)",
        (WIDE,),
        SEVERAL_ROWS,
    ),
    Fault(
        "a chunk is read before it has landed",
        "cross_entropy/wide.py",
        "# lay there before.\n                cute.arch.mbarrier_wait(landed + place, lap & 1)\n",
        "# lay there before.\n",
        (WIDE,),
        MANY_ROWS,
    ),
    Fault(
        "a place is filled again before it has been read",
        "cross_entropy/wide.py",
        "if lap > 0:",
        "if lap > 1:",
        (WIDE,),
        TURNS,
    ),
    Fault(
        "zeros instead of -inf stand for a wide row's missing vectors",
        "cross_entropy/wide.py",
        'rX[None, step].fill(-float("inf"))',
        "rX[None, step].fill(0.0)",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "a thread of another warp writes the target's gradient",
        "cross_entropy/wide.py",
        "(target_is_whole and (target_vector % T) == tid)",
        "(target_is_whole and ((target_vector + 64) % T) == tid)",
        (WIDE,),
        MANY_ROWS,
    ),
    Fault(
        "the target's logit is read again after it has been overwritten in place",
        "cross_entropy/wide.py",
        "self.loss.target_gradient(target_logit, numbers, inputs, column)",
        "self.loss.target_gradient(Float32(gX[target]), numbers, inputs, column)",
        (WIDE_FP32,),  # in bf16 the target's gradient is -1 whatever its logit
        (ALIGNED.format(33001, "float32"),),
    ),
    Fault(
        "a cluster's second row takes the label of its first",
        "cross_entropy/wide.py",
        "next_row = cutlass.min(row, B - 1 - work.stride) + work.stride",
        "next_row = row + 0 * work.stride",
        (WIDE,),
        TURNS,
    ),
    Fault(
        "the wait for the cluster's totals takes the other buffer's phase",
        "cross_entropy/wide.py",
        "(turn >> 1) & 1,",
        "turn & 1,",
        (WIDE,),
        TURNS,
    ),
    Fault(
        "the clusters that come last start with a row of those before",
        "cross_entropy/wide.py",
        "cluster_id + (long_turns - 1) * long_clusters,",
        "cluster_id + 0 * (long_turns - 1) * long_clusters,",
        (WIDE,),
        TURNS,
    ),
    Fault(
        "an ignored wide row's gradient is not zeroed",
        "cross_entropy/wide.py",
        "wanted = numbers.wanted",
        "wanted = column == column",
        (WIDE,),
        (IGNORED.format(33001),),
    ),
    Fault(
        "a vector behind a narrow row's last is taken for the row's",
        "cross_entropy/narrow.py",
        "exists = step * LANES + lane < rest",
        "exists = step * LANES + lane <= rest",
        ("ce_fused_float32_grad_narrow_t64",),
        (ALIGNED.format(3000, "float32"),),
    ),
    Fault(
        "a narrow row takes the label of the next",
        "cross_entropy/narrow.py",
        "next_label = labels[cutlass.min(first_row, B - 1)]",
        "next_label = labels[cutlass.min(first_row + 1, B - 1)]",
        (NARROW,),
        NARROW_ROWS,
    ),
    Fault(
        "a narrow row is read before it has landed",
        "cross_entropy/narrow.py",
        "        cute.arch.mbarrier_wait(cute.make_ptr(Int64, barrier, cute.AddressSpace.smem), phase)\n",
        "",
        (NARROW_SHORT, NARROW_SHORT_LOSS, SCALE),
        UNDER_LOAD,
    ),
    Fault(
        "an ignored narrow row's gradient is not zeroed",
        "cross_entropy/narrow.py",
        "wanted = numbers.wanted",
        "wanted = column == column",
        (NARROW,),
        (IGNORED.format(4097),),
    ),
    Fault(
        "a held row's target is looked for from the row's line, not from the row",
        "cross_entropy/held.py",
        "target_logit = Float32(gX[target])",
        "target_logit = Float32(gX[column])",
        (HELD_FP32,),
        (ALIGNED.format(257, "float32"),),
    ),
    Fault(
        "a row behind the last is added once more",
        "cross_entropy/held.py",
        "cutlass.min(row, B - 1), row < B,",
        "cutlass.min(row, B - 1), row <= B,",
        (HELD_TINY, SCALE),
        batch(8193),
    ),
    Fault(
        "an ignored held row's gradient is not zeroed",
        "cross_entropy/held.py",
        "if valid:\n                vector.round_to",
        "if in_range:\n                vector.round_to",
        (HELD_WARP,),
        (IGNORED.format(1000),),
    ),
    Fault(
        "the ragged ends of a held row are not in its sum",
        "cross_entropy/held.py",
        "vector.add(exps, (ragged_exp, Float32(0.0)), pairs=pairs)",
        "vector.add(exps, (Float32(0.0), Float32(0.0)), pairs=pairs)",
        (HELD,),
        HELD_ROWS,
    ),
    Fault(
        "two held rows of a warp share their sum",
        "cross_entropy/held.py",
        "cute.arch.warp_reduction(even + odd, lambda a, b: a + b, threads_in_group=L)",
        "cute.arch.warp_reduction(even + odd, lambda a, b: a + b)",
        (HELD,),
        HELD_ROWS,
    ),
    Fault(
        "a sum is not rescaled to the maximum of both",
        "reduce.py",
        "return m_new, d * exp_shifted(m, m_new) + d_other",
        "return m_new, d + d_other",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "the running sums are not rescaled to a new maximum",
        "cross_entropy/device.py",
        "sums = (even * rescale, odd * rescale)",
        "sums = (even, odd)",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "only the first block's totals are combined over the cluster",
        "reduce.py",
        "for read in cutlass.range(lane, warps * cluster, WARP):\n        every",
        "for read in cutlass.range(lane, warps, WARP):\n        every",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "a block of its own reads its warps' totals before they are there",
        "reduce.py",
        "        cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)\n",
        "",
        (WIDE_FP32,),
        (RAW + "large_shapes_are_right[8192-8192-torch.float32]",),
    ),
    Fault(
        "the first block reads the others' sums before they are there",
        "reduce.py",
        "cute.arch.mbarrier_wait(arrived, 0)",
        "pass",
        (HELD_TINY, SCALE),
        batch(70000),
    ),
    Fault(
        "the block's entry is made before its warps' sums are there",
        "cross_entropy/device.py",
        "    # Orders the warps' sums before they are read.\n    cute.arch.barrier()\n",
        "",
        OF_GROUP["narrow"],
        (),
        "narrow",
    ),
    # This one and "own warps' totals" below are the edits of faults above, which the tests see, for racecheck to see.
    Fault(
        "a chunk of a wide row is read before it has landed",
        "cross_entropy/wide.py",
        "# lay there before.\n                cute.arch.mbarrier_wait(landed + place, lap & 1)\n",
        "# lay there before.\n",
        OF_GROUP["wide"],
        (),
        "wide",
    ),
    Fault(
        "a chunk that is read again is taken before it has landed again",
        "cross_entropy/wide.py",
        "cute.arch.mbarrier_wait(landed + place, lap & 1)\n                        first_vector",
        "pass\n                        first_vector",
        OF_GROUP["streamed"],
        (),
        "streamed",
    ),
    Fault(
        "a block reads the cluster's totals before they have come",
        "reduce.py",
        "        cute.arch.mbarrier_wait(arrived, phase)\n",
        "",
        (WIDE,),
        MANY_ROWS,
    ),
    Fault(
        "a block reads its own warps' totals before they have come",
        "reduce.py",
        "        cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)\n",
        "",
        OF_GROUP["wide"],
        (),
        "wide",
    ),
    Fault(
        "a number is scaled before it is shifted",
        "vector.py",
        "scaled += _multiply(_subtract(values[i : i + 2], shift, pairs), Float32(LOG2E), pairs)",
        "scaled += _subtract(_multiply(values[i : i + 2], Float32(LOG2E), pairs), shift * Float32(LOG2E), pairs)",
        (NARROW_FP32, SCALE_FP32),
        (CASES + "a_common_offset_that_is_exact_changes_no_bit[cuda:0-1000-1000000.0]",),
    ),
    Fault(
        "every second bf16 number keeps its neighbour's bits behind its own",
        "vector.py",
        "(words[i] & Uint32(0xFFFF0000)).bitcast(Float32)",
        "words[i].bitcast(Float32)",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "a row's offset is a 32-bit number",
        "cross_entropy/device.py",
        "Int64(row) * Int64(matrix.stride[0])",
        "Int64(row * Int32(matrix.stride[0]))",
        (WIDE,),
        (CASES + "more_than_2_31_elements_are_right",),
    ),
    Fault(
        "a label is compared with ignore_index after it is narrowed",
        "cross_entropy/device.py",
        "if label == ignore_index:",
        "if Int32(label) == Int32(ignore_index):",
        (HELD_WARP,),
        (RAW + f"ignore_index_drops_rows_and_no_class_wherever_it_lies[cuda:0-{2**32 + 5}-torch.bfloat16]",),
    ),
    Fault(
        "a label is compared with V after it is narrowed",
        "cross_entropy/device.py",
        "if label >= 0 and label < Int64(V):",
        "if Int32(label) >= 0 and Int32(label) < V:",
        (HELD_TINY,),
        (OUT_OF_RANGE.format(2**32 + 1),),
    ),
    Fault(
        "a label out of range leaves its row's gradient as if it had none",
        "cross_entropy/device.py",
        "    if column == OUT_OF_RANGE:\n        factor = Float32(NAN)\n",
        "",
        (HELD_TINY,),
        (OUT_OF_RANGE.format(11),),
    ),
    Fault(
        "the z-loss is not in the gradient",
        "cross_entropy/device.py",
        "factor = (Float32(1.0) + z_factor) * scale / row_sum",
        "factor = scale / row_sum",
        (WIDE,),
        WIDE_ROWS,
    ),
    Fault(
        "the z-loss is not in the target's gradient",
        "cross_entropy/device.py",
        "((p - Float32(1.0)) + z_factor * p) * scale",
        "(p - Float32(1.0)) * scale",
        (HELD_FP32,),
        (ALIGNED.format(257, "float32"),),
    ),
    Fault(
        "the target's gradient is not scaled",
        "cross_entropy/device.py",
        "((p - Float32(1.0)) + z_factor * p) * scale",
        "(p - Float32(1.0)) + z_factor * p",
        (WIDE,),
        (RAW + "the_incoming_gradient_and_the_mean_are_applied_before_the_only_rounding[cuda:0-257-20000]",),
    ),
    Fault(
        "the gradient is divided by a count that is not there yet",
        "cross_entropy/device.py",
        "# Orders the count of the labels, which may still run, before its result is read.\n"
        "            cute.arch.griddepcontrol_wait()\n",
        "",
        (HELD_WARP, HELD_WARP_LOSS, HELD_TINY, SCALE),
        (*MEAN, *batch(70000)),
    ),
    Fault(
        "ignored rows are counted",
        "cross_entropy/device.py",
        "if loaded[step] != ignore_index:",
        "if loaded[step] == loaded[step]:",
        (HELD_WARP, HELD_WARP_LOSS),
        MEAN,
    ),
    Fault(
        "where labels are few each lane divides by those that it has counted",
        "cross_entropy/device.py",
        "n_valid = reduce.warp_add(valid_labels(labels",
        "n_valid = (valid_labels(labels",
        (HELD_WARP, HELD_WARP_LOSS),
        MEAN,
    ),
    Fault(
        "the last entry is not added",
        "cross_entropy/kernel.py",
        "device.load_entries(sums, entry, stride, count)",
        "device.load_entries(sums, entry, stride, count - 1)",
        (HELD_TINY, SCALE),
        batch(8191),
    ),
    Fault(
        "the mean is divided by the number of entries",
        "cross_entropy/kernel.py",
        "total = total / cute.arch.fmax(n_valid, Float32(1.0))",
        "total = total / Float32(count)",
        (HELD_WARP, HELD_WARP_LOSS),
        MEAN,
    ),
    Fault(
        "the z-loss is not in the loss",
        "cross_entropy/kernel.py",
        "total = total + z_loss_multiplier * z_sum",
        "total = total + Float32(0.0)",
        (HELD_TINY, SCALE),
        batch(8191),
    ),
    Fault(
        "entries are added while rows are still worked on",
        "cross_entropy/kernel.py",
        "# start while rows are still being worked on, and would add what is not there yet.\n"
        "        cute.arch.griddepcontrol_wait()\n",
        "# start.\n",
        (WIDE,),
        MANY_ROWS,
    ),
    Fault(
        "the last element of a gradient is not multiplied by what comes in",
        "cross_entropy/kernel.py",
        "if Int64(first_tail) < tail:",
        "if Int64(first_tail) < tail - 1:",
        (SCALE,),
        (SCALING + "scaling_in_place_equals_scaling_into_a_new_buffer[cuda:0-3-7-3.0-torch.bfloat16]",),
    ),
    Fault(
        "the smoothing is not in the softmax's part of the gradient",
        "cross_entropy/losses.py",
        "factor = factor + smoothing * weights.classes",
        "factor = factor + smoothing",
        (SMOOTHING, SCALE_FP32),
        (OPTIONS + "weights_smoothing_and_reductions_are_pytorchs[cuda:0-mean-options2]",),
    ),
    Fault(
        "the target's class weight is that of the column before",
        "cross_entropy/losses.py",
        "target = number(options.class_weight, Int64(column))",
        "target = number(options.class_weight, Int64(cutlass.max(column - 1, 0)))",
        (ROWS, SCALE_FP32),
        (OPTIONS + "weights_smoothing_and_reductions_are_pytorchs[cuda:0-mean-options1]",),
    ),
    Fault(
        "the row's weight is not in its loss",
        "cross_entropy/losses.py",
        "ce, z = ce * weights.row, numbers.lse",
        "ce, z = ce, numbers.lse",
        (ROWS_LOSS,),
        (OPTIONS + "row_weights_do_not_count_in_the_mean[cuda:0]",),
    ),
    Fault(
        "the softcap's derivative is not in the gradient",
        "cross_entropy/losses.py",
        "g = [a * (1.0 - b * b) for a, b in zip(g, y, strict=True)]",
        "g = list(g)",
        (
            *(f"ce_fused_float32_{each}_narrow_with_softcap_t128" for each in ("grad", "loss")),
            "ce_fused_float32_loss_narrow_with_entropy_t128",
        ),
        (CASES + "no_column_beyond_the_last_counts_with_any_feature[cuda:0-1000-softcap]",),
    ),
    Fault(
        "of equal largest logits the last of a vector is predicted",
        "cross_entropy/losses.py",
        "column = cutlass.min(column, places.first_column + element + e)",
        "column = places.first_column + element + e",
        tuple(
            f"ce_fused_bfloat16_loss_narrow_with_{kind}_t128" for kind in ("rows", "entropy", "softcap", "smoothing")
        ),
        (OPTIONS + "of_equal_largest_logits_the_first_is_predicted[cuda:0-1000-torch.bfloat16]",),
    ),
    Fault(
        "the entropy takes its second term with the wrong sign",
        "cross_entropy/losses.py",
        "entropy = log_d + LN2 * totals[2] / d",
        "entropy = log_d - LN2 * totals[2] / d",
        ENTROPY,
        ENTROPIES,
    ),
    Fault(
        "the entropy's gradient takes the entropy for what it has beside the log of the sum",
        "cross_entropy/losses.py",
        "factor = factor - grad_entropy * (entropy - log_d)",
        "factor = factor - grad_entropy * entropy",
        ENTROPY,
        ENTROPIES,
    ),
    Fault(
        "a mean weighted by class is divided by the rows",
        "cross_entropy/options.py",
        "weight_sum + numbers[3, step]",
        "weight_sum + numbers[2, step]",
        (ROWS_LOSS,),
        (OPTIONS + "a_mean_weighted_by_class_divides_the_z_loss_by_the_rows[cuda:0]",),
    ),
    Fault(
        "a shard's sum is not rescaled to the maximum of all",
        "cross_entropy/shards.py",
        "d = d + told[1] * reduce.exp2((told[0] - m) * exponent_unit)",
        "d = d + told[1]",
        SHARDS_SPECS,
        SHARDS,
    ),
    Fault(
        "the target's logit is taken from its shard's maximum for that of all",
        "cross_entropy/shards.py",
        "target = unit * (told[0] - m) + told[2]",
        "target = told[2]",
        SHARDS_SPECS,
        SHARDS,
    ),
    Fault(
        "a shard's smoothing is told from its own maximum",
        "cross_entropy/shards.py",
        "fall = fall + (Float32(columns_here) * (unit * (m - told[0])) + told[3])",
        "fall = fall + told[3]",
        SMOOTHED_SPECS,
        SMOOTHED_SHARDS,
    ),
    Fault(
        "a shard's mark is not compared",
        "cross_entropy/shards.py",
        "cutlass.range_constexpr(SHARD_SUMS)",
        "cutlass.range_constexpr(SHARD_SUMS - 1)",
        SHARDS_SPECS,
        (IN_SHARDS + "a_head_that_is_not_the_expected_one_makes_every_row_nan[cuda:0-3]",),
    ),
    Fault(
        "a target in another shard is out of range",
        "cross_entropy/device.py",
        "column = Int32(ELSEWHERE)",
        "column = Int32(OUT_OF_RANGE)",
        SHARDS_SPECS,
        SHARDS,
    ),
    Fault(
        "labels count from the shard's first column",
        "cross_entropy/device.py",
        "target_column(label - vocab_start, ignore_index - vocab_start, V)",
        "target_column(label, ignore_index, V)",
        SHARDS_SPECS,
        SHARDS,
    ),
    Fault(
        "a shard's gradient takes its own sums",
        "cross_entropy/losses.py",
        "if options.row_sums != 0:",
        "if options.row_sums == 1:",
        SHARDS_SPECS,
        SHARDS,
    ),
    Fault(
        "the smoothing is spread over the shard's columns",
        "cross_entropy/losses.py",
        "    if options.vocab_size != 0:\n",
        "    if options.vocab_size == -1:\n",
        SMOOTHED_SPECS,
        SMOOTHED_SHARDS,
    ),
    Fault(
        "a shard of -inf alone tells no number for the smoothing",
        "cross_entropy/losses.py",
        "m, fall = Float32(-INFINITY), Float32(INFINITY)",
        "m = Float32(-INFINITY)",
        (*SHARDS_SPECS, *SMOOTHED_SPECS[:2]),
        (IN_SHARDS + "a_shard_without_a_finite_logit_adds_nothing_and_takes_what_is_infinite[cuda:0-0.1]",),
    ),
)


class Ended(NamedTuple):
    """How a program ended."""

    code: int | None
    """None: it was killed because it hung."""
    output: str


def chosen(only: Sequence[int] | None) -> list[int]:
    """Return the numbers of the faults to look at, from 1 on."""
    return sorted(set(only)) if only else list(range(1, len(FAULTS) + 1))


def copy_of(out: Path, number: int) -> Path:
    """Return the folder of a fault, or of none for 0."""
    return out / f"{number:02d}"


def followed_copy(out: Path) -> Path:
    """Return the folder without a fault that racecheck watches."""
    return out / "followed"


def make_copy(folder: Path, edits: Sequence[Edit]) -> None:
    """Copy `dsl_kernels` into a folder, and change it."""
    shutil.rmtree(folder, ignore_errors=True)
    kernels = folder / "dsl_kernels"
    shutil.copytree(ROOT / "dsl_kernels", kernels, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = kernels / edit.path
        source = path.read_text(encoding="utf-8")
        if source.count(edit.right) != 1:
            raise SystemExit(f"{edit.path}: expected {edit.right!r} once, found it {source.count(edit.right)} times")
        path.write_text(source.replace(edit.right, edit.wrong), encoding="utf-8")


def compile_copy(folder: Path, specs: Sequence[str], jobs: int) -> None:
    """Compile kernels of a copy into its `artifacts`, packed."""
    command = [sys.executable, "-P", "-m", "dsl_kernels.build", "--arch", ARCH, "--spec", *specs]
    done = subprocess.run(
        [*command, "--out", str(folder / "artifacts"), "-j", str(jobs)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{folder}: {done.stdout}{done.stderr}")
    path = folder / "artifacts" / OBJECT
    path.with_name(OBJECT + ".xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))


def code_of(folder: Path) -> set[bytes]:
    """Return the machine code of each function of a copy's kernels: the text sections of the cubins in it."""
    library = (folder / "artifacts" / OBJECT).read_bytes()
    found = set()
    for cubin in re.split(b"(?=\x7fELF\x02\x01)", library)[2:]:  # the first is the shared object itself
        (table,) = struct.unpack_from("<Q", cubin, 40)
        size, count, names = struct.unpack_from("<HHH", cubin, 58)
        sections = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
        for name, _, _, _, offset, length in sections:
            if cubin[sections[names][4] + name :].startswith(b".text."):
                found.add(cubin[offset : offset + length])
    return found


def build(out: Path, numbers: Sequence[int], jobs: int) -> int:
    """Make and compile the copies, those without a fault last: they have what all of them need."""
    for number in numbers:
        fault = FAULTS[number - 1]
        edit = Edit(*fault[1:4])
        make_copy(copy_of(out, number), (edit, *FOLLOWED) if fault.racecheck else (edit,))
        compile_copy(copy_of(out, number), fault.specs, jobs)
        print(f"{number:02d} built   {fault.what}", flush=True)
    make_copy(copy_of(out, 0), ())
    of_tests = {spec for fault in FAULTS if fault.tests for spec in fault.specs}
    compile_copy(copy_of(out, 0), sorted(of_tests), jobs)
    make_copy(followed_copy(out), FOLLOWED)
    compile_copy(followed_copy(out), sorted({spec for group in RACECHECK for spec in OF_GROUP[group]}), jobs)
    right, followed = code_of(copy_of(out, 0)), code_of(followed_copy(out))
    same = [
        number
        for number in numbers
        if code_of(copy_of(out, number)) <= (followed if FAULTS[number - 1].racecheck else right)
    ]
    for number in same:
        print(f"{number:02d} has the machine code of no fault: {FAULTS[number - 1].what}")
    for folder in (*(copy_of(out, number) for number in (0, *numbers)), followed_copy(out)):
        (folder / "artifacts" / OBJECT).unlink()
    return 1 if same else 0


def unpack(folder: Path) -> None:
    """Put the packed kernels of a copy where the loader looks."""
    path = folder / "artifacts" / OBJECT
    if not path.exists():
        path.write_bytes(lzma.decompress(path.with_name(OBJECT + ".xz").read_bytes()))


def ended(command: Sequence[str], folder: Path, seconds: int, until: str = "") -> Ended:
    """Run a program with a copy for `dsl_kernels`, and kill it and its children if it hangs.

    Where it prints a line with `until` nothing more is waited for: what racecheck finds once it finds again and again.
    """
    inherited = os.environ.get("PYTHONPATH")
    places = [str(folder), str(ROOT), *([inherited] if inherited else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(places),
        "GREYHOUND_ARTIFACTS": str(folder / "artifacts"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    hangs = threading.Event()
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def give_up() -> None:
            hangs.set()
            kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            for line in process.stdout or ():
                lines.append(line)
                if until and until in line:
                    kill()
                    break
            process.wait()
        except BaseException:
            kill()
            raise
        finally:
            timer.cancel()
    # One that has ended by itself has not hung, whatever the timer did since.
    is_killed = hangs.is_set() and process.returncode < 0
    return Ended(None if is_killed else process.returncode, "".join(lines))


def run_tests(folder: Path, tests: Sequence[str], seconds: int) -> Ended:
    """Run tests with a copy for `dsl_kernels` until one fails."""
    # The configured path puts the repository first.
    options = ["-o", f"pythonpath={folder} tests .", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
    return ended([sys.executable, "-P", "-m", "pytest", *options, *tests], folder, seconds)


def run_racecheck(folder: Path, group: str) -> Ended:
    """Run a group of cases under racecheck with a copy for `dsl_kernels`."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return Ended(127, "compute-sanitizer is not installed")
    tool = [found, "--tool", "racecheck", "--error-exitcode", "9"]
    # Of four rows a cluster takes three, and another the last. "1,1031" are held rows, and wide or narrow ones.
    target = ["-m", "bench.sanitize_target", "--groups", group, "--dtypes", "bf16", "--rows", "4", "--vocabs", "1,1031"]
    return ended([*tool, sys.executable, "-P", *target], folder, RACECHECK_S, FOUND)


def who_saw(fault: Fault, folder: Path) -> tuple[str, str]:
    """Return what became of a fault, "seen", "hangs", "SURVIVED" or "BROKEN", and who saw it or what is broken."""
    result = (
        run_racecheck(folder, fault.racecheck) if fault.racecheck else run_tests(folder, fault.tests, HANGS_AFTER_S)
    )
    tail = "\n".join(result.output.splitlines()[-25:])
    if "ArtifactError" in result.output:
        return "BROKEN", tail
    if FOUND in result.output:
        return "seen", f"racecheck, {fault.racecheck}"
    if result.code is None:
        # Racecheck may be slow, or not follow what it watches.
        return ("BROKEN", tail) if fault.racecheck else ("hangs", "one of its tests")
    if result.code == 0:
        return "SURVIVED", ""
    if fault.racecheck:
        is_wrong = re.search(r"^WRONG ", result.output, re.MULTILINE)
        return ("seen", f"the results of the group, {fault.racecheck}") if is_wrong else ("BROKEN", tail)
    failed = re.search(r"^FAILED \S+?::(.+?)(?: - |$)", result.output, re.MULTILINE)
    return ("seen", failed[1]) if result.code == 1 and failed else ("BROKEN", tail)


def run_right(out: Path, faults: Sequence[Fault], jobs: int) -> bool:
    """Return whether, without a fault, every test passes, none is skipped, and racecheck finds nothing."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    right = True
    if tests:
        folder = copy_of(out, 0)
        unpack(folder)
        result = run_tests(folder, tests, 4 * HANGS_AFTER_S)
        right = (
            result.code == 0
            and re.search(rf"^{len(tests)} passed(, \d+ warnings?)? in ", result.output, re.MULTILINE) is not None
        )
        print(f"00 {'passes' if right else 'FAILS'}  {len(tests)} tests, without a fault", flush=True)
        if not right:
            print("\n".join(result.output.splitlines()[-60:]))
    if not any(fault.racecheck for fault in faults):
        return right
    unpack(followed_copy(out))
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda group: run_racecheck(followed_copy(out), group), RACECHECK))
    for group, result in zip(RACECHECK, results, strict=True):
        ran = re.search(r"^[1-9]\d* calls .* 0 wrong results", result.output, re.MULTILINE)
        passed = result.code == 0 and ran is not None and "RACECHECK SUMMARY: 0 hazards" in result.output
        print(f"00 {'passes' if passed else 'FAILS'}  racecheck of {group}, without a fault", flush=True)
        if not passed:
            print("\n".join(result.output.splitlines()[-30:]))
            right = False
    return right


def run(out: Path, numbers: Sequence[int], jobs: int) -> int:
    """Show the faults to those who should see them."""
    if not run_right(out, [FAULTS[number - 1] for number in numbers], jobs):
        return 1

    def judge(number: int) -> str:
        fault, folder = FAULTS[number - 1], copy_of(out, number)
        unpack(folder)
        outcome, by = who_saw(fault, folder)
        print(f"{number:02d} {outcome:8} {fault.what}: {by}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(judge, numbers))
    counts = {name: outcomes.count(name) for name in ("seen", "hangs", "SURVIVED", "BROKEN")}
    print(", ".join(f"{count} {name.lower()}" for name, count in counts.items()))
    return 1 if counts["SURVIVED"] or counts["BROKEN"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("stage", choices=("build", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=int, nargs="+", choices=range(1, len(FAULTS) + 1), metavar="NUMBER")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes, default: %(default)s")
    options = parser.parse_args(arguments)
    stage = build if options.stage == "build" else run
    return stage(options.out.resolve(), chosen(options.only), options.jobs)


if __name__ == "__main__":
    sys.exit(main())
