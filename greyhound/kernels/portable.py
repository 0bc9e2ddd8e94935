"""The cross entropy of the compiled kernel, written in PyTorch: CPU tensors and GPUs that have no compiled kernel.

Same formula and same answers as `dsl_kernels.cross_entropy.kernel`: fp32 arithmetic, the shift by the row maximum
before every exponential, the target's one subtracted before the only rounding. Rows are taken in blocks, so the extra
memory is bounded by `BLOCK_ELEMENTS` (or one row, where a row is longer) whatever the batch. Labels must have been
checked by the caller where an error is wanted: here a label outside 0..V-1 makes its row NaN, as on the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsl_kernels.cross_entropy.spec import LOSS, SHARD_SUMS

if TYPE_CHECKING:
    from greyhound.kernels.options import Incoming, Loss, Results

BLOCK_ELEMENTS = 1 << 22
"""Logits worked on at a time; a block's fp32 temporaries take about 4 x 4 bytes x this, 6 x 4 with options. Any value
>= 1 is correct."""


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
    sums[: LOSS + 1].copy_(torch.stack((ce_sum, z_sum, n_valid, total)))


def cross_entropy_options(
    logits: torch.Tensor,
    labels: torch.Tensor,
    grad_logits: torch.Tensor | None,
    loss: Loss,
    results: Results,
    incoming: Incoming | None,
    row_sums: torch.Tensor | None = None,
) -> None:
    """Fill `grad_logits` and `results`; the arguments are those of `greyhound.kernels.options.launch`."""
    B, V = logits.shape
    device = logits.device
    start, columns = loss.shard or (0, V)
    valid = labels != loss.ignore_index
    in_range = (labels >= 0) & (labels < columns)
    here = in_range & (labels >= start) & (labels < start + V)
    index = torch.where(here, labels - start, 0)
    n_valid = valid.sum().to(torch.float32)
    class_weight = torch.ones(B, dtype=torch.float32, device=device) if loss.weight is None else loss.weight[index]
    weight_sum = n_valid if loss.weight is None else torch.where(valid & in_range, class_weight, 0.0).sum()
    all_weights = float(columns) if loss.weight is None else loss.weight.sum()
    normalizer, z_normalizer = torch.ones_like(n_valid), torch.ones_like(n_valid)
    if loss.mean and loss.normalizer is not None:
        normalizer = z_normalizer = loss.normalizer
    elif loss.mean and loss.divisor:
        normalizer = z_normalizer = normalizer * loss.divisor
    elif loss.mean:
        normalizer, z_normalizer = torch.where(weight_sum == 0.0, 1.0, weight_sum), n_valid
    row_weight = torch.ones(B, dtype=torch.float32, device=device) if loss.row_weight is None else loss.row_weight
    zero = torch.zeros((), dtype=torch.float32, device=device)
    grad_loss, grad_lse, grad_entropy = (
        (zero + 1.0, zero, zero) if incoming is None else (zero if each is None else each for each in incoming)
    )
    grad_loss, grad_lse, grad_entropy = (each.expand(B) for each in (grad_loss, grad_lse, grad_entropy))
    row_ce, row_z, row_lse, row_entropy = torch.zeros(4, B, dtype=torch.float32, device=device)
    shard_sums = torch.zeros(B, SHARD_SUMS, dtype=torch.float32, device=device)
    predicted = torch.empty(B, dtype=torch.int64, device=device)
    smoothing = loss.label_smoothing
    step = max(1, BLOCK_ELEMENTS // V)
    for start in range(0, B, step):
        rows = slice(start, min(start + step, B))
        x = logits[rows].to(torch.float32)
        counts, column = valid[rows] & (row_weight[rows] != 0.0), index[rows].unsqueeze(1)
        wrong = valid[rows] & ~in_range[rows]
        unit = loss.logit_scale
        if loss.softcap:
            x, unit = torch.tanh(x * (loss.logit_scale / loss.softcap)), loss.softcap
        row_max = x.amax(dim=1, keepdim=True)
        if results.shard_sums is not None:
            shard_sums[rows] = _shard_sums(x, row_max, unit, here[rows], index[rows], smoothing != 0.0)
            continue
        if row_sums is not None:
            row_max = row_sums[rows, :1]
        shifted = (x - row_max) * unit
        exps = shifted.exp()
        row_sum = exps.sum(dim=1) if row_sums is None else row_sums[rows, 1]
        log_sum = row_sum.log()
        lse = torch.where(row_max.squeeze(1) == -torch.inf, -torch.inf, row_max.squeeze(1) * unit + log_sum)
        held = shifted.clamp(min=-1e30)  # 0 * -inf would be NaN
        entropy = log_sum - (exps * held).sum(dim=1) / row_sum
        ce = (1.0 - smoothing) * class_weight[rows] * (log_sum - shifted.gather(1, column).squeeze(1))
        if smoothing:
            weighted = shifted if loss.weight is None else shifted * loss.weight
            ce = ce + smoothing / columns * (all_weights * log_sum - weighted.sum(dim=1))
        row_ce[rows] = torch.where(counts, ce * row_weight[rows], 0.0).masked_fill_(wrong, torch.nan)
        row_z[rows] = torch.where(counts, lse * lse * row_weight[rows], 0.0)
        row_lse[rows], row_entropy[rows] = lse, entropy
        predicted[rows] = torch.where(log_sum.isnan() | log_sum.isinf(), -1, logits[rows].argmax(dim=1))
        if grad_logits is None:
            continue
        weight = row_weight[rows] * grad_loss[rows]
        counts = valid[rows] & (weight != 0.0)
        ce_weight = torch.where(counts, weight / normalizer, 0.0)
        target = (1.0 - smoothing) * class_weight[rows] * ce_weight
        spread = smoothing / columns * ce_weight
        factor = target + spread * all_weights + grad_lse[rows]
        if loss.z_loss_multiplier:
            z_factor = 2.0 * loss.z_loss_multiplier * lse * (weight / z_normalizer)
            factor = factor + torch.where(counts, z_factor, 0.0)
        if incoming is not None and incoming.entropy is not None:
            factor = factor - grad_entropy[rows] * (entropy - log_sum)
            gradient = exps * (factor.unsqueeze(1) - grad_entropy[rows].unsqueeze(1) * held)
        else:
            gradient = exps * factor.unsqueeze(1)
        gradient = gradient / row_sum.unsqueeze(1)
        gradient.scatter_add_(1, column, torch.where(here[rows] | wrong, -target, 0.0).unsqueeze(1))
        if smoothing:
            gradient -= spread.unsqueeze(1) if loss.weight is None else spread.unsqueeze(1) * loss.weight
        gradient *= loss.logit_scale
        if loss.softcap:
            gradient *= 1.0 - x * x
        wanted = counts | (grad_lse[rows] != 0.0) | (grad_entropy[rows] != 0.0)
        gradient.masked_fill_(~wanted.unsqueeze(1), 0.0)
        grad_logits[rows] = gradient.masked_fill_(wrong.unsqueeze(1), torch.nan)
    z_loss = row_z * loss.z_loss_multiplier if loss.z_loss_multiplier else torch.zeros_like(row_z)
    some = n_valid != 0.0
    mean_z_loss = z_loss.sum() / z_normalizer if loss.z_loss_multiplier else torch.zeros_like(n_valid)
    mean_z_loss = torch.where(some, mean_z_loss, 0.0)
    hits = ((predicted == labels) & valid & in_range).sum()
    for result, value in (
        (results.loss, torch.where(some, row_ce.sum() / normalizer, 0.0) + mean_z_loss),
        (results.z_loss, mean_z_loss),
        (results.token_accuracy, hits / n_valid.clamp(min=1.0)),
        (results.row_loss, row_ce + z_loss),
        (results.row_z_loss, z_loss),
        (results.lse, row_lse),
        (results.entropy, row_entropy),
        (results.predicted, predicted),
        (results.shard_sums, shard_sums),
    ):
        if result is not None:
            result.copy_(value)


def _shard_sums(
    x: torch.Tensor, row_max: torch.Tensor, unit: float, here: torch.Tensor, index: torch.Tensor, has_falls: bool
) -> torch.Tensor:
    """Return what the columns x, a shard, tell of each row."""
    m = row_max.squeeze(1)
    nothing = m == -torch.inf
    shifted = (x - row_max.masked_fill(nothing.unsqueeze(1), 0.0)) * unit
    gap = torch.where(here, shifted.gather(1, index.unsqueeze(1)).squeeze(1), torch.inf)
    falls = -shifted.sum(dim=1) if has_falls else torch.zeros_like(m)
    return torch.stack((m, shifted.exp().sum(dim=1), gap, falls), dim=1)


def combine_shards(
    told: torch.Tensor,
    heads: torch.Tensor,
    labels: torch.Tensor,
    loss: Loss,
    results: Results,
    row_sums: torch.Tensor,
    n_valid: torch.Tensor,
) -> None:
    """Fill `results`, `row_sums` and `n_valid`; the arguments are those of `greyhound.kernels.shards.combine`."""
    B, columns = len(labels), float(loss.shard.size if loss.shard else 0)
    unit, smoothing = loss.softcap or loss.logit_scale, loss.label_smoothing
    of_rank = told.reshape(len(heads), B + 1, SHARD_SUMS)
    fits = (of_rank[:, B].view(torch.int32) == heads).all()
    m_of, d_of, gap_of, fall_of = of_rank[:, :B].unbind(2)
    m = m_of.amax(dim=0)
    valid, owns = labels != loss.ignore_index, gap_of != torch.inf
    d, target, fall = torch.zeros(3, B, dtype=torch.float32, device=told.device)
    for shard in range(len(heads)):  # one after another: the same bits whatever adds them up
        d += d_of[shard] * ((m_of[shard] - m) * unit).exp()
        target = torch.where(owns[shard], unit * (m_of[shard] - m) + gap_of[shard], target)
        if smoothing:
            more = heads[shard, 0] * (unit * (m - m_of[shard])) + fall_of[shard]
            fall += torch.where(heads[shard, 0] == 0, 0.0, more)
    wrong = (valid & (owns.sum(dim=0) != 1)) | ~fits
    d.masked_fill_(wrong, torch.nan)
    log_d = d.log()
    lse = unit * m + log_d
    ce = (1.0 - smoothing) * (log_d - target)
    if smoothing:
        ce = ce + smoothing / columns * (columns * log_d + fall)
    weight = torch.ones_like(lse) if loss.row_weight is None else loss.row_weight
    counts = valid & (weight != 0.0)
    row_ce = torch.where(counts, ce * weight, 0.0).masked_fill_(wrong, torch.nan)
    row_z = torch.where(counts, lse * lse * weight, 0.0)
    z_loss = row_z * loss.z_loss_multiplier if loss.z_loss_multiplier else torch.zeros_like(row_z)
    n_valid.copy_((valid | wrong).sum())
    normalizer = torch.ones_like(n_valid)
    if loss.mean:
        normalizer = n_valid.clamp(min=1.0) * 1.0 if loss.normalizer is None else loss.normalizer
        normalizer = torch.full_like(n_valid, loss.divisor) if loss.divisor else normalizer
    mean_z_loss = z_loss.sum() / normalizer if loss.z_loss_multiplier else torch.zeros_like(n_valid)
    for result, value in (
        (results.loss, torch.where(n_valid != 0.0, row_ce.sum() / normalizer + mean_z_loss, 0.0)),
        (results.row_loss, row_ce + z_loss),
        (results.row_z_loss, z_loss),
        (results.lse, lse),
    ):
        if result is not None:
            result.copy_(value)
    row_sums.copy_(torch.stack((m, d), dim=1))


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
