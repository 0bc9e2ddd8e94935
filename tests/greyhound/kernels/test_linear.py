"""`greyhound.kernels.linear`: the sizes of chunks, and the products."""

import pytest
import torch

from greyhound.kernels import linear
from greyhound.kernels.linear import ChunkedHead, Head, Wanted, chunk_rows

BF16, FP32 = torch.bfloat16, torch.float32
GIB = 1 << 30


def rows_of(rows, hidden, vocab, dtype=BF16, *, generous=True, free_bytes=None):
    """Return `chunk_rows`."""
    return chunk_rows(rows, hidden, vocab, dtype, generous=generous, free_bytes=free_bytes)


def test_rows_whose_logits_are_no_larger_than_an_accumulator_and_a_tile_of_that_size_are_one_chunk():
    H, V = 4096, 128_256
    assert rows_of(16384, H, V) == 16384  # 2 V N = 2 (4 V H)
    assert rows_of(16385, H, V) < 8192
    assert rows_of(8192, H, V, FP32) == 8192
    assert rows_of(8193, H, V, FP32) < 4096


def test_one_chunk_in_place_of_several_fits_into_half_of_the_free_memory():
    H, V = 4096, 128_256
    assert rows_of(16384, H, V, free_bytes=2 * 16384 * 2 * V) == 16384
    assert rows_of(16384, H, V, free_bytes=2 * 16384 * 2 * V - 2) == 8192


def test_a_gibibyte_of_logits_is_one_chunk_whatever_the_accumulator():
    assert rows_of(16384, 8, 32768) == 16384
    assert rows_of(16385, 8, 32768) < 16384


def test_the_padding_of_a_row_counts():
    assert rows_of(16385, 8, 32761) == 8320


def test_several_chunks_are_one_instead_only_where_there_would_be_an_accumulator():
    assert rows_of(8192, 4096, 128_256, generous=False) == 1024


def test_chunks_that_are_rounded_up_do_not_outgrow_the_tile():
    assert rows_of(2092, 8, 128_256, generous=False) == 768


def test_where_memory_is_to_be_saved_a_chunk_is_a_quarter_of_that():
    assert rows_of(8192, 8, 65536, generous=False) == 2048
    assert rows_of(2048, 8, 65536, generous=False) == 2048


