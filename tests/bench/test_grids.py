import torch

from bench.cases import Shape
from bench.grids import COMPILES_EACH_SHAPE, CORE, DIAGONAL, cells, runs_on
from bench.peers import PROVIDERS

FULL = cells("full")
BF16 = [cell.shape for cell in FULL if cell.dtype == torch.bfloat16]


def test_the_core_grid_has_the_shapes_that_the_readme_quotes() -> None:
    quoted = (
        "8192x128256 8192x32000 4096x200064 8192x50257 8192x65536 32768x4096 16384x8192 65536x2048 131072x1000"
        " 256x128256 64x32000 2048x600001 1x128256"
    )
    assert {str(cell.shape) for cell in cells("core")} == set(quoted.split())
    assert {cell.dtype for cell in cells("core")} == {torch.bfloat16}


def test_the_full_grid_crosses_every_row_count_with_every_vocabulary_in_bf16() -> None:
    vocabs = (1000, 4096, 8192, 16384, 32000, 32001, 50257)
    vocabs += (65536, 100352, 128256, 151936, 152064, 200064, 262144)
    product = {Shape(rows, vocab) for rows in (256, 1024, 2048, 4096, 8192, 16384) for vocab in vocabs}
    assert len(product) == 84
    assert product <= set(BF16)


def test_the_full_grid_begins_with_the_core_and_holds_the_shapes_beyond_the_product() -> None:
    assert FULL[: len(CORE)] == cells("core")
    assert {Shape(131072, 1000), Shape(65536, 1000), Shape(32768, 4096), Shape(2048, 600001)} <= set(BF16)


def test_no_cell_is_measured_twice() -> None:
    assert len(set(FULL)) == len(FULL)


def test_the_other_dtypes_have_the_diagonal_each_before_the_rest_of_bf16() -> None:
    for dtype in (torch.float16, torch.float32):
        assert [cell.shape for cell in FULL if cell.dtype == dtype] == list(DIAGONAL)
    last_of_diagonal = max(at for at, cell in enumerate(FULL) if cell.dtype != torch.bfloat16)
    assert last_of_diagonal == len(CORE) + 2 * len(DIAGONAL) - 1


def test_what_compiles_each_shape_runs_on_the_core_cells_only() -> None:
    assert set(COMPILES_EACH_SHAPE) <= set(PROVIDERS)
    for name in COMPILES_EACH_SHAPE:
        assert [cell for cell in FULL if runs_on(name, cell)] == cells("core")
    assert all(runs_on("quack", cell) for cell in FULL)
