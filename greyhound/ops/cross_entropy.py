"""The operators `greyhound::cross_entropy`, `::cross_entropy_loss` and `::scale_gradient`, and their autograd rules.

`cross_entropy` returns the loss together with its gradient, since one pass over the logits gives both. Its backward
multiplies that gradient by the incoming one, on the device, into a new buffer. In eager mode the dispatcher is left out
and the buffer, which is then the graph's own, is scaled in place, unless the graph is kept for a second backward.

fp16 cannot hold the mean's gradient: at 8192 rows and 128256 columns a typical entry is 1e-9, below the smallest fp16
number, and the loss scale that would lift it comes only in backward. So for fp16 the stored gradient is that of the sum
times `_STORED_SCALE`, and backward applies the rest.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from dsl_kernels.cross_entropy.spec import SUMS_HEAD, sums_elements
from greyhound.kernels import cross_entropy as kernels

_STORED_SCALE = {torch.float16: 128.0}
"""Factor of the gradient kept for backward. 128 puts a probability of 1/128256 into fp16's normal range and leaves room
for a z-loss factor of 511; for the other dtypes 1, with the mean's 1/n already applied."""

INTERFACE = 2
"""Passed with every call of an operator, and raised whenever the sizes of its outputs change: Inductor's cache on disk
knows an operator by its name and arguments only, and would run what it compiled for an earlier version."""

_library = torch.library.Library("greyhound", "DEF")
_library.define(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, bool mean, float z_loss_multiplier, int interface=0)"
    " -> (Tensor loss, Tensor totals, Tensor grad_logits)"
)
_library.define(
    "cross_entropy_loss(Tensor logits, Tensor target, int ignore_index, bool mean, float z_loss_multiplier,"
    " int interface=0) -> Tensor"
)
_library.define("scale_gradient(Tensor grad_logits, Tensor grad_loss, Tensor totals, bool mean) -> Tensor")


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernels.check_labels(target, logits.shape[1], ignore_index, labels_name="target")
    loss, sums = _empty_sums(logits)
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    stored_scale = _STORED_SCALE.get(logits.dtype)
    grad_by_mean = mean and stored_scale is None
    kernels.launch(
        logits,
        target,
        grad_logits,
        loss,
        sums,
        z_loss_multiplier,
        ignore_index,
        mean,
        grad_by_mean,
        stored_scale or 1.0,
    )
    return loss, sums, grad_logits


def _cross_entropy_operator(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    interface: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, sums, grad_logits = _cross_entropy(logits, target, ignore_index, mean, z_loss_multiplier)
    # Without the workspace behind them, which may hold anything.
    return loss, sums[:SUMS_HEAD], grad_logits


def _cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    interface: int = 0,
) -> torch.Tensor:
    kernels.check_labels(target, logits.shape[1], ignore_index, labels_name="target")
    loss, sums = _empty_sums(logits)
    kernels.launch(logits, target, None, loss, sums, z_loss_multiplier, ignore_index, mean, False, 1.0)
    return loss


def _empty_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Two allocations: the outputs of an operator may not share memory.
    size, device = sums_elements(logits.shape[0]), logits.device
    return torch.empty((), dtype=torch.float32, device=device), torch.empty(size, dtype=torch.float32, device=device)


def _scale(source: torch.Tensor, out: torch.Tensor, grad_loss: torch.Tensor, sums: torch.Tensor, mean: bool) -> None:
    stored_scale = _STORED_SCALE.get(source.dtype)
    kernels.launch_scale(
        source,
        out,
        grad_loss,
        sums,
        by_mean=mean and stored_scale is not None,
        constant=1.0 / stored_scale if stored_scale else 1.0,
    )


def _scale_gradient(grad_logits: torch.Tensor, grad_loss: torch.Tensor, sums: torch.Tensor, mean: bool) -> torch.Tensor:
    out = torch.empty_like(grad_logits)
    _scale(grad_logits, out, grad_loss, sums, mean)
    return out


def _fake_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    interface: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, totals = logits.new_empty((), dtype=torch.float32), logits.new_empty(SUMS_HEAD, dtype=torch.float32)
    return loss, totals, torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    interface: int = 0,
) -> torch.Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _fake_scale_gradient(
    grad_logits: torch.Tensor, grad_loss: torch.Tensor, sums: torch.Tensor, mean: bool
) -> torch.Tensor:
    return torch.empty_like(grad_logits)


