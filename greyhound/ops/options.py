"""The operators `greyhound::cross_entropy_options` and `::cross_entropy_options_backward`, and their autograd rules.

`cross_entropy_options` returns the loss, its gradient where one pass gives both, and whatever else of the row is asked
for; what is not is empty. The gradient it returns is that of the sum or the mean alone. Where more comes in (a gradient
of the log-sum-exp or the entropy), where there is a loss for each row, and for fp16, `cross_entropy_options_backward`
computes the gradient from the logits with everything that comes in applied before the only rounding.

In eager mode the dispatcher is left out, and the two ways to do without a second buffer are open: the forward pass may
overwrite the logits with their gradient, or the backward pass may.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import options as kernels
from greyhound.ops.cross_entropy import (
    INTERFACE,
    library,
    once_differentiable,
    refuse_transforms,
    wanted_again,
    watched,
)

REDUCTIONS = ("none", "mean", "sum")
"""By their number in the operators."""


GRADIENT, Z_LOSS, LSE, TOKEN_ACCURACY, PREDICTED_TOKENS, ENTROPY = (1 << bit for bit in range(6))
"""What a forward pass returns besides the loss; added up."""


class Arguments(NamedTuple):
    """Those of `cross_entropy_options`, checked, in its order."""

    logits: torch.Tensor
    """(B, V), last stride 1."""
    target: torch.Tensor
    """(B,) int64."""
    weight: torch.Tensor | None
    """(V,) fp32, contiguous."""
    row_weight: torch.Tensor | None
    """(B,) fp32."""
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
    valid_vocab: int
    """Columns of the softmax; the others get gradient 0."""


class Outputs(NamedTuple):
    """Those of `cross_entropy_options`, in its order; empty where they are not wanted."""

    loss: torch.Tensor
    """() or, without a reduction, (B,)."""
    grad_logits: torch.Tensor
    """(B, V)."""
    z_loss: torch.Tensor
    """Like `loss`."""
    lse: torch.Tensor
    """(B,)."""
    token_accuracy: torch.Tensor
    """Like `loss`."""
    predicted_tokens: torch.Tensor
    """(B,) int64."""
    entropy: torch.Tensor
    """(B,)."""


FLOATS = ("z_loss_multiplier", "label_smoothing", "softcap", "logit_scale", "divisor")
"""The arguments that an operator takes from its tensor `numbers` instead, where there is one: fp64, on the CPU."""

_ARGUMENTS = (
    "Tensor logits, Tensor target, Tensor? weight, Tensor? row_weight, Tensor? normalizer, int ignore_index,"
    " float z_loss_multiplier, float label_smoothing, float softcap, float logit_scale, float divisor, int reduction,"
    " int valid_vocab"
)
library.define(
    f"cross_entropy_options({_ARGUMENTS}, int wanted, Tensor? numbers=None, int interface=0) -> (Tensor loss,"
    " Tensor grad_logits, Tensor z_loss, Tensor lse, Tensor token_accuracy, Tensor predicted_tokens, Tensor entropy)"
)
library.define(
    "cross_entropy_options_backward(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_entropy,"
    f" {_ARGUMENTS}, Tensor? numbers=None, int interface=0) -> Tensor"
)


def _loss_of(arguments: Arguments) -> kernels.Loss:
    return kernels.Loss(
        arguments.ignore_index,
        arguments.z_loss_multiplier,
        arguments.label_smoothing,
        arguments.softcap,
        arguments.logit_scale,
        REDUCTIONS[arguments.reduction] == "mean",
        arguments.divisor,
        arguments.normalizer,
        arguments.weight,
        arguments.row_weight,
    )


def _forward(arguments: Arguments, wanted: int, grad_logits: torch.Tensor | None = None) -> Outputs:
    """Run the op; `grad_logits` is where the gradient goes if it is wanted, made here where it is None."""
    logits, target, V = arguments.logits, arguments.target, arguments.valid_vocab
    plain.check_labels(target, V, arguments.ignore_index, labels_name="target")
    by_row = REDUCTIONS[arguments.reduction] == "none"
    B = logits.shape[0]

    def empty(is_wanted: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # Apart from each other: the outputs of an operator may not share memory.
        return torch.empty(size if is_wanted else (0,), dtype=dtype, device=logits.device)

    if grad_logits is None:
        grad_logits = empty(wanted & GRADIENT, *logits.shape, dtype=logits.dtype)
    size = (B,) if by_row else ()
    outputs = Outputs(
        empty(1, *size),
        grad_logits,
        empty(wanted & Z_LOSS, *size),
        empty(wanted & LSE, B),
        empty(wanted & TOKEN_ACCURACY, *size),
        empty(wanted & PREDICTED_TOKENS, B, dtype=torch.int64),
        empty(wanted & ENTROPY, B),
    )
    predicted = outputs.predicted_tokens if wanted & PREDICTED_TOKENS else None
    if by_row and wanted & TOKEN_ACCURACY and predicted is None:
        predicted = torch.empty(B, dtype=torch.int64, device=logits.device)
    z_loss = outputs.z_loss if wanted & Z_LOSS else None
    results = kernels.Results(
        loss=None if by_row else outputs.loss,
        z_loss=None if by_row else z_loss,
        token_accuracy=outputs.token_accuracy if wanted & TOKEN_ACCURACY and not by_row else None,
        row_loss=outputs.loss if by_row else None,
        row_z_loss=z_loss if by_row else None,
        lse=outputs.lse if wanted & LSE else None,
        entropy=outputs.entropy if wanted & ENTROPY else None,
        predicted=predicted,
    )
    gradient = grad_logits if wanted & GRADIENT else None
    kernels.launch(logits[:, :V], target, _columns(gradient, V), _loss_of(arguments), results)
    if by_row and wanted & TOKEN_ACCURACY:
        hits = (predicted == target) & (target >= 0) & (target != arguments.ignore_index)
        outputs.token_accuracy.copy_(hits)
    return outputs


def _columns(grad_logits: torch.Tensor | None, V: int) -> torch.Tensor | None:
    """The first V columns of a gradient, after the others have been filled with 0."""
    if grad_logits is not None and grad_logits.shape[1] > V:
        grad_logits[:, V:].zero_()
        return grad_logits[:, :V]
    return grad_logits


def _backward(
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    arguments: Arguments,
    grad_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient for what comes in, in `grad_logits`, which may be the logits, or in a new tensor."""
    logits, V = arguments.logits, arguments.valid_vocab
    if grad_logits is None:
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    incoming = kernels.Incoming(
        *(None if each is None else each.to(torch.float32) for each in (grad_loss, grad_lse, grad_entropy))
    )
    columns = logits[:, :V]
    kernels.launch(
        columns, arguments.target, _columns(grad_logits, V), _loss_of(arguments), kernels.Results(), incoming
    )
    return grad_logits


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    logits: torch.Tensor = arguments[0]
    reduction, wanted = arguments[11], arguments[13]
    B = logits.shape[0]

    def empty(is_wanted: int, *size: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return logits.new_empty(size if is_wanted else (0,), dtype=dtype)

    size = (B,) if REDUCTIONS[reduction] == "none" else ()
    return (
        empty(1, *size),
        empty(wanted & GRADIENT, *logits.shape, dtype=logits.dtype),
        empty(wanted & Z_LOSS, *size),
        empty(wanted & LSE, B),
        empty(wanted & TOKEN_ACCURACY, *size),
        empty(wanted & PREDICTED_TOKENS, B, dtype=torch.int64),
        empty(wanted & ENTROPY, B),
    )


def _fake_backward(*arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = arguments[3]
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_COUNT = len(Arguments._fields)


def _arguments_of(given: tuple[Any, ...], numbers: torch.Tensor | None) -> Arguments:
    arguments = Arguments(*given)
    return arguments if numbers is None else arguments._replace(**dict(zip(FLOATS, numbers.tolist(), strict=True)))


def _forward_op(*given: Any) -> tuple[torch.Tensor, ...]:
    wanted, numbers, _ = (*given[_COUNT:], None, None)[:3]  # the last two may be left out
    return tuple(_forward(_arguments_of(given[:_COUNT], numbers), wanted))


def _backward_op(grad_loss: Any, grad_lse: Any, grad_entropy: Any, *given: Any) -> torch.Tensor:
    numbers, _ = (*given[_COUNT:], None, None)[:2]
    return _backward(grad_loss, grad_lse, grad_entropy, _arguments_of(given[:_COUNT], numbers))


_implementations: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("cross_entropy_options", _forward_op, _fake_forward),
    ("cross_entropy_options_backward", _backward_op, _fake_backward),
)
for _name, _implementation, _fake in _implementations:
    library.impl(_name, _implementation, "CUDA")
    library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"greyhound::{_name}", _fake, lib=library)

