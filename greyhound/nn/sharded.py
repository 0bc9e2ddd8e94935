"""Losses of logits that are spread over the ranks of a process group: by their columns, by their rows, or both."""

import math
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from dsl_kernels.cross_entropy.spec import MAX_COLUMNS
from greyhound.kernels import linear as linear_kernels
from greyhound.kernels import options as kernels
from greyhound.kernels.cross_entropy import (
    check_arguments,
    check_columns,
    check_labels,
    check_numbers,
    refuse_tensors_without_memory,
)
from greyhound.kernels.shards import HEAD_MARK, shard_head
from greyhound.nn.arguments import (
    REDUCTIONS,
    check_accumulation,
    check_head,
    check_overwritten,
    check_reduction,
    checked_chunk_size,
    checked_floats,
    checked_normalizer,
    checked_row_weight,
    checked_target,
    products_dtype,
    rows_of,
)
from greyhound.ops import cross_entropy as plain_ops
from greyhound.ops import shards as ops

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Have compilers leave a function out: whether the ranks have met a shape is nothing to trace."""
    # As `torch.compiler.disable`, but that this imports the compiler when it is first called, as optimizers do.
    disabled: Any = _disable_dynamo(function)
    return disabled  # type: ignore[no-any-return]


_SAMPLE_ROWS, _SAMPLE_COLUMNS = 8, 64
"""Of the logits, spread over them, that two ranks are told apart by."""


class _Layout(NamedTuple):
    """Where a rank's columns lie among those of all, as the ranks have agreed."""

    start: int
    size: int
    """Columns of all ranks."""
    head: torch.Tensor
    heads: torch.Tensor
    """As in `ops.Sharded`, marked with `numbers`."""
    chunk: int
    """Rows of a chunk: the fewest that a rank would take."""
    numbers: tuple[Any, ...]
    """Of the options, that the heads have a mark of."""


_layouts: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Layout]]" = weakref.WeakKeyDictionary()


