"""The layout that is compiled, the formula, and the diagram in the module's docstring are one and the same."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass", reason="needs the DSL")

import cutlass.cute as cute

from dsl_kernels import layouts
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ITEM_BYTES, VECTOR_BYTES

BANKS = 32
BANK_BYTES = 4
WARP = 32


class Size(NamedTuple):
    """Arguments of `slice_layout`, named as in its docstring."""

    T: int
    E: int
    S: int
    chunks: int

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield every (thread, value, step, chunk)."""
        return itertools.product(*map(range, self))

    def element(self, thread: int, value: int, step: int, chunk: int) -> int:
        """Evaluate the formula."""
        return ((chunk * self.S + step) * self.T + thread) * self.E + value


DIAGRAM_SIZE = Size(*(int(n) for n in re.findall(r"^For T = (\d+), E = (\d+), S = (\d+)", layouts.__doc__, re.M)[0]), 2)

SIZES = [
    DIAGRAM_SIZE,
    Size(32, 4, 1, 1),  # fp32, one warp, one step, one chunk: two modes of size 1
    Size(96, 8, plan.STEPS, 3),  # a block size that is no power of two
    Size(max(spec.threads for spec in plan.SPECS if not spec.streamed), 8, plan.STEPS, 2),  # the largest that is used
]


@functools.cache
def traced(size: Size) -> tuple[dict[tuple[int, int, int, int], int], Any, Any]:
    """Return the layout's element for every place, its shape and its stride, as a kernel's trace sees them."""
    elements: dict[tuple[int, int, int, int], int] = {}
    found: list[Any] = []

    def evaluate() -> None:  # not a jit function itself: its loop runs in Python
        layout = layouts.slice_layout(*size)
        found.extend((layout.shape, layout.stride))
        for place in size.places():
            elements[place] = cute.crd2idx(place, layout)

    @cute.jit
    def trace() -> None:
        evaluate()

    cute.compile(trace, options="--gpu-arch sm_90a")
    return elements, *found


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_layout_is_the_formula_of_its_docstring_for_every_thread_value_step_and_chunk(size: Size) -> None:
    assert "element(thread, value, step, chunk) = ((chunk * S + step) * T + thread) * E + value" in layouts.__doc__
    elements, _, _ = traced(size)
    assert elements == {place: size.element(*place) for place in size.places()}


def test_the_layout_has_the_shape_and_stride_of_its_docstring() -> None:
    size = Size(32, 4, 3, 5)  # five different strides
    _, shape, stride = traced(size)
    texts = re.search(r"shape +\((.+)\)\n +stride +\((.+)\)", layouts.__doc__)
    assert texts is not None
    for text, found in zip(texts.groups(), (shape, stride), strict=True):
        assert eval(f"({text})", {}, size._asdict()) == found


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_element_of_a_slice_has_one_owner(size: Size) -> None:
    elements, _, _ = traced(size)
    assert sorted(elements.values()) == list(range(size.T * size.E * size.S * size.chunks))


def diagram() -> list[tuple[int, int, list[tuple[int, int]], range]]:
    """Parse the docstring's diagram: (chunk, step, owner of each element in order, elements) of each line."""
    lines = re.findall(r"chunk (\d+), step (\d+) +((?:\d+\.\d+ )+) +elements +(\d+)\.\.(\d+)", layouts.__doc__)
    return [
        (
            int(chunk),
            int(step),
            [(int(thread), int(value)) for thread, value in (cell.split(".") for cell in cells.split())],
            range(int(first), int(last) + 1),
        )
        for chunk, step, cells, first, last in lines
    ]


def test_the_diagram_is_what_the_formula_gives() -> None:
    lines = diagram()
    assert len(lines) >= 3  # a step's change and a chunk's
    shown = {
        (thread, value, step, chunk): element
        for chunk, step, owners, elements in lines
        for (thread, value), element in zip(owners, elements, strict=True)
    }
    assert shown == {place: DIAGRAM_SIZE.element(*place) for place in shown}
    assert len(shown) == len(lines) * DIAGRAM_SIZE.T * DIAGRAM_SIZE.E  # no line names an owner twice


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_a_quarter_of_a_warp_touches_every_bank_once_and_a_warp_512_contiguous_bytes(dtype: str) -> None:
    item_bytes = ITEM_BYTES[dtype]
    size = Size(2 * WARP, VECTOR_BYTES // item_bytes, plan.STEPS, 2)  # two warps: the second starts elsewhere
    elements, _, _ = traced(size)
    for warp, step, chunk in itertools.product(range(size.T // WARP), range(size.S), range(size.chunks)):
        threads = range(warp * WARP, (warp + 1) * WARP)
        of_thread = {
            thread: [elements[thread, value, step, chunk] * item_bytes for value in range(size.E)] for thread in threads
        }
        for first in threads[:: WARP // 4]:
            quarter = [address for thread in range(first, first + WARP // 4) for address in of_thread[thread]]
            words = {address // BANK_BYTES for address in quarter}
            assert sorted(word % BANKS for word in words) == list(range(BANKS))
        touched = sorted(itertools.chain(*of_thread.values()))
        assert touched == list(range(touched[0], touched[0] + 512, item_bytes))
        assert touched[0] % 128 == 0  # whole lines
