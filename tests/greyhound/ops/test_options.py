"""The operators of the loss with options: schemas, fakes, autograd registration, `torch.compile` without a break."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from greyhound.nn.functional import CrossEntropyOutput, cross_entropy, entropy, selective_log_softmax
from greyhound.ops import cross_entropy as rules
from greyhound.ops import options as option_rules

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("none", "mean", "sum")
EVERYTHING = sum(1 << bit for bit in range(6))
OUTPUTS = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")
EVERY_OUTPUT = {f"return_{name}": True for name in OUTPUTS}
ops = torch.ops.greyhound


@pytest.fixture
def _fresh_compiler():
    """Forget what other tests compiled: no recompilation limit, no code for another device."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(draw, B, V, dtype, device, *, reduction=1, plain=False, columns=None, requires_grad=False):
    """Return the operator's arguments up to `valid_vocab`: with every option, or with none."""
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V - 1, device, ignored=0.3)
    x = x if columns is None else x[:, columns]
    x = x.detach().requires_grad_(requires_grad)
    if plain:
        return x, labels, None, None, None, -100, 0.0, 0.0, 0.0, 1.0, 0.0, reduction, x.shape[1]
    weight, row_weight = (
        draw.logits(1, x.shape[1] - 1, torch.float32, device)[0].abs(),
        draw.logits(1, B, torch.float32, device)[0],
    )
    normalizer = torch.tensor(3.0, device=device)
    labels = torch.where(labels < x.shape[1] - 1, labels, -100)
    return x, labels, weight, row_weight, normalizer, -100, 1e-3, 0.1, 5.0, 0.7, 0.0, reduction, x.shape[1] - 1


@pytest.mark.parametrize("reduction", range(3), ids=REDUCTIONS.__getitem__)
@pytest.mark.parametrize(("B", "dtype", "plain"), [(5, torch.float32, False), (0, torch.bfloat16, True)], ids=str)
def test_the_operators_pass_opcheck(draw, device, reduction, B, dtype, plain):
    wanted = EVERYTHING if reduction else EVERYTHING & ~option_rules.GRADIENT
    given = arguments(draw, B, 8, dtype, device, reduction=reduction, plain=plain)
    leaf = given[0].detach().requires_grad_()
    for flags in (wanted, wanted & option_rules.GRADIENT):
        torch.library.opcheck(ops.cross_entropy_options.default, (leaf, *given[1:], flags))
    torch.library.opcheck(ops.cross_entropy_options.default, (*given, EVERYTHING & ~option_rules.GRADIENT))
    rows = draw.logits(1, B, torch.float32, device)[0]
    loss = rows if reduction == 0 else torch.tensor(2.0, device=device)
    for came in ((loss, None, None), (None, rows, rows)):
        torch.library.opcheck(ops.cross_entropy_options_backward.default, (*came, *given))


def test_the_operators_pass_opcheck_on_rows_of_a_wider_buffer(draw, device):
    given = arguments(draw, 6, 20, torch.float32, device, columns=slice(3, 12), requires_grad=True)
    torch.library.opcheck(ops.cross_entropy_options.default, (*given, EVERYTHING))


@pytest.mark.parametrize("reduction", range(3), ids=REDUCTIONS.__getitem__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fakes_have_the_shapes_types_strides_and_devices_of_the_real_results(draw, device, reduction, dtype):
    given = arguments(draw, 6, 20, dtype, device, reduction=reduction, columns=slice(3, 12))
    loss = torch.ones(6 if reduction == 0 else (), device=device)
    for wanted in (0, EVERYTHING, option_rules.LSE, option_rules.TOKEN_ACCURACY | option_rules.GRADIENT):
        real = [
            *ops.cross_entropy_options(*given, wanted),
            ops.cross_entropy_options_backward(loss, None, None, *given),
        ]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given]
            came = mode.from_tensor(loss)
            fake = [
                *ops.cross_entropy_options(*fakes, wanted),
                ops.cross_entropy_options_backward(came, None, None, *fakes),
            ]
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_what_is_not_wanted_is_empty_and_what_is_a_constant_says_so(draw, device):
    for reduction in range(3):
        given = arguments(draw, 6, 20, torch.float32, device, reduction=reduction, requires_grad=True)
        nothing = option_rules.Outputs(*ops.cross_entropy_options(*given, 0))
        assert all(each.shape == (0,) for each in nothing[1:])
        assert nothing.loss.requires_grad
        output = option_rules.Outputs(*ops.cross_entropy_options(*given, EVERYTHING))
        differentiable = {name for name, each in output._asdict().items() if each.requires_grad}
        assert differentiable == {"loss", "lse", "entropy"}


