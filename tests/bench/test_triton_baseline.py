import pytest
import torch

from bench.cases import Shape, make_inputs
from bench.check import Reference
from bench.peers import PROVIDERS

pytestmark = pytest.mark.gpu

VOCABS = [
    1,
    7,  # ragged within one step
    1000,
    4096,  # one step exactly
    4097,  # one past it
    50257,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["raw", "fwd", "fwd+bwd"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_baseline_is_right_at_ragged_vocabularies(
    vocab: int, mode: str, dtype: torch.dtype, cuda: torch.device
) -> None:
    pytest.importorskip("triton")
    inputs = make_inputs(Shape(5, vocab), dtype, cuda)
    outcome = PROVIDERS["triton"].build(inputs, mode).result()
    assert outcome is not None
    Reference(*inputs).verify(outcome)


def test_the_gradient_takes_the_incoming_factor(cuda: torch.device) -> None:
    pytest.importorskip("triton")
    from bench.triton_baseline import mean_loss

    inputs = make_inputs(Shape(5, 1001), torch.float32, cuda)
    grads = []
    for factor in (1.0, 3.0):
        logits = inputs.logits.clone().requires_grad_()
        (factor * mean_loss(logits, inputs.labels)).backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[1], 3.0 * grads[0])


@pytest.mark.slow
def test_rows_beyond_2_to_the_31_elements_are_reached(cuda: torch.device) -> None:
    pytest.importorskip("triton")
    from bench.triton_baseline import row_losses

    vocab = 1 << 16
    logits = torch.zeros((1 << 15) + 1, vocab, dtype=torch.bfloat16, device=cuda)
    logits[-1, 5] = 20.0
    labels = torch.full((len(logits),), 5, device=cuda)
    losses = row_losses(logits, labels)
    torch.testing.assert_close(losses[0].item(), torch.tensor(float(vocab)).log().item())
    assert losses[-1].item() < 1e-3
