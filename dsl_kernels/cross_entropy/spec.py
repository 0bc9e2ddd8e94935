"""Which compiled kernels exist, and what their launchers are told. Standard library only."""

from dataclasses import dataclass
from typing import Any, NamedTuple

DTYPE_NAMES = ("float16", "bfloat16", "float32")
"""Logits dtypes, as PyTorch and the DSL's type table spell them."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
VECTOR_BYTES = 16
"""One access of one thread, and the granule of a bulk copy."""

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
MAX_COLUMNS = 2**31 - 1
MAX_ROWS = 2**31 - 2**17
"""Row indices are 32-bit numbers, and a loop over rows steps past the last one by less than 2^17."""

MAX_BLOCKS = 2**31 - 1
"""Blocks on a grid's x axis, where the rows go: y and z stop at 65,535."""


CE_SUM, Z_SUM, N_VALID, LOSS, WEIGHT_SUM = range(5)
"""Places of a call's totals in its sums; the last one is filled where options are."""

SUMS_HEAD = 8
"""Places of the totals, whole vectors; behind them the entries, one for a row or a block of narrow rows."""

ENTRY_ELEMENTS = 4
"""ce, z, n_valid and, where options are, the sum of the class weights: one 16-byte vector."""


SHARD_SUMS = 4
"""What a shard tells of a row, u = unit * y as in `losses`: `m`, the largest y (-inf where all are); `d`, the sum of
exp(u - unit * m); the target's u - unit * m, +inf where it is in another shard; with smoothing the sum of
unit * m - u."""


def sums_elements(B: int) -> int:
    """Return the size of the `sums` of B rows: the totals, and no more entries than rows."""
    return SUMS_HEAD + ENTRY_ELEMENTS * B


class Pieces(NamedTuple):
    """What a kernel with options does to each element besides a softmax."""

    softcap: bool
    """`softcap * tanh(x / softcap)` before the softmax."""
    smoothing: bool
    """The mean over the columns for label smoothing."""
    entropy: bool
    """The entropy of the softmax."""
    entropy_gradient: bool
    """What comes in for the entropy."""
    together: bool
    """Whether all of these are looked at while the kernel runs, each where it is asked for, class weights in the
    smoothing too."""


OPTIONS = {
    "": None,
    "rows": Pieces(False, False, False, False, False),
    "softcap": Pieces(True, False, False, False, False),
    "smoothing": Pieces(False, True, False, False, False),
    "entropy": Pieces(False, False, True, False, False),
    "entropy_backward": Pieces(False, False, True, True, False),
    "any": Pieces(True, True, True, True, True),
}
"""Kinds of kernels by the options they know. All but "" know those that are a number for each row: `logit_scale`, the
normalizer, row and class weights, gradients and losses of single rows, the log-sum-exp and the predicted token. Each
piece that costs something at each element has a kernel of its own, and "any" serves several at once, and streamed rows
with any option."""


def options_kind(softcap: bool, smoothing: bool, class_weight: bool, entropy: bool, entropy_gradient: bool) -> str:
    """Return the cheapest kind of kernel that knows what is asked for."""
    entropy_kind = "entropy_backward" if entropy_gradient else "entropy"
    asked = {"softcap": softcap, "smoothing": smoothing, entropy_kind: entropy or entropy_gradient}
    wanted = [kind for kind, is_asked in asked.items() if is_asked]
    if len(wanted) > 1 or (smoothing and class_weight):
        return "any"
    return wanted[0] if wanted else "rows"


class Options(NamedTuple):
    """What a launcher with options is told of the loss. Tensors are addresses, 0 where there is none, with the stride
    between rows in elements where they have one; all but labels are fp32.
    """

    ignore_index: Any
    z_loss_multiplier: Any
    label_smoothing: Any
    logit_scale: Any
    softcap: Any
    """0: none."""
    mean: Any
    """1: the loss, and the gradient, are divided by the normalizer."""
    divisor: Any
    """The normalizer where the host knows it, else 0."""
    normalizer: Any
    """() where the device knows it. With neither, the valid rows' class weights, for the z-loss the rows, are added."""
    class_weight: Any
    """(V,)."""
    class_weight_sum: Any
    """(), where class weights meet label smoothing."""
    row_weight: Any
    row_weight_stride: Any
    grad_loss: Any
    """(B,), or () with stride 0. Where it or one of the next two is there the gradient is the only result."""
    grad_loss_stride: Any
    grad_lse: Any
    grad_lse_stride: Any
    grad_entropy: Any
    grad_entropy_stride: Any
    vocab_start: Any
    """Column of the whole row that the first one here is."""
    vocab_size: Any
    """Columns of the whole row, where those here are a part of it, else 0. Then labels count from its first."""
    row_sums: Any
    """(B, 2) contiguous: `m` and `d` of the whole rows, where the gradient is to take these."""


class Outputs(NamedTuple):
    """Addresses of what a launcher with options writes, 0 for what is not wanted; fp32 but for `predicted`."""

    loss: Any
    """()."""
    z_loss: Any
    """(), part of the loss."""
    token_accuracy: Any
    """(): the share of the valid rows whose target is the predicted token."""
    row_loss: Any
    """(B,)."""
    row_z_loss: Any
    lse: Any
    entropy: Any
    predicted: Any
    """(B,) int64, 0 before; the smallest column of the largest logit, -1 where the row's loss can only be NaN."""
    shard_sums: Any
    """(B, SHARD_SUMS): of the columns here, for a `combine` with those of other shards."""


@dataclass(frozen=True)
class Spec:
    """One compiled launcher: what it computes and how its blocks are shaped.

    Batch, vocabulary, strides, slice length, cluster size and every factor are run-time arguments, so no new shape
    compiles.
    """

    op: str
    """"fused" (loss and, if `grad`, dlogits), "scale" (a gradient times a device scalar) or "combine" (the losses of
    rows whose columns are in several shards, from what each tells)."""
    dtype: str
    """One of `DTYPE_NAMES`."""
    threads: int
    """Threads of a block, a multiple of 32."""
    grad: bool = True
    """Whether "fused" writes dlogits."""
    narrow: bool = False
    """Whether "fused" gives a row to a warp instead of to one or more blocks."""
    held: int = 0
    """Vectors of a row that a lane holds in registers; 0 where rows go through shared memory."""
    lanes: int = 32
    """Lanes that share a row, where they hold it: 16 or 32."""
    streamed: bool = False
    """Whether "fused" with `grad` reads the row twice from device memory instead of keeping it in shared memory."""
    options: str = ""
    """Which of `OPTIONS` "fused" knows."""

    @property
    def name(self) -> str:
        """Symbol of the launcher in its shared object, e.g. `ce_fused_bfloat16_grad_t128`."""
        parts = ["ce", self.op, self.dtype]
        if self.op == "fused":
            parts += (
                ["grad" if self.grad else "loss"]
                + ["narrow"] * self.narrow
                + [f"held{self.held}x{self.lanes}"] * (self.held > 0)
                + ["streamed"] * self.streamed
                + [f"with_{self.options}"] * (self.options != "")
            )
        return "_".join([*parts, f"t{self.threads}"])

    @property
    def pieces(self) -> Pieces | None:
        """What it does to each element besides a softmax; None where it knows no options."""
        return OPTIONS[self.options]

    @property
    def vector_elements(self) -> int:
        """Elements of one 16-byte vector."""
        return VECTOR_BYTES // ITEM_BYTES[self.dtype]
