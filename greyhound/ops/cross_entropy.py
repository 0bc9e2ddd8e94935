"""The operators `greyhound::cross_entropy`, `::cross_entropy_loss`, `::cross_entropy_backward` and `::scale_gradient`,
and their autograd rules.

`cross_entropy` returns the loss together with its gradient, since one pass over the logits gives both. Its backward
multiplies that gradient by the incoming one, on the device, into a new buffer. In eager mode the dispatcher is left out
and the buffer, which is then the graph's own, is scaled in place, unless the graph is kept for a second backward.

fp16 cannot hold the mean's gradient before it is scaled: at 8192 rows and 128256 columns a typical entry is 1e-9, below
the smallest fp16 number, and the loss scale that would lift it comes only in backward. So fp16 takes
`cross_entropy_loss`, which keeps the logits, and its backward computes the gradient from them with the incoming one
applied before the only rounding: three passes over memory instead of two.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from dsl_kernels.cross_entropy.spec import sums_elements
from greyhound.kernels import cross_entropy as kernels

INTERFACE = 4
"""Passed with every call of an operator, and raised whenever what one gives changes: Inductor's cache on disk
knows an operator by its name and arguments only, and would run what it compiled for an earlier version."""

library = torch.library.Library("greyhound", "DEF")
library.define(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, bool mean, float z_loss_multiplier,"
    " Tensor? numbers=None, int interface=0) -> (Tensor loss, Tensor grad_logits)"
)
library.define(
    "cross_entropy_loss(Tensor logits, Tensor target, int ignore_index, bool mean, float z_loss_multiplier,"
    " Tensor? numbers=None, int interface=0) -> Tensor"
)
library.define(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, int ignore_index, bool mean,"
    " float z_loss_multiplier, Tensor? numbers=None, int interface=0) -> Tensor"
)
library.define("scale_gradient(Tensor grad_logits, Tensor grad_loss, int interface=0) -> Tensor")


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    numbers: torch.Tensor | None = None,
    interface: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels.check_labels(target, logits.shape[1], ignore_index, labels_name="target")
    if numbers is not None:
        z_loss_multiplier = numbers.item()
    loss, sums = _empty(logits), _empty(logits, sums_elements(logits.shape[0]))
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kernels.launch(logits, target, grad_logits, loss, sums, z_loss_multiplier, ignore_index, mean, mean)
    return loss, grad_logits


def _cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    numbers: torch.Tensor | None = None,
    interface: int = 0,
) -> torch.Tensor:
    kernels.check_labels(target, logits.shape[1], ignore_index, labels_name="target")
    if numbers is not None:
        z_loss_multiplier = numbers.item()
    loss, sums = _empty(logits), _empty(logits, sums_elements(logits.shape[0]))
    kernels.launch(logits, target, None, loss, sums, z_loss_multiplier, ignore_index, mean, False)
    return loss


def _cross_entropy_backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    z_loss_multiplier: float,
    numbers: torch.Tensor | None = None,
    interface: int = 0,
) -> torch.Tensor:
    if numbers is not None:
        z_loss_multiplier = numbers.item()
    sums = _empty(logits, sums_elements(logits.shape[0]))
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    incoming = grad_loss.to(torch.float32)
    kernels.launch(logits, target, grad_logits, None, sums, z_loss_multiplier, ignore_index, mean, mean, incoming)
    return grad_logits


def _empty(logits: torch.Tensor, *size: int) -> torch.Tensor:
    # The loss and the sums apart: the outputs of an operator may not share memory with anything.
    return torch.empty(size, dtype=torch.float32, device=logits.device)


def _scale_gradient(grad_logits: torch.Tensor, grad_loss: torch.Tensor, interface: int = 0) -> torch.Tensor:
    out = torch.empty_like(grad_logits)
    kernels.launch_scale(grad_logits, out, grad_loss)
    return out


def _fake_cross_entropy(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty((), dtype=torch.float32), gradient


def _fake_cross_entropy_loss(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _fake_cross_entropy_backward(grad_loss: torch.Tensor, logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_scale_gradient(grad_logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(grad_logits)


for _name, _implementation, _fake in (
    ("cross_entropy", _cross_entropy, _fake_cross_entropy),
    ("cross_entropy_loss", _cross_entropy_loss, _fake_cross_entropy_loss),
    ("cross_entropy_backward", _cross_entropy_backward, _fake_cross_entropy_backward),
    ("scale_gradient", _scale_gradient, _fake_scale_gradient),
):
    library.impl(_name, _implementation, "CUDA")
    library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"greyhound::{_name}", _fake, lib=library)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, grad_logits = output
    ctx.mark_non_differentiable(grad_logits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_logits)


def _backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    return _new_gradient(ctx, grad_loss), *[None] * 6


def _new_gradient(ctx: Any, grad_loss: torch.Tensor | None) -> torch.Tensor | None:
    if grad_loss is None:
        return None
    (grad_logits,) = ctx.saved_tensors
    with torch.no_grad():
        gradient = torch.ops.greyhound.scale_gradient(grad_logits, grad_loss, INTERFACE)
    return once_differentiable(gradient)


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, target, *ctx.options = inputs[:5]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, inputs[5] if len(inputs) > 5 else None)


def _backward_from_logits(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return _recomputed_gradient(ctx, grad_loss), *[None] * 6


def _recomputed_gradient(ctx: Any, grad_loss: torch.Tensor | None) -> torch.Tensor | None:
    if grad_loss is None:
        return None
    logits, target, numbers = ctx.saved_tensors
    arguments = (grad_loss, logits, target, *ctx.options, numbers, INTERFACE)
    with torch.no_grad():
        gradient = torch.ops.greyhound.cross_entropy_backward(*arguments)
    return once_differentiable(gradient)


def wanted_again() -> bool:
    """Return whether the graph of the running backward pass is kept or differentiated."""
    return torch._C._autograd._get_current_graph_task_keep_graph() or torch.is_grad_enabled()


def once_differentiable(gradient: torch.Tensor) -> torch.Tensor:
    """Make a second derivative an error, where a constant would be silently wrong."""
    if not torch.is_grad_enabled() or type(gradient) is not torch.Tensor:
        return gradient
    message = "greyhound: the gradient cannot be differentiated again"
    refusing: torch.Tensor = torch._C._functions.DelayedError(message, 1)(gradient.detach().requires_grad_())
    return refusing


torch.library.register_autograd("greyhound::cross_entropy", _backward, setup_context=_keep_gradient, lib=library)
torch.library.register_autograd(
    "greyhound::cross_entropy_loss", _backward_from_logits, setup_context=_keep_logits, lib=library
)


class _EagerCrossEntropy(torch.autograd.Function):
    """The autograd rule of `greyhound::cross_entropy` without the dispatcher, which costs more than a launch."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
    ) -> torch.Tensor:
        loss, grad_logits = _cross_entropy(logits, target, ignore_index, mean, z_loss_multiplier)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_logits)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        # The buffer is this graph's own. Where it is wanted again, or several gradients come in, it stays as it is.
        if grad_loss is None or wanted_again() or torch._C._functorch.is_legacy_batchedtensor(grad_loss):
            return _new_gradient(ctx, grad_loss), None, None, None, None
        (grad_logits,) = ctx.saved_tensors
        kernels.launch_scale(grad_logits, grad_logits, grad_loss)
        return grad_logits, None, None, None, None