_TENSORS = 5
"""The first arguments are tensors or None."""


def _keep(
    ctx: Any, arguments: tuple[Any, ...], wanted: int, outputs: Outputs, numbers: torch.Tensor | None = None
) -> None:
    """Save what the backward pass may want: the gradient, the logits where that alone may not do."""
    ctx.set_materialize_grads(False)
    ctx.wanted, ctx.constants = wanted, arguments[_TENSORS:_COUNT]
    ctx.has_gradient = bool(wanted & GRADIENT)
    keeps_logits = not ctx.has_gradient or wanted & (LSE | ENTROPY)
    tensors = arguments[:_TENSORS] if keeps_logits else (None,) * _TENSORS
    ctx.save_for_backward(outputs.grad_logits if ctx.has_gradient else None, numbers, *tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    outputs = Outputs(*output)
    wanted, numbers, _ = inputs[_COUNT:]
    constants = [outputs.grad_logits, outputs.z_loss, outputs.token_accuracy, outputs.predicted_tokens]
    constants += [] if wanted & LSE else [outputs.lse]
    constants += [] if wanted & ENTROPY else [outputs.entropy]
    ctx.mark_non_differentiable(*constants)
    _keep(ctx, inputs, wanted, outputs, numbers)


def _rule(
    ctx: Any,
    grad_loss: torch.Tensor | None,
    grad_logits: torch.Tensor | None,
    grad_z_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    grad_accuracy: torch.Tensor | None,
    grad_predicted: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    return _gradient(ctx, grad_loss, grad_lse, grad_entropy), *[None] * 15


def _gradient(
    ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> torch.Tensor | None:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return None
    kept, numbers, *tensors = ctx.saved_tensors
    with torch.no_grad():
        if ctx.has_gradient and grad_loss is not None and grad_lse is None and grad_entropy is None:
            gradient = torch.ops.greyhound.scale_gradient(kept, grad_loss, INTERFACE)
        else:
            gradient = torch.ops.greyhound.cross_entropy_options_backward(
                grad_loss, grad_lse, grad_entropy, *tensors, *ctx.constants, numbers, INTERFACE
            )
    return once_differentiable(gradient)


torch.library.register_autograd("greyhound::cross_entropy_options", _rule, setup_context=_setup_context, lib=library)


_FLAGS = (0, GRADIENT, Z_LOSS, LSE, TOKEN_ACCURACY, PREDICTED_TOKENS, ENTROPY)
"""Of the fields of `Outputs`."""


class _Eager(torch.autograd.Function):
    """The autograd rule of `greyhound::cross_entropy_options` without the dispatcher, and with less memory."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, arguments: Arguments, wanted: int, in_place: str, kept: list[torch.Tensor]
    ) -> tuple[Any, ...]:
        arguments = arguments._replace(logits=logits)
        buffer = logits.detach()
        outputs = _forward(arguments, wanted, buffer if in_place == "forward" else None)
        ctx.in_place = in_place
        if in_place == "forward":
            torch.autograd.graph.increment_version(logits)
            # Not saved as a tensor of the graph: what it was is gone, and is not wanted.
            ctx.kept, ctx.done = kept, False
            kept.append(buffer)
            ctx.set_materialize_grads(False)
        else:
            _keep(ctx, tuple(arguments), wanted, outputs)
        returned = tuple(
            output if flag == 0 or wanted & flag else None for output, flag in zip(outputs, _FLAGS, strict=True)
        )
        ctx.mark_non_differentiable(*(returned[i] for i in (2, 4, 5) if returned[i] is not None))
        return (returned[0], *returned[2:])

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        grad_loss, _, grad_lse, _, _, grad_entropy = incoming
        if grad_loss is None and grad_lse is None and grad_entropy is None:
            return None, None, None, None, None
        if ctx.in_place == "forward":
            return _overwritten_gradient(ctx, *incoming), None, None, None, None
        batched = any(each is not None and torch._C._functorch.is_legacy_batchedtensor(each) for each in incoming)
        if ctx.in_place == "backward" and not batched:
            _, _, logits, *tensors = ctx.saved_tensors
            buffer = logits.detach()
            arguments = Arguments(buffer, *tensors, *ctx.constants)
            with torch.no_grad():
                _backward(grad_loss, grad_lse, grad_entropy, arguments, buffer)
            torch.autograd.graph.increment_version(logits)
            return once_differentiable(buffer), None, None, None, None
        only_scales = ctx.has_gradient and grad_lse is None and grad_entropy is None
        if grad_loss is not None and only_scales and not batched and not wanted_again():
            kept = ctx.saved_tensors[0]
            plain.launch_scale(kept, kept, grad_loss)
            return kept, None, None, None, None
        return _gradient(ctx, grad_loss, grad_lse, grad_entropy), None, None, None, None


def _overwritten_gradient(ctx: Any, *incoming: torch.Tensor | None) -> torch.Tensor:
    """The gradient that the forward pass left where the logits were, which is given away once."""
    grad_loss, _, grad_lse, _, _, grad_entropy = incoming
    if grad_lse is not None or grad_entropy is not None:
        raise RuntimeError(
            "greyhound: with inplace=True the logits are gone, and with them the gradient of lse and entropy; "
            "detach these, or leave inplace out"
        )
    if grad_loss is None or ctx.done or wanted_again():
        raise RuntimeError(
            "greyhound: with inplace=True there is one backward pass, and no graph is kept for a second or for a "
            "second derivative"
        )
    if torch._C._functorch.is_legacy_batchedtensor(grad_loss):
        raise RuntimeError(
            "greyhound: with inplace=True backward expects one gradient, got a batch of them; leave inplace out"
        )
    ctx.done = True
    buffer: torch.Tensor = ctx.kept[0]
    plain.launch_scale(buffer, buffer, grad_loss)
    return buffer


def _refuse_other_consumers(logits: torch.Tensor, address: int, kept: list[torch.Tensor]) -> list[Any]:
    """Let the backward pass raise where another consumer of overwritten logits adds to their gradient.

    `kept` holds that gradient until then, so that nothing is added in its place; then it is emptied, since the loss may
    live on.

    To be called before the version of the logits is raised: that makes a view forget the node it comes from, which the
    loss keeps, and PyTorch 2.13 crashes on a hook of a view that has forgotten, until its node is asked for.
    """

    def check(gradient: torch.Tensor) -> None:
        if gradient.data_ptr() != address:
            raise RuntimeError(
                "greyhound: logits were overwritten (inplace=True), but their gradient is not that of the loss alone: "
                "something else used them too, and it would be wrong, or a hook changed it; leave inplace out"
            )

    def check_and_release(gradient: torch.Tensor) -> None:
        check(gradient)
        kept.clear()

    base = logits._base
    consumers = [logits]
    if base is not None and base.requires_grad and base.numel() == logits.numel():
        consumers.append(base)
    *others, last = [each for each in consumers if each.grad_fn is not None]
    return [*(each.register_hook(check) for each in others), last.register_hook(check_and_release)]


def cross_entropy(
    arguments: Arguments, wanted: int, consumed: torch.Tensor | None = None, inplace_backward: bool = False
) -> Outputs:
    """Return the outputs of checked arguments, with autograd where the logits want a gradient.

    Args:
        arguments: those of the operator.
        wanted: the flags above, but for the gradient, which is decided here.
        consumed: the caller's tensor that `arguments.logits` is a view of, where the forward pass may overwrite it.
        inplace_backward: whether the backward pass may overwrite the logits.
    """
    refuse_transforms(arguments.logits)
    logits = arguments.logits
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    reduced = REDUCTIONS[arguments.reduction] != "none"
    is_watched = watched(logits, arguments.target, arguments.weight, arguments.row_weight, arguments.normalizer)
    # fp16 as without options.
    one_pass = wants_gradient and reduced and logits.dtype is not torch.float16 and (is_watched or not inplace_backward)
    wanted |= GRADIENT if one_pass else 0
    if torch.compiler.is_compiling():
        from greyhound.ops import traced

        return Outputs(*traced.cross_entropy_options(*arguments, wanted))
    if is_watched:
        return Outputs(*torch.ops.greyhound.cross_entropy_options(*arguments, wanted, None, INTERFACE))
    if not wants_gradient:
        return _forward(arguments, wanted)
    in_place = ""
    if consumed is not None and one_pass:
        in_place = "forward"
    elif consumed is not None or inplace_backward:
        in_place = "backward"
    eager: Any = _Eager
    overwritten = consumed if in_place == "forward" else None
    kept: list[torch.Tensor] = []
    hooks = [] if overwritten is None else _refuse_other_consumers(overwritten, logits.data_ptr(), kept)
    try:
        loss, *others = eager.apply(logits, arguments, wanted, in_place, kept)
    except BaseException:
        for hook in hooks:
            hook.remove()
        raise
    if overwritten is not None:
        overwritten.grad_fn  # noqa: B018 - see above: the caller may want a hook too
    return Outputs(loss, loss, *others)
