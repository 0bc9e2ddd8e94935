"""The operators: schemas, fakes, autograd registration, and `torch.compile` without a break or a copy."""

import gc

import pytest
import reference
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy
from greyhound.ops import cross_entropy as rules

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ops = torch.ops.greyhound


@pytest.fixture
def _fresh_compiler():
    """Forget what other tests compiled: no recompilation limit, no code for another device."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("B", "V"), [(5, 7), (0, 8)])
@pytest.mark.parametrize("mean", [True, False])
def test_every_operator_passes_opcheck(draw, device, dtype, B, V, mean):
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.3)
    incoming, leaf = torch.tensor(2.0, device=device), x.clone().requires_grad_()
    torch.library.opcheck(ops.cross_entropy.default, (leaf, labels, -100, mean, 1e-4))
    torch.library.opcheck(ops.cross_entropy.default, (x, labels, -100, mean, 0.0))
    torch.library.opcheck(ops.cross_entropy_loss.default, (leaf, labels, -100, mean, 1e-4))
    torch.library.opcheck(ops.cross_entropy_loss.default, (x, labels, -100, mean, 1e-4))
    torch.library.opcheck(ops.cross_entropy_backward.default, (incoming, x, labels, -100, mean, 1e-4))
    torch.library.opcheck(ops.scale_gradient.default, (x, incoming))


def test_operators_pass_opcheck_on_rows_of_a_wider_buffer(draw, device):
    x, labels = draw.logits(6, 20, torch.float32, device)[:, 3:10], draw.labels(6, 7, device)
    torch.library.opcheck(ops.cross_entropy.default, (x.detach().requires_grad_(), labels, -100, True, 1e-4))
    torch.library.opcheck(ops.cross_entropy_loss.default, (x, labels, -100, True, 1e-4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fakes_have_the_shapes_types_strides_and_devices_of_the_real_results(draw, device, dtype):
    x, labels = draw.logits(6, 20, dtype, device)[:, 3:10], draw.labels(6, 7, device)
    arguments = (-100, True, 1e-4)
    real = [*ops.cross_entropy(x, labels, *arguments), ops.cross_entropy_loss(x, labels, *arguments)]
    real.append(ops.scale_gradient(real[1], real[0]))
    real.append(ops.cross_entropy_backward(real[0], x, labels, *arguments))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fx, fl = mode.from_tensor(x), mode.from_tensor(labels)
        fake = [*ops.cross_entropy(fx, fl, *arguments), ops.cross_entropy_loss(fx, fl, *arguments)]
        fake.append(ops.scale_gradient(fake[1], fake[0]))
        fake.append(ops.cross_entropy_backward(fake[0], fx, fl, *arguments))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_only_the_loss_is_differentiable(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    loss, grad_logits = ops.cross_entropy(x, labels, -100, True, 1e-4)
    assert loss.requires_grad
    assert not grad_logits.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad_logits.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_operator_that_keeps_the_logits_computes_the_gradient_in_backward(draw, device, dtype, reduction):
    x, labels = draw.logits(16, 100, dtype, device), draw.labels(16, 100, device, ignored=0.3)
    leaf = x.clone().requires_grad_()
    loss = ops.cross_entropy_loss(leaf, labels, -100, reduction == "mean", 1e-4)
    (gradient,) = torch.autograd.grad(3.0 * loss, leaf)
    options = {"reduction": reduction, "z_loss_multiplier": 1e-4, "grad_output": 3.0}
    assert reference.gradient_roundings(gradient, x, labels, **options) <= 1


def test_logits_that_backward_needs_and_that_have_changed_since_raise(draw, device):
    x, labels = draw.logits(4, 7, torch.float16, device), torch.tensor([1, 2, 3, 4], device=device)
    logits = x.requires_grad_() * 1.0
    loss = cross_entropy(logits, labels)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_is_called_with_the_interfaces_number(draw, device, dtype):
    x, labels = draw.logits(4, 7, dtype, device), torch.tensor([1, 2, 3, 4], device=device)
    called = {}

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "greyhound":
                called[func._schema.name] = args[-1]
            return func(*args, **(kwargs or {}))

    with Calls():
        leaf = x.clone().requires_grad_()
        cross_entropy(leaf, labels).backward()
        cross_entropy(x, labels)
    assert len(called) == (2 if dtype == torch.float16 else 3)
    assert set(called.values()) == {rules.INTERFACE}


def test_what_a_compiler_caches_on_disk_is_for_this_interface_only(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    found = []

    def seen(graph, inputs):
        found.extend(node.args for node in graph.graph.nodes if "greyhound" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(cross_entropy, backend=aot_autograd(fw_compiler=seen), fullgraph=True)(x, labels)
    assert [arguments[-1] for arguments in found] == [rules.INTERFACE]
    # The default is left out of what the cache sees.
    assert ops.cross_entropy.default._schema.arguments[-1].default_value != rules.INTERFACE
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("incoming", [0.0, 1.0, 3.0, 1 / 7])
@pytest.mark.parametrize(("B", "V"), [(1, 1), (3, 7), (64, 1001)])  # an element; not a vector; several blocks
def test_scaling_in_place_equals_scaling_into_a_new_buffer(draw, device, dtype, incoming, B, V):
    gradient = draw.logits(B, V, dtype, device)
    before = gradient.clone()
    incoming = torch.tensor(incoming, device=device)
    new = ops.scale_gradient(gradient, incoming)
    assert torch.equal(gradient, before)
    kernels.launch_scale(gradient, gradient, incoming)
    assert torch.equal(new, gradient)
    expected = (before.double() * incoming.double()).to(dtype)
    # One rounding, of a product of fp32 factors: perhaps the other side of a tie.
    torch.testing.assert_close(new, expected, rtol=torch.finfo(dtype).eps, atol=2**-24 if dtype == torch.float16 else 0)


class Seen(TorchDispatchMode):
    """Collects the names of the operators of this library that run, and the strides of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "greyhound":
            self.names.add(func._schema.name)
            self.strides.append(args[0].stride())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("incoming", [1.0, 3.0])
