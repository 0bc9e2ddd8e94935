"""Inputs on which cross entropy kernels have gone wrong, each with the answer it must get."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from reference import Incoming

from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy, entropy, selective_log_softmax

pytestmark = pytest.mark.usefixtures("narrow_in_small_batches")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum")
ROOT = Path(__file__).resolve().parents[1]

EACH_FEATURE = [{}, {"z_loss_multiplier": 1e-4}, {"softcap": 30.0}, {"label_smoothing": 0.1}, {"logit_scale": 0.5}]
EVERY_OUTPUT = {f"return_{name}": True for name in ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")}


def named(feature: dict[str, object]) -> str:
    """Return an id of options."""
    return ",".join(feature) or "plain"


def per_row(logits: torch.Tensor) -> Incoming:
    """Return a gradient for each row's loss, each another one."""
    return Incoming(torch.linspace(0.1, 1.0, logits.shape[0], device=logits.device))


# --- Numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 1e-4])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_losses_carry_fp32_precision_in_every_combination(
    draw, device, dtype, reduction, z_loss_multiplier, requires_grad
):
    x, labels = draw.logits(8, 4096, dtype, device), draw.labels(8, 4096, device)
    options = {"reduction": reduction, "z_loss_multiplier": z_loss_multiplier}
    loss = cross_entropy(x.clone().requires_grad_(requires_grad), labels, **options).detach()
    assert float(loss) == pytest.approx(float(reference.loss(x, labels, **options)), rel=1e-6)
    assert loss != loss.bfloat16()
    sums = cross_entropy_with_grad_kernel(x, labels, z_loss_multiplier)
    assert all(total != total.bfloat16() for total in sums[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("feature", EACH_FEATURE, ids=named)
def test_losses_carry_fp32_precision_with_every_feature(draw, device, dtype, reduction, requires_grad, feature):
    x, labels = draw.logits(8, 4096, dtype, device), draw.labels(8, 4096, device)
    options = {"reduction": reduction, **feature}
    output = cross_entropy(x.clone().requires_grad_(requires_grad), labels, **options, return_z_loss=True)
    terms = reference.terms_with_options(x, labels, **options)
    torch.testing.assert_close(output.loss.detach().double(), terms.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.z_loss.double(), terms.z_loss, rtol=1e-6, atol=0)
    assert (output.loss != output.loss.bfloat16()).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", EACH_FEATURE, ids=named)
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999])
def test_the_target_of_a_confident_row_is_off_by_at_most_one_rounding_with_every_feature(
    device, dtype, feature, probability
):
    V, labels = 32000, torch.tensor([0, 7, 16001, 31999], device=device)
    x = torch.zeros(4, V, dtype=dtype, device=device)
    x[torch.arange(4, device=device), labels] = math.log(probability / (1 - probability) * (V - 1))
    for reduction in (*REDUCTIONS, "none"):
        came = per_row(x) if reduction == "none" else Incoming(torch.tensor(1.0, device=device))
        reference.check_options(cross_entropy, x, labels, incoming=came, reduction=reduction, **feature)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99, 0.999])
def test_the_target_of_a_confident_row_is_off_by_at_most_one_rounding(device, dtype, reduction, probability):
    V, labels = 32000, torch.tensor([0, 7, 16001, 31999], device=device)
    x = torch.zeros(4, V, dtype=dtype, device=device)
    x[torch.arange(4, device=device), labels] = math.log(probability / (1 - probability) * (V - 1))
    _, grad = reference.check(cross_entropy, x, labels, reduction=reduction)
    at_target = labels[:, None]
    expected = reference.gradient(x, labels, reduction=reduction).gather(1, at_target)
    error = (grad.gather(1, at_target).double() - expected).abs()
    # Half the spacing of the dtype, and 1e-6 of the softmax for fp32 arithmetic. Four rows: fp16 divides exactly.
    scale = 0.25 if reduction == "mean" else 1.0
    assert (error <= 0.5 * torch.finfo(dtype).eps * expected.abs() + 1e-6 * scale).all()


def test_a_large_common_offset_keeps_the_fraction_of_the_loss(draw, device):
    x = 2.0**24 + torch.tensor([[0.0, 2.0, 4.0, 6.0]], device=device)
    for target in range(4):
        labels = torch.tensor([target], device=device)
        loss, _ = reference.check(cross_entropy, x, labels)
        expected = math.log(sum(math.exp(j) for j in (0, 2, 4, 6))) - 2 * target
        assert float(loss) == pytest.approx(expected, rel=1e-6)
    for offset in (8192.0, -8192.0):
        x = draw.logits(4, 1000, torch.float32, device, shift=offset)
        reference.check(cross_entropy, x, draw.labels(4, 1000, device))


