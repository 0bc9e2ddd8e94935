"""The one float64 reference for cross entropy, and how far from it an implementation may be.

Everything is computed in float64 from the inputs as they are, already rounded to their dtype, on the device where they
lie, and in tiles of at most `TILE_ELEMENTS`, so that a reference for 8192 x 128256 needs no second matrix.

Errors are judged element by element, in units of the roundings that the contract allows:

    |gradient - reference|  <=  half an ulp of the buffer's dtype at the reference (one rounding)  +  fp32 arithmetic

where the arithmetic is a bound derived term by term (`arithmetic_ulps`), a few 1e-6 of the element for ordinary rows. A
tolerance relative to the whole matrix would hide an error at the target's column of a confident row.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of a float64 tile: the reference keeps about ten of them."""

EPS = 2.0**-23
"""Spacing of fp32 at 1."""

_DIGITS = {torch.float16: (10, -14), torch.bfloat16: (7, -126), torch.float32: (23, -126)}
"""Bits of the fraction and the smallest normal exponent."""


class Rows(NamedTuple):
    """float64 facts of each row; `ce` and `z` are 0 where the row is ignored, NaN where its label is out of range."""

    ce: torch.Tensor
    z: torch.Tensor
    valid: torch.Tensor
    row_max: torch.Tensor
    log_sum: torch.Tensor
    """Logarithm of the sum of exponentials shifted by `row_max`: for rows near 1e30 float64 loses it in `lse`."""
    lse: torch.Tensor
    target_shifted: torch.Tensor
    """The target's logit minus the row maximum; 0 where there is no target."""


