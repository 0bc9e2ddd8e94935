"""The autograd rule of a loss whose logits are shards of the vocabulary, one on each rank of a process group."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from greyhound.kernels import cross_entropy as plain
from greyhound.kernels import linear, shards
from greyhound.kernels import options as kernels
from greyhound.ops.cross_entropy import once_differentiable, wanted_again

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Returns what every rank gave, `(ranks * B, n)`, rank after rank, for what this one gives, `(B, n)`."""


class Sharded(NamedTuple):
    """Checked arguments of `cross_entropy`."""

    labels: torch.Tensor
    """(B,) int64, counted from the first column of all shards."""
    loss: kernels.Loss
    """With this rank's shard."""
    by_row: bool
    """Whether the loss is one of each row."""
    head: torch.Tensor
    """(SHARD_SUMS,) int32 on the device of the logits, of this rank's shard."""
    heads: torch.Tensor
    """(ranks, SHARD_SUMS)."""
    gather: Gather
    inplace: bool
    """Whether the backward pass may overwrite the logits."""


class _Sharded(torch.autograd.Function):
    """One exchange in the forward pass, none in the backward pass, which keeps the logits and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, sharded: Sharded) -> torch.Tensor:
        labels, loss = sharded.labels, sharded.loss
        told = sharded.gather(shards.shard_sums(logits, labels, loss, sharded.head))
        output = torch.empty(len(labels) if sharded.by_row else (), dtype=torch.float32, device=logits.device)
        results = kernels.Results(row_loss=output) if sharded.by_row else kernels.Results(loss=output)
        row_sums, n_valid = shards.combine(told, sharded.heads, labels, loss, results)
        counted = loss.mean and not loss.divisor and loss.normalizer is None
        ctx.sharded = sharded
        normalizer = n_valid.clamp(min=1.0) if counted else loss.normalizer
        ctx.save_for_backward(logits, row_sums, labels, normalizer, loss.row_weight)
        return output

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        logits, row_sums, labels, normalizer, row_weight = ctx.saved_tensors
        sharded: Sharded = ctx.sharded
        loss = sharded.loss._replace(normalizer=normalizer, row_weight=row_weight)
        overwrites = sharded.inplace and not wanted_again()
        out = logits.detach() if overwrites else torch.empty_like(logits, memory_format=torch.contiguous_format)
        with torch.no_grad():
            shards.shard_gradient(logits.detach(), labels, out, loss, grad_loss.to(torch.float32), row_sums)
        if overwrites:
            torch.autograd.graph.increment_version(logits)
        return once_differentiable(out), None


def cross_entropy(logits: torch.Tensor, sharded: Sharded) -> torch.Tensor:
    """Return the loss, `()` or `(B,)` fp32, of this rank's logits `(B, columns of the shard)` and those of the others.

    The same on every rank, bit for bit.
    """
    function: Any = _Sharded
    result: torch.Tensor = function.apply(logits, sharded)
    return result


class Chunks(NamedTuple):
    """How a linear layer's products are made."""

    dtype: torch.dtype
    """Of the products and the logits."""
    fp32_accumulation: bool
    size: int
    """Rows of a chunk."""
    add: Callable[[torch.Tensor], None]
    """Adds a tensor up over the ranks, in place."""


