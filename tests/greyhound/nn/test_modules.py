"""`greyhound.nn.CrossEntropyLoss` and `LinearCrossEntropyLoss`: the functions with their options kept."""

import copy
import inspect
import pickle

import pytest
import torch

import greyhound.nn
from greyhound.nn.functional import CrossEntropyOutput, chunked_linear_cross_entropy, cross_entropy

OUTPUTS = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")
WEIGHT = torch.linspace(0.5, 2.0, 100)
OPTIONS = [
    {},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"z_loss_multiplier": 0.1},
    {"weight": WEIGHT},
    {"label_smoothing": 0.1},
    {"softcap": 2.0},
    {"logit_scale": 0.5},
    {"valid_vocab": 90},
    {"shift": True},
    {"inplace": True},
    {"inplace_backward": True, "reduction": "none"},
    *({f"return_{name}": True} for name in OUTPUTS),
    {
        "ignore_index": -1,
        "reduction": "sum",
        "z_loss_multiplier": 1e-4,
        "weight": WEIGHT,
        "softcap": 5.0,
        "shift": True,
    },
]
OF_A_CALL = {"normalizer", "row_weight"}
"""Options that belong to a call and not to a module."""


def named(options):
    """Return an id of options."""
    return ",".join(options) or "none"


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_the_module_gives_the_bits_of_the_function(draw, device, options):
    x, labels = draw.logits(16, 100, torch.bfloat16, device), draw.labels(16, 90, device)
    labels[2] = options.get("ignore_index", -100)
    module_leaf, function_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    output = greyhound.nn.CrossEntropyLoss(**options).to(device)(module_leaf * 1, labels)
    given = {**options, "weight": WEIGHT.to(device)} if "weight" in options else options
    expected = cross_entropy(function_leaf * 1, labels, **given)
    assert type(output) is type(expected)
    pairs = list(zip(output, expected, strict=True)) if isinstance(output, CrossEntropyOutput) else [(output, expected)]
    for ours, theirs in pairs:
        assert ours is theirs is None or torch.equal(ours, theirs)
    for result in pairs[0]:
        result.sum().backward()
    assert torch.equal(module_leaf.grad, function_leaf.grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_belongs_to_a_call_is_given_to_the_call(draw, device, reduction):
    x, labels = draw.logits(16, 100, torch.bfloat16, device), draw.labels(16, 100, device, ignored=0.2)
    options = {"row_weight": draw.logits(1, 16, torch.float32, device)[0]}
    if reduction == "mean":
        options["normalizer"] = torch.tensor(7, device=device)
    module = greyhound.nn.CrossEntropyLoss(reduction=reduction, softcap=5.0)
    loss = module(x.view(4, 4, 100), labels.view(4, 4), **{**options, "row_weight": options["row_weight"].view(4, 4)})
    expected = cross_entropy(x, labels, reduction=reduction, softcap=5.0, **options)
    assert torch.equal(loss.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize(
    "options", [each for each in OPTIONS[1:] if not any(name.startswith("in") for name in each)], ids=named
)
def test_every_option_changes_what_a_call_gives(draw, device, options):
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 90, device)
    labels[:4] = 3
    if options.get("ignore_index") == -1:
        labels[0] = -100 if device.type == "cuda" else -1
    plain = greyhound.nn.CrossEntropyLoss()(x, labels.clamp(min=0))
    output = greyhound.nn.CrossEntropyLoss(**options).to(device)(x, labels)
    assert isinstance(output, CrossEntropyOutput) or output.shape != plain.shape or output != plain


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_a_module_may_be_told_to_overwrite_its_logits(draw, device, name):
    x, labels = draw.logits(16, 100, torch.float32, device).requires_grad_(), draw.labels(16, 100, device)
    y = x * 1
    (grad,) = torch.autograd.grad(greyhound.nn.CrossEntropyLoss(**{name: True})(y, labels), y)
    assert grad.data_ptr() == y.data_ptr()


def test_the_defaults_are_those_of_the_function():
    function = inspect.signature(cross_entropy).parameters
    module = inspect.signature(greyhound.nn.CrossEntropyLoss).parameters
    call = inspect.signature(greyhound.nn.CrossEntropyLoss.forward).parameters
    both = {name: p for name, p in (*module.items(), *call.items()) if p.default is not p.empty}
    assert set(module) & set(call) == set()
    assert {name for name in both if name in call} == OF_A_CALL
    expected = {name: (p.default, p.kind) for name, p in function.items() if p.default is not p.empty}
    assert {name: (p.default, p.kind) for name, p in both.items()} == expected


def test_the_repr_names_what_is_not_the_default():
    make = greyhound.nn.CrossEntropyLoss
    assert repr(make()) == "CrossEntropyLoss()"
    module = make(ignore_index=7, reduction="sum", z_loss_multiplier=0.25)
    assert repr(module) == "CrossEntropyLoss(ignore_index=7, reduction='sum', z_loss_multiplier=0.25)"
    module = make(weight=WEIGHT, softcap=5.0, shift=True, return_lse=True)
    assert repr(module) == "CrossEntropyLoss(weight=tensor of shape (100,), softcap=5.0, shift=True, return_lse=True)"


def test_the_module_has_no_state_and_can_be_copied_and_pickled(draw, device):
    module = greyhound.nn.CrossEntropyLoss(ignore_index=7, reduction="sum", z_loss_multiplier=0.25)
    assert not module.state_dict()
    assert not list(module.parameters())
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to(device).eval()):
        assert torch.equal(other(x, labels), module(x, labels))