@pytest.mark.parametrize("offset", [1e6, -1e6])
@pytest.mark.parametrize("V", [1000, 40001])  # one block, several
def test_a_common_offset_that_is_exact_changes_no_bit(draw, device, offset, V):
    x, labels = (draw.logits(2, V, torch.float32, device) * 8).round() / 8, draw.labels(2, V, device)
    shifted = x + offset
    assert torch.equal(shifted - offset, x)
    loss, grad = reference.check(cross_entropy, x, labels)
    shifted_loss, shifted_grad = reference.check(cross_entropy, shifted, labels)
    assert torch.equal(shifted_loss, loss)
    assert torch.equal(shifted_grad, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "V",
    [
        1,
        3,  # less than a vector
        127,  # less than a block has threads
        5000,
        100_000,  # several blocks, of which all but one see nothing finite
    ],
)
def test_one_finite_logit_gives_a_finite_result_wherever_it_stands(device, dtype, V):
    for column in sorted({0, V // 2, V - 1}):
        x = torch.full((1, V), -math.inf, dtype=dtype, device=device)
        x[0, column] = 10.0
        loss, grad = reference.check(cross_entropy, x, torch.tensor([column], device=device))
        assert loss == 0
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stretches_of_minus_infinity_take_no_part(draw, device, dtype):
    V = 20_000
    for begin, end in ((0, V // 2), (V // 2, V), (0, V - 1), (1, V), (8, 16), (0, 4096), (V - 4096, V)):
        x = draw.logits(2, V, dtype, device)
        x[:, begin:end] = -math.inf
        column = end if end < V else begin - 1
        _, grad = reference.check(cross_entropy, x, torch.tensor([column, column], device=device))
        assert (grad[:, begin:end] == 0).all()


@pytest.mark.parametrize("lowest", [-3.4028234663852886e38, -3e38])
def test_the_lowest_finite_logits_are_ordinary_ones(device, lowest):
    for x, target in (
        ([lowest] * 5, 2),
        ([-math.inf, lowest, -math.inf], 1),
        ([0.0, lowest, 1.0], 0),
        ([3e38, lowest, 3e38], 2),
    ):
        logits = torch.tensor([x], device=device)
        loss, _ = reference.check(cross_entropy, logits, torch.tensor([target], device=device))
        assert loss.isfinite()


def test_a_loss_beyond_fp32_is_infinite_and_its_gradient_finite(device):
    x = torch.tensor([[3e38, -3e38, 0.0]], device=device).requires_grad_()
    loss = cross_entropy(x, torch.tensor([1], device=device))
    loss.backward()
    assert loss == math.inf
    assert x.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_logits_whose_z_overflows_do_no_harm_where_the_multiplier_is_zero(device):
    x = torch.tensor([[1e30, 0.0, -1e30], [-1e30, -1e30, -1e30]], device=device)
    labels = torch.tensor([0, 2], device=device)
    loss, grad = reference.check(cross_entropy, x, labels, reduction="sum")
    assert float(loss) == pytest.approx(math.log(3), rel=1e-6)
    with torch.no_grad():
        assert float(cross_entropy(x, labels, reduction="sum")) == pytest.approx(math.log(3), rel=1e-6)
    assert grad.isfinite().all()


def test_a_row_without_a_finite_logit_gives_nan_as_in_pytorch(draw, device):
    x, labels = draw.logits(3, 50, torch.float32, device), torch.tensor([1, 2, 3], device=device)
    x[1] = -math.inf
    leaf, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = cross_entropy(leaf, labels), F.cross_entropy(theirs, labels)
    loss.backward()
    expected.backward()
    assert loss.isnan()
    assert expected.isnan()
    assert leaf.grad[1].isnan().all()
    torch.testing.assert_close(leaf.grad, theirs.grad, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("V", [1, 9, 1000, 40001])
def test_an_ignored_row_has_gradient_zero_whatever_it_holds(draw, device, bad, V):
    x, labels = draw.logits(4, V, torch.float32, device), draw.labels(4, V, device)
    x[0, 0], x[1, V - 1], x[2] = bad, bad, -math.inf
    labels[:3] = -100
    loss, grad = reference.check(cross_entropy, x, labels, z_loss_multiplier=1e-3)
    assert loss.isfinite()
    assert (grad[:3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 3, 127, 1000, 32001, 50257, 129920, 151936])  # on and off every vector and slice
def test_no_column_beyond_the_last_counts_in_very_negative_rows(draw, device, dtype, V):
    x, labels = draw.logits(2, V, dtype, device, shift=-100.0), draw.labels(2, V, device)
    labels[0] = V - 1
    _, grad = reference.check(cross_entropy, x, labels, reduction="sum", z_loss_multiplier=0.0)
    # A row's gradient adds up to 0: its elements' sizes add up to at most 2, each rounded by at most eps / 2, or by
    # 2^-25 where fp16 has no smaller number; 4e-6 for the fp32 arithmetic.
    bound = torch.finfo(dtype).eps + 4e-6 + (V * 2.0**-25 if dtype == torch.float16 else 0.0)
    assert (grad.double().sum(dim=1).abs() <= bound).all()


@pytest.mark.parametrize("feature", EACH_FEATURE[2:], ids=named)
@pytest.mark.parametrize("V", [1, 3, 127, 1000, 32001, 50257])  # on and off every vector and slice
def test_no_column_beyond_the_last_counts_with_any_feature(draw, device, feature, V):
    x, labels = draw.logits(2, V, torch.float32, device, shift=-100.0), draw.labels(2, V, device)
    labels[0] = V - 1
    _, grad = reference.check_options(cross_entropy, x, labels, incoming=per_row(x), reduction="none", **feature)
    if "softcap" not in feature:
        assert (grad.double().sum(dim=1).abs() <= 4e-6).all()
    exact = torch.distributions.Categorical(logits=x.double()).entropy()
    torch.testing.assert_close(entropy(x).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [3, 65537])  # just above a power of two: half a padded tile would be filler
@pytest.mark.parametrize("softcap", [1.0, 30.0, 1e4])
def test_filler_is_no_logit_after_a_softcap_either(device, dtype, V, softcap):
    for value in (-100.0, 0.0, 100.0, -6e4):
        x = torch.full((1, V), value, dtype=dtype, device=device)
        for feature in ({}, {"label_smoothing": 0.1}, {"logit_scale": 0.5}):
            loss = cross_entropy(x, torch.tensor([V - 1], device=device), softcap=softcap, **feature)
            assert float(loss) == pytest.approx(math.log(V), rel=1e-6)


LAYOUTS = {
    "leading dimensions swapped": lambda big: big[:32].view(4, 8, 80).transpose(0, 1),
    "wider rows": lambda big: big[:, :5],
    "every second row": lambda big: big[::2],
    "columns first": lambda big: big.t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stride_of_the_rows_is_honoured(draw, device, layout, reduction, dtype):
    x = LAYOUTS[layout](draw.logits(40, 80, dtype, device))
    labels = draw.labels(x.shape[:-1].numel(), x.shape[-1], device).view(x.shape[:-1])
    for feature in EACH_FEATURE[:3]:
        leaf, dense = x.detach().requires_grad_(), x.reshape(-1).view(x.shape).clone().requires_grad_()
        assert dense.is_contiguous()
        loss, expected = (cross_entropy(each, labels, reduction=reduction, **feature) for each in (leaf, dense))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)  # sums in another alignment
        grads = torch.autograd.grad(loss.sum(), leaf)[0], torch.autograd.grad(expected.sum(), dense)[0]
        torch.testing.assert_close(*grads, rtol=max(torch.finfo(dtype).eps, 2e-6), atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [2, 65537, 65536])  # just above a power of two, where a padded tile would be half empty
@pytest.mark.parametrize("value", [-100.0, 0.0, 100.0])
def test_a_flat_row_has_loss_log_v(device, dtype, V, value):
    x = torch.full((1, V), value, dtype=dtype, device=device)
    loss, _ = reference.check(cross_entropy, x, torch.tensor([V - 1], device=device))
    assert float(loss) == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("peak", [20.0, 80.0, 1000.0])  # the rest small, below fp16, below fp32's exponential
def test_peaked_rows_are_right_at_and_off_the_peak(draw, device, dtype, peak):
    V = 5003
    x = draw.logits(4, V, dtype, device)
    x[0, 0] = x[1, V - 1] = x[2, 2500] = x[3, 77] = peak
    for labels in ([0, V - 1, 2500, 77], [1, V - 2, 0, V - 1]):
        reference.check(cross_entropy, x, torch.tensor(labels, device=device), reduction="sum")


@pytest.mark.parametrize("z_loss_multiplier", [1e-4, 0.1, 1.0])
def test_a_z_loss_on_rows_far_from_zero_is_right(draw, device, z_loss_multiplier):
    for shift in (-50.0, 0.0, 200.0):
        x = draw.logits(8, 1000, torch.float32, device, shift=shift)
        options = {"z_loss_multiplier": z_loss_multiplier, "reduction": "sum"}
        reference.check(cross_entropy, x, draw.labels(8, 1000, device, ignored=0.3), **options)


@pytest.mark.parametrize(
    ("B", "V"),
    [
        pytest.param(512, 8000, id="small"),
        pytest.param(4096, 32000, id="training", marks=pytest.mark.gpu),
    ],
)
def test_fp16_gradients_of_a_mean_do_not_underflow_under_a_loss_scale(draw, B, V):
    device = torch.device("cpu" if B == 512 else "cuda:0")
    x, labels = draw.logits(B, V, torch.float16, device), draw.labels(B, V, device)
    _, grad = reference.check(cross_entropy, x, labels, grad_output=65536.0)
    assert (grad != 0).all()


# --- Targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-1, -100])
@pytest.mark.parametrize("target", [10, -4, 2**31, 2**32 + 1, -(2**31) - 1])
def test_a_target_out_of_range_never_gives_a_plausible_number(draw, device, ignore_index, target):
    x, labels = draw.logits(3, 10, torch.float32, device), torch.tensor([3, target, ignore_index], device=device)
    for leaf in (x, x.clone().requires_grad_()):
        if device.type == "cpu":
            with pytest.raises(IndexError, match=f"got {target} in row 1"):
                cross_entropy(leaf, labels, ignore_index=ignore_index)
        else:
            assert cross_entropy(leaf, labels, ignore_index=ignore_index).isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 127, 2**40])
def test_an_ignored_row_at_the_start_of_an_allocation_reads_nothing_through_its_target(
    draw, device, dtype, ignore_index
):
    x = draw.logits(1, 128, dtype, device)
    labels = torch.tensor([ignore_index], device=device)
    loss, grad = reference.check(cross_entropy, x, labels, ignore_index=ignore_index)
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 127, 2**40])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_an_ignored_row_reads_no_class_weight_through_its_target(draw, device, dtype, ignore_index, reduction):
    x = draw.logits(1, 128, dtype, device).requires_grad_()
    tables = {"weight": torch.full((128,), math.nan, device=device), "row_weight": torch.ones(1, device=device)}
    for feature in ({}, {"softcap": 5.0}):
        output = cross_entropy(
            x, torch.tensor([ignore_index], device=device), ignore_index, reduction, **tables, **feature, **EVERY_OUTPUT
        )
        assert (output.loss == 0).all()
        assert output.lse.isfinite()
        assert (torch.autograd.grad(output.loss.sum(), x)[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 1e-4])
def test_without_a_valid_row_the_losses_of_the_rows_are_zero(draw, device, dtype, z_loss_multiplier):
    x, labels = draw.logits(5, 10, dtype, device), torch.full((5,), -100, device=device)
    x[0, 0], x[1] = math.nan, -math.inf
    leaf = x.requires_grad_()
    losses = cross_entropy(leaf, labels, reduction="none", z_loss_multiplier=z_loss_multiplier)
    assert losses.tolist() == [0.0] * 5
    assert (torch.autograd.grad((losses * torch.arange(5, device=device)).sum(), leaf)[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 1e-4])
def test_without_a_valid_row_loss_and_gradient_are_zero(draw, device, dtype, reduction, z_loss_multiplier):
    x, labels = draw.logits(5, 10, dtype, device), torch.full((5,), -100, device=device)
    x[0, 0], x[1] = math.nan, -math.inf
    options = {"reduction": reduction, "z_loss_multiplier": z_loss_multiplier}
    loss, grad = reference.check(cross_entropy, x, labels, **options)
    assert loss == 0
    assert (grad == 0).all()
    assert cross_entropy(x, labels, **options) == 0
    sums = cross_entropy_with_grad_kernel(x, labels, z_loss_multiplier)
    assert [float(total) for total in sums] == [0, 0, 0]
    assert (x == 0).all()


@pytest.mark.parametrize("z_loss_multiplier", [0.0, 1e-2])
@pytest.mark.parametrize("labels", [[1, -100, 2, -100], [-100, -100, 5, -100]])  # half the rows, one row
def test_a_mean_divides_loss_z_loss_and_gradient_by_the_valid_rows(draw, device, labels, z_loss_multiplier):
    x, labels = draw.logits(4, 8, torch.float32, device), torch.tensor(labels, device=device)
    valid = labels != -100
    loss, grad = reference.check(cross_entropy, x, labels, z_loss_multiplier=z_loss_multiplier)
    alone, grad_alone = reference.check(cross_entropy, x[valid], labels[valid], z_loss_multiplier=z_loss_multiplier)
    assert float(loss) == pytest.approx(float(alone), rel=1e-6)
    torch.testing.assert_close(grad[valid], grad_alone, rtol=1e-6, atol=1e-8)  # sums of rows in another alignment
    plain = x[valid].clone().requires_grad_()
    lse = plain.logsumexp(dim=1)
    expected = F.cross_entropy(plain, labels[valid]) + z_loss_multiplier * lse.square().mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad[valid], plain.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["int", "float", "cpu", "device", "int64 on the device", "another device"])
