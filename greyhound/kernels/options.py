"""Cross entropy with options on values: the numbers a caller asks for and gives, and the launch that ops share.

As in `greyhound.kernels.cross_entropy`: no autograd, no wait for the GPU, arguments checked by the callers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Options, Outputs, options_kind, sums_elements
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import portable


class Shard(NamedTuple):
    """Columns that are a part of their rows'."""

    start: int
    """Column of the whole rows that the first one is; labels are counted from column 0 of those."""
    size: int
    """Columns of the whole rows."""


class Loss(NamedTuple):
    """What the loss is made of; every tensor fp32 on the device of the logits."""

    ignore_index: int
    z_loss_multiplier: float
    label_smoothing: float
    softcap: float
    """0: none."""
    logit_scale: float
    mean: bool
    """Whether the loss is divided by the normalizer."""
    divisor: float
    """The normalizer if it is a number, else 0."""
    normalizer: torch.Tensor | None
    """() if it is a tensor. With neither: the sum of the valid rows' class weights, for the z-loss their number."""
    weight: torch.Tensor | None
    """(V,) contiguous: of the classes."""
    row_weight: torch.Tensor | None
    """(B,), any stride."""
    shard: Shard | None = None
    """None: the columns are all of them."""


class Results(NamedTuple):
    """Tensors to be written, None for what is not wanted; contiguous, fp32 but for `predicted`."""

    loss: torch.Tensor | None = None
    """(): the sum or the mean."""
    z_loss: torch.Tensor | None = None
    """(): the z-loss in it."""
    token_accuracy: torch.Tensor | None = None
    """(): of the valid rows the share whose target is the predicted token."""
    row_loss: torch.Tensor | None = None
    """(B,)."""
    row_z_loss: torch.Tensor | None = None
    """(B,)."""
    lse: torch.Tensor | None = None
    """(B,), of ignored rows too."""
    entropy: torch.Tensor | None = None
    """(B,), of ignored rows too."""
    predicted: torch.Tensor | None = None
    """(B,) int64, of ignored rows too: the smallest column of the largest logit; -1 where NaN, +inf or nothing but -inf
    leaves no softmax."""
    shard_sums: torch.Tensor | None = None
    """(B, SHARD_SUMS): what the columns, a shard, tell of each row; no other result is wanted then."""


class Incoming(NamedTuple):
    """Gradients that come in, fp32, None for 0."""

    loss: torch.Tensor | None
    """() or (B,), any stride."""
    lse: torch.Tensor | None
    """(B,), any stride."""
    entropy: torch.Tensor | None
    """(B,), any stride."""


def launch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    grad_logits: torch.Tensor | None,
    loss: Loss,
    results: Results,
    incoming: Incoming | None = None,
    row_sums: torch.Tensor | None = None,
) -> None:
    """Run the fused op with options on checked arguments.

    Args:
        logits: `(B, V)`, last stride 1, only the columns of the softmax.
        labels: `(B,)` int64.
        grad_logits: `(B, V)`, last stride 1, dtype of `logits`, written in full; may be `logits`. None: no gradient.
        loss: what it is made of.
        results: what is written besides.
        incoming: with it the gradient takes these in and is the only result, else it is that of the sum or the mean.
        row_sums: `(B, 2)` fp32 contiguous, with `incoming` and `loss.shard`: what `shards.combine` found of each row.
    """
    B, V = logits.shape
    if B == 0:
        for tensor in (results.loss, results.z_loss, results.token_accuracy):
            if tensor is not None:
                tensor.zero_()
        return
    device = logits.device
    kind = options_kind(
        loss.softcap != 0.0,
        loss.label_smoothing != 0.0,
        loss.weight is not None,
        results.entropy is not None,
        incoming is not None and incoming.entropy is not None,
    )
    compiled = _compiled(device, logits.dtype, V, B, grad_logits is not None, kind)
    if compiled is None:
        portable.cross_entropy_options(logits, labels, grad_logits, loss, results, incoming, row_sums)
        return
    function, numbers = compiled
    predicted = results.predicted
    if predicted is None and results.token_accuracy is not None:
        predicted = torch.empty(B, dtype=torch.int64, device=device)
    if predicted is not None:
        predicted.zero_()
    weight_sum = loss.weight.sum() if kind == "any" and loss.weight is not None and loss.label_smoothing else None
    grad_loss, grad_lse, grad_entropy = incoming or (None, None, None)
    if incoming is not None and grad_loss is None:
        grad_loss = torch.zeros((), dtype=torch.float32, device=device)  # without one it is 1
    counts = loss.mean and not loss.divisor and loss.normalizer is None and grad_logits is not None
    sums = torch.empty(sums_elements(B), dtype=torch.float32, device=device)
    plain.on_device(
        device,
        function,
        logits,
        labels,
        logits if grad_logits is None else grad_logits,
        sums,
        told_of(loss, Incoming(grad_loss, grad_lse, grad_entropy), class_weight_sum=weight_sum, row_sums=row_sums),
        addresses(results._replace(predicted=predicted)),
        int(counts),
        int(incoming is None and results.shard_sums is None),
        numbers,
    )


def told_of(
    loss: Loss,
    incoming: Incoming,
    *,
    class_weight_sum: torch.Tensor | None = None,
    row_sums: torch.Tensor | None = None,
) -> Options:
    """Return what a launcher is told of the loss."""
    return Options(
        loss.ignore_index,
        loss.z_loss_multiplier,
        loss.label_smoothing,
        loss.logit_scale,
        loss.softcap,
        int(loss.mean),
        loss.divisor,
        _address(loss.normalizer),
        _address(loss.weight),
        _address(class_weight_sum),
        *_rows(loss.row_weight),
        *_rows(incoming.loss),
        *_rows(incoming.lse),
        *_rows(incoming.entropy),
        *(loss.shard or (0, 0)),
        _address(row_sums),
    )


def addresses(results: Results) -> Outputs:
    """Return what a launcher is told of what it writes."""
    return Outputs(*map(_address, results))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Address and stride of a number for each row, or of one for all."""
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), tensor.stride(0) if tensor.ndim else 0


@functools.lru_cache(maxsize=4096)
def _compiled(
    device: torch.device, dtype: torch.dtype, V: int, B: int, with_grad: bool, kind: str
) -> tuple[Callable[..., Any], tuple[int, ...]] | None:
    arch = plain.arch_or_warn(device)
    if arch is None:
        return None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    spec, numbers = plan.select_fused(arch, plain.LOGITS_DTYPES[dtype], V, with_grad, B, multiprocessors, kind)
    return _artifacts.load(arch, spec), numbers.numbers(B, multiprocessors)
