import pytest
import torch

from bench import check
from bench.cases import Inputs, Shape, make_inputs
from bench.check import Mismatch, Outcome, Reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs_of(dtype: torch.dtype) -> Inputs:
    return make_inputs(Shape(100, 501), dtype, torch.device("cpu"))  # more rows than are sampled


def right_outcome(inputs: Inputs, grad_of: str = "sum") -> Outcome:
    logits = inputs.logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, inputs.labels, reduction=grad_of)
    (grad,) = torch.autograd.grad(loss, logits)
    mean_loss = loss.detach() / (len(inputs.labels) if grad_of == "sum" else 1)
    return Outcome(mean_loss.float(), grad.to(inputs.logits.dtype), grad_of)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_of", ["sum", "mean"])
def test_the_right_answer_passes(dtype: torch.dtype, grad_of: str) -> None:
    inputs = inputs_of(dtype)
    Reference(*inputs).verify(right_outcome(inputs, grad_of))


@pytest.mark.parametrize("block_elements", [1, 501 * 7])
def test_the_loss_does_not_depend_on_the_row_blocks(block_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(torch.float32)
    whole = Reference(*inputs).mean_loss
    monkeypatch.setattr(check, "BLOCK_ELEMENTS", block_elements)
    assert Reference(*inputs).mean_loss == pytest.approx(whole, rel=1e-12)


def test_the_first_and_the_last_row_are_among_those_sampled() -> None:
    sampled = Reference(*inputs_of(torch.float32)).sampled.tolist()
    assert (sampled[0], sampled[-1], len(set(sampled))) == (0, 99, check.SAMPLED_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_loss_is_refused(dtype: torch.dtype, value: float) -> None:
    inputs = inputs_of(dtype)
    with pytest.raises(Mismatch, match="mean loss"):
        Reference(*inputs).verify(right_outcome(inputs)._replace(mean_loss=torch.tensor(value)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_without_the_targets_one_is_refused(dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype)
    outcome = right_outcome(inputs)
    assert outcome.grad is not None
    outcome.grad[-1, inputs.labels[-1]] += 1.0
    with pytest.raises(Mismatch, match="at the target"):
        Reference(*inputs).verify(outcome)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [0.0, 1.2, float("nan")])
def test_a_row_whose_probabilities_are_wrong_is_refused(dtype: torch.dtype, wrong: float) -> None:
    inputs = inputs_of(dtype)
    outcome = right_outcome(inputs)
    assert outcome.grad is not None
    at_target = outcome.grad[0, inputs.labels[0]].clone()
    outcome.grad[0] *= wrong
    outcome.grad[0, inputs.labels[0]] = at_target
    with pytest.raises(Mismatch, match="gradient of row 0 off the target"):
        Reference(*inputs).verify(outcome)


def test_a_gradient_of_the_mean_is_not_one_of_the_sum() -> None:
    inputs = inputs_of(torch.float32)
    with pytest.raises(Mismatch, match="gradient"):
        Reference(*inputs).verify(right_outcome(inputs, "mean")._replace(grad_of="sum"))


def test_a_gradient_of_another_shape_is_refused() -> None:
    inputs = inputs_of(torch.float32)
    outcome = right_outcome(inputs)
    assert outcome.grad is not None
    with pytest.raises(Mismatch, match="expected shape"):
        Reference(*inputs).verify(outcome._replace(grad=outcome.grad[:-1]))
