"""Cross entropy of rows whose columns are in several shards: values only, no autograd, and no communication.

Each shard tells four numbers of a row; who has those of all shards knows the loss, and two numbers more than its own
columns are all that a shard's gradient takes. So the logits are read twice and their gradient written once, and 16
bytes of each row are exchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import N_VALID, SHARD_SUMS, sums_elements
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import options, portable

__all__ = ["HEAD_MARK", "HEAD_ROWS", "SHARD_SUMS", "combine", "shard_gradient", "shard_head", "shard_sums"]

HEAD_ROWS, HEAD_MARK = 2, 3
"""Where a head has the number of rows, and the mark."""

NOTHING = (-float("inf"), 0.0, float("inf"), 0.0)
"""What no columns tell of a row."""


def shard_head(rows: int, columns: int, start: int, mark: int) -> tuple[int, ...]:
    """Return what a shard tells of itself, `SHARD_SUMS` int32; the mark is of all else that must be alike."""
    return columns, start, rows, mark


def shard_sums(logits: torch.Tensor, labels: torch.Tensor, loss: options.Loss, head: torch.Tensor) -> torch.Tensor:
    """Return what a shard tells of each row, and of itself, `(B + 1, SHARD_SUMS)` fp32.

    Args:
        logits: `(B, columns of the shard)`, last stride 1; there may be no columns.
        labels: `(B,)` int64, counted from the first column of all shards.
        loss: with the shard.
        head: `(SHARD_SUMS,)` int32 on the same device: `shard_head`.
    """
    B, V = logits.shape
    told = torch.empty(B + 1, SHARD_SUMS, dtype=torch.float32, device=logits.device)
    told[B].view(torch.int32).copy_(head)
    if V == 0:
        for place, value in enumerate(NOTHING):
            told[:B, place] = value
        return told
    options.launch(logits, labels, None, loss, options.Results(shard_sums=told[:B]))
    return told


def combine(
    told: torch.Tensor, heads: torch.Tensor, labels: torch.Tensor, loss: options.Loss, results: options.Results
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill `results` and return `(row_sums, n_valid)`: what the shards' gradients take, `(B, 2)`, and `()`.

    A valid row whose target is in no shard, or in two, is NaN, and so are all where a shard's head is not the expected.

    Args:
        told: `(shards * (B + 1), SHARD_SUMS)` fp32 contiguous: shard after shard, in any order, the same everywhere.
        heads: `(shards, SHARD_SUMS)` int32 on the same device: the head that each must have.
        labels: as for `shard_sums`.
        loss: with a shard.
        results: `loss`, `row_loss`, `row_z_loss` and `lse` may be asked for.
    """
    B, device = len(labels), labels.device
    row_sums = torch.empty(B, 2, dtype=torch.float32, device=device)
    sums = torch.empty(sums_elements(B), dtype=torch.float32, device=device)
    n_valid = sums[N_VALID]
    if B == 0:
        n_valid.zero_()
        if results.loss is not None:
            results.loss.zero_()
        return row_sums, n_valid
    function = _compiled_combine(device)
    if function is None:
        portable.combine_shards(told, heads, labels, loss, results, row_sums, n_valid)
        return row_sums, n_valid
    nothing = options.Incoming(None, None, None)
    told_of = options.told_of(loss, nothing)
    plain.on_device(device, function, told, heads, labels, sums, row_sums, told_of, options.addresses(results))
    return row_sums, n_valid


def shard_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    out: torch.Tensor,
    loss: options.Loss,
    incoming: torch.Tensor,
    row_sums: torch.Tensor,
) -> None:
    """Write the gradient of a shard's logits.

    Args:
        logits: as for `shard_sums`.
        labels: as there.
        out: `(B, columns of the shard)`, last stride 1, dtype of `logits`; may be `logits`.
        loss: as there, with a normalizer where it is a mean.
        incoming: `()` or `(B,)` fp32: gradient of the loss.
        row_sums: what `combine` returned.
    """
    if logits.numel():
        options.launch(logits, labels, out, loss, options.Results(), options.Incoming(incoming, None, None), row_sums)


@functools.lru_cache(maxsize=64)
def _compiled_combine(device: torch.device) -> Callable[..., Any] | None:
    arch = plain.arch_or_warn(device)
    return None if arch is None else _artifacts.load(arch, plan.COMBINE)