def test_class_weights_are_a_buffer_that_moves_with_the_module_and_is_its_state(draw, device):
    module = greyhound.nn.CrossEntropyLoss(weight=WEIGHT)
    assert dict(module.named_buffers()).keys() == module.state_dict().keys() == {"weight"}
    assert not list(module.parameters())
    theirs = torch.nn.CrossEntropyLoss(weight=torch.zeros(100))
    theirs.load_state_dict(module.state_dict())
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device)
    module, theirs = module.to(device), theirs.to(device)
    assert module.weight.device == device
    torch.testing.assert_close(module(x, labels), theirs(x, labels), rtol=1e-5, atol=1e-6)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, labels), module(x, labels))
    assert torch.isfinite(module.bfloat16()(x, labels))


def test_a_bad_argument_is_refused_as_by_the_function():
    with pytest.raises(ValueError, match=r"^reduction: .*got 'avg'"):
        greyhound.nn.CrossEntropyLoss(reduction="avg")(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^target: expected dtype int64 or int32, got torch.int16"):
        greyhound.nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"^softcap: expected None or a finite fp32 number above 0, got -1"):
        greyhound.nn.CrossEntropyLoss(softcap=-1.0)(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_an_unknown_reduction_is_refused_when_the_module_is_made():
    with pytest.raises(ValueError, match="reduction: expected one of 'mean', 'sum', 'none', got 'average'"):
        greyhound.nn.CrossEntropyLoss(reduction="average")


# --- With the layer -----------------------------------------------------------------------------------------

LINEAR_OPTIONS = [
    {},
    {"bias": True},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"z_loss_multiplier": 0.1},
    {"grad_weight_accum_dtype": "weight"},
    {"chunk_size": 5},
    {"label_smoothing": 0.1},
    {"softcap": 2.0},
    {"logit_scale": 0.5},
    *({f"return_{name}": True} for name in OUTPUTS),
]


def linear_module(draw, device, **options):
    """Return a module with drawn parameters, and its tensors."""
    module = greyhound.nn.LinearCrossEntropyLoss(12, 90, device=device, dtype=torch.bfloat16, **options)
    inputs, labels = draw.logits(16, 12, torch.bfloat16, device), draw.labels(16, 90, device)
    labels[2] = options.get("ignore_index", -100)
    return module, inputs, labels


@pytest.mark.parametrize("options", LINEAR_OPTIONS, ids=named)
def test_the_linear_module_gives_the_bits_of_the_function(draw, device, options):
    module, inputs, labels = linear_module(draw, device, **options)
    given = {name: value for name, value in options.items() if name != "bias"}
    output = module(inputs, labels)
    expected = chunked_linear_cross_entropy(inputs, module.weight, labels, bias=module.bias, **given)
    assert type(output) is type(expected)
    pairs = list(zip(output, expected, strict=True)) if isinstance(output, CrossEntropyOutput) else [(output, expected)]
    for ours, theirs in pairs:
        assert ours is theirs is None or torch.equal(ours, theirs)
    parameters = list(module.parameters())
    assert len(parameters) == 1 + options.get("bias", False)
    found = [torch.autograd.grad(each.sum(), parameters) for each in pairs[0]]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_linear_modules_call_takes_what_belongs_to_a_call(draw, device):
    module, inputs, labels = linear_module(draw, device)
    options = {"row_weight": draw.logits(1, 16, torch.float32, device)[0], "normalizer": 7}
    expected = chunked_linear_cross_entropy(inputs, module.weight, labels, **options)
    assert torch.equal(module(inputs, labels, **options), expected)


