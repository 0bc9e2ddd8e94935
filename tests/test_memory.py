"""Memory: gradients of more than 2^31 and 2^32 elements, and what lies beside each buffer of a call."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import reference
import torch
from plans import planned_for

from dsl_kernels.cross_entropy import plan
from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels import options as options_kernels
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

pytestmark = pytest.mark.usefixtures("narrow_in_small_batches")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# --- More elements than 32 bits count -------------------------------------------------------------------


MODES: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},  # scaled in backward; of fp16 computed there
    "sum in place": {"reduction": "sum", "inplace": True},
    "sum in place in backward": {"reduction": "sum", "inplace_backward": True},
    "rows": {"reduction": "none"},
    "rows in place": {"reduction": "none", "inplace_backward": True},
}


def loss_and_gradient(x: torch.Tensor, labels: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and its gradient for an incoming 3.0; `x` may be overwritten."""
    logits = x.requires_grad_()
    if "in place" in mode:
        # An output of autograd without a copy of its own.
        logits = Given.apply(logits)
    loss = cross_entropy(logits, labels, **MODES[mode])
    (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 3.0))
    assert (grad.data_ptr() == x.data_ptr()) == ("in place" in mode)
    return loss.detach(), grad


class Given(torch.autograd.Function):
    """Gives the memory of a tensor away, as an operation of its own that made it would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def picked(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return a copy of some rows, each found by nothing but its own address."""
    return torch.stack([x[row] for row in rows])


def rows_have_what_they_have_alone(x: torch.Tensor, labels: torch.Tensor, rows: list[int], mode: str) -> None:
    """Assert that loss and gradient of some rows of a large batch are right and, bit for bit, those of these rows."""
    alone, their_labels = picked(x, rows), picked(labels, rows)
    original = alone.clone()
    loss, grad = loss_and_gradient(x, labels, mode)
    with planned_for(len(x)):
        loss_alone, grad_alone = loss_and_gradient(alone, their_labels, mode)
    assert reference.same_bits(picked(grad, rows), grad_alone)
    factor = {"grad_output": 3.0, "reduction": "sum"}
    kept = None if mode.startswith("rows") or "backward" in mode else reference.kept_factor(x.dtype, 3.0)
    assert reference.gradient_roundings(grad_alone, original, their_labels, **factor, kept=kept) <= 1
    if mode.startswith("rows"):
        assert reference.same_bits(picked(loss, rows), loss_alone)
    else:
        assert loss.isfinite()


