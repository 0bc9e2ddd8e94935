"""`greyhound.nn.CrossEntropyLoss`: the function with its options kept."""

import copy
import inspect
import pickle

import pytest
import torch

import greyhound.nn
from greyhound.nn.functional import cross_entropy

OPTIONS = [
    {},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"z_loss_multiplier": 0.1},
    {"ignore_index": -1, "reduction": "sum", "z_loss_multiplier": 1e-4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_module_gives_the_bits_of_the_function(draw, device, options):
    x, labels = draw.logits(16, 100, torch.bfloat16, device), draw.labels(16, 100, device)
    labels[2] = options.get("ignore_index", -100)
    module_leaf, function_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = greyhound.nn.CrossEntropyLoss(**options)(module_leaf, labels)
    expected = cross_entropy(function_leaf, labels, **options)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(module_leaf.grad, function_leaf.grad)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_every_option_changes_the_loss(draw, device, options):
    x, labels = draw.logits(16, 10, torch.float32, device), draw.labels(16, 10, device)
    labels[:4] = 3
    if options.get("ignore_index") == -1:
        labels[0] = -100 if device.type == "cuda" else -1
    plain = greyhound.nn.CrossEntropyLoss()(x, labels.clamp(min=0))
    assert greyhound.nn.CrossEntropyLoss(**options)(x, labels) != plain


def test_the_defaults_are_those_of_the_function():
    function = inspect.signature(cross_entropy).parameters
    module = inspect.signature(greyhound.nn.CrossEntropyLoss).parameters
    assert {name: p.default for name, p in module.items()} == {
        name: p.default for name, p in function.items() if p.default is not p.empty
    }


def test_the_repr_names_every_option():
    module = greyhound.nn.CrossEntropyLoss(ignore_index=7, reduction="sum", z_loss_multiplier=0.25)
    assert repr(module) == "CrossEntropyLoss(ignore_index=7, reduction='sum', z_loss_multiplier=0.25)"


def test_the_module_has_no_state_and_can_be_copied_and_pickled(draw, device):
    module = greyhound.nn.CrossEntropyLoss(ignore_index=7, reduction="sum", z_loss_multiplier=0.25)
    assert not module.state_dict()
    assert not list(module.parameters())
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to(device).eval()):
        assert torch.equal(other(x, labels), module(x, labels))


def test_a_bad_argument_is_refused_as_by_the_function():
    with pytest.raises(ValueError, match=r"^reduction: .*got 'avg'"):
        greyhound.nn.CrossEntropyLoss(reduction="avg")(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^target: expected dtype int64, got torch.int32"):
        greyhound.nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))


def test_an_unknown_reduction_is_refused_when_the_module_is_made():
    with pytest.raises(ValueError, match="reduction: expected one of 'mean', 'sum', got 'none'"):
        greyhound.nn.CrossEntropyLoss(reduction="none")
