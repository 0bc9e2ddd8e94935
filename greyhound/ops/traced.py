"""The calls of the operators for a compiler: imported while it traces, and taken into its graph as they are.

An operator's float is a constant of compiled code, so each value of it would compile again. Where the compiler has
made a float a symbol, as it does when the value changes, it goes into the graph as a tensor on the CPU instead, which
the operator reads without waiting for anything. A float that has not changed stays a constant: a tensor on the CPU
would keep the code out of a CUDA graph.
"""

from typing import Any

import torch

from greyhound.ops import linear, options
from greyhound.ops.cross_entropy import INTERFACE


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, z_loss_multiplier: float, keeps: bool
) -> torch.Tensor:
    """Return the loss without options; `keeps` says whether its gradient is kept for backward."""
    numbers = None
    if isinstance(z_loss_multiplier, torch.SymFloat):
        numbers, z_loss_multiplier = _as_tensor(z_loss_multiplier), 0.0
    given = (logits, target, ignore_index, mean, z_loss_multiplier, numbers, INTERFACE)
    operators = torch.ops.greyhound
    loss: torch.Tensor = operators.cross_entropy(*given)[0] if keeps else operators.cross_entropy_loss(*given)
    return loss


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def cross_entropy_options(*given: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the operator with options for `options.Arguments`, one by one, and what is wanted."""
    arguments, numbers = _without_symbols(options.Arguments(*given[:-1]), options.FLOATS)
    outputs: tuple[torch.Tensor, ...] = torch.ops.greyhound.cross_entropy_options(
        *arguments, given[-1], numbers, INTERFACE
    )
    return outputs


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def linear_cross_entropy(*given: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the operator for `linear.Arguments`, one by one, and what is wanted."""
    arguments, numbers = _without_symbols(linear.Arguments(*given[:-1]), linear.FLOATS)
    outputs: tuple[torch.Tensor, ...] = torch.ops.greyhound.linear_cross_entropy(
        *arguments, given[-1], numbers, INTERFACE
    )
    return outputs


def _without_symbols(arguments: Any, names: tuple[str, ...]) -> tuple[Any, torch.Tensor | None]:
    """Return the arguments, and the floats among them as a tensor where one is a symbol."""
    floats = [getattr(arguments, name) for name in names]
    if not any(isinstance(x, torch.SymFloat) for x in floats):
        return arguments, None
    numbers = torch.stack([_as_tensor(x) for x in floats])
    return arguments._replace(**dict.fromkeys(names, 0.0)), numbers


def _as_tensor(x: float) -> torch.Tensor:
    # A product, since that is what the compiler makes a tensor of a symbol for.
    return torch.ones((), dtype=torch.float64) * x
