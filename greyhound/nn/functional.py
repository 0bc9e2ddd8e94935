"""Loss functions with autograd."""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch

from greyhound.kernels.cross_entropy import check_arguments, check_numbers
from greyhound.nn.arguments import (
    check_accumulation,
    check_head,
    check_overwritten,
    check_reduction,
    checked_chunk_size,
    checked_floats,
    checked_normalizer,
    checked_row_weight,
    checked_target,
    checked_vocabulary,
    checked_weights,
    is_shaped,
    products_dtype,
    rows_of,
    without_padding,
)
from greyhound.ops import cross_entropy as plain_ops
from greyhound.ops import linear as linear_ops
from greyhound.ops import linear_loss
from greyhound.ops import options as ops

NO_INDEX = -(1 << 63)
"""An `ignore_index` that no target has."""


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns where more than the loss is asked for; None for what is not."""

    loss: torch.Tensor
    """0-d fp32, or of the target's shape without a reduction."""
    z_loss: torch.Tensor | None = None
    """The z-loss in it, of its shape, multiplier included; a constant to autograd."""
    lse: torch.Tensor | None = None
    """Log-sum-exp of each row, fp32, of the target's shape; differentiable."""
    token_accuracy: torch.Tensor | None = None
    """0-d fp32: the share of the valid rows whose target is the predicted token; without a reduction 1 or 0 of each
    row, of the target's shape.
    """
    predicted_tokens: torch.Tensor | None = None
    """Column of each row's largest logit, the smallest of several, int64, of the target's shape; -1 where the row has
    no softmax.
    """
    entropy: torch.Tensor | None = None
    """Entropy of each row's softmax in nats, fp32, of the target's shape; differentiable."""


@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = ...,
    reduction: str = ...,
    z_loss_multiplier: float = ...,
    *,
    weight: torch.Tensor | None = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    normalizer: int | float | torch.Tensor | None = ...,
    row_weight: torch.Tensor | None = ...,
    valid_vocab: int | None = ...,
    shift: bool = ...,
    inplace: bool = ...,
    inplace_backward: bool = ...,
) -> torch.Tensor: ...


