"""`torch.nn.Module` forms of the losses."""

import torch

from greyhound.nn import functional


class CrossEntropyLoss(torch.nn.Module):
    """`greyhound.nn.functional.cross_entropy` as a module, without trainable parameters.

    Args:
        ignore_index: target of the rows to leave out.
        reduction: "mean" or "sum".
        z_loss_multiplier: factor of the squared log-sum-exp.

    Raises:
        ValueError: `reduction` is not one of those above. The other arguments are checked in each call.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", z_loss_multiplier: float = 0.0) -> None:
        super().__init__()
        functional.check_reduction(reduction)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss_multiplier = z_loss_multiplier

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the 0-d fp32 loss of `logits` `(B, V)` and `target` `(B,)`."""
        return functional.cross_entropy(
            logits, target, self.ignore_index, self.reduction, z_loss_multiplier=self.z_loss_multiplier
        )

    def extra_repr(self) -> str:
        """Return the parameters for `repr`."""
        factors = f"z_loss_multiplier={self.z_loss_multiplier}"
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, {factors}"
