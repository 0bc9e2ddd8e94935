"""Checks of the losses' arguments, before anything is computed, and the forms that the operators take."""

from collections.abc import Callable
from typing import Any

import torch

from greyhound.kernels.cross_entropy import LOGITS_DTYPES, check_columns
from greyhound.ops import cross_entropy as plain_ops

REDUCTIONS = ("mean", "sum", "none")

ACCUMULATIONS = ("fp32", "weight")
"""What the terms of a weight's gradient are added up in."""

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


def check_reduction(reduction: object) -> None:
    """Raise `ValueError` for what is not one of `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")


def is_shaped(logits: object, target: object) -> bool:
    """Return whether these are tensors that can be seen as rows and their targets; what is not is refused later."""
    return (
        isinstance(logits, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and logits.layout is torch.strided
        and target.layout is torch.strided
        and logits.ndim >= 1
        and logits.dtype in LOGITS_DTYPES
    )


def rows_of(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (B, V) with last stride 1 and target (B,) int64."""
    target = _as_int64(target)
    if target.shape != logits.shape[:-1]:
        expected = tuple(logits.shape[:-1])
        raise ValueError(f"target: expected shape {expected}, that of logits without V, got {tuple(target.shape)}")
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


def is_positive(x: float) -> bool:
    """Return whether fp32 holds x as a number above 0."""
    return _SMALLEST <= x <= _LARGEST


def checked_number(name: str, value: object, expected: str, accepts: Callable[[float], bool]) -> float:
    """Return a number as a float; raise `TypeError` or `ValueError` for what `accepts` does not."""
    if isinstance(value, bool) or not isinstance(value, float | int | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    number: Any = value
    if not accepts(number):
        raise ValueError(f"{name}: expected {expected}, got {number}")
    return float(number)


def checked_floats(label_smoothing: float, softcap: float | None, logit_scale: float) -> tuple[float, float, float]:
    """Return them as the operators take them: a softcap of 0 for none."""
    positive = "a finite fp32 number above 0"
    return (
        checked_number("label_smoothing", label_smoothing, "a number from 0 to 1", lambda x: 0.0 <= x <= 1.0),
        0.0 if softcap is None else checked_number("softcap", softcap, f"None or {positive}", is_positive),
        checked_number("logit_scale", logit_scale, positive, is_positive),
    )


def checked_vocabulary(logits: torch.Tensor, valid_vocab: object) -> int:
    """Return the columns of the softmax."""
    V = logits.shape[1]
    if valid_vocab is None:
        return V
    if type(valid_vocab) is not int and not isinstance(valid_vocab, torch.SymInt):
        raise TypeError(f"valid_vocab: expected an int, got {type(valid_vocab).__name__}")
    if not 1 <= valid_vocab <= V:
        raise ValueError(f"valid_vocab: expected 1 to {V}, the columns of logits, got {valid_vocab}")
    columns: Any = valid_vocab
    return columns  # type: ignore[no-any-return]


def without_padding(weight: torch.Tensor | None, columns: int, V: int) -> torch.Tensor | None:
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
    plain_ops.refuse_transforms(tensor, name)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that requires no grad, got one that does and would get none; detach it"
        )
    return tensor