@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = ...,
    reduction: str = ...,
    z_loss_multiplier: float = ...,
    *,
    weight: torch.Tensor | None = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    normalizer: int | float | torch.Tensor | None = ...,
    row_weight: torch.Tensor | None = ...,
    valid_vocab: int | None = ...,
    shift: bool = ...,
    inplace: bool = ...,
    inplace_backward: bool = ...,
    return_z_loss: bool = ...,
    return_lse: bool = ...,
    return_token_accuracy: bool = ...,
    return_predicted_tokens: bool = ...,
    return_entropy: bool = ...,
) -> Any: ...


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    normalizer: int | float | torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    valid_vocab: int | None = None,
    shift: bool = False,
    inplace: bool = False,
    inplace_backward: bool = False,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_entropy: bool = False,
) -> Any:
    """Cross entropy between rows of logits and class indices, with everything that training stacks add to it.

    With `u = softcap * tanh(logit_scale * x / softcap)` (without a cap `u = logit_scale * x`) over the first
    `valid_vocab` columns, class weights `w` (1 without `weight`), smoothing `s` and V columns, a row whose target t is
    not `ignore_index` loses

        ce = (1 - s) * w[t] * (logsumexp(u) - u[t]) + s / V * sum_j w[j] * (logsumexp(u) - u[j])
        z  = z_loss_multiplier * logsumexp(u) ** 2
        loss = row_weight * (ce + z)

    `sum` adds the rows. `mean` divides the ce part by the sum of `w[t]` over the valid rows, as PyTorch does, and the z
    part, which class weights never touch, by their number; or both by `normalizer`. `none` keeps the rows.

    Everything is computed in fp32. A gradient of a mean or a sum is computed in the same pass over the logits and
    rounded once to their dtype; an incoming gradient other than 1 is applied in backward, on the device, and rounds
    again. Where that will not do the logits are kept instead, and backward computes the gradient from them and rounds
    it once, with everything that comes in applied: without a reduction, where a gradient of `lse` or `entropy` comes
    in, and for fp16, where the mean's gradient would underflow before a loss scale reaches it. No host synchronisation.

    Where no row is valid, `mean` gives 0 (`torch.nn.functional.cross_entropy` gives NaN). A row whose `row_weight` is 0
    adds exactly 0 to the loss and gets gradient 0 from it, NaN or not. With `return_lse` or `return_entropy` the logits
    are kept for backward, as they are where the gradient is computed there. The gradient is a constant to autograd: to
    differentiate it again raises, or finds it unused where that is allowed.

    Args:
        logits: `(..., V)` fp16, bf16 or fp32, CUDA or CPU, element-aligned, any strides; one copy is made where the
            last stride is not 1 or the rows cannot be seen as one dimension. Not changed unless asked. Or a DTensor,
            sharded on the vocabulary, on rows, both or neither: the loss is then a plain tensor, the same on every
            rank, or without a reduction that of the rank's rows; `target` and `row_weight` are DTensors placed as its
            rows, or the rank's part. Not with `weight`, `valid_vocab`, `shift`, `inplace`, `inplace_backward` or
            anything else returned.
        target: `(...)` int64 or int32 on the device of `logits`, 0 to V - 1 (or `valid_vocab` - 1) or `ignore_index`.
        ignore_index: target of the rows to leave out. It drops rows, not a class: the other rows keep that column.
        reduction: "mean", "sum" or "none".
        z_loss_multiplier: factor of the squared log-sum-exp.
        weight: `(V,)` floating point, or `(valid_vocab,)`: of the classes.
        label_smoothing: 0 to 1.
        softcap: above 0; None: no cap.
        logit_scale: above 0; applied before the cap.
        normalizer: what "mean" divides by instead of its own count: a number above 0, or a tensor with one element on
            any device, which is not read on the host unless it lies there.
        row_weight: `(...)` floating point: of the rows, for example advantages. It does not count in "mean".
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0.
        shift: whether row i of each sequence (the last dimension of `target`) is to predict target i + 1: the last
            row of each is ignored. `row_weight` and what is returned by row stay with the rows of `logits`.
        inplace: whether the forward pass may overwrite `logits` with their gradient, for "mean" and "sum", where they
            are not a leaf, and all of their storage or a reshape of it. Nothing else may use them then: another
            consumer, or a second backward pass, raises.
            Compiled code and calls that want no gradient ignore it; fp16 takes `inplace_backward`.
        inplace_backward: whether the backward pass may overwrite `logits`, which are not a leaf. Their version counter
            is raised. Compiled code ignores it.
        return_z_loss: whether to return the loss's part that is z-loss.
        return_lse: whether to return each row's log-sum-exp, that of ignored rows too; differentiable.
        return_token_accuracy: whether to return how many targets are predicted.
        return_predicted_tokens: whether to return each row's largest column, that of ignored rows too.
        return_entropy: whether to return each row's entropy, that of ignored rows too; differentiable.

    Returns:
        The loss, 0-d fp32 or of the target's shape; a `CrossEntropyOutput` where anything else is asked for.

    Raises:
        TypeError: a dtype or an argument type is not one of those above; a DTensor.
        ValueError: a rank, shape, device, number or `reduction` is not one of those above; a weight, row weight or
            normalizer that requires grad, which would get none; logits to be overwritten that are a leaf, overlap
            themselves or are not rows in memory.
        NotImplementedError: forward-mode AD or a `torch.func` transform.
        RuntimeError: in backward, see `inplace`.
        IndexError: on the CPU (on a GPU only under `greyhound.kernels.cross_entropy.check_gpu_labels`): a target
            out of range that is not `ignore_index`. On a GPU such a row makes the loss, and the row's gradient, NaN
            otherwise.

    Source: z-loss as in ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5); softcap as in Gemma 2 (arXiv:2408.00118,
    section 2).
    """
    if hasattr(logits, "full_tensor"):
        return _of_dtensor(
            {"logits": logits, "target": target, "ignore_index": ignore_index, "reduction": reduction}
            | {"z_loss_multiplier": z_loss_multiplier, "normalizer": normalizer, "row_weight": row_weight}
            | {"label_smoothing": label_smoothing, "softcap": softcap, "logit_scale": logit_scale},
            {"inplace": inplace, "inplace_backward": inplace_backward, "return_z_loss": return_z_loss}
            | {"weight": weight, "valid_vocab": valid_vocab, "shift": shift}
            | {"return_lse": return_lse, "return_token_accuracy": return_token_accuracy}
            | {"return_predicted_tokens": return_predicted_tokens, "return_entropy": return_entropy},
        )
    check_reduction(reduction)
    if is_shaped(logits, target):
        shape = target.shape
        rows, labels = rows_of(logits, target, ignore_index, shift)
    else:
        shape, rows, labels = torch.Size(()), logits, target  # which the next line refuses
    check_arguments(rows, labels, z_loss_multiplier, ignore_index, labels_name="target")
    wanted = _wanted(return_z_loss, return_lse, return_token_accuracy, return_predicted_tokens, return_entropy)
    is_plain = (
        not wanted
        and reduction != "none"
        and weight is None
        and row_weight is None
        and normalizer is None
        and softcap is None
        and valid_vocab is None
        and not inplace
        and not inplace_backward
        and type(label_smoothing) in (float, int)
        and label_smoothing == 0.0
        and type(logit_scale) in (float, int)
        and logit_scale == 1.0
    )
    if is_plain:
        return plain_ops.cross_entropy(rows, labels, ignore_index, reduction == "mean", z_loss_multiplier)

    V = checked_vocabulary(rows, valid_vocab)
    divisor, normalizer_tensor = checked_normalizer(normalizer, reduction, rows)
    arguments = ops.Arguments(
        rows,
        labels,
        checked_weights("weight", without_padding(weight, rows.shape[1], V), (V,), rows),
        checked_row_weight(row_weight, shape, rows),
        normalizer_tensor,
        ignore_index,
        z_loss_multiplier,
        *checked_floats(label_smoothing, softcap, logit_scale),
        divisor,
        ops.REDUCTIONS.index(reduction),
        V,
    )
    overwrites = inplace or inplace_backward
    if overwrites:
        check_overwritten(logits, rows, reduction, inplace)
    outputs = ops.cross_entropy(arguments, wanted, logits if inplace else None, inplace_backward)
    return _returned(outputs, shape, reduction, wanted)


