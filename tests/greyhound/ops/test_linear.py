"""The operators of a linear layer's loss: what a compiler, a fake tensor and a dispatch mode see of them."""

from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy
from greyhound.ops import linear as rules
from greyhound.ops import options

ops = torch.ops.greyhound
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROW_OUTPUTS = options.LSE | options.ENTROPY | options.PREDICTED_TOKENS | options.TOKEN_ACCURACY | options.Z_LOSS


def arguments(draw, N, dtype, device, *, reduction=1, bias=True, weight_dtype=None):
    """Return the arguments of `linear_cross_entropy` up to `wanted`."""
    H, V = 6, 20
    weight = draw.logits(V, H, weight_dtype or dtype, device)
    given_bias = draw.logits(1, V, weight_dtype or dtype, device)[0] if bias else None
    row_weight = draw.logits(1, N, torch.float32, device)[0]
    head = (draw.logits(N, H, dtype, device), weight, given_bias)
    return *head, draw.labels(N, V, device), row_weight, None, -100, 1e-3, 0.1, 5.0, 0.7, 0.0, reduction, dtype, True, 4


@pytest.mark.parametrize("reduction", range(3), ids=options.REDUCTIONS.__getitem__)
@pytest.mark.parametrize(("N", "dtype"), [(5, torch.float32), (0, torch.bfloat16)], ids=str)
def test_the_operators_pass_opcheck(draw, device, reduction, N, dtype):
    inputs, weight, bias, *rest = arguments(draw, N, dtype, device, reduction=reduction)
    head = [each.detach().requires_grad_() for each in (inputs, weight, bias)]
    made = rules.GRADIENTS if reduction else 0
    for wanted in (made, made | ROW_OUTPUTS):
        torch.library.opcheck(ops.linear_cross_entropy.default, (*head, *rest, wanted))
    torch.library.opcheck(ops.linear_cross_entropy.default, (inputs, weight, None, *rest, ROW_OUTPUTS))
    rows = draw.logits(1, N, torch.float32, device)[0]
    loss = rows if reduction == 0 else torch.tensor(2.0, device=device)
    given = (inputs, weight, bias, *rest, rules.GRADIENTS)
    for came in ((loss, None, None), (None, rows, rows)):
        torch.library.opcheck(ops.linear_cross_entropy_backward.default, (*came, *given))


@pytest.mark.parametrize("reduction", range(3), ids=options.REDUCTIONS.__getitem__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_fakes_have_the_shapes_types_strides_and_devices_of_the_real_results(draw, device, reduction, dtype, bias):
    given = arguments(draw, 6, dtype, device, reduction=reduction, bias=bias, weight_dtype=torch.float32)
    loss = torch.ones(6 if reduction == 0 else (), device=device)
    for wanted in (0, ROW_OUTPUTS, rules.GRADIENTS, rules.GRAD_WEIGHT | options.LSE):
        real = [
            *ops.linear_cross_entropy(*given, wanted),
            *ops.linear_cross_entropy_backward(loss, None, None, *given, wanted),
        ]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given]
            came = mode.from_tensor(loss)
            fake = [
                *ops.linear_cross_entropy(*fakes, wanted),
                *ops.linear_cross_entropy_backward(came, None, None, *fakes, wanted),
            ]
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


class Names(TorchDispatchMode):
    """Collects the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen.add(function.name())
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dispatch_mode_sees_the_operators_and_eager_gives_the_same_bits(draw, device, reduction, dtype):
    head = [each.requires_grad_() for each in arguments(draw, 9, dtype, device)[:3]]
    labels = draw.labels(9, 20, device, ignored=0.2)

    def run():
        loss = chunked_linear_cross_entropy(
            head[0], head[1], labels, reduction=reduction, bias=head[2], chunk_size=4, return_lse=True
        )
        total = loss.loss.sum() * 2.0 + loss.lse.sum()
        return loss.loss, *torch.autograd.grad(total, head)

    with Names() as mode:
        watched = run()
    assert "greyhound::linear_cross_entropy" in mode.seen
    for ours, theirs in zip(run(), watched, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_not_wanted_is_empty(draw, device):
    for reduction in range(3):
        given = arguments(draw, 6, torch.float32, device, reduction=reduction)
        outputs = rules.Outputs(*ops.linear_cross_entropy(*given, options.ENTROPY | rules.GRAD_BIAS))
        there = {name for name, each in outputs._asdict().items() if each.numel()}
        assert there == {"loss", "entropy", "grad_bias"}


class Wrapped(torch.Tensor):
    """A tensor without memory of its own that hands every operator on and notes its name."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        cls.seen.append(function.name())
        unwrapped = tree_map(lambda each: each.inner if isinstance(each, cls) else each, (arguments, keywords or {}))
        results = function(*unwrapped[0], **unwrapped[1])
        return tree_map(lambda each: cls(each) if isinstance(each, torch.Tensor) else each, results)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_a_subclass_without_memory_of_its_own_gets_operators_to_hand_on(draw, device, options):
    inputs, weight = draw.logits(6, 4, torch.float32, device), draw.logits(10, 4, torch.float32, device)
    labels = draw.labels(6, 10, device)
    logits = inputs @ weight.t()
    assert torch.equal(
        cross_entropy(Wrapped(logits), labels, **options).inner, cross_entropy(logits, labels, **options)
    )
    expected = chunked_linear_cross_entropy(inputs, weight, labels, **options)
    for given in ((Wrapped(inputs), weight), (inputs, Wrapped(weight))):
        Wrapped.seen.clear()
        assert torch.equal(chunked_linear_cross_entropy(*given, labels, **options).inner, expected)
        assert "greyhound::linear_cross_entropy" in Wrapped.seen
