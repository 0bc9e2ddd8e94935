import pytest
import torch

from bench import providers
from bench.cases import Inputs, Shape, make_inputs
from bench.check import Outcome, Reference
from bench.providers import PROVIDERS, Prepared, autograd_loss, provider
from bench.results import MODES

ON_THE_CPU = ("copy", "greyhound", "torch")  # compile needs a C++ compiler and half a minute


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(Shape(20, 77), torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, providers.Provider]:
    monkeypatch.setattr(providers, "PROVIDERS", {})
    return providers.PROVIDERS


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in ON_THE_CPU for mode in PROVIDERS[name].modes])
def test_a_result_is_right_twice_and_the_inputs_stay_as_they_are(name: str, mode: str, inputs: Inputs) -> None:
    before = inputs.logits.clone()
    prepared = PROVIDERS[name].build(inputs, mode)
    for _ in range(2):
        outcome = prepared.result()
        if outcome is not None:
            Reference(*inputs).verify(outcome)
        prepared.run()
    assert torch.equal(inputs.logits, before)
    assert not inputs.logits.requires_grad


def test_every_mode_of_every_provider_is_one_that_rows_know() -> None:
    assert {mode for each in PROVIDERS.values() for mode in each.modes} <= set(MODES)


def test_a_forward_alone_records_no_graph(inputs: Inputs) -> None:
    seen = []

    def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), logits.requires_grad))
        return torch.nn.functional.cross_entropy(logits, labels)

    autograd_loss(loss_function, inputs, "fwd").run()
    assert seen == [(False, False)]


def test_a_loss_that_overwrites_its_logits_is_given_fresh_ones(inputs: Inputs) -> None:
    def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(logits, labels)
        logits.detach().fill_(float("nan"))
        return loss

    before = inputs.logits.clone()
    prepared = autograd_loss(loss_function, inputs, "fwd", overwrites=True)
    for _ in range(2):
        outcome = prepared.result()
        assert outcome is not None
        assert not outcome.mean_loss.isnan()
        assert prepared.restore is not None
    assert torch.equal(inputs.logits, before)


def test_a_provider_is_found_under_its_name(registry: dict[str, providers.Provider], inputs: Inputs) -> None:
    @provider("constant", modes=("fwd",))
    def _constant(inputs: Inputs, mode: str) -> Prepared:
        outcome = Outcome(torch.tensor(1.0), None, "mean")
        return Prepared(lambda: outcome, lambda: outcome)

    assert registry["constant"].build(inputs, "fwd").run() == Outcome(torch.tensor(1.0), None, "mean")


def test_two_providers_cannot_share_a_name(registry: dict[str, providers.Provider]) -> None:
    @provider("one", modes=("fwd",))
    def _one(inputs: Inputs, mode: str) -> Prepared:
        raise NotImplementedError

    with pytest.raises(ValueError, match="'one' exists already"):
        provider("one", modes=("raw",))(_one)
