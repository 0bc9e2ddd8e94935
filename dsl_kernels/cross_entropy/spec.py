"""Which compiled kernels exist. Standard library only."""

from dataclasses import dataclass

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


CE_SUM, Z_SUM, N_VALID, LOSS = range(4)
"""Places of a call's totals in its sums."""

SUMS_HEAD = 4
"""Places of the totals; behind them the entries, one for a row or a block of narrow rows."""

ENTRY_ELEMENTS = 4
"""ce, z and n_valid, filled up to one 16-byte vector."""


def sums_elements(B: int) -> int:
    """Return the size of the `sums` of B rows: the totals, and no more entries than rows."""
    return SUMS_HEAD + ENTRY_ELEMENTS * B


@dataclass(frozen=True)
class Spec:
    """One compiled launcher: what it computes and how its blocks are shaped.

    Batch, vocabulary, strides, slice length, cluster size and every factor are run-time arguments, so no new shape
    compiles.
    """

    op: str
    """"fused" (loss and, if `grad`, dlogits) or "scale" (a gradient times a device scalar)."""
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
            )
        return "_".join([*parts, f"t{self.threads}"])

    @property
    def vector_elements(self) -> int:
        """Elements of one 16-byte vector."""
        return VECTOR_BYTES // ITEM_BYTES[self.dtype]
