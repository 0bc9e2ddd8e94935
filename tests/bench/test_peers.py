import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench.cases import Inputs, Shape, make_inputs
from bench.check import Reference
from bench.peers import OLDER_FOLDER, PROVIDERS, find_older_greyhound
from bench.providers import Unsupported
from bench.results import MODES

PEERS = ("liger", "liger_cute", "quack", "greyhound_0_1", "triton")


def inputs_of(vocab: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return make_inputs(Shape(6, vocab), dtype, torch.device("cpu"))


def loss_and_grad(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row losses, and the gradient of their sum, without autograd."""
    logits = logits.detach().double()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses, logits.softmax(1) - torch.nn.functional.one_hot(labels, logits.shape[1])


def package(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Put a module, and empty packages above it, where an import finds them."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    for length in range(2, len(parts) + 1):
        setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[".".join(parts[:length])])
    vars(sys.modules[name]).update(contents)


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's API on the CPU: gradients in place where the logits want one, the mean in the dtype of the logits."""

    def forward(logits, labels, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, z_loss,
                token_accuracy=False, predicted_tokens=False):  # fmt: skip
        assert (weight, ignore_index, softcap, reduction) == (None, -100, None, "mean")
        assert (lse_square_scale, label_smoothing, z_loss) == (0.0, 0.0, False)
        losses, grad = loss_and_grad(logits, labels)
        if logits.requires_grad:
            logits.detach().copy_(grad / len(logits))
        return losses.mean().to(logits.dtype), None, None, None, logits

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, *rest):
            loss, *others = forward(logits, *rest)
            ctx.save_for_backward(logits.detach())
            return loss, *others[:3]

        @staticmethod
        def backward(ctx, *incoming):
            return ctx.saved_tensors[0], *[None] * 10

    def liger_cross_entropy(logits, labels):
        return Function.apply(logits, labels, None, -100, 0.0, 0.0, "mean", None, False, False, False)[0]

    package(monkeypatch, "liger_kernel.transformers.functional", liger_cross_entropy=liger_cross_entropy)
    kept = sys.modules["liger_kernel.transformers.functional"]
    package(monkeypatch, "liger_kernel.ops.cutedsl.ops.cross_entropy", cross_entropy_forward=forward,
            LigerCrossEntropyFunction=Function)  # fmt: skip
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", kept)
    triton = ModuleType("liger_kernel.ops.cross_entropy")
    vars(triton)["cross_entropy_forward"] = forward
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", triton)


@pytest.fixture
def fake_quack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API of quack on the CPU."""

    def cross_entropy_fwd(x, target, *, return_dx=False, inplace_backward=False):
        losses, grad = loss_and_grad(x, target)
        assert return_dx
        return losses.float(), (x.copy_(grad) if inplace_backward else grad.to(x.dtype))

    contents = {"cross_entropy_fwd": cross_entropy_fwd, "cross_entropy": torch.nn.functional.cross_entropy}
    package(monkeypatch, "quack.cross_entropy", **contents)


@pytest.mark.usefixtures("fake_liger", "fake_quack")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["liger", "liger_cute", "quack"])
def test_a_peer_called_as_its_api_says_is_right_twice_and_leaves_the_inputs(name: str, mode: str) -> None:
    inputs = inputs_of(64)
    before = inputs.logits.clone()
    prepared = PROVIDERS[name].build(inputs, mode)
    for _ in range(2):
        outcome = prepared.result()
        assert outcome is not None
        assert (outcome.grad is None) == (mode == "fwd")
        Reference(*inputs).verify(outcome)
        prepared.run()
    assert torch.equal(inputs.logits, before)


@pytest.mark.usefixtures("fake_liger", "fake_quack")
@pytest.mark.parametrize("name", ["liger", "liger_cute", "quack"])
def test_a_raw_call_overwrites_logits_that_are_restored_before_the_next(name: str) -> None:
    prepared = PROVIDERS[name].build(inputs_of(64), "raw")
    assert prepared.restore is not None


@pytest.mark.parametrize(
    ("name", "vocab", "dtype"),
    [
        ("liger_cute", 4094, torch.bfloat16),
        ("liger_cute", 4094, torch.float32),
        ("quack", 50257, torch.bfloat16),
        ("quack", 32001, torch.float16),
    ],
)
def test_a_vocabulary_that_a_peer_cannot_take_is_refused_with_the_reason(
    name: str, vocab: int, dtype: torch.dtype
) -> None:
    with pytest.raises(Unsupported, match="vocabulary"):
        PROVIDERS[name].build(inputs_of(vocab, dtype), "raw")


@pytest.mark.usefixtures("fake_quack")
@pytest.mark.parametrize(("vocab", "dtype"), [(50257, torch.float32), (50258, torch.bfloat16)])
def test_what_a_peer_can_take_is_not_refused(vocab: int, dtype: torch.dtype) -> None:
    PROVIDERS["quack"].build(inputs_of(vocab, dtype), "raw")


def test_peers_have_all_modes_and_only_the_older_greyhound_runs_apart() -> None:
    assert {name for name in PROVIDERS if PROVIDERS[name].apart} == {"greyhound_0_1"}
    assert all(PROVIDERS[name].modes == MODES for name in PEERS)


def test_our_greyhound_is_never_timed_as_the_older_one() -> None:
    with pytest.raises(ImportError, match="not version"):
        PROVIDERS["greyhound_0_1"].build(inputs_of(64), "raw")


def test_the_older_greyhound_is_found_beside_the_packages(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(older.parent / "nothing"), str(older.parent)])
    assert older.name == OLDER_FOLDER
    assert find_older_greyhound() == older
    assert find_older_greyhound(older) == older


def test_a_folder_without_the_package_is_not_the_older_greyhound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / OLDER_FOLDER).mkdir()
    assert find_older_greyhound() is None
    assert find_older_greyhound(tmp_path) is None
