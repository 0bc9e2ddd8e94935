"""The autograd rule of a loss that the caller's own function computes from a linear layer's logits, chunk by chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import linear as kernels
from greyhound.ops.cross_entropy import INTERFACE, once_differentiable, refuse_transforms, wanted_again, watched


class How(NamedTuple):
    """Checked arguments besides the tensors and the function."""

    dtype: torch.dtype
    """Of the products and the logits."""
    fp32_accumulation: bool
    chunk_size: int | None
    leading: torch.Size
    """Dimensions that the rows had."""


LossAndGradient = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def check_scalar(loss: object) -> None:
    """Raise `TypeError` or `ValueError` for what is no 0-d tensor."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss function: expected to return a torch.Tensor, got {type(loss).__name__}")
    if loss.ndim != 0:
        raise ValueError(f"loss function: expected to return a scalar tensor, got shape {tuple(loss.shape)}")


class AutogradLoss:
    """A loss that autograd differentiates, as a function that returns it and its gradient."""

    def __init__(self, loss_fn: Callable[..., torch.Tensor]) -> None:
        """Keep the function, of logits (C, V) and whatever else."""
        self.loss_fn = loss_fn

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and its gradient by the logits, zeros where it does not depend on them."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self.loss_fn(leaf, *args, **kwargs)
            check_scalar(loss)
            if not loss.requires_grad:
                return loss, torch.zeros_like(logits)
            (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
        return loss.detach(), gradient


def _forward(
    products: kernels.ChunkedHead,
    function: LossAndGradient,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    leading: torch.Size,
) -> torch.Tensor:
    """Return the sum over the chunks, and leave their gradients with `products`."""
    total = torch.zeros((), dtype=torch.float32, device=products.inputs.device)

    def flat(given: Any) -> Any:
        has_them = isinstance(given, torch.Tensor) and len(leading) > 1 and given.shape[: len(leading)] == leading
        return given.reshape(products.rows, *given.shape[len(leading) :]) if has_them else given

    arguments, keywords = tuple(map(flat, arguments)), {name: flat(each) for name, each in keywords.items()}
    for start, end in products.chunks():

        def part(given: Any, start: int = start, end: int = end) -> Any:
            is_by_row = isinstance(given, torch.Tensor) and given.ndim > 0 and given.shape[0] == products.rows
            return given[start:end] if is_by_row else given

        logits = products.logits(start, end)
        cut, named = tuple(map(part, arguments)), {name: part(each) for name, each in keywords.items()}
        if isinstance(function, AutogradLoss) and not any(products.wanted):
            loss = function.loss_fn(logits, *cut, **named)
            check_scalar(loss)
        else:
            loss, gradient = _checked(function(logits, *cut, **named), logits.shape)
            if any(products.wanted):
                products.add(start, end, gradient.detach().to(products.dtype))
            del gradient
        total += loss.detach()
        del logits  # or the tile would outlive the products
    return total


def _checked(returned: Any, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a loss function returned; raise `TypeError` or `ValueError` for what is no loss and gradient."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"loss function: expected to return (loss, grad_logits), got {type(returned).__name__}; "
            "autograd_loss_and_logits_grad makes such a function of one that returns a loss"
        )
    loss, gradient = returned
    check_scalar(loss)
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"loss function: expected to return a torch.Tensor as gradient, got {type(gradient).__name__}")
    if gradient.shape != shape:
        raise ValueError(
            f"loss function: expected to return a gradient of shape {tuple(shape)}, got {tuple(gradient.shape)}"
        )
    return loss, gradient


def _products(inputs: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool], how: How) -> kernels.ChunkedHead:
    return kernels.ChunkedHead(
        kernels.Head(inputs.detach(), weight.detach(), None, how.dtype),
        kernels.Wanted(*wanted, False),
        fp32_accumulation=how.fp32_accumulation,
        chunk_size=how.chunk_size,
    )


class _ChunkedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        function: LossAndGradient,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        how: How,
    ) -> torch.Tensor:
        products = _products(inputs, weight, ctx.needs_input_grad[:2], how)
        total = _forward(products, function, arguments, keywords, how.leading)
        gradients = products.gradients()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradients.inputs, gradients.weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None, None, None
        saved = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(grad_loss)
        shared = batched or wanted_again() or watched(grad_loss, *saved)
        found: list[torch.Tensor | None] = []
        for gradient in saved:
            if gradient is not None and shared:
                with torch.no_grad():
                    gradient = torch.ops.greyhound.scale_gradient(gradient, grad_loss, INTERFACE)
                gradient = once_differentiable(gradient)
            elif gradient is not None:  # the buffer is this graph's own
                plain.launch_scale(gradient, gradient, grad_loss)
            found.append(gradient)
        return *found, None, None, None, None


def _traced(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    function: LossAndGradient,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    how: How,
) -> torch.Tensor:
    """The same for a compiler, in operators alone: the gradients of a function of its own, made in its forward pass,
    came out as 0 from the one in PyTorch 2.11, on CUDA.
    """
    with torch.no_grad():
        products = _products(inputs, weight, (inputs.requires_grad, weight.requires_grad), how)
        total = _forward(products, function, arguments, keywords, how.leading)
        gradients = products.gradients()
    # Nothing, with the gradients that were made.
    for tensor, gradient in ((inputs, gradients.inputs), (weight, gradients.weight)):
        if gradient is not None:
            product = (tensor.to(torch.float32) * gradient.to(torch.float32)).sum()
            total = total + (product - product.detach())
    return total


def chunked_linear_loss(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    function: LossAndGradient,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    how: How,
) -> torch.Tensor:
    """Return the sum over the chunks of checked arguments, with autograd where a tensor wants a gradient.

    Args:
        inputs: (N, H).
        weight: (V, H).
        function: returns (loss, gradient of the logits) for the logits of a chunk and what follows.
        arguments: passed on, tensors of N rows, or of the leading dimensions, cut to the chunk's.
        keywords: likewise.
        how: the rest.
    """
    refuse_transforms(inputs, "inputs")
    refuse_transforms(weight, "weight")
    if not torch.is_grad_enabled() or not (inputs.requires_grad or weight.requires_grad):
        with torch.no_grad():
            return _forward(_products(inputs, weight, (False, False), how), function, arguments, keywords, how.leading)
    if torch.compiler.is_compiling():
        return _traced(inputs, weight, function, arguments, keywords, how)
    total: torch.Tensor = _ChunkedLinearLoss.apply(inputs, weight, function, arguments, keywords, how)  # type: ignore[no-untyped-call]
    return total
