"""The cross entropy of the compiled kernel, written in PyTorch: CPU tensors and GPUs that have no compiled kernel.

Same formula and same answers as `dsl_kernels.cross_entropy.kernel`: fp32 arithmetic, the shift by the row maximum
before every exponential, the target's one subtracted before the only rounding. Rows are taken in blocks, so the extra
memory is bounded by `BLOCK_ELEMENTS` (or one row, where a row is longer) whatever the batch. Labels must have been
checked by the caller where an error is wanted: here a label outside 0..V-1 makes its row NaN, as on the GPU.
"""

import torch

from dsl_kernels.cross_entropy.spec import SUMS_HEAD

BLOCK_ELEMENTS = 1 << 22
"""Logits worked on at a time; a block's fp32 temporaries take about 4 x 4 bytes x this. Any value >= 1 is correct."""


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    grad_logits: torch.Tensor | None,
    loss: torch.Tensor | None,
    sums: torch.Tensor,
    *,
    z_loss_multiplier: float,
    ignore_index: int,
    mean: bool,
    grad_by_mean: bool,
    incoming: torch.Tensor | None,
) -> None:
    """Fill `grad_logits`, `loss` and `sums`; the arguments are those of `greyhound.kernels.cross_entropy.launch`."""
    B, V = logits.shape
    valid = labels != ignore_index
    in_range = (labels >= 0) & (labels < V)
    n_valid = valid.sum().to(torch.float32)
    row_grad = torch.ones_like(n_valid) if incoming is None else incoming
    if grad_by_mean:
        row_grad = row_grad / n_valid.clamp(min=1.0)
    row_loss, row_z = torch.empty(2, B, dtype=torch.float32, device=logits.device)
    step = max(1, BLOCK_ELEMENTS // V)
    for start in range(0, B, step):
        rows = slice(start, min(start + step, B))
        x = logits[rows].to(torch.float32)
        index = torch.where(in_range[rows], labels[rows], 0).unsqueeze(1)
        row_max = x.amax(dim=1, keepdim=True)
        shifted = x - row_max
        target_shifted = shifted.gather(1, index).squeeze(1)
        exps = shifted.exp_()
        row_sum = exps.sum(dim=1)
        log_sum = row_sum.log()
        lse = row_max.squeeze(1) + log_sum
        wrong = valid[rows] & ~in_range[rows]
        row_loss[rows] = torch.where(valid[rows], log_sum - target_shifted, 0.0).masked_fill_(wrong, torch.nan)
        row_z[rows] = torch.where(valid[rows], lse * lse, 0.0)
        if grad_logits is not None:
            factor = (1.0 + 2.0 * z_loss_multiplier * lse) * row_grad / row_sum
            gradient = exps.mul_(factor.masked_fill_(wrong, torch.nan).unsqueeze(1))
            gradient.scatter_add_(1, index, -row_grad.expand(index.shape))
            gradient.masked_fill_(~valid[rows].unsqueeze(1), 0.0)
            grad_logits[rows] = gradient
    if loss is None:
        return
    ce_sum, z_sum = row_loss.sum(), row_z.sum()
    total = ce_sum + z_loss_multiplier * z_sum if z_loss_multiplier else ce_sum
    total = total / n_valid.clamp(min=1.0) if mean else total
    loss.copy_(total)  # before the sums, of which it may be a view
    sums[:SUMS_HEAD].copy_(torch.stack((ce_sum, z_sum, n_valid, total)))


def scale(source: torch.Tensor, out: torch.Tensor, factor: torch.Tensor) -> None:
    """`out = source * factor`: one product in fp32 and one rounding; `out` may be `source`.

    Args:
        source: `(B, V)` fp16, bf16 or fp32, contiguous.
        out: like `source`.
        factor: 0-d fp32.
    """
    B, V = source.shape
    step = max(1, BLOCK_ELEMENTS // V)
    for start in range(0, B, step):
        rows = slice(start, min(start + step, B))
        out[rows] = source[rows].to(torch.float32) * factor
