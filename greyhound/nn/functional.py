"""Loss functions with autograd."""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch

from greyhound.kernels.cross_entropy import LOGITS_DTYPES, check_arguments
from greyhound.ops import cross_entropy as plain_ops
from greyhound.ops import options as ops

REDUCTIONS = ("mean", "sum", "none")

NO_INDEX = -(1 << 63)
"""An `ignore_index` that no target has."""

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Of the positive numbers that fp32, in which everything is computed, holds as they are."""

_RESHAPES = (
    *("AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
    *(
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
    ),
)
"""Views of a whole tensor through which a gradient stays where it lies."""


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


def check_reduction(reduction: object) -> None:
    """Raise `ValueError` for what is not one of `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")


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
            last stride is not 1 or the rows cannot be seen as one dimension. Not changed unless asked.
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
    check_reduction(reduction)
    if _is_shaped(logits, target):
        shape = target.shape
        rows, labels = _rows_of(logits, target, ignore_index, shift)
    else:
        shape, rows, labels = torch.Size(()), logits, target  # which the next line refuses
    check_arguments(rows, labels, z_loss_multiplier, ignore_index, labels_name="target")
    wanted = (
        (ops.Z_LOSS if return_z_loss else 0)
        | (ops.LSE if return_lse else 0)
        | (ops.TOKEN_ACCURACY if return_token_accuracy else 0)
        | (ops.PREDICTED_TOKENS if return_predicted_tokens else 0)
        | (ops.ENTROPY if return_entropy else 0)
    )
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

    V = _checked_vocabulary(rows, valid_vocab)
    divisor, normalizer_tensor = _checked_normalizer(normalizer, reduction, rows)
    arguments = ops.Arguments(
        rows,
        labels,
        _checked_weights("weight", _without_padding(weight, rows.shape[1], V), (V,), rows),
        _checked_row_weight(row_weight, shape, rows),
        normalizer_tensor,
        ignore_index,
        z_loss_multiplier,
        _checked_number("label_smoothing", label_smoothing, "a number from 0 to 1", lambda x: 0.0 <= x <= 1.0),
        0.0
        if softcap is None
        else _checked_number("softcap", softcap, "None or a finite fp32 number above 0", _is_positive),
        _checked_number("logit_scale", logit_scale, "a finite fp32 number above 0", _is_positive),
        divisor,
        ops.REDUCTIONS.index(reduction),
        V,
    )
    overwrites = inplace or inplace_backward
    if overwrites:
        _check_overwritten(logits, rows, reduction, inplace)
    outputs = ops.cross_entropy(arguments, wanted, logits if inplace else None, inplace_backward)
    loss = outputs.loss.reshape(shape) if reduction == "none" else outputs.loss
    if not wanted:
        return loss
    by_row = shape if reduction == "none" else ()
    return CrossEntropyOutput(
        loss,
        outputs.z_loss.reshape(by_row) if return_z_loss else None,
        outputs.lse.reshape(shape) if return_lse else None,
        outputs.token_accuracy.reshape(by_row) if return_token_accuracy else None,
        outputs.predicted_tokens.reshape(shape) if return_predicted_tokens else None,
        outputs.entropy.reshape(shape) if return_entropy else None,
    )


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


def _is_shaped(logits: object, target: object) -> bool:
    """Return whether these are tensors that can be seen as rows and their targets; what is not is refused later."""
    return (
        isinstance(logits, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and logits.layout is torch.strided
        and target.layout is torch.strided
        and logits.ndim >= 1
        and logits.dtype in LOGITS_DTYPES
    )


def _rows_of(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (B, V) with last stride 1 and target (B,) int64."""
    if target.dtype is not torch.int64 and target.dtype is not torch.int32:
        raise TypeError(f"target: expected dtype int64 or int32, got {target.dtype}")
    if target.shape != logits.shape[:-1]:
        expected = tuple(logits.shape[:-1])
        raise ValueError(f"target: expected shape {expected}, that of logits without V, got {tuple(target.shape)}")
    if target.dtype is torch.int32:
        target = target.to(torch.int64)
    if shift:
        if target.ndim == 0:
            raise ValueError(f"shift: expected logits with a dimension of positions, got shape {tuple(logits.shape)}")
        target = _shifted(target, ignore_index)
    if logits.ndim != 2:
        logits, target = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, target


def _shifted(target: torch.Tensor, ignore_index: object) -> torch.Tensor:
    """Return each row's next target; the last row of each sequence is ignored."""
    if type(ignore_index) is not int and not isinstance(ignore_index, torch.SymInt):
        return target  # which is refused later
    if not -(1 << 63) <= ignore_index < 1 << 63:
        return target
    # Not `pad`, which takes its value as a float.
    value: Any = ignore_index
    shifted = torch.full_like(target, value, memory_format=torch.contiguous_format)
    shifted[..., :-1] = target[..., 1:]
    return shifted


def _is_positive(x: float) -> bool:
    return _SMALLEST <= x <= _LARGEST


def _checked_number(name: str, value: object, expected: str, accepts: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    number: Any = value
    if not accepts(number):
        raise ValueError(f"{name}: expected {expected}, got {number}")
    return float(number)


def _checked_vocabulary(logits: torch.Tensor, valid_vocab: object) -> int:
    V = logits.shape[1]
    if valid_vocab is None:
        return V
    if type(valid_vocab) is not int and not isinstance(valid_vocab, torch.SymInt):
        raise TypeError(f"valid_vocab: expected an int, got {type(valid_vocab).__name__}")
    if not 1 <= valid_vocab <= V:
        raise ValueError(f"valid_vocab: expected 1 to {V}, the columns of logits, got {valid_vocab}")
    columns: Any = valid_vocab
    return columns  # type: ignore[no-any-return]


def _without_padding(weight: torch.Tensor | None, columns: int, V: int) -> torch.Tensor | None:
    """Return the weights of the columns that are not padding, where there are some for all."""
    if isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.shape[0] == columns:
        return weight[:V]
    return weight


def _checked_tensor(name: str, tensor: object) -> torch.Tensor:
    """Return a tensor of factors, which autograd does not see."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{name}: expected a plain tensor, got a DTensor; pass its full_tensor()")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor that requires no grad, since it would get none; detach it")
    return tensor


def _checked_weights(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], logits: torch.Tensor
) -> torch.Tensor | None:
    """Return factors in fp32, contiguous."""
    if tensor is None:
        return None
    tensor = _checked_tensor(name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != logits.device:
        raise ValueError(f"{name}: expected device {logits.device}, that of logits, got {tensor.device}")
    return tensor.detach().to(torch.float32).contiguous()


def _checked_row_weight(
    row_weight: torch.Tensor | None, shape: torch.Size, logits: torch.Tensor
) -> torch.Tensor | None:
    weights = _checked_weights("row_weight", row_weight, shape, logits)
    return None if weights is None else weights.reshape(-1)


def _checked_normalizer(normalizer: object, reduction: str, logits: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Return (number or 0, tensor or None)."""
    if normalizer is None:
        return 0.0, None
    if reduction != "mean":
        raise ValueError(f"normalizer: expected reduction 'mean', which it divides, got {reduction!r}")
    if not isinstance(normalizer, torch.Tensor):
        number = _checked_number("normalizer", normalizer, "a finite fp32 number above 0 or a tensor", _is_positive)
        if torch.compiler.is_compiling():
            # It may be another one in each step: as a tensor it is no constant of the compiled code.
            return 0.0, torch.ones((), dtype=torch.float32, device=logits.device) * number
        return number, None
    if normalizer.numel() != 1:
        raise ValueError(f"normalizer: expected a tensor with one element, got shape {tuple(normalizer.shape)}")
    if normalizer.is_complex() or normalizer.dtype is torch.bool:
        raise TypeError(f"normalizer: expected an integer or floating-point dtype, got {normalizer.dtype}")
    if normalizer.requires_grad and torch.is_grad_enabled():
        raise ValueError("normalizer: expected a tensor that requires no grad, since it would get none; detach it")
    if normalizer.device.type == "cpu" and logits.device.type != "cpu" and not torch.compiler.is_compiling():
        # A number already; a copy from such memory could not be captured in a CUDA graph.
        return _checked_number("normalizer", normalizer.item(), "a finite fp32 number above 0", _is_positive), None
    tensor = normalizer.detach().reshape(()).to(logits.device, torch.float32, non_blocking=True)
    return 0.0, tensor


def _check_overwritten(logits: torch.Tensor, rows: torch.Tensor, reduction: str, inplace: bool) -> None:
    """Raise `ValueError` for logits that may not be overwritten, or not in the forward pass."""
    name = "inplace" if inplace else "inplace_backward"
    if inplace and reduction == "none":
        raise ValueError("inplace: expected reduction 'mean' or 'sum', got 'none'; inplace_backward serves that")
    if not logits.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return  # and is not overwritten
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf):
        raise ValueError(f"{name}: expected logits that are not a leaf, nor a view of one, since they are overwritten")
    plain_ops.refuse_transforms(logits)
    if plain_ops.watched(logits):
        return  # nor are these, which may have no memory
    if rows.data_ptr() != logits.data_ptr() or (rows.stride(-1) != 1 and rows.shape[-1] > 1):
        raise ValueError(
            f"{name}: expected logits that can be seen as (B, V) with last stride 1, got {logits.stride()}"
        )
    if rows.stride(0) < rows.shape[1] and rows.shape[0] > 1:
        raise ValueError(f"{name}: expected rows that do not overlap, got strides {logits.stride()}")
    if not inplace or base is None:
        return
    if base.numel() != logits.numel():
        raise ValueError(
            f"{name}: expected logits that are all of their storage, got {logits.numel()} of {base.numel()} elements: "
            "another use of the rest could not be told apart"
        )
    node, last = logits.grad_fn, base.grad_fn
    while node is not None and node is not last:
        if node.name() not in _RESHAPES:
            raise ValueError(
                f"{name}: expected logits that are a reshape of the tensor that they are a view of, got {node.name()}: "
                "another use of that tensor could not be told apart"
            )
        node = node.next_functions[0][0]
