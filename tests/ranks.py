"""What each rank of a process group does in `test_distributed.py`: `python ranks.py RANK RANKS STORE DEVICE REPORT`.

Every `check_...` runs on all ranks, in the order of the file; the report says of each what it raised. A check that
fails on one rank must not leave the others waiting, so what may differ between ranks is gathered and judged by all.
"""

import gc
import inspect
import itertools
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from greyhound.distributed import (
    global_normalizer,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from greyhound.kernels import linear
from greyhound.nn import sharded
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

TIMEOUT = timedelta(seconds=60)
REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"z_loss_multiplier": 1e-2},
    {"label_smoothing": 0.1},
    {"softcap": 5.0, "logit_scale": 0.7},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss_multiplier": 1e-3},
    {"ignore_index": 7},
    {"row_weight": True, "label_smoothing": 1.0},
    {"normalizer": 13.0},
)


class Ranks:
    """A rank, and what it has of all columns."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.seed = 0

    def generator(self):
        """Return a generator that is the same on every rank, another one each time."""
        self.seed += 1
        return torch.Generator().manual_seed(self.seed)

    def cuts(self, V, kind="uneven"):
        """Return the (first, end) columns of each rank."""
        even = [rank * V // self.ranks for rank in range(self.ranks)] + [V]
        bounds = {
            "even": even,
            "uneven": [0, *(min(V, max(1, edge * 2 // 3)) for edge in even[1:-1]), V],
            "tiny": [0, *range(1, self.ranks), V],  # a column each, the last one has the rest
            "empty": [0, *(V for _ in range(self.ranks - 1)), V],  # the first one has all
        }[kind]
        return list(itertools.pairwise(bounds))

    def mine(self, V, kind="uneven"):
        """Return the columns of this rank."""
        return slice(*self.cuts(V, kind)[self.rank])

    def logits(self, B, V, dtype, scale=3.0):
        return (torch.randn(B, V, generator=self.generator()) * scale).to(dtype).to(self.device)

    def labels(self, B, V, ignore_index=-100):
        labels = torch.randint(0, V, (B,), generator=self.generator())
        labels[::5] = ignore_index
        return labels.to(self.device)

    def gathered(self, value):
        """Return what every rank has of an object."""
        found = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def all_raise(self, error, message, call):
        """Assert that the call raises on every rank, the same."""
        try:
            call()
            raised = "nothing"
        except error as caught:
            raised = str(caught)
        found = self.gathered(raised)
        assert all(message in each for each in found), found
        return found


def step(function, logits, target, grad, **options):
    """Return (loss, gradient)."""
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, target, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, grad.expand_as(loss))
    return loss.detach(), gradient


def assert_one_rounding(found, expected, dtype):
    """Assert that a gradient is within one rounding to its dtype, and fp32's own."""
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(found, expected, rtol=eps, atol=2e-8 if dtype != torch.float16 else 6e-8)


def bits(tensor):
    return tensor.detach().float().cpu().numpy().tobytes().hex()


# --- Vocabulary-parallel ----------------------------------------------------------------------------------------


def check_loss_and_gradient_are_those_of_the_whole_logits(ranks):
    V = 301
    for dtype in DTYPES:
        for options in OPTIONS:
            for reduction in REDUCTIONS:
                given = dict(options)
                if "normalizer" in given and reduction != "mean":
                    continue
                place = ranks.seed % 4
                part = ranks.mine(V, ("even", "uneven", "tiny", "empty")[place])
                B = 21 + place  # a rank may have as many columns in two of them
                x, t = ranks.logits(B, V, dtype), ranks.labels(B, V, given.get("ignore_index", -100))
                if "row_weight" in given:
                    given["row_weight"] = torch.randn(B, generator=ranks.generator()).to(ranks.device)
                grad = torch.randn(B, generator=ranks.generator()).to(ranks.device)
                grad = grad if reduction == "none" else grad[0]
                expected = step(cross_entropy, x, t, grad, reduction=reduction, inplace_backward=False, **given)
                found = step(vocab_parallel_cross_entropy, x[:, part], t, grad, reduction=reduction, **given)
                torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
                # A gradient of a sum that is kept is rounded once more by what comes in.
                whole = x.clone().requires_grad_()
                rows = cross_entropy(
                    whole, t, reduction="none", **{k: v for k, v in given.items() if k != "normalizer"}
                )
                size = {"none": torch.ones(()), "sum": torch.ones(())}.get(reduction)
                if size is None:
                    valid = (t != given.get("ignore_index", -100)).sum().clamp(min=1)
                    size = torch.tensor(float(given.get("normalizer", valid)))
                (right,) = torch.autograd.grad(rows, whole, (grad / size.to(ranks.device)).expand(B))
                assert_one_rounding(found[1], right[:, part], dtype)