class _ShardedLinear(torch.autograd.Function):
    """One exchange for each chunk in the forward pass, and in the backward pass one of the inputs' gradient.

    As without shards the gradients of a sum or a mean are made in the forward pass; those of the losses of rows, and
    those of fp16, in the backward pass, from logits made again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sharded: Sharded,
        how: Chunks,
        is_recorded: bool,
    ) -> torch.Tensor:
        head, loss, labels = linear.Head(inputs, weight, bias, how.dtype), sharded.loss, sharded.labels
        wanted = linear.Wanted(*(is_recorded and needed for needed in ctx.needs_input_grad[:3]))
        dtypes = {how.dtype, *(each.dtype for each in (inputs, weight, bias) if each is not None)}
        in_one_pass = any(wanted) and not sharded.by_row and torch.float16 not in dtypes
        now = wanted if in_one_pass else linear.Wanted(False, False, False)
        products = _products(head, now, how)
        loss = linear.with_normalizer(loss, labels)
        output = torch.empty(len(labels), dtype=torch.float32, device=inputs.device)
        row_sums = torch.empty(len(labels), 2, dtype=torch.float32, device=inputs.device)
        one = torch.ones((), dtype=torch.float32, device=inputs.device)
        chunks = products.chunks()
        losses = torch.zeros(len(chunks), dtype=torch.float32, device=inputs.device)
        of_size: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, (start, end) in enumerate(chunks):
            part, of_part = labels[start:end], linear.rows_of(loss, start, end)
            logits = products.logits(start, end)
            if len(part) not in of_size:  # all chunks but the last have one
                mine, heads = sharded.head.clone(), sharded.heads.clone()
                mine[shards.HEAD_ROWS], heads[:, shards.HEAD_ROWS] = len(part), len(part)
                of_size[len(part)] = mine, heads
            mine, heads = of_size[len(part)]
            told = sharded.gather(shards.shard_sums(logits, part, of_part, mine))
            results = kernels.Results(row_loss=output[start:end])
            if not sharded.by_row:
                results = kernels.Results(loss=losses[number])
            row_sums[start:end], _ = shards.combine(told, heads, part, of_part, results)
            if in_one_pass:
                shards.shard_gradient(logits, part, logits, of_part, one, row_sums[start:end])
                products.add(start, end, logits)
            del logits  # or the tile would outlive the products
        made = products.gradients() if in_one_pass else (None, None, None)
        ctx.sharded, ctx.how, ctx.wanted, ctx.in_one_pass = sharded, how, wanted, in_one_pass
        kept = (None,) * 5 if in_one_pass else (inputs, weight, bias, row_sums, loss.normalizer)
        ctx.save_for_backward(*made, *kept, labels, loss.row_weight)
        return output if sharded.by_row else losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *made, inputs, weight, bias, row_sums, normalizer, labels, row_weight = ctx.saved_tensors
        sharded, how = ctx.sharded, ctx.how
        grad_loss = grad_loss.to(torch.float32)
        found: list[torch.Tensor | None]
        with torch.no_grad():
            if ctx.in_one_pass:
                keeps = wanted_again()
                found = [None if each is None else torch.empty_like(each) if keeps else each for each in made]
                for source, out in zip(made, found, strict=True):
                    if source is not None and out is not None:
                        plain.launch_scale(source, out, grad_loss)
            else:
                loss = sharded.loss._replace(normalizer=normalizer, row_weight=row_weight)
                products = _products(linear.Head(inputs, weight, bias, how.dtype), ctx.wanted, how)
                for start, end in products.chunks():
                    part, of_part = labels[start:end], linear.rows_of(loss, start, end)
                    came = grad_loss[start:end] if grad_loss.ndim else grad_loss
                    logits = products.logits(start, end)
                    shards.shard_gradient(logits, part, logits, of_part, came, row_sums[start:end])
                    products.add(start, end, logits)
                    del logits
                found = list(products.gradients())
            if found[0] is not None:
                how.add(found[0])
        return *(None if each is None else once_differentiable(each) for each in found), None, None, None


def _products(head: linear.Head, wanted: linear.Wanted, how: Chunks) -> linear.ChunkedHead:
    bias = None if head.bias is None else head.bias.detach()
    detached = linear.Head(head.inputs.detach(), head.weight.detach(), bias, head.dtype)
    return linear.ChunkedHead(detached, wanted, fp32_accumulation=how.fp32_accumulation, chunk_size=how.size)


def linear_cross_entropy(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sharded: Sharded, how: Chunks
) -> torch.Tensor:
    """Return the loss of a linear layer of which this rank has some columns, as `cross_entropy`."""
    function: Any = _ShardedLinear
    result: torch.Tensor = function.apply(inputs, weight, bias, sharded, how, torch.is_grad_enabled())
    return result


class _Summed(torch.autograd.Function):
    """The sum over ranks, each of which keeps the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, add: Callable[[torch.Tensor], None]) -> torch.Tensor:
        total = loss.clone()
        add(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_loss, None


def summed(loss: torch.Tensor, add: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a loss added up over ranks by `add`."""
    function: Any = _Summed
    result: torch.Tensor = function.apply(loss, add)
    return result
