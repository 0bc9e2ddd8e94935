"""The operators `greyhound::linear_cross_entropy` and `::linear_cross_entropy_backward`, and their autograd rules.

As in `greyhound.ops.options`: where one pass gives the gradients of a sum or a mean they are made in the forward pass,
chunk by chunk, and multiplied by the incoming one, on the device, in backward. Where more comes in (a gradient of the
log-sum-exp or the entropy), where there is a loss for each row, and for fp16, backward makes the logits again and
computes the gradients with everything that comes in applied to those of the logits.

In eager mode the dispatcher is left out, and the gradients, which are then the graph's own, are scaled in place.
"""

from typing import Any, NamedTuple

import torch

from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import linear as kernels
from greyhound.kernels import options as loss_kernels
from greyhound.ops.cross_entropy import (
    INTERFACE,
    library,
    once_differentiable,
    refuse_transforms,
    wanted_again,
    watched,
)
from greyhound.ops.options import ENTROPY, LSE, PREDICTED_TOKENS, REDUCTIONS, TOKEN_ACCURACY, Z_LOSS

GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS = 64, 128, 256
"""More flags of what a forward pass returns."""

GRADIENTS = GRAD_INPUTS | GRAD_WEIGHT | GRAD_BIAS


class Arguments(NamedTuple):
    """Those of `linear_cross_entropy`, checked, in its order."""

    inputs: torch.Tensor
    """(N, H)."""
    weight: torch.Tensor
    """(V, H)."""
    bias: torch.Tensor | None
    """(V,)."""
    target: torch.Tensor
    """(N,) int64."""
    row_weight: torch.Tensor | None
    """(N,) fp32."""
    normalizer: torch.Tensor | None
    """() fp32."""
    ignore_index: int
    z_loss_multiplier: float
    label_smoothing: float
    softcap: float
    """0: none."""
    logit_scale: float
    divisor: float
    """The normalizer if it is a number, else 0."""
    reduction: int
    """Index into `REDUCTIONS`."""
    dtype: torch.dtype
    """Of the products and the logits."""
    fp32_accumulation: bool
    """Whether the weight's gradient is added up in fp32."""
    chunk_size: int
    """0: chosen."""


class Outputs(NamedTuple):
    """Those of `linear_cross_entropy`, in its order; empty where they are not wanted."""

    loss: torch.Tensor
    """() or, without a reduction, (N,)."""
    grad_inputs: torch.Tensor
    grad_weight: torch.Tensor
    grad_bias: torch.Tensor
    z_loss: torch.Tensor
    """Like `loss`."""
    lse: torch.Tensor
    """(N,)."""
    token_accuracy: torch.Tensor
    """Like `loss`."""
    predicted_tokens: torch.Tensor
    """(N,) int64."""
    entropy: torch.Tensor
    """(N,)."""


FLOATS = ("z_loss_multiplier", "label_smoothing", "softcap", "logit_scale", "divisor")
"""As in `options.FLOATS`."""

_TENSORS = 6
"""The first arguments are tensors or None."""

_COUNT = len(Arguments._fields)

_SIGNATURE = (
    "Tensor inputs, Tensor weight, Tensor? bias, Tensor target, Tensor? row_weight, Tensor? normalizer,"
    " int ignore_index, float z_loss_multiplier, float label_smoothing, float softcap, float logit_scale,"
    " float divisor, int reduction, ScalarType dtype, bool fp32_accumulation, int chunk_size, int wanted"
)
library.define(
    f"linear_cross_entropy({_SIGNATURE}, Tensor? numbers=None, int interface=0) -> (Tensor loss, Tensor grad_inputs,"
    " Tensor grad_weight, Tensor grad_bias, Tensor z_loss, Tensor lse, Tensor token_accuracy, Tensor predicted_tokens,"
    " Tensor entropy)"
)
library.define(
    "linear_cross_entropy_backward(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_entropy,"
    f" {_SIGNATURE}, Tensor? numbers=None, int interface=0) -> (Tensor, Tensor, Tensor)"
)


