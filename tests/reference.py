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


class Incoming(NamedTuple):
    """Gradients that come in for the outputs of a loss with options, None for 0."""

    loss: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class Terms(NamedTuple):
    """What a loss with options is made of, differentiable; `B` rows, the columns of the softmax."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    log_p: torch.Tensor
    u: torch.Tensor
    row_weight: torch.Tensor
    """Of ignored rows 0."""
    class_weight: torch.Tensor
    """(V,)."""
    target_weight: torch.Tensor
    normalizer: torch.Tensor
    """Of the ce part."""
    z_normalizer: torch.Tensor
    index: torch.Tensor
    """(B, 1): the target, 0 where it is ignored."""


def terms_with_options(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    compute: torch.dtype = torch.float64,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    normalizer: float | torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    valid_vocab: int | None = None,
) -> Terms:
    """Return the terms of finite `logits` (B, V) and labels (B,) in range, computed in `compute` from PyTorch's parts.

    In float64 they are the reference, in fp32 the yardstick: what a careful user would write.
    """
    B, V = logits.shape[0], valid_vocab or logits.shape[1]
    u = logits[:, :V].to(compute) * logit_scale
    u = softcap * torch.tanh(u / softcap) if softcap else u
    lse, log_p = u.logsumexp(dim=1), u.log_softmax(dim=1)
    valid = labels != ignore_index
    index = torch.where(valid, labels, 0)[:, None]
    ones = torch.ones(max(B, V), dtype=compute, device=logits.device)
    class_weight = ones[:V] if weight is None else weight[:V].to(compute)
    target_weight = class_weight[index[:, 0]]
    ce = -(1.0 - label_smoothing) * target_weight * log_p.gather(1, index)[:, 0]
    if label_smoothing:
        ce = ce - label_smoothing / V * (log_p * class_weight).sum(dim=1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=1)
    row_weight = torch.where(valid, ones[:B] if row_weight is None else row_weight.to(compute), 0.0)
    row_ce, row_z = row_weight * ce, row_weight * z_loss_multiplier * lse.square()
    divisor = z_divisor = ones[0]
    if reduction == "mean" and normalizer is not None:
        divisor = z_divisor = ones[0] * float(normalizer)
    elif reduction == "mean":
        divisor, z_divisor = torch.where(valid, target_weight, 0.0).sum(), valid.sum().to(compute).clamp(min=1.0)
        divisor = torch.where(divisor == 0.0, 1.0, divisor)
    total, z_loss = row_ce / divisor + row_z / z_divisor, row_z / z_divisor
    if reduction != "none":
        total, z_loss = total.sum(), z_loss.sum()
    return Terms(
        total, z_loss, lse, entropy, log_p, u, row_weight, class_weight, target_weight, divisor, z_divisor, index
    )


def gradient_with_options(
    logits: torch.Tensor, labels: torch.Tensor, incoming: Incoming, *, compute: torch.dtype, **options: Any
) -> tuple[Terms, torch.Tensor]:
    """Return the terms and their gradient for what comes in: float64 as it is, else rounded to the logits' dtype."""
    leaf = (logits.double() if compute is torch.float64 else logits).detach().requires_grad_()
    terms = terms_with_options(leaf, labels, compute=compute, **options)
    outputs = [
        (o, g.to(o.dtype))
        for o, g in zip((terms.loss, terms.lse, terms.entropy), incoming, strict=True)
        if g is not None
    ]
    (grad,) = torch.autograd.grad([o for o, _ in outputs], leaf, [g for _, g in outputs])
    return Terms(*(each.detach() for each in terms)), grad


class Slack(NamedTuple):
    """How far fp32 arithmetic may be off: a few ulps of each term, the roundings to another dtype apart."""

    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    grad: torch.Tensor


