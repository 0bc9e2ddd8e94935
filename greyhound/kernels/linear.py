"""A linear layer's products chunk by chunk, and cross entropy between them: values only, no autograd.

A chunk of rows goes through three products: its logits, from them turned into their gradient the inputs' gradient, and
a term of the weight's. One buffer, the tile, holds the logits of one chunk after another. The products are cuBLAS's
(PyTorch's on the CPU); what they add up is added by the products themselves.

Measured at 8192 x 4096 x 128256 bf16 on an H200, 2026-11-30, in shares of the speed of the three products alone over
all rows: one chunk 0.97, two 0.89, eight 0.83, added up in fp32; in bf16 eight chunks 0.91, two 0.94. The losses take 3
percent of the time. Moved to a stream of their own, beside the products of other rows, they gain nothing (0.94 to 0.97
for one chunk in parts, 0.86 to 0.95 for several): the products leave no registers or shared memory for other blocks.
Nor do the two gradients' products side by side (0.94).

A vocabulary is padded to a multiple of 16 bytes, the weight in a copy: at 32768 x 1024 x 50257 bf16 the three products
take 14.5 ms over 50264 columns, 67.3 over 50257 in rows of 50264, 81.8 without any padding.
"""

import functools
from typing import NamedTuple

import torch

from dsl_kernels.cross_entropy.spec import VECTOR_BYTES
from greyhound.kernels import options as kernels

TILE_BYTES = 1 << 30
"""The tile may always be this large: 16384 x 2048 x 32000 then is one chunk."""

SMALL_TILE_BYTES = 256 << 20
"""... this large where the caller asks for little memory, or no gradient of the weight is wanted."""

LEAST_ROWS = 1024
"""However wide, the tile may have this many rows: with fewer the products get slow."""

FREE_SHARE = 0.5
"""Of the device's free memory the tile takes at most this share, ..."""

ROW_MULTIPLE = 128
"""... but for this many rows, a tile of the products' kernels. Chunks are multiples of it, where there are several."""


class Head(NamedTuple):
    """Checked arguments of a linear layer."""

    inputs: torch.Tensor
    """(N, H), any strides."""
    weight: torch.Tensor
    """(V, H), any strides."""
    bias: torch.Tensor | None
    """(V,)."""
    dtype: torch.dtype
    """Of the products and the logits; fp16, bf16 or fp32."""


class HeadGradients(NamedTuple):
    """None for what is not wanted; each in the dtype of its tensor, contiguous."""

    inputs: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Wanted(NamedTuple):
    """Which gradients are."""

    inputs: bool
    weight: bool
    bias: bool