def test_micro_batches_divided_by_a_given_count_equal_the_mean_of_all(draw, device, kind):
    x, labels = draw.logits(120, 50, torch.float32, device), draw.labels(120, 50, device)
    labels[:10] = labels[100:110] = -100
    n = int((labels != -100).sum())
    if kind == "another device" and (device.type == "cpu" or torch.cuda.device_count() < 2):
        pytest.skip("needs two GPUs")
    makes = {
        "int": lambda: n,
        "float": lambda: float(n),
        "cpu": lambda: torch.tensor(n),
        "device": lambda: torch.tensor(float(n), device=device),
        "int64 on the device": lambda: (labels != -100).sum(),
        "another device": lambda: torch.tensor(n, device="cuda:1"),
    }
    whole, whole_grad = reference.check(cross_entropy, x, labels)
    leaf, total = x.clone().requires_grad_(), 0.0
    for part in (slice(0, 13), slice(13, 120)):
        loss = cross_entropy(leaf[part], labels[part], normalizer=makes[kind]())
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(leaf.grad, whole_grad, rtol=1e-5, atol=1e-8)


def test_an_ignore_index_in_range_drops_rows_and_keeps_the_class(draw, device):
    x, labels = draw.logits(6, 3, torch.float32, device), torch.tensor([0, 1, 2, 0, 1, 2], device=device)
    loss, grad = reference.check(cross_entropy, x, labels, ignore_index=0)
    assert float(loss) == pytest.approx(float(F.cross_entropy(x, labels, ignore_index=0)), rel=1e-6)
    assert (grad[labels == 0] == 0).all()
    assert (grad[labels != 0][:, 0] > 0).all()


