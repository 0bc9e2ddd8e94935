"""`torch.nn.Module` forms of the losses."""

import inspect
from typing import Any

import torch

from greyhound.nn import functional


class CrossEntropyLoss(torch.nn.Module):
    """`greyhound.nn.functional.cross_entropy` as a module, without trainable parameters.

    Args:
        ignore_index: target of the rows to leave out.
        reduction: "mean", "sum" or "none".
        z_loss_multiplier: factor of the squared log-sum-exp.
        weight: of the classes; kept as a buffer, which moves with the module and is part of its state.
        label_smoothing: as for the function, like all that follow.
        softcap: see there.
        logit_scale: see there.
        valid_vocab: see there.
        shift: see there.
        inplace: see there.
        inplace_backward: see there.
        return_z_loss: whether each call returns a `functional.CrossEntropyOutput` that has it, like all that follow.
        return_lse: see there.
        return_token_accuracy: see there.
        return_predicted_tokens: see there.
        return_entropy: see there.

    Raises:
        ValueError: `reduction` is not one of those above. The other arguments are checked in each call.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss_multiplier: float = 0.0,
        *,
        weight: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        valid_vocab: int | None = None,
        shift: bool = False,
        inplace: bool = False,
        inplace_backward: bool = False,
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        return_entropy: bool = False,
    ) -> None:
        super().__init__()
        functional.check_reduction(reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss_multiplier = z_loss_multiplier
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.valid_vocab = valid_vocab
        self.shift = shift
        self.inplace = inplace
        self.inplace_backward = inplace_backward
        self.return_z_loss = return_z_loss
        self.return_lse = return_lse
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_entropy = return_entropy

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        *,
        normalizer: int | float | torch.Tensor | None = None,
        row_weight: torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of `logits` `(..., V)` and `target` `(...)`, or a `functional.CrossEntropyOutput`.

        Args:
            logits: as for the function, like all that follow.
            target: see there.
            normalizer: what "mean" divides by instead of its own count.
            row_weight: `(...)`, of the rows.
        """
        return functional.cross_entropy(
            logits,
            target,
            self.ignore_index,
            self.reduction,
            self.z_loss_multiplier,
            weight=self.weight,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            normalizer=normalizer,
            row_weight=row_weight,
            valid_vocab=self.valid_vocab,
            shift=self.shift,
            inplace=self.inplace,
            inplace_backward=self.inplace_backward,
            return_z_loss=self.return_z_loss,
            return_lse=self.return_lse,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            return_entropy=self.return_entropy,
        )

    def extra_repr(self) -> str:
        """Return the arguments that are not the defaults, for `repr`."""
        parts = []
        for name, parameter in inspect.signature(CrossEntropyLoss).parameters.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                parts.append(f"{name}=tensor of shape {tuple(value.shape)}")
            elif value != parameter.default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)
