"""`greyhound.nn.functional.cross_entropy`: values, autograd, memory, layouts, modes and refusals."""

import functools
import gc
import inspect
import math
import os
import subprocess
import sys
import threading

import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels import portable
from greyhound.nn.functional import cross_entropy

pytestmark = pytest.mark.usefixtures("narrow_in_small_batches")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize(
    ("B", "V"),
    [
        (1, 8),
        (4, 31),
        (37, 257),  # odd, so that every row has its own alignment
        (77, 1000),
        (289, 97),
        (16, 4096),
        (4, 32000),  # Llama 2
        (3, 50257),  # GPT-2, odd
    ],
)
def test_loss_and_gradient_are_right(draw, device, dtype, reduction, z_loss_multiplier, B, V):
    x, labels = draw.logits(B, V, dtype, device, scale=2.0), draw.labels(B, V, device, ignored=0.2)
    reference.check(cross_entropy, x, labels, reduction=reduction, z_loss_multiplier=z_loss_multiplier)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("B", "V"),
    [
        (8192, 32000),
        (1269, 151936),  # Qwen; a batch that is no multiple of anything
        (512, 262144),  # Gemma
        (16384, 1024),
    ],
)
def test_loss_and_gradient_are_right_at_the_sizes_of_training(draw, cuda, dtype, reduction, B, V):
    x, labels = draw.logits(B, V, dtype, cuda, scale=2.0), draw.labels(B, V, cuda, ignored=0.2)
    reference.check(cross_entropy, x, labels, reduction=reduction, z_loss_multiplier=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("grad_output", [1.0, 1 / 7])
def test_loss_and_gradient_are_right_at_8192_by_128256(draw, cuda, grad_output):
    x, labels = draw.logits(8192, 128256, torch.bfloat16, cuda), draw.labels(8192, 128256, cuda, ignored=0.1)
    reference.check(cross_entropy, x, labels, grad_output=grad_output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])  # flat, as at the start of training; ordinary; confident
@pytest.mark.parametrize(("B", "V"), [(64, 41), (64, 1000), (16, 8192), (4, 50264)])
def test_the_error_is_not_above_that_of_pytorch_by_more_than_a_small_margin(draw, device, dtype, scale, B, V):
    x, labels = draw.logits(B, V, dtype, device, scale=scale), draw.labels(B, V, device, ignored=0.1)
    options = {"z_loss_multiplier": 1e-3, "reduction": "mean"}
    expected, expected_grad = reference.loss(x, labels, **options), reference.gradient(x, labels, **options)
    eager, eager_grad = reference.torch_eager(x, labels, **options)
    leaf = x.clone().requires_grad_()
    ours = cross_entropy(leaf, labels, **options)
    ours.backward()
    # 1e-6 of the loss: eight fp32 ulps, for sums in another order. PyTorch's loss is computed in fp32 here.
    assert abs(ours.double() - expected) <= abs(eager.double() - expected) + 1e-6 * abs(expected)
    error, eager_error = ((g.double() - expected_grad).abs() for g in (leaf.grad, eager_grad))
    # 2e-6 of the largest element for fp32 arithmetic; a tenth for 16-bit ties that fall the other way.
    margin = 1.1
    assert error.max() <= margin * eager_error.max() + 2e-6 * expected_grad.abs().max()
    at_target = labels.clamp(min=0)[:, None]
    largest = expected_grad.gather(1, at_target).abs().max()
    assert error.gather(1, at_target).max() <= margin * eager_error.gather(1, at_target).max() + 2e-6 * largest


def test_the_defaults_are_pytorchs(draw, device):
    x, labels = draw.logits(16, 100, torch.float32, device), draw.labels(16, 100, device, ignored=0.3)
    ours = {name: p.default for name, p in inspect.signature(cross_entropy).parameters.items()}
    theirs = {name: p.default for name, p in inspect.signature(F.cross_entropy).parameters.items()}
    assert ours["ignore_index"] == theirs["ignore_index"] == -100
    assert ours["reduction"] == theirs["reduction"] == "mean"
    assert float(cross_entropy(x, labels)) == pytest.approx(float(F.cross_entropy(x, labels)), rel=1e-6)
    by_name = cross_entropy(x, labels, ignore_index=-100, reduction="sum", z_loss_multiplier=1e-3)
    assert cross_entropy(x, labels, -100, "sum", 1e-3) == by_name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("grad_output", [1.0, 3.0, 1 / 7, 1 / 64, -2.0, 1e-3])