def test_sums_over_micro_batches_divided_by_the_count_equal_the_mean_of_all(draw, device):
    x, labels = draw.logits(120, 50, torch.float32, device), draw.labels(120, 50, device)
    labels[:10] = labels[100:110] = -100
    labels[3:6] = 7
    parts = ((slice(0, 10), 3), (slice(10, 120), 100))
    assert [int((labels[part] != -100).sum()) for part, _ in parts] == [n for _, n in parts]
    whole, whole_grad = reference.check(cross_entropy, x, labels)
    for divisor in (103, 103.0, torch.tensor(103.0), torch.tensor(103, device=device), (labels != -100).sum()):
        leaf, total = x.clone().requires_grad_(), 0.0
        for part, _ in parts:
            loss = cross_entropy(leaf[part], labels[part], reduction="sum") / divisor
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(whole), rel=1e-6)
        torch.testing.assert_close(leaf.grad, whole_grad, rtol=1e-5, atol=1e-8)  # two fp32 roundings for one


# --- Autograd -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_output", [0.0, 1 / 8, 3.0, 65536.0])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_what_comes_in_scales_the_gradient_whatever_it_is(draw, device, dtype, grad_output, reduction):
    x, labels = draw.logits(16, 1024, dtype, device), draw.labels(16, 1024, device)
    row_weight = torch.full((16,), 1 / 16, device=device)  # so that fp16 holds the gradients
    came = Incoming(torch.full((16,) if reduction == "none" else (), grad_output, device=device))
    for feature in EACH_FEATURE:
        options = {"reduction": reduction, "row_weight": row_weight, **feature}
        reference.check_options(cross_entropy, x, labels, incoming=came, **options)


