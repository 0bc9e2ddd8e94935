"""The portable implementation: bounded memory, and the same answer however the rows are cut into blocks."""

import pytest
import reference
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsl_kernels.cross_entropy.spec import LOSS, sums_elements
from greyhound.kernels import portable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def run(logits, labels, grad_logits, **changes):
    """Return (loss, totals) of the portable implementation with its plainest options, `changes` apart."""
    loss = torch.full((), torch.nan, device=logits.device)
    sums = torch.full((sums_elements(logits.shape[0]),), torch.nan, device=logits.device)
    options = {
        "z_loss_multiplier": 1e-3,
        "ignore_index": -100,
        "mean": True,
        "grad_by_mean": True,
        "incoming": None,
    }
    portable.cross_entropy(logits, labels, grad_logits, loss, sums, **(options | changes))
    return loss, sums[: LOSS + 1]  # what follows is a workspace


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 99, 100, 101, 250, 3700, 10**9])  # a row, more or less than one, several, all
def test_any_block_size_gives_the_same_bits(draw, device, monkeypatch, dtype, elements):
    x, labels = draw.logits(37, 100, dtype, device), draw.labels(37, 100, device, ignored=0.3)
    labels[36] = 99
    whole, blocks = torch.empty_like(x), torch.empty_like(x)
    expected = run(x, labels, whole)
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", elements)
    actual = run(x, labels, blocks)
    if device.type == "cpu":
        assert torch.equal(blocks, whole)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    options = {"z_loss_multiplier": 1e-3, "reduction": "mean"}
    assert reference.gradient_roundings(blocks, x, labels, **options) <= 1
    assert abs(float(actual[0]) - float(reference.loss(x, labels, **options))) <= reference.loss_tolerance(
        x, labels, **options
    )


@pytest.mark.parametrize("elements", [100, 3700])
def test_in_place_equals_out_of_place_for_any_block_size(draw, device, monkeypatch, elements):
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", elements)
    x, labels = draw.logits(37, 100, torch.float32, device), draw.labels(37, 100, device, ignored=0.3)
    out = torch.empty_like(x)
    expected = run(x, labels, out)
    actual = run(x, labels, x)
    assert torch.equal(x, out)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class LargestResult(TorchDispatchMode):
    """Notes the size in elements of the largest tensor that an operation makes, views and in-place results apart."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_grad", [True, False])
def test_nothing_larger_than_a_block_is_made(draw, monkeypatch, dtype, with_grad):
    cpu = torch.device("cpu")
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", 2000)
    x, labels = draw.logits(400, 100, dtype, cpu), draw.labels(400, 100, cpu)
    grad = torch.empty_like(x) if with_grad else None
    with LargestResult() as largest:
        run(x, labels, grad)
    assert sums_elements(400) <= largest.elements <= 2000
    if grad is not None:
        with LargestResult() as largest:
            portable.scale(grad, x, torch.tensor(3.0))
        assert 0 < largest.elements <= 2000


def test_a_label_out_of_range_makes_its_row_nan_and_touches_no_other(draw, device):
    x, labels = draw.logits(5, 10, torch.float32, device), torch.tensor([3, 10, -100, -1, 2**32 + 1], device=device)
    grad = torch.empty_like(x)
    loss, sums = run(x, labels, grad, grad_by_mean=False, mean=False, z_loss_multiplier=0.0)
    assert loss.isnan()
    assert sums[2] == 4
    assert grad[[1, 3, 4]].isnan().all()
    assert (grad[2] == 0).all()
    expected = reference.gradient(x[:1], labels[:1])
    torch.testing.assert_close(grad[:1].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.0, 1.0, 3.0, 1 / 7, -2.0, 65536.0])
def test_scaling_rounds_once(draw, device, monkeypatch, dtype, factor):
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", 250)
    x = draw.logits(37, 100, dtype, device, scale=1e-3)
    scalar = torch.tensor(factor, device=device)
    out = torch.empty_like(x)
    portable.scale(x, out, scalar)
    # The fp32 product itself is exact to half an ulp, so an element may fall on the other side of a tie.
    expected = (x.double() * float(scalar)).to(dtype)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert (out != expected).sum() <= 5
    portable.scale(x, x, scalar)
    assert torch.equal(x, out)