for _name, _implementation, _fake in (
    ("cross_entropy", _cross_entropy_operator, _fake_cross_entropy),
    ("cross_entropy_loss", _cross_entropy_loss, _fake_cross_entropy_loss),
    ("scale_gradient", _scale_gradient, _fake_scale_gradient),
):
    _library.impl(_name, _implementation, "CUDA")
    _library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"greyhound::{_name}", _fake, lib=_library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, _, mean, *_ = inputs
    _, sums, grad_logits = output
    ctx.mark_non_differentiable(sums, grad_logits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_logits, sums)
    ctx.mean = mean


def _backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    return _new_gradient(ctx, grad_loss), *[None] * 5


def _new_gradient(ctx: Any, grad_loss: torch.Tensor | None) -> torch.Tensor | None:
    if grad_loss is None:
        return None
    grad_logits, sums = ctx.saved_tensors
    with torch.no_grad():
        gradient = torch.ops.greyhound.scale_gradient(grad_logits, grad_loss, sums, ctx.mean)
    return _once_differentiable(gradient)


def _backward_eager(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
    # The buffer is this graph's own. Where it is wanted again (the graph is kept or differentiated, or several
    # gradients come at once) it must stay as it is.
    wanted_again = torch._C._autograd._get_current_graph_task_keep_graph() or torch.is_grad_enabled()
    if grad_loss is None or wanted_again or torch._C._functorch.is_legacy_batchedtensor(grad_loss):
        return _new_gradient(ctx, grad_loss), None, None, None, None
    grad_logits, sums = ctx.saved_tensors
    _scale(grad_logits, grad_logits, grad_loss, sums, ctx.mean)
    return grad_logits, None, None, None, None


def _once_differentiable(gradient: torch.Tensor) -> torch.Tensor:
    """Make a second derivative an error, where a constant would be silently wrong."""
    if not torch.is_grad_enabled() or type(gradient) is not torch.Tensor:
        return gradient
    message = "greyhound::cross_entropy: the gradient cannot be differentiated again"
    refusing: torch.Tensor = torch._C._functions.DelayedError(message, 1)(gradient.detach().requires_grad_())
    return refusing


def _backward_without_gradient(ctx: Any, grad_loss: torch.Tensor) -> None:
    raise RuntimeError("greyhound::cross_entropy_loss keeps no gradient: call greyhound.nn.functional.cross_entropy")


torch.library.register_autograd("greyhound::cross_entropy", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("greyhound::cross_entropy_loss", _backward_without_gradient, lib=_library)


class _EagerCrossEntropy(torch.autograd.Function):
    """The autograd rule of `greyhound::cross_entropy` without the dispatcher, which costs more than a launch."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
    ) -> torch.Tensor:
        loss, sums, grad_logits = _cross_entropy(logits, target, ignore_index, mean, z_loss_multiplier)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_logits, sums)
        ctx.mean = mean
        return loss

    backward = staticmethod(_backward_eager)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
) -> torch.Tensor:
    """Return the loss of checked arguments, with autograd where the logits want a gradient.

    Where someone watches (a compiler, a tensor subclass, a dispatch mode) he sees the operators.
    """
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None:
        raise NotImplementedError("logits: expected a tensor without a tangent, forward-mode AD is not supported")
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError("greyhound: torch.func transforms (grad, vmap, ...) are not supported")
    arguments = (logits, target, ignore_index, mean, z_loss_multiplier)
    watched = torch.compiler.is_compiling() or type(logits) is not torch.Tensor or type(target) is not torch.Tensor
    watched = watched or torch._C._len_torch_dispatch_stack() > 0
    loss: torch.Tensor
    if torch.is_grad_enabled() and logits.requires_grad:
        eager: Any = _EagerCrossEntropy
        loss = torch.ops.greyhound.cross_entropy(*arguments, INTERFACE)[0] if watched else eager.apply(*arguments)
    else:
        loss = (
            torch.ops.greyhound.cross_entropy_loss(*arguments, INTERFACE)
            if watched
            else _cross_entropy_loss(*arguments)
        )
    return loss
