"""`chunked_linear_cross_entropy`, `chunked_linear_loss`: values, gradients, chunks, memory, autograd and refusals."""

import contextlib
import itertools
import math
import re

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from reference import Incoming
from torch._subclasses.fake_tensor import FakeTensorMode

from greyhound.kernels import linear as kernels
from greyhound.nn.functional import (
    CrossEntropyOutput,
    autograd_loss_and_logits_grad,
    chunked_linear_cross_entropy,
    chunked_linear_loss,
    cross_entropy,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")
ACCUMULATIONS = ("fp32", "weight")
OUTPUTS = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")

OPTIONS = {
    "label_smoothing": lambda draw, N, device: 0.1,
    "softcap": lambda draw, N, device: 5.0,
    "logit_scale": lambda draw, N, device: 0.7,
    "normalizer": lambda draw, N, device: torch.tensor(13.0, device=device),
    "row_weight": lambda draw, N, device: draw.logits(1, N, torch.float32, device)[0],
    "z_loss_multiplier": lambda draw, N, device: 1e-2,
}
COMBINATIONS = [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2), tuple(OPTIONS)]

SHAPES = [
    *(pytest.param("cpu", *shape, id="cpu-{}x{}x{}".format(*shape)) for shape in ((23, 16, 37), (13, 7, 1001))),
    *(
        pytest.param("cuda:0", *shape, id="cuda-{}x{}x{}".format(*shape), marks=pytest.mark.gpu)
        for shape in ((23, 16, 37), (300, 64, 1000), (130, 33, 9001), (70, 128, 40_001))
    ),
]
"""(N, H, V)."""


def drawn_head(draw, N, H, V, dtype, device, *, bias=False, scale=2.0):
    """Return inputs, weight and bias that make logits of about this deviation."""
    inputs = draw.logits(N, H, dtype, device)
    weight = draw.logits(V, H, dtype, device, scale=scale / math.sqrt(H))
    return inputs, weight, draw.logits(1, V, dtype, device)[0] if bias else None


def incoming(draw, mode, reduction, N, device):
    """Return what comes in: 1, another number, or something for the lse and the entropy too."""

    def of_rows():
        return draw.logits(1, N, torch.float32, device)[0]

    loss = of_rows() if reduction == "none" else torch.tensor(-0.7, device=device)
    if mode == "one":
        loss = torch.ones_like(loss)
    return Incoming(loss, of_rows() if mode == "all" else None, of_rows() if mode == "all" else None)


def gradients(loss, *tensors, grad=None, **options):
    """Return the gradients of these tensors."""
    return torch.autograd.grad(loss, tensors, grad, **options)


# --- Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "N", "H", "V"), SHAPES, indirect=["device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_option_each_pair_and_all_are_right(draw, device, N, H, V, dtype, reduction):
    for i, names in enumerate(COMBINATIONS):
        options = {n: OPTIONS[n](draw, N, device) for n in names if n != "normalizer" or reduction == "mean"}
        inputs, weight, bias = drawn_head(draw, N, H, V, dtype, device, bias=i % 2 == 1)
        labels = draw.labels(N, V, device, ignored=0.2)
        reference.check_linear(
            chunked_linear_cross_entropy,
            inputs,
            weight,
            bias,
            labels,
            incoming=incoming(draw, ("one", "another", "all")[i % 3], reduction, N, device),
            how={"chunk_size": (None, 1 + N // 3, 7)[i % 3], "grad_weight_accum_dtype": "fp32"},
            reduction=reduction,
            **options,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 22, 23, 24, 1000])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_chunk_size_gives_the_same_to_rounding(draw, device, dtype, chunk_size, reduction):
    inputs, weight, bias = drawn_head(draw, 23, 16, 37, dtype, device, bias=True)
    labels = draw.labels(23, 37, device, ignored=0.2)
    reference.check_linear(
        chunked_linear_cross_entropy,
        inputs,
        weight,
        bias,
        labels,
        incoming=incoming(draw, "one", reduction, 23, device),
        how={"chunk_size": chunk_size},
        reduction=reduction,
        z_loss_multiplier=1e-3,
    )


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_without_rounding_between_chunks_the_weights_error_does_not_grow_with_their_number(draw, device, accumulation):
    N, H, V = 8192, 128, 32
    inputs, weight, _ = drawn_head(draw, N, H, V, torch.bfloat16, device)
    labels = draw.labels(N, V, device)
    _, exact = reference.linear_with_options(
        inputs, weight, None, labels, Incoming(torch.ones((), device=device)), exact=True
    )
    errors = []
    for chunk_size in (8192, 512, 8):
        leaf = weight.clone().requires_grad_()
        loss = chunked_linear_cross_entropy(
            inputs, leaf, labels, grad_weight_accum_dtype=accumulation, chunk_size=chunk_size
        )
        errors.append(reference.relative_error(gradients(loss, leaf)[0], exact.weight))
    if accumulation == "fp32":
        assert max(errors) <= 1.05 * min(errors)
    else:
        assert errors[2] > 2.0 * errors[0]  # what the other one is for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_that_matters_is_in_the_loss_and_in_every_gradient(draw, device, dtype):
    inputs, weight, _ = drawn_head(draw, 40, 16, 50, dtype, device)
    bias = draw.logits(1, 50, dtype, device, scale=5.0)[0]
    labels = draw.labels(40, 50, device, ignored=0.1)
    for chunk_size in (40, 16, 3):
        loss, _ = reference.check_linear(
            chunked_linear_cross_entropy,
            inputs,
            weight,
            bias,
            labels,
            incoming=Incoming(torch.ones((), device=device)),
            how={"chunk_size": chunk_size},
        )
        assert loss > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_of_each_row_takes_its_own_incoming_gradient(draw, device, dtype):
    inputs, weight, bias = drawn_head(draw, 8, 10, 15, dtype, device, bias=True)
    labels = draw.labels(8, 15, device)
    labels[0] = -100
    every_row = torch.linspace(0, 1, 8, device=device)
    for came in (every_row, torch.tensor(0.5, device=device).expand(8), torch.linspace(0, 1, 16, device=device)[::2]):
        for chunk_size in (8, 3):
            reference.check_linear(
                chunked_linear_cross_entropy,
                inputs,
                weight,
                bias,
                labels,
                incoming=Incoming(came),
                how={"chunk_size": chunk_size},
                reduction="none",
            )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 0.1])