def checked_weights(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], logits: torch.Tensor
) -> torch.Tensor | None:
    """Return factors in fp32, contiguous."""
    if tensor is None:
        return None
    tensor = _checked_tensor(name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != logits.device:
        raise ValueError(f"{name}: expected device {logits.device}, got {tensor.device}")
    return tensor.detach().to(torch.float32).contiguous()


def checked_row_weight(row_weight: torch.Tensor | None, shape: torch.Size, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the rows' weights, of this shape, as (B,) fp32."""
    weights = checked_weights("row_weight", row_weight, shape, logits)
    return None if weights is None else weights.reshape(-1)


def checked_normalizer(normalizer: object, reduction: str, logits: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Return (number or 0, tensor or None)."""
    if normalizer is None:
        return 0.0, None
    if reduction != "mean":
        raise ValueError(f"normalizer: expected reduction 'mean', which it divides, got {reduction!r}")
    if not isinstance(normalizer, torch.Tensor):
        number = checked_number("normalizer", normalizer, "a finite fp32 number above 0 or a tensor", is_positive)
        if torch.compiler.is_compiling():
            # It may be another one in each step: as a tensor it is no constant of the compiled code.
            return 0.0, torch.ones((), dtype=torch.float32, device=logits.device) * number
        return number, None
    if normalizer.numel() != 1:
        raise ValueError(f"normalizer: expected a tensor with one element, got shape {tuple(normalizer.shape)}")
    if normalizer.is_complex() or normalizer.dtype is torch.bool:
        raise TypeError(f"normalizer: expected an integer or floating-point dtype, got {normalizer.dtype}")
    if normalizer.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "normalizer: expected a tensor that requires no grad, got one that does and would get none; detach it"
        )
    if normalizer.device.type == "cpu" and logits.device.type != "cpu" and not torch.compiler.is_compiling():
        # A number already; a copy from such memory could not be captured in a CUDA graph.
        return checked_number("normalizer", normalizer.item(), "a finite fp32 number above 0", is_positive), None
    tensor = normalizer.detach().reshape(()).to(logits.device, torch.float32, non_blocking=True)
    return 0.0, tensor


def check_overwritten(
    logits: torch.Tensor, rows: torch.Tensor, reduction: str, inplace: bool, name: str = "inplace_backward"
) -> None:
    """Raise `ValueError` for logits that may not be overwritten, or, with `inplace`, not in the forward pass."""
    name = "inplace" if inplace else name
    if inplace and reduction == "none":
        raise ValueError("inplace: expected reduction 'mean' or 'sum', got 'none'; inplace_backward serves that")
    if not logits.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return  # and is not overwritten
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf):
        raise ValueError(
            f"{name}: expected logits that are not a leaf, nor a view of one, since they are overwritten, got "
            f"{'a leaf' if logits.is_leaf else 'a view of one'}; leave {name} out"
        )
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


def check_accumulation(grad_weight_accum_dtype: object) -> None:
    """Raise `ValueError` for what is not one of `ACCUMULATIONS`."""
    if grad_weight_accum_dtype not in ACCUMULATIONS:
        expected = " or ".join(map(repr, ACCUMULATIONS))
        raise ValueError(f"grad_weight_accum_dtype: expected {expected}, got {grad_weight_accum_dtype!r}")


def checked_chunk_size(chunk_size: object) -> int | None:
    """Return it; raise `TypeError` or `ValueError` for what is neither None nor an int above 0."""
    if chunk_size is None:
        return None
    if type(chunk_size) is not int:
        raise TypeError(f"chunk_size: expected None or an int, got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    return chunk_size


def products_dtype(inputs: object, weight: object, bias: object = None) -> torch.dtype:
    """Return the dtype of a linear layer's products: autocast's where that is on, else that of its tensors.

    Raises:
        TypeError: something is no plain tensor, or they are of several dtypes without autocast.
    """
    named = {"inputs": inputs, "weight": weight} | ({} if bias is None else {"bias": bias})
    tensors: list[torch.Tensor] = []
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{name}: expected a plain tensor, got a DTensor; pass its full_tensor(), with FSDP call where the "
                "module that holds it has gathered it, and with a weight sharded on the vocabulary call "
                "greyhound.distributed.vocab_parallel_linear_cross_entropy with its to_local()"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got {tensor.layout}")
        if tensor.dtype not in LOGITS_DTYPES:
            raise TypeError(f"{name}: expected dtype {', '.join(LOGITS_DTYPES.values())}, got {tensor.dtype}")
        tensors.append(tensor)
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        autocast: torch.dtype = torch.get_autocast_dtype(kind)
        if autocast in LOGITS_DTYPES:
            return autocast
    for name, each in zip(named, tensors, strict=True):
        if each.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, that of inputs, got {each.dtype}; torch.autocast mixes dtypes")
    return dtype


def check_head(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Raise `ValueError` for tensors that make no linear layer."""
    if inputs.ndim < 1 or inputs.shape[-1] < 1:
        raise ValueError(f"inputs: expected shape (..., H) with H at least 1, got {tuple(inputs.shape)}")
    if inputs.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"inputs: expected a CUDA or CPU tensor, got device {inputs.device}")
    hidden = inputs.shape[-1]
    if weight.numel() == 0:
        raise ValueError(
            f"weight: expected shape (V, {hidden}), got {tuple(weight.shape)}: an empty weight is one that its "
            "partitioner has not gathered; gather it around the call"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden:
        raise ValueError(f"weight: expected shape (V, {hidden}), H being that of inputs, got {tuple(weight.shape)}")
    check_columns("weight", "rows", weight.shape[0])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != inputs.device:
            raise ValueError(f"{name}: expected device {inputs.device}, that of inputs, got {tensor.device}")


def checked_target(target: object, shape: torch.Size, inputs: torch.Tensor) -> torch.Tensor:
    """Return targets of this shape as (N,) int64."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}")
    if hasattr(target, "full_tensor"):
        raise TypeError("target: expected a plain tensor, got a DTensor; pass its full_tensor()")
    target = _as_int64(target)
    if target.device != inputs.device:
        raise ValueError(f"target: expected device {inputs.device}, that of inputs, got {target.device}")
    if target.shape != shape:
        raise ValueError(f"target: expected shape {tuple(shape)}, that of inputs without H, got {tuple(target.shape)}")
    return target.reshape(-1)


def _as_int64(target: torch.Tensor) -> torch.Tensor:
    if target.dtype is not torch.int64 and target.dtype is not torch.int32:
        raise TypeError(f"target: expected dtype int64 or int32, got {target.dtype}")
    return target.to(torch.int64)