def _of_dtensor(arguments: dict[str, Any], others: dict[str, Any]) -> torch.Tensor:
    """Return the loss of logits that are a DTensor; `others` are what plain tensors alone take."""
    from greyhound.nn import sharded  # and `torch.distributed.tensor` with it

    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected it only with plain logits, got a DTensor; pass its full_tensor()")
    return sharded.dtensor_cross_entropy(cross_entropy, **arguments)


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Log-probability of one column of each row: `log_softmax(logits, -1).gather(-1, index)` without the log-softmax.

    The forward pass reads the logits once, the backward pass reads them once more and writes their gradient.

    Args:
        logits: `(..., V)` as for `cross_entropy`.
        index: `(...)` int64 or int32, 0 to V - 1.

    Returns:
        `(...)` fp32, differentiable once.

    Raises:
        TypeError, ValueError, NotImplementedError, IndexError: as `cross_entropy`, which calls `index` target.
    """
    loss = cross_entropy(logits, index, ignore_index=NO_INDEX, reduction="none")
    return -loss


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's softmax in nats: `-(p * log(p)).sum(-1)` with `p = softmax(logits, -1)`.

    The forward pass reads the logits once, the backward pass reads them once more and writes their gradient.

    Args:
        logits: `(..., V)` as for `cross_entropy`. A logit of -inf adds nothing.

    Returns:
        `(...)` fp32, differentiable once.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cross_entropy`.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits: expected a torch.Tensor, got {type(logits).__name__}")
    # Ignored rows have no loss, but an entropy.
    target = torch.zeros((), dtype=torch.int64, device=logits.device).expand(logits.shape[:-1])
    rows: torch.Tensor = cross_entropy(logits, target, ignore_index=0, reduction="none", return_entropy=True).entropy
    return rows


@overload
def chunked_linear_cross_entropy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = ...,
    reduction: str = ...,
    z_loss_multiplier: float = ...,
    grad_weight_accum_dtype: str = ...,
    *,
    bias: torch.Tensor | None = ...,
    chunk_size: int | None = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    normalizer: int | float | torch.Tensor | None = ...,
    row_weight: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def chunked_linear_cross_entropy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = ...,
    reduction: str = ...,
    z_loss_multiplier: float = ...,
    grad_weight_accum_dtype: str = ...,
    *,
    bias: torch.Tensor | None = ...,
    chunk_size: int | None = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    normalizer: int | float | torch.Tensor | None = ...,
    row_weight: torch.Tensor | None = ...,
    return_z_loss: bool = ...,
    return_lse: bool = ...,
    return_token_accuracy: bool = ...,
    return_predicted_tokens: bool = ...,
    return_entropy: bool = ...,
) -> Any: ...


def chunked_linear_cross_entropy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
    grad_weight_accum_dtype: str = "fp32",
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    normalizer: int | float | torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_entropy: bool = False,
) -> Any:
    """Cross entropy of a linear layer's outputs, `cross_entropy(inputs @ weight.T + bias, target)`, chunk by chunk.

    The logits of one chunk of rows exist at a time, in the dtype of the products, and are overwritten with their
    gradient, from which that chunk's part of the gradients of `inputs`, `weight` and `bias` is made at once. So for
    "mean" and "sum" the gradients are there when the forward pass ends, and nothing of the size of the logits is kept.
    An incoming gradient other than 1 is applied in backward, on the device, and rounds again.

    Where that will not do, `inputs` and `weight` are kept instead, and backward makes the logits again, at the price of
    a fourth product: without a reduction, and for fp16, where a mean's gradient would underflow before a loss scale
    reaches it. With `return_lse` or `return_entropy` both are kept: where a gradient of these comes in backward makes
    everything again, else it has the gradients already.

    Only what is wanted is computed: no gradient of frozen tensors, none at all without grad mode. No host
    synchronisation. Under autocast the products are in its dtype, and the gradients of fp32 `inputs` and `weight` come
    from the products in fp32, without a rounding to that dtype.

    Args:
        inputs: `(..., H)` fp16, bf16 or fp32, CUDA or CPU, any strides.
        weight: `(V, H)`, like that of `torch.nn.Linear`: of the dtype of `inputs`, but under autocast.
        target: `(...)` int64 or int32 on the device of `inputs`, 0 to V - 1 or `ignore_index`.
        ignore_index: as for `cross_entropy`.
        reduction: "mean", "sum" or "none".
        z_loss_multiplier: as for `cross_entropy`.
        grad_weight_accum_dtype: what the chunks' terms of the weight's gradient are added up in: "fp32", rounded once
            at the end, or "weight", the weight's dtype, rounded with each chunk: less memory, and an error that grows
            with the number of chunks.
        bias: `(V,)` of the dtype of `weight`.
        chunk_size: rows of a chunk; None: as many as keep the chunk's logits within 1 GiB, or within the size of an
            fp32 accumulator `(V, H)` if that is more, or all, where that takes no more than accumulator and chunk
            would; within 256 MiB (1024 rows at least) with "weight", or where `weight` wants no gradient; and within
            half the device's free memory, looked at once for each shape.
        label_smoothing: as for `cross_entropy`, like all that follow.
        softcap: see there.
        logit_scale: see there.
        normalizer: see there.
        row_weight: `(...)`, see there.
        return_z_loss: see there.
        return_lse: see there; a gradient of it makes backward as long as forward.
        return_token_accuracy: see there.
        return_predicted_tokens: see there.
        return_entropy: see there, and `return_lse`.

    Returns:
        The loss, 0-d fp32 or of the target's shape; a `CrossEntropyOutput` where anything else is asked for.

    Raises:
        TypeError: a dtype or an argument type is not one of those above; a DTensor.
        ValueError: a rank, shape, device, number or name is not one of those above; a weight that is empty, since it
            has not been gathered.
        NotImplementedError: forward-mode AD or a `torch.func` transform.
        IndexError: as `cross_entropy`.
    """
    check_reduction(reduction)
    check_accumulation(grad_weight_accum_dtype)
    dtype = products_dtype(inputs, weight, bias)
    check_head(inputs, weight, bias)
    shape = inputs.shape[:-1]
    labels = checked_target(target, shape, inputs)
    rows = inputs.reshape(labels.numel(), inputs.shape[-1])
    check_numbers(z_loss_multiplier, ignore_index)
    wanted = _wanted(return_z_loss, return_lse, return_token_accuracy, return_predicted_tokens, return_entropy)
    divisor, normalizer_tensor = checked_normalizer(normalizer, reduction, rows)
    arguments = linear_ops.Arguments(
        rows,
        weight,
        bias,
        labels,
        checked_row_weight(row_weight, shape, rows),
        normalizer_tensor,
        ignore_index,
        z_loss_multiplier,
        *checked_floats(label_smoothing, softcap, logit_scale),
        divisor,
        ops.REDUCTIONS.index(reduction),
        dtype,
        grad_weight_accum_dtype == "fp32",
        checked_chunk_size(chunk_size) or 0,
    )
    return _returned(linear_ops.linear_cross_entropy(arguments, wanted), shape, reduction, wanted)


def chunked_linear_loss(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    loss_and_grad_fn: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    *loss_args: Any,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    **loss_kwargs: Any,
) -> torch.Tensor:
    """Sum over chunks of rows of a loss of your own of `inputs @ weight.T`, as `chunked_linear_cross_entropy` does it.

    For each chunk `loss_and_grad_fn(logits, *loss_args, **loss_kwargs)` is called with logits `(C, V)`, without
    gradients being recorded. Tensors among the arguments that have the leading dimensions of `inputs`, or N rows, are
    cut to the chunk's C rows, and so without these dimensions but one; everything else is passed on as it is. What the
    function returns is added up in fp32, so that the loss must be one that is a sum over rows: for a mean divide by the
    number of all rows in the function. Its gradient is made when the loss is: in fp16 it may underflow before a loss
    scale reaches it, so scale there, or use bf16.

    Args:
        inputs: `(..., H)`, N rows, as for `chunked_linear_cross_entropy`.
        weight: `(V, H)`.
        loss_and_grad_fn: returns `(loss, grad_logits)`: a scalar, and its gradient `(C, V)`, which may be the logits'
            own memory, overwritten. The logits last until it is called again. `autograd_loss_and_logits_grad` makes
            such a function of one that autograd can differentiate; `torch.compile(fullgraph=True)` needs one that
            computes its gradient itself.
        *loss_args: passed on.
        chunk_size: rows of a chunk; None: as for `chunked_linear_cross_entropy`.
        grad_weight_accum_dtype: "fp32" or "weight", as there.
        **loss_kwargs: passed on.

    Returns:
        The sum, 0-d fp32, differentiable once, by `inputs` and `weight`: what reaches the loss function in another way
        gets no gradient.

    Raises:
        TypeError: a dtype or an argument type is not one of those above; a DTensor.
        ValueError: a rank, shape, device or name is not one of those above; a weight that is empty, since it has not
            been gathered; a loss that is no scalar, or a gradient that has another shape than the logits.
        NotImplementedError: forward-mode AD or a `torch.func` transform.
    """
    check_accumulation(grad_weight_accum_dtype)
    dtype = products_dtype(inputs, weight)
    check_head(inputs, weight)
    if not callable(loss_and_grad_fn):
        raise TypeError(f"loss_and_grad_fn: expected a function, got {type(loss_and_grad_fn).__name__}")
    leading = inputs.shape[:-1]
    rows = inputs.reshape(leading.numel(), inputs.shape[-1])
    how = linear_loss.How(dtype, grad_weight_accum_dtype == "fp32", checked_chunk_size(chunk_size), leading)
    return linear_loss.chunked_linear_loss(rows, weight, loss_and_grad_fn, loss_args, loss_kwargs, how)


def autograd_loss_and_logits_grad(
    loss_fn: Callable[..., torch.Tensor],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make of a differentiable loss what `chunked_linear_loss` takes.

    Args:
        loss_fn: returns a scalar, differentiable by its first argument, for `(logits, *args, **kwargs)`.

    Returns:
        A function of the same arguments that returns `(loss, grad_logits)`; it raises `ValueError` where the loss is no
        scalar. Where no gradient is wanted `chunked_linear_loss` calls `loss_fn` alone.
    """
    return linear_loss.AutogradLoss(loss_fn)


