"""Who computes the cross entropy: every provider behind one signature.

A provider is a function from the inputs and a mode to a `Prepared`, registered under its name. One that is a loss with
autograd is a few lines, and its package is imported inside them, so that a missing one fails its own rows only:

    @provider("mine", modes=("fwd", "fwd+bwd"))
    def _mine(inputs: Inputs, mode: str) -> Prepared:
        from mine import cross_entropy

        return autograd_loss(cross_entropy, inputs, mode)

Here stand the ceiling, Greyhound and PyTorch; other people's kernels, and the textbook one, stand in `bench.peers`,
which is imported to have them all.

Modes are those of `bench.results.MODES`. In `fwd+bwd` the gradient is asked for with `torch.autograd.grad`, which is
what `loss.backward()` does up to the point where a leaf would accumulate it; in training logits are no leaf.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.cases import Inputs
from bench.check import Outcome


@dataclass(frozen=True)
class Prepared:
    """One provider, ready to be called on its inputs."""

    run: Callable[[], object]
    """The timed call."""
    result: Callable[[], Outcome | None]
    """Calls `run` on fresh inputs and returns what it computed; None where `result` has judged it itself."""
    restore: Callable[[], object] | None = None
    """Makes the inputs logits again after `run` has overwritten them; None where it does not."""


Build = Callable[[Inputs, str], Prepared]


@dataclass(frozen=True)
class Provider:
    """A way to compute the cross entropy."""

    name: str
    modes: tuple[str, ...]
    """Those it has; others are left out of its rows."""
    build: Build
    buffers: int = 2
    """Tensors the size of the logits that it needs at most beside them, its copy of them included."""
    apart: bool = False
    """Whether it needs a process of its own (`bench.worker`), since its package has the name of another one's."""


class Unsupported(Exception):
    """The provider's own limits rule out these inputs; the text says which. Not a failure."""


PROVIDERS: dict[str, Provider] = {}


def provider(name: str, modes: tuple[str, ...], *, buffers: int = 2, apart: bool = False) -> Callable[[Build], Build]:
    """Register the decorated function under `name`; `Provider` says what the rest is."""

    def register(build: Build) -> Build:
        if name in PROVIDERS:
            raise ValueError(f"provider {name!r} exists already")
        PROVIDERS[name] = Provider(name, modes, build, buffers, apart)
        return build

    return register


def autograd_loss(
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: Inputs,
    mode: str,
    *,
    overwrites: bool = False,
) -> Prepared:
    """Return a mean loss with autograd in mode `fwd` or `fwd+bwd`.

    Args:
        loss_function: `(logits, labels)` to the 0-d mean loss.
        inputs: the logits and labels.
        mode: `fwd` runs it without recording a graph; `fwd+bwd` also asks for the gradient of the logits.
        overwrites: whether it changes the logits it is given.
    """
    logits = inputs.logits.clone() if overwrites else inputs.logits.detach()

    if mode == "fwd":

        def forward() -> Outcome:
            with torch.no_grad():
                return Outcome(loss_function(logits, inputs.labels), None, "mean")

        call = forward
    else:
        logits.requires_grad_()

        def forward_and_backward() -> Outcome:
            loss = loss_function(logits, inputs.labels)
            (grad,) = torch.autograd.grad(loss, logits)
            return Outcome(loss.detach(), grad, "mean")

        call = forward_and_backward
    prepared = Prepared(call, call)
    if overwrites:
        prepared = with_restored(prepared, logits, inputs)
    return prepared


def with_restored(prepared: Prepared, work: torch.Tensor, inputs: Inputs) -> Prepared:
    """Return `prepared` with `work`, the logits that it overwrites, copied from the inputs before each call."""

    def restore() -> None:
        work.detach().copy_(inputs.logits)

    def result() -> Outcome | None:
        restore()
        return prepared.result()

    return replace(prepared, restore=restore, result=result)


@provider("copy", modes=("raw",), buffers=1)
def _copy(inputs: Inputs, mode: str) -> Prepared:
    """The ceiling: PyTorch's device-to-device copy of the logits, one read and one write."""
    destination = torch.empty_like(inputs.logits)

    def run() -> None:
        destination.copy_(inputs.logits)

    def result() -> None:
        destination.fill_(float("nan"))
        run()
        if not torch.equal(destination, inputs.logits):
            raise RuntimeError("the copy differs from its source")

    return Prepared(run, result)


@provider("greyhound", modes=("raw", "fwd", "fwd+bwd"))
def _greyhound(inputs: Inputs, mode: str) -> Prepared:
    """raw: the helper, in place; otherwise the function with autograd."""
    if mode != "raw":
        from greyhound.nn.functional import cross_entropy

        return autograd_loss(cross_entropy, inputs, mode)
    from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel

    work = inputs.logits.clone()

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return cross_entropy_with_grad_kernel(work, inputs.labels)

    def result() -> Outcome:
        ce_sum, _, n_valid = run()
        return Outcome(ce_sum / n_valid, work, "sum")

    return with_restored(Prepared(run, result), work, inputs)


@provider("torch", modes=("fwd", "fwd+bwd"), buffers=4)
def _torch(inputs: Inputs, mode: str) -> Prepared:
    """Eager PyTorch on the logits as they are: a bf16 loss for bf16 logits, no upcast before it."""
    return autograd_loss(torch.nn.functional.cross_entropy, inputs, mode)


@provider("compile", modes=("fwd", "fwd+bwd"), buffers=4)
def _compile(inputs: Inputs, mode: str) -> Prepared:
    """The same call under torch.compile, compiled for each shape alone, which is how Inductor does best.

    The compiler is reset first: after a handful of shapes it would otherwise run the call eagerly, without a word. That
    compiles nothing twice, since with and without a gradient are two graphs anyway.
    """
    torch.compiler.reset()

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, labels)

    return autograd_loss(torch.compile(cross_entropy, fullgraph=True, dynamic=False), inputs, mode)