def _products(arguments: Arguments, wanted: int) -> kernels.ChunkedHead:
    bias = None if arguments.bias is None else arguments.bias.detach()
    return kernels.ChunkedHead(
        kernels.Head(arguments.inputs.detach(), arguments.weight.detach(), bias, arguments.dtype),
        kernels.Wanted(bool(wanted & GRAD_INPUTS), bool(wanted & GRAD_WEIGHT), bool(wanted & GRAD_BIAS)),
        fp32_accumulation=arguments.fp32_accumulation,
        chunk_size=arguments.chunk_size or None,
    )


def _loss_of(arguments: Arguments) -> loss_kernels.Loss:
    return loss_kernels.Loss(
        arguments.ignore_index,
        arguments.z_loss_multiplier,
        arguments.label_smoothing,
        arguments.softcap,
        arguments.logit_scale,
        REDUCTIONS[arguments.reduction] == "mean",
        arguments.divisor,
        arguments.normalizer,
        None,
        arguments.row_weight,
    )


def _forward(arguments: Arguments, wanted: int) -> Outputs:
    inputs, target = arguments.inputs, arguments.target
    plain.check_labels(target, arguments.weight.shape[0], arguments.ignore_index, labels_name="target")
    rows = inputs.shape[0]
    by_row = REDUCTIONS[arguments.reduction] == "none"

    def empty(is_wanted: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size if is_wanted else 0, dtype=dtype, device=inputs.device)

    size = (rows,) if by_row else ()
    loss, z_loss = empty(1, *size), empty(wanted & Z_LOSS, *size)
    lse, entropy = empty(wanted & LSE, rows), empty(wanted & ENTROPY, rows)
    predicted = empty(wanted & (PREDICTED_TOKENS | TOKEN_ACCURACY), rows, dtype=torch.int64)
    results = kernels.LinearResults(
        loss,
        z_loss if wanted & Z_LOSS else None,
        lse if wanted & LSE else None,
        predicted if wanted & (PREDICTED_TOKENS | TOKEN_ACCURACY) else None,
        entropy if wanted & ENTROPY else None,
    )
    gradients = kernels.forward(_products(arguments, wanted), target, _loss_of(arguments), results)
    accuracy = empty(0)
    if wanted & TOKEN_ACCURACY:
        valid = target != arguments.ignore_index
        hits = (predicted == target) & (target >= 0) & valid
        accuracy = hits.to(torch.float32) if by_row else hits.sum() / valid.sum().clamp(min=1)
    grad_inputs, grad_weight, grad_bias = _given(gradients, inputs)
    return Outputs(
        loss,
        grad_inputs,
        grad_weight,
        grad_bias,
        z_loss,
        lse,
        accuracy,
        predicted if wanted & PREDICTED_TOKENS else empty(0, dtype=torch.int64),
        entropy,
    )


