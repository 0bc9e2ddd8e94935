"""Random search: what holds of every input, on inputs that nobody thought of.

Sizes lie around the boundaries of the plans, tensors anywhere in a buffer whose other elements must not change. Each
property takes `EXAMPLES` inputs, the same in every run; `GREYHOUND_EXAMPLES=20000` in the environment takes so many.
"""

import os
from typing import Any, NamedTuple

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Incoming

from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

EXAMPLES = int(os.environ.get("GREYHOUND_EXAMPLES", "600"))

SEARCH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

pytestmark = pytest.mark.usefixtures("narrow_in_small_batches")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")
BOUNDARIES = (1, 8, 128, 256, 384, 512, 768, 1024, 2048, 3840, 4096, 7680, 8192)
"""Of the plans, by columns, over all dtypes; and of a vector."""

GUARD = 7.0
LINE_BYTES = 128


def widths(most: int) -> st.SearchStrategy[int]:
    """Numbers of columns up to `most`: around a boundary, or any."""
    near = st.tuples(st.sampled_from([b for b in BOUNDARIES if b < most]), st.integers(-2, 2))
    return st.one_of(near.map(lambda pair: max(1, sum(pair))), st.integers(1, 200), st.integers(1, most))


class Laid(NamedTuple):
    """Rows in a buffer."""

    buffer: torch.Tensor
    rows: torch.Tensor


class Case(NamedTuple):
    """An input, small enough to be printed."""

    seed: int
    rows: int
    columns: int
    dtype: torch.dtype
    before: int
    """Elements of the buffer before the first row."""
    between: int
    """... and between two rows."""
    scale: float
    shift: float
    peak: float
    """Added to the target's logit."""
    ignored: float
    """Share of rows that are."""
    ignore_index: int
    edge: int
    """0: the first column is every target, 1: the last, 2: any."""

    def generator(self) -> torch.Generator:
        """Of everything drawn, on the CPU, so that both devices get the same."""
        return torch.Generator().manual_seed(self.seed)

    def target(self, device: torch.device) -> torch.Tensor:
        """Return (B,) targets."""
        generator = self.generator()
        low, high = ((0, 1), (self.columns - 1, self.columns), (0, self.columns))[self.edge]
        target = torch.randint(low, high, (self.rows,), generator=generator)
        target[torch.rand(self.rows, generator=generator) < self.ignored] = self.ignore_index
        return target.to(device)

    def logits(self, device: torch.device) -> torch.Tensor:
        """Return (B, V) logits, rounded to the dtype."""
        x = torch.randn(self.rows, self.columns, generator=self.generator()) * self.scale
        target = self.target(torch.device("cpu")).clamp(0, self.columns - 1)
        x.scatter_add_(1, target[:, None], torch.full((self.rows, 1), self.peak))
        return (x + self.shift).to(self.dtype).to(device)

    def lay(self, logits: torch.Tensor) -> Laid:
        """Return the logits as rows of a buffer full of `GUARD`."""
        stride = self.columns + self.between
        size = self.before + max(self.rows - 1, 0) * stride + self.columns * (self.rows > 0) + 3
        buffer = torch.full((size,), GUARD, dtype=self.dtype, device=logits.device)
        rows = buffer.as_strided((self.rows, self.columns), (stride, 1), self.before)
        rows.copy_(logits)
        return Laid(buffer, rows)


def guards_stand(laid: Laid) -> bool:
    """Return whether the buffer's other elements are what they were."""
    buffer = laid.buffer.clone()
    buffer.as_strided(laid.rows.shape, laid.rows.stride(), laid.rows.storage_offset()).fill_(GUARD)
    return bool((buffer == GUARD).all())


