"""The options of `greyhound.nn.functional.cross_entropy`: values, outputs, autograd, memory, shapes and refusals."""

import contextlib
import functools
import itertools
import math
import re

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from reference import Incoming
from torch.utils.checkpoint import checkpoint

from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels import portable
from greyhound.nn.functional import CrossEntropyOutput, cross_entropy, entropy, selective_log_softmax

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")
EVERY_OUTPUT = {f"return_{name}": True for name in OUTPUTS}

OPTIONS = {
    "weight": lambda draw, B, V, device: draw.logits(1, V, torch.float32, device)[0].abs(),
    "label_smoothing": lambda draw, B, V, device: 0.1,
    "softcap": lambda draw, B, V, device: 5.0,
    "logit_scale": lambda draw, B, V, device: 0.7,
    "normalizer": lambda draw, B, V, device: torch.tensor(13.0, device=device),
    "row_weight": lambda draw, B, V, device: draw.logits(1, B, torch.float32, device)[0],
    "valid_vocab": lambda draw, B, V, device: max(1, V - 3),
    "z_loss_multiplier": lambda draw, B, V, device: 1e-2,
}
COMBINATIONS = [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2)]

MODES = ("one", "another", "lse", "entropy", "all", "lse alone", "inplace", "inplace_backward")
"""What comes in: 1 for the loss; another number, for each row without a reduction; something for the lse too, the
entropy too, both; nothing but that. And 3 with the logits overwritten, where that is offered."""


def drawn_options(draw, names, reduction, B, V, device):
    """Return the options of these names, without the normalizer where there is no mean."""
    used = [name for name in names if name != "normalizer" or reduction == "mean"]
    return {name: OPTIONS[name](draw, B, V, device) for name in used}


def incoming(draw, mode, reduction, B, device):
    """Return the gradients that come in."""

    def of_rows():
        return draw.logits(1, B, torch.float32, device)[0]

    loss = of_rows() if reduction == "none" else torch.tensor(-0.7, device=device)
    if mode in ("one", "inplace", "inplace_backward"):
        loss = torch.full_like(loss, 1.0 if mode == "one" else 3.0)
    lse, h = mode in ("lse", "all", "lse alone"), mode in ("entropy", "all")
    return Incoming(None if mode == "lse alone" else loss, of_rows() if lse else None, of_rows() if h else None)


def overwriting(name):
    """Return `cross_entropy` on a copy of the logits that it may overwrite."""
    return lambda leaf, labels, **options: cross_entropy(leaf * 1, labels, **options, **{name: True})


def check(draw, mode, x, labels, *, reduction="mean", **options):
    """Check a call in one of `MODES`."""
    if mode == "inplace" and reduction == "none":
        mode = "inplace_backward"
    return reference.check_options(
        overwriting(mode) if mode.startswith("inplace") else cross_entropy,
        x,
        labels,
        incoming=incoming(draw, mode, reduction, x.shape[0], x.device),
        keeps_logits=mode == "inplace_backward",
        reduction=reduction,
        **options,
    )


SHAPES = [
    *(pytest.param("cpu", *shape, id="cpu-{}x{}".format(*shape)) for shape in ((9, 7), (6, 1000))),
    *(
        pytest.param("cuda:0", *shape, id="cuda-{}x{}".format(*shape), marks=pytest.mark.gpu)
        for shape in (
            (9, 7),  # less than a vector
            (37, 1000),  # several rows of a block
            (5, 9001),  # a block a row, odd
            (4, 33001),  # several blocks a row
            (2, 1_100_001),  # streamed in fp32
        )
    ),
]