def test_the_linear_modules_defaults_are_those_of_the_function():
    function = inspect.signature(chunked_linear_cross_entropy).parameters
    module = inspect.signature(greyhound.nn.LinearCrossEntropyLoss).parameters
    call = inspect.signature(greyhound.nn.LinearCrossEntropyLoss.forward).parameters
    both = {name: p for name, p in (*module.items(), *call.items()) if p.default is not p.empty}
    for own in ("bias", "device", "dtype"):
        del both[own]
    assert {name for name in both if name in call} == OF_A_CALL
    expected = {name: (p.default, p.kind) for name, p in function.items() if p.default is not p.empty}
    del expected["bias"]
    assert {name: (p.default, p.kind) for name, p in both.items()} == expected


@pytest.mark.parametrize("bias", [False, True])
def test_the_linear_modules_parameters_are_those_of_a_linear_layer(device, bias):
    torch.manual_seed(0)
    module = greyhound.nn.LinearCrossEntropyLoss(400, 50, bias, device=device)
    layer = torch.nn.Linear(400, 50, bias, device=device)
    layer.load_state_dict(module.state_dict())
    module.load_state_dict(layer.state_dict())
    for parameter in module.parameters():
        assert parameter.abs().max() <= 1 / 20
    assert 0.9 / 20 / 3**0.5 < module.weight.std() < 1.1 / 20 / 3**0.5


def test_a_linear_module_can_share_the_parameters_of_a_models_own_layer(draw, device):
    embedding = torch.nn.Embedding(90, 12, device=device)
    layer = torch.nn.Linear(12, 90, device=device)
    labels = draw.labels(16, 90, device)
    for head in (embedding, layer):
        module = greyhound.nn.LinearCrossEntropyLoss.from_head(head, softcap=5.0, reduction="sum")
        assert module.weight is head.weight
        assert module.bias is getattr(head, "bias", None)
        module(embedding(labels), labels).backward()
        assert head.weight.grad is not None
    tied = torch.nn.ModuleDict(
        {"embedding": embedding, "loss": greyhound.nn.LinearCrossEntropyLoss.from_head(embedding)}
    )
    assert len(list(tied.parameters())) == 1


def test_a_layer_whose_weight_is_computed_in_each_call_is_not_shared():
    head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(12, 90))
    with pytest.raises(TypeError, match="head: expected a weight that is a parameter, got Tensor"):
        greyhound.nn.LinearCrossEntropyLoss.from_head(head)


@pytest.mark.parametrize("name", ["in_features", "num_classes", "bias", "device", "dtype"])
def test_what_is_the_heads_is_not_taken_from_the_caller(name):
    with pytest.raises(TypeError, match=f"^{name}: expected none, since the head has its own"):
        greyhound.nn.LinearCrossEntropyLoss.from_head(torch.nn.Linear(4, 10), **{name: None})


def test_a_weight_alone_is_no_head():
    with pytest.raises(TypeError, match=r"^head: expected a layer with a weight, like torch.nn.Linear, got Parameter"):
        greyhound.nn.LinearCrossEntropyLoss.from_head(torch.nn.Linear(4, 10).weight)


def test_the_linear_modules_repr_names_sizes_and_what_is_not_the_default():
    make = greyhound.nn.LinearCrossEntropyLoss
    assert repr(make(4, 10)) == "LinearCrossEntropyLoss(in_features=4, num_classes=10)"
    module = make(4, 10, True, reduction="sum", chunk_size=7, return_lse=True)
    expected = "in_features=4, num_classes=10, bias=True, reduction='sum', chunk_size=7, return_lse=True"
    assert repr(module) == f"LinearCrossEntropyLoss({expected})"


def test_the_linear_module_can_be_copied_and_pickled(draw, device):
    module, inputs, labels = linear_module(draw, device, bias=True, z_loss_multiplier=0.25)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(inputs, labels), module(inputs, labels))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction: expected one of 'mean', 'sum', 'none', got 'average'"),
        ({"grad_weight_accum_dtype": "bf16"}, "grad_weight_accum_dtype: expected 'fp32' or 'weight', got 'bf16'"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
    ],
)
def test_a_linear_module_of_unknown_ways_is_refused_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        greyhound.nn.LinearCrossEntropyLoss(4, 10, **options)
