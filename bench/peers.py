"""The peers: other people's cross entropy kernels, and a textbook one in Triton. Importing this registers them all.

`raw` is what each offers for the loss and its gradient in one call that overwrites the logits, without autograd; `fwd`
and `fwd+bwd` go through its public loss. Each raw call ends with one number for the loss and the gradient in the
logits' place: Liger's the mean in the dtype of the logits, both Greyhounds' and the baseline's the fp32 sum; quack's
gives a loss per row, which PyTorch's sum then adds.
"""

import math
import sys
from pathlib import Path

import torch

from bench.cases import Inputs
from bench.check import Outcome
from bench.providers import PROVIDERS, Prepared, Unsupported, autograd_loss, provider, with_restored

__all__ = ["OLDER_FOLDER", "PROVIDERS", "find_older_greyhound"]

OLDER_FOLDER = "_older_greyhound"
"""Name of the folder on `sys.path` that holds the unpacked wheel of greyhound-kernels 0.1.0."""

COPY_BYTES = 16
"""Widest access of one thread."""


@provider("liger", modes=("raw", "fwd", "fwd+bwd"))
def _liger(inputs: Inputs, mode: str) -> Prepared:
    """Liger's Triton kernel; raw and fwd+bwd write the gradient over the logits, fwd writes none."""
    if mode == "raw":
        from liger_kernel.ops.cross_entropy import cross_entropy_forward

        return _liger_raw(cross_entropy_forward, inputs)
    from liger_kernel.transformers.functional import liger_cross_entropy

    return autograd_loss(liger_cross_entropy, inputs, mode, overwrites=mode == "fwd+bwd")


@provider("liger_cute", modes=("raw", "fwd", "fwd+bwd"))
def _liger_cute(inputs: Inputs, mode: str) -> Prepared:
    """Liger's CuTe DSL kernel, called by its own name: the switch between Liger's backends is one for the process."""
    step = COPY_BYTES // inputs.logits.element_size()
    if inputs.logits.shape[1] % step:
        raise Unsupported(f"it needs a vocabulary that is a multiple of {step} in {inputs.logits.dtype}")
    from liger_kernel.ops.cutedsl.ops import cross_entropy

    if mode == "raw":
        return _liger_raw(cross_entropy.cross_entropy_forward, inputs)
    function = cross_entropy.LigerCrossEntropyFunction

    def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # class weight, ignore_index, z-loss, smoothing, reduction, softcap, and the three further results
        results = function.apply(logits, labels, None, -100, 0.0, 0.0, "mean", None, False, False, False)
        loss: torch.Tensor = results[0]
        return loss

    return autograd_loss(loss_function, inputs, mode, overwrites=mode == "fwd+bwd")


def _liger_raw(cross_entropy_forward: object, inputs: Inputs) -> Prepared:
    """Both of Liger's kernels have this signature; they write a gradient where the logits are marked as wanting one.

    The mean, not the sum: they add the losses in the dtype of the logits, and fp16 ends at 65504.
    """
    assert callable(cross_entropy_forward)
    work = inputs.logits.clone().requires_grad_()

    def run() -> torch.Tensor:
        with torch.no_grad():
            # class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss
            results = cross_entropy_forward(work, inputs.labels, None, -100, 0.0, 0.0, "mean", None, False)
        loss: torch.Tensor = results[0]
        return loss

    def result() -> Outcome:
        return Outcome(run(), work.detach(), "mean")

    return with_restored(Prepared(run, result), work, inputs)


@provider("quack", modes=("raw", "fwd", "fwd+bwd"))
def _quack(inputs: Inputs, mode: str) -> Prepared:
    """The CuTe DSL kernels of quack, compiled for each vocabulary."""
    vocab, size = inputs.logits.shape[1], inputs.logits.element_size()
    if math.gcd(vocab, COPY_BYTES // size) * size < 4:
        raise Unsupported(
            "an odd vocabulary in a 16-bit dtype needs asynchronous copies of 2 bytes, which do not exist"
        )
    from quack.cross_entropy import cross_entropy, cross_entropy_fwd

    if mode != "raw":
        return autograd_loss(cross_entropy, inputs, mode)
    work = inputs.logits.clone()

    def run() -> torch.Tensor:
        row_losses, _ = cross_entropy_fwd(work, inputs.labels, return_dx=True, inplace_backward=True)
        loss: torch.Tensor = row_losses.sum()
        return loss

    def result() -> Outcome:
        return Outcome(run() / len(inputs.labels), work, "sum")

    return with_restored(Prepared(run, result), work, inputs)


@provider("greyhound_0_1", modes=("raw", "fwd", "fwd+bwd"), buffers=4, apart=True)
def _greyhound_0_1(inputs: Inputs, mode: str) -> Prepared:
    """The older public Greyhound, version 0.1.0, which compiles for each shape."""
    import greyhound

    if not str(getattr(greyhound, "VERSION", "")).startswith("0.1."):
        raise ImportError("the greyhound first on sys.path is not version 0.1")
    if mode != "raw":
        from greyhound.nn.functional import cross_entropy

        return autograd_loss(cross_entropy, inputs, mode)
    from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel

    work = inputs.logits.clone()

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return cross_entropy_with_grad_kernel(work, inputs.labels, 0.0, -100)

    def result() -> Outcome:
        ce_sum, _, n_valid = run()
        return Outcome(ce_sum / n_valid, work, "sum")

    return with_restored(Prepared(run, result), work, inputs)


@provider("triton", modes=("raw", "fwd", "fwd+bwd"))
def _triton(inputs: Inputs, mode: str) -> Prepared:
    """The textbook baseline of `bench.triton_baseline`."""
    from bench.triton_baseline import mean_loss, row_losses

    if mode != "raw":
        return autograd_loss(mean_loss, inputs, mode)
    work = inputs.logits.clone()

    def run() -> torch.Tensor:
        return row_losses(work, inputs.labels, work).sum()

    def result() -> Outcome:
        return Outcome(run() / len(work), work, "sum")

    return with_restored(Prepared(run, result), work, inputs)


def find_older_greyhound(folder: Path | None = None) -> Path | None:
    """Return the folder that holds the older greyhound's package: the one given, else the first on `sys.path`."""
    candidates = [folder] if folder else [Path(entry or ".") / OLDER_FOLDER for entry in sys.path]
    found = (path.resolve() for path in candidates if (path / "greyhound" / "__init__.py").exists())
    return next(found, None)