# --- Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_option_alone_and_each_pair_is_right(draw, device, B, V, dtype, reduction):
    shift = DTYPES.index(dtype) + 3 * REDUCTIONS.index(reduction)  # so that each pair meets several modes
    for i, names in enumerate(COMBINATIONS):
        options = drawn_options(draw, names, reduction, B, V, device)
        x = draw.logits(B, V, dtype, device, scale=3.0)
        labels = draw.labels(B, options.get("valid_vocab", V), device, ignored=0.2)
        check(draw, MODES[(i + shift) % len(MODES)], x, labels, reduction=reduction, **options)


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_options_together_are_right_whatever_comes_in(draw, device, B, V, dtype, reduction):
    for mode in MODES:
        options = drawn_options(draw, OPTIONS, reduction, B, V, device)
        x = draw.logits(B, V, dtype, device, scale=3.0)
        labels = draw.labels(B, options["valid_vocab"], device, ignored=0.2)
        check(draw, mode, x, labels, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_a_valid_row_a_gradient_of_lse_and_entropy_is_still_right(draw, device, dtype, reduction):
    x, labels = draw.logits(5, 10, dtype, device), torch.full((5,), -100, device=device)
    check(draw, "all", x, labels, reduction=reduction, z_loss_multiplier=0.1)


@pytest.mark.parametrize("name", ["weight", "label_smoothing", "normalizer", "row_weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_confident_rows_are_right_at_the_target_too(draw, device, name, dtype):
    B, V = 6, 1003
    options = drawn_options(draw, [name], "mean", B, V, device)
    labels = draw.labels(B, V, device)
    for gap in (0.0, 5.0, 12.0, 20.0):
        x = draw.logits(B, V, dtype, device)
        x.scatter_add_(1, labels[:, None], torch.full((B, 1), gap, dtype=dtype, device=device))
        for mode in ("one", "another", "all"):
            check(draw, mode, x, labels, **options)


@pytest.mark.parametrize(
    "options", [{}, {"weight": True}, {"label_smoothing": 0.3}, {"weight": True, "label_smoothing": 0.3}]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_smoothing_and_reductions_are_pytorchs(draw, device, options, reduction):
    x, labels = draw.logits(16, 50, torch.float32, device), draw.labels(16, 50, device, ignored=0.3)
    if "weight" in options:
        options = {**options, "weight": draw.logits(1, 50, torch.float32, device)[0].abs()}
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = cross_entropy(ours, labels, reduction=reduction, **options)
    expected = F.cross_entropy(theirs, labels, reduction=reduction, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_dtype_are_taken_at_their_value(draw, device, dtype):
    x, labels = draw.logits(8, 20, torch.bfloat16, device), draw.labels(8, 20, device)
    weight, row_weight = draw.logits(2, 20, torch.float32, device).abs().to(dtype)
    arguments = {"weight": weight, "row_weight": row_weight[:8]}
    loss = cross_entropy(x, labels, **arguments)
    assert torch.equal(loss, cross_entropy(x, labels, **{name: each.float() for name, each in arguments.items()}))


def test_weights_of_any_stride_are_right(draw, device):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 20, device, ignored=0.2)
    wide = draw.logits(20, 3, torch.float32, device).abs()
    for weight, row_weight in ((wide[:, 1], wide[:8, 2]), (wide[:1, 0].expand(20), wide[:1, 1].expand(8))):
        for label_smoothing in (0.0, 0.2):
            options = {"weight": weight, "row_weight": row_weight, "label_smoothing": label_smoothing}
            check(draw, "another", x, labels, reduction="none", **options)


def test_weights_may_cover_the_valid_vocabulary_or_all_columns(draw, device):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 15, device)
    weight = draw.logits(1, 20, torch.float32, device)[0].abs()
    options = {"valid_vocab": 15, "label_smoothing": 0.1}
    loss = cross_entropy(x, labels, weight=weight, **options)
    assert torch.equal(loss, cross_entropy(x, labels, weight=weight[:15], **options))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_padding_columns_hold_changes_no_bit(draw, device, dtype, value):
    x, labels = draw.logits(8, 1000, dtype, device), draw.labels(8, 900, device, ignored=0.2)
    padded = x.clone()
    padded[:, 900:] = value
    options = {"valid_vocab": 900, "label_smoothing": 0.1, "softcap": 5.0, **EVERY_OUTPUT}
    results = []
    for each in (x, padded):
        leaf = each.clone().requires_grad_()
        output = cross_entropy(leaf, labels, **options)
        (output.loss + output.lse.sum() + output.entropy.sum()).backward()
        assert (leaf.grad[:, 900:] == 0).all()
        results.append([*output, leaf.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_loss(draw, device, name):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 17, device)
    options = drawn_options(draw, [name], "mean", 8, 20, device)
    assert cross_entropy(x, labels, **options) != cross_entropy(x, labels)


@pytest.mark.parametrize("name", ["label_smoothing", "softcap", "logit_scale", "row_weight", "weight", "valid_vocab"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_neutral_value_of_an_option_changes_nothing(draw, device, dtype, name):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device, ignored=0.2)
    neutral = {
        "label_smoothing": 0,
        "softcap": None,
        "logit_scale": 1,
        "row_weight": torch.ones(8, device=device),
        "weight": torch.ones(100, device=device),
        "valid_vocab": 100,
    }
    for reduction in REDUCTIONS:
        results = []
        for options in ({}, {name: neutral[name]}):
            leaf = x.clone().requires_grad_()
            loss = cross_entropy(leaf, labels, reduction=reduction, **options)
            loss.sum().backward()
            results.append((loss.detach(), leaf.grad))
        (loss, grad), (other, other_grad) = results
        torch.testing.assert_close(other, loss, rtol=1e-6, atol=1e-7)  # perhaps other code
        torch.testing.assert_close(other_grad, grad, rtol=max(torch.finfo(dtype).eps, 2e-6), atol=1e-7)


def test_a_mean_weighted_by_class_divides_the_z_loss_by_the_rows(draw, device):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 20, device, ignored=0.4)
    weight, valid = 5.0 + draw.logits(1, 20, torch.float32, device)[0], labels != -100
    output = cross_entropy(x, labels, weight=weight, z_loss_multiplier=0.1, return_z_loss=True)
    expected = 0.1 * x[valid].double().logsumexp(dim=1).square().mean()
    assert float(output.z_loss) == pytest.approx(float(expected), rel=1e-6)
    ce = F.cross_entropy(x.double(), labels, weight=weight.double())
    assert float(output.loss) == pytest.approx(float(ce + expected), rel=1e-6)


def test_row_weights_do_not_count_in_the_mean(draw, device):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 20, device)
    loss = cross_entropy(x, labels, row_weight=torch.full((8,), 3.0, device=device))
    assert float(loss) == pytest.approx(3 * float(F.cross_entropy(x, labels)), rel=1e-6)


NORMALIZERS = (103, 103.0, torch.tensor(103.0), torch.tensor([103]), torch.tensor([[103.0]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_normalizer_may_be_a_number_or_a_tensor_of_any_dtype_on_any_device(draw, device, dtype):
    x, labels = draw.logits(8, 20, dtype, device), draw.labels(8, 20, device, ignored=0.2)
    results = []
    for normalizer in (*NORMALIZERS, torch.tensor(103, device=device), torch.tensor(103.0, device=device).bfloat16()):
        leaf = x.clone().requires_grad_()
        loss = cross_entropy(leaf, labels, normalizer=normalizer, z_loss_multiplier=1e-2)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for loss, grad in results[:-1]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])
    assert float(results[-1][0]) == pytest.approx(float(results[0][0]), rel=1e-2)  # bfloat16 holds 103 as it is
    total = cross_entropy(x, labels, reduction="sum", z_loss_multiplier=1e-2)
    assert float(results[0][0]) == pytest.approx(float(total) / 103, rel=1e-6)


# --- Outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_every_output_is_right_for_ignored_rows_too(draw, device, B, V, dtype, reduction, requires_grad):
    x, labels = draw.logits(B, V, dtype, device, scale=3.0), draw.labels(B, V, device)
    labels[: B // 2] = reference.predicted_tokens(x)[: B // 2]
    labels[::3] = -100
    for options in ({}, {"softcap": 5.0, "logit_scale": 0.7}, {"label_smoothing": 0.1}):
        leaf = x.clone().requires_grad_(requires_grad)
        output = cross_entropy(leaf, labels, reduction=reduction, z_loss_multiplier=1e-2, **options, **EVERY_OUTPUT)
        options = {"reduction": reduction, "z_loss_multiplier": 1e-2, **options}
        terms = reference.terms_with_options(x, labels, **options)
        eager = reference.terms_with_options(x, labels, compute=torch.float32, **options)
        slack = reference.slack_with_options(x, terms, Incoming(), **options)
        for name, allowed in (
            ("loss", slack.loss),
            ("z_loss", slack.loss),
            ("lse", slack.lse),
            ("entropy", slack.entropy),
        ):
            ours, exact = getattr(output, name), getattr(terms, name)
            assert ours.shape == exact.shape
            assert ours.dtype == torch.float32
            assert ours.requires_grad == (requires_grad and name != "z_loss")
            error, eager_error = ((each.detach().double() - exact).abs() for each in (ours, getattr(eager, name)))
            assert (error <= allowed + eager_error).all(), name
        expected, valid = reference.predicted_tokens(x), labels != -100
        assert output.predicted_tokens.dtype == torch.int64
        assert torch.equal(output.predicted_tokens, expected)
        hits = (expected == labels) & valid
        accuracy = hits.float() if reduction == "none" else hits.sum() / valid.sum()
        torch.testing.assert_close(output.token_accuracy, accuracy.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_outputs_that_are_not_asked_for_are_none_and_the_others_share_no_memory(draw, device, reduction, requires_grad):
    x, labels = draw.logits(8, 20, torch.float32, device).requires_grad_(requires_grad), draw.labels(8, 20, device)
    for n in range(1, len(OUTPUTS) + 1):
        for names in itertools.combinations(OUTPUTS, n):
            output = cross_entropy(x, labels, reduction=reduction, **{f"return_{name}": True for name in names})
            assert isinstance(output, CrossEntropyOutput)
            assert output._fields == ("loss", *OUTPUTS)
            assert {name for name in OUTPUTS if getattr(output, name) is not None} == set(names)
            addresses = [each.untyped_storage().data_ptr() for each in output if each is not None]
            assert len(set(addresses)) == len(addresses)
            assert x.untyped_storage().data_ptr() not in addresses
    assert isinstance(cross_entropy(x, labels, reduction=reduction), torch.Tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [7, 1000, 9001, 40_001])
def test_of_equal_largest_logits_the_first_is_predicted(device, dtype, V):
    columns = sorted({0, 1, 2, V // 3, V // 2, V - 2, V - 1})
    pairs = list(itertools.combinations(columns, 2))
    x = torch.full((len(pairs) + 3, V), -1.0, dtype=dtype, device=device)
    for row, (first, second) in enumerate(pairs):
        x[row, [first, second]] = 2.0
    x[-1] = -3e4  # all equal
    x[-2], x[-2, V - 1] = -0.0, 0.0  # which are equal too
    x[-3], x[-3, :2] = 0.0, -1.0
    expected = torch.tensor([first for first, _ in pairs] + [2, 0, 0], device=device)
    labels = expected.clone()
    labels[1] = -100
    for options in ({}, {"return_entropy": True}, {"softcap": 1e-3}, {"logit_scale": 1e-3, "label_smoothing": 0.1}):
        output = cross_entropy(x, labels, return_predicted_tokens=True, return_token_accuracy=True, **options)
        assert torch.equal(output.predicted_tokens, expected)
        assert float(output.token_accuracy) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("V", [1, 7, 1000, 40_001])
def test_a_row_without_a_softmax_predicts_minus_one_and_its_results_are_nan(draw, device, V):
    x, labels = draw.logits(6, V, torch.float32, device), draw.labels(6, V, device)
    x[0, V // 2], x[1, V - 1], x[2], x[3, V - 1] = math.nan, math.inf, -math.inf, math.nan
    labels[3] = -100
    others = reference.predicted_tokens(x[4:])
    for reduction in REDUCTIONS:
        output = cross_entropy(x, labels, reduction=reduction, **EVERY_OUTPUT)
        assert torch.equal(output.predicted_tokens[:4], torch.full((4,), -1, device=device))
        assert torch.equal(output.predicted_tokens[4:], others)
        # Of nothing but -inf the sum is 0.
        assert not output.lse[:4].isfinite().any()
        assert output.entropy[:4].isnan().all()
        assert output.lse[4:].isfinite().all()
        assert output.entropy[4:].isfinite().all()
        if reduction == "none":
            assert output.loss[:3].isnan().all()
            assert output.loss[3:].isfinite().all()
            assert not output.token_accuracy[:4].any()
        else:
            assert output.loss.isnan()
            hits = (others == labels[4:]).sum()
            assert float(output.token_accuracy) == pytest.approx(float(hits) / 5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_ignored_row_is_no_hit_whatever_its_target(draw, device, reduction):
    x = draw.logits(4, 10, torch.float32, device)
    x[:3, 3], x[3] = 9.0, math.nan
    options = {"reduction": reduction, "return_token_accuracy": True}
    for ignore_index, last in ((3, 3), (-1, -1)):
        labels = torch.tensor([ignore_index, 5, 4, last], device=device)
        x[2, 4] = 10.0  # the one hit of two valid rows
        accuracy = cross_entropy(x, labels, ignore_index, **options).token_accuracy
        assert accuracy.tolist() == ([0.0, 0.0, 1.0, 0.0] if reduction == "none" else 0.5)


def test_logits_of_minus_infinity_add_nothing_to_the_entropy(draw, device):
    x = draw.logits(5, 1000, torch.float32, device)
    masked = torch.full((5, 3000), -math.inf, device=device)
    masked[:, ::3] = x
    leaves = [x.clone().requires_grad_(), masked.clone().requires_grad_()]
    results = [entropy(leaf) for leaf in leaves]
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(leaves[1].grad[:, ::3], leaves[0].grad, rtol=1e-4, atol=1e-8)
    leaves[1].grad[:, ::3] = 0
    assert not leaves[1].grad.any()


@pytest.mark.parametrize("name", ["z_loss", "token_accuracy", "predicted_tokens"])
def test_an_output_that_is_a_constant_says_so(draw, device, name):
    x, labels = draw.logits(8, 20, torch.float32, device).requires_grad_(), draw.labels(8, 20, device)
    for reduction in REDUCTIONS:
        output = cross_entropy(x, labels, reduction=reduction, z_loss_multiplier=0.1, **EVERY_OUTPUT)
        assert not getattr(output, name).requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            getattr(output, name).sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_differentiable_output_has_its_gradient_alone_and_with_the_others(draw, device, dtype, reduction):
    x, labels = draw.logits(8, 20, dtype, device), draw.labels(8, 20, device, ignored=0.3)
    for used in itertools.product([True, False], repeat=3):
        if any(used):
            came = incoming(draw, "all", reduction, 8, device)
            came = Incoming(*(each if is_used else None for each, is_used in zip(came, used, strict=True)))
            function = functools.partial(cross_entropy, return_lse=True, return_entropy=True)
            leaf = x.clone().requires_grad_()
            output = function(leaf, labels, reduction=reduction, z_loss_multiplier=1e-2, **EVERY_OUTPUT)
            total = sum(
                (o * g).sum()
                for o, g in zip((output.loss, output.lse, output.entropy), came, strict=True)
                if g is not None
            )
            total.backward()
            options = {"reduction": reduction, "z_loss_multiplier": 1e-2}
            terms, expected = reference.gradient_with_options(x, labels, came, compute=torch.float64, **options)
            slack = reference.slack_with_options(x, terms, came, **options).grad
            error = (leaf.grad.double() - expected).abs()
            roundings = 2 if came.lse is None and came.entropy is None else 1
            assert (error <= slack * 2 + roundings * torch.finfo(dtype).eps / 2 * expected.abs() + 2.0**-25).all()


def test_a_call_without_valid_rows_still_has_every_other_output(draw, device):
    x, labels = draw.logits(4, 20, torch.float32, device), torch.full((4,), -100, device=device)
    for reduction in REDUCTIONS:
        leaf = x.clone().requires_grad_()
        output = cross_entropy(leaf, labels, reduction=reduction, **EVERY_OUTPUT)
        assert not output.loss.any()
        assert not output.z_loss.any()
        assert not output.token_accuracy.any()
        torch.testing.assert_close(output.lse, x.logsumexp(dim=1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            output.entropy, torch.distributions.Categorical(logits=x).entropy(), rtol=1e-5, atol=1e-6
        )
        assert torch.equal(output.predicted_tokens, reference.predicted_tokens(x))
        output.lse.sum().backward()
        torch.testing.assert_close(leaf.grad, x.softmax(dim=1), rtol=1e-5, atol=1e-7)


# --- The functions of one output --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_selective_log_softmax_is_the_log_softmax_at_the_index(draw, device, dtype, index_dtype):
    x, index = draw.logits(12, 101, dtype, device, scale=3.0).view(3, 4, 101), draw.labels(12, 101, device).view(3, 4)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    ours = selective_log_softmax(leaf, index.to(index_dtype))
    expected = exact.log_softmax(dim=-1).gather(-1, index[..., None])[..., 0]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=2e-6)
    came = draw.logits(3, 4, torch.float32, device)
    ours.backward(came)
    expected.backward(came.double())
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


def test_selective_log_softmax_takes_minus_100_for_a_wrong_index(draw, device):
    x, index = draw.logits(3, 5, torch.float32, device), torch.tensor([0, -100, 4], device=device)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="got -100 in row 1"):
            selective_log_softmax(x, index)
    else:
        assert selective_log_softmax(x, index).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_entropy_is_that_of_the_softmax(draw, device, dtype):
    x = draw.logits(12, 101, dtype, device, scale=3.0).view(3, 4, 101)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    ours, expected = entropy(leaf), torch.distributions.Categorical(logits=exact).entropy()
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)
    came = draw.logits(3, 4, torch.float32, device)
    ours.backward(came)
    expected.backward(came.double())
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
    assert entropy(x[0, 0]).shape == ()
    assert entropy(x[:0]).shape == (0, 4)
    with pytest.raises(TypeError, match=r"^logits: expected a torch.Tensor, got list"):
        entropy([1.0])


# --- Gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("extra", [False, True])
def test_a_kept_graph_gives_each_incoming_gradient_its_own_result(draw, device, dtype, reduction, extra):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device, ignored=0.2)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    leaf = x.clone().requires_grad_()
    output = cross_entropy(leaf, labels, **options, return_lse=extra)
    outputs = (output.loss, output.lse) if extra else (output,)
    results = []
    for keep in (True, True, False):
        came = incoming(draw, "lse" if extra else "another", reduction, 8, device)
        (grad,) = torch.autograd.grad(outputs, leaf, came[: len(outputs)], retain_graph=keep)
        results.append((came, grad, grad.clone()))
    for came, grad, then in results:
        assert torch.equal(grad, then)
        _, alone = reference.check_options(cross_entropy, x, labels, incoming=came, **options)
        torch.testing.assert_close(grad, alone, rtol=2 * torch.finfo(dtype).eps, atol=2.0**-23)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(outputs, leaf, came[: len(outputs)])


def of_stride(values, kind):
    """Return the values of a vector in another stride; for `expanded` the first one for all."""
    if kind == "expanded":
        return values[:1].expand_as(values)
    if kind == "strided":
        return torch.stack((values, values + 1), dim=1)[:, 0]
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["expanded", "strided", "dense"])
def test_incoming_gradients_of_rows_may_have_any_stride(draw, device, dtype, kind):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device, ignored=0.2)
    came = [of_stride(draw.logits(1, 8, torch.float32, device)[0], kind) for _ in range(3)]
    reference.check_options(cross_entropy, x, labels, incoming=Incoming(*came), reduction="none")
    reference.check_options(cross_entropy, x, labels, incoming=Incoming(came[0]), reduction="none", softcap=5.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_scale_of_65536_reaches_fp16_gradients(draw, device, reduction):
    B, V = 64, 8000
    x, labels = draw.logits(B, V, torch.float16, device), draw.labels(B, V, device, ignored=0.1)
    # A share of the rows each, so that nothing overflows.
    weight = torch.full((B,), 1 / B, device=device) if reduction != "mean" else None
    scale = torch.full((B,) if reduction == "none" else (), 65536.0, device=device)
    options = {"reduction": reduction, "row_weight": weight, "logit_scale": 0.9}
    _, grad = reference.check_options(cross_entropy, x, labels, incoming=Incoming(scale), **options)
    assert (grad[labels != -100] != 0).all()
    overwritten = overwriting("inplace")(x.requires_grad_(), labels, **options) if reduction != "none" else None
    if overwritten is not None:
        assert torch.equal(torch.autograd.grad(overwritten, x, scale)[0], grad)


@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize("mode", ["mean", "none", "lse", "entropy", "inplace_backward"])
def test_a_gradient_of_the_gradient_raises(draw, device, mode, retain_graph):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    if mode == "inplace_backward":
        result = overwriting(mode)(x, labels)
    elif mode in ("lse", "entropy"):
        result = getattr(cross_entropy(x, labels, **EVERY_OUTPUT), mode).sum()
    else:
        result = cross_entropy(x, labels, reduction=mode, softcap=3.0).sum()
    (grad,) = torch.autograd.grad(result, x, create_graph=True, retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.square().sum().backward()


def test_a_batch_of_incoming_gradients_gives_a_batch_of_gradients(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    factors = torch.tensor([1.0, -2.0, 0.0], device=device)
    for options in ({"softcap": 3.0}, {"reduction": "none"}, {"inplace_backward": True}):
        y = x * 1 if "inplace_backward" in options else x
        loss = cross_entropy(y, labels, **options)
        came = factors[:, None].expand(3, 4) if loss.ndim else factors
        (gradients,) = torch.autograd.grad(loss, x, came, is_grads_batched=True, retain_graph=True)
        (expected,) = torch.autograd.grad(loss.sum(), x)
        torch.testing.assert_close(gradients, factors[:, None, None] * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda each: each.__name__
)
@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"reduction": "none"}, {"inplace": True}, {"return_lse": True}], ids=str
)
def test_torch_func_transforms_are_refused_by_name(draw, device, transform, options):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    batched = x.expand(2, 4, 7) if transform is torch.func.vmap else x

    def loss(logits):
        output = cross_entropy(logits * 1, labels, **options)
        return (output.loss if "return_lse" in options else output).sum()

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        transform(loss)(batched)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"reduction": "none"}, {"return_entropy": True}], ids=str)
def test_forward_mode_is_refused(draw, device, requires_grad, options):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(requires_grad), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            cross_entropy(dual, labels, **options)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_only_a_recorded_call_has_a_gradient(draw, device, mode, reduction):
    x, labels = draw.logits(8, 20, torch.float32, device), draw.labels(8, 20, device, ignored=0.2)
    expected = cross_entropy(x, labels, reduction=reduction, z_loss_multiplier=0.1, **EVERY_OUTPUT)
    leaf = x.clone().requires_grad_()
    weight = torch.ones(20, device=device, requires_grad=mode is not torch.enable_grad)
    with mode():
        output = cross_entropy(leaf, labels, reduction=reduction, z_loss_multiplier=0.1, weight=weight, **EVERY_OUTPUT)
    for name in ("loss", "lse", "entropy"):
        assert getattr(output, name).requires_grad == (mode is torch.enable_grad)
    for ours, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-6)


def test_hooks_checkpoints_offloading_and_anomaly_mode_see_the_same_gradient(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device, ignored=0.2)
    for options in ({"reduction": "mean"}, {"reduction": "none"}):

        def loss(leaf, options=options):
            output = cross_entropy(leaf, labels, softcap=5.0, return_lse=True, **options)
            return 3 * output.loss.sum() + output.lse.sum()

        plain = x.clone().requires_grad_()
        loss(plain).backward()
        for around, run in (
            (contextlib.nullcontext(), lambda leaf, loss=loss: checkpoint(loss, leaf, use_reentrant=True)),
            (contextlib.nullcontext(), lambda leaf, loss=loss: checkpoint(loss, leaf, use_reentrant=False)),
            (torch.autograd.graph.save_on_cpu(), loss),
            (torch.autograd.set_detect_anomaly(True), loss),
        ):
            leaf = x.clone().requires_grad_()
            with around:
                run(leaf).backward()
            assert torch.equal(leaf.grad, plain.grad)


# --- Logits that may be overwritten -----------------------------------------------------------------------


def options_of_overwriting_calls(reduction, V, device):
    """Return the options that in-place calls are tried with."""
    weight = torch.linspace(0.5, 2.0, V, device=device)
    calls = [{"logit_scale": 0.7}, {"softcap": 5.0}, {"weight": weight, "label_smoothing": 0.1}, {"valid_vocab": V - 1}]
    return [{"reduction": reduction, "z_loss_multiplier": 1e-2, **each} for each in calls]


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_the_forward_pass_the_result_is_that_out_of_place_bit_for_bit(draw, device, B, V, dtype, reduction):
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V - 1, device, ignored=0.2)
    for options in options_of_overwriting_calls(reduction, V, device):
        for factor in (1.0, 3.0):
            leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            loss, expected = overwriting("inplace")(leaf, labels, **options), cross_entropy(other, labels, **options)
            (factor * loss).backward()
            (factor * expected).backward()
            assert torch.equal(loss, expected)
            assert torch.equal(leaf.grad, other.grad)


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_without_other_options_an_overwriting_call_is_right(draw, device, B, V, dtype, name):
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.2)
    for mode in ("one", "another"):
        came = incoming(draw, mode, "mean", B, device)
        # Other code than that of a plain call, so perhaps not its bits.
        reference.check_options(overwriting(name), x, labels, incoming=came, keeps_logits=name != "inplace")


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_the_backward_pass_the_result_is_that_out_of_place(draw, device, B, V, dtype, reduction):
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V - 1, device, ignored=0.2)
    for options in options_of_overwriting_calls(reduction, V, device):
        came = draw.logits(1, B, torch.float32, device)[0] if reduction == "none" else torch.tensor(3.0, device=device)
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = (
            overwriting("inplace_backward")(leaf, labels, **options),
            cross_entropy(other, labels, **options),
        )
        # Perhaps added in another order, by the kernel that has no gradient to write.
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward(came)
        expected.backward(came)
        if reduction == "none" or dtype == torch.float16:
            assert torch.equal(leaf.grad, other.grad)
        else:  # which rounds once more; 1e-7 where a difference cancels
            torch.testing.assert_close(leaf.grad, other.grad, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
@pytest.mark.parametrize("shape", [(8, 100), (2, 4, 100), (100,)], ids=str)
def test_the_gradient_lies_where_the_logits_were_and_their_version_is_raised(draw, device, dtype, name, shape):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device)
    x, labels = x[: math.prod(shape[:-1])].view(shape), labels[: math.prod(shape[:-1])].view(shape[:-1])
    for came in (1.0, 3.0):
        y = x.clone().requires_grad_() * 1
        version, in_forward = y._version, name == "inplace" and dtype != torch.float16
        seen = []
        y.register_hook(lambda grad, seen=seen: seen.append(grad.data_ptr()))
        loss = cross_entropy(y, labels, **{name: True})
        assert torch.equal(y.detach(), x) != in_forward
        assert (y._version > version) == in_forward
        (grad,) = torch.autograd.grad(came * loss, y)
        assert grad.data_ptr() == y.data_ptr()
        assert seen == [y.data_ptr()]
        assert y._version > version


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_layer_trains_with_its_logits_overwritten(draw, device, reduction):
    hidden, labels = (
        draw.logits(24, 16, torch.float32, device).view(4, 6, 16),
        draw.labels(24, 100, device, ignored=0.2),
    )
    start = draw.logits(100, 16, torch.float32, device)
    gradients = []
    for options in (
        {},
        {"inplace": reduction != "none", "inplace_backward": reduction == "none"},
        {"inplace_backward": True},
    ):
        h, weight = hidden.clone().requires_grad_(), start.clone().requires_grad_()
        loss = cross_entropy(F.linear(h, weight), labels.view(4, 6), reduction=reduction, **options)
        (3 * loss.sum()).backward()
        gradients.append((h.grad, weight.grad))
    for others in gradients[1:]:
        for ours, expected in zip(others, gradients[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


OTHER_CONSUMERS = {
    "that saves nothing": lambda y: y.sum(),
    "that saves the logits": lambda y: y.square().sum(),
    "of one row": lambda y: y[:1].sum(),
    "through a view": lambda y: y.view(-1).mul(2.0).sum(),
}


@pytest.mark.parametrize("other", OTHER_CONSUMERS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("of_base", [True, False])
def test_after_an_overwriting_forward_pass_another_consumer_raises_in_backward(draw, device, other, first, of_base):
    x, labels = draw.logits(4, 6, torch.float32, device).requires_grad_(), draw.labels(4, 6, device)
    y = x * 1
    logits = y.view(2, 2, 6) if of_base else y
    target = labels.view(2, 2) if of_base else labels
    total = OTHER_CONSUMERS[other](y) if first else 0.0
    total = total + cross_entropy(logits, target, inplace=True)
    if not first:
        total = total + OTHER_CONSUMERS[other](y)
    with pytest.raises(RuntimeError, match=r"overwritten|modified by an inplace operation"):
        total.backward()
    assert x.grad is None


def test_two_overwriting_losses_of_the_same_logits_raise(draw, device):
    x, labels = draw.logits(4, 6, torch.float32, device).requires_grad_(), draw.labels(4, 6, device)
    y = x * 1
    total = cross_entropy(y, labels, inplace=True) + cross_entropy(y, labels, inplace=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        total.backward()
    logits, target = (x * 1).view(2, 2, 6), labels.view(2, 2)
    cross_entropy(logits, target, inplace=True)
    with pytest.raises(ValueError, match=r"^inplace: expected logits that are a reshape"):
        cross_entropy(logits, target, inplace=True)


@pytest.mark.parametrize("of_base", [True, False])
def test_hooks_of_overwritten_logits_may_be_set_before_and_after_the_call(draw, device, of_base):
    x, labels = draw.logits(4, 6, torch.float32, device).requires_grad_(), draw.labels(4, 6, device)
    y, target = x * 1, labels.view(2, 2) if of_base else labels
    logits = y.view(2, 2, 6) if of_base else y
    seen = []
    logits.register_hook(seen.append)
    loss = cross_entropy(logits, target, inplace=True)
    logits.register_hook(lambda grad: None)  # PyTorch crashes on one of a view whose version has been raised
    loss.backward()
    (grad,) = seen
    assert torch.equal(grad.view(4, 6), x.grad)
    assert grad.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_an_operation_that_saved_the_logits_before_raises_in_backward(draw, device, name):
    x, labels = draw.logits(4, 6, torch.float32, device).requires_grad_(), draw.labels(4, 6, device)
    for operation in (torch.tanh, torch.exp, lambda leaf: leaf.softmax(dim=-1)):  # whose derivative is of the result
        loss = cross_entropy(operation(x), labels, **{name: True})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert x.grad is None


@pytest.mark.parametrize("other", OTHER_CONSUMERS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("of_base", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_an_overwriting_backward_pass_another_consumer_is_right_or_raises(
    draw, device, other, first, of_base, reduction
):
    x, labels = draw.logits(4, 6, torch.float32, device), draw.labels(4, 6, device)
    gradients = []
    for options in ({}, {"inplace_backward": True}):
        leaf = x.clone().requires_grad_()
        y = leaf * 1
        logits, target = (y.view(2, 2, 6), labels.view(2, 2)) if of_base else (y, labels)
        total = OTHER_CONSUMERS[other](y) if first else 0.0
        total = total + cross_entropy(logits, target, reduction=reduction, **options).sum()
        if not first:
            total = total + OTHER_CONSUMERS[other](y)
        try:
            total.backward()
        except RuntimeError:
            assert other == "that saves the logits"
            assert leaf.grad is None
        else:
            gradients.append(leaf.grad)
    assert len(gradients) == 2 or (other == "that saves the logits" and first)
    for grad in gradients[1:]:
        torch.testing.assert_close(grad, gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_second_backward_pass_over_overwritten_logits_raises(draw, device, name, dtype):
    x, labels = draw.logits(4, 6, dtype, device).requires_grad_(), draw.labels(4, 6, device)
    kept = "there is one backward pass" if name == "inplace" and dtype == torch.float32 else "modified by an inplace"
    loss = overwriting(name)(x, labels)
    if kept.startswith("modified"):
        torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=kept):
        torch.autograd.grad(loss, x, retain_graph=True)
    loss = overwriting(name)(x, labels)
    torch.autograd.grad(loss, x)
    with pytest.raises(RuntimeError, match=r"one backward pass|modified by an inplace|a second time"):
        torch.autograd.grad(loss, x)
    loss = overwriting("inplace")(x, labels)
    if dtype == torch.float32:
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_with_the_logits_gone_the_lse_and_the_entropy_are_values_only(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    expected = cross_entropy(x, labels, **EVERY_OUTPUT)
    leaf = x.clone().requires_grad_()
    output = overwriting("inplace")(leaf, labels, **EVERY_OUTPUT)
    for ours, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-6)
    for name in ("lse", "entropy"):
        output = overwriting("inplace")(leaf, labels, **EVERY_OUTPUT)
        with pytest.raises(RuntimeError, match="gradient of lse and entropy"):
            (output.loss + getattr(output, name).sum()).backward()
    output = overwriting("inplace")(leaf, labels, **EVERY_OUTPUT)
    (output.loss + output.lse.detach().sum()).backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "no requires_grad"])
@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_where_no_gradient_is_wanted_the_logits_stay(draw, device, mode, name):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    y = x.clone().requires_grad_(mode != "no requires_grad") * 1
    version = y._version
    with torch.enable_grad() if mode == "no requires_grad" else getattr(torch, mode)():
        loss = cross_entropy(y, labels, **{name: True})
    assert not loss.requires_grad
    assert torch.equal(y.detach(), x)
    assert y._version == version


def test_a_target_out_of_range_leaves_the_logits_as_they_were():
    x = torch.zeros(3, 10, requires_grad=True) * 1
    with pytest.raises(IndexError, match=r"^target: expected 0 to 9 .* got 10 in row 1"):
        cross_entropy(x, torch.tensor([3, 10, -100]), inplace=True)
    assert not x.any()
    assert x._version == 0
    cross_entropy(x, torch.tensor([3, 9, -100])).backward()  # nothing holds this against a gradient elsewhere


def test_an_overwriting_call_inside_a_checkpoint_is_right(draw, device):
    hidden, labels = draw.logits(8, 16, torch.float32, device), draw.labels(8, 100, device)
    weight = draw.logits(100, 16, torch.float32, device)
    gradients = []
    for name, reentrant in itertools.product((None, "inplace", "inplace_backward"), (True, False)):
        h = hidden.clone().requires_grad_()
        options = {name: True} if name else {}
        loss = checkpoint(
            lambda h, options=options: cross_entropy(F.linear(h, weight), labels, **options), h, use_reentrant=reentrant
        )
        (3 * loss).backward()
        gradients.append(h.grad)
    for grad in gradients[1:]:
        torch.testing.assert_close(grad, gradients[0], rtol=1e-5, atol=1e-7)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the size in bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_overwriting_call_makes_no_buffer_of_the_logits_size(draw, device, monkeypatch, dtype, name, reduction):
    if reduction == "none" and name == "inplace":
        pytest.skip("refused")
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", 1000)  # a row
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # or the mode would get the operators
    y, labels = draw.logits(16, 1000, dtype, device).requires_grad_() * 1, draw.labels(16, 1000, device)
    with Largest() as largest:
        loss = cross_entropy(y, labels, reduction=reduction, softcap=5.0, **{name: True})
        torch.autograd.grad(loss, y, torch.full_like(loss, 3.0))
    assert 0 < largest.bytes < y.numel() * y.element_size()


# --- Shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 2, 3), (2, 0, 3), (0,)], ids=str)
@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32], ids=str)
def test_leading_dimensions_are_rows(draw, device, shape, target_dtype):
    B, V = math.prod(shape), 20
    x, labels = draw.logits(B, V, torch.bfloat16, device), draw.labels(B, V, device, ignored=0.3)
    row_weight = draw.logits(1, B, torch.float32, device)[0]
    for reduction in REDUCTIONS:
        flat, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
        options = {"reduction": reduction, "z_loss_multiplier": 1e-2, **EVERY_OUTPUT}
        expected = cross_entropy(flat, labels, row_weight=row_weight, **options)
        output = cross_entropy(
            leaf.view(*shape, V), labels.view(shape).to(target_dtype), row_weight=row_weight.view(shape), **options
        )
        for name, ours, theirs in zip(output._fields, output, expected, strict=True):
            is_of_rows = reduction == "none" or name in ("lse", "predicted_tokens", "entropy")
            assert ours.shape == (shape if is_of_rows else ()), name
            assert torch.equal(ours.reshape(-1), theirs.reshape(-1)), name
        came = draw.logits(1, B, torch.float32, device)[0]
        for o, s in ((expected, (B,)), (output, shape)):
            loss = (o.loss * came.view(s)).sum() if reduction == "none" else 3 * o.loss
            (loss + (o.lse * came.view(s)).sum()).backward()
        assert torch.equal(leaf.grad, flat.grad)


def test_any_layout_of_the_logits_is_right(draw, device):
    big = draw.logits(24, 40, torch.float32, device).view(4, 6, 40)
    layouts = {
        "the first two dimensions swapped": big.transpose(0, 1),
        "the last two dimensions swapped": big.transpose(1, 2),
        "a middle part": big[1:3, :5, 3:33],
        "without the last position": big[:, :-1],
        "every second column": big[..., ::2],
        "one row for all": big[:1, :1].expand(3, 5, 40),
        "one column for all": big[..., :1].expand(4, 6, 7),
        "last dimension first": torch.movedim(big, 0, -1),
    }
    for name, x in layouts.items():
        B, V = x.shape[:-1].numel(), x.shape[-1]
        labels = draw.labels(B, V, device, ignored=0.2)
        for options in ({"reduction": "none"}, {"softcap": 5.0}):
            leaf, flat = x.detach().requires_grad_(), x.reshape(B, V).clone().requires_grad_()
            loss, expected = (
                cross_entropy(leaf, labels.view(x.shape[:-1]), **options),
                cross_entropy(flat, labels, **options),
            )
            assert torch.equal(loss.reshape(-1), expected.reshape(-1)), name
            (grad,) = torch.autograd.grad(3 * loss.sum(), leaf)
            (expected_grad,) = torch.autograd.grad(3 * expected.sum(), flat)
            assert grad.shape == x.shape, name
            assert torch.equal(grad.reshape(B, V), expected_grad), name


def test_any_layout_of_the_target_and_the_row_weights_is_right(draw, device):
    x, labels = draw.logits(12, 20, torch.float32, device).view(3, 4, 20), draw.labels(12, 20, device).view(4, 3).t()
    row_weight = draw.logits(4, 3, torch.float32, device).t()
    loss = cross_entropy(x, labels, reduction="none", row_weight=row_weight)
    expected = cross_entropy(x, labels.contiguous(), reduction="none", row_weight=row_weight.contiguous())
    assert torch.equal(loss, expected)
    expanded = torch.tensor(7, device=device).expand(3, 4)
    assert torch.equal(cross_entropy(x, expanded), cross_entropy(x, expanded.contiguous()))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 3, 2**53 + 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 3, 4), (3, 1), (3, 0), (1,)], ids=str)