def rows_about(B: int, V: int, elements: tuple[int, ...]) -> list[int]:
    """Return the first and the last rows, and those in which one of the elements lies, with their neighbours."""
    near = {element // V + d for element in elements for d in (-1, 0, 1)}
    return sorted(row for row in {0, 1, B // 3, B - 2, B - 1} | near if 0 <= row < B)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_rows_have_what_they_have_alone(draw, device, dtype, mode):
    x, labels = draw.logits(70, 1024, dtype, device), draw.labels(70, 1024, device, ignored=0.2)
    rows = rows_about(70, 1024, (30_000, 60_000))
    rows_have_what_they_have_alone(x, labels, rows, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("elements", "V"),
    [
        # A row a cluster of blocks. Multiples of 64 columns: all rows have the alignment that they have alone.
        (2**31, 50_048),
        (2**32, 50_048),
        (2**31, 4096),  # a row a warp
        (2**32, 4096),
        (2**32, 512),  # a row a few lanes
    ],
)
def test_rows_beyond_2_31_and_2_32_elements_have_what_they_have_alone(draw, cuda, dtype, mode, elements, V):
    B = elements // V + 70
    x, labels = draw.logits(B, V, dtype, cuda), draw.labels(B, V, cuda, ignored=0.1)
    rows = rows_about(B, V, (2**31 - 1, 2**31, 2**32 - 1, 2**32))
    labels[rows] = torch.arange(len(rows), device=cuda) * (V // len(rows))
    rows_have_what_they_have_alone(x, labels, rows, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [2**31, 2**32])
def test_every_element_beyond_2_31_and_2_32_is_scaled_in_place(cuda, dtype, elements):
    source = torch.full((elements // 4096 + 3, 4096), 1.5, dtype=dtype, device=cuda)
    kernels.launch_scale(source, source, torch.tensor(3.0, device=cuda))
    assert all(bool((part == 4.5).all()) for part in source.split(1 << 16))


# --- What lies beside a buffer --------------------------------------------------------------------------

POISON = 0xA5
"""Every byte of what no one may write."""

AROUND = 512
"""Bytes on either side of a buffer; the allocator's alignment."""


class Buffer(NamedTuple):
    """Bytes of which some are a tensor's."""

    name: str
    whole: torch.Tensor
    before: torch.Tensor
    """The bytes as they were; None of the tensor's count where it may be written."""
    may_change: torch.Tensor
    """Which bytes are the tensor's, all False where it may only be read."""


class Guards:
    """Puts tensors into poisoned buffers, and says which buffers have been written where they may not be."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._empty = torch.empty

    def around(
        self,
        name: str,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        values: torch.Tensor | None = None,
        offset: int = 0,
        pad: int = 0,
        written: bool,
    ) -> torch.Tensor:
        """Return a tensor in a buffer of its own, `offset` elements off an alignment, `pad` between its rows."""
        columns = size[-1] if len(size) > 1 else 1
        rows = math.prod(size) // max(columns, 1)
        stride = columns + pad
        extent = (rows - 1) * stride + columns if rows else 0
        begin = AROUND + offset * dtype.itemsize
        whole = self._empty(begin + extent * dtype.itemsize + AROUND, dtype=torch.uint8, device=device).fill_(POISON)
        strides = (stride, 1) if len(size) == 2 else (stride,) * len(size)
        # Not a view of the bytes: autograd sees a tensor like any other.
        tensor = self._empty(0, dtype=dtype, device=device)
        tensor.set_(whole.untyped_storage(), begin // dtype.itemsize, size, strides)
        if values is not None:
            tensor.copy_(values)
        may_change = torch.zeros_like(whole, dtype=torch.bool)
        if written and extent:
            of_row = torch.arange(columns * dtype.itemsize, device=device)
            first = begin + torch.arange(rows, device=device)[:, None] * stride * dtype.itemsize
            may_change[(first + of_row).flatten()] = True
        self._buffers.append(Buffer(name, whole, whole.clone(), may_change))
        return tensor

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        """Stand in for `torch.empty`."""
        if len(size) == 1 and not isinstance(size[0], int):
            size = tuple(size[0])
        if dtype is None or len(size) > 2 or options or math.prod(size) == 0:
            return self._empty(size, dtype=dtype, device=device, **options)
        return self.around(f"an output of size {size}", size, dtype, torch.device(device), written=True)

    @contextlib.contextmanager
    def of_outputs(self) -> Iterator[None]:
        """Guard what the library allocates."""
        with mock.patch.object(torch, "empty", self.empty):
            yield

    def broken(self) -> list[str]:
        """Return the names of the buffers that were written beside their tensors, or in one that may only be read."""
        wrong = [((b.whole != b.before) & ~b.may_change).any() for b in self._buffers]
        return [b.name for b, is_wrong in zip(self._buffers, torch.stack(wrong).tolist(), strict=True) if is_wrong]

    @property
    def names(self) -> list[str]:
        """The buffers that are guarded."""
        return [buffer.name for buffer in self._buffers]


class Case(NamedTuple):
    """Inputs of a call, and where they lie."""

    logits: torch.Tensor
    labels: torch.Tensor
    row_weight: torch.Tensor
    weight: torch.Tensor
    incoming: torch.Tensor
    offset: int
    pad: int

    def guarded(self, guards: Guards, name: str, *, written: bool = False) -> torch.Tensor:
        """Return one of them in a guarded buffer."""
        values = getattr(self, name)
        pad = self.pad if name == "logits" else 0
        place = {"offset": self.offset, "pad": pad, "written": written}
        return guards.around(name, tuple(values.shape), values.dtype, values.device, values=values, **place)


def raw(case: Case, guards: Guards) -> list[torch.Tensor]:
    """Overwrite the logits."""
    logits, labels = case.guarded(guards, "logits", written=True), case.guarded(guards, "labels")
    return [logits, *cross_entropy_with_grad_kernel(logits, labels, 1e-4)]


def plain(case: Case, guards: Guards) -> list[torch.Tensor]:
    """Compute a mean, its gradient scaled in backward, and a loss alone."""
    logits, labels = case.guarded(guards, "logits").requires_grad_(), case.guarded(guards, "labels")
    loss = cross_entropy(logits, labels)
    with torch.no_grad():
        alone = cross_entropy(logits, labels, reduction="sum")
    incoming = guards.around("grad_output", (), torch.float32, loss.device, values=case.incoming[0], written=False)
    return [loss, alone, *torch.autograd.grad(loss, logits, incoming)]


def rows(case: Case, guards: Guards, **options: Any) -> list[torch.Tensor]:
    """Compute everything that there is for each row, for a gradient of each."""
    logits, labels = case.guarded(guards, "logits"), case.guarded(guards, "labels")
    weights = {name: case.guarded(guards, name) for name in ("row_weight", "weight")}
    names = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")
    given = {"z_loss_multiplier": 1e-4, **weights, **options, **{f"return_{name}": True for name in names}}
    output = cross_entropy(logits.requires_grad_(), labels, reduction="none", **given)
    incoming = [case.guarded(guards, "incoming") for _ in range(3)]
    grads = torch.autograd.grad((output.loss, output.lse, output.entropy), logits, incoming)
    return [*output, *grads]


def smoothed_rows(case: Case, guards: Guards) -> list[torch.Tensor]:
    """Likewise with the kernel for any option."""
    return rows(case, guards, label_smoothing=0.1, softcap=30.0)


def overwritten(case: Case, guards: Guards) -> list[torch.Tensor]:
    """Overwrite the logits with the gradient of a mean in forward, and of rows in backward."""
    results = []
    for options in ({"inplace": True, "softcap": 30.0}, {"inplace_backward": True, "reduction": "none"}):
        leaf = case.guarded(guards, "logits", written=True).requires_grad_()
        logits = Strided.apply(leaf) if case.pad else Given.apply(leaf)
        labels = case.guarded(guards, "labels")
        loss = cross_entropy(logits, labels, row_weight=case.guarded(guards, "row_weight"), **options)
        incoming = case.guarded(guards, "incoming") if loss.ndim else case.incoming[0]
        results += [loss, *torch.autograd.grad(loss, logits, incoming)]
    return results


class Strided(Given):
    """Likewise of rows that are apart from each other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(0, dtype=x.dtype, device=x.device)
        return tensor.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


CALLS = {call.__name__: call for call in (raw, plain, rows, smoothed_rows, overwritten)}


def test_the_sizes_take_every_kind_of_kernel():
    for dtype, streamed in ((name, name == "float32") for name in ("float16", "bfloat16", "float32")):
        specs = [plan.select_fused("sm_90a", dtype, V, True, 5, 132)[0] for V in (100, 3001, 9001, 70_001, 600_001)]
        assert [bool(spec.held) for spec in specs] == [True, False, False, False, False]
        assert [spec.narrow for spec in specs] == [False, True, False, False, False]
        assert [spec.streamed for spec in specs] == [False, False, False, False, streamed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [100, 3001, 9001, 70_001, 600_001])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_written_beside_a_buffer_nor_into_an_input(draw, device, dtype, V, call):
    if device.type == "cpu" and V > 10_000:
        pytest.skip("the portable code knows no plans")
    B = 5
    labels = draw.labels(B, V, device)
    labels[0], labels[1], labels[-1] = 0, -100, V - 1
    numbers = [torch.rand(size, device=device, generator=draw.generator(device)) + 0.5 for size in (B, V, B)]
    logits = draw.logits(B, V, dtype, device)
    results = {}
    offsets = (0, 1, 16 // dtype.itemsize - 1, 128 // dtype.itemsize - 1)
    for offset, pad in itertools.product(offsets, (0, 3)):
        guards = Guards()
        with guards.of_outputs():
            results[offset, pad] = CALLS[call](Case(logits, labels, *numbers, offset, pad), guards)
        assert guards.broken() == [], (offset, pad)
        assert any(name.startswith("an output") for name in guards.names)
    # The poison is no part of a result either: another place changes no more than the order of sums.
    first, *others = results.values()
    for other in others:
        for a, b in zip(other, first, strict=True):
            rtol = 2 * torch.finfo(a.dtype).eps if a.dtype.itemsize == 2 else 1e-4
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("place", [-1, 0])
@pytest.mark.parametrize("written", [True, False])
def test_a_write_beside_a_buffer_or_into_an_input_is_seen(device, place, written):
    guards = Guards()
    right = guards.around("right", (2, 3), torch.float32, device, offset=1, pad=1, written=True)
    tensor = guards.around("touched", (2, 3), torch.float32, device, offset=1, pad=1, written=written)
    right.fill_(1.0)
    assert guards.broken() == []
    tensor.as_strided((1,), (1,), tensor.storage_offset() + place).fill_(1.0)
    assert guards.broken() == ([] if written and place == 0 else ["touched"])
    tensor.as_strided((1,), (1,), tensor.storage_offset() + 3).fill_(1.0)  # between the rows
    assert guards.broken() == ["touched"]


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_that_writes_beside_its_output_would_be_found(draw, monkeypatch, call):
    cpu = torch.device("cpu")
    for module in (kernels, options_kernels):

        def wild(logits: Any, labels: Any, grad: Any, *rest: Any, launch: Any = module.launch) -> None:
            launch(logits, labels, grad, *rest)
            if grad is not None:
                last = grad.storage_offset() + (grad.shape[0] - 1) * grad.stride(0) + grad.shape[1]
                grad.as_strided((1,), (1,), last).fill_(1.0)

        monkeypatch.setattr(module, "launch", wild)
    numbers = [torch.rand(size) for size in (5, 40, 5)]
    guards = Guards()
    with guards.of_outputs():
        CALLS[call](Case(draw.logits(5, 40, torch.float32, cpu), draw.labels(5, 40, cpu), *numbers, 1, 0), guards)
    assert guards.broken() != []