def slack_with_options(
    logits: torch.Tensor, terms: Terms, incoming: Incoming, *, reduction: str = "mean", **options: Any
) -> Slack:
    """Return the slack of float64 `terms`; each term's is derived as in `loss_tolerance` and `_gradient_tile`."""
    V = terms.u.shape[1]
    s, softcap, logit_scale = (
        options.get(k, d) for k, d in (("label_smoothing", 0.0), ("softcap", 0.0), ("logit_scale", 1.0))
    )
    z = abs(options.get("z_loss_multiplier", 0.0))
    # A tanh of either end of the difference is off by a few ulps of itself.
    ulps = arithmetic_ulps(V) + 8.0 * (softcap or 0.0)
    p, far = terms.log_p.exp(), terms.log_p.abs().nan_to_num(posinf=0.0)
    shifted = (terms.u - terms.u.amax(dim=1, keepdim=True)).abs().nan_to_num(posinf=0.0)
    lse_slack = EPS * (ulps + 4.0 * terms.lse.abs())
    entropy_slack = EPS * (ulps + 4.0 * terms.entropy + (p * far * (ulps + shifted)).sum(dim=1))

    weights = terms.row_weight.abs()
    at_target = (1.0 - s) * terms.target_weight.abs()
    spread = s / V * terms.class_weight.abs()
    ce_slack = at_target * (ulps + 4.0 * far.gather(1, terms.index)[:, 0]) + (spread * (ulps + 4.0 * far)).sum(dim=1)
    sizes = (
        weights * (at_target * far.gather(1, terms.index)[:, 0] + (spread * far).sum(dim=1)) / terms.normalizer.abs()
    )
    sizes += weights * z * terms.lse.square() / terms.z_normalizer.abs()
    loss_slack = EPS * weights * ce_slack / terms.normalizer.abs() + EPS * 8.0 * sizes
    loss_slack += weights * z * 2.0 * terms.lse.abs() * lse_slack / terms.z_normalizer.abs()
    if reduction != "none":
        loss_slack = loss_slack.sum() + EPS * (8.0 + weights.numel() / 2048) * sizes.sum()

    came, grad_lse, grad_entropy = (
        torch.zeros_like(terms.lse) if each is None else each.double().abs().expand_as(terms.lse) for each in incoming
    )
    came = came * weights
    z_came = came * 2.0 * z / terms.z_normalizer.abs()
    came = came / terms.normalizer.abs()
    softmax = came * (at_target + spread.sum()) + z_came * terms.lse.abs() + grad_lse
    softmax = softmax[:, None] + grad_entropy[:, None] * (far + terms.entropy[:, None])
    others = came[:, None] * spread
    others = others.scatter_add(1, terms.index, (came * at_target)[:, None])
    inexact = z_came * lse_slack + grad_entropy * (entropy_slack + EPS * ulps)
    grad = EPS * (ulps + shifted) * p * softmax + p * inexact[:, None] + EPS * 16.0 * others
    if softcap:
        tanh = terms.u / softcap
        # One minus the square of a number near one is off by ulps of one.
        grad = grad * (1.0 - tanh.square()) + EPS * 8.0 * (p * softmax + others)
    grad = grad * logit_scale + 2.0**-126 * (1.0 + softmax + others)
    return Slack(loss_slack, lse_slack, entropy_slack, torch.nn.functional.pad(grad, (0, logits.shape[1] - V)))