@_untraced
def vocab_parallel_cross_entropy(
    local_logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
    *,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    normalizer: int | float | torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """`greyhound.nn.functional.cross_entropy` of logits whose columns are spread over the ranks of a process group.

    Every rank calls it with its own columns and the same of everything else. No rank sees another's logits: each reads
    its own once, 16 bytes a row go around in one all-gather, and every rank computes the same loss from them, bit for
    bit. The backward pass reads the logits once more, writes their gradient, rounded once, and exchanges nothing. As
    without shards nothing waits for the GPU, so with NCCL a call can be captured in a CUDA graph, once a shape has
    been met.

    When a shape of `local_logits` is met for the first time the ranks tell one another their sizes and options, which
    waits for the GPU, and what does not fit raises on all of them. It is then known for as long as the group lives; so
    where the number of rows changes from step to step, pad it to few. A shape that a rank has met is not compared
    again: where ranks are at calls of other columns or options all the same, the loss is NaN, or the exchange fails or
    waits as the process group's do, as for a rank that is missing. Two heads on one group that are cut alike on some
    ranks only are told apart by `vocab_size`. Targets that differ from rank to rank are not seen. `torch.compile`
    breaks its graph here.

    Args:
        local_logits: `(..., V_local)` fp16, bf16 or fp32, this rank's columns: as many as it likes, even none. Columns
            that are padding are left out by a slice, `local_logits[..., :n]`.
        target: `(...)` int64 or int32 on the same device, the same on every rank: 0 to V - 1, V being the columns of
            all ranks, or `ignore_index`.
        group: the ranks; None: all. Their columns follow one another in the order of the ranks, or of `vocab_start`.
        ignore_index: as for `cross_entropy`, like all that follow but those named here.
        reduction: "mean", "sum" or "none".
        z_loss_multiplier: see there.
        vocab_start: the first column's place among those of all ranks; None: after the columns of the ranks before.
        vocab_size: columns of all ranks; None: as many as they have.
        label_smoothing: 0 to 1, over the columns of all ranks.
        softcap: see there.
        logit_scale: see there.
        normalizer: see there.
        row_weight: see there, the same on every rank.
        inplace: whether the backward pass may overwrite `local_logits`, as `inplace_backward` there.

    Returns:
        The loss, fp32, 0-d or of the target's shape; the same bits on every rank. Differentiable once, by this rank's
        columns.

    Raises:
        TypeError, NotImplementedError: as `cross_entropy`.
        ValueError: as `cross_entropy`; there is no process group, or this rank is not in it; and on every rank: rows
            or numbers that differ, columns that overlap or leave a gap, or logits that are the same on all ranks, as
            far as 512 of them tell, where `vocab_start` does not say that they are shards. The loss of whole logits
            would be off by log(ranks).
        IndexError: as `cross_entropy`, after the exchange; on a GPU such a row is NaN on every rank.

    Source: vocabulary-parallel cross entropy as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3), with
    one exchange instead of three.
    """
    check_reduction(reduction)
    local_logits, target = _plain("local_logits", local_logits), _plain("target", target)
    row_weight = None if row_weight is None else _plain("row_weight", row_weight)
    normalizer = _plain("normalizer", normalizer) if isinstance(normalizer, torch.Tensor) else normalizer
    shape = target.shape
    if local_logits.shape[:-1] != shape or local_logits.ndim < 1:
        expected = "(..., V_local)" if local_logits.ndim < 1 else tuple(local_logits.shape[:-1])
        raise ValueError(f"target: expected shape {expected}, that of local_logits without V, got {tuple(shape)}")
    rows, labels = rows_of(local_logits, target, ignore_index, False)
    # A rank may have no columns, which no kernel takes.
    some = rows if rows.shape[1] else rows.new_empty(len(rows), 1)
    names = {"labels_name": "target", "logits_name": "local_logits"}
    check_arguments(some, labels, z_loss_multiplier, ignore_index, **names)
    if rows.is_meta:
        raise ValueError("local_logits: expected a CUDA or CPU tensor, got device meta")
    _checked_place(vocab_start, vocab_size)
    plain_ops.refuse_transforms(local_logits, "local_logits")
    divided_by = checked_normalizer(normalizer, reduction, rows)
    floats = checked_floats(label_smoothing, softcap, logit_scale)
    weights = checked_row_weight(row_weight, shape, rows)
    if inplace:
        check_overwritten(local_logits, rows, reduction, False, name="inplace")
    group = _checked_group(group)
    numbers = (ignore_index, reduction, z_loss_multiplier, *floats)
    layout = _layout(group, rows, vocab_start, vocab_size, numbers, rows.shape[1])
    sharded = _sharded(group, layout, numbers, labels, divided_by, weights, inplace=inplace)
    result = ops.cross_entropy(rows, sharded).reshape(shape if reduction == "none" else ())
    # Not before the exchange, for which the others wait.
    check_labels(labels, layout.size, ignore_index, labels_name="target")
    return result


def _plain(name: str, tensor: object) -> torch.Tensor:
    """Return a tensor that has its values where it says, or raise `TypeError`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor; greyhound.nn.functional.cross_entropy takes one, or pass "
            "its to_local()"
        )
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    tensor = _waited(tensor)
    refuse_tensors_without_memory(**{name: tensor})
    return tensor


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of one of PyTorch's collectives when it has come."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor * 1 if tensor.requires_grad else tensor.wait()  # type: ignore[no-any-return]
    return tensor


def _checked_place(vocab_start: object, vocab_size: object) -> None:
    for name, value, least in (("vocab_start", vocab_start, 0), ("vocab_size", vocab_size, 1)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name}: expected None or an int, got {type(value).__name__}")
        if isinstance(value, int) and not least <= value <= MAX_COLUMNS:
            raise ValueError(f"{name}: expected {least} to {MAX_COLUMNS}, got {value}")


def _checked_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: expected a process group, got none; call torch.distributed.init_process_group first")
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"group: expected None or a torch.distributed.ProcessGroup, got {type(group).__name__}; a DeviceMesh gives "
            "one by get_group()"
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this rank is in, got one of other ranks")
    return group


# --- Who has which columns --------------------------------------------------------------------------------------


def _layout(
    group: Any,
    rows: torch.Tensor,
    vocab_start: int | None,
    vocab_size: int | None,
    numbers: tuple[Any, ...],
    columns: int,
    chunk: int = 0,
    also: tuple[Any, ...] = (),
) -> _Layout:
    """Return what the ranks have agreed on for this shape; they compare it when they meet it first.

    Args:
        group: the ranks.
        rows: as many rows as there are, of numbers that differ from rank to rank.
        vocab_start: as the caller says.
        vocab_size: likewise.
        numbers: ignore_index, reduction and the numbers that must be the same.
        columns: of this rank.
        chunk: rows of a chunk that this rank would take; not what a shape is known by, since others may take as many
            as before where this rank does not.
        also: what else it is known by.
    """
    known = _layouts.setdefault(group, {})
    key = (len(rows), columns, vocab_start, vocab_size, rows.device, *also)
    found = known.get(key)
    if found is None:
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "greyhound: the ranks compare a shape when they meet it first, which no CUDA graph can hold; call once "
                "before the capture"
            )
        told = _compared(group, rows, vocab_start, vocab_size, numbers, columns, chunk)
        starts = _agreed(told)
        mark = _mark(sum(each.columns for each in told), numbers)
        heads = [shard_head(each.rows, each.columns, start, mark) for each, start in zip(told, starts, strict=True)]
        rank = dist.get_rank(group)
        found = _Layout(
            starts[rank],
            sum(each.columns for each in told),
            torch.tensor(heads[rank], dtype=torch.int32, device=rows.device),
            torch.tensor(heads, dtype=torch.int32, device=rows.device),
            min(each.chunk for each in told),
            numbers,
        )
        is_told = vocab_start is not None or vocab_size is not None
        if is_told or len({(each.columns, each.print) for each in told}) > 1 or len(told) == 1:
            known[key] = found  # else they may be whole logits, which these values do not show
    return found


def _mark(size: int, numbers: tuple[Any, ...]) -> int:
    """Return an int32 of what must be alike on every rank."""
    return zlib.crc32(repr((size, *numbers)).encode()) & 0x7FFFFFFF


def _sharded(
    group: Any,
    layout: _Layout,
    numbers: tuple[Any, ...],
    labels: torch.Tensor,
    divided_by: tuple[float, torch.Tensor | None],
    row_weight: torch.Tensor | None,
    *,
    inplace: bool = False,
) -> ops.Sharded:
    """Return what a call gives its autograd rule: `numbers` as for `_layout`, `divided_by` of `checked_normalizer`."""
    ignore_index, reduction, z_loss_multiplier, smoothing, cap, scale = numbers
    divisor, normalizer = divided_by
    loss = kernels.Loss(
        ignore_index,
        float(z_loss_multiplier),
        smoothing,
        cap,
        scale,
        reduction == "mean",
        divisor,
        normalizer,
        None,
        row_weight,
        kernels.Shard(layout.start, layout.size),
    )
    head, heads = layout.head, layout.heads
    if numbers != layout.numbers:
        head, heads = head.clone(), heads.clone()
        head[HEAD_MARK], heads[:, HEAD_MARK] = (_mark(layout.size, numbers),) * 2
    return ops.Sharded(labels, loss, reduction == "none", head, heads, _gather(group), inplace)


class _Told(NamedTuple):
    """What a rank tells of a shape."""

    rows: int
    columns: int
    vocab_start: int
    """-1: not said."""
    vocab_size: int
    """-1: not said."""
    chunk: int
    print: int
    """Of some logits; 0: no two ranks could be told apart by them."""
    ignore_index: int
    reduction: int
    z_loss_multiplier: int
    label_smoothing: int
    softcap: int
    logit_scale: int


def _compared(
    group: Any,
    rows: torch.Tensor,
    vocab_start: int | None,
    vocab_size: int | None,
    numbers: tuple[Any, ...],
    columns: int,
    chunk: int,
) -> list[_Told]:
    """Return what every rank tells; waits for them."""
    spread = (max(1, size // most) for size, most in zip(rows.shape, (_SAMPLE_ROWS, _SAMPLE_COLUMNS), strict=True))
    row_step, column_step = spread
    sample = rows.detach()[::row_step, ::column_step][:_SAMPLE_ROWS, :_SAMPLE_COLUMNS]
    values = sample.to("cpu", torch.float32).flatten().tolist()
    tells = len(set(values)) > 1 and all(map(math.isfinite, values))
    fingerprint = zlib.crc32(struct.pack(f"{len(values)}f", *values)) if tells else 0
    ignore_index, reduction, *floats = numbers
    exact = [struct.unpack("q", struct.pack("d", number))[0] for number in floats]
    start, size = (-1 if each is None else each for each in (vocab_start, vocab_size))
    mine = [len(rows), columns, start, size, chunk, fingerprint, ignore_index, REDUCTIONS.index(reduction), *exact]
    told = torch.tensor([mine], dtype=torch.int64, device=rows.device)
    return [_Told(*rank) for rank in _gather(group)(told).tolist()]


def _agreed(ranks: list[_Told]) -> list[int]:
    """Return each rank's first column; raise the same `ValueError` on every rank where what they tell does not fit."""
    _all_alike("target", "as many rows on every rank", [each.rows for each in ranks])
    _all_alike("vocab_size", "the same on every rank", [each.vocab_size for each in ranks])
    for place, name in enumerate(_Told._fields[6:], 6):
        values: list[Any] = [each[place] for each in ranks]
        if name == "reduction":
            values = [REDUCTIONS[value] for value in values]
        elif place > 7:
            values = [struct.unpack("d", struct.pack("q", value))[0] for value in values]
        _all_alike(name, "the same on every rank", values)
    sizes, starts = [each.columns for each in ranks], [each.vocab_start for each in ranks]
    if any(start < 0 for start in starts):
        if not all(start < 0 for start in starts):
            raise ValueError(f"vocab_start: expected it on every rank or on none, got {starts} (-1: none)")
        if len(ranks) > 1 and ranks[0].print and len({(each.columns, each.print) for each in ranks}) == 1:
            raise ValueError(
                f"local_logits: expected the columns of each rank, got the same logits on all {len(ranks)}; pass a "
                "slice of them, or vocab_start if they are shards that happen to be alike"
            )
        starts = [sum(sizes[:each]) for each in range(len(sizes))]
    order = sorted(range(len(ranks)), key=lambda each: (starts[each], sizes[each]))
    end = 0
    for each in order:
        if starts[each] != end and sizes[each]:
            problem = "overlap" if starts[each] < end else "leave a gap"
            spans = ", ".join(f"{start}..{start + size - 1}" for start, size in zip(starts, sizes, strict=True))
            raise ValueError(f"vocab_start: expected columns that follow one another, got {spans}, which {problem}")
        end += sizes[each]
    if end < 1:
        raise ValueError("local_logits: expected at least one column on some rank, got none")
    check_columns("local_logits", "columns on all ranks together", end)
    if ranks[0].vocab_size not in (-1, end):
        raise ValueError(f"vocab_size: expected {end}, the columns of all ranks, got {ranks[0].vocab_size}")
    return starts


def _all_alike(name: str, expected: str, values: list[Any]) -> None:
    if any(value != values[0] and not (value != value and values[0] != values[0]) for value in values):
        raise ValueError(f"{name}: expected {expected}, got {values}")


def _gather(group: Any) -> ops.Gather:
    """Return the exchange of one tensor, rank after rank."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size(group)
        if ranks == 1 or tensor.numel() == 0:
            return tensor
        # gloo gathers tensors of the CPU alone.
        given = tensor.cpu() if tensor.is_cuda and "cuda:gloo" in dist.get_backend_config(group) else tensor
        everyone = torch.empty(ranks * given.shape[0], *given.shape[1:], dtype=given.dtype, device=given.device)
        _all_gather(everyone, given, group)
        return everyone.to(tensor.device)

    return gather


def _all_gather(out: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
    # Its name from PyTorch 2.13 on.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(out, tensor, group=group)


# --- The projection too -------------------------------------------------------------------------------------------


@_untraced
def vocab_parallel_linear_cross_entropy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_multiplier: float = 0.0,
    grad_weight_accum_dtype: str = "fp32",
    *,
    vocab_start: int | None = None,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    normalizer: int | float | torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`greyhound.nn.functional.chunked_linear_cross_entropy` of a weight whose rows are spread over a process group.

    Every rank calls it with its own rows of the weight (and of the bias) and the same of everything else. Each chunk of
    rows takes one all-gather of 16 bytes a row in the forward pass. The backward pass adds the ranks' gradients of the
    inputs up, in their dtype, in one all-reduce, and leaves each rank the gradient of its own rows of the weight.

    Args:
        inputs: `(..., H)`, the same on every rank.
        weight: `(V_local, H)`, this rank's rows, at least one.
        target: `(...)`, as for `vocab_parallel_cross_entropy`.
        group: as there.
        ignore_index: as there.
        reduction: as there.
        z_loss_multiplier: as there.
        grad_weight_accum_dtype: as for `chunked_linear_cross_entropy`.
        vocab_start: as for `vocab_parallel_cross_entropy`.
        bias: `(V_local,)`.
        chunk_size: as for `chunked_linear_cross_entropy`; where None, the smallest that a rank would choose.
        vocab_size: as for `vocab_parallel_cross_entropy`.
        label_smoothing: as for `vocab_parallel_cross_entropy`, like all that follow.
        softcap: see there.
        logit_scale: see there.
        normalizer: see there.
        row_weight: see there.

    Returns:
        The loss, as `vocab_parallel_cross_entropy`.

    Raises:
        TypeError, ValueError, NotImplementedError, IndexError: as both.
    """
    check_reduction(reduction)
    check_accumulation(grad_weight_accum_dtype)
    rows_of_chunk = checked_chunk_size(chunk_size)
    dtype = products_dtype(inputs, weight, bias)
    check_head(inputs, weight, bias)
    check_numbers(z_loss_multiplier, ignore_index)
    for name, each in (("inputs", inputs), ("weight", weight), ("bias", bias)):
        if each is not None:
            plain_ops.refuse_transforms(each, name)
    shape = inputs.shape[:-1]
    labels = checked_target(target, shape, inputs)
    x = inputs.reshape(-1, inputs.shape[-1])
    divided_by = checked_normalizer(normalizer, reduction, inputs)
    floats = checked_floats(label_smoothing, softcap, logit_scale)
    weights = checked_row_weight(row_weight, shape, inputs)
    _checked_place(vocab_start, vocab_size)
    group = _checked_group(group)
    if rows_of_chunk is None:
        # Not what some ranks may want alone, as a gradient of their weight.
        accumulates = grad_weight_accum_dtype == "fp32" and torch.is_grad_enabled()
        size = (x.device, *x.shape, len(weight), dtype, accumulates)
        rows_of_chunk = linear_kernels.default_chunk_rows(*size)
    # Two ranks with the same rows of the weight are told apart as those with the same logits.
    like = weight.detach()[:1].expand(max(len(x), 1), -1)[: len(x)]
    numbers = (ignore_index, reduction, z_loss_multiplier, *floats)
    also = (chunk_size, x.shape[1], dtype, grad_weight_accum_dtype, torch.is_grad_enabled())
    layout = _layout(group, like, vocab_start, vocab_size, numbers, len(weight), rows_of_chunk, also)
    sharded = _sharded(group, layout, numbers, labels, divided_by, weights)
    how = ops.Chunks(dtype, grad_weight_accum_dtype == "fp32", layout.chunk, _sum_over((group,)))
    result = ops.linear_cross_entropy(x, weight, bias, sharded, how).reshape(shape if reduction == "none" else ())
    check_labels(labels, layout.size, ignore_index, labels_name="target")
    return result


# --- Ranks with rows of their own -----------------------------------------------------------------------------------


@_untraced
def global_normalizer(
    target: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    *,
    averaged: bool = True,
) -> torch.Tensor:
    """What each rank divides by so that the step is that of one mean over all valid rows of all ranks.

    Pass it as `normalizer` to the loss of every micro-batch of the step. One all-reduce of a number; nothing waits for
    the GPU.

    Args:
        target: this rank's targets, of any shape; those of all micro-batches of the step, where there are several.
        group: the ranks that have rows of their own, the data-parallel ones; None: all.
        ignore_index: target of the rows that do not count.
        averaged: whether the ranks' gradients are averaged afterwards, as DistributedDataParallel and FSDP do, or
            added up.

    Returns:
        0-d fp32 on the device of the targets: the valid rows of all ranks, at least 1; over the ranks if `averaged`.

    Raises:
        TypeError: a target is no integer tensor.
        ValueError: no target; there is no process group, or this rank is not in it.
    """
    targets: list[Any] = list(target) if isinstance(target, list | tuple) else [target]
    if not targets:
        raise ValueError("target: expected at least one tensor, got none")
    for each in targets:
        _plain("target", each)
        if each.is_floating_point() or each.is_complex() or each.dtype is torch.bool:
            raise TypeError(f"target: expected an integer dtype, got {each.dtype}")
    group = _checked_group(group)
    count = torch.stack([(each != ignore_index).sum() for each in targets]).sum()
    _sum_over((group,))(count)
    ranks = dist.get_world_size(group) if averaged else 1
    return count.clamp(min=1).to(torch.float32) / ranks


def _sum_over(groups: Sequence[Any]) -> Callable[[torch.Tensor], None]:
    """Return what adds a tensor up over these groups, in place."""

    def add(tensor: torch.Tensor) -> None:
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(tensor, group=group)

    return add


# --- DTensors -----------------------------------------------------------------------------------------------------


@_untraced
def dtensor_cross_entropy(
    loss_of: Callable[..., torch.Tensor],
    logits: Any,
    target: Any,
    ignore_index: int,
    reduction: str,
    z_loss_multiplier: float,
    *,
    normalizer: Any,
    row_weight: Any,
    **options: Any,
) -> torch.Tensor:
    """Return the loss of logits that are a DTensor, a plain tensor.

    Args:
        loss_of: the loss of plain tensors.
        logits: `(..., V)`, each dimension of its mesh a shard of the vocabulary (one at most), a shard of the rows, or
            a replica.
        target: a DTensor on the same mesh, its shards the rows of `logits`; or a plain tensor, this rank's.
        ignore_index: as for `loss_of`.
        reduction: as there; "none" gives this rank's rows.
        z_loss_multiplier: as there.
        normalizer: as there.
        row_weight: like `target`.
        options: what both losses take, for each rank as it is.

    Raises:
        TypeError: the target is no tensor.
        ValueError: another placement, or tensors that do not lie as the logits do.
    """
    check_reduction(reduction)
    mesh, last = logits.device_mesh, logits.ndim - 1
    vocab, batch, expected = _placed(logits, last)
    local = _waited(logits.to_local())
    labels = _beside("target", target, mesh, expected, local.shape[:-1])
    if row_weight is not None:
        options["row_weight"] = _beside("row_weight", row_weight, mesh, expected, local.shape[:-1])
    add = _sum_over([mesh.get_group(dim) for dim in batch])
    if hasattr(normalizer, "full_tensor"):
        normalizer = normalizer.full_tensor()
    if batch and reduction == "mean" and normalizer is None:
        if labels.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"target: expected dtype int64 or int32, got {labels.dtype}")
        count = (labels != ignore_index).sum()
        add(count)
        normalizer = count.clamp(min=1).to(torch.float32)
    common = (ignore_index, reduction, z_loss_multiplier)
    loss: torch.Tensor
    if vocab is None:
        try:
            loss = loss_of(local, labels, *common, normalizer=normalizer, **options)
        except IndexError:
            if reduction != "none":  # the ranks of other rows wait for this one's sum
                add(torch.full((), torch.nan, device=local.device))
            raise
    else:
        group = mesh.get_group(vocab)
        loss = vocab_parallel_cross_entropy(
            local,
            labels,
            group,
            *common,
            vocab_size=logits.shape[last],
            normalizer=normalizer,
            **options,
        )
    return ops.summed(loss, add) if batch and reduction != "none" else loss