def check_shards_as_wide_as_training_ones_are_right(ranks):
    """Wide rows and clusters on a GPU."""
    B, V = (64, 50257) if ranks.device.type == "cuda" else (3, 50257)
    for dtype in DTYPES:
        x, t = ranks.logits(B, V, dtype), ranks.labels(B, V)
        one = torch.ones((), device=ranks.device)
        for options in ({}, {"label_smoothing": 0.1, "softcap": 30.0, "z_loss_multiplier": 1e-4}):
            part = ranks.mine(V)
            expected = step(cross_entropy, x, t, one, **options)
            found = step(vocab_parallel_cross_entropy, x[:, part], t, one, **options)
            torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
            assert_one_rounding(found[1], expected[1][:, part], dtype)


def check_every_rank_gets_the_same_bits_every_time(ranks):
    x, t = ranks.logits(33, 1000, torch.bfloat16), ranks.labels(33, 1000)
    part = ranks.mine(1000)
    for reduction in REDUCTIONS:
        one = torch.ones((), device=ranks.device)
        runs = [
            step(vocab_parallel_cross_entropy, x[:, part], t, one, reduction=reduction, label_smoothing=0.1)
            for _ in range(5)
        ]
        assert len({bits(loss) for loss, _ in runs}) == 1
        assert len({bits(gradient) for _, gradient in runs}) == 1
        assert len(set(ranks.gathered(bits(runs[0][0])))) == 1


def check_hard_rows_are_right(ranks):
    """Each against float64, and NaN where PyTorch has it."""
    V = 96
    x = ranks.logits(10, V, torch.float32, 1.0)
    t = torch.arange(10, device=ranks.device) * 9 + 2
    x[0] = (x[0] * 8).round() / 8 + 1e5  # a common offset
    x[1, : V // 2] = -float("inf")  # whole shards without a finite logit
    x[1, V - 1] = 1.0
    t[1] = V - 1
    x[2, V // 2 :] = -float("inf")
    x[2, t[2]] = 3.0
    x[3] = -3e38
    x[3, t[3]] = -2.9e38
    x[4] = 0.0
    x[4, t[4]] = 14.0  # a confident row
    x[5] = -float("inf")  # no softmax
    x[6, 3] = float("nan")
    x[7, V - 3] = float("inf")
    x[8, t[8]] = -float("inf")  # an infinite loss
    t[9] = -100
    x[9] = float("nan")
    part, one = ranks.mine(V), torch.ones((), device=ranks.device)
    loss, gradient = step(vocab_parallel_cross_entropy, x[:, part], t, one, reduction="none")
    exact = x.double().requires_grad_()
    right = F.cross_entropy(exact, t, reduction="none")
    (right_gradient,) = torch.autograd.grad(right, exact, torch.ones_like(right))
    torch.testing.assert_close(loss, right.detach().float(), rtol=1e-6, atol=1e-6, equal_nan=True)
    right_gradient[9] = 0.0
    torch.testing.assert_close(gradient.double(), right_gradient[:, part], rtol=1e-5, atol=1e-7, equal_nan=True)


def check_without_a_valid_row_all_is_zero(ranks):
    x, t = ranks.logits(6, 50, torch.bfloat16), torch.full((6,), -100, device=ranks.device)
    part, one = ranks.mine(50), torch.ones((), device=ranks.device)
    for reduction in REDUCTIONS:
        loss, gradient = step(
            vocab_parallel_cross_entropy, x[:, part], t, one, reduction=reduction, z_loss_multiplier=0.1
        )
        assert (loss == 0).all()
        assert (gradient == 0).all()
    loss, gradient = step(vocab_parallel_cross_entropy, x[:0, part], t[:0], one)
    assert loss == 0
    assert gradient.shape == x[:0, part].shape


def check_a_target_that_no_rank_has_is_refused_or_nan(ranks):
    x, t = ranks.logits(4, 50, torch.float32), ranks.labels(4, 50)
    part, one = ranks.mine(50), torch.ones((), device=ranks.device)
    for wrong in (50, -1, 2**31):
        t[1] = wrong
        if ranks.device.type == "cpu":
            ranks.all_raise(IndexError, f"got {wrong} in row 1", lambda: vocab_parallel_cross_entropy(x[:, part], t))
        else:
            loss, gradient = step(vocab_parallel_cross_entropy, x[:, part], t, one, reduction="none")
            assert loss.isnan().tolist() == [False, True, False, False]
            assert gradient.isnan().any(dim=1).tolist() == [False, part.stop > part.start, False, False]


def check_leading_dimensions_strides_and_padding_are_as_without_shards(ranks):
    V, padding = 60, 3
    whole = ranks.logits(2 * 7, V, torch.bfloat16).reshape(2, 7, V)
    t = ranks.labels(14, V).reshape(2, 7).to(torch.int32)
    part, one = ranks.mine(V), torch.ones((), device=ranks.device)
    padded = torch.full((2, 7, part.stop - part.start + padding), 9.0, dtype=torch.bfloat16, device=ranks.device)
    padded[..., :-padding] = whole[..., part]
    expected = step(cross_entropy, whole, t, one, reduction="none")
    leaf = padded.requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf[..., :-padding], t, reduction="none")
    assert loss.shape == (2, 7)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(loss, expected[0], rtol=2e-6, atol=2e-6)
    assert_one_rounding(gradient[..., :-padding], expected[1][..., part], torch.bfloat16)
    assert (gradient[..., -padding:] == 0).all()


def check_what_comes_in_scales_the_gradient_whatever_it_is(ranks):
    x, t = ranks.logits(8, 90, torch.float32), ranks.labels(8, 90)
    part = ranks.mine(90)
    for came in (0.0, 3.0, 65536.0):
        grad = torch.tensor(came, device=ranks.device)
        expected, found = step(cross_entropy, x, t, grad), step(vocab_parallel_cross_entropy, x[:, part], t, grad)
        torch.testing.assert_close(found[1], expected[1][:, part], rtol=2e-5, atol=came * 1e-8)
    # A graph that is kept, with two gradients.
    leaf = x[:, part].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, t)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf, torch.tensor(2.0, device=ranks.device))
    torch.testing.assert_close(second, 2 * first, rtol=1e-6, atol=0.0)