def cases(most_columns: int = 9001, dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[Case]:
    """Inputs whose rows are finite and not near the largest numbers."""
    return st.builds(
        Case,
        seed=st.integers(0, 2**31),
        rows=st.integers(0, 9),
        columns=widths(most_columns),
        dtype=st.sampled_from(dtypes),
        before=st.integers(0, 9),
        between=st.integers(0, 9),
        scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
        shift=st.sampled_from([0.0, -50.0, 100.0]),
        peak=st.sampled_from([0.0, 5.0, 25.0]),
        ignored=st.sampled_from([0.0, 0.3, 1.0]),
        ignore_index=st.sampled_from([-100, -1, 0, 3]),
        edge=st.integers(0, 2),
    )


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Any of the options that are numbers, and the names of those that are tensors."""
    return st.fixed_dictionaries(
        {"reduction": st.sampled_from(REDUCTIONS)},
        optional={
            "label_smoothing": st.sampled_from([0.1, 1.0]),
            "softcap": st.sampled_from([2.0, 30.0]),
            "logit_scale": st.sampled_from([0.3, 1.7]),
            "z_loss_multiplier": st.sampled_from([1e-4, 0.1]),
            "weight": st.just(True),
            "row_weight": st.just(True),
            "normalizer": st.sampled_from([1.0, 1000.0]),
            "valid_vocab": st.just(True),
        },
    )


def given_options(case: Case, chosen: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments for chosen options."""
    generator, arguments = case.generator(), dict(chosen)
    if arguments["reduction"] != "mean":
        arguments.pop("normalizer", None)
    if "valid_vocab" in arguments:
        arguments["valid_vocab"] = max(1, case.columns - 3)
    if "weight" in arguments:
        arguments["weight"] = torch.rand(case.columns, generator=generator).to(device)
    if "row_weight" in arguments:
        arguments["row_weight"] = torch.randn(case.rows, generator=generator).to(device)
    return arguments


# --- Against float64 ------------------------------------------------------------------------------------------


@SEARCH
@given(case=cases(), z=st.sampled_from([0.0, 1e-4, -0.01]))
def test_the_raw_helper_is_right_wherever_the_rows_lie_and_writes_nothing_else(device, case, z):
    x, labels = case.logits(device), case.target(device)
    laid = case.lay(x)
    ce_sum, z_sum, n_valid = cross_entropy_with_grad_kernel(laid.rows, labels, z, case.ignore_index)
    how = {"ignore_index": case.ignore_index, "z_loss_multiplier": z, "reduction": "sum"}
    assert reference.gradient_roundings(laid.rows, x, labels, **how) <= 1
    terms = reference.rows(x, labels, case.ignore_index)
    assert int(n_valid) == int(terms.valid.sum())
    assert float(ce_sum) == pytest.approx(float(terms.ce.sum()), rel=1e-5, abs=1e-4)
    assert float(z_sum) == pytest.approx(float(terms.z.sum()), rel=1e-5, abs=1e-4)
    assert guards_stand(laid)


@SEARCH
@given(case=cases(most_columns=2100), chosen=options(), mode=st.sampled_from(["one", "zero", "number", "rows", "all"]))
def test_the_loss_with_any_options_is_right_whatever_comes_in(device, case, chosen, mode):
    if "valid_vocab" in chosen:
        case = case._replace(edge=0)
    case = case._replace(rows=max(case.rows, 1))
    arguments = {**given_options(case, chosen, device), "ignore_index": case.ignore_index}
    labels = case.target(device)
    if 0 <= case.ignore_index < case.columns:  # a target that is ignored must not be needed otherwise
        arguments.pop("valid_vocab", None)
    labels = torch.where(
        labels == case.ignore_index, labels, labels.clamp(max=arguments.get("valid_vocab", 1 << 30) - 1)
    )
    per_row = torch.randn(2 * case.rows, generator=case.generator()).to(device)[::2]
    if arguments["reduction"] == "none":
        loss = {"one": torch.ones_like(per_row), "zero": per_row * 0.0, "number": per_row[:1].expand(case.rows)}
        came = loss.get(mode, per_row)
    else:
        came = torch.tensor({"one": 1.0, "zero": 0.0}.get(mode, -0.37), device=device)
    extra = per_row if mode == "all" else None
    laid = case.lay(case.logits(device))
    reference.check_options(cross_entropy, laid.rows, labels, incoming=Incoming(came, extra, extra), **arguments)
    assert guards_stand(laid)


@SEARCH
@given(
    case=cases(most_columns=700),
    hidden=st.integers(1, 40),
    chunk_size=st.one_of(st.none(), st.integers(1, 12)),
    accumulation=st.sampled_from(["fp32", "weight"]),
    chosen=options(),
    has_bias=st.booleans(),
    scaled=st.booleans(),
)
def test_the_linear_form_is_no_farther_from_float64_than_eager(
    device, case, hidden, chunk_size, accumulation, chosen, has_bias, scaled
):
    # Of one column there is no gradient that an error could be compared with.
    case = case._replace(rows=max(case.rows, 1), columns=max(case.columns, 2), shift=0.0)
    for name in ("weight", "valid_vocab"):
        chosen.pop(name, None)
    arguments = {**given_options(case, chosen, device), "ignore_index": case.ignore_index}
    generator, labels = case.generator(), case.target(device)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(case.dtype).to(device)

    inputs, weight = draw(case.rows, hidden), draw(case.columns, hidden) * hidden**-0.5
    bias = draw(case.columns) if has_bias else None
    rows = torch.randn(case.rows, generator=generator).to(device)
    came = rows if arguments["reduction"] == "none" else torch.tensor(-0.6 if scaled else 1.0, device=device)
    reference.check_linear(
        chunked_linear_cross_entropy,
        inputs,
        weight,
        bias,
        labels,
        incoming=Incoming(came),
        how={"chunk_size": chunk_size, "grad_weight_accum_dtype": accumulation},
        # Of few numbers the error is one of few roundings; added up in the weight's dtype it is one for each chunk.
        margin=4.0 + (case.rows / (chunk_size or case.rows) if accumulation == "weight" else 0.0),
        **arguments,
    )


SPECIAL = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0)