def rows(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> Rows:
    """Return the per-row terms of `logits` (B, V) and `labels` (B,)."""
    B, V = logits.shape
    valid = labels != ignore_index
    in_range = (labels >= 0) & (labels < V)
    row_max = torch.empty(B, dtype=torch.float64, device=logits.device)
    row_sum, target_shifted = torch.zeros_like(row_max), torch.empty_like(row_max)
    index = torch.where(in_range, labels, 0)[:, None]
    for r, _ in _tiles(B, V, logits.device, whole_rows=True):
        row_max[r] = logits[r].amax(dim=1).double()
        target_shifted[r] = logits[r].gather(1, index[r])[:, 0].double() - row_max[r]
    for r, c in _tiles(B, V, logits.device):
        row_sum[r] += (logits[r, c].double() - row_max[r, None]).exp_().sum(dim=1)
    log_sum = row_sum.log()
    lse = row_max + log_sum
    wrong = valid & ~in_range
    ce = torch.where(valid, log_sum - target_shifted, 0.0).masked_fill(wrong, torch.nan)
    z = torch.where(valid, lse.square(), 0.0)
    return Rows(ce, z, valid, row_max, log_sum, lse, torch.where(valid & in_range, target_shifted, 0.0))


def loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    z_loss_multiplier: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the loss, 0-d float64; the mean over no valid row is 0."""
    return _reduce(rows(logits, labels, ignore_index), z_loss_multiplier, reduction)


def gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    z_loss_multiplier: float = 0.0,
    reduction: str = "sum",
    grad_output: float = 1.0,
) -> torch.Tensor:
    """Return d(loss)/d(logits) times `grad_output` as one (B, V) float64 tensor: for small inputs."""
    terms = rows(logits, labels, ignore_index)
    factor = grad_output / _divisor(terms, reduction)
    everything = (slice(0, logits.shape[0]), slice(0, logits.shape[1]))
    return _gradient_tile(logits, labels, terms, z_loss_multiplier, factor, *everything)[0]


def gradient_roundings(
    actual: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    z_loss_multiplier: float = 0.0,
    reduction: str = "sum",
    grad_output: float = 1.0,
    kept: float | None = None,
) -> float:
    """Return the largest error of `actual` as a multiple of what is allowed: at most 1 where the contract is kept.

    Allowed is one rounding to the dtype of `actual` and, with `kept`, one more of the gradient times `kept` (see
    `kept_factor`); both beyond the bound of the fp32 arithmetic. Infinity stands for what no rounding explains: a NaN
    where there should be none or the other way round, an ignored row that is not exactly 0, a wrong overflow.
    """
    assert actual.shape == logits.shape, (actual.shape, logits.shape)
    terms = rows(logits, labels, ignore_index)
    factor = grad_output / _divisor(terms, reduction)
    worst = 0.0
    for r, c in _tiles(*logits.shape, logits.device):
        expected, slack = _gradient_tile(logits, labels, terms, z_loss_multiplier, factor, r, c)
        tile = actual[r, c]
        rounded = expected.to(actual.dtype)
        same = (tile == rounded) | (tile.isnan() & rounded.isnan())
        allowed = _half_ulp(expected, actual.dtype)
        if kept is not None:
            allowed += _half_ulp(expected * kept, actual.dtype) / abs(kept)
            slack += 2.0**-126 / abs(kept)
        error = ((tile.double() - expected).abs_() - slack).clamp_(min=0.0) / allowed
        error.masked_fill_(~terms.valid[r, None], torch.inf)
        error = error.masked_fill_(same, 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        worst = max(worst, float(error.max())) if error.numel() else worst
    return worst


def kept_factor(dtype: torch.dtype, grad_output: float) -> float | None:
    """Return how many times the returned gradient the functional form keeps for backward, None where it is the same.

    Args:
        dtype: of the logits.
        grad_output: incoming gradient.
    """
    # fp16 keeps the logits and not a gradient.
    return None if grad_output == 1.0 or dtype == torch.float16 else 1.0 / grad_output


def loss_tolerance(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    z_loss_multiplier: float = 0.0,
    reduction: str = "mean",
) -> float:
    """Return how far fp32 arithmetic may be from `loss`: about 2e-6 for ordinary logits.

    Per row `arithmetic_ulps` for the logarithm of the sum, one ulp for the shifted target, a few for the difference;
    z is the square of a log-sum-exp that carries those errors. Adding B rows in a fixed order by at least 1024 threads
    costs half an ulp for each addition of a thread and a few for the tree above it.
    """
    terms = rows(logits, labels, ignore_index)
    ulps = arithmetic_ulps(logits.shape[1])
    per_row = torch.where(terms.valid, ulps + terms.target_shifted.abs() + 4.0 * terms.ce.abs(), 0.0)
    total = terms.ce.abs()
    if z_loss_multiplier:
        factor = abs(z_loss_multiplier)
        z_error = 4.0 * terms.z + 2.0 * terms.lse.abs() * (ulps + terms.lse.abs())
        per_row = per_row + factor * torch.where(terms.valid, z_error, 0.0)
        total = total + factor * terms.z
    added = 8.0 + logits.shape[0] / 2048
    return float(EPS * (per_row.sum() + added * total.sum()) / _divisor(terms, reduction))


def arithmetic_ulps(V: int) -> float:
    """Return how many fp32 ulps the sum of a row's V exponentials may be off.

    16 for the exponential's and the logarithm's approximation and the tree of partial sums. A row that is streamed is
    dealt to at least 4096 threads which add 16 elements at a time, one group after another, each addition half an ulp.
    """
    return 16.0 + V / 2**17


def check(
    function: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    grad_output: float = 1.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a loss forward and backward, assert what every call promises, and return the loss and the gradient.

    That is: a 0-d fp32 loss and a gradient of the dtype and shape of the logits, both within bounds, and the logits as
    they were.

    Args:
        function: takes (logits, labels, **options).
        logits: `(B, V)`; taken as a leaf as they lie in memory.
        labels: `(B,)`.
        grad_output: incoming gradient.
        options: `ignore_index`, `z_loss_multiplier`, `reduction`, as far as they are not the defaults.

    """
    before = logits.detach().clone()
    leaf = logits.detach().requires_grad_()
    result = function(leaf, labels, **options)
    assert result.shape == ()
    assert result.dtype == torch.float32
    assert result.device == logits.device
    (grad,) = torch.autograd.grad(result, leaf, torch.tensor(grad_output, device=logits.device))
    assert same_bits(leaf.detach(), before)
    expected = loss(before, labels, **options)
    error = abs(float(result.detach()) - float(expected))
    assert error <= loss_tolerance(before, labels, **options), (float(result.detach()), float(expected))
    kept = kept_factor(logits.dtype, grad_output)
    assert grad.dtype == logits.dtype
    arguments = {"reduction": "mean", **options, "grad_output": grad_output, "kept": kept}
    assert gradient_roundings(grad, before, labels, **arguments) <= 1
    return result.detach(), grad


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bits, NaN included."""
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def torch_eager(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    z_loss_multiplier: float = 0.0,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PyTorch's loss, computed in fp32, and gradient in the dtype of `logits`: the yardstick of the errors."""
    leaf = logits.detach().requires_grad_()
    x = leaf.float()
    result = F.cross_entropy(x, labels, ignore_index=ignore_index, reduction=reduction)
    if z_loss_multiplier:
        z = torch.where(labels != ignore_index, x.logsumexp(dim=1).square(), 0.0).sum()
        divisor = (labels != ignore_index).sum() if reduction == "mean" else 1
        result = result + z_loss_multiplier * z / divisor
    (grad,) = torch.autograd.grad(result, leaf)
    return result.detach(), grad


def _reduce(terms: Rows, z_loss_multiplier: float, reduction: str) -> torch.Tensor:
    total = terms.ce.sum()
    if z_loss_multiplier:
        total = total + z_loss_multiplier * terms.z.sum()
    return total / _divisor(terms, reduction)


def _divisor(terms: Rows, reduction: str) -> float:
    assert reduction in ("mean", "sum"), reduction
    return max(int(terms.valid.sum()), 1) if reduction == "mean" else 1


def _gradient_tile(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: Rows,
    z_loss_multiplier: float,
    factor: float,
    r: slice,
    c: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tile of the gradient and the bound of the fp32 arithmetic in it."""
    V = logits.shape[1]
    x, valid = logits[r, c].double(), terms.valid[r, None]
    labels = labels[r, None]
    in_range = (labels >= 0) & (labels < V)
    shifted = x - terms.row_max[r, None]
    softmax = (shifted - terms.log_sum[r, None]).exp_()
    lse = terms.lse[r, None] if z_loss_multiplier else torch.zeros_like(terms.lse[r, None])
    z_factor = 2.0 * z_loss_multiplier * lse
    column = torch.arange(c.start, c.stop, device=logits.device)
    one = (column == labels).double()
    grad = (softmax * (1.0 + z_factor) - one) * factor
    grad = grad.masked_fill_(~in_range, torch.nan).masked_fill_(~valid, 0.0)
    # The exponent's product is rounded relative to its size; factors below fp32's normal range may be flushed to 0.
    ulps = arithmetic_ulps(V) + shifted.abs_()
    size = (1.0 + z_factor.abs()) * abs(factor)
    slack = EPS * (softmax * size).nan_to_num_() * ulps.nan_to_num_(posinf=0.0) + EPS * 16.0 * one * abs(factor)
    slack += 2.0**-126 * (1.0 + size.nan_to_num(posinf=0.0))
    return grad, slack


def _half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the spacing of `dtype` at each of the float64 `values`."""
    digits, smallest = _DIGITS[dtype]
    exponent = values.abs().nan_to_num_(posinf=1.0).frexp().exponent - 1
    return torch.ldexp(torch.full_like(values, 0.5), exponent.clamp_(min=smallest) - digits)


def _tiles(B: int, V: int, device: torch.device, whole_rows: bool = False) -> Iterator[tuple[slice, slice]]:
    elements = TILE_ELEMENTS[device.type]
    rows_of_tile = max(1, elements // V)
    columns_of_tile = V if whole_rows else min(V, elements)
    for row in range(0, B, rows_of_tile):
        for column in range(0, V, columns_of_tile):
            yield slice(row, min(row + rows_of_tile, B)), slice(column, min(column + columns_of_tile, V))