class _EagerCrossEntropyLoss(torch.autograd.Function):
    """The autograd rule of `greyhound::cross_entropy_loss`, likewise."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
    ) -> torch.Tensor:
        loss = _cross_entropy_loss(logits, target, ignore_index, mean, z_loss_multiplier)
        _keep_logits(ctx, (logits, target, ignore_index, mean, z_loss_multiplier), loss)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        return _recomputed_gradient(ctx, grad_loss), None, None, None, None


def refuse_transforms(tensor: torch.Tensor, name: str = "logits") -> None:
    """Raise `NotImplementedError` under the transforms that would lose a tangent or a batch dimension."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            f"{name}: expected a tensor without a tangent, got a dual tensor; forward-mode AD is not supported"
        )
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            f"{name}: expected a call outside torch.func transforms, got one inside (grad, vmap, ...); they are not "
            "supported, torch.autograd.grad is"
        )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""A parameter of another class of tensors has that class."""


def watched(*tensors: torch.Tensor | None) -> bool:
    """Return whether someone watches who must see operators: a compiler, a tensor subclass, a dispatch mode."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float
) -> torch.Tensor:
    """Return the loss of checked arguments, with autograd where the logits want a gradient."""
    refuse_transforms(logits)
    arguments = (logits, target, ignore_index, mean, z_loss_multiplier)
    is_watched = watched(logits, target)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    keeps_gradient = wants_gradient and logits.dtype is not torch.float16
    loss: torch.Tensor
    if torch.compiler.is_compiling():
        from greyhound.ops import traced

        loss = traced.cross_entropy(*arguments, keeps_gradient)
    elif is_watched and keeps_gradient:
        loss = torch.ops.greyhound.cross_entropy(*arguments, None, INTERFACE)[0]
    elif is_watched:
        loss = torch.ops.greyhound.cross_entropy_loss(*arguments, None, INTERFACE)
    elif wants_gradient:
        eager: Any = _EagerCrossEntropy if keeps_gradient else _EagerCrossEntropyLoss
        loss = eager.apply(*arguments)
    else:
        loss = _cross_entropy_loss(*arguments)
    return loss