def test_the_incoming_gradient_scales_the_gradient(draw, device, dtype, reduction, grad_output):
    x, labels = draw.logits(16, 1024, dtype, device), draw.labels(16, 1024, device, ignored=0.2)
    reference.check(cross_entropy, x, labels, reduction=reduction, grad_output=grad_output, z_loss_multiplier=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_scale_of_65536_reaches_the_gradient(draw, device, dtype):
    x, labels = draw.logits(16, 1024, dtype, device), draw.labels(16, 1024, device)
    reference.check(cross_entropy, x, labels, grad_output=65536.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_incoming_gradient_of_zero_gives_zeros(draw, device, dtype):
    x = draw.logits(16, 1024, dtype, device).requires_grad_()
    (0.0 * cross_entropy(x, draw.labels(16, 1024, device))).backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("incoming", [math.inf, math.nan])
def test_an_incoming_gradient_that_is_not_finite_is_passed_on(draw, device, incoming):
    x = draw.logits(4, 100, torch.float32, device).requires_grad_()
    (incoming * cross_entropy(x, draw.labels(4, 100, device))).backward()
    assert not x.grad.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_loss_may_be_cast_before_backward(draw, device, dtype):
    x, labels = draw.logits(8, 100, torch.float32, device).requires_grad_(), draw.labels(8, 100, device)
    (cross_entropy(x, labels).to(dtype) * 3).backward()
    assert reference.gradient_roundings(x.grad, x.detach(), labels, reduction="mean", grad_output=3.0, kept=1 / 3) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kept_graph_gives_each_incoming_gradient_its_own_result(draw, device, dtype):
    x, labels = draw.logits(8, 100, dtype, device), draw.labels(8, 100, device)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, labels)
    results = []
    for grad_output in (3.0, 1.0, 1 / 7, 1.0):
        (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(grad_output, device=device), retain_graph=True)
        results.append((grad_output, grad))
    (last,) = torch.autograd.grad(loss, leaf, torch.tensor(5.0, device=device))
    for grad_output, grad in [*results, (5.0, last)]:
        kept = reference.kept_factor(dtype, grad_output)
        options = {"reduction": "mean", "grad_output": grad_output, "kept": kept}
        assert reference.gradient_roundings(grad, x, labels, **options) <= 1, grad_output
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaf)


def test_a_loss_that_is_used_twice_adds_up(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device).requires_grad_(), draw.labels(8, 100, device)
    loss = cross_entropy(x, labels)
    (2 * loss + 3 * loss).backward()
    assert reference.gradient_roundings(x.grad, x.detach(), labels, reduction="mean", grad_output=5.0, kept=0.2) <= 1


def test_two_losses_on_the_same_logits_add_up(draw, device):
    x = draw.logits(8, 100, torch.float32, device).requires_grad_()
    first, second = draw.labels(8, 100, device), draw.labels(8, 100, device)
    (cross_entropy(x, first) + cross_entropy(x, second, reduction="sum")).backward()
    expected = reference.gradient(x.detach(), first, reduction="mean") + reference.gradient(x.detach(), second)
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-7)  # a few fp32 roundings


def test_a_gradient_is_not_changed_by_later_calls(draw, device):
    x, labels = draw.logits(8, 100, torch.bfloat16, device).requires_grad_(), draw.labels(8, 100, device)
    (first,) = torch.autograd.grad(cross_entropy(x, labels), x)
    kept = first.clone()
    for _ in range(3):
        torch.autograd.grad(5 * cross_entropy(x, labels.roll(1)), x)
    assert torch.equal(first, kept)


