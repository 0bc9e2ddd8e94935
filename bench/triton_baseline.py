"""The textbook baseline: cross entropy in two passes over the row, one Triton program a row.

Pass one keeps a running maximum m and the running sum of exp(x - m), block by block; pass two reads the row again, from
L2 at best, and writes `exp(x - m) / sum - [column = label]`. Everything in between is fp32. There is no tuning beyond
the two numbers below: what a kernel that keeps the row on chip gains is measured against this.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096
"""Columns of one step; a row that is narrower takes one step of the next power of two."""

WARPS = 8
SCALE_BLOCK = 8192


@triton.jit
def _row_kernel(
    logits,  # (B, V) bf16|fp16|fp32, column stride 1
    grad,  # (B, V) like the logits, which it may be
    labels,  # (B,) int64
    loss,  # (B,) fp32
    logits_stride,
    grad_stride,
    V,
    scale,  # of the gradient: 1 for the sum of the losses, 1 / B for their mean
    WRITES_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: the offset of a row may exceed 2^31 elements
    x = logits + row * logits_stride
    label = tl.load(labels + row)
    target_logit = tl.load(x + label).to(tl.float32)
    columns = tl.arange(0, BLOCK)

    row_max = float("-inf")
    row_sum = 0.0
    for begin in range(0, V, BLOCK):
        inside = begin + columns < V
        block = tl.load(x + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(block, axis=0))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(block - new_max), axis=0)
        row_max = new_max
    tl.store(loss + row, tl.log(row_sum) - (target_logit - row_max))

    if WRITES_GRAD:
        g = grad + row * grad_stride
        for begin in range(0, V, BLOCK):
            column = begin + columns
            block = tl.load(x + column, mask=column < V, other=float("-inf")).to(tl.float32)
            probability = tl.exp(block - row_max) / row_sum
            gradient = tl.where(column == label, probability - 1.0, probability) * scale
            tl.store(g + column, gradient.to(grad.dtype.element_ty), mask=column < V)


@triton.jit
def _scale_kernel(grad, factor, n_elements, BLOCK: tl.constexpr):
    value = tl.load(factor).to(tl.float32)
    if value != 1.0:  # `loss.backward()` brings 1: then no element is touched
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n_elements
        scaled = tl.load(grad + at, mask=inside).to(tl.float32) * value
        tl.store(grad + at, scaled.to(grad.dtype.element_ty), mask=inside)


def row_losses(
    logits: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return the loss of each row, and write the gradient if it is wanted.

    Args:
        logits: `(B, V)` bf16, fp16 or fp32, column stride 1.
        labels: `(B,)` int64, all in 0..V-1.
        grad: `(B, V)` like the logits, contiguous or the logits themselves; None for no gradient.
        scale: factor of the gradient.

    Returns:
        `(B,)` fp32.
    """
    rows, vocab = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    target = logits if grad is None else grad
    _row_kernel[(rows,)](
        logits,
        target,
        labels,
        loss,
        logits.stride(0),
        target.stride(0),
        vocab,
        scale,
        WRITES_GRAD=grad is not None,
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=WARPS,
    )
    return loss


class _MeanLoss(torch.autograd.Function):
    """The mean loss; its gradient is computed in the forward pass, into a buffer of its own."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        grad = torch.empty_like(logits) if logits.requires_grad else None
        loss = row_losses(logits, labels, grad, 1.0 / logits.shape[0]).mean()
        if grad is not None:
            ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *incoming: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        programs = triton.cdiv(grad.numel(), SCALE_BLOCK)
        _scale_kernel[(programs,)](grad, incoming[0], grad.numel(), BLOCK=SCALE_BLOCK, num_warps=WARPS)
        return grad, None


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the 0-d fp32 mean loss of `(B, V)` logits and `(B,)` labels, with autograd for the logits, once."""
    loss: torch.Tensor = _MeanLoss.apply(logits, labels)  # type: ignore[no-untyped-call]
    return loss