def test_without_a_valid_row_loss_and_gradients_are_0(draw, device, reduction, z_loss_multiplier):
    head = [each.requires_grad_() for each in drawn_head(draw, 9, 6, 11, torch.bfloat16, device, bias=True)]
    labels = torch.full((9,), -100, device=device)
    loss = chunked_linear_cross_entropy(
        head[0], head[1], labels, -100, reduction, z_loss_multiplier, bias=head[2], chunk_size=4
    )
    assert (loss == 0).all()
    for gradient in gradients(loss, *head, grad=torch.ones_like(loss)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_chunk_of_ignored_rows_adds_nothing(draw, device, reduction):
    inputs, weight, _ = drawn_head(draw, 12, 6, 11, torch.float32, device)
    labels = draw.labels(12, 11, device)
    labels[4:8] = -100
    reference.check_linear(
        chunked_linear_cross_entropy,
        inputs,
        weight,
        None,
        labels,
        incoming=Incoming(torch.ones((), device=device)),
        how={"chunk_size": 4},
        reduction=reduction,
        z_loss_multiplier=0.1,
    )


@pytest.mark.parametrize("V", [8, 11])
def test_an_ignored_row_of_inputs_that_are_not_finite_has_gradient_0(draw, device, V):
    """Where the vocabulary is padded, too: a product of infinity and the padding's zero would be NaN."""
    inputs, weight, _ = drawn_head(draw, 6, 4, V, torch.bfloat16, device)
    inputs[2], inputs[3] = float("inf"), float("nan")
    labels = draw.labels(6, V, device)
    labels[2:4] = -100
    leaf = inputs.requires_grad_()
    loss = chunked_linear_cross_entropy(leaf, weight, labels, chunk_size=4)
    (found,) = gradients(loss, leaf)
    assert loss.isfinite()
    assert (found[2:4] == 0).all()
    assert (found[[0, 1, 4, 5]].abs().sum(1) > 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_rows_gradients_are_zeros(device, reduction):
    inputs = torch.empty(0, 6, device=device, requires_grad=True)
    weight, bias = torch.ones(11, 6, device=device, requires_grad=True), torch.ones(11, device=device)
    bias.requires_grad_()
    output = chunked_linear_cross_entropy(
        inputs,
        weight,
        torch.empty(0, dtype=torch.int64, device=device),
        reduction=reduction,
        bias=bias,
        **{f"return_{name}": True for name in OUTPUTS},
    )
    assert output.loss.shape == ((0,) if reduction == "none" else ())
    assert (output.loss == 0).all()
    found = gradients(output.loss, inputs, weight, bias, grad=torch.ones_like(output.loss))
    assert [each.shape for each in found] == [inputs.shape, weight.shape, bias.shape]
    assert all((each == 0).all() for each in found)


def test_a_target_out_of_range_is_refused_on_the_cpu_and_makes_its_row_nan_on_a_gpu(draw, device):
    inputs, weight, _ = drawn_head(draw, 6, 4, 10, torch.float32, device)
    labels = torch.tensor([1, 2, 10, 3, -100, 4], device=device)
    inputs.requires_grad_()
    if device.type == "cpu":
        with pytest.raises(
            IndexError, match=re.escape("target: expected 0 to 9 or ignore_index=-100, got 10 in row 2")
        ):
            chunked_linear_cross_entropy(inputs, weight, labels)
        return
    loss = chunked_linear_cross_entropy(inputs, weight, labels, reduction="none", chunk_size=4)
    assert loss.isnan().tolist() == [False, False, True, False, False, False]
    (gradient,) = gradients(chunked_linear_cross_entropy(inputs, weight, labels, chunk_size=4), inputs)
    assert gradient.isnan().all(dim=1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_inputs_give_the_same_bits(draw, device, dtype):
    head = [each.requires_grad_() for each in drawn_head(draw, 70, 16, 1001, dtype, device, bias=True)]
    labels = draw.labels(70, 1001, device, ignored=0.2)

    def run():
        loss = chunked_linear_cross_entropy(head[0], head[1], labels, bias=head[2], chunk_size=32)
        return loss.detach(), *gradients(loss, *head)

    for first, second in zip(run(), run(), strict=True):
        assert reference.same_bits(first, second)


# --- Shapes and layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 3)])
def test_leading_dimensions_are_those_of_the_target(draw, device, reduction, leading):
    rows = math.prod(leading)
    inputs, weight, _ = drawn_head(draw, rows, 6, 11, torch.float32, device)
    labels = draw.labels(rows, 11, device)
    row_weight = draw.logits(1, rows, torch.float32, device)[0]
    every = {f"return_{name}": True for name in OUTPUTS}
    leaf = inputs.reshape(*leading, 6).requires_grad_()
    output = chunked_linear_cross_entropy(
        leaf, weight, labels.reshape(leading), reduction=reduction, row_weight=row_weight.reshape(leading), **every
    )
    flat = chunked_linear_cross_entropy(inputs, weight, labels, reduction=reduction, row_weight=row_weight, **every)
    for name, ours, theirs in zip(CrossEntropyOutput._fields, output, flat, strict=True):
        by_row = reduction == "none" or name in ("lse", "predicted_tokens", "entropy")
        assert ours.shape == (leading if by_row else ())
        assert torch.equal(ours.reshape(theirs.shape), theirs)
    assert gradients(output.loss.sum(), leaf)[0].shape == leaf.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_of_inputs_weight_and_target_give_what_contiguous_ones_give(draw, device, dtype):
    inputs, weight, bias = drawn_head(draw, 24, 10, 37, dtype, device, bias=True)
    labels = draw.labels(24, 37, device)
    expected = chunked_linear_cross_entropy(inputs, weight, labels, bias=bias, chunk_size=7)
    wide = torch.zeros(24, 13, dtype=dtype, device=device)
    wide[:, 2:12] = inputs
    transposed = inputs.reshape(4, 6, 10).transpose(0, 1)
    for x, t in (
        (inputs.t().contiguous().t(), labels),
        (wide[:, 2:12], labels.repeat_interleave(2)[::2]),
        (transposed.contiguous().transpose(0, 1), labels.reshape(4, 6)),
        (transposed.transpose(0, 1), labels.reshape(4, 6).t().contiguous().t().to(torch.int32)),
    ):
        for w in (weight, weight.t().contiguous().t()):
            leaf, w_leaf = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = chunked_linear_cross_entropy(leaf, w_leaf, t, bias=bias, chunk_size=7)
            assert reference.relative_error(loss, expected) < 1e-3
            found = gradients(loss, leaf, w_leaf)
            assert [each.shape for each in found] == [leaf.shape, w_leaf.shape]


@pytest.mark.parametrize(("H", "V"), [(1, 1), (1, 5), (3, 7), (5, 129), (8, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes_work(draw, device, dtype, H, V):
    inputs, weight, bias = drawn_head(draw, 5, H, V, dtype, device, bias=True)
    reference.check_linear(
        chunked_linear_cross_entropy,
        inputs,
        weight,
        bias,
        draw.labels(5, V, device),
        incoming=Incoming(torch.ones((), device=device)),
        how={"chunk_size": 3},
        reduction="sum",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_given_is_written_to(draw, device, dtype):
    given = [*drawn_head(draw, 12, 6, 11, dtype, device, bias=True), draw.labels(12, 11, device)]
    given.append(draw.logits(1, 12, torch.float32, device)[0])
    before = [each.clone() for each in given]
    versions = [each._version for each in given]
    inputs, weight, bias, labels, row_weight = given
    for wants in (False, True):
        head = [each.detach().requires_grad_(wants) for each in (inputs, weight, bias)]
        loss = chunked_linear_cross_entropy(head[0], head[1], labels, bias=head[2], row_weight=row_weight, chunk_size=5)
        if wants:
            loss.backward()
    assert [each._version for each in given] == versions
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


# --- Outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_other_outputs_are_those_of_the_logits(draw, device, reduction, wants_gradient):
    inputs, weight, bias = drawn_head(draw, 29, 8, 51, torch.float32, device, bias=True)
    labels = draw.labels(29, 51, device, ignored=0.3)
    options = {"z_loss_multiplier": 0.01, "softcap": 4.0, **{f"return_{name}": True for name in OUTPUTS}}
    inputs.requires_grad_(wants_gradient)
    ours = chunked_linear_cross_entropy(inputs, weight, labels, reduction=reduction, bias=bias, chunk_size=6, **options)
    theirs = cross_entropy(F.linear(inputs, weight, bias), labels, reduction=reduction, **options)
    assert torch.equal(ours.predicted_tokens, theirs.predicted_tokens)
    for name in ("loss", "z_loss", "lse", "token_accuracy", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)
    assert ours.lse.requires_grad == ours.entropy.requires_grad == wants_gradient
    assert not any(each.requires_grad for each in (ours.z_loss, ours.token_accuracy, ours.predicted_tokens))


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_output_comes_alone(draw, device, name):
    inputs, weight, _ = drawn_head(draw, 8, 8, 51, torch.float32, device)
    output = chunked_linear_cross_entropy(inputs, weight, draw.labels(8, 51, device), **{f"return_{name}": True})
    assert [each for each in CrossEntropyOutput._fields if getattr(output, each) is not None] == ["loss", name]


def test_an_ignored_row_is_no_hit_even_where_its_target_is_predicted(draw, device):
    inputs = torch.eye(4, device=device)
    labels = torch.tensor([0, 1, 2, 0], device=device)
    output = chunked_linear_cross_entropy(inputs, inputs, labels, ignore_index=1, return_token_accuracy=True)
    assert float(output.token_accuracy) == pytest.approx(2 / 3)
    by_row = chunked_linear_cross_entropy(inputs, inputs, labels, 1, "none", return_token_accuracy=True)
    assert by_row.token_accuracy.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_an_lse_that_nothing_comes_in_for_costs_no_second_product(draw, device, monkeypatch):
    inputs, weight, _ = drawn_head(draw, 8, 8, 51, torch.float32, device)
    inputs.requires_grad_()
    calls = []
    monkeypatch.setattr(kernels, "backward", lambda *_: calls.append(1))
    output = chunked_linear_cross_entropy(inputs, weight, draw.labels(8, 51, device), return_lse=True)
    output.loss.backward()
    assert not calls


# --- What is wanted ---------------------------------------------------------------------------------------

CONTEXTS = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wants", itertools.product((False, True), repeat=3), ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exactly_what_wants_a_gradient_gets_one_and_its_product(
    draw, device, monkeypatch, context, wants, reduction, dtype
):
    head = drawn_head(draw, 8, 10, 15, dtype, device, bias=True)
    labels = draw.labels(8, 15, device)
    everything = [each.clone().requires_grad_() for each in head]
    loss = chunked_linear_cross_entropy(everything[0], everything[1], labels, reduction=reduction, bias=everything[2])
    expected = gradients(loss, *everything, grad=torch.ones_like(loss))
    leaves = [each.requires_grad_(want) for each, want in zip(head, wants, strict=True)]
    sizes = []
    product = kernels.product

    def recorded(a, b, *, out, add=False):
        sizes.append(tuple(out.shape))
        product(a, b, out=out, add=add)

    monkeypatch.setattr(kernels, "product", recorded)
    with CONTEXTS[context]():
        loss = chunked_linear_cross_entropy(leaves[0], leaves[1], labels, reduction=reduction, bias=leaves[2])
    assert loss.requires_grad == (any(wants) and context == "grad")
    if loss.requires_grad:
        loss.sum().backward()
        for leaf, want, right in zip(leaves, wants, expected, strict=True):
            assert (leaf.grad is not None) == want
            assert leaf.grad is None or torch.equal(leaf.grad, right)
    worked = context == "grad"
    assert sizes == [(8, 10)] * (wants[0] and worked) + [(16, 10)] * (wants[1] and worked)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_detached_loss_or_an_unused_one_costs_no_gradient_later(draw, device, reduction):
    inputs, weight, _ = drawn_head(draw, 8, 10, 15, torch.float32, device)
    inputs.requires_grad_()
    loss = chunked_linear_cross_entropy(inputs, weight, draw.labels(8, 15, device), reduction=reduction)
    other = (inputs * 2).sum()
    (gradient,) = gradients(other + 0 * loss.detach().sum(), inputs)
    assert (gradient == 2).all()


# --- Autograd ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_backward_passes_with_different_incoming_gradients_do_not_meet(draw, device, dtype, reduction):
    head = [each.requires_grad_() for each in drawn_head(draw, 8, 10, 15, dtype, device, bias=True)]
    labels = draw.labels(8, 15, device)

    def loss_of():
        loss = chunked_linear_cross_entropy(head[0], head[1], labels, reduction=reduction, bias=head[2], chunk_size=3)
        return loss, torch.ones_like(loss)

    loss, one = loss_of()
    kept = [gradients(loss, *head, grad=factor * one, retain_graph=factor != 4.0) for factor in (2.0, 1.0, 0.25, 4.0)]
    for found, factor in zip(kept, (2.0, 1.0, 0.25, 4.0), strict=True):
        alone, one = loss_of()
        for ours, right in zip(found, gradients(alone, *head, grad=factor * one), strict=True):
            assert torch.equal(ours, right)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_a_parameters_gradient_is_scaled_in_place_and_handed_over(draw, device, monkeypatch, accumulation):
    inputs, weight, _ = drawn_head(draw, 8, 10, 16, torch.bfloat16, device)
    inputs, weight = inputs.requires_grad_(), torch.nn.Parameter(weight)
    loss = chunked_linear_cross_entropy(
        inputs, weight, draw.labels(8, 16, device), grad_weight_accum_dtype=accumulation, chunk_size=3
    )
    made = [each.data_ptr() for each in loss.grad_fn.saved_tensors[:2]]
    loss.backward()
    assert [inputs.grad.data_ptr(), weight.grad.data_ptr()] == made


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_derivative_raises(draw, device, reduction):
    inputs, weight, _ = drawn_head(draw, 8, 10, 15, torch.float32, device)
    inputs.requires_grad_()
    loss = chunked_linear_cross_entropy(inputs, weight, draw.labels(8, 15, device), reduction=reduction).sum()
    (gradient,) = gradients(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["inputs", "weight", "bias", "row_weight"])
def test_a_tangent_is_refused_by_name(draw, device, name):
    given = dict(
        zip(("inputs", "weight", "bias"), drawn_head(draw, 8, 10, 15, torch.float32, device, bias=True), strict=True)
    )
    given["row_weight"] = torch.ones(8, device=device)
    with torch.autograd.forward_ad.dual_level():
        given[name] = torch.autograd.forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match=f"^{name}: expected a tensor without a tangent"):
            chunked_linear_cross_entropy(target=draw.labels(8, 15, device), **given)


TRANSFORMS = {
    "vmap": lambda loss, x: torch.func.vmap(loss)(x.expand(2, *x.shape)),
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("of", ["inputs", "weight", "bias"])
def test_function_transforms_are_refused(draw, device, transform, of):
    head = dict(
        zip(("inputs", "weight", "bias"), drawn_head(draw, 8, 10, 15, torch.float32, device, bias=True), strict=True)
    )
    labels = draw.labels(8, 15, device)

    def loss(x):
        return chunked_linear_cross_entropy(target=labels, **{**head, of: x})

    with pytest.raises(NotImplementedError):
        TRANSFORMS[transform](loss, head[of])


def test_a_batch_of_incoming_gradients_is_right(draw, device):
    inputs, weight, _ = drawn_head(draw, 8, 10, 15, torch.float32, device)
    inputs.requires_grad_()
    loss = chunked_linear_cross_entropy(inputs, weight, draw.labels(8, 15, device))
    (one,) = gradients(loss, inputs, retain_graph=True)
    batch = torch.tensor([1.0, 2.0, -3.0], device=device)
    (found,) = torch.autograd.grad(loss, inputs, batch, is_grads_batched=True)
    torch.testing.assert_close(found, batch[:, None, None] * one)


def test_a_tied_weight_gets_the_gradients_of_both_its_uses(draw, device):
    V, H = 31, 12
    embedding = torch.nn.Embedding(V, H, device=device)
    tokens = draw.labels(20, V, device)

    def run(loss_of):
        embedding.zero_grad()
        loss_of(embedding(tokens[:-1]), embedding.weight, tokens[1:]).backward()
        return embedding.weight.grad.clone()

    ours = run(lambda x, w, t: chunked_linear_cross_entropy(x, w, t, chunk_size=7))
    right = run(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


# --- Autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_under_autocast_products_take_its_dtype_and_gradients_that_of_their_tensors(
    draw, device, autocast, dtype, has_bias, reduction, chunk_size
):
    inputs, weight, bias = drawn_head(draw, 24, 16, 37, torch.float32, device, bias=has_bias)
    leaves = [inputs.to(dtype).requires_grad_(), weight.requires_grad_()]
    leaves += [bias.requires_grad_()] if has_bias else []
    labels = draw.labels(24, 37, device, ignored=0.2)
    with torch.autocast(device.type, dtype=autocast):
        loss = chunked_linear_cross_entropy(
            leaves[0],
            leaves[1],
            labels,
            reduction=reduction,
            bias=leaves[2] if has_bias else None,
            chunk_size=chunk_size,
        )
    assert loss.dtype == torch.float32
    came = Incoming(torch.ones_like(loss))
    found = gradients(loss, *leaves, grad=came.loss)
    # What the products see.
    seen = [each.detach().to(autocast) for each in leaves]
    terms, exact = reference.linear_with_options(
        seen[0], seen[1], seen[2] if has_bias else None, labels, came, exact=True, reduction=reduction
    )
    eps = torch.finfo(autocast).eps
    assert reference.relative_error(loss.detach(), terms.loss) <= eps
    for leaf, gradient, right in zip(leaves, found, exact, strict=False):
        assert gradient.dtype == leaf.dtype
        assert reference.relative_error(gradient, right) <= 2 * eps


def test_under_autocast_the_gradients_of_fp32_tensors_are_not_rounded_to_its_dtype(draw, device):
    inputs, weight, _ = drawn_head(draw, 24, 16, 37, torch.float32, device)
    leaves = (inputs.requires_grad_(), weight.requires_grad_())
    for accumulation, chunk_size in itertools.product(ACCUMULATIONS, (None, 5)):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = chunked_linear_cross_entropy(
                *leaves,
                draw.labels(24, 37, device),
                grad_weight_accum_dtype=accumulation,
                chunk_size=chunk_size,
            )
        for gradient in gradients(loss, *leaves):
            assert (gradient != gradient.to(torch.bfloat16)).any()


def test_a_mean_over_many_rows_does_not_underflow_in_fp16_before_the_loss_scale_reaches_it(draw, device):
    N, H, V, scale = 2048, 8, 4096, 2.0**16
    inputs, weight, _ = drawn_head(draw, N, H, V, torch.float16, device)
    leaves, labels = (inputs.requires_grad_(), weight.requires_grad_()), draw.labels(N, V, device)
    found = gradients(scale * chunked_linear_cross_entropy(*leaves, labels, chunk_size=512), *leaves)
    with torch.autocast(device.type, dtype=torch.bfloat16):  # the gradients are fp16 still
        loss = chunked_linear_cross_entropy(*leaves, labels, chunk_size=512, normalizer=2e6)
    came = Incoming(torch.tensor(scale, device=device))
    _, exact = reference.linear_with_options(inputs, weight, None, labels, came, exact=True)
    for gradient, right in zip(found, exact, strict=False):
        assert reference.relative_error(gradient, right) < 2e-3
    _, exact = reference.linear_with_options(inputs, weight, None, labels, came, exact=True, normalizer=2e6)
    for gradient, right in zip(gradients(scale * loss, *leaves), exact, strict=False):
        assert reference.relative_error(gradient, right) < 2e-2


# --- Compiled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_in_one_graph_it_gives_what_eager_gives(draw, device, dtype, reduction):
    torch._dynamo.reset()

    def loss_of(inputs, weight, bias, labels):
        options = {"softcap": 4.0, "z_loss_multiplier": 0.01, "label_smoothing": 0.1, "return_lse": True}
        output = chunked_linear_cross_entropy(
            inputs, weight, labels, reduction=reduction, bias=bias, chunk_size=9, **options
        )
        return output.loss.sum() + output.lse.sum()

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend="aot_eager")
    weight, bias = drawn_head(draw, 1, 10, 37, dtype, device, bias=True)[1:]
    for N in (64, 65, 8, 0):
        head = [draw.logits(N, 10, dtype, device).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        labels = draw.labels(N, 37, device, ignored=0.2)
        losses = compiled(*head, labels), loss_of(*head, labels)
        assert torch.equal(*losses)
        for ours, theirs in zip(*(gradients(loss, *head) for loss in losses), strict=True):
            assert torch.equal(ours, theirs)


def test_compiled_by_inductor_a_float_that_changes_does_not_compile_again_each_time(draw, device):
    torch._dynamo.reset()
    inputs, weight, _ = drawn_head(draw, 24, 10, 37, torch.float32, device)
    labels = draw.labels(24, 37, device)
    inputs.requires_grad_()

    def loss_of(x, z, s):
        return chunked_linear_cross_entropy(x * 1, weight, labels, z_loss_multiplier=z, label_smoothing=s)

    compiled = torch.compile(loss_of, fullgraph=True)
    for step in range(4):
        z, s = 0.1 + step / 7, 0.05 * (1 + step)
        if step == 2:
            torch._dynamo.config.error_on_recompile = True
        try:
            loss = compiled(inputs, z, s)
        finally:
            torch._dynamo.config.error_on_recompile = False
        torch.testing.assert_close(loss, loss_of(inputs, z, s))
        torch.testing.assert_close(gradients(loss, inputs)[0], gradients(loss_of(inputs, z, s), inputs)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_step_follows_its_inputs_when_replayed(draw, cuda, dtype, reduction):
    head = [each.requires_grad_() for each in drawn_head(draw, 70, 16, 1001, dtype, cuda, bias=True)]
    labels = draw.labels(70, 1001, cuda, ignored=0.2)

    def step():
        loss = chunked_linear_cross_entropy(head[0], head[1], labels, reduction=reduction, bias=head[2], chunk_size=32)
        return loss, *gradients(loss, *head, grad=torch.full_like(loss, 2.0))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for each in head:
            each.add_(draw.logits(1, 1, dtype, cuda)[0, 0])
        labels.copy_(draw.labels(70, 1001, cuda, ignored=0.5))
    graph.replay()
    for ours, right in zip(captured, step(), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu(draw, cuda):
    head = [each.requires_grad_() for each in drawn_head(draw, 70, 16, 1001, torch.bfloat16, cuda, bias=True)]
    labels = draw.labels(70, 1001, cuda, ignored=0.2)
    for reduction, normalizer in (
        ("mean", None),
        ("mean", torch.tensor(7, device=cuda)),
        ("sum", None),
        ("none", None),
    ):
        for _ in range(2):
            loss = chunked_linear_cross_entropy(
                head[0], head[1], labels, reduction=reduction, bias=head[2], normalizer=normalizer, chunk_size=32
            )
            gradients(loss, *head, grad=torch.ones_like(loss))
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


# --- Memory -----------------------------------------------------------------------------------------------

MIB = 1 << 20


def extra_mib(run):
    """Return the peak of `run` over what is allocated before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    del kept
    return peak


@pytest.mark.gpu
@pytest.mark.parametrize("incoming_gradient", [1.0, 3.0])
@pytest.mark.parametrize(
    ("accumulation", "chunk_size", "wants", "buffers"),
    [
        # (dX, dW, tile, accumulator)
        ("fp32", None, (True, True), ("inputs", "weight", 1, 0)),
        ("fp32", 512, (True, True), ("inputs", "accumulator", "weight", 0)),
        ("weight", 512, (True, True), ("inputs", "weight", 0.25, 0)),
        ("fp32", 512, (True, False), ("inputs", 0.25, 0, 0)),
        ("fp32", 512, (False, True), ("accumulator", "weight", 0, 0)),
        ("fp32", 512, (False, False), (0.25, 0, 0, 0)),
    ],
)
def test_a_step_takes_the_gradients_a_tile_and_an_accumulator_and_no_more(
    draw, cuda, accumulation, chunk_size, wants, buffers, incoming_gradient
):
    N, H, V = 2048, 1024, 128_256
    inputs, weight, _ = drawn_head(draw, N, H, V, torch.bfloat16, cuda)
    inputs.requires_grad_(wants[0])
    weight = torch.nn.Parameter(weight, requires_grad=wants[1])
    labels = draw.labels(N, V, cuda, ignored=0.2)
    sizes = {"inputs": 2 * N * H, "weight": 2 * V * H, "accumulator": 4 * V * H}
    allowed = sum(sizes[each] if isinstance(each, str) else each * 2 * N * V for each in buffers) / MIB

    def step():
        loss = chunked_linear_cross_entropy(
            inputs, weight, labels, grad_weight_accum_dtype=accumulation, chunk_size=chunk_size
        )
        leaves = [each for each in (inputs, weight) if each.requires_grad]
        came = torch.tensor(incoming_gradient, device=cuda)
        return gradients(loss, *leaves, grad=came) if leaves else loss

    assert extra_mib(step) <= allowed + 4


@pytest.mark.gpu
def test_a_vocabulary_that_is_no_multiple_of_eight_takes_a_copy_of_the_weight_beside(draw, cuda):
    N, H, V = 2048, 1024, 50_257
    inputs, weight, _ = drawn_head(draw, N, H, V, torch.bfloat16, cuda)
    leaves = (inputs.requires_grad_(), weight.requires_grad_())
    labels = draw.labels(N, V, cuda, ignored=0.2)
    allowed = 2 * (N * H + 2 * V * H + N * V) / MIB  # the gradients, the copy, the tile
    assert extra_mib(lambda: gradients(chunked_linear_cross_entropy(*leaves, labels), *leaves)) <= allowed + 4


@pytest.mark.gpu
def test_without_a_reduction_nothing_but_the_rows_is_kept_for_backward(draw, cuda):
    N, H, V = 2048, 1024, 32_000
    inputs, weight, _ = drawn_head(draw, N, H, V, torch.bfloat16, cuda)
    inputs.requires_grad_()
    labels = draw.labels(N, V, cuda)
    chunked_linear_cross_entropy(inputs, weight, labels, reduction="none", chunk_size=256)
    before = torch.cuda.memory_allocated()
    loss = chunked_linear_cross_entropy(inputs, weight, labels, reduction="none", chunk_size=256)
    assert (torch.cuda.memory_allocated() - before) / MIB < 1
    del loss


# --- Refusals ---------------------------------------------------------------------------------------------

INPUTS, WEIGHT, TARGET = torch.zeros(6, 4), torch.zeros(10, 4), torch.zeros(6, dtype=torch.int64)

BAD = [
    ({"inputs": [1.0]}, TypeError, "inputs: expected a torch.Tensor, got list"),
    ({"weight": None}, TypeError, "weight: expected a torch.Tensor, got NoneType"),
    ({"target": 3}, TypeError, "target: expected a torch.Tensor, got int"),
    ({"inputs": INPUTS.double()}, TypeError, "inputs: expected dtype float16, bfloat16, float32, got torch.float64"),
    ({"weight": WEIGHT.double()}, TypeError, "weight: expected dtype float16, bfloat16, float32, got torch.float64"),
    ({"weight": WEIGHT.bfloat16()}, TypeError, "weight: expected torch.float32, that of inputs, got torch.bfloat16"),
    ({"bias": torch.zeros(10).half()}, TypeError, "bias: expected torch.float32, that of inputs, got torch.float16"),
    ({"bias": 1.0}, TypeError, "bias: expected a torch.Tensor, got float"),
    ({"bias": torch.zeros(9)}, ValueError, "bias: expected shape (10,), got (9,)"),
    ({"bias": torch.zeros(10, 1)}, ValueError, "bias: expected shape (10,), got (10, 1)"),
    ({"inputs": torch.tensor(1.0)}, ValueError, "inputs: expected shape (..., H) with H at least 1, got ()"),
    ({"inputs": torch.zeros(6, 0)}, ValueError, "inputs: expected shape (..., H) with H at least 1, got (6, 0)"),
    ({"weight": torch.zeros(10, 5)}, ValueError, "weight: expected shape (V, 4), H being that of inputs, got (10, 5)"),
    ({"weight": torch.zeros(10)}, ValueError, "weight: expected shape (V, 4), H being that of inputs, got (10,)"),
    ({"weight": torch.zeros(0)}, ValueError, "weight: expected shape (V, 4), got (0,): an empty weight"),
    ({"weight": torch.zeros(0, 4)}, ValueError, "weight: expected shape (V, 4), got (0, 4): an empty weight"),
    ({"weight": WEIGHT.to("meta")}, ValueError, "weight: expected device cpu, that of inputs, got meta"),
    ({"bias": torch.zeros(10, device="meta")}, ValueError, "bias: expected device cpu, that of inputs, got meta"),
    ({"target": TARGET.to("meta")}, ValueError, "target: expected device cpu, that of inputs, got meta"),
    ({"target": TARGET.to(torch.uint8)}, TypeError, "target: expected dtype int64 or int32, got torch.uint8"),
    ({"target": TARGET[:5]}, ValueError, "target: expected shape (6,), that of inputs without H, got (5,)"),
    ({"target": TARGET[None]}, ValueError, "target: expected shape (6,), that of inputs without H, got (1, 6)"),
    ({"inputs": INPUTS.to_sparse()}, TypeError, "inputs: expected a dense tensor, got torch.sparse_coo"),
    ({"reduction": "avg"}, ValueError, "reduction: expected one of 'mean', 'sum', 'none', got 'avg'"),
    ({"grad_weight_accum_dtype": "bf16"}, ValueError, "grad_weight_accum_dtype: expected 'fp32' or 'weight', got 'bf1"),
    ({"grad_weight_accum_dtype": torch.float32}, ValueError, "grad_weight_accum_dtype: expected 'fp32' or 'weight', g"),
    ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1, got 0"),
    ({"chunk_size": -3}, ValueError, "chunk_size: expected at least 1, got -3"),
    ({"chunk_size": 2.0}, TypeError, "chunk_size: expected None or an int, got float"),
    ({"chunk_size": True}, TypeError, "chunk_size: expected None or an int, got bool"),
    ({"z_loss_multiplier": "1"}, TypeError, "z_loss_multiplier: expected a float, got str"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index: expected an int, got float"),
    ({"ignore_index": 1 << 63}, ValueError, "ignore_index: expected an int64, got"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a number from 0 to 1, got 1.5"),
    ({"softcap": 0.0}, ValueError, "softcap: expected None or a finite fp32 number above 0, got 0.0"),
    ({"logit_scale": -1.0}, ValueError, "logit_scale: expected a finite fp32 number above 0, got -1.0"),
    ({"normalizer": torch.ones(2)}, ValueError, "normalizer: expected a tensor with one element, got shape (2,)"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer: expected reduction 'mean', which it divides"),
    ({"row_weight": torch.ones(5)}, ValueError, "row_weight: expected shape (6,), got (5,)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_input_is_refused_by_name_before_anything_is_computed(monkeypatch, arguments, error, message):
    monkeypatch.setattr(kernels.ChunkedHead, "logits", lambda *_: pytest.fail("computed"))
    given = {"inputs": INPUTS, "weight": WEIGHT, "target": TARGET, **arguments}
    with pytest.raises(error, match=re.escape(message)):
        chunked_linear_cross_entropy(**given)


@pytest.mark.parametrize("name", ["inputs", "weight", "bias", "target"])
def test_a_dtensor_is_refused_and_the_way_out_named(name):
    class Sharded(torch.Tensor):
        def full_tensor(self):
            return self

    given = {"inputs": INPUTS, "weight": WEIGHT, "target": TARGET, "bias": torch.zeros(10)}
    given[name] = given[name].as_subclass(Sharded)
    with pytest.raises(TypeError, match=rf"{name}: expected a plain tensor, got a DTensor; pass its full_tensor\(\)"):
        chunked_linear_cross_entropy(**given)


# --- A loss of one's own ----------------------------------------------------------------------------------


def summed(logits, labels, *, scale=1.0):
    """Cross entropy in fp32, summed."""
    return scale * F.cross_entropy(logits.float(), labels, reduction="sum")


def overwriting(logits, labels, *, scale=1.0):
    """Return the same and its gradient, which takes the logits' place."""
    loss, gradient = autograd_loss_and_logits_grad(summed)(logits, labels, scale=scale)
    logits.copy_(gradient)
    return loss, logits


@pytest.mark.parametrize("function", [autograd_loss_and_logits_grad(summed), overwriting], ids=["autograd", "own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [None, 11, 37])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_a_loss_of_ones_own_is_summed_over_chunks(draw, device, function, dtype, chunk_size, accumulation):
    inputs, weight, _ = drawn_head(draw, 37, 64, 257, dtype, device)
    labels = draw.labels(37, 257, device)

    def run(x, w, t, *, bias, reduction):
        return chunked_linear_loss(
            x, w, function, t, chunk_size=chunk_size, grad_weight_accum_dtype=accumulation, scale=1.0
        )

    reference.check_linear(
        run,
        inputs,
        weight,
        None,
        labels,
        incoming=Incoming(torch.tensor(1.0, device=device)),
        margin=1.5 if accumulation == "fp32" or chunk_size != 11 else 2.0,
        reduction="sum",
    )


def test_arguments_of_as_many_rows_are_cut_and_others_passed_on(draw, device):
    inputs, weight, _ = drawn_head(draw, 10, 6, 11, torch.float32, device)
    by_row, table, seen = torch.arange(10, device=device), torch.arange(11, device=device), []

    def function(logits, first, second, *, third, fourth):
        seen.append((first.tolist(), second.tolist(), third.tolist(), fourth))
        return logits.sum(), torch.ones_like(logits)

    leading = inputs.reshape(5, 2, 6).requires_grad_()
    loss = chunked_linear_loss(leading, weight, function, by_row, table, third=by_row, fourth="x", chunk_size=4)
    assert seen == [(list(range(a, b)), list(range(11)), list(range(a, b)), "x") for a, b in ((0, 4), (4, 8), (8, 10))]
    torch.testing.assert_close(loss, F.linear(inputs, weight).sum())
    torch.testing.assert_close(gradients(loss, leading)[0], weight.sum(0).expand(5, 2, 6))


def test_arguments_of_the_inputs_leading_dimensions_are_cut_too(draw, device):
    inputs, weight, _ = drawn_head(draw, 12, 6, 11, torch.float32, device)
    labels, table = draw.labels(12, 11, device), torch.ones(3, 5, device=device)
    teacher = draw.logits(12, 11, torch.float32, device).softmax(-1)

    def of_chunk(logits, t, p, other, *, again):
        assert torch.equal(t, again)
        assert other is table
        return summed(logits, t) + F.kl_div(logits.log_softmax(-1), p, reduction="sum")

    t = labels.view(3, 4)
    ours = chunked_linear_loss(
        inputs.view(3, 4, 6),
        weight,
        autograd_loss_and_logits_grad(of_chunk),
        t,
        teacher.view(3, 4, 11),
        table,
        again=t,
        chunk_size=5,
    )
    torch.testing.assert_close(ours, of_chunk(F.linear(inputs, weight), labels, teacher, table, again=labels))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [autograd_loss_and_logits_grad(summed), overwriting], ids=["autograd", "own"])
def test_a_loss_of_ones_own_without_gradients_makes_none(draw, device, monkeypatch, context, function):
    if function is overwriting and context is torch.inference_mode:
        function = lambda logits, t: (summed(logits, t), torch.zeros_like(logits))  # noqa: E731 - autograd is off
    inputs, weight, _ = drawn_head(draw, 10, 6, 11, torch.float32, device)
    labels = draw.labels(10, 11, device)
    monkeypatch.setattr(kernels, "product", lambda *_, **__: pytest.fail("a product of a gradient"))
    with context():
        loss = chunked_linear_loss(inputs.requires_grad_(), weight, function, labels, chunk_size=3)
    torch.testing.assert_close(loss, summed(F.linear(inputs, weight), labels).detach())
    assert not loss.requires_grad


def test_a_loss_that_does_not_depend_on_its_logits_has_gradient_0(draw, device):
    inputs, weight, _ = drawn_head(draw, 10, 6, 11, torch.float32, device)
    for constant in (lambda x: x.new_ones(()), lambda x: (0 * x.detach()).sum() + weight.sum()):
        leaf = inputs.clone().requires_grad_()
        weight.requires_grad_()
        loss = chunked_linear_loss(leaf, weight.detach(), autograd_loss_and_logits_grad(constant), chunk_size=5)
        assert (gradients(loss, leaf)[0] == 0).all()


def test_a_loss_of_ones_own_runs_on_fake_tensors():
    with FakeTensorMode():
        inputs, weight = torch.empty(6, 4, requires_grad=True), torch.empty(10, 4, requires_grad=True)
        chunked_linear_loss(inputs, weight, lambda x: (x.sum(), torch.ones_like(x)), chunk_size=4).backward()
    assert (inputs.grad.shape, weight.grad.shape) == ((6, 4), (10, 4))


@pytest.mark.parametrize("factor", [131072.0, 1 / 3])
def test_a_kept_graphs_gradients_are_scaled_in_fp32(draw, device, factor):
    inputs, weight, _ = drawn_head(draw, 10, 6, 11, torch.bfloat16, device)
    inputs.requires_grad_()
    loss = chunked_linear_loss(inputs, weight, lambda x: (x.sum(), torch.ones_like(x)), chunk_size=4)
    came = torch.tensor(factor, device=device)
    (kept,) = gradients(loss, inputs, grad=came, retain_graph=True)
    (one,) = gradients(loss, inputs)
    assert torch.equal(kept, (one.double() * factor).to(torch.bfloat16))


@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True), (True, True)])
def test_a_loss_of_ones_own_gives_gradients_to_what_wants_them(draw, device, wants):
    head = drawn_head(draw, 10, 6, 11, torch.float32, device)[:2]
    leaves = [each.requires_grad_(want) for each, want in zip(head, wants, strict=True)]
    labels = draw.labels(10, 11, device)
    loss = chunked_linear_loss(*leaves, autograd_loss_and_logits_grad(summed), labels, chunk_size=3)
    assert loss.requires_grad == any(wants)
    if any(wants):
        loss.backward()
    assert tuple(each.grad is not None for each in leaves) == wants
    with torch.no_grad():
        assert not chunked_linear_loss(*leaves, autograd_loss_and_logits_grad(summed), labels).requires_grad


def test_a_loss_of_ones_own_scales_its_gradients_by_what_comes_in(draw, device):
    head = [each.requires_grad_() for each in drawn_head(draw, 10, 6, 11, torch.float32, device)[:2]]
    labels = draw.labels(10, 11, device)
    loss = chunked_linear_loss(*head, autograd_loss_and_logits_grad(summed), labels, chunk_size=3)
    one = gradients(loss, *head, retain_graph=True)
    three = gradients(3.0 * loss, *head, retain_graph=True)
    (again,) = gradients(loss, head[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        again.sum().backward()
    half = gradients(0.5 * loss, *head)
    for a, b, c in zip(one, three, half, strict=True):
        torch.testing.assert_close(3.0 * a, b)
        torch.testing.assert_close(0.5 * a, c)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_a_loss_of_ones_own_works_under_autocast(draw, device, autocast):
    head = [each.requires_grad_() for each in drawn_head(draw, 10, 6, 11, torch.float32, device)[:2]]
    labels, seen = draw.labels(10, 11, device), []

    def function(logits, t):
        assert torch.is_autocast_enabled(device.type)
        seen.append(logits.dtype)
        return autograd_loss_and_logits_grad(summed)(logits, t)

    with torch.autocast(device.type, dtype=autocast):
        loss = chunked_linear_loss(*head, function, labels, chunk_size=3)
    assert set(seen) == {autocast}
    right = summed(F.linear(head[0].to(autocast), head[1].to(autocast)), labels)
    for ours, theirs in zip(gradients(loss, *head), gradients(right, *head), strict=True):
        assert ours.dtype == torch.float32
        assert reference.relative_error(ours, theirs) < 2 * torch.finfo(autocast).eps


def test_a_loss_of_ones_own_with_its_own_gradient_compiles_in_one_graph(draw, device):
    torch._dynamo.reset()
    head = [each.requires_grad_() for each in drawn_head(draw, 10, 6, 11, torch.float32, device)[:2]]
    labels = draw.labels(10, 11, device)

    def function(logits, t):
        p = logits.softmax(-1)
        return F.nll_loss(p.log(), t, reduction="sum"), p - F.one_hot(t, logits.shape[1])

    def loss_of(x, w):
        return chunked_linear_loss(x, w, function, labels, chunk_size=4)

    compiled = torch.compile(loss_of, fullgraph=True)
    for ours, theirs in zip(
        gradients(3.0 * compiled(*head), *head), gradients(3.0 * loss_of(*head), *head), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


BAD_LOSSES = [
    (3, TypeError, "loss_and_grad_fn: expected a function, got int"),
    (
        lambda x: x.sum(),
        TypeError,
        "expected to return (loss, grad_logits), got Tensor; autograd_loss_and_logits_grad makes",
    ),
    (lambda x: (x.sum(1), x), ValueError, "loss function: expected to return a scalar tensor, got shape (6,)"),
    (lambda x: (1.0, x), TypeError, "loss function: expected to return a torch.Tensor, got float"),
    (
        lambda x: (x.sum(), x[:, 1:]),
        ValueError,
        "loss function: expected to return a gradient of shape (6, 10), got (6, 9)",
    ),
    (
        lambda x: (x.sum(), None),
        TypeError,
        "loss function: expected to return a torch.Tensor as gradient, got NoneType",
    ),
    (
        autograd_loss_and_logits_grad(lambda x: x.sum(1)),
        ValueError,
        "loss function: expected to return a scalar tensor, got",
    ),
]


@pytest.mark.parametrize(("function", "error", "message"), BAD_LOSSES, ids=[str(n) for n in range(len(BAD_LOSSES))])
def test_a_loss_that_returns_something_else_is_refused(function, error, message):
    with pytest.raises(error, match=re.escape(message)):
        chunked_linear_loss(INPUTS, WEIGHT, function)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [each for each in BAD if set(each[0]) <= {"inputs", "weight", "chunk_size", "grad_weight_accum_dtype"}],
    ids=str,
)
def test_a_loss_of_ones_own_refuses_bad_input_by_name(arguments, error, message):
    given = {"inputs": INPUTS, "weight": WEIGHT, **arguments}
    inputs, weight = given.pop("inputs"), given.pop("weight")
    with pytest.raises(error, match=re.escape(message)):
        chunked_linear_loss(inputs, weight, lambda x: pytest.fail("computed"), **given)
