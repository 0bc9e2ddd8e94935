"""`torch.nn.Module` forms of the losses."""

import inspect
import math
from typing import Any

import torch

from greyhound.nn import functional
from greyhound.nn.arguments import check_accumulation, check_reduction, checked_chunk_size


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
        check_reduction(reduction)
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
        return _arguments_of(self, CrossEntropyLoss)


class LinearCrossEntropyLoss(torch.nn.Module):
    """A linear layer and `greyhound.nn.functional.chunked_linear_cross_entropy` of its outputs, as a module.

    The parameters are those of `torch.nn.Linear(in_features, num_classes, bias)`, by name, shape and initial values.

    Args:
        in_features: H, the size of each input row.
        num_classes: V, the size of each row of logits.
        bias: whether the layer has a bias.
        ignore_index: target of the rows to leave out.
        reduction: "mean", "sum" or "none".
        z_loss_multiplier: factor of the squared log-sum-exp.
        grad_weight_accum_dtype: "fp32" or "weight"; as for the function, like all that follow.
        chunk_size: see there.
        label_smoothing: see there.
        softcap: see there.
        logit_scale: see there.
        return_z_loss: whether each call returns a `functional.CrossEntropyOutput` that has it, like all that follow.
        return_lse: see there.
        return_token_accuracy: see there.
        return_predicted_tokens: see there.
        return_entropy: see there.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError, ValueError: `reduction`, `grad_weight_accum_dtype` or `chunk_size` is not one of those above. The
            other arguments are checked in each call.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss_multiplier: float = 0.0,
        grad_weight_accum_dtype: str = "fp32",
        *,
        chunk_size: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        return_entropy: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        check_accumulation(grad_weight_accum_dtype)
        self.in_features = in_features
        self.num_classes = num_classes
        self.weight = torch.nn.Parameter(torch.empty((num_classes, in_features), device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss_multiplier = z_loss_multiplier
        self.grad_weight_accum_dtype = grad_weight_accum_dtype
        self.chunk_size = checked_chunk_size(chunk_size)
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.return_z_loss = return_z_loss
        self.return_lse = return_lse
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_entropy = return_entropy
        self.reset_parameters()

    @classmethod
    def from_head(cls, head: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> "LinearCrossEntropyLoss":
        """Return a module that shares the parameters of a model's own layer, for example a tied embedding.

        The parameters are then those of both modules, and in the state of both.

        Args:
            head: its weight is `(V, H)`.
            **options: as for the class, but for sizes, `bias`, `device` and `dtype`, which are the head's.

        Raises:
            TypeError: `head` is no layer, or its weight is computed from other parameters in each call (pass that to
                the function instead), or an option is one of the head's.
        """
        weight: Any = getattr(head, "weight", None)
        if not isinstance(head, torch.nn.Module) or weight is None:
            raise TypeError(f"head: expected a layer with a weight, like torch.nn.Linear, got {type(head).__name__}")
        if not isinstance(weight, torch.nn.Parameter):
            raise TypeError(f"head: expected a weight that is a parameter, got {type(weight).__name__}")
        of_the_head = {"in_features", "num_classes", "bias", "device", "dtype"} & options.keys()
        if of_the_head:
            raise TypeError(
                f"{', '.join(sorted(of_the_head))}: expected none, since the head has its own, got one; leave it out"
            )
        V, H = weight.shape
        module = cls(H, V, device="meta", **options)
        module.weight = weight
        module.bias = getattr(head, "bias", None)
        return module

    def reset_parameters(self) -> None:
        """Draw the parameters as `torch.nn.Linear` does."""
        bound = 1.0 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        inputs: torch.Tensor,
        target: torch.Tensor,
        *,
        normalizer: int | float | torch.Tensor | None = None,
        row_weight: torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of `inputs` `(..., H)` and `target` `(...)`, or a `functional.CrossEntropyOutput`.

        Args:
            inputs: as for the function, like all that follow.
            target: see there.
            normalizer: what "mean" divides by instead of its own count.
            row_weight: `(...)`, of the rows.
        """
        return functional.chunked_linear_cross_entropy(
            inputs,
            self.weight,
            target,
            self.ignore_index,
            self.reduction,
            self.z_loss_multiplier,
            self.grad_weight_accum_dtype,
            bias=self.bias,
            chunk_size=self.chunk_size,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            normalizer=normalizer,
            row_weight=row_weight,
            return_z_loss=self.return_z_loss,
            return_lse=self.return_lse,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            return_entropy=self.return_entropy,
        )

    def extra_repr(self) -> str:
        """Return the sizes and the arguments that are not the defaults, for `repr`."""
        return _arguments_of(self, LinearCrossEntropyLoss)


def _arguments_of(module: torch.nn.Module, of: type) -> str:
    """Return the arguments of a class that a module has and that are not the defaults."""
    parts = []
    for name, parameter in inspect.signature(of).parameters.items():
        if name in ("device", "dtype"):
            continue
        value = getattr(module, name)
        if isinstance(parameter.default, bool) and isinstance(value, torch.Tensor):
            parts.append(f"{name}=True")
        elif isinstance(value, torch.Tensor):
            parts.append(f"{name}=tensor of shape {tuple(value.shape)}")
        elif value != parameter.default and not (value is None and parameter.default is False):
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)