def test_shift_is_shifting_by_hand(draw, device, reduction, ignore_index, shape):
    B, V = math.prod(shape), 10
    x = draw.logits(B, V, torch.float32, device).view(*shape, V)
    labels = draw.labels(B, V, device, ignored=0.3, ignore_index=ignore_index).view(shape)
    row_weight = draw.logits(1, B, torch.float32, device)[0].abs().view(shape)
    leaf, cut = x.clone().requires_grad_(), x.clone().requires_grad_()
    before = labels.clone()
    options = {"reduction": reduction, "ignore_index": ignore_index, "z_loss_multiplier": 1e-2}
    loss = cross_entropy(leaf, labels, shift=True, row_weight=row_weight, **options)
    weight = row_weight[..., :-1].contiguous()
    expected = cross_entropy(cut[..., :-1, :], labels[..., 1:], row_weight=weight, **options)
    if reduction == "none":
        assert loss.shape == shape
        assert (loss[..., -1:] == 0).all()
        loss = loss[..., :-1]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)  # rows of another alignment
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad, cut.grad, rtol=1e-5, atol=1e-7)
    assert (leaf.grad[..., -1:, :] == 0).all()
    assert torch.equal(labels, before)


def test_shift_keeps_the_outputs_with_the_rows_of_the_logits(draw, device):
    x, labels = draw.logits(15, 10, torch.float32, device).view(3, 5, 10), draw.labels(15, 10, device).view(3, 5)
    output = cross_entropy(x, labels, shift=True, **EVERY_OUTPUT)
    torch.testing.assert_close(output.lse, x.logsumexp(dim=-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(output.predicted_tokens, x.argmax(dim=-1))
    hits = x.argmax(dim=-1)[:, :-1] == labels[:, 1:]
    assert float(output.token_accuracy) == pytest.approx(float(hits.float().mean()))


# --- Autocast, other tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_under_autocast_every_result_is_fp32_and_the_gradient_of_the_logits_dtype(draw, device, reduction):
    hidden = draw.logits(32, 16, torch.float32, device).requires_grad_()
    weight, labels = draw.logits(100, 16, torch.float32, device).requires_grad_(), draw.labels(32, 100, device)
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 5.0, **EVERY_OUTPUT}
    with torch.autocast(device.type, torch.bfloat16):
        logits = F.linear(hidden, weight)
        logits.retain_grad()
        output = cross_entropy(logits, labels, **options)
    assert logits.dtype == torch.bfloat16
    assert {each.dtype for each in output} == {torch.float32, torch.int64}
    (output.loss.sum() + output.lse.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    expected = cross_entropy(logits.detach(), labels, **options)
    assert all(torch.allclose(a.detach(), b, rtol=1e-6) for a, b in zip(output, expected, strict=True))


@pytest.mark.parametrize("switch", ["dtype", "device", "deterministic"])
def test_defaults_of_the_process_change_nothing(draw, device, switch):
    x, labels = draw.logits(8, 100, torch.bfloat16, device), draw.labels(8, 100, device, ignored=0.2)
    options = {"weight": draw.logits(1, 100, torch.float32, device)[0].abs(), "label_smoothing": 0.1, **EVERY_OUTPUT}

    def run():
        leaf = x.clone().requires_grad_()
        output = cross_entropy(leaf.view(2, 4, 100), labels.view(2, 4), shift=True, normalizer=7, **options)
        (output.loss + output.lse.sum() + output.entropy.sum()).backward()
        return [*output, leaf.grad]

    expected = run()
    try:
        if switch == "dtype":
            torch.set_default_dtype(torch.float64)
        elif switch == "device":
            torch.set_default_device("meta")
        else:
            torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN too
        results = run()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_meta_tensors_give_meta_results():
    x = torch.empty(2, 4, 100, device="meta", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(2, 4, dtype=torch.int64, device="meta")
    for reduction in REDUCTIONS:
        output = cross_entropy(x, labels, reduction=reduction, softcap=5.0, **EVERY_OUTPUT)
        (grad,) = torch.autograd.grad(output.loss.sum() + output.lse.sum(), x)
        assert all(each.device.type == "meta" for each in (*output, grad))
        assert output.loss.shape == ((2, 4) if reduction == "none" else ())
        assert grad.shape == x.shape


# --- The host ---------------------------------------------------------------------------------------------


def calls_of_a_step(V, device):
    """Return options of which each takes its own way through the host code."""
    weight, row_weight = torch.linspace(0.5, 2.0, V, device=device), torch.linspace(-1.0, 1.0, 64, device=device)
    return {
        "weight": {"weight": weight},
        "weight and smoothing": {"weight": weight, "label_smoothing": 0.1},
        "smoothing": {"label_smoothing": 0.1, "reduction": "sum"},
        "softcap without a reduction": {"softcap": 5.0, "reduction": "none"},
        "scale": {"logit_scale": 0.7},
        "a number": {"normalizer": 7},
        "a number in memory": {"normalizer": torch.tensor(7)},
        "a number on the device": {"normalizer": torch.tensor(7, device=device)},
        "row weights": {"row_weight": row_weight, "valid_vocab": V - 3},
        "outputs": EVERY_OUTPUT,
        "shift": {"shift": True, "z_loss_multiplier": 1e-3},
        "inplace": {"inplace": True, "softcap": 5.0},
        "inplace_backward": {"inplace_backward": True, "reduction": "none"},
    }


CALLS = tuple(calls_of_a_step(8, torch.device("cpu")))


def step_and_gradient(leaf, labels, options):
    """Return the outputs of a call and the gradient with something coming in for all that is differentiable."""
    output = cross_entropy(leaf * 1, labels, **options)
    parts = list(output) if isinstance(output, CrossEntropyOutput) else [output]
    total = sum((3 * each).sum() for each in parts if each.requires_grad)
    return [*(each.detach() for each in parts), *torch.autograd.grad(total, leaf)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_captured_step_follows_its_inputs_when_replayed(draw, cuda, dtype, name):
    B, V = 64, 5003
    options = calls_of_a_step(V, cuda)[name]
    x, labels = draw.logits(B, V, dtype, cuda).requires_grad_(), draw.labels(B, V - 3, cuda, ignored=0.2)
    step_and_gradient(x, labels, options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step_and_gradient(x, labels, options)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(draw.logits(B, V, dtype, cuda))
        labels.copy_(draw.labels(B, V - 3, cuda, ignored=0.3))
        for each in options.values():
            if isinstance(each, torch.Tensor) and each.is_cuda:
                each.add_(1)
        graph.replay()
        expected = step_and_gradient(x, labels, options)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nothing_waits_for_the_gpu(draw, cuda, dtype, name):
    options = calls_of_a_step(1000, cuda)[name]
    x, labels = draw.logits(64, 1000, dtype, cuda).requires_grad_(), draw.labels(64, 990, cuda, ignored=0.3)
    labels[3] = 1000  # out of range, which the host must not look for
    step_and_gradient(x, labels, options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_and_gradient(x, labels, options)
        with torch.no_grad():
            cross_entropy(x, labels, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_labels_on_the_gpu_are_checked_where_that_is_switched_on(draw, device):
    x, labels = draw.logits(4, 9, torch.float32, device), torch.tensor([1, 7, -100, 4], device=device)
    kernels.check_gpu_labels(True)
    try:
        with pytest.raises(IndexError, match="target: expected 0 to 6 or ignore_index=-100, got 7 in row 1"):
            cross_entropy(x, labels, valid_vocab=7)
    finally:
        kernels.check_gpu_labels(False)


# --- What is not written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("V", [7, 1000, 9001])
def test_nothing_that_a_call_is_given_is_changed(draw, device, dtype, reduction, V):
    given = {
        "logits": draw.logits(8, V, dtype, device),
        "target": draw.labels(8, V, device, ignored=0.3).int(),
        "weight": draw.logits(1, V, torch.float32, device)[0].abs(),
        "row_weight": draw.logits(1, 8, torch.float32, device)[0],
    }
    if reduction == "mean":
        given["normalizer"] = torch.tensor(7.0, device=device)
    before, versions = (
        {name: each.clone() for name, each in given.items()},
        {n: each._version for n, each in given.items()},
    )
    for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0}):
        leaf = given["logits"].detach().requires_grad_()
        output = cross_entropy(**{**given, "logits": leaf}, reduction=reduction, **options, **EVERY_OUTPUT)
        (3 * output.loss.sum() + output.lse.sum()).backward()
    assert all(torch.equal(given[name], before[name]) for name in given)
    assert {name: each._version for name, each in given.items()} == versions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["inplace_backward", None])
@pytest.mark.parametrize("V", [7, 1000, 9001])
def test_nothing_between_the_rows_of_a_wider_buffer_is_touched(draw, device, dtype, name, V):
    B, guard = 6, 3e4
    buffer = torch.full((B + 2, V + 16), guard, dtype=dtype, device=device)
    for offset in (1, 3, 8):
        columns = slice(offset, offset + V)
        x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.2)
        buffer[1:-1, columns] = x
        leaf = buffer.clone().requires_grad_()
        base = leaf * 1
        logits = base[1:-1, columns]
        options = {name: True} if name else {}
        loss = cross_entropy(logits, labels, reduction="none", label_smoothing=0.1, **options)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        reference_leaf = x.clone().requires_grad_()
        cross_entropy(reference_leaf, labels, reduction="none", label_smoothing=0.1).sum().backward()
        # Rows of another alignment, whose elements are added in another order.
        torch.testing.assert_close(grad, reference_leaf.grad, rtol=max(torch.finfo(dtype).eps, 2e-6), atol=1e-7)
        around = base.detach().clone()
        assert (grad.data_ptr() == logits.data_ptr()) == (name is not None)
        around[1:-1, columns] = guard
        assert (around == guard).all()
        buffer[1:-1, columns] = guard


# --- Inputs at the edge -----------------------------------------------------------------------------------

EDGES = [{}, {"label_smoothing": 0.1}, {"softcap": 5.0}, {"logit_scale": 2.0}, {"return_entropy": True}, EVERY_OUTPUT]


@pytest.mark.parametrize("options", EDGES, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_row_of_weight_zero_adds_nothing_whatever_it_holds(draw, device, options, bad, reduction):
    for V in (7, 1000, 40_001):
        x, labels = draw.logits(4, V, torch.float32, device), draw.labels(4, V, device)
        x[1], x[2, V - 1], x[3, 0] = bad, bad, bad
        labels[3] = -100
        row_weight = torch.tensor([2.0, 0.0, 0.0, 1.0], device=device)
        normalizer = {"normalizer": 5.0} if reduction == "mean" else {}
        leaf = x.clone().requires_grad_()
        output = cross_entropy(
            leaf, labels, reduction=reduction, row_weight=row_weight, z_loss_multiplier=1e-2, **normalizer, **options
        )
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.sum().backward()
        alone = x[:1].clone().requires_grad_()
        alone_options = {name: each for name, each in options.items() if not name.startswith("return")}
        expected = cross_entropy(alone, labels[:1], reduction="sum", z_loss_multiplier=1e-2, **alone_options)
        (2.0 / normalizer.get("normalizer", 1.0) * expected).backward()
        torch.testing.assert_close(loss.sum(), 2.0 / normalizer.get("normalizer", 1.0) * expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(leaf.grad[:1], alone.grad, rtol=1e-5, atol=1e-8)
        assert (leaf.grad[1:] == 0).all()
        if reduction == "none":
            assert (loss[1:] == 0).all()


def test_a_row_that_nothing_comes_in_for_has_gradient_zero_whatever_it_holds(draw, device):
    x, labels = draw.logits(4, 20, torch.float32, device), draw.labels(4, 20, device)
    x[1], x[2, 3] = math.nan, math.inf
    leaf = x.clone().requires_grad_()
    cross_entropy(leaf, labels, reduction="none")[[0, 3]].sum().backward()
    assert (leaf.grad[1:3] == 0).all()
    assert leaf.grad[[0, 3]].isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_class_of_weight_zero_adds_nothing_and_all_of_them_give_zero(draw, device, reduction):
    x, labels = draw.logits(8, 10, torch.float32, device), draw.labels(8, 10, device)
    labels[:4] = 3
    weight = torch.ones(10, device=device)
    weight[3] = 0
    check(draw, "one", x, labels, reduction=reduction, weight=weight)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, labels, reduction=reduction, weight=torch.zeros(10, device=device))
    loss.sum().backward()
    assert not loss.any()
    assert not leaf.grad.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.0])
def test_without_a_valid_row_each_option_gives_zero_and_gradient_zero(draw, device, dtype, reduction, bad):
    for B, V in ((5, 7), (5, 1000), (3, 40_001)):
        x, labels = draw.logits(B, V, dtype, device), torch.full((B,), -100, device=device)
        x[0, V // 2], x[1] = bad, bad
        for names in (*((name,) for name in OPTIONS), tuple(OPTIONS)):
            options = drawn_options(draw, names, reduction, B, V, device)
            for mode in ("plain", "inplace_backward"):
                leaf = x.clone().requires_grad_()
                function = overwriting(mode) if mode != "plain" else cross_entropy
                loss = function(leaf, labels, reduction=reduction, **options)
                (3 * loss.sum()).backward()
                assert (loss == 0).all()
                assert (leaf.grad == 0).all()
                assert (cross_entropy(x, labels, reduction=reduction, **options) == 0).all()


@pytest.mark.parametrize("wrong", [10, -4, 2**31, 2**32 + 1, -(2**31) - 1])
@pytest.mark.parametrize(
    "options", [{}, {"weight": True, "label_smoothing": 0.1}, {"softcap": 5.0, "return_entropy": True}], ids=str
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_target_out_of_range_raises_on_the_cpu_and_makes_its_row_nan_on_the_gpu(
    draw, device, wrong, options, reduction
):
    x, target = draw.logits(4, 12, torch.float32, device), torch.tensor([3, wrong, -100, 9], device=device)
    options = {"valid_vocab": 10, "row_weight": torch.ones(4, device=device), **options}  # 10 is in the padding
    if "weight" in options:
        options["weight"] = torch.ones(12, device=device)
    for leaf in (x.clone().requires_grad_(), x):
        if device.type == "cpu":
            with pytest.raises(
                IndexError, match=rf"^target: expected 0 to 9 or ignore_index=-100, got {wrong} in row 1"
            ):
                cross_entropy(leaf, target, reduction=reduction, **options)
            continue
        output = cross_entropy(leaf, target, reduction=reduction, **options)
        loss = output.loss if "return_entropy" in options else output
        if reduction == "none":
            assert loss.isnan().tolist() == [False, True, False, False]
        else:
            assert loss.isnan()
        if loss.requires_grad:
            loss.sum().backward()
            assert leaf.grad[1, :10].isnan().all()
            assert leaf.grad[[0, 2, 3]].isfinite().all()
            assert (leaf.grad[2] == 0).all()


@pytest.mark.parametrize("options", EDGES, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e4, 1e4, 3e38, -3e38])
def test_flat_rows_of_any_size_have_loss_and_entropy_log_v(device, options, value):
    for V in (1, 7, 1000, 65_537):
        x = torch.full((2, V), value, device=device).requires_grad_()
        output = cross_entropy(x, torch.tensor([0, V - 1], device=device), **options)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        assert float(loss.detach()) == pytest.approx(math.log(V), rel=1e-6, abs=1e-6)
        (grad,) = torch.autograd.grad(loss, x)
        assert grad.isfinite().all()
        if "return_entropy" in options:
            assert output.entropy.tolist() == pytest.approx([math.log(V)] * 2, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("V", [7, 1000, 40_001])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_infinite_logits_are_the_caps(draw, device, V, softcap):
    x, labels = draw.logits(4, V, torch.float32, device), draw.labels(4, V, device)
    x[0, V // 2], x[1, 1:] = math.inf, -math.inf
    x[2] = -math.inf
    finite = x.nan_to_num(posinf=1e6, neginf=-1e6)
    results = []
    for each in (x, finite):
        leaf = each.clone().requires_grad_()
        output = cross_entropy(leaf, labels, reduction="none", softcap=softcap, return_lse=True)
        (output.loss.sum() + output.lse.sum()).backward()
        results.append((output.loss, output.lse, leaf.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("V", [7, 1000, 40_001])
@pytest.mark.parametrize("offset", [2.0**20, -(2.0**20), 1e4, -1e4])
def test_a_common_offset_changes_neither_loss_nor_gradient(draw, device, V, offset):
    x, labels = (draw.logits(4, V, torch.float32, device) * 8).round() / 8, draw.labels(4, V, device)
    shifted = x + offset
    assert torch.equal(shifted - offset, x)
    for options in (
        {},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0, "weight": draw.logits(1, V, torch.float32, device)[0].abs()},
    ):
        for mode in ("one", "another", "entropy"):
            check(draw, mode, shifted, labels, reduction="none", **options)
        leaf, other = x.clone().requires_grad_(), shifted.clone().requires_grad_()
        loss, far = (cross_entropy(each, labels, reduction="none", **options) for each in (leaf, other))
        torch.testing.assert_close(far, loss, rtol=2e-6, atol=2e-6)
        loss.sum().backward()
        far.sum().backward()
        torch.testing.assert_close(other.grad, leaf.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("V", [7, 1000, 40_001])
def test_a_scaled_row_far_from_zero_is_shifted_before_it_is_scaled(draw, device, V):
    x, labels = (draw.logits(4, V, torch.float32, device) * 8).round() / 8, draw.labels(4, V, device)
    for logit_scale in (0.3, 3.0):
        loss = cross_entropy(x, labels, reduction="none", logit_scale=logit_scale)
        far = cross_entropy(x + 2.0**20, labels, reduction="none", logit_scale=logit_scale)
        torch.testing.assert_close(far, loss, rtol=2e-6, atol=2e-6)


def test_huge_logits_do_no_harm_where_the_loss_is_finite(device):
    x = torch.tensor([[3e38, 0.0, -3e38], [-3e38, -3e38, -3e38], [3e38, 3e38, -3e38]], device=device)
    labels = torch.tensor([0, 2, 1], device=device)
    for options in ({}, {"logit_scale": 0.5}, {"weight": torch.ones(3, device=device)}, {"return_entropy": True}):
        leaf = x.clone().requires_grad_()
        output = cross_entropy(leaf, labels, reduction="none", **options)
        loss = output.loss if "return_entropy" in options else output
        assert loss.tolist() == pytest.approx([0.0, math.log(3), math.log(2)], rel=1e-6, abs=1e-6)
        loss.sum().backward()
        expected = [[0.0, 0.0, 0.0], [1 / 3, 1 / 3, -2 / 3], [0.5, -0.5, 0.0]]
        scale = options.get("logit_scale", 1.0)
        torch.testing.assert_close(leaf.grad, scale * torch.tensor(expected, device=device), rtol=1e-6, atol=1e-7)
        if "return_entropy" in options:
            assert output.entropy.tolist() == pytest.approx([0.0, math.log(3), math.log(2)], rel=1e-6, abs=1e-6)
    capped = cross_entropy(x, labels, reduction="none", softcap=2.0)
    assert capped.tolist() == pytest.approx(
        cross_entropy(x.clamp(-100, 100), labels, reduction="none", softcap=2.0).tolist(), rel=1e-6
    )


@pytest.mark.parametrize(("device", "B", "V"), SHAPES, indirect=["device"])
def test_the_same_inputs_give_the_same_bits(draw, device, B, V):
    x, labels = draw.logits(B, V, torch.bfloat16, device), draw.labels(B, V - 3, device, ignored=0.2)
    options = drawn_options(draw, OPTIONS, "mean", B, V, device)
    results = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        output = cross_entropy(leaf, labels, **options, **EVERY_OUTPUT)
        (output.loss + output.lse.sum() + output.entropy.sum()).backward()
        results.append([*output, leaf.grad])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("elements", [100, 250, 3700])  # a row, a few, all
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_blocks_of_the_portable_code_change_no_bit(draw, monkeypatch, elements, reduction):
    cpu = torch.device("cpu")
    x, labels = draw.logits(37, 100, torch.float32, cpu), draw.labels(37, 97, cpu, ignored=0.3)
    options = drawn_options(draw, OPTIONS, reduction, 37, 100, cpu)
    results = []
    for block in (portable.BLOCK_ELEMENTS, elements):
        monkeypatch.setattr(portable, "BLOCK_ELEMENTS", block)
        leaf = x.clone().requires_grad_()
        output = cross_entropy(leaf, labels, reduction=reduction, **options, **EVERY_OUTPUT)
        (output.loss.sum() + output.lse.sum()).backward()
        results.append([*output, leaf.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- Bad arguments ----------------------------------------------------------------------------------------

GOOD = torch.zeros(4, 10)
TARGET = torch.zeros(4, dtype=torch.int64)


def bad_number(name, expected, *values):
    """Return the cases of a number's wrong types and of the given wrong values."""
    wrong = (("0.5", "str"), (True, "bool"), (torch.tensor(0.5), "Tensor"), ([0.5], "list"))
    types = [({name: value}, TypeError, f"{name}: expected {expected}, got {kind}") for value, kind in wrong]
    return [
        *(case for case in types if not (name == "normalizer" and "Tensor" in case[2])),
        *(({name: value}, ValueError, f"{name}: expected {expected}, got {re.escape(str(value))}") for value in values),
    ]


ABOVE_ZERO = (0.0, -1.0, math.inf, math.nan, 1e-60, 1e60)
BAD_OPTIONS = [
    *(
        ({"reduction": wrong}, ValueError, "reduction: expected one of 'mean', 'sum', 'none', got ")
        for wrong in ("avg", None)
    ),
    *bad_number("label_smoothing", "a number from 0 to 1", -0.1, 1.1, math.nan, math.inf),
    *bad_number("softcap", "None or a finite fp32 number above 0", *ABOVE_ZERO),
    *bad_number("logit_scale", "a finite fp32 number above 0", *ABOVE_ZERO),
    *bad_number("normalizer", "a finite fp32 number above 0 or a tensor", *ABOVE_ZERO),
    ({"label_smoothing": None}, TypeError, "label_smoothing: expected a number from 0 to 1, got NoneType"),
    ({"logit_scale": None}, TypeError, "logit_scale: expected a finite fp32 number above 0, got NoneType"),
    *(
        (
            {"normalizer": 3.0, "reduction": reduction},
            ValueError,
            f"normalizer: expected reduction 'mean'.*got '{reduction}'",
        )
        for reduction in ("sum", "none")
    ),
    ({"normalizer": torch.ones(2)}, ValueError, r"normalizer: expected a tensor with one element, got shape \(2,\)"),
    ({"normalizer": torch.ones(0)}, ValueError, r"normalizer: expected a tensor with one element, got shape \(0,\)"),
    (
        {"normalizer": torch.tensor(True)},
        TypeError,
        "normalizer: expected an integer or floating-point dtype, got torch.bool",
    ),
    ({"normalizer": torch.tensor(1j)}, TypeError, "normalizer: .* got torch.complex64"),
    (
        {"normalizer": torch.tensor(3.0, requires_grad=True)},
        ValueError,
        "normalizer: expected a tensor that requires no grad",
    ),
    *(
        case
        for name, size in (("weight", 10), ("row_weight", 4))
        for case in (
            ({name: [1.0] * size}, TypeError, f"{name}: expected a torch.Tensor, got list"),
            ({name: 1.0}, TypeError, f"{name}: expected a torch.Tensor, got float"),
            (
                {name: torch.ones(size, dtype=torch.int64)},
                TypeError,
                f"{name}: expected a floating-point dtype, got torch.int64",
            ),
            ({name: torch.ones(size, dtype=torch.complex64)}, TypeError, f"{name}: .* got torch.complex64"),
            ({name: torch.ones(size + 1)}, ValueError, rf"{name}: expected shape \({size},\), got \({size + 1},\)"),
            ({name: torch.ones(1, size)}, ValueError, rf"{name}: expected shape \({size},\), got \(1, {size}\)"),
            ({name: torch.tensor(1.0)}, ValueError, rf"{name}: expected shape \({size},\), got \(\)"),
            (
                {name: torch.ones(size, device="meta")},
                ValueError,
                f"{name}: expected device cpu, got meta",
            ),
            (
                {name: torch.ones(size, requires_grad=True)},
                ValueError,
                f"{name}: expected a tensor that requires no grad",
            ),
        )
    ),
    ({"weight": torch.ones(8), "valid_vocab": 9}, ValueError, r"weight: expected shape \(9,\), got \(8,\)"),
    *(
        ({"valid_vocab": value}, TypeError, f"valid_vocab: expected an int, got {kind}")
        for value, kind in ((5.0, "float"), (True, "bool"), ("5", "str"), (torch.tensor(5), "Tensor"))
    ),
    *(({"valid_vocab": value}, ValueError, f"valid_vocab: expected 1 to 10.*got {value}") for value in (0, -1, 11)),
    ({"reduction": "none", "inplace": True}, ValueError, "inplace: expected reduction 'mean' or 'sum', got 'none'"),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), BAD_OPTIONS, ids=[f"{i}-{','.join(case[0])}" for i, case in enumerate(BAD_OPTIONS)]
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_bad_option_is_named_with_what_came(options, error, message, requires_grad):
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy(GOOD.clone().requires_grad_(requires_grad), TARGET, **options)


@pytest.mark.parametrize(
    ("logits", "target", "options", "error", "message"),
    [
        (GOOD, TARGET[:3], {}, ValueError, r"target: expected shape \(4,\), that of logits without V, got \(3,\)"),
        (GOOD.view(2, 2, 10), TARGET, {}, ValueError, r"target: expected shape \(2, 2\), .* got \(4,\)"),
        (GOOD[0], TARGET[:1], {}, ValueError, r"target: expected shape \(\), .* got \(1,\)"),
        (GOOD[0, 0], TARGET[0], {}, ValueError, r"logits: expected shape .*got \(\)"),
        (
            GOOD.view(2, 2, 10)[..., :0],
            TARGET.view(2, 2),
            {},
            ValueError,
            "logits: expected 1 to 2147483647 columns, got 0",
        ),
        (GOOD.view(2, 2, 10).double(), TARGET.view(2, 2), {}, TypeError, "logits: expected dtype .*got torch.float64"),
        (
            GOOD.view(2, 2, 10),
            TARGET.view(2, 2).short(),
            {},
            TypeError,
            "target: expected dtype int64 or int32, got torch.int16",
        ),
        (
            GOOD[0],
            TARGET[0],
            {"shift": True},
            ValueError,
            r"shift: expected logits with a dimension of positions, got shape \(10,\)",
        ),
        (GOOD, TARGET, {"shift": True, "ignore_index": None}, TypeError, "ignore_index: expected an int, got NoneType"),
        (
            GOOD,
            TARGET,
            {"shift": True, "ignore_index": 2**63},
            ValueError,
            "ignore_index: expected an int64, got 92233",
        ),
        (GOOD.to_sparse(), TARGET, {}, TypeError, "logits, target: expected dense tensors, got torch.sparse_coo"),
        (
            GOOD.view(2, 2, 10),
            TARGET.view(2, 2),
            {"row_weight": torch.ones(4)},
            ValueError,
            r"row_weight: expected shape \(2, 2\), got \(4,\)",
        ),
        (
            GOOD.view(2, 2, 10),
            TARGET.view(2, 2).to("meta"),
            {},
            ValueError,
            "target: expected device cpu, that of logits, got meta",
        ),
    ],
)
def test_bad_logits_and_targets_are_named_with_what_came(logits, target, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy(logits, target, **options)
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy(logits, target, softcap=3.0, reduction="none", **options)


def overlapping(y):
    """Return rows that overlap, of y (4, 10)."""
    return y.view(-1).as_strided((4, 10), (5, 1))


NOT_TO_BE_OVERWRITTEN = {
    "a leaf": (lambda x: x, "that are not a leaf, nor a view of one", True),
    "a view of a leaf": (lambda x: x.view(4, 10), "that are not a leaf, nor a view of one", True),
    "a part of a leaf": (lambda x: x[:, :5], "that are not a leaf, nor a view of one", True),
    "an expanded row": (lambda x: (x * 1)[:1].expand(4, 10), "rows that do not overlap", True),
    "overlapping rows": (lambda x: overlapping(x * 1), "rows that do not overlap", True),
    "every second column": (lambda x: (x * 1)[:, ::2], r"\(B, V\) with last stride 1", True),
    "columns first": (lambda x: (x * 1).t(), r"\(B, V\) with last stride 1", True),
    "one column for all": (lambda x: (x * 1)[:, :1].expand(4, 10), r"\(B, V\) with last stride 1", True),
    "the first two dimensions swapped": (
        lambda x: (x * 1).view(2, 2, 10).transpose(0, 1),
        r"\(B, V\) with last stride 1",
        True,
    ),
    "all rows, sliced": (lambda x: (x * 1)[:], "that are a reshape of the tensor .* got SliceBackward0", False),
    "a view changed in place": (
        lambda x: (x * 1).view(2, 2, 10).mul_(2.0),
        "that are a reshape .* got AsStridedBackward0",
        False,
    ),
    "some rows": (lambda x: (x * 1)[:2], "that are all of their storage, got 20 of 40", False),
    "some columns": (lambda x: (x * 1)[:, :5], "that are all of their storage, got 20 of 40", False),
}


@pytest.mark.parametrize("case", NOT_TO_BE_OVERWRITTEN)
@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_logits_that_may_not_be_overwritten_are_refused_and_left_alone(draw, device, case, name, dtype):
    make, expected, both = NOT_TO_BE_OVERWRITTEN[case]
    x = draw.logits(4, 10, dtype, device).requires_grad_()
    logits = make(x)
    before, target = logits.detach().clone(), torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
    if not both and name == "inplace_backward":
        loss = cross_entropy(logits, target, inplace_backward=True)
        (grad,) = torch.autograd.grad(loss, x)
        (expected_grad,) = torch.autograd.grad(cross_entropy(make(x), target), x)
        torch.testing.assert_close(grad, expected_grad)
        return
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{expected}"):
        cross_entropy(logits, target, **{name: True})
    assert torch.equal(logits.detach(), before)


class Sharded(torch.Tensor):
    """What makes a DTensor one to us: it offers the whole tensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", ["target", "weight", "row_weight"])
def test_a_sharded_tensor_beside_plain_logits_is_refused_with_the_call_to_make(draw, device, name):
    given = {
        "logits": draw.logits(4, 7, torch.float32, device).view(2, 2, 7),
        "target": torch.tensor([[1, 2], [3, 4]], device=device),
        "weight": torch.ones(7, device=device),
        "row_weight": torch.ones(2, 2, device=device),
    }
    given[name] = given[name].as_subclass(Sharded)
    with pytest.raises(TypeError, match=rf"^{name}: expected a plain tensor, got a DTensor; pass its full_tensor\(\)"):
        cross_entropy(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "row_weight"])
def test_a_tensor_on_another_device_than_the_logits_is_refused(cuda, name):
    tensor = torch.ones(10 if name == "weight" else 4)
    with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0,.* got cpu"):
        cross_entropy(GOOD.to(cuda), TARGET.to(cuda), **{name: tensor})
    with pytest.raises(ValueError, match=f"^{name}: expected device cpu,.* got cuda:0"):
        cross_entropy(GOOD, TARGET, **{name: tensor.to(cuda)})
    with pytest.raises(ValueError, match=r"^normalizer: expected a finite fp32 number above 0.*, got 0"):
        cross_entropy(GOOD.to(cuda), TARGET.to(cuda), normalizer=torch.tensor(0))


def test_overwritten_logits_are_let_go_of_after_backward_though_the_loss_lives_on(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device).requires_grad_(), draw.labels(8, 100, device)
    logits = x * 1.0
    loss = cross_entropy(logits, labels, inplace=True)
    buffers = loss.grad_fn.kept
    assert len(buffers) == 1
    loss.backward()
    assert buffers == []


@pytest.mark.parametrize(
    ("dtype", "logit_scale"),
    [(torch.float32, 200.0), (torch.bfloat16, 200.0), (torch.float16, 1e-4), (torch.float32, 1e-4)],
    ids=str,
)
def test_minus_infinity_weighs_nothing_in_the_entropy_at_any_scale(draw, device, dtype, logit_scale):
    x = draw.logits(6, 5000, dtype, device)
    x[:, ::3] = -torch.inf
    exact = torch.distributions.Categorical(logits=x.double() * logit_scale).entropy()
    leaf = x.clone().requires_grad_()
    output = cross_entropy(leaf, torch.full((6,), 1, device=device), logit_scale=logit_scale, return_entropy=True)
    torch.testing.assert_close(output.entropy.double(), exact, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(output.entropy.sum(), leaf)
    assert grad.isfinite().all()


def test_a_row_without_a_softmax_never_hits_its_target(device):
    x = torch.zeros(3, 10, device=device)
    x[0, 0], x[1] = torch.nan, -torch.inf
    labels = torch.tensor([1, 2, 0], device=device)
    output = cross_entropy(x, labels, return_token_accuracy=True, return_predicted_tokens=True)
    assert output.predicted_tokens.tolist() == [-1, -1, 0]
    assert float(output.token_accuracy) == pytest.approx(1 / 3)