@SEARCH
@given(
    case=cases(most_columns=2100),
    specials=st.lists(
        st.tuples(st.integers(0, 8), st.floats(0, 1), st.floats(0, 1), st.sampled_from(SPECIAL)), min_size=1, max_size=4
    ),
)
def test_infinities_and_nan_stay_in_their_rows_and_give_what_pytorch_gives(device, case, specials):
    """Each special value fills a range of one row's columns."""
    case = case._replace(rows=9, scale=1.0, shift=0.0, ignored=0.0)
    x, labels = case.logits(device), case.target(device)
    largest = torch.finfo(case.dtype).max
    for row, begin, end, value in specials:
        first, last = sorted((int(begin * case.columns), int(end * case.columns)))
        x[row, first : last + 1] = max(min(value, largest), -largest) if abs(value) < float("inf") else value
    laid = case.lay(x)
    leaf = laid.rows.detach().requires_grad_()
    loss = cross_entropy(leaf, labels, ignore_index=-100, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    exact = x.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (right,) = torch.autograd.grad(expected.sum(), exact)
    assert torch.equal(loss.isnan(), expected.isnan())
    # In fp32, where the distance between two finite logits may be infinite.
    torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    clean = ~expected.isnan()
    torch.testing.assert_close(
        grad[clean].double(), right[clean], rtol=2 * torch.finfo(case.dtype).eps, atol=1e-6, equal_nan=True
    )
    assert grad[~clean].isnan().any(dim=1).all()
    assert guards_stand(laid)


# --- Against itself -------------------------------------------------------------------------------------------


def both(x: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient of a call."""
    leaf = x.detach().requires_grad_()
    loss = cross_entropy(leaf, labels, **arguments)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]


@SEARCH
@given(case=cases(), chosen=options())
def test_rows_do_not_know_of_one_another(device, case, chosen):
    case = case._replace(rows=max(case.rows, 2))
    arguments = {**given_options(case, chosen, device), "ignore_index": case.ignore_index, "reduction": "none"}
    for name in ("normalizer", "valid_vocab"):
        arguments.pop(name, None)
    x, labels = case.logits(device), case.target(device)
    loss, grad = both(x, labels, **arguments)
    order = torch.randperm(case.rows, generator=case.generator()).to(device)
    moved = {**arguments, **({"row_weight": arguments["row_weight"][order]} if "row_weight" in arguments else {})}
    permuted_loss, permuted_grad = both(x[order], labels[order], **moved)
    eps = torch.finfo(case.dtype).eps
    if case.columns * case.dtype.itemsize % LINE_BYTES == 0:  # at another alignment a row may be added in another order
        assert reference.same_bits(permuted_loss, loss[order])
        assert reference.same_bits(permuted_grad, grad[order])
    torch.testing.assert_close(permuted_loss, loss[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(permuted_grad, grad[order], rtol=2 * eps, atol=1e-6)
    first = {**arguments, **({"row_weight": arguments["row_weight"][:1]} if "row_weight" in arguments else {})}
    alone_loss, alone_grad = both(x[:1], labels[:1], **first)  # whose plan may add in another order
    torch.testing.assert_close(alone_loss, loss[:1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone_grad, grad[:1], rtol=2 * eps, atol=1e-6)


@SEARCH
@given(case=cases(), reduction=st.sampled_from(REDUCTIONS))
def test_the_order_of_the_columns_does_not_matter(device, case, reduction):
    case = case._replace(rows=max(case.rows, 1), ignore_index=-100)
    x, labels = case.logits(device), case.target(device)
    order = torch.randperm(case.columns, generator=case.generator()).to(device)
    moved = torch.where(labels < 0, labels, order.argsort()[labels.clamp(min=0)])
    loss, grad = both(x, labels, reduction=reduction)
    other_loss, other_grad = both(x[:, order], moved, reduction=reduction)
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other_grad, grad[:, order], rtol=2 * torch.finfo(case.dtype).eps, atol=1e-6)


@SEARCH
@given(case=cases(dtypes=(torch.float32,)), shift=st.integers(-(1 << 17), 1 << 17))
def test_what_a_row_has_in_common_does_not_matter(device, case, shift):
    case = case._replace(rows=max(case.rows, 1), shift=0.0)
    x = (case.logits(device) * 8).round() / 8  # exact at any of these shifts
    labels = case.target(device)
    how = {"ignore_index": case.ignore_index, "reduction": "none"}
    loss, grad = both(x, labels, **how)
    shifted_loss, shifted_grad = both(x + float(shift), labels, **how)
    torch.testing.assert_close(shifted_loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shifted_grad, grad, rtol=1e-5, atol=2.5e-7)  # two roundings of a probability near 1


@SEARCH
@given(case=cases(), chosen=options())
def test_in_place_and_out_of_place_give_the_same_to_a_rounding(device, case, chosen):
    arguments = {**given_options(case, chosen, device), "ignore_index": case.ignore_index}
    arguments.pop("valid_vocab", None)
    x, labels = case.logits(device), case.target(device)
    loss, grad = both(x, labels, **arguments)
    names = ["inplace_backward"] if arguments["reduction"] == "none" else ["inplace", "inplace_backward"]
    for name in names:
        leaf = x.clone().requires_grad_()
        other = cross_entropy(leaf * 1, labels, **arguments, **{name: True})
        (found,) = torch.autograd.grad(other, leaf, torch.ones_like(other))
        torch.testing.assert_close(other.detach(), loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, grad, rtol=2 * torch.finfo(case.dtype).eps, atol=1e-6)


@SEARCH
@given(case=cases(dtypes=(torch.float32,)))
def test_the_gradient_of_a_row_adds_up_to_nothing(device, case):
    case = case._replace(rows=max(case.rows, 1))
    _, grad = both(case.logits(device), case.target(device), ignore_index=case.ignore_index, reduction="sum")
    assert grad.double().sum(dim=1).abs().max() <= 1e-5