def check_one_exchange_forward_and_none_backward(ranks):
    x, t = ranks.logits(8, 90, torch.float32), ranks.labels(8, 90)
    leaf = x[:, ranks.mine(90)].clone().requires_grad_()
    vocab_parallel_cross_entropy(leaf, t)  # the ranks compare their sizes
    calls = []
    gather, reduce = sharded._all_gather, dist.all_reduce
    sharded._all_gather = lambda out, given, group: (calls.append(given.numel()), gather(out, given, group))
    dist.all_reduce = lambda *arguments, **named: (calls.append("sum"), reduce(*arguments, **named))
    try:
        loss = vocab_parallel_cross_entropy(leaf, t)
        forward = list(calls)
        loss.backward()
    finally:
        sharded._all_gather, dist.all_reduce = gather, reduce
    assert forward == ([(8 + 1) * 4] if ranks.ranks > 1 else []), forward
    assert calls == forward


def check_logits_may_be_overwritten_in_backward(ranks):
    x, t = ranks.logits(8, 64, torch.bfloat16), ranks.labels(8, 64)
    part, one = ranks.mine(64), torch.ones((), device=ranks.device)
    expected = step(vocab_parallel_cross_entropy, x[:, part], t, one)[1]
    leaf = x[:, part].clone().requires_grad_()
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(logits, t, inplace=True)
    version = logits._version
    loss.backward()
    assert bits(logits.detach()) == bits(expected)
    assert logits._version > version
    assert bits(leaf.grad) == bits(expected)
    ranks.all_raise(ValueError, "inplace: expected logits that are not a leaf",
                    lambda: vocab_parallel_cross_entropy(leaf, t, inplace=True))  # fmt: skip


def check_without_gradients_there_is_a_loss(ranks):
    x, t = ranks.logits(8, 64, torch.bfloat16), ranks.labels(8, 64)
    with torch.no_grad():
        loss = vocab_parallel_cross_entropy(x[:, ranks.mine(64)].requires_grad_(), t)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy(x, t), rtol=2e-6, atol=2e-6)