class Calls(TorchDispatchMode):
    """Collects the names of the operators of this library that run, and the numbers they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.interfaces: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "greyhound":
            self.interfaces[func._schema.name.removeprefix("greyhound::")] = args[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_dispatch_mode_sees_the_operators_with_the_bits_and_the_number_of_the_interface(
    draw, device, dtype, reduction
):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device, ignored=0.2)
    options = {"reduction": reduction, "softcap": 5.0, **EVERY_OUTPUT}
    results = []
    for mode in (None, Calls()):
        leaf = x.clone().requires_grad_()
        if mode is None:
            output = cross_entropy(leaf, labels, **options)
            (3 * output.loss.sum() + output.lse.sum()).backward()
        else:
            with mode:
                output = cross_entropy(leaf, labels, **options)
                (3 * output.loss.sum() + output.lse.sum()).backward()
            assert set(mode.interfaces) == {"cross_entropy_options", "cross_entropy_options_backward"}
            assert set(mode.interfaces.values()) == {rules.INTERFACE}
        results.append([*output, leaf.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for operator in (ops.cross_entropy_options, ops.cross_entropy_options_backward):
        assert operator.default._schema.arguments[-1].default_value != rules.INTERFACE


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_who_watches_gets_the_operators_and_nothing_is_overwritten(draw, device, name):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device, ignored=0.2)
    plain = x.clone().requires_grad_()
    loss = cross_entropy(plain, labels, softcap=5.0)
    (3 * loss).backward()
    leaf = x.clone().requires_grad_()
    with Calls() as calls:
        y = leaf * 1
        watched = cross_entropy(y, labels, softcap=5.0, **{name: True})
        (3 * watched).backward()
    assert "cross_entropy_options" in calls.interfaces
    assert torch.equal(y.detach(), x)
    assert torch.equal(watched, loss)
    assert torch.equal(leaf.grad, plain.grad)


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
def test_tensors_without_memory_may_be_asked_to_be_overwritten(draw, device, name):
    x, labels = draw.logits(8, 100, torch.float32, device).requires_grad_(), draw.labels(8, 100, device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        loss = cross_entropy((fake * 1).view(2, 4, 100), mode.from_tensor(labels).view(2, 4), **{name: True})
        (grad,) = torch.autograd.grad(loss, fake)
    assert (loss.shape, grad.shape) == ((), (8, 100))


# --- torch.compile ----------------------------------------------------------------------------------------

CALLS = {
    "reduction none": lambda draw, B, V, device: {"reduction": "none"},
    "weight": lambda draw, B, V, device: {"weight": draw.logits(1, V, torch.float32, device)[0].abs()},
    "label_smoothing": lambda draw, B, V, device: {"label_smoothing": 0.1},
    "softcap": lambda draw, B, V, device: {"softcap": 5.0},
    "logit_scale": lambda draw, B, V, device: {"logit_scale": 0.7},
    "normalizer": lambda draw, B, V, device: {"normalizer": 7},
    "normalizer on the device": lambda draw, B, V, device: {"normalizer": torch.tensor(7, device=device)},
    "row_weight": lambda draw, B, V, device: {"row_weight": draw.logits(1, B, torch.float32, device)[0]},
    "valid_vocab": lambda draw, B, V, device: {"valid_vocab": V - 3},
    "shift": lambda draw, B, V, device: {"shift": True},
    "inplace": lambda draw, B, V, device: {"inplace": True, "softcap": 5.0},
    "inplace_backward": lambda draw, B, V, device: {"inplace_backward": True, "reduction": "none"},
    "outputs": lambda draw, B, V, device: EVERY_OUTPUT,
    "outputs of rows": lambda draw, B, V, device: {**EVERY_OUTPUT, "reduction": "none", "z_loss_multiplier": 1e-3},
}


def losses_outputs_and_gradients(function, inputs):
    """Return what each call gives, and its gradient with something coming in for all that is differentiable."""
    results = []
    for x, labels, options in inputs:
        leaf = x.clone().requires_grad_()
        output = function(leaf, labels, options)
        parts = list(output) if isinstance(output, CrossEntropyOutput) else [output]
        total = sum((3 * each * each.detach()).sum() for each in parts if each.requires_grad)
        total.backward()
        results.append([*(each.detach() for each in parts), leaf.grad])
    return results


@pytest.mark.parametrize(
    ("name", "dtype"),
    # fp16 keeps the logits.
    [*((name, torch.bfloat16) for name in CALLS), ("weight", torch.float16), ("outputs", torch.float16)],
    ids=str,
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_without_a_break_each_option_gives_the_bits_of_eager_for_any_batch(draw, device, name, dtype):
    V = 100

    def step(x, labels, options):
        return cross_entropy(x * 1, labels, **options)

    inputs = [
        (draw.logits(B, V, dtype, device), draw.labels(B, V - 3, device, ignored=0.2), CALLS[name](draw, B, V, device))
        for B in (6, 7, 0)
    ]
    eager = losses_outputs_and_gradients(lambda x, labels, o: step(x, labels, without_overwriting(o)), inputs)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for ours, expected in zip(losses_outputs_and_gradients(compiled, inputs), eager, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    with torch.no_grad():
        x, labels, options = inputs[0]
        ours, expected = compiled(x, labels, options), step(x, labels, without_overwriting(options))
        for a, b in zip(ours, expected, strict=True) if isinstance(ours, tuple) else [(ours, expected)]:
            assert torch.equal(a, b)


def without_overwriting(options):
    """Return the options without those that compiled code ignores."""
    return {name: each for name, each in options.items() if not name.startswith("inplace")}


@pytest.mark.parametrize("name", ["inplace", "inplace_backward"])
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_a_leaf_may_be_asked_to_be_overwritten_and_is_not(draw, device, name):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    compiled(leaf, labels, softcap=5.0, **{name: True}).backward()
    cross_entropy(other, labels, softcap=5.0).backward()
    assert torch.equal(leaf.detach(), x)
    assert torch.equal(leaf.grad, other.grad)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_inductor_all_options_with_a_layer_train_as_in_eager(draw, device):
    hidden, start = (
        draw.logits(60, 32, torch.float32, device).view(4, 15, 32),
        draw.logits(500, 32, torch.float32, device),
    )
    labels = draw.labels(60, 490, device, ignored=0.2).view(4, 15)
    weight, row_weight = draw.logits(1, 500, torch.float32, device)[0].abs(), draw.logits(4, 15, torch.float32, device)

    def step(parameter):
        output = cross_entropy(
            torch.nn.functional.linear(hidden, parameter),
            labels,
            z_loss_multiplier=1e-3,
            weight=weight,
            label_smoothing=0.1,
            softcap=20.0,
            logit_scale=0.5,
            normalizer=40,
            row_weight=row_weight,
            valid_vocab=490,
            shift=True,
            inplace_backward=True,
            **EVERY_OUTPUT,
        )
        return output.loss + 1e-2 * output.lse.mean() - 1e-2 * output.entropy.mean(), output.predicted_tokens

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        parameter = start.clone().requires_grad_()
        output = function(parameter)
        output[0].backward()
        results.append((output[0].detach(), output[1], parameter.grad))
    (loss, predicted, grad), (compiled_loss, compiled_predicted, compiled_grad) = results
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-6)  # fp32 products in another order
    torch.testing.assert_close(compiled_grad, grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(compiled_predicted, predicted)


@pytest.mark.parametrize(
    "function", [selective_log_softmax, lambda x, labels: entropy(x)], ids=["log_softmax", "entropy"]
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_the_functions_of_one_output_give_the_bits_of_eager(draw, device, function):
    x, labels = draw.logits(12, 100, torch.bfloat16, device).view(3, 4, 100), draw.labels(12, 100, device).view(3, 4)
    results = []
    for each in (function, torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        rows = each(leaf, labels)
        (3 * rows).sum().backward()
        results.append((rows.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def compiled_counts(draw, device, name, values):
    """Return how often code had been compiled after each value of an option, whose results are checked."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(x, labels, value):
        return cross_entropy(x, labels, **{name: value})

    x, labels, counts = draw.logits(6, 20, torch.float32, device), draw.labels(6, 10, device), []
    for value in values:
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = step(leaf, labels, value), cross_entropy(other, labels, **{name: value})
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(leaf.grad, other.grad)
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_a_normalizer_that_changes_compiles_once_more_at_most(draw, device, kind):
    counts = compiled_counts(draw, device, "normalizer", [kind(value) for value in (30, 41, 52, 63)])
    assert counts[0] == 1
    assert counts[-1] == counts[1] <= 2  # a number is a constant until it changes