def check_options(
    function: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    incoming: Incoming,
    keeps_logits: bool = False,
    **options: Any,
) -> tuple[Any, torch.Tensor]:
    """Run a loss with options forward and backward, assert that both are right, and return the output and the gradient.

    Right is: as far from float64 as PyTorch's fp32 arithmetic is there, and a few fp32 ulps of each term and one
    rounding of the dtype further; one more rounding where a gradient was kept that something comes in for.

    Args:
        function: takes (logits, labels, **options).
        logits: `(B, V)`, finite.
        labels: `(B,)`.
        incoming: what comes in; where it is none for `lse` or `entropy` these are not asked for.
        keeps_logits: whether the gradient is computed in backward even where a pass could give both.
        options: of `cross_entropy`.
    """
    _, lse, entropy = incoming
    extra = {name: True for name, each in (("return_lse", lse), ("return_entropy", entropy)) if each is not None}
    before, leaf = logits.detach().clone(), logits.detach().requires_grad_()
    output = function(leaf, labels, **options, **extra)
    results = (output.loss, output.lse, output.entropy) if extra else (output, None, None)
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if g is not None]
    (grad,) = torch.autograd.grad([r for r, _ in pairs], leaf, [g for _, g in pairs])
    assert same_bits(leaf.detach(), before)
    assert grad.dtype == logits.dtype

    terms, expected = gradient_with_options(before, labels, incoming, compute=torch.float64, **options)
    eager, eager_grad = gradient_with_options(before, labels, incoming, compute=torch.float32, **options)
    slack = slack_with_options(before, terms, incoming, **options)
    for name, result in zip(("loss", "lse", "entropy"), results, strict=True):
        if result is not None:
            exact = getattr(terms, name)
            assert result.dtype == torch.float32
            assert result.shape == exact.shape
            allowed = getattr(slack, name) + (getattr(eager, name).double() - exact).abs()
            assert ((result.detach().double() - exact).abs() <= allowed).all(), name
    allowed = slack.grad + (eager_grad.double() - expected).abs() + _half_ulp(expected, logits.dtype)
    scaled = not keeps_logits and not extra and options.get("reduction") != "none" and logits.dtype != torch.float16
    if scaled and incoming.loss is not None and float(incoming.loss) not in (0.0, 1.0):
        kept = 1.0 / float(incoming.loss)
        allowed += _half_ulp(expected * kept, logits.dtype) / abs(kept) + 2.0**-126 / abs(kept)
    error = (grad.double() - expected).abs()
    assert (error <= allowed).all(), float((error / allowed).nan_to_num(nan=0.0).max())
    silent = (terms.row_weight == 0) & (lse is None) & (entropy is None)
    assert (grad[silent] == 0).all()
    assert (grad[:, options.get("valid_vocab") or grad.shape[1] :] == 0).all()
    return output, grad


