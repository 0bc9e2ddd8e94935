"""Loss functions with autograd."""

import torch

from greyhound.kernels.cross_entropy import check_arguments
from greyhound.ops import cross_entropy as ops

REDUCTIONS = ("mean", "sum")


def check_reduction(reduction: object) -> None:
    """Raise `ValueError` for what is not one of `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
) -> torch.Tensor:
    """Cross entropy between rows of logits and class indices, with an optional z-loss.

    `sum` is `ce_sum + z_loss_multiplier * z_sum` over the rows whose target is not `ignore_index`, with
    `ce_i = logsumexp(x_i) - x_i[target_i]` and `z_i = logsumexp(x_i) ** 2`; `mean` divides it by the number of those
    rows. Everything is computed in fp32. When a gradient will be wanted it is computed in the same pass over the
    logits and rounded once to their dtype; an incoming gradient other than 1 is applied in backward, on the device, and
    rounds again. For fp16, where the mean's gradient would underflow before a loss scale reaches it, the logits are
    kept instead, and backward computes the gradient from them and rounds it once, the incoming one applied.
    The logits are never changed. No host synchronisation.

    Where no row is valid, `mean` gives 0 (`torch.nn.functional.cross_entropy` gives NaN). The gradient is a constant to
    autograd: to differentiate it again raises, or finds it unused where that is allowed.

    Args:
        logits: `(B, V)` fp16, bf16 or fp32, CUDA or CPU; any row stride, element-aligned. A last stride other than 1
            costs one copy.
        target: `(B,)` int64, 0 to V - 1 or `ignore_index`, on the device of `logits`.
        ignore_index: target of the rows to leave out. It drops rows, not a class: the other rows keep that column.
        reduction: "mean" or "sum".
        z_loss_multiplier: factor of the squared log-sum-exp; not divided by anything but the mean's count.

    Returns:
        The loss, 0-d fp32.

    Raises:
        TypeError: a dtype or an argument type is not one of those above; a DTensor.
        ValueError: rank, shape, device or `reduction` is not one of those above.
        NotImplementedError: forward-mode AD or a `torch.func` transform.
        IndexError: on the CPU (on a GPU only under `greyhound.kernels.cross_entropy.check_gpu_labels`): a target
            outside 0..V-1 that is not `ignore_index`. On a GPU such a row makes the loss, and the row's gradient, NaN
            otherwise.

    Source: z-loss as in ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
    """
    check_arguments(logits, target, z_loss_multiplier, ignore_index, labels_name="target")
    check_reduction(reduction)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return ops.cross_entropy(logits, target, ignore_index, reduction == "mean", z_loss_multiplier)