def test_a_dispatch_mode_sees_the_operators_and_a_subclass_works_with_the_bits_of_a_plain_call(
    draw, device, dtype, incoming
):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device, ignored=0.2)
    plain = x.clone().requires_grad_()
    loss = cross_entropy(plain, labels, z_loss_multiplier=1e-3)
    (incoming * loss).backward()
    alone = cross_entropy(x, labels, z_loss_multiplier=1e-3)

    watched = x.clone().requires_grad_()
    with Seen() as seen:
        watched_loss = cross_entropy(watched, labels, z_loss_multiplier=1e-3)
        watched_alone = cross_entropy(x, labels, z_loss_multiplier=1e-3)
    differentiable = "cross_entropy_loss" if dtype == torch.float16 else "cross_entropy"
    assert seen.names == {f"greyhound::{differentiable}", "greyhound::cross_entropy_loss"}
    (incoming * watched_loss).backward()
    parameter = torch.nn.Parameter(x.clone())
    parameter_loss = cross_entropy(parameter, labels, z_loss_multiplier=1e-3)
    (incoming * parameter_loss).backward()
    assert torch.equal(watched_alone, alone)
    for other_loss, other in ((watched_loss, watched), (parameter_loss, parameter)):
        assert torch.equal(other_loss, loss)
        assert torch.equal(other.grad, plain.grad)


def test_the_operators_get_logits_whose_columns_follow_one_another(draw, device):
    x = draw.logits(8, 100, torch.bfloat16, device)
    for view in (x.t(), x[:, ::2], x[:, :1].expand(8, 5)):
        labels = draw.labels(*view.shape, device)
        with Seen() as seen:
            cross_entropy(view, labels)
            cross_entropy(view.detach().requires_grad_(), labels)
        assert [stride[1] for stride in seen.strides] == [1, 1]