def _wanted(z_loss: bool, lse: bool, token_accuracy: bool, predicted_tokens: bool, entropy: bool) -> int:
    """Return the flags of what is to be returned besides the loss."""
    return (
        (ops.Z_LOSS if z_loss else 0)
        | (ops.LSE if lse else 0)
        | (ops.TOKEN_ACCURACY if token_accuracy else 0)
        | (ops.PREDICTED_TOKENS if predicted_tokens else 0)
        | (ops.ENTROPY if entropy else 0)
    )


def _returned(outputs: ops.Outputs | linear_ops.Outputs, shape: torch.Size, reduction: str, wanted: int) -> Any:
    """Return the loss, or it and what is wanted besides, in the target's shape."""
    by_row = shape if reduction == "none" else ()
    loss = outputs.loss.reshape(shape) if reduction == "none" else outputs.loss
    if not wanted:
        return loss
    return CrossEntropyOutput(
        loss,
        outputs.z_loss.reshape(by_row) if wanted & ops.Z_LOSS else None,
        outputs.lse.reshape(shape) if wanted & ops.LSE else None,
        outputs.token_accuracy.reshape(by_row) if wanted & ops.TOKEN_ACCURACY else None,
        outputs.predicted_tokens.reshape(shape) if wanted & ops.PREDICTED_TOKENS else None,
        outputs.entropy.reshape(shape) if wanted & ops.ENTROPY else None,
    )