def _given(gradients: kernels.HeadGradients | None, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients as outputs of an operator."""
    return tuple(
        torch.empty(0, dtype=inputs.dtype, device=inputs.device) if each is None else each
        for each in gradients or (None, None, None)
    )


def _backward(
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    arguments: Arguments,
    wanted: int,
) -> kernels.HeadGradients:
    incoming = loss_kernels.Incoming(
        *(None if each is None else each.to(torch.float32) for each in (grad_loss, grad_lse, grad_entropy))
    )
    return kernels.backward(_products(arguments, wanted), arguments.target, _loss_of(arguments), incoming)


def _fake_gradients(given: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    wanted: int = given[_COUNT]
    flags = (GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS)
    return tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format)
        if wanted & flag and each is not None
        else given[0].new_empty((0,))
        for each, flag in zip(given[:3], flags, strict=True)
    )


def _fake_forward(*given: Any) -> tuple[torch.Tensor, ...]:
    inputs: torch.Tensor = given[0]
    reduction, wanted = given[12], given[_COUNT]
    rows = inputs.shape[0]

    def empty(is_wanted: int, *size: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return inputs.new_empty(size if is_wanted else (0,), dtype=dtype)

    size = (rows,) if REDUCTIONS[reduction] == "none" else ()
    return (
        empty(1, *size),
        *_fake_gradients(given),
        empty(wanted & Z_LOSS, *size),
        empty(wanted & LSE, rows),
        empty(wanted & TOKEN_ACCURACY, *size),
        empty(wanted & PREDICTED_TOKENS, rows, dtype=torch.int64),
        empty(wanted & ENTROPY, rows),
    )


def _fake_backward(grad_loss: Any, grad_lse: Any, grad_entropy: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    return _fake_gradients(given)


def _arguments_of(given: tuple[Any, ...]) -> tuple[Arguments, int]:
    """Return (arguments, wanted) of an operator's."""
    wanted, numbers, _ = (*given[_COUNT:], None, None)[:3]  # the last two may be left out
    arguments = Arguments(*given[:_COUNT])
    if numbers is not None:
        arguments = arguments._replace(**dict(zip(FLOATS, numbers.tolist(), strict=True)))
    return arguments, wanted


def _forward_op(*given: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_forward(*_arguments_of(given)))


def _backward_op(grad_loss: Any, grad_lse: Any, grad_entropy: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    return _given(_backward(grad_loss, grad_lse, grad_entropy, *_arguments_of(given)), given[0])


for _name, _implementation, _fake in (
    ("linear_cross_entropy", _forward_op, _fake_forward),
    ("linear_cross_entropy_backward", _backward_op, _fake_backward),
):
    library.impl(_name, _implementation, "CUDA")
    library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"greyhound::{_name}", _fake, lib=library)


def _keep(
    ctx: Any, arguments: tuple[Any, ...], wanted: int, outputs: Outputs, numbers: torch.Tensor | None = None
) -> None:
    """Save what the backward pass may want: the gradients, the arguments where those alone may not do."""
    ctx.set_materialize_grads(False)
    ctx.constants, ctx.made = arguments[_TENSORS:_COUNT], wanted & GRADIENTS
    ctx.needs = sum(
        flag
        for flag, needed in zip((GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS), ctx.needs_input_grad, strict=False)
        if needed
    )
    keeps_arguments = not ctx.made or wanted & (LSE | ENTROPY)
    tensors = arguments[:_TENSORS] if keeps_arguments else (None,) * _TENSORS
    gradients = [
        each if wanted & flag else None
        for each, flag in zip(outputs[1:4], (GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS), strict=True)
    ]
    ctx.save_for_backward(*gradients, numbers, *tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    outputs = Outputs(*output)
    wanted, numbers, _ = inputs[_COUNT:]
    constants = [*outputs[1:5], outputs.token_accuracy, outputs.predicted_tokens]
    constants += [] if wanted & LSE else [outputs.lse]
    constants += [] if wanted & ENTROPY else [outputs.entropy]
    ctx.mark_non_differentiable(*constants)
    _keep(ctx, inputs, wanted, outputs, numbers)


def _rule(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    # None for the other arguments, and for the three that come after these.
    return *_gradients(ctx, incoming[0], incoming[5], incoming[8]), *[None] * (_COUNT - 3), None, None, None


def _gradients(
    ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """New gradients, through operators."""
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return None, None, None
    *made, numbers, inputs, weight, bias, target, row_weight, normalizer = ctx.saved_tensors
    found: list[torch.Tensor | None]
    with torch.no_grad():
        if ctx.made and grad_loss is not None and grad_lse is None and grad_entropy is None:
            found = [
                None if each is None else torch.ops.greyhound.scale_gradient(each, grad_loss, INTERFACE)
                for each in made
            ]
        else:
            tensors = (inputs, weight, bias, target, row_weight, normalizer)
            all_three = torch.ops.greyhound.linear_cross_entropy_backward(
                grad_loss, grad_lse, grad_entropy, *tensors, *ctx.constants, ctx.needs, numbers, INTERFACE
            )
            flags = (GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS)
            found = [each if ctx.needs & flag else None for each, flag in zip(all_three, flags, strict=True)]
    return tuple(None if each is None else once_differentiable(each) for each in found)


torch.library.register_autograd("greyhound::linear_cross_entropy", _rule, setup_context=_setup_context, lib=library)


_FLAGS = (0, GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS, Z_LOSS, LSE, TOKEN_ACCURACY, PREDICTED_TOKENS, ENTROPY)
"""Of the fields of `Outputs`."""


class _Eager(torch.autograd.Function):
    """The autograd rule of `greyhound::linear_cross_entropy` without the dispatcher, and with less memory."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arguments: Arguments,
        wanted: int,
    ) -> tuple[Any, ...]:
        arguments = arguments._replace(inputs=inputs, weight=weight, bias=bias)
        outputs = _forward(arguments, wanted)
        _keep(ctx, tuple(arguments), wanted, outputs)
        returned = [
            output if flag == 0 or wanted & flag else None for output, flag in zip(outputs, _FLAGS, strict=True)
        ]
        loss, z_loss, lse, accuracy, predicted, entropy = returned[0], *returned[4:]
        ctx.mark_non_differentiable(*(each for each in (z_loss, accuracy, predicted) if each is not None))
        return loss, z_loss, lse, accuracy, predicted, entropy

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_loss, _, grad_lse, _, _, grad_entropy = incoming
        only_scales = ctx.made and grad_lse is None and grad_entropy is None
        batched = any(each is not None and torch._C._functorch.is_legacy_batchedtensor(each) for each in incoming)
        if grad_loss is None or not only_scales or batched or wanted_again():
            return *_gradients(ctx, grad_loss, grad_lse, grad_entropy), None, None
        made = ctx.saved_tensors[:3]
        for each in made:
            if each is not None:
                plain.launch_scale(each, each, grad_loss)
        return *made, None, None


def linear_cross_entropy(arguments: Arguments, wanted: int) -> Outputs:
    """Return the outputs of checked arguments, with autograd where a tensor wants a gradient.

    Args:
        arguments: those of the operator.
        wanted: the flags of `greyhound.ops.options`, but for the gradient; which are made is decided here.
    """
    head = (arguments.inputs, arguments.weight, arguments.bias)
    tensors = (*head, arguments.target, arguments.row_weight, arguments.normalizer)
    for name, each in zip(("inputs", "weight", "bias"), head, strict=True):
        if each is not None:
            refuse_transforms(each, name)
    flags = (GRAD_INPUTS, GRAD_WEIGHT, GRAD_BIAS)
    needed = (
        sum(flag for each, flag in zip(head, flags, strict=True) if each is not None and each.requires_grad)
        * torch.is_grad_enabled()
    )
    # fp16 as without a linear layer, whether it is that of the products or of a gradient.
    dtypes = {arguments.dtype, *(each.dtype for each in head if each is not None and each.requires_grad)}
    if REDUCTIONS[arguments.reduction] != "none" and torch.float16 not in dtypes:
        wanted |= needed
    if torch.compiler.is_compiling():
        from greyhound.ops import traced

        return Outputs(*traced.linear_cross_entropy(*arguments, wanted))
    if watched(*tensors):
        return Outputs(*torch.ops.greyhound.linear_cross_entropy(*arguments, wanted, None, INTERFACE))
    if not needed:
        return _forward(arguments, wanted)
    eager: Any = _Eager
    loss, *others = eager.apply(*head, arguments, wanted)
    return Outputs(loss, loss, loss, loss, *others)