class LinearGradients(NamedTuple):
    """Of a linear layer's tensors."""

    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def linear_with_options(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    incoming: Incoming,
    *,
    exact: bool,
    **options: Any,
) -> tuple[Terms, LinearGradients]:
    """Return the terms of a linear layer's logits and the gradients: in float64, or as eager PyTorch computes them."""
    given = [each for each in (inputs, weight, bias) if each is not None]
    leaves = [(each.double() if exact else each).detach().requires_grad_() for each in given]
    logits = F.linear(*leaves)
    terms = terms_with_options(logits, labels, compute=torch.float64 if exact else torch.float32, **options)
    outputs = [
        (o, g.to(o.dtype))
        for o, g in zip((terms.loss, terms.lse, terms.entropy), incoming, strict=True)
        if g is not None
    ]
    found = torch.autograd.grad([o for o, _ in outputs], leaves, [g for _, g in outputs])
    terms = Terms(*(each.detach() for each in terms))
    return terms, LinearGradients(found[0], found[1], found[2] if bias is not None else None)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the L2 norm of the error over that of what is expected; 0 where both are 0."""
    error = (actual.double() - expected.double()).norm()
    return float(error / expected.double().norm().clamp(min=1e-300)) if float(error) else 0.0


def check_linear(
    function: Callable[..., Any],
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    incoming: Incoming,
    how: dict[str, Any] | None = None,
    margin: float = 1.5,
    **options: Any,
) -> tuple[Any, LinearGradients]:
    """Run a linear layer's loss forward and backward, assert that all is right, and return the output and gradients.

    Right is: no farther from float64, in relative L2, than eager PyTorch in the same dtype, with a margin for another
    order of the sums; where something else than 1 comes in a rounding to the dtype farther.

    Args:
        function: takes (inputs, weight, labels, bias=..., **options).
        inputs: `(N, H)`.
        weight: `(V, H)`.
        bias: `(V,)` or None.
        labels: `(N,)`.
        incoming: what comes in; where it is none for `lse` or `entropy` these are not asked for.
        how: arguments of `function` that change nothing but the rounding.
        margin: of the error.
        options: of `chunked_linear_cross_entropy`, known to `terms_with_options`.
    """
    _, lse, entropy = incoming
    extra = {name: True for name, each in (("return_lse", lse), ("return_entropy", entropy)) if each is not None}
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in (inputs, weight, bias)]
    output = function(leaves[0], leaves[1], labels, bias=leaves[2], **options, **extra, **(how or {}))
    results = (output.loss, output.lse, output.entropy) if extra else (output, None, None)
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if g is not None]
    wanted = [each for each in leaves if each is not None]
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs])
    gradients = LinearGradients(found[0], found[1], found[2] if bias is not None else None)

    terms, expected = linear_with_options(inputs, weight, bias, labels, incoming, exact=True, **options)
    eager, eager_gradients = linear_with_options(inputs, weight, bias, labels, incoming, exact=False, **options)
    eps = torch.finfo(inputs.dtype).eps
    # fp16 cannot hold small numbers to its relative precision.
    least = torch.finfo(inputs.dtype).smallest_normal * eps
    for name, result in zip(("loss", "lse", "entropy"), results, strict=True):
        if result is not None:
            right = getattr(terms, name)
            assert result.dtype == torch.float32
            assert result.shape == right.shape
            allowed = margin * relative_error(getattr(eager, name), right) + 64 * EPS
            assert relative_error(result.detach(), right) <= allowed, name
    came = incoming.loss
    scaled = came is not None and not (came.ndim == 0 and float(came) == 1.0)
    for name, gradient in gradients._asdict().items():
        right = getattr(expected, name)
        if right is None:
            continue
        leaf = getattr(LinearGradients(inputs, weight, bias), name)
        assert gradient.dtype == leaf.dtype
        assert gradient.shape == leaf.shape
        allowed = margin * relative_error(getattr(eager_gradients, name), right) + (eps if scaled else 0.0) + 64 * EPS
        size = float(right.norm())
        allowed += least * right.numel() ** 0.5 / size if size else 0.0
        assert relative_error(gradient, right) <= allowed, (name, relative_error(gradient, right), allowed)
    return output, gradients


def predicted_tokens(logits: torch.Tensor, valid_vocab: int | None = None) -> torch.Tensor:
    """Return the smallest column of each row's largest logit."""
    x = logits[:, : valid_vocab or logits.shape[1]]
    column = torch.arange(x.shape[1], device=x.device)
    return torch.where(x == x.amax(dim=1, keepdim=True), column, x.shape[1]).amin(dim=1)


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
    # By the bits of float64: `torch.ldexp` makes the power of 2 in float32, where 2^-150 is 0, and (PyTorch 2.11) works
    # on the current GPU, wherever its arguments lie.
    exponent = (values.nan_to_num(posinf=1.0, neginf=1.0).view(torch.int64) >> 52 & 0x7FF) - 1023
    return (exponent.clamp_(min=smallest) - digits - 1 + 1023 << 52).view(torch.float64)


def _tiles(B: int, V: int, device: torch.device, whole_rows: bool = False) -> Iterator[tuple[slice, slice]]:
    elements = TILE_ELEMENTS[device.type]
    rows_of_tile = max(1, elements // V)
    columns_of_tile = V if whole_rows else min(V, elements)
    for row in range(0, B, rows_of_tile):
        for column in range(0, V, columns_of_tile):
            yield slice(row, min(row + rows_of_tile, B)), slice(column, min(column + columns_of_tile, V))
