"""The autograd rule of a loss that the caller's own function computes from a linear layer's logits, chunk by chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import linear as kernels
from greyhound.ops.cross_entropy import once_differentiable, refuse_transforms, wanted_again


class How(NamedTuple):
    """Checked arguments besides the tensors and the function."""

    dtype: torch.dtype
    """Of the products and the logits."""
    fp32_accumulation: bool
    chunk_size: int | None


LossAndGradient = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def check_scalar(loss: object) -> None:
    """Raise `TypeError` or `ValueError` for what is no 0-d tensor."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss function: expected a torch.Tensor, got {type(loss).__name__}")
    if loss.ndim != 0:
        raise ValueError(f"loss function: expected a scalar tensor, got shape {tuple(loss.shape)}")


def _forward(
    products: kernels.ChunkedHead,
    function: LossAndGradient,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> torch.Tensor:
    """Return the sum over the chunks, and leave their gradients with `products`."""
    total = torch.zeros((), dtype=torch.float32, device=products.inputs.device)
    for start, end in products.chunks():

        def part(given: Any, start: int = start, end: int = end) -> Any:
            is_by_row = isinstance(given, torch.Tensor) and given.ndim > 0 and given.shape[0] == products.rows
            return given[start:end] if is_by_row else given

        logits = products.logits(start, end)
        size = logits.shape
        returned = function(logits, *map(part, arguments), **{name: part(each) for name, each in keywords.items()})
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"loss function: expected (loss, grad_logits), got {type(returned).__name__}")
        loss, gradient = returned
        check_scalar(loss)
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(f"loss function: expected a torch.Tensor as gradient, got {type(gradient).__name__}")
        if gradient.shape != size:
            raise ValueError(f"loss function: expected a gradient of shape {tuple(size)}, got {tuple(gradient.shape)}")
        total += loss.detach()
        if any(products.wanted):
            products.add(start, end, gradient.detach().to(products.dtype))
        del logits, gradient, returned  # or the tile would outlive the products
    return total


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
        products = kernels.ChunkedHead(
            kernels.Head(inputs.detach(), weight.detach(), None, how.dtype),
            kernels.Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], False),
            fp32_accumulation=how.fp32_accumulation,
            chunk_size=how.chunk_size,
        )
        total = _forward(products, function, arguments, keywords)
        gradients = products.gradients()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradients.inputs, gradients.weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None, None, None
        compiling = torch.compiler.is_compiling()
        shared = compiling or wanted_again() or torch._C._functorch.is_legacy_batchedtensor(grad_loss)
        found: list[torch.Tensor | None] = []
        for gradient in ctx.saved_tensors:
            if gradient is not None and shared:
                with torch.no_grad():
                    gradient = (gradient * grad_loss.to(torch.float32)).to(gradient.dtype)
                gradient = gradient if compiling else once_differentiable(gradient)
            elif gradient is not None:  # the buffer is this graph's own
                plain.launch_scale(gradient, gradient, grad_loss)
            found.append(gradient)
        return *found, None, None, None, None


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
        arguments: passed on, tensors of N rows cut to the chunk's.
        keywords: likewise.
        how: the rest.
    """
    refuse_transforms(inputs)
    refuse_transforms(weight)
    total: torch.Tensor = _ChunkedLinearLoss.apply(inputs, weight, function, arguments, keywords, how)  # type: ignore[no-untyped-call]
    return total