def test_gradients_accumulate_over_steps(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device).requires_grad_(), draw.labels(8, 100, device)
    for _ in range(3):
        cross_entropy(x, labels).backward()
    torch.testing.assert_close(
        x.grad.double(), 3 * reference.gradient(x.detach(), labels, reduction="mean"), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("retain_graph", [True, False])
def test_a_gradient_of_the_gradient_raises(draw, device, retain_graph):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    (grad,) = torch.autograd.grad(cross_entropy(x, labels), x, create_graph=True, retain_graph=retain_graph)
    assert reference.gradient_roundings(grad.detach(), x.detach(), labels, reduction="mean") <= 1
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.square().sum().backward()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_mode_gives_the_derivative_or_raises(draw, device, requires_grad):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    direction = draw.logits(4, 7, torch.float32, device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(requires_grad), direction)
        try:
            loss = cross_entropy(dual, labels)
        except (NotImplementedError, RuntimeError):
            return
        tangent = torch.autograd.forward_ad.unpack_dual(loss).tangent
    expected = (reference.gradient(x, labels, reduction="mean") * direction).sum()
    assert tangent is not None
    assert float(tangent) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_only_a_recorded_call_on_logits_that_want_a_gradient_has_one(draw, device, mode, requires_grad):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device)
    expected = float(reference.loss(x, labels))
    leaf = x.clone().requires_grad_(requires_grad)
    with mode():
        loss = cross_entropy(leaf, labels)
    assert loss.requires_grad == (requires_grad and mode is torch.enable_grad)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(leaf.detach(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_is_the_same_with_and_without_a_gradient(draw, device, dtype, reduction):
    x, labels = draw.logits(64, 1000, dtype, device), draw.labels(64, 1000, device, ignored=0.2)
    without = cross_entropy(x, labels, reduction=reduction, z_loss_multiplier=1e-4)
    with_gradient = cross_entropy(x.clone().requires_grad_(), labels, reduction=reduction, z_loss_multiplier=1e-4)
    assert float(without) == pytest.approx(float(with_gradient.detach()), rel=1e-6)  # perhaps added in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_logits_and_labels_are_never_changed(draw, device, dtype, mode):
    for B, V in ((8, 32), (9, 1001)):
        x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.3)
        x[1, 3], x[2, 5] = -math.inf, math.nan
        before, labels_before, version = x.clone(), labels.clone(), x._version
        for requires_grad in (True, False):
            leaf = x.detach().requires_grad_(requires_grad)
            with mode():
                loss = cross_entropy(leaf, labels, z_loss_multiplier=1e-4)
            if loss.requires_grad:
                (3 * loss).backward()
        assert reference.same_bits(x, before)
        assert torch.equal(labels, labels_before)
        assert x._version == version


def test_an_operation_that_saved_the_logits_gets_the_right_gradient(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    for operation in (torch.tanh, lambda leaf: leaf.softmax(dim=-1)):
        gradients = []
        for loss_function in (cross_entropy, F.cross_entropy):
            leaf = x.clone().requires_grad_()
            y = operation(leaf)
            (loss_function(y, labels) + y.square().mean()).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)  # a few fp32 roundings


def test_hooks_checkpoints_offloading_and_anomaly_mode_see_the_same_gradient(draw, device):
    x, labels = draw.logits(8, 100, torch.float32, device), draw.labels(8, 100, device, ignored=0.2)
    plain = x.clone().requires_grad_()
    (3 * cross_entropy(plain, labels)).backward()

    leaf, seen = x.clone().requires_grad_(), []
    y = leaf * 1
    y.register_hook(seen.append)
    y.retain_grad()
    (3 * cross_entropy(y, labels)).backward()
    assert all(torch.equal(grad, plain.grad) for grad in (leaf.grad, y.grad, *seen))
    assert len(seen) == 1

    for reentrant in (True, False):
        leaf = x.clone().requires_grad_()
        (3 * checkpoint(cross_entropy, leaf, labels, use_reentrant=reentrant)).backward()
        assert torch.equal(leaf.grad, plain.grad)

    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(leaf, labels)
    (3 * loss).backward()
    assert torch.equal(leaf.grad, plain.grad)

    leaf = x.clone().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        (3 * cross_entropy(leaf, labels)).backward()
    assert torch.equal(leaf.grad, plain.grad)


def test_backward_may_run_in_another_thread(draw, device):
    x, labels = draw.logits(8, 1000, torch.float32, device), draw.labels(8, 1000, device)
    leaf = x.clone().requires_grad_()
    loss = 3 * cross_entropy(leaf, labels)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert reference.gradient_roundings(leaf.grad, x, labels, reduction="mean", grad_output=3.0, kept=1 / 3) <= 1


class BuffersOf(TorchDispatchMode):
    """Collects the addresses of the tensors of one size that operations make."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.numel() == self.elements:
                self.addresses.add(result.untyped_storage().data_ptr())
        return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_output", [1.0, 3.0])
def test_the_gradient_of_a_leaf_is_the_one_buffer_that_is_made(draw, device, monkeypatch, dtype, grad_output):
    monkeypatch.setattr(portable, "BLOCK_ELEMENTS", 1000)  # a row: the portable code's own buffers are smaller
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # or the mode would get the operators
    x, labels = draw.logits(8, 1000, dtype, device).requires_grad_(), draw.labels(8, 1000, device)
    with BuffersOf(x.numel()) as buffers:
        (grad_output * cross_entropy(x, labels)).backward()
    assert buffers.addresses == {x.grad.data_ptr()}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_without_a_gradient_no_buffer_is_made(draw, device, mode):
    x, labels = draw.logits(8, 1000, torch.float32, device), draw.labels(8, 1000, device)
    x.requires_grad_(mode is torch.no_grad)
    with BuffersOf(x.numel()) as buffers, mode():
        cross_entropy(x, labels)
    assert not buffers.addresses


def gpu_bytes_at_peak(work) -> int:
    """Return by how much `work` raises the GPU memory in use, at its highest."""
    work()  # modules, workspaces
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_gpu_memory_is_one_buffer_with_a_gradient_and_none_without(draw, cuda, dtype, reduction):
    if kernels.implementation(cuda)[0] is None:
        pytest.skip("the portable code takes a block more")
    x, labels = draw.logits(4096, 32000, dtype, cuda).requires_grad_(), draw.labels(4096, 32000, cuda)
    one = x.numel() * x.element_size()

    def step(grad_output):
        x.grad = None
        (grad_output * cross_entropy(x, labels, reduction=reduction)).backward()
        x.grad = None

    # 2 %: row losses, sums and the allocator's rounding.
    for grad_output in (1.0, 3.0):
        assert 0.98 * one <= gpu_bytes_at_peak(functools.partial(step, grad_output)) <= 1.02 * one
    with torch.no_grad():
        assert gpu_bytes_at_peak(lambda: cross_entropy(x, labels, reduction=reduction)) <= 0.02 * one
    frozen = x.detach()
    assert gpu_bytes_at_peak(lambda: cross_entropy(frozen, labels, reduction=reduction)) <= 0.02 * one


@pytest.mark.gpu
def test_the_gpu_memory_under_a_linear_layer_is_one_buffer(draw, cuda):
    if kernels.implementation(cuda)[0] is None:
        pytest.skip("the portable code takes a block more")
    hidden = draw.logits(4096, 64, torch.bfloat16, cuda).requires_grad_()
    weight, labels = draw.logits(32000, 64, torch.bfloat16, cuda).requires_grad_(), draw.labels(4096, 32000, cuda)
    one = 4096 * 32000 * 2

    def step():
        hidden.grad = weight.grad = None
        (3 * cross_entropy(hidden @ weight.t(), labels)).backward()

    # The logits and their gradient; 5 % for the gradients of the layer and the row losses.
    assert gpu_bytes_at_peak(step) <= 2.05 * one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_of_the_logits_is_right(draw, device, dtype):
    big = draw.logits(40, 300, dtype, device)
    flat = draw.logits(1, 20 * 257 + 8, dtype, device)[0]
    batched = draw.logits(8, 32, dtype, device).view(8, 4, 8).transpose(0, 1)
    layouts = {
        "wider rows": big[:, :257],
        "every second row": big[::2],
        "a middle part": big[3:23, 5:105],
        "transposed": big.t(),
        "every second column": big[:, ::2],
        "one row for all": big[:1].expand(20, 300),
        "one column for all": big[:, :1].expand(40, 30),
        "overlapping rows": flat.as_strided((20, 257), (100, 1)),
        "a leading dimension": batched[1],
        "one column": big[:, 3:4],
        "one column, transposed": big[:1].t(),
        **{f"offset {k}": flat[k : k + 20 * 257].view(20, 257) for k in range(1, 9)},
    }
    for name, x in layouts.items():
        labels = draw.labels(*x.shape, device, ignored=0.2)
        _, grad = reference.check(cross_entropy, x, labels)
        with torch.no_grad():
            loss = cross_entropy(x, labels)
        expected = reference.loss(x, labels)
        assert abs(float(loss) - float(expected)) <= reference.loss_tolerance(x, labels), name
        assert grad.shape == x.shape, name


def test_any_layout_of_the_labels_is_right(draw, device):
    x, labels = draw.logits(16, 100, torch.bfloat16, device), draw.labels(16, 100, device, ignored=0.2)
    spread = torch.full((16, 3), 1 << 40, device=device)
    spread[:, 1] = labels
    reference.check(cross_entropy, x, spread[:, 1])
    reference.check(cross_entropy, x, torch.tensor(7, device=device).expand(16))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_empty_batch_gives_zero_and_an_empty_gradient(device, reduction, requires_grad):
    x = torch.empty(0, 4096, dtype=torch.bfloat16, device=device, requires_grad=requires_grad)
    loss = cross_entropy(x, torch.empty(0, dtype=torch.int64, device=device), reduction=reduction)
    assert loss == 0
    assert loss.shape == ()
    if requires_grad:
        (3 * loss).backward()
        assert x.grad.shape == (0, 4096)
        assert x.grad.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [10, -4, 2**31, 2**32 + 1, -(2**31) - 1])
def test_a_target_out_of_range_makes_loss_and_row_nan_on_the_gpu(draw, cuda, wrong):
    x, target = draw.logits(4, 10, torch.float32, cuda), torch.tensor([3, wrong, -100, 9], device=cuda)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, target)
    loss.backward()
    assert loss.isnan()
    assert cross_entropy(x, target).isnan()
    assert leaf.grad[1].isnan().all()
    # The row counts as valid: 3 rows share the mean.
    others = torch.tensor([0, 2, 3], device=cuda)
    right = target[others]
    expected = reference.gradient(x[others], right) / 3
    torch.testing.assert_close(leaf.grad[others].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_target_out_of_range_raises_on_the_cpu(draw, requires_grad):
    x = torch.zeros(3, 10, requires_grad=requires_grad)
    for wrong in (10, -4, 2**31, 2**32 + 1, -(2**31) - 1):
        with pytest.raises(IndexError, match=f"expected 0 to 9 or ignore_index=-100, got {wrong} in row 1"):
            cross_entropy(x, torch.tensor([3, wrong, -100]))


def test_a_target_out_of_range_is_reported_by_the_name_of_the_argument():
    with pytest.raises(IndexError, match=r"^target: "):
        cross_entropy(torch.zeros(3, 10), torch.tensor([3, 10, -100]))


def test_autocast_and_mixed_precision_layers_work(draw, device):
    hidden = draw.logits(32, 16, torch.float32, device).requires_grad_()
    weight, labels = draw.logits(100, 16, torch.float32, device).requires_grad_(), draw.labels(32, 100, device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = F.linear(hidden, weight)
        loss = cross_entropy(logits, labels)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(reference.loss(logits.detach(), labels)), rel=1e-6)


@pytest.mark.gpu
def test_a_grad_scaler_step_works(draw, cuda):
    weight = torch.nn.Parameter(draw.logits(1000, 64, torch.float32, cuda, scale=0.1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cuda")
    hidden, labels = draw.logits(256, 64, torch.float32, cuda), draw.labels(256, 1000, cuda)
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(F.linear(hidden, weight), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert scaler.get_scale() == 65536.0  # nothing overflowed
    assert losses == sorted(losses, reverse=True)


def test_defaults_of_the_process_change_nothing(draw, device):
    x, labels = draw.logits(8, 100, torch.bfloat16, device), draw.labels(8, 100, device, ignored=0.2)
    plain = x.clone().requires_grad_()
    loss = cross_entropy(plain, labels, z_loss_multiplier=1e-3)
    loss.backward()
    for switch in ("dtype", "device", "deterministic"):
        leaf = x.clone().requires_grad_()
        try:
            if switch == "dtype":
                torch.set_default_dtype(torch.float64)
            elif switch == "device":
                torch.set_default_device("meta")
            else:
                torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN too
            other = cross_entropy(leaf, labels, z_loss_multiplier=1e-3)
            other.backward()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            torch.use_deterministic_algorithms(False)
        assert torch.equal(other, loss), switch
        assert torch.equal(leaf.grad, plain.grad), switch


def test_meta_tensors_give_meta_results():
    x = torch.empty(8, 100, device="meta", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(8, dtype=torch.int64, device="meta")
    loss = cross_entropy(x, labels)
    loss.backward()
    assert loss.device.type == x.grad.device.type == "meta"
    assert loss.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    assert cross_entropy(x.detach(), labels).shape == ()


GOOD = torch.zeros(4, 10)
TARGET = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    ("logits", "target", "options", "error", "message"),
    [
        ([[0.0]], TARGET, {}, TypeError, "logits: expected a torch.Tensor, got list"),
        (GOOD, [0, 1, 2, 3], {}, TypeError, "target: expected a torch.Tensor, got list"),
        (GOOD.double(), TARGET, {}, TypeError, "logits: expected dtype .*got torch.float64"),
        (GOOD.int(), TARGET, {}, TypeError, "logits: expected dtype .*got torch.int32"),
        *(
            (GOOD, TARGET.to(wrong), {}, TypeError, f"target: expected dtype int64 or int32, got {wrong}")
            for wrong in (torch.int16, torch.uint8, torch.float32, torch.bool)
        ),
        # Class probabilities, which PyTorch's function takes.
        (GOOD, torch.zeros(4, 10), {}, TypeError, "target: expected dtype int64 or int32, got torch.float32"),
        (GOOD[0], TARGET, {}, ValueError, r"target: expected shape \(\), that of logits without V, got \(4,\)"),
        (GOOD[None], TARGET, {}, ValueError, r"target: expected shape \(1, 4\), .*got \(4,\)"),
        (GOOD[0, 0], TARGET[0], {}, ValueError, r"logits: expected shape \(B, V\), got \(\)"),
        (GOOD, TARGET[:3], {}, ValueError, r"target: expected shape \(4,\).*got \(3,\)"),
        (GOOD, TARGET[:, None], {}, ValueError, r"target: expected shape \(4,\).*got \(4, 1\)"),
        (GOOD, TARGET.to("meta"), {}, ValueError, "target: expected device cpu, that of logits, got meta"),
        (torch.zeros(4, 0), TARGET, {}, ValueError, "logits: expected 1 to 2147483647 columns, got 0"),
        *(
            (GOOD, TARGET, {"reduction": wrong}, ValueError, f"reduction: expected .*'mean', 'sum'.*got {wrong!r}")
            for wrong in ("avg", "", "MEAN", None, 0)
        ),
        (GOOD, TARGET, {"z_loss_multiplier": "0"}, TypeError, "z_loss_multiplier: expected a float, got str"),
        (GOOD, TARGET, {"z_loss_multiplier": None}, TypeError, "z_loss_multiplier: expected a float, got NoneType"),
        (GOOD, TARGET, {"ignore_index": None}, TypeError, "ignore_index: expected an int, got NoneType"),
        (GOOD, TARGET, {"ignore_index": -(2**63) - 1}, ValueError, "ignore_index: expected an int64, got -92233"),
    ],
)
def test_a_bad_argument_is_named_with_what_came(logits, target, options, error, message, requires_grad):
    if isinstance(logits, torch.Tensor) and logits.is_floating_point():
        logits = logits.clone().requires_grad_(requires_grad)
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy(logits, target, **options)


def test_an_unhashable_or_odd_reduction_is_a_value_error():
    for wrong in (["mean"], torch.tensor(1.0), b"mean"):
        with pytest.raises(ValueError, match=r"^reduction: "):
            cross_entropy(GOOD, TARGET, reduction=wrong)


@pytest.mark.gpu
def test_a_target_on_another_device_than_the_logits_is_refused(cuda):
    with pytest.raises(ValueError, match="target: expected device cuda:0, that of logits, got cpu"):
        cross_entropy(GOOD.to(cuda), TARGET)
    with pytest.raises(ValueError, match="target: expected device cpu, that of logits, got cuda:0"):
        cross_entropy(GOOD, TARGET.to(cuda))


def test_several_gradients_at_once_leave_the_kept_buffer_alone(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device).requires_grad_(), torch.tensor([1, 2, 3, 4], device=device)
    loss = cross_entropy(x, labels)
    factors = torch.tensor([1.0, -2.0, 0.0], device=device)
    (gradients,) = torch.autograd.grad(loss, x, factors, is_grads_batched=True)
    expected = reference.gradient(x.detach(), labels, reduction="mean")
    torch.testing.assert_close(gradients.double(), factors.double()[:, None, None] * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=lambda each: each.__name__)
def test_torch_func_transforms_are_refused_by_name(draw, device, transform):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    batched = x if transform is torch.func.grad else x.expand(2, 4, 7)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        transform(lambda logits: cross_entropy(logits, labels))(batched)


def test_labels_on_the_gpu_are_checked_where_that_is_switched_on(draw, device):
    x, labels = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 7, -100, 4], device=device)
    kernels.check_gpu_labels(True)
    try:
        with pytest.raises(IndexError, match="target: expected 0 to 6 or ignore_index=-100, got 7 in row 1"):
            cross_entropy(x, labels)
    finally:
        kernels.check_gpu_labels(False)


@pytest.mark.parametrize(("value", "checked"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_says_once_whether_labels_on_the_gpu_are_checked(monkeypatch, value, checked):
    monkeypatch.setattr(kernels, "_gpu_label_checks", None)
    monkeypatch.delenv("GREYHOUND_CHECK_LABELS", raising=False)
    if value is not None:
        monkeypatch.setenv("GREYHOUND_CHECK_LABELS", value)
    assert kernels.gpu_labels_are_checked() == checked
    monkeypatch.setenv("GREYHOUND_CHECK_LABELS", "0" if checked else "1")
    assert kernels.gpu_labels_are_checked() == checked
    kernels.check_gpu_labels(not checked)
    assert kernels.gpu_labels_are_checked() == (not checked)


@pytest.mark.gpu
def test_a_process_whose_environment_says_so_checks_labels_on_the_gpu(cuda):
    code = (
        "import torch; from greyhound.nn.functional import cross_entropy;"
        "cross_entropy(torch.zeros(3, 5, device='cuda'), torch.tensor([1, -100, 5], device='cuda'))"
    )
    environment = {**os.environ, "GREYHOUND_CHECK_LABELS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "IndexError: target: expected 0 to 4 or ignore_index=-100, got 5 in row 2" in ended.stderr


class Sharded(torch.Tensor):
    """What makes a DTensor one to us: it offers the whole tensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_a_sharded_target_of_plain_logits_is_refused_with_the_call_to_make(draw, device):
    logits, target = draw.logits(4, 7, torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    with pytest.raises(TypeError, match=r"target: expected a plain tensor, got a DTensor; pass its full_tensor\(\)"):
        cross_entropy(logits, target.as_subclass(Sharded))
