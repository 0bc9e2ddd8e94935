"""The grids of the comparison: which shapes and dtypes, in which order, and who is left out of which.

`core` holds the shapes that the README quotes. `full` is rows times vocabularies, some shapes beyond it, and a diagonal
in the other dtypes. Cells that matter more come first, so that a run that is cut has them.

Two providers compile for every shape, for seconds each, and would take more than half of the full grid's time: they run
on its core cells only (`COMPILES_EACH_SHAPE`); `--shapes` measures them on others.
"""

from typing import NamedTuple

import torch

from bench.cases import Shape

CORE = tuple(
    Shape(rows, vocab)
    for rows, vocab in (
        (8192, 128256),  # Llama 3
        (8192, 32000),  # Llama 2
        (4096, 200064),  # o200k, padded
        (8192, 50257),  # GPT-2: odd, so rows start on any 2-byte boundary
        (8192, 65536),
        (32768, 4096),  # narrow rows: several to a block
        (16384, 8192),
        (65536, 2048),
        (131072, 1000),
        (256, 128256),  # small batches: launches and the sum of the row losses weigh most
        (64, 32000),
        (2048, 600001),  # wider than most peers hold on chip, and odd
        (1, 128256),
    )
)

FULL_ROWS = (8192, 4096, 16384, 2048, 1024, 256)
FULL_VOCABS = (
    128256,
    32000,
    50257,
    151936,
    65536,
    4096,
    8192,
    1000,
    200064,
    262144,
    100352,
    32001,
    16384,
    152064,
)
FULL_BEYOND = (Shape(65536, 1000),)

DIAGONAL = tuple(
    Shape(rows, vocab)
    for rows, vocab in (
        (8192, 65536),
        (8192, 32000),
        (4096, 128256),
        (32768, 4096),
        (65536, 1000),
        (2048, 50257),
        (2048, 262144),  # the widest vocabulary
        (64, 32000),  # the shape of the host times
    )
)
"""Shapes that fp16 and fp32 are measured on; what a dtype changes is bytes an element and who supports it."""

COMPILES_EACH_SHAPE = ("compile", "greyhound_0_1")


class Cell(NamedTuple):
    """What the providers are compared on at a time."""

    shape: Shape
    dtype: torch.dtype


def cells(grid: str) -> list[Cell]:
    """Return the cells of `core` or `full`, the important ones first, none twice."""
    core = [Cell(shape, torch.bfloat16) for shape in CORE]
    if grid == "core":
        return core
    diagonal = [Cell(shape, dtype) for shape in DIAGONAL for dtype in (torch.float16, torch.float32)]
    product = [Cell(Shape(rows, vocab), torch.bfloat16) for rows in FULL_ROWS for vocab in FULL_VOCABS]
    beyond = [Cell(shape, torch.bfloat16) for shape in FULL_BEYOND]
    return list(dict.fromkeys([*core, *diagonal, *beyond, *product]))


GRIDS = ("core", "full")


def runs_on(provider: str, cell: Cell) -> bool:
    """Return whether a grid measures this provider on this cell; the module's docstring says which not."""
    return provider not in COMPILES_EACH_SHAPE or cell in cells("core")
