"""Whether a provider's loss and gradient are those of the cross entropy, before it is timed.

For row i with label y: `loss_i = log sum_j exp(x_j) - x_y` and `dloss_i/dx_j = exp(x_j) / sum - [j = y]`, in float64
from the stored logits. The mean loss takes every row, in row blocks of bounded memory; gradients are compared on rows
spread evenly over the batch, the first and the last among them, with the target's column judged apart from the others
since its 1 would drown them. The tolerances separate a right result from a wrong one, not a good rounding from a
better: PyTorch's eager bf16 rounds log-probabilities near -12 to steps of 1/16, which is 3 % of a probability.
"""

from typing import NamedTuple

import torch

SAMPLED_ROWS = 64
SAMPLED_ELEMENTS = 1 << 25
"""Sampled rows hold no more elements than this (at least one row): 256 MiB in float64."""

BLOCK_ELEMENTS = 1 << 25
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Bound of the error's norm over the gradient's, off the target, by the gradient's dtype."""

TARGET_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Bound of the error in the target's column over the gradient's scale; rounding bf16 near 1 costs up to 0.2 %."""

LOSS_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Bound of the mean loss's error, relative where the loss exceeds 1, by the loss's own dtype."""


class Mismatch(Exception):
    """A result is not the reference's; the text says which part and by how much."""


class Outcome(NamedTuple):
    """What a provider computed, for the check."""

    mean_loss: torch.Tensor
    """0-d: the loss summed over the rows, divided by their number."""
    grad: torch.Tensor | None
    """(B, V), or None where the mode computes no gradient."""
    grad_of: str
    """"mean" or "sum": which loss `grad` is the gradient of."""


class Reference:
    """The float64 answer for one (logits, labels); every label lies in 0..V-1."""

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Compute the mean loss, and the gradient of the sum on the sampled rows.

        Args:
            logits: `(B, V)`, any float dtype, not kept.
            labels: `(B,)` int64.
        """
        self.rows, self.vocab = logits.shape
        total = 0.0
        step = max(1, BLOCK_ELEMENTS // self.vocab)
        for begin in range(0, self.rows, step):
            block = logits[begin : begin + step].double()
            target = block.gather(1, labels[begin : begin + step, None]).squeeze(1)
            total += float((block.logsumexp(dim=1) - target).sum())
        self.mean_loss = total / self.rows
        count = max(1, min(SAMPLED_ROWS, self.rows, SAMPLED_ELEMENTS // self.vocab))
        self.sampled = torch.linspace(0, self.rows - 1, count, device=logits.device, dtype=torch.float64).long()
        self.targets = labels[self.sampled, None]
        self.grad = torch.softmax(logits[self.sampled].double(), dim=1)
        self.grad.scatter_add_(1, self.targets, -torch.ones_like(self.targets, dtype=torch.float64))

    def verify(self, outcome: Outcome) -> None:
        """Raise `Mismatch` unless `outcome` is this reference's answer; NaN never passes."""
        got = float(outcome.mean_loss)
        error = abs(got - self.mean_loss) / max(abs(self.mean_loss), 1.0)
        if not error <= LOSS_TOLERANCE[outcome.mean_loss.dtype]:
            raise Mismatch(f"mean loss: expected {self.mean_loss:.8g}, got {got:.8g}")
        if outcome.grad is None:
            return
        if tuple(outcome.grad.shape) != (self.rows, self.vocab):
            raise Mismatch(f"gradient: expected shape {(self.rows, self.vocab)}, got {tuple(outcome.grad.shape)}")
        dtype = outcome.grad.dtype
        scale = 1.0 / self.rows if outcome.grad_of == "mean" else 1.0
        smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        want = self.grad * scale
        difference = outcome.grad[self.sampled].double() - want
        at_target = float(difference.gather(1, self.targets).abs().amax())
        if not at_target <= TARGET_TOLERANCE[dtype] * scale + smallest_step:
            raise Mismatch(f"gradient at the target: off by up to {at_target:.3g}, where the scale is {scale:.3g}")
        off_error = difference.scatter(1, self.targets, 0.0).norm(dim=1)
        off_norm = want.scatter(1, self.targets, 0.0).norm(dim=1)
        bound = GRADIENT_TOLERANCE[dtype] * off_norm + smallest_step * self.vocab**0.5
        right = off_error <= bound
        if not bool(right.all()):
            worst = int((~right).nonzero()[0])
            raise Mismatch(
                f"gradient of row {int(self.sampled[worst])} off the target: error norm {float(off_error[worst]):.3g}, "
                f"allowed {float(bound[worst]):.3g}"
            )