def test_each_row_is_scaled_by_its_own_incoming_gradient(draw, device):
    x, labels = draw.logits(8, 15, torch.float32, device), draw.labels(8, 15, device)
    labels[0] = -100
    weight = torch.linspace(0, 1, 8, device=device)
    leaf, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (cross_entropy(leaf, labels, reduction="none") * weight).sum().backward()
    (F.cross_entropy(theirs, labels, reduction="none") * weight).sum().backward()
    torch.testing.assert_close(leaf.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    reference.check_options(cross_entropy, x, labels, incoming=Incoming(weight), reduction="none")


DATA_PARALLEL = """
import gc, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from greyhound.nn.functional import cross_entropy

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
hidden, labels = torch.randn(32, 16), torch.randint(50, (32,))
labels[::5] = -100
count = (labels != -100).sum()
start = torch.randn(50, 16)
part = slice(0, 11) if rank == 0 else slice(11, 32)

def step(layer, rows, **options):
    cross_entropy(layer(hidden[rows]), labels[rows], **options).backward()

whole = torch.nn.Linear(16, 50, bias=False)
whole.weight.data.copy_(start)
step(whole, slice(None), softcap=5.0)
for options in ({"inplace": True}, {}, {"inplace_backward": True}):
    layer = torch.nn.Linear(16, 50, bias=False)
    layer.weight.data.copy_(start)
    # The gradients of the ranks are averaged, so each divides by its share of the rows of all.
    step(torch.nn.parallel.DistributedDataParallel(layer), part, normalizer=count / 2, softcap=5.0, **options)
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad, rtol=1e-4, atol=1e-6)
# A reducer that is still there when the interpreter ends aborts it now and then, whatever the loss (PyTorch 2.13).
del layer
gc.collect()
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_divide_by_the_count_of_all_train_as_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command, store = [sys.executable, "-c", DATA_PARALLEL], str(tmp_path / "store")
    ranks = [
        subprocess.Popen([*command, str(rank), store], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


SAVING_OPERATIONS = {"tanh": torch.tanh, "softmax": lambda raw: raw.softmax(dim=-1), "exp": torch.exp}


@pytest.mark.parametrize("operation", SAVING_OPERATIONS)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_an_operation_that_saved_the_logits_is_right_or_raises_where_they_are_overwritten(
    draw, device, operation, reduction
):
    saves = SAVING_OPERATIONS[operation]
    raw, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    gradients = []
    for function in (cross_entropy, F.cross_entropy):
        leaf = raw.clone().requires_grad_()
        y = saves(leaf)
        (function(y, labels, reduction=reduction).sum() + y.square().mean()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    for name in ("inplace_backward",) if reduction == "none" else ("inplace", "inplace_backward"):
        loss = cross_entropy(saves(raw.clone().requires_grad_()), labels, reduction=reduction, **{name: True})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()
        with pytest.raises(ValueError, match=f"^{name}: expected logits that are not a leaf"):
            cross_entropy(raw.clone().requires_grad_(), labels, reduction=reduction, **{name: True})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_no_feature_changes_its_input(draw, device, dtype, mode, reduction):
    x, labels = draw.logits(8, 32, dtype, device), draw.labels(8, 32, device)
    before, version = x.clone(), x._version
    for feature in (*EACH_FEATURE, EVERY_OUTPUT):
        leaf = x.detach().requires_grad_()
        with mode():
            output = cross_entropy(leaf, labels, reduction=reduction, **feature)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        if loss.requires_grad:
            (3 * loss).sum().backward()
    assert reference.same_bits(x, before)
    assert x._version == version


def test_no_gradient_of_an_extra_output_is_dropped_and_no_second_one_made_up(draw, device):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 20, device, ignored=0.3)
    for name in ("lse", "entropy"):
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        output = cross_entropy(leaf, labels, **EVERY_OUTPUT)
        getattr(output, name).mean().backward()
        expected = exact.logsumexp(dim=1) if name == "lse" else torch.distributions.Categorical(logits=exact).entropy()
        expected.mean().backward()
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    leaf = x.clone().requires_grad_()
    output = cross_entropy(leaf, labels, z_loss_multiplier=0.1, **EVERY_OUTPUT)
    assert not any(getattr(output, name).requires_grad for name in ("z_loss", "token_accuracy", "predicted_tokens"))
    for result in (
        cross_entropy(leaf, labels),
        cross_entropy(leaf, labels, reduction="none").sum(),
        cross_entropy(leaf, labels, **EVERY_OUTPUT).lse.sum(),
        entropy(leaf).sum(),
        selective_log_softmax(leaf, labels.clamp(min=0)).sum(),
    ):
        (grad,) = torch.autograd.grad(result, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            grad.sum().backward()


# --- The interface --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_a_loss_is_fp32_of_the_shape_of_its_reduction(draw, device, dtype, target_dtype, reduction):
    for shape in ((), (6,), (2, 3)):
        B = math.prod(shape)
        x, labels = draw.logits(B, 10, dtype, device).view(*shape, 10), draw.labels(B, 10, device).view(shape)
        loss = cross_entropy(x, labels.to(target_dtype), reduction=reduction)
        assert loss.dtype == torch.float32
        assert loss.shape == (shape if reduction == "none" else ())
        assert torch.equal(loss, cross_entropy(x, labels, reduction=reduction))


@pytest.mark.parametrize("reduction", ["avg", None, "batchmean", 1])
def test_a_reduction_that_does_not_exist_is_refused(device, reduction):
    x, labels = torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=f"^reduction: expected one of 'mean', 'sum', 'none', got {reduction!r}"):
        cross_entropy(x, labels, reduction=reduction)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_zero_rows_give_the_right_shapes_and_zero_columns_an_error(device, requires_grad):
    for shape in ((0, 4096), (2, 0, 4096)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=requires_grad)
        labels = torch.empty(shape[:-1], dtype=torch.int64, device=device)
        for reduction in (*REDUCTIONS, "none"):
            for feature in (*EACH_FEATURE, EVERY_OUTPUT):
                output = cross_entropy(x, labels, reduction=reduction, **feature)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                assert loss.shape == (shape[:-1] if reduction == "none" else ())
                assert not loss.any()
                if requires_grad:
                    assert torch.autograd.grad(loss.sum(), x)[0].shape == shape
        assert entropy(x).shape == selective_log_softmax(x, labels).shape == shape[:-1]
    for shape in ((4, 0), (2, 2, 0)):
        x, labels = torch.empty(shape, device=device), torch.zeros(shape[:-1], dtype=torch.int64, device=device)
        for reduction in (*REDUCTIONS, "none"):
            with pytest.raises(ValueError, match=r"^logits: expected 1 to 2147483647 columns, got 0"):
                cross_entropy(x, labels, reduction=reduction)


class RawInForward(torch.autograd.Function):
    """Calls the raw helper where a user would: on what a forward pass is given."""

    @staticmethod
    def forward(ctx, logits, labels):
        values = logits.clone()
        loss = cross_entropy_with_grad_kernel(values, labels).ce_sum.clone()
        ctx.save_for_backward(values)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        return ctx.saved_tensors[0] * grad_loss, None


def test_tensors_that_want_a_gradient_reach_the_kernels(draw, device):
    x, labels = draw.logits(4, 100, torch.float32, device), draw.labels(4, 100, device)
    expected = float(reference.loss(x, labels, reduction="sum"))
    parameter = torch.nn.Parameter(x.clone())
    for leaf in (x.clone().requires_grad_(), parameter, parameter.view(2, 2, 100)):
        target = labels.view(leaf.shape[:-1])
        with torch.no_grad():
            for feature in ({}, {"softcap": 1e4}):  # a cap that caps next to nothing
                loss = cross_entropy(leaf, target, reduction="sum", **feature)
                assert float(loss) == pytest.approx(expected, rel=1e-5)
        loss = cross_entropy(leaf, target, reduction="none")
        assert float(loss.detach().sum()) == pytest.approx(expected, rel=1e-6)
    leaf = x.clone().requires_grad_()
    loss = RawInForward.apply(leaf, labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert float(cross_entropy_with_grad_kernel(parameter, labels).ce_sum) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(leaf.grad, parameter.detach())


def test_a_trainer_gets_its_loss_and_its_metric_from_one_pass(draw, device):
    hidden, labels = draw.logits(40, 16, torch.float32, device).view(4, 10, 16), draw.labels(40, 50, device).view(4, 10)
    weight = draw.logits(50, 16, torch.float32, device).requires_grad_()
    optimizer, accuracies = torch.optim.Adam([weight], lr=0.1), []
    for _ in range(60):
        logits = F.linear(hidden, weight)
        output = cross_entropy(logits, labels, shift=True, return_token_accuracy=True, inplace=True)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        accuracies.append(float(output.token_accuracy))
    assert accuracies[-1] > 0.8 > accuracies[0]
    with torch.no_grad():
        logits = F.linear(hidden, weight)
        output = cross_entropy(logits, labels, shift=True, return_token_accuracy=True, return_predicted_tokens=True)
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1))
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)
    hits = output.predicted_tokens[:, :-1] == labels[:, 1:]
    assert float(output.token_accuracy) == pytest.approx(float(hits.float().mean()))


def test_a_trainer_whose_logits_never_exist_gets_its_loss_and_its_metric(draw, device):
    hidden, labels = draw.logits(40, 16, torch.float32, device).view(4, 10, 16), draw.labels(40, 50, device).view(4, 10)
    weight = draw.logits(50, 16, torch.float32, device).requires_grad_()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    optimizer, accuracies = torch.optim.Adam([weight], lr=0.1), []
    for _ in range(60):
        output = chunked_linear_cross_entropy(hidden, weight, shifted, return_token_accuracy=True, chunk_size=9)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        accuracies.append(float(output.token_accuracy))
    assert accuracies[-1] > 0.8 > accuracies[0]
    with torch.no_grad():
        output = chunked_linear_cross_entropy(hidden, weight, shifted, return_token_accuracy=True)
        logits = F.linear(hidden, weight)[:, :-1]
    expected = F.cross_entropy(logits.reshape(-1, 50), labels[:, 1:].reshape(-1))
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(output.token_accuracy) == pytest.approx(float((logits.argmax(-1) == labels[:, 1:]).float().mean()))


def test_micro_batches_over_the_global_count_are_the_whole_batch(draw, device):
    hidden, labels = draw.logits(40, 16, torch.float32, device), draw.labels(40, 50, device, ignored=0.4)
    weight = draw.logits(50, 16, torch.float32, device).requires_grad_()
    count = (labels != -100).sum()
    (whole,) = torch.autograd.grad(chunked_linear_cross_entropy(hidden, weight, labels), weight)
    for normalizer in (count, int(count), count.cpu(), count.float()):
        for start in range(0, 40, 10):
            part = slice(start, start + 10)
            chunked_linear_cross_entropy(hidden[part], weight, labels[part], normalizer=normalizer).backward()
        torch.testing.assert_close(weight.grad, whole)
        weight.grad = None


# --- Sizes ----------------------------------------------------------------------------------------------


def rows_are_those_that_they_are_alone(x: torch.Tensor, labels: torch.Tensor, rows: list[int]) -> None:
    """Run the raw helper on all of `x` and assert that chosen rows are right, and what they are alone.

    A row alone may be shared by more blocks, which add it in another order: it is then one rounding off at most.
    """
    originals = [x[row : row + 1].clone() for row in rows]
    cross_entropy_with_grad_kernel(x, labels)
    for row, original in zip(rows, originals, strict=True):
        together, label = x[row : row + 1], labels[row : row + 1]
        assert reference.gradient_roundings(together, original, label) <= 1, row
        alone = original.clone()
        cross_entropy_with_grad_kernel(alone, label)
        torch.testing.assert_close(together, alone, rtol=torch.finfo(x.dtype).eps, atol=2.0**-24)


def test_rows_are_those_that_they_are_alone(draw, device):
    x, labels = draw.logits(64, 1024, torch.bfloat16, device), draw.labels(64, 1024, device, ignored=0.1)
    rows_are_those_that_they_are_alone(x, labels, list(range(0, 64, 7)))


@pytest.mark.gpu
def test_more_than_2_31_elements_are_right(draw, cuda):
    B, V = 16400, 131072  # row 16384 begins at element 2^31
    x, labels = draw.logits(B, V, torch.bfloat16, cuda), draw.labels(B, V, cuda)
    original = x.clone()
    rows_are_those_that_they_are_alone(x, labels, [0, 1, 8191, 16383, 16384, 16385, B - 1])
    assert reference.gradient_roundings(x, original, labels) <= 1


@pytest.mark.gpu
def test_more_than_2_31_elements_are_right_forward_and_backward(draw, cuda):
    B, V = 65536, 50257  # 3.3e9 elements, an odd row
    x, labels = draw.logits(B, V, torch.float16, cuda), draw.labels(B, V, cuda, ignored=0.1)
    reference.check(cross_entropy, x, labels, grad_output=1024.0)


@pytest.mark.gpu
def test_more_than_2_32_elements_are_right(draw, cuda):
    B, V = 88000, 50000  # 4.4e9 elements; rows about elements 2^31 and 2^32
    x, labels = draw.logits(B, V, torch.float16, cuda), draw.labels(B, V, cuda)
    expected = float(reference.loss(x, labels))
    tolerance = reference.loss_tolerance(x, labels)
    assert abs(float(cross_entropy(x, labels)) - expected) <= tolerance
    rows_are_those_that_they_are_alone(x, labels, [0, 42948, 42949, 42950, 85898, 85899, 85900, B - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("feature", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1}], ids=named)
def test_the_losses_of_rows_beyond_2_32_elements_are_those_that_they_have_alone(draw, cuda, feature):
    B, V = 88000, 50000  # 4.4e9 elements
    leaf, labels = draw.logits(B, V, torch.float16, cuda).requires_grad_(), draw.labels(B, V, cuda, ignored=0.1)
    rows = [0, 42948, 42949, 42950, 85898, 85899, 85900, B - 1]
    labels[rows] = torch.arange(len(rows), device=cuda) * 7000
    logits = leaf * 1
    alone = [logits[row : row + 1].detach().clone().requires_grad_() for row in rows]
    options = {"reduction": "none", "inplace_backward": True, **feature}
    output = cross_entropy(logits, labels, **options, return_lse=True, return_predicted_tokens=True)
    (grad,) = torch.autograd.grad(output.loss, logits, torch.ones(1, device=cuda).expand(B))
    for row, each in zip(rows, alone, strict=True):
        loss = cross_entropy(each, labels[row : row + 1], reduction="none", **feature)
        loss.sum().backward()
        terms = reference.terms_with_options(each.detach(), labels[row : row + 1], reduction="none", **feature)
        torch.testing.assert_close(output.loss[row : row + 1], loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(output.lse[row : row + 1].double(), terms.lse, rtol=1e-6, atol=0)
        assert output.predicted_tokens[row] == reference.predicted_tokens(each)[0]
        torch.testing.assert_close(grad[row : row + 1], each.grad, rtol=torch.finfo(torch.float16).eps, atol=2.0**-24)


@pytest.mark.gpu
@pytest.mark.slow
def test_nearly_as_many_rows_as_32_bits_count_are_right(cuda):
    B = 2_000_000_000  # two numbers a row, or the rows and an eighth of them again, pass 2^31
    x = torch.ones(B, 1, dtype=torch.bfloat16, device=cuda)
    totals = cross_entropy_with_grad_kernel(x, torch.zeros(1, dtype=torch.int64, device=cuda).expand(B))
    assert totals.ce_sum == 0
    assert float(totals.z_sum) == pytest.approx(B, rel=1e-5)
    assert float(totals.n_valid) == pytest.approx(B, rel=1e-5)
    assert not x.any()


@pytest.mark.gpu
def test_a_row_stride_that_takes_rows_beyond_2_31_elements_is_honoured(draw, cuda):
    buffer = torch.zeros((1 << 31) + 4096, dtype=torch.bfloat16, device=cuda)
    x = buffer.as_strided((3, 1000), (1 << 30, 1))
    x.copy_(draw.logits(3, 1000, torch.bfloat16, cuda))
    labels = torch.tensor([0, 500, 999], device=cuda)
    reference.check(cross_entropy, x.clone(), labels)
    original = x.clone()
    loss = cross_entropy(x, labels)
    assert abs(float(loss) - float(reference.loss(original, labels))) <= reference.loss_tolerance(original, labels)
    cross_entropy_with_grad_kernel(x, labels)
    assert reference.gradient_roundings(x, original, labels) <= 1
    x.zero_()
    assert not buffer.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "V",
    [
        2**18,
        2**20,  # more than the target of the largest cluster
        2**22,  # streamed
        2**22 + 1,
        2**28,
        2**31 - 1,  # the widest row
    ],
)
def test_very_wide_rows_are_right(draw, cuda, dtype, V):
    x, labels = draw.logits(1, V, dtype, cuda), torch.tensor([V - 1], device=cuda)
    original = x.clone()
    expected, tolerance = float(reference.loss(x, labels)), reference.loss_tolerance(x, labels)
    assert abs(float(cross_entropy(x, labels)) - expected) <= tolerance
    totals = cross_entropy_with_grad_kernel(x, labels)
    assert abs(float(totals.ce_sum) - expected) <= tolerance
    assert reference.gradient_roundings(x, original, labels) <= 1


@pytest.mark.gpu
def test_wide_rows_next_to_each_other_are_right(draw, cuda):
    B, V = 2, 2_000_003  # streamed; the second row off every vector
    x, labels = draw.logits(B, V, torch.bfloat16, cuda), torch.tensor([0, V - 1], device=cuda)
    reference.check(cross_entropy, x, labels, z_loss_multiplier=1e-4)


# --- The host -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_step_follows_its_inputs_when_replayed(draw, cuda, dtype):
    B, V = 128, 5003
    x, labels = draw.logits(B, V, dtype, cuda).requires_grad_(), draw.labels(B, V, cuda, ignored=0.2)
    torch.autograd.grad(2 * cross_entropy(x, labels), x)  # on the default stream; the capture is on another
    with torch.no_grad():
        cross_entropy(x, labels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(x, labels)
        (grad,) = torch.autograd.grad(2 * loss, x)
        with torch.no_grad():
            alone = cross_entropy(x, labels)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(draw.logits(B, V, dtype, cuda))
        labels.copy_(draw.labels(B, V, cuda, ignored=0.3))
        graph.replay()
        expected = cross_entropy(x, labels)
        (expected_grad,) = torch.autograd.grad(2 * expected, x)
        assert torch.equal(loss, expected)
        assert torch.equal(grad, expected_grad)
        assert float(alone) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.gpu
def test_eager_calls_between_replays_do_not_disturb_a_graph(draw, cuda):
    x, labels = draw.logits(64, 32000, torch.bfloat16, cuda).requires_grad_(), draw.labels(64, 32000, cuda)
    (expected,) = torch.autograd.grad(3 * cross_entropy(x, labels), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (grad,) = torch.autograd.grad(3 * cross_entropy(x, labels), x)
    other = torch.cuda.Stream(cuda)
    for _ in range(10):
        graph.replay()
        with torch.cuda.stream(other):
            y = draw.logits(64, 32000, torch.bfloat16, cuda).requires_grad_()
            cross_entropy(y, labels).backward()
    torch.cuda.synchronize()
    assert torch.equal(grad, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_gpu(draw, cuda, dtype):
    x, labels = draw.logits(64, 1000, dtype, cuda), draw.labels(64, 1000, cuda, ignored=0.3)
    labels[3] = 1000  # out of range, which the host must not look for
    leaf = x.clone().requires_grad_()
    cross_entropy(leaf, labels).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = cross_entropy(leaf, labels, z_loss_multiplier=1e-4)
        torch.autograd.grad(3 * loss, leaf, retain_graph=True)
        torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            cross_entropy(leaf, labels)
        cross_entropy_with_grad_kernel(x, labels, 1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_on_a_side_stream_waits_for_that_stream_alone(draw, cuda):
    source, labels = draw.logits(64, 5000, torch.float32, cuda), draw.labels(64, 5000, cuda)
    cross_entropy(source.clone().requires_grad_(), labels).backward()
    x = torch.full_like(source, math.nan).requires_grad_()
    side = torch.cuda.Stream(cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a launch elsewhere would read NaN
        with torch.no_grad():
            x.copy_(source)
        loss = cross_entropy(x, labels)
        (grad,) = torch.autograd.grad(3 * loss, x)
    side.synchronize()
    assert loss.isfinite()
    assert reference.gradient_roundings(grad, source, labels, reduction="mean", grad_output=3.0, kept=1 / 3) <= 1


@pytest.mark.gpu
def test_forward_and_backward_run_on_the_device_of_the_logits(draw, cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for current, other in ((0, 1), (1, 0)):
        there = torch.device("cuda", other)
        x, labels = draw.logits(64, 1000, torch.bfloat16, there), draw.labels(64, 1000, there, ignored=0.2)
        with torch.cuda.device(current):
            reference.check(cross_entropy, x, labels, grad_output=3.0)
            assert torch.cuda.current_device() == current


FIRST_CALLS_AT_ONCE = """
import sys, threading
import torch
torch.set_num_threads(1)
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

device = torch.device(sys.argv[1])
shapes = [(V, dtype) for V in (1000, 3001, 40001, 70000) for dtype in (torch.bfloat16, torch.float32)]
inputs = [(torch.randn(16, V).to(device, dtype), torch.randint(V, (16,)).to(device)) for V, dtype in shapes]
results, errors = [None] * 8, []
barrier = threading.Barrier(8)

def work(i):
    x, labels = inputs[i]
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, labels)
    (3 * loss).backward()
    with torch.no_grad():
        alone = cross_entropy(x, labels)
    raw = x.clone()
    sums = cross_entropy_with_grad_kernel(raw, labels)
    return [loss.detach(), leaf.grad, alone, raw, *sums]