def _placed(logits: Any, last: int) -> tuple[int | None, list[int], tuple[Any, ...]]:
    """Return (mesh dimension of the vocabulary, those of the rows, placements of what has a number for each row)."""
    from torch.distributed.tensor import Replicate, Shard

    vocab: int | None = None
    batch: list[int] = []
    expected: list[Any] = []
    for dim, placement in enumerate(logits.placements):
        if type(placement) is Shard and placement.dim % logits.ndim == last and vocab is None:
            vocab = dim
            expected.append(Replicate())
        elif type(placement) is Shard and placement.dim % logits.ndim != last:
            batch.append(dim)
            expected.append(placement)
        elif placement.is_replicate():
            expected.append(placement)
        else:
            raise ValueError(
                "logits: expected a DTensor that is a shard of the vocabulary on at most one dimension of its mesh, and"
                f" of the rows or a replica on the others, got {tuple(logits.placements)}; redistribute() it"
            )
    return vocab, batch, tuple(expected)


def _beside(name: str, tensor: Any, mesh: Any, expected: tuple[Any, ...], shape: torch.Size) -> torch.Tensor:
    """Return this rank's part of what has a number for each row."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    local: Any = tensor
    if hasattr(tensor, "full_tensor"):
        given: Any = tensor
        if given.device_mesh != mesh or tuple(given.placements) != expected:
            raise ValueError(
                f"{name}: expected placements {expected} on the mesh of logits, got {tuple(given.placements)} on "
                f"{given.device_mesh}; redistribute() it"
            )
        local = _waited(given.to_local())
    if local.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, that of this rank's logits without V, got {tuple(local.shape)}"
        )
    result: torch.Tensor = local
    return result