def check_columns_may_lie_in_another_order_than_the_ranks(ranks):
    V = 100
    x, t, one = ranks.logits(9, V, torch.float32), ranks.labels(9, V), torch.ones((), device=ranks.device)
    first, end = ranks.cuts(V)[ranks.ranks - 1 - ranks.rank]
    expected = step(cross_entropy, x, t, one, label_smoothing=0.1)
    found = step(vocab_parallel_cross_entropy, x[:, first:end], t, one, vocab_start=first, label_smoothing=0.1)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
    assert_one_rounding(found[1], expected[1][:, first:end], torch.float32)


def check_results_of_collectives_that_are_still_to_come_are_waited_for(ranks):
    import torch.distributed._functional_collectives as functional

    x, t = ranks.logits(6, 40, torch.float32), ranks.labels(6, 40)
    if ranks.device.type == "cuda":
        return  # gloo's are not what NCCL's are there
    weights = functional.all_reduce(torch.full((6,), 2.0), "sum", dist.group.WORLD)
    assert type(weights) is not torch.Tensor
    expected = cross_entropy(x, t, row_weight=torch.full((6,), 2.0 * ranks.ranks), reduction="sum")
    found = vocab_parallel_cross_entropy(x[:, ranks.mine(40)], t, row_weight=weights, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def check_a_compiler_leaves_the_call_out(ranks):
    if ranks.device.type == "cuda":
        return
    x, t = ranks.logits(14, 40, torch.float32), ranks.labels(14, 40)
    local = x[:, ranks.mine(40)].clone()

    @torch.compile(backend="eager", dynamic=True)
    def doubled(logits, target):
        return 2 * vocab_parallel_cross_entropy(logits * 1, target)

    torch.testing.assert_close(doubled(local, t), 2 * cross_entropy(x, t), rtol=2e-6, atol=2e-6)


def check_a_wrong_target_of_one_rank_leaves_the_exchanges_in_step(ranks):
    if ranks.device.type == "cuda":
        return  # where it makes a row NaN instead
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x, t = ranks.logits(8 * ranks.ranks, 40, torch.float32), ranks.labels(8 * ranks.ranks, 40)
    local, wrong = x[:, ranks.mine(40)], t.clone()
    wrong[1] = 40 if ranks.rank == ranks.ranks - 1 else wrong[1]
    raised = False
    try:
        vocab_parallel_cross_entropy(local, wrong)
    except IndexError:
        raised = True
    assert raised == (ranks.rank == ranks.ranks - 1)
    torch.testing.assert_close(vocab_parallel_cross_entropy(local, t), cross_entropy(x, t), rtol=2e-6, atol=2e-6)
    mesh = init_device_mesh("cpu", (ranks.ranks,))
    rows, targets = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(t, mesh, [Shard(0)])
    mine = targets.to_local().clone()
    mine[2] = 40 if raised else mine[2]
    try:
        loss = cross_entropy(rows, mine)
    except IndexError:
        assert raised
    else:
        assert loss.isnan()
    torch.testing.assert_close(cross_entropy(rows, targets), cross_entropy(x, t), rtol=2e-6, atol=2e-6)


def check_a_group_that_is_destroyed_is_forgotten(ranks):
    group = dist.new_group()
    x, t = ranks.logits(15, 40, torch.float32), ranks.labels(15, 40)
    vocab_parallel_cross_entropy(x[:, ranks.mine(40)], t, group)
    known = len(sharded._layouts)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(sharded._layouts) == known - 1


# --- What does not fit --------------------------------------------------------------------------------------------


def check_what_does_not_fit_raises_on_every_rank(ranks):
    if ranks.ranks == 1:
        return
    B, V = 5, 40
    x, t = ranks.logits(B, V, torch.float32), ranks.labels(B, V)
    part = ranks.mine(V)
    local = x[:, part]
    last = ranks.rank == ranks.ranks - 1

    def refused(message, logits=local, target=t, **options):
        ranks.all_raise(ValueError, message, lambda: vocab_parallel_cross_entropy(logits, target, **options))

    refused("local_logits: expected the columns of each rank, got the same logits on all", x)
    refused("which overlap", x, vocab_start=0)
    # A head of zeros does not tell whether they are whole: later ones of the same shape do.
    vocab_parallel_cross_entropy(torch.zeros_like(x), t)
    refused("local_logits: expected the columns of each rank, got the same logits on all", x)
    refused("vocab_size: expected", torch.zeros_like(x), vocab_size=V)
    refused("which overlap", vocab_start=max(part.start - 1, 0))
    refused("which leave a gap", vocab_start=part.start + last)
    refused("vocab_start: expected it on every rank or on none", vocab_start=None if last else part.start)
    rows = B - 1 if last else B
    refused("target: expected as many rows on every rank", local[:rows], t[:rows])
    for name, value, other in (
        ("ignore_index", -100, -1),
        ("reduction", "mean", "sum"),
        ("label_smoothing", 0.1, 0.2),
        ("softcap", None, 5.0),
        ("logit_scale", 1.0, 2.0),
        ("z_loss_multiplier", 0.0, 0.1),
    ):
        rows = local[:, :] if ranks.seed % 2 else local.contiguous()
        fresh = ranks.logits(ranks.seed + 50, V, torch.float32)  # a shape that has not been met
        labels = ranks.labels(len(fresh), V)
        refused(f"{name}: expected the same on every rank", fresh[:, part], labels, **{name: other if last else value})
    # Where the shape has been met the loss is NaN.
    for name, value, other in (("label_smoothing", 0.1, 0.2), ("softcap", None, 5.0), ("z_loss_multiplier", 0.0, 0.1)):
        vocab_parallel_cross_entropy(local, t)
        assert vocab_parallel_cross_entropy(local, t, **{name: other if last else value}).isnan()
    # And nothing is remembered of what did not fit.
    torch.testing.assert_close(vocab_parallel_cross_entropy(local, t), cross_entropy(x, t), rtol=2e-6, atol=2e-6)


def check_shards_that_happen_to_be_alike_are_taken_where_their_place_is_said(ranks):
    local = ranks.logits(5, 20, torch.float32)
    whole, t = local.repeat(1, ranks.ranks), ranks.labels(5, 20 * ranks.ranks)
    found = vocab_parallel_cross_entropy(local, t, vocab_start=20 * ranks.rank)
    torch.testing.assert_close(found, cross_entropy(whole, t), rtol=2e-6, atol=2e-6)
    flat = torch.zeros(5, 20, device=ranks.device)  # nor are those of a head that is all zeros suspicious
    # Shards of the same rows, which some rank may have met as others' neighbours: `vocab_size` tells them apart.
    loss = vocab_parallel_cross_entropy(flat, t, vocab_size=20 * ranks.ranks)
    torch.testing.assert_close(loss, torch.tensor(20.0 * ranks.ranks, device=ranks.device).log(), rtol=2e-6, atol=0.0)


def check_ranks_at_calls_of_other_columns_get_nan_and_no_plausible_number(ranks):
    x, t = ranks.logits(11, 60, torch.float32), ranks.labels(11, 60)
    local = x[:, ranks.mine(60)].clone().requires_grad_()
    vocab_parallel_cross_entropy(local, t)
    known = sharded._layouts[dist.group.WORLD]
    key = (11, local.shape[1], None, None, local.device)
    layout = known[key]
    if ranks.rank == ranks.ranks - 1:  # as if it had met these columns beside others
        known[key] = layout._replace(head=layout.head + torch.tensor([0, 1, 0, 0], dtype=torch.int32).to(layout.head))
    try:
        for reduction in REDUCTIONS:
            loss = vocab_parallel_cross_entropy(local, t, reduction=reduction)
            (gradient,) = torch.autograd.grad(loss.sum(), local)
            assert loss.isnan().all()
            assert gradient[t != -100].isnan().all()
    finally:
        known[key] = layout
    torch.testing.assert_close(vocab_parallel_cross_entropy(local, t), cross_entropy(x, t), rtol=2e-6, atol=2e-6)


def check_a_vocab_size_that_is_not_that_of_all_ranks_is_refused(ranks):
    x, t = ranks.logits(12, 60, torch.float32), ranks.labels(12, 60)
    local = x[:, ranks.mine(60)]
    ranks.all_raise(ValueError, "vocab_size: expected 60, the columns of all ranks, got 61",
                    lambda: vocab_parallel_cross_entropy(local, t, vocab_size=61))  # fmt: skip
    ranks.all_raise(TypeError, "vocab_size: expected None or an int, got float",
                    lambda: vocab_parallel_cross_entropy(local, t, vocab_size=60.0))  # fmt: skip
    ranks.all_raise(ValueError, "vocab_start: expected 0 to 2147483647, got -1",
                    lambda: vocab_parallel_cross_entropy(local, t, vocab_start=-1))  # fmt: skip


def check_a_group_of_other_ranks_is_refused_and_its_own_is_right(ranks):
    if ranks.ranks < 3:
        return
    members = [0, 2]
    group = dist.new_group(members)
    x, t = ranks.logits(5, 40, torch.float32), ranks.labels(5, 40)
    error = None
    try:
        first = 0 if ranks.rank == 0 else 15
        loss = vocab_parallel_cross_entropy(x[:, first : 15 if ranks.rank == 0 else 40], t, group)
        torch.testing.assert_close(loss, cross_entropy(x, t), rtol=2e-6, atol=2e-6)
    except ValueError as caught:
        error = str(caught)
    assert (error is None) == (ranks.rank in members)
    assert error is None or "group: expected a group that this rank is in" in error


def check_wrong_arguments_are_named(ranks):
    x, t = ranks.logits(4, 40, torch.float32), ranks.labels(4, 40)
    part = ranks.mine(40)
    ranks.all_raise(ValueError, "target: expected shape (4,), that of local_logits without V, got (3,)",
                    lambda: vocab_parallel_cross_entropy(x[:, part], t[:3]))  # fmt: skip
    ranks.all_raise(ValueError, "local_logits: expected at least one column on some rank, got none",
                    lambda: vocab_parallel_cross_entropy(x[:, :0], t))  # fmt: skip
    ranks.all_raise(TypeError, "group: expected None or a torch.distributed.ProcessGroup, got str",
                    lambda: vocab_parallel_cross_entropy(x[:, part], t, "tensor"))  # fmt: skip
    ranks.all_raise(ValueError, "target: expected at least one tensor, got none", lambda: global_normalizer([]))
    for wrong in ([3], 3):
        ranks.all_raise(TypeError, "target: expected a torch.Tensor, got int",
                        lambda wrong=wrong: global_normalizer(wrong))  # fmt: skip
    ranks.all_raise(TypeError, "target: expected an integer dtype, got torch.float32",
                    lambda: global_normalizer(t.float()))  # fmt: skip


def check_a_shape_that_has_not_been_met_is_refused_in_a_capture(ranks):
    if ranks.device.type != "cuda":
        return
    x, t = ranks.logits(41, 40, torch.float32), ranks.labels(41, 40)
    torch.cuda.synchronize()

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            vocab_parallel_cross_entropy(x[:, ranks.mine(40)], t)

    ranks.all_raise(RuntimeError, "which no CUDA graph can hold; call once before the capture", capture)


# --- With the projection --------------------------------------------------------------------------------------------


def check_the_linear_form_is_that_of_the_whole_weight(ranks):
    N, H, V = 19, 24, 103
    for dtype in DTYPES:
        for options in OPTIONS[:5]:
            for reduction in REDUCTIONS:
                for chunk_size in (None, 6):
                    x = ranks.logits(N, H, dtype, 1.0)
                    weight, bias = ranks.logits(V, H, dtype, 0.3), ranks.logits(1, V, dtype, 1.0)[0]
                    t, part = ranks.labels(N, V), ranks.mine(V, "even")
                    grad = torch.randn(N, generator=ranks.generator()).to(ranks.device)
                    grad = grad if reduction == "none" else grad[0]

                    def run(function, weight, bias, x=x, t=t, grad=grad, **how):
                        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
                        loss = function(leaves[0], leaves[1], t, bias=leaves[2], **how)
                        return loss.detach(), *torch.autograd.grad(loss, leaves, grad.expand_as(loss))

                    how = {"reduction": reduction, "chunk_size": chunk_size, **options}
                    expected = run(chunked_linear_cross_entropy, weight, bias, **how)
                    found = run(vocab_parallel_linear_cross_entropy, weight[part], bias[part], **how)
                    right = (expected[0], expected[1], expected[2][part], expected[3][part])
                    eps = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
                    for each, other in zip(found, right, strict=True):
                        assert (each - other).float().norm() <= eps * other.float().norm() + 1e-6


def check_ranks_that_would_take_other_chunks_take_the_smallest(ranks):
    x, weight, t = (
        ranks.logits(23, 8, torch.float32, 1.0),
        ranks.logits(50, 8, torch.float32, 0.3),
        ranks.labels(23, 50),
    )
    loss = vocab_parallel_linear_cross_entropy(x, weight[ranks.mine(50, "even")], t, chunk_size=5 + 3 * ranks.rank)
    torch.testing.assert_close(loss, chunked_linear_cross_entropy(x, weight, t), rtol=1e-5, atol=1e-5)


def check_the_linear_form_may_train_and_evaluate_with_uneven_shards(ranks):
    """Whatever a rank alone would do for want of a gradient, it goes with the others."""
    x, weight, t = (
        ranks.logits(23, 8, torch.float32, 1.0),
        ranks.logits(70, 8, torch.float32, 0.3),
        ranks.labels(23, 70),
    )
    mine = weight[ranks.mine(70)].clone().requires_grad_(ranks.rank == 0)
    tiles, linear.SMALL_TILE_BYTES, linear.LEAST_ROWS, linear.ROW_MULTIPLE = linear.SMALL_TILE_BYTES, 2000, 1, 1
    try:
        for _ in range(2):
            for each in (mine, mine.detach()):
                loss = vocab_parallel_linear_cross_entropy(x, each, t)
                torch.testing.assert_close(loss, chunked_linear_cross_entropy(x, weight, t), rtol=1e-5, atol=1e-5)
                with torch.no_grad():
                    again = vocab_parallel_linear_cross_entropy(x, each, t)
                torch.testing.assert_close(again, loss.detach(), rtol=1e-5, atol=1e-5)
    finally:
        linear.SMALL_TILE_BYTES, linear.LEAST_ROWS, linear.ROW_MULTIPLE = tiles, 1024, 128


def check_the_linear_form_makes_what_is_wanted_alone(ranks):
    x, weight = ranks.logits(9, 8, torch.bfloat16, 1.0), ranks.logits(50, 8, torch.bfloat16, 0.3)
    t, part = ranks.labels(9, 50), ranks.mine(50, "even")
    expected = chunked_linear_cross_entropy(x, weight, t)
    for wants in ((True, False), (False, True), (False, False)):
        leaves = [each.clone().requires_grad_(want) for each, want in zip((x, weight[part]), wants, strict=True)]
        for accumulation in ("fp32", "weight"):
            loss = vocab_parallel_linear_cross_entropy(*leaves, t, chunk_size=4, grad_weight_accum_dtype=accumulation)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            assert loss.requires_grad == any(wants)
            if loss.requires_grad:
                loss.backward()
            assert [each.grad is not None for each in leaves] == list(wants)


# --- Ranks with rows of their own -------------------------------------------------------------------------------


def check_ranks_with_unequal_counts_and_micro_batches_train_as_one_batch(ranks):
    H, V, parts = 12, 40, 2
    layer = ranks.logits(V, H, torch.float32, 1.0)
    x, t = ranks.logits(8 * ranks.ranks * parts, H, torch.float32, 1.0), ranks.labels(8 * ranks.ranks * parts, V)
    t[: 8 * parts - 3] = -100  # rank 0 has few valid rows
    whole = layer.clone().requires_grad_()
    expected = cross_entropy(F.linear(x, whole), t)
    expected.backward()
    mine = slice(8 * parts * ranks.rank, 8 * parts * (ranks.rank + 1))
    rows, targets = x[mine].chunk(parts), t[mine].chunk(parts)
    for averaged in (True, False):
        normalizer = global_normalizer(targets, averaged=averaged)
        weight, total = layer.clone().requires_grad_(), torch.zeros((), device=ranks.device)
        for row, target in zip(rows, targets, strict=True):
            loss = cross_entropy(F.linear(row, weight), target, normalizer=normalizer)
            loss.backward()
            total += loss.detach()
        for each in (weight.grad, total):
            dist.all_reduce(each)
            if averaged:
                each /= ranks.ranks
        torch.testing.assert_close(weight.grad, whole.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
    nothing = global_normalizer(torch.full((3,), -100, device=ranks.device), averaged=False)
    assert nothing == 1


# --- DTensors -----------------------------------------------------------------------------------------------------


def check_a_dtensor_sharded_on_the_vocabulary_the_rows_or_neither_gives_what_the_whole_gives(ranks):
    if ranks.device.type == "cuda":
        return  # PyTorch's own gathers of CUDA tensors over gloo crash
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device.type, (ranks.ranks,))
    B, S, V = 2 * ranks.ranks + 1, 3, 37
    x, t = ranks.logits(B * S, V, torch.float32).reshape(B, S, V), ranks.labels(B * S, V).reshape(B, S)
    for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss_multiplier": 1e-2}, {"normalizer": 9.0}):
        for placement, of_target in ((Shard(2), Replicate()), (Shard(0), Shard(0)), (Replicate(), Replicate())):
            for reduction in ("mean", "sum") if "normalizer" not in options else ("mean",):
                whole = x.clone().requires_grad_()
                expected = cross_entropy(whole, t, reduction=reduction, **options)
                expected.backward()
                logits = distribute_tensor(x, mesh, [placement]).requires_grad_()
                target = distribute_tensor(t, mesh, [of_target])
                for given in (target, target.to_local()):
                    logits.grad = None
                    loss = cross_entropy(logits, given, reduction=reduction, **options)
                    assert type(loss) is torch.Tensor
                    loss.backward()
                    torch.testing.assert_close(loss, expected, rtol=3e-6, atol=3e-6)
                    torch.testing.assert_close(logits.grad.full_tensor(), whole.grad, rtol=2e-5, atol=1e-8)
    rows = cross_entropy(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(t, mesh, [Shard(0)]),
                         reduction="none")  # fmt: skip
    expected = distribute_tensor(cross_entropy(x, t, reduction="none"), mesh, [Shard(0)]).to_local()
    torch.testing.assert_close(rows, expected, rtol=2e-6, atol=2e-6)


def check_a_mesh_of_rows_and_columns_gives_what_the_whole_gives(ranks):
    if ranks.ranks != 4:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    x, t = ranks.logits(9, 50, torch.float32), ranks.labels(9, 50)
    t[:5] = -100
    t[1] = 3  # unequal counts
    whole = x.clone().requires_grad_()
    expected = cross_entropy(whole, t)
    expected.backward()
    logits = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    loss = cross_entropy(logits, distribute_tensor(t, mesh, [Shard(0), Replicate()]))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(logits.grad.full_tensor(), whole.grad, rtol=2e-5, atol=1e-8)


def check_other_dtensors_are_refused_by_name(ranks):
    if ranks.device.type == "cuda":
        return  # PyTorch's own gathers of CUDA tensors over gloo crash
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device.type, (ranks.ranks,))
    x, t = ranks.logits(4, 40, torch.float32), ranks.labels(4, 40)
    partial = DTensor.from_local(x, mesh, [Partial()])
    logits = distribute_tensor(x, mesh, [Shard(1)])
    ranks.all_raise(ValueError, "redistribute() it", lambda: cross_entropy(partial, t))
    ranks.all_raise(ValueError, "target: expected placements",
                    lambda: cross_entropy(logits, distribute_tensor(t, mesh, [Shard(0)])))  # fmt: skip
    ranks.all_raise(ValueError, "target: expected shape (4,)", lambda: cross_entropy(logits, t[:3]))
    ranks.all_raise(TypeError, "target: expected a torch.Tensor, got list", lambda: cross_entropy(logits, [1, 2, 3, 4]))
    rows = distribute_tensor(x, mesh, [Shard(0)])
    targets = distribute_tensor(t.float(), mesh, [Shard(0)])
    ranks.all_raise(TypeError, "target: expected dtype int64 or int32, got torch.float32",
                    lambda: cross_entropy(rows, targets))  # fmt: skip
    ranks.all_raise(ValueError, "weight: expected it only with plain logits",
                    lambda: cross_entropy(logits, t, weight=torch.ones(40)))  # fmt: skip
    ranks.all_raise(ValueError, "return_lse: expected it only with plain logits",
                    lambda: cross_entropy(logits, t, return_lse=True))  # fmt: skip
    ranks.all_raise(ValueError, "inplace: expected it only with plain logits",
                    lambda: cross_entropy(logits, t, inplace=True))  # fmt: skip
    ranks.all_raise(TypeError, "local_logits: expected a plain tensor, got a DTensor",
                    lambda: vocab_parallel_cross_entropy(logits, t))  # fmt: skip
    weight = distribute_tensor(x, mesh, [Replicate()])
    ranks.all_raise(TypeError, "weight: expected a plain tensor, got a DTensor; pass its full_tensor()",
                    lambda: chunked_linear_cross_entropy(x, weight, t))  # fmt: skip


CHECKS = [name for name, each in list(globals().items()) if name.startswith("check_") and inspect.isfunction(each)]


def main(arguments):
    rank, count, store, device, report = arguments
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count), timeout=TIMEOUT
    )
    ranks = Ranks(int(rank), int(count), torch.device(device))
    results = {}
    for name in CHECKS:
        print(name, flush=True)  # the last one, should the process die
        try:
            globals()[name](ranks)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc(limit=-4)
        # Ranks that a failure has left in another call would take this one's messages for its own.
        if any(ranks.gathered(results[name])):
            break
    Path(report).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
