"""Cross entropy and its gradient in one pass: the raw helper, and the launches that `greyhound.ops` shares.

Everything here works on values only: no autograd. Arguments are checked on the host from what the host knows (rank,
dtype, device, stride), before any launch; labels are judged on the device, so nothing here waits for the GPU.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import (
    CE_SUM,
    DTYPE_NAMES,
    MAX_COLUMNS,
    MAX_ROWS,
    N_VALID,
    VECTOR_BYTES,
    Z_SUM,
    sums_elements,
)
from greyhound import _artifacts
from greyhound.kernels import portable

_gpu_label_checks: bool | None = None
"""None: as the environment says, which is asked once, when the first labels on a GPU come."""

LOGITS_DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPE_NAMES}


class Totals(NamedTuple):
    """Sums over the rows that are not ignored, each a 0-d fp32 tensor on the logits' device."""

    ce_sum: torch.Tensor
    z_sum: torch.Tensor
    n_valid: torch.Tensor


def cross_entropy_with_grad_kernel(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss_multiplier: float = 0.0,
    ignore_index: int = -100,
) -> Totals:
    """Overwrite `logits` with the gradient of `ce_sum + z_loss_multiplier * z_sum` and return the sums.

    Row i contributes `ce_i = logsumexp(x_i) - x_i[label_i]` and `z_i = logsumexp(x_i) ** 2`, in fp32 whatever the dtype
    of the logits; the gradient is rounded to that dtype once. The mean loss is `ce_sum / n_valid.clamp(min=1.0)`. The
    same inputs give the same bits. No host synchronisation: it can be captured in a CUDA graph.

    Autograd does not see the call, but the version counter of `logits` is raised, so an earlier operation that saved
    `logits` for its own backward raises instead of using the overwritten values.

    Args:
        logits: `(B, V)` fp16, bf16 or fp32, last stride 1, any row stride of at least V, element-aligned; B from 0
            to 2^31 - 2^17 (fewer where a row takes several blocks), V from 1 to 2^31 - 1. CUDA or CPU. Overwritten.
        labels: `(B,)` int64 on the same device. A row whose label is `ignore_index` adds nothing and gets gradient 0.
            `ignore_index` drops rows, not a class: other rows keep that column in their softmax.
        z_loss_multiplier: factor of the squared log-sum-exp.
        ignore_index: label of the rows to ignore; any int64, inside or outside 0..V-1.

    Returns:
        `(ce_sum, z_sum, n_valid)`, 0-d fp32 tensors on the device of `logits`, views of one buffer of 16 bytes a row:
        keep a clone, or a number, where many calls' sums are kept.

    Raises:
        TypeError: a dtype or an argument type is not one of those above.
        ValueError: rank, shape, device, stride or size is not one of those above, or `logits` is a leaf that requires
            grad, or a view of one, while gradients are recorded.
        IndexError: before anything is written, on the CPU (on a GPU only under `check_gpu_labels`): a label outside
            0..V-1 that is not `ignore_index`. On a GPU such a row's loss and gradient are NaN otherwise, and `ce_sum`.

    Source: z-loss as in ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5), unscaled.
    """
    check_arguments(logits, labels, z_loss_multiplier, ignore_index, labels_name="labels")
    if type(logits) is not torch.Tensor or type(labels) is not torch.Tensor:
        refuse_tensors_without_memory(logits=logits, labels=labels)
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits: expected the last stride to be 1, got strides {logits.stride()}")
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise ValueError(
            f"logits: expected rows that do not overlap (row stride at least {logits.shape[1]}), "
            f"got strides {logits.stride()}"
        )
    if logits.requires_grad and torch.is_grad_enabled() and (logits.is_leaf or _is_view_of_leaf(logits)):
        raise ValueError(
            "logits: expected a tensor that may be overwritten, got a leaf that requires grad, or a view of one; "
            "call under torch.no_grad(), or use greyhound.nn.functional.cross_entropy"
        )
    check_labels(labels, logits.shape[1], ignore_index, labels_name="labels")
    sums = torch.empty(sums_elements(logits.shape[0]), dtype=torch.float32, device=logits.device)
    totals = Totals(sums[CE_SUM], sums[Z_SUM], sums[N_VALID])
    values = logits.detach() if logits.requires_grad else logits
    launch(values, labels, values, totals.ce_sum, sums, z_loss_multiplier, ignore_index, False, False)
    if not logits.is_inference():
        torch.autograd.graph.increment_version(logits)
    return totals