def losses_and_gradients(function, inputs):
    """Return the loss and the gradient of each (logits, labels)."""
    results = []
    for x, labels in inputs:
        leaf = x.clone().requires_grad_()
        loss = function(leaf, labels)
        (3 * loss).backward()
        results.append((loss.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_without_a_break_it_gives_the_bits_of_eager_for_any_batch(draw, device, backend, reduction):
    def step(x, labels):
        return cross_entropy(x, labels, reduction=reduction, z_loss_multiplier=1e-4)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    inputs = [
        (draw.logits(B, 1000, torch.bfloat16, device), draw.labels(B, 1000, device, ignored=0.2)) for B in (64, 65, 0)
    ]
    eager = losses_and_gradients(step, inputs)
    for (loss, grad), (eager_loss, eager_grad) in zip(losses_and_gradients(compiled, inputs), eager, strict=True):
        assert torch.equal(loss, eager_loss)
        assert torch.equal(grad, eager_grad)
    with torch.no_grad():
        for x, labels in inputs:
            assert torch.equal(compiled(x, labels), step(x, labels))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_it_gives_the_bits_of_eager_in_the_other_dtypes(draw, device, dtype):
    compiled = torch.compile(cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [(draw.logits(B, 100, dtype, device), draw.labels(B, 100, device)) for B in (4, 5)]
    eager = losses_and_gradients(cross_entropy, inputs)
    for (loss, grad), (eager_loss, eager_grad) in zip(losses_and_gradients(compiled, inputs), eager, strict=True):
        assert torch.equal(loss, eager_loss)
        assert torch.equal(grad, eager_grad)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_the_options_as_variables_it_does_not_break(draw, device):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(x, labels, ignore_index, z_loss_multiplier):
        return cross_entropy(x, labels, ignore_index=ignore_index, z_loss_multiplier=z_loss_multiplier)

    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device)
    for ignore_index, z_loss_multiplier in ((-100, 0.0), (int(labels[0]), 0.1), (5, 0.25), (6, 0.5)):
        expected = cross_entropy(x, labels, ignore_index=ignore_index, z_loss_multiplier=z_loss_multiplier)
        assert torch.equal(step(x, labels, ignore_index, z_loss_multiplier), expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_the_logits_may_be_used_again_after_the_loss(draw, device):
    def step(x, labels):
        y = x.clone()
        loss = cross_entropy(y, labels)
        return loss, (y * 1).sum()

    x, labels = draw.logits(64, 1000, torch.float32, device).requires_grad_(), draw.labels(64, 1000, device)
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        x.grad = None
        loss, total = function(x, labels)
        (3 * loss + total).backward()
        results.append((loss.detach(), total.detach(), x.grad))
    (loss, total, grad), (compiled_loss, compiled_total, compiled_grad) = results
    assert torch.equal(compiled_loss, loss)
    # 64000 numbers of size 1 in another order: at worst an ulp of their sizes' sum, 64000 * 2^-23.
    assert abs(float(compiled_total - total)) <= 1e-2
    torch.testing.assert_close(compiled_grad, grad, rtol=1e-5, atol=1e-6)  # a product and a sum may be fused


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_a_kept_graph_gives_each_incoming_gradient_its_own_result(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    leaf = x.clone().requires_grad_()
    loss = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")(leaf, labels)
    for grad_output in (3.0, 1 / 7, 1.0):
        (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(grad_output, device=device), retain_graph=True)
        options = {"reduction": "mean", "grad_output": grad_output, "kept": 1 / grad_output}
        assert reference.gradient_roundings(grad, x, labels, **options) <= 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_a_layer_it_trains_as_in_eager(draw, device):
    hidden, labels = draw.logits(64, 32, torch.float32, device), draw.labels(64, 500, device, ignored=0.2)
    start = draw.logits(500, 32, torch.float32, device)

    def step(weight):
        return cross_entropy(torch.nn.functional.linear(hidden, weight), labels, z_loss_multiplier=1e-3)

    gradients = []
    for function in (step, torch.compile(step, fullgraph=True)):
        weight = start.clone().requires_grad_()
        function(weight).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)  # fp32 products in another order


@pytest.mark.gpu
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_a_step_takes_at_most_one_buffer_more_than_eager(draw, cuda):
    if kernels.implementation(cuda)[0] is None:
        pytest.skip("the portable code takes a block more")
    hidden, labels = draw.logits(4096, 64, torch.bfloat16, cuda), draw.labels(4096, 32000, cuda)
    weight = draw.logits(32000, 64, torch.bfloat16, cuda).requires_grad_()
    one = 4096 * 32000 * 2

    def step():
        return cross_entropy(torch.nn.functional.linear(hidden, weight), labels)

    peaks = []
    for function in (step, torch.compile(step, fullgraph=True)):
        for _ in range(2):
            weight.grad = None
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function().backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    # Traced code scales into a new buffer: the graph's own may not be changed. A copy of the logits would be one more.
    assert peaks[1] <= peaks[0] + 1.05 * one


def test_the_raw_helper_may_be_called_where_nothing_is_traced(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    original = x.clone()

    @torch.compiler.disable
    def raw(x, labels):
        return cross_entropy_with_grad_kernel(x, labels).ce_sum

    loss = torch.compile(lambda x, labels: raw(x * 1, labels) + 1, backend="aot_eager")(x, labels)
    assert float(loss) == pytest.approx(float(reference.loss(original, labels, reduction="sum")) + 1, rel=1e-6)
    assert torch.equal(x, original)
