"""`greyhound.kernels.shards`: what shards of one process tell, combined, against float64; no process group."""

import itertools

import pytest
import reference
import torch
from reference import Incoming

from greyhound.kernels import options, shards

IGNORED = -100
SPLITS = ((0, 100, 301), (0, 1, 300, 301), (0, 0, 301), (0, 8, 8, 301))


def cut(split, B, labels, device, **given):
    """Return (slice, loss, head) of each shard and all heads."""
    V = split[-1]
    parts = [slice(first, end) for first, end in itertools.pairwise(split)]
    heads = torch.tensor([shards.shard_head(B, p.stop - p.start, p.start, 7) for p in parts], dtype=torch.int32)
    heads = heads.to(device)
    defaults = {"z_loss_multiplier": 0.0, "label_smoothing": 0.0, "softcap": 0.0, "logit_scale": 1.0, "mean": True}
    numbers = defaults | given
    losses = [
        options.Loss(IGNORED, *numbers.values(), 0.0, None, None, None, options.Shard(part.start, V)) for part in parts
    ]
    return parts, losses, heads


def run(x, labels, split, **given):
    """Return (loss, gradient) of logits in shards, and what was told."""
    B = len(x)
    parts, losses, heads = cut(split, B, labels, x.device, **given)
    told = torch.cat(
        [
            shards.shard_sums(x[:, part], labels, loss, head)
            for part, loss, head in zip(parts, losses, heads, strict=True)
        ]
    )
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    row_sums, n_valid = shards.combine(told, heads, labels, losses[0], options.Results(loss=loss))
    one, gradient = torch.ones_like(loss), torch.full_like(x, 9.0)
    for part, each in zip(parts, losses, strict=True):
        each = each._replace(normalizer=n_valid.clamp(min=1.0))
        shards.shard_gradient(x[:, part], labels, gradient[:, part], each, one, row_sums)
    return loss, gradient, told, heads, losses[0]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("given", [{}, {"label_smoothing": 0.1}, {"z_loss_multiplier": 0.01}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shards_together_are_the_whole(draw, device, dtype, given, split):
    x, labels = draw.logits(9, 301, dtype, device, scale=3.0), draw.labels(9, 301, device, ignored=0.3)
    labels[:4] = torch.tensor([0, 300, split[1] % 301, max(split[1] - 1, 0)])  # the edges
    loss, gradient, *_ = run(x, labels, split, **given)
    terms, right = reference.gradient_with_options(
        x, labels, Incoming(torch.ones((), device=device), None, None), compute=torch.float64, reduction="mean", **given
    )
    torch.testing.assert_close(loss.double(), terms.loss, rtol=2e-6, atol=2e-6)
    eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), right, rtol=eps, atol=1e-8)


@pytest.mark.parametrize("place", range(4))
def test_a_head_that_is_not_the_expected_one_makes_every_row_nan(draw, device, place):
    x, labels = draw.logits(5, 301, torch.bfloat16, device), draw.labels(5, 301, device)
    *_, told, heads, loss = run(x, labels, (0, 100, 301))
    heads[1, place] += 1
    results = options.Results(row_loss=torch.empty(5, device=device), loss=torch.empty((), device=device))
    row_sums, _ = shards.combine(told, heads, labels, loss, results)
    assert results.row_loss.isnan().all()
    assert results.loss.isnan()
    assert row_sums[:, 1].isnan().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_shard_without_a_finite_logit_adds_nothing_and_takes_what_is_infinite(draw, device, smoothing):
    x, labels = draw.logits(3, 301, torch.bfloat16, device), torch.tensor([200, 50, 250], device=device)
    x[:, :100] = -float("inf")
    loss, gradient, *_ = run(x[:1], labels[:1], (0, 100, 301), label_smoothing=smoothing)
    exact = torch.nn.functional.cross_entropy(x[:1].double(), labels[:1])
    assert loss.isposinf() if smoothing else abs(float(loss) - float(exact)) < 1e-5
    assert gradient.isfinite().all()
    assert run(x[1:2], labels[1:2], (0, 100, 301))[0].isposinf()  # the target is in it