FLOATS = {
    "label_smoothing": (0.1, 0.2, 0.3, 0.4),
    "softcap": (5.0, 6.0, 7.0, 8.0),
    "logit_scale": (0.5, 0.6, 0.7, 0.8),
    "z_loss_multiplier": (1e-3, 2e-3, 3e-3, 4e-3),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_a_float_that_changes_compiles_once_more_at_most(draw, device, name):
    counts = compiled_counts(draw, device, name, FLOATS[name])
    assert counts[0] == 1
    assert counts[-1] == counts[1] <= 2  # a constant until it changes, and a symbol from then on


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_another_size_of_the_vocabulary_is_never_taken_for_the_first(draw, device):
    compiled_counts(draw, device, "valid_vocab", (15, 16, 17))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_inductor_floats_that_change_reach_the_backward_pass_too(draw, device):
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def step(x, labels, value):
        output = cross_entropy(x, labels, reduction="none", softcap=5 + value, label_smoothing=value, return_lse=True)
        return output.loss, output.lse

    x, labels = draw.logits(6, 20, torch.float32, device), draw.labels(6, 20, device)
    for value in (0.5, 0.25, 0.125, 0.3):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = step(leaf, labels, value)
        output = cross_entropy(
            other, labels, reduction="none", softcap=5 + value, label_smoothing=value, return_lse=True
        )
        for result, expected in zip(results, (output.loss, output.lse), strict=True):
            assert torch.equal(result, expected)
        sum(result.sum() for result in results).backward()
        (output.loss.sum() + output.lse.sum()).backward()
        assert torch.equal(leaf.grad, other.grad)
    assert counter.frame_count <= 2