def chunk_rows(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype, *, generous: bool, free_bytes: int | None
) -> int:
    """Return how many rows a chunk has where the caller does not say; 1 at least.

    The fewer chunks the better: each adds a term to the weight's gradient, which reads and writes all of it. A weight's
    gradient that is made of several chunks in fp32 takes an fp32 accumulator of (V, H). A tile may be as large as that,
    and one of all rows, which does without, as large as the accumulator and the tile together.

    Args:
        rows: N.
        hidden: H.
        vocab: V.
        dtype: of the logits.
        generous: whether there would be such an accumulator.
        free_bytes: memory that the device has left; None: not known.
    """
    accumulator = hidden * vocab * torch.float32.itemsize
    tile = max(TILE_BYTES, accumulator) if generous else SMALL_TILE_BYTES
    row_bytes = padded_columns(vocab, dtype) * dtype.itemsize
    tile = max(tile, LEAST_ROWS * row_bytes)
    limit = None if free_bytes is None else int(free_bytes * FREE_SHARE)
    if limit is not None:
        tile = min(tile, limit)
    most = max(tile // row_bytes, ROW_MULTIPLE)
    if rows <= most:
        return max(rows, 1)
    even = -(-rows // -(-rows // (most // ROW_MULTIPLE * ROW_MULTIPLE)))
    size = -(-even // ROW_MULTIPLE) * ROW_MULTIPLE
    fits = limit is None or rows * row_bytes <= limit
    return rows if generous and fits and rows * row_bytes <= accumulator + size * row_bytes else size


def padded_columns(columns: int, dtype: torch.dtype) -> int:
    """Return how many columns the tile has: its rows, and the products' sizes, are multiples of 16 bytes."""
    multiple = VECTOR_BYTES // dtype.itemsize
    return -(-columns // multiple) * multiple


def default_chunk_rows(
    device: torch.device, rows: int, hidden: int, vocab: int, dtype: torch.dtype, generous: bool
) -> int:
    """Return `chunk_rows` for what memory the device has left when it is first asked, and the same from then on.

    So a training step's results do not depend on how full the memory happens to be, and asking, which takes longer
    than a launch, is done once.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return chunk_rows(rows, hidden, vocab, dtype, generous=generous, free_bytes=None)
    return _remembered_chunk_rows(device, rows, hidden, vocab, dtype, generous)


@functools.lru_cache(maxsize=4096)
def _remembered_chunk_rows(
    device: torch.device, rows: int, hidden: int, vocab: int, dtype: torch.dtype, generous: bool
) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(torch.cuda.mem_get_info(device)[0]) + unused
    return chunk_rows(rows, hidden, vocab, dtype, generous=generous, free_bytes=free)


class ChunkedHead:
    """The products of one forward or backward pass over all rows, one chunk after another.

    `logits` gives a chunk's, `add` takes their gradient, `gradients` ends.
    """

    def __init__(self, head: Head, wanted: Wanted, *, fp32_accumulation: bool, chunk_size: int | None) -> None:
        """Allocate nothing yet.

        Args:
            head: the layer.
            wanted: which gradients `gradients` will return.
            fp32_accumulation: whether terms of the weight's gradient are added up in fp32, or in its own dtype.
            chunk_size: rows of a chunk; None: `chunk_rows`.
        """
        inputs, weight, bias, dtype = head
        self.head, self.wanted, self.dtype = head, wanted, dtype
        self.rows, hidden = inputs.shape
        self.vocab = vocab = weight.shape[0]
        if chunk_size is None:
            generous = wanted.weight and fp32_accumulation
            chunk_size = default_chunk_rows(inputs.device, self.rows, hidden, vocab, dtype, generous)
        self.chunk_size = max(min(chunk_size, self.rows), 1)
        self.inputs = inputs.to(dtype)
        # A compiler pads by itself.
        self.columns = vocab if torch.compiler.is_compiling() else padded_columns(vocab, dtype)
        self.weight = padded(weight, self.columns, dtype)
        self.bias = None if bias is None else padded(bias, self.columns, dtype)
        self.tile: torch.Tensor | None = None
        self.grad_inputs: torch.Tensor | None = None
        self.grad_weight: torch.Tensor | None = None
        self.grad_bias: torch.Tensor | None = None
        one_term = self.chunk_size >= self.rows
        self.inputs_sum_dtype = self.product_dtype(inputs.dtype)
        self.weight_sum_dtype = (
            torch.float32 if fp32_accumulation and not one_term else self.product_dtype(weight.dtype)
        )

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what a product for such a tensor is written in: cuBLAS rounds to its factors' dtype or not at all."""
        return dtype if dtype == self.dtype else torch.float32

    def chunks(self) -> list[tuple[int, int]]:
        """Return (first row, end) of every chunk."""
        return [(start, min(start + self.chunk_size, self.rows)) for start in range(0, self.rows, self.chunk_size)]

    def logits(self, start: int, end: int) -> torch.Tensor:
        """Return the logits (end - start, V) of these rows; they last until those of other rows are asked for."""
        if torch.compiler.is_compiling():  # which knows no part of a buffer as a product's result
            logits = new_product(self.inputs[start:end], self.weight.t(), self.dtype)
            return logits if self.bias is None else logits + self.bias
        if self.tile is None:
            self.tile = torch.empty(self.chunk_size, self.columns, dtype=self.dtype, device=self.inputs.device)
        tile = self.tile[: end - start]
        if self.bias is None:
            torch.mm(self.inputs[start:end], self.weight.t(), out=tile)
        else:
            torch.addmm(self.bias, self.inputs[start:end], self.weight.t(), out=tile)
        return tile[:, : self.vocab]

    def add(self, start: int, end: int, grad_logits: torch.Tensor) -> None:
        """Take the gradient (end - start, V) of the logits of these rows, in their dtype; the first rows come first."""
        inputs, weight = self.head[:2]
        x = self.inputs[start:end]
        if torch.compiler.is_compiling():
            self.add_copies(start, grad_logits, x)
            return
        if self.wanted.bias:
            term = grad_logits.sum(0, dtype=torch.float32)
            self.grad_bias = term if self.grad_bias is None else self.grad_bias.add_(term)
        if self.columns > self.vocab:
            grad_logits = self.padded_tile(grad_logits)
        if self.wanted.inputs:
            if self.grad_inputs is None:
                self.grad_inputs = torch.empty(inputs.shape, dtype=self.inputs_sum_dtype, device=inputs.device)
            product(grad_logits, self.weight, out=self.grad_inputs[start:end])
        if self.wanted.weight:
            if self.grad_weight is None:
                size = (self.columns, weight.shape[1])
                self.grad_weight = torch.empty(size, dtype=self.weight_sum_dtype, device=weight.device)
            product(grad_logits.t(), x, out=self.grad_weight, add=start > 0)

    def padded_tile(self, grad_logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient with columns of zeros, in the tile, where it mostly is already."""
        assert self.tile is not None
        tile = self.tile[: len(grad_logits)]
        part = tile[:, : self.vocab]
        if not grad_logits.is_set_to(part):
            part.copy_(grad_logits)
        # An input that is not finite makes their logits NaN.
        tile[:, self.vocab :].zero_()
        return tile

    def add_copies(self, start: int, grad_logits: torch.Tensor, x: torch.Tensor) -> None:
        """`add` for a compiler: with Inductor of PyTorch 2.11, on CUDA, products into parts of a buffer got lost."""
        if self.wanted.inputs:
            term = new_product(grad_logits, self.weight, self.inputs_sum_dtype)
            self.grad_inputs = term if self.grad_inputs is None else torch.cat([self.grad_inputs, term])
        if self.wanted.weight:
            term = new_product(grad_logits.t(), x, self.weight_sum_dtype)
            self.grad_weight = term if self.grad_weight is None else self.grad_weight + term

    def gradients(self) -> HeadGradients:
        """Return the gradients of all rows; no tile is left then."""
        # Before the sum is converted, so that no more is held at once than by then.
        self.tile = None
        grad_weight = None if self.grad_weight is None else self.grad_weight[: self.vocab]
        given = (self.grad_inputs, grad_weight, self.grad_bias)
        found: list[torch.Tensor | None] = []
        for wanted, gradient, like in zip(self.wanted, given, self.head[:3], strict=True):
            if not wanted or like is None:
                found.append(None)
            elif gradient is None:  # no rows
                found.append(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
            else:
                found.append(gradient.to(like.dtype))
        return HeadGradients(*found)


def padded(tensor: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in this dtype with rows of zeros up to as many; itself where it is so already."""
    if len(tensor) == rows:
        return tensor.to(dtype)
    copy = torch.empty(rows, *tensor.shape[1:], dtype=dtype, device=tensor.device)
    copy[: len(tensor)] = tensor
    copy[len(tensor) :] = 0
    return copy


def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, add: bool = False) -> None:
    """Write the product of two matrices of one dtype into `out`, of that dtype or fp32, or add it, rounded once."""
    if out.dtype != a.dtype and a.device.type != "cuda":
        a, b = a.to(out.dtype), b.to(out.dtype)
    if out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def new_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of two matrices of one dtype in another, or in the same."""
    # Unlike those with a given result, this product would be autocast's.
    with torch.autocast(a.device.type, enabled=False):
        if dtype == a.dtype:
            return torch.mm(a, b)
        if a.device.type == "cuda":
            return torch.mm(a, b, out_dtype=dtype)
        return torch.mm(a.to(dtype), b.to(dtype))


class LinearResults(NamedTuple):
    """Tensors to be written, None for what is not wanted; fp32 but for `predicted`, as in `options.Results`."""

    loss: torch.Tensor
    """() or, without a reduction, (N,)."""
    z_loss: torch.Tensor | None
    """Like `loss`."""
    lse: torch.Tensor | None
    """(N,)."""
    predicted: torch.Tensor | None
    """(N,) int64."""
    entropy: torch.Tensor | None
    """(N,)."""


def forward(
    products: ChunkedHead, target: torch.Tensor, loss: kernels.Loss, results: LinearResults
) -> HeadGradients | None:
    """Fill the results; with a gradient wanted also return that of the sum or the mean.

    Args:
        products: of the layer, at its first chunk.
        target: (N,) int64.
        loss: as for `kernels.launch`.
        results: what is written.
    """
    chunks = products.chunks()
    sums = torch.empty((2, len(chunks)), dtype=torch.float32, device=target.device)
    for number, (start, end) in enumerate(chunks):
        logits = products.logits(start, end)
        if number == 0 and len(chunks) > 1:
            # Only now: the first product keeps the GPU busy while the host prepares the rest.
            loss = with_normalizer(loss, target)
        _chunk(products, logits, target, loss, results, start, end, sums[:, number])
        del logits  # or the tile would outlive the products
    if results.loss.ndim == 0:
        torch.sum(sums[0], 0, out=results.loss)
        if results.z_loss is not None:
            torch.sum(sums[1], 0, out=results.z_loss)
    return products.gradients() if any(products.wanted) else None


def _chunk(
    products: ChunkedHead,
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: kernels.Loss,
    results: LinearResults,
    start: int,
    end: int,
    sums: torch.Tensor,
) -> None:
    """One chunk of `forward`."""
    by_row, has_z = results.loss.ndim == 1, results.z_loss is not None

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[start:end]

    gradient = logits if any(products.wanted) else None
    kernels.launch(
        logits,
        target[start:end],
        gradient,
        rows_of(loss, start, end),
        kernels.Results(
            loss=None if by_row else sums[0],
            z_loss=sums[1] if has_z and not by_row else None,
            row_loss=part(results.loss) if by_row else None,
            row_z_loss=part(results.z_loss) if by_row else None,
            lse=part(results.lse),
            entropy=part(results.entropy),
            predicted=part(results.predicted),
        ),
    )
    if gradient is not None:
        products.add(start, end, gradient)


def backward(
    products: ChunkedHead, target: torch.Tensor, loss: kernels.Loss, incoming: kernels.Incoming
) -> HeadGradients:
    """Return the gradients for what comes in, from logits made again.

    Args:
        products: as for `forward`.
        target: (N,) int64.
        loss: as for `forward`.
        incoming: gradients of the results.
    """
    chunks = products.chunks()
    if len(chunks) > 1:
        loss = with_normalizer(loss, target)
    for start, end in chunks:
        logits = products.logits(start, end)
        parts = kernels.Incoming(*(each if each is None or each.ndim == 0 else each[start:end] for each in incoming))
        kernels.launch(logits, target[start:end], logits, rows_of(loss, start, end), kernels.Results(), parts)
        products.add(start, end, logits)
        del logits  # or the tile would outlive the products
    return products.gradients()


def rows_of(loss: kernels.Loss, start: int, end: int) -> kernels.Loss:
    """Return the loss of some rows."""
    return loss if loss.row_weight is None else loss._replace(row_weight=loss.row_weight[start:end])


def with_normalizer(loss: kernels.Loss, target: torch.Tensor) -> kernels.Loss:
    """Return the loss with the number of rows that a mean divides by, which no chunk can count."""
    if not loss.mean or loss.divisor or loss.normalizer is not None:
        return loss
    valid = (target != loss.ignore_index).sum().clamp_(min=1)
    return loss._replace(normalizer=valid.to(torch.float32))