@pytest.mark.parametrize("rows", [1, 5000, 8191, 8193, 20_000, 100_001])
@pytest.mark.parametrize("generous", [True, False])
def test_chunks_are_even_and_multiples_of_a_products_tile(rows, generous):
    size = rows_of(rows, 1024, 128_256, generous=generous)
    chunks = -(-rows // size)
    assert chunks == 1 or size % linear.ROW_MULTIPLE == 0
    assert rows > size * (chunks - 1)
    assert chunks == 1 or rows - size * (chunks - 1) > size - chunks * linear.ROW_MULTIPLE


def test_a_chunk_has_a_thousand_rows_however_wide():
    assert rows_of(5000, 8, 1 << 22, generous=False) == 1024
    assert rows_of(1000, 8, 1 << 22, generous=False) == 1000


def test_a_chunk_takes_no_more_than_half_of_the_free_memory_but_for_a_products_tile():
    V = 65536
    assert rows_of(8192, 4096, V, free_bytes=1 * GIB) == 4096
    assert rows_of(8192, 4096, V, free_bytes=GIB // 2) == 2048
    assert rows_of(8192, 4096, V, free_bytes=V * 2 * 20) == 128
    assert rows_of(8192, 4096, V, free_bytes=0) == 128
    assert rows_of(100, 4096, V, free_bytes=0) == 100
    assert rows_of(0, 4096, V, free_bytes=0) == 1


def test_a_process_keeps_to_the_chunks_it_has_chosen(monkeypatch):
    linear._remembered_chunk_rows.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    free = [GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 << 20)
    arguments = (torch.device("cuda:0"), 8192, 4096, 65536, BF16, True)
    assert linear.default_chunk_rows(*arguments) == 4096
    free[0] = GIB // 2
    assert linear.default_chunk_rows(*arguments) == 4096
    linear._remembered_chunk_rows.cache_clear()
    assert linear.default_chunk_rows(*arguments) == 2048
    linear._remembered_chunk_rows.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert linear.default_chunk_rows(*arguments) == 8192


@pytest.mark.parametrize(("columns", "dtype", "padded"), [(7, BF16, 8), (8, BF16, 8), (9, BF16, 16), (5, FP32, 8)])
def test_rows_of_the_tile_start_on_sixteen_bytes(draw, device, columns, dtype, padded):
    head = Head(draw.logits(6, 4, dtype, device), draw.logits(columns, 4, dtype, device), None, dtype)
    products = ChunkedHead(head, Wanted(True, True, False), fp32_accumulation=True, chunk_size=4)
    logits = products.logits(0, 4)
    assert logits.shape == (4, columns)
    assert logits.stride() == (padded, 1)
    assert logits.data_ptr() % 16 == 0
    assert products.logits(4, 6).data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("copied", [False, True], ids=["tile", "copy"])
@pytest.mark.parametrize(("columns", "padded"), [(7, 8), (8, 8), (9, 16)])
def test_products_take_a_vocabulary_that_is_a_multiple_of_sixteen_bytes(
    draw, device, monkeypatch, columns, padded, copied
):
    """Kernels of cuBLAS for other sizes take five times as long."""
    head = Head(draw.logits(6, 4, BF16, device), draw.logits(columns, 4, BF16, device), None, BF16)
    sizes = []
    product = linear.product

    def recorded(a, b, *, out, add=False):
        sizes.append((a.shape, b.shape, out.shape))
        product(a, b, out=out, add=add)

    monkeypatch.setattr(linear, "product", recorded)
    products = ChunkedHead(head, Wanted(True, True, False), fp32_accumulation=True, chunk_size=6)
    logits = products.logits(0, 6)
    gradient = logits.clone() if copied else logits
    exact = logits.double()
    products.add(0, 6, gradient)
    assert sizes == [((6, padded), (padded, 4), (6, 4)), ((padded, 6), (6, 4), (padded, 4))]
    found = products.gradients()
    torch.testing.assert_close(found.inputs.double(), exact @ head.weight.double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.weight.double(), exact.t() @ head.inputs.double(), rtol=1e-2, atol=1e-2)
    assert found.weight.is_contiguous()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_product_is_written_or_added_and_rounded_once(draw, device, dtype, out_dtype, add):
    if dtype is FP32:
        out_dtype = FP32
    a, b = draw.logits(8, 5, dtype, device), draw.logits(5, 6, dtype, device)
    before = draw.logits(8, 6, out_dtype, device)
    out = before.clone()
    linear.product(a, b, out=out, add=add)
    exact = a.double() @ b.double() + (before.double() if add else 0.0)
    eps = torch.finfo(out_dtype).eps
    assert ((out.double() - exact).abs() <= eps * exact.abs() + 1e-5).all()


def test_the_weights_gradient_is_rounded_to_its_dtype_at_the_end_alone(draw, device):
    head = Head(draw.logits(64, 4, BF16, device), draw.logits(10, 4, BF16, device), None, BF16)
    sums = {}
    for fp32_accumulation in (True, False):
        products = ChunkedHead(head, Wanted(False, True, False), fp32_accumulation=fp32_accumulation, chunk_size=8)
        for start, end in products.chunks():
            products.add(start, end, products.logits(start, end))
        sums[fp32_accumulation] = products.grad_weight.dtype
        assert products.gradients().weight.dtype is BF16
        assert products.tile is None
    assert sums == {True: FP32, False: BF16}
    alone = ChunkedHead(head, Wanted(False, True, False), fp32_accumulation=True, chunk_size=64)
    alone.add(0, 64, alone.logits(0, 64))
    assert alone.grad_weight.dtype is BF16  # the one product rounds