def start(i):
    try:
        barrier.wait()
        results[i] = work(i)
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
if device.type == "cuda":
    torch.cuda.synchronize()
for i in range(8):
    assert all(torch.equal(a, b) for a, b in zip(results[i], work(i), strict=True)), shapes[i]
assert threading.active_count() == 1, threading.enumerate()
"""


def test_eight_threads_may_make_their_first_calls_at_once(device):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", FIRST_CALLS_AT_ONCE, str(device)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
def test_a_call_costs_the_host_little(draw, cuda):
    if kernels.implementation(cuda)[0] is None:
        pytest.skip("the portable code launches many kernels")
    x, labels = draw.logits(1, 1024, torch.bfloat16, cuda), draw.labels(1, 1024, cuda)
    leaf = x.clone().requires_grad_()

    def step():
        torch.autograd.grad(cross_entropy(leaf, labels), leaf)

    # Generous limits for a busy machine: a compiled launcher takes about 5 us, an autograd step of PyTorch's 150.
    for work, limit_us in ((lambda: cross_entropy_with_grad_kernel(x, labels), 150), (step, 1000)):
        costs_us = []
        for _ in range(20):
            work()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                work()
            costs_us.append((time.perf_counter() - start) / 50 * 1e6)
        assert min(costs_us) <= limit_us


def test_an_unsupported_dtype_is_refused_before_a_graph_exists(device):
    x = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    with pytest.raises(TypeError, match=r"^logits: expected dtype float16, bfloat16, float32, got torch.float64"):
        cross_entropy(x, torch.zeros(2, dtype=torch.int64, device=device))