def check_arguments(
    logits: object,
    labels: object,
    z_loss_multiplier: object,
    ignore_index: object,
    *,
    labels_name: str,
    logits_name: str = "logits",
) -> None:
    """Raise `TypeError` or `ValueError` for what no implementation accepts; reads shapes and types only."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"{logits_name}: expected a torch.Tensor, got {type(logits).__name__}")
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"{labels_name}: expected a torch.Tensor, got {type(labels).__name__}")
    if type(logits) is not torch.Tensor or type(labels) is not torch.Tensor:
        for name, tensor in ((logits_name, logits), (labels_name, labels)):
            if hasattr(tensor, "full_tensor"):
                raise TypeError(f"{name}: expected a plain tensor, got a DTensor; pass its full_tensor()")
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"{logits_name}: expected dtype {', '.join(DTYPE_NAMES)}, got {logits.dtype}")
    if labels.dtype is not torch.int64:
        raise TypeError(f"{labels_name}: expected dtype int64, got {labels.dtype}")
    check_numbers(z_loss_multiplier, ignore_index)
    if logits.layout is not torch.strided or labels.layout is not torch.strided:
        raise TypeError(f"{logits_name}, {labels_name}: expected dense tensors, got {logits.layout}, {labels.layout}")
    shape = logits.shape
    if len(shape) != 2:
        hint = ", which flatten(0, -2) gives" if len(shape) > 2 else ""
        raise ValueError(f"{logits_name}: expected shape (B, V){hint}, got {tuple(shape)}")
    B, V = shape
    if labels.ndim != 1 or labels.shape[0] != B:
        raise ValueError(
            f"{labels_name}: expected shape ({B},), one per row of {logits_name}, got {tuple(labels.shape)}"
        )
    device = logits.device
    if labels.device != device:
        raise ValueError(f"{labels_name}: expected device {device}, that of {logits_name}, got {labels.device}")
    if device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"{logits_name}: expected a CUDA or CPU tensor, got device {device}")
    check_columns(logits_name, "columns", V)
    if B > MAX_ROWS:
        raise ValueError(f"{logits_name}: expected at most {MAX_ROWS} rows, got {B}")


def check_columns(name: str, what: str, V: int) -> None:
    """Raise `ValueError` for a vocabulary, of this many columns or rows of a tensor, that no kernel takes."""
    if not 1 <= V <= MAX_COLUMNS:
        raise ValueError(f"{name}: expected 1 to {MAX_COLUMNS} {what}, got {V}")


def check_numbers(z_loss_multiplier: object, ignore_index: object) -> None:
    """Raise `TypeError` or `ValueError` for what no implementation accepts."""
    if type(z_loss_multiplier) is not float and (
        isinstance(z_loss_multiplier, bool) or not isinstance(z_loss_multiplier, float | int | torch.SymFloat)
    ):
        raise TypeError(f"z_loss_multiplier: expected a float, got {type(z_loss_multiplier).__name__}")
    if type(ignore_index) is not int and not isinstance(ignore_index, torch.SymInt):
        raise TypeError(f"ignore_index: expected an int, got {type(ignore_index).__name__}")
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index: expected an int64, got {ignore_index}")


def check_gpu_labels(enabled: bool) -> None:
    """Switch, for the whole process, the check of labels that lie on a GPU.

    Until this is called it is on where the environment variable `GREYHOUND_CHECK_LABELS` is 1 when the first such
    labels come, else off. A debugging aid: a label outside 0..V-1 then raises `IndexError` there too, instead of making
    its row NaN, at the price of waiting for the GPU in every call, which a CUDA graph capture does not allow.
    """
    global _gpu_label_checks
    _gpu_label_checks = enabled


def gpu_labels_are_checked() -> bool:
    """Return whether they are; the environment is asked once."""
    global _gpu_label_checks
    if _gpu_label_checks is None:
        _gpu_label_checks = os.environ.get("GREYHOUND_CHECK_LABELS", "0") not in ("", "0")
    return _gpu_label_checks


def check_labels(labels: torch.Tensor, V: int, ignore_index: int, *, labels_name: str) -> None:
    """Raise `IndexError` for labels outside 0..V-1; those of a GPU are read only if `gpu_labels_are_checked`."""
    if (labels.is_cuda and not gpu_labels_are_checked()) or labels.is_meta:
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= V))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise IndexError(
            f"{labels_name}: expected 0 to {V - 1} or ignore_index={ignore_index}, got {int(labels[row])} in row {row}"
        )


def launch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    grad_logits: torch.Tensor | None,
    loss: torch.Tensor | None,
    sums: torch.Tensor,
    z_loss_multiplier: float,
    ignore_index: int,
    mean: bool,
    grad_by_mean: bool,
    incoming: torch.Tensor | None = None,
) -> None:
    """Run the fused op on checked arguments.

    Args:
        logits: `(B, V)`, last stride 1.
        labels: `(B,)` int64.
        grad_logits: `(B, V)`, last stride 1, dtype of `logits`, written in full: the gradient of the summed loss, over
            `max(n_valid, 1)` if `grad_by_mean`, times `incoming`. May be `logits`. None: no gradient.
        loss: 0-d fp32, written. May be a view of `sums`, whose elements are written after it. None with `incoming`.
        sums: `(sums_elements(B),)` fp32, written: ce_sum, z_sum, n_valid, the loss, then a workspace. With `incoming`
            it is a workspace.
        z_loss_multiplier: factor of the squared log-sum-exp.
        ignore_index: label of ignored rows.
        mean: whether the loss is divided by `max(n_valid, 1)`.
        grad_by_mean: whether the gradient is.
        incoming: 0-d fp32, the gradient of the loss; the only result is then `grad_logits`.
    """
    B, V = logits.shape
    if B == 0:
        if loss is not None:
            sums.zero_()
            loss.zero_()
        return
    device = logits.device
    compiled = _compiled_fused(device, logits.dtype, V, B, grad_logits is not None)
    if compiled is None:
        portable.cross_entropy(
            logits,
            labels,
            grad_logits,
            loss,
            sums,
            z_loss_multiplier=z_loss_multiplier,
            ignore_index=ignore_index,
            mean=mean,
            grad_by_mean=grad_by_mean,
            incoming=incoming,
        )
        return
    function, numbers = compiled
    on_device(
        device,
        function,
        logits,
        labels,
        logits if grad_logits is None else grad_logits,
        sums,
        # The launcher reads or writes one of these two and takes no None for the other.
        incoming if loss is None else loss,
        loss if incoming is None else incoming,
        ignore_index,
        z_loss_multiplier,
        int(mean),
        int(grad_by_mean),
        int(incoming is not None),
        *numbers,
    )


def launch_scale(source: torch.Tensor, out: torch.Tensor, grad_loss: torch.Tensor) -> None:
    """`out = source * grad_loss`, rounded once.

    Where `out` is `source` and the factor is 1, nothing is moved; that is decided on the device.

    Args:
        source: `(B, V)` or `(V,)` fp16, bf16 or fp32; contiguous and 16-byte aligned, or the portable code runs.
        out: like `source`, or `source` itself.
        grad_loss: 0-d tensor of any float dtype on the same device.
    """
    if source.numel() == 0:
        return
    if source.ndim == 1:
        launch_scale(source[None], out[None], grad_loss)
        return
    if grad_loss.dtype is not torch.float32:
        grad_loss = grad_loss.to(torch.float32)
    compiled = _compiled_scale(source.device, source.dtype, source.numel())
    # Buffers of `torch.empty` are both; what a tracer or a hook hands over might not be.
    flat = source.is_contiguous() and out.is_contiguous() and not (source.data_ptr() | out.data_ptr()) % VECTOR_BYTES
    if compiled is None or not flat:
        if source.device.type == "cpu" and out.data_ptr() == source.data_ptr() and grad_loss.item() == 1.0:
            return
        portable.scale(source, out, grad_loss)
        return
    function, launch_numbers = compiled
    on_device(source.device, function, source, out, grad_loss, launch_numbers.blocks)


def implementation(device: torch.device) -> tuple[str | None, str]:
    """Which code serves a device: `(arch, reason)`; arch is None where the portable PyTorch implementation runs."""
    if device.type != "cuda":
        return None, f"device {device.type} has no compiled kernel"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:  # whose capabilities are numbers of another kind
        return None, f"{name} is not a CUDA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    arch = _artifacts.arch_for_capability(major, minor)
    if arch is None:
        return None, f"{name} (compute capability {major}.{minor}) has no compiled kernel"
    return arch, f"{name} (compute capability {major}.{minor})"


@functools.lru_cache(maxsize=4096)
def _compiled_fused(
    device: torch.device, dtype: torch.dtype, V: int, B: int, with_grad: bool
) -> tuple[Callable[..., Any], tuple[int, ...]] | None:
    arch = arch_or_warn(device)
    if arch is None:
        return None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    spec, launch_numbers = plan.select_fused(arch, LOGITS_DTYPES[dtype], V, with_grad, B, multiprocessors)
    return _artifacts.load(arch, spec), launch_numbers.numbers(B, multiprocessors)


@functools.lru_cache(maxsize=4096)
def _compiled_scale(
    device: torch.device, dtype: torch.dtype, elements: int
) -> tuple[Callable[..., Any], plan.ScaleLaunch] | None:
    arch = arch_or_warn(device)
    if arch is None:
        return None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    spec, launch_numbers = plan.select_scale(LOGITS_DTYPES[dtype], elements, multiprocessors)
    return _artifacts.load(arch, spec), launch_numbers


@functools.lru_cache(maxsize=64)
def arch_or_warn(device: torch.device) -> str | None:
    """Return the arch whose kernels serve a device, or None; says once why a GPU has none."""
    arch, reason = implementation(device)
    if arch is None and device.type == "cuda":
        warnings.warn(f"greyhound: {reason}; the portable PyTorch implementation is used", stacklevel=2)
    return arch


def on_device(device: torch.device, function: Callable[..., Any], *arguments: object) -> None:
    """Call a launcher with the tensors' device current; it launches on that device's current stream."""
    # Without `torch.cuda.current_device`'s check that CUDA is initialised: the tensors are there.
    if device.index == torch._C._cuda_getDevice():
        function(*arguments)
    else:
        with torch.cuda.device(device):
            function(*arguments)


def refuse_tensors_without_memory(**tensors: torch.Tensor) -> None:
    """Raise `TypeError` for wrappers and fakes: the launch would take their null pointer for data."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
            raise TypeError(f"{name}: expected a plain tensor, got {type(tensor).__name__}")


def _is_view_of_leaf(tensor: torch.Tensor) -> bool:
    base = tensor._base
    return base is not None and base.is_leaf
