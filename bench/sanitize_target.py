"""The program that compute-sanitizer watches: the raw helper and the function on small shapes that reach every plan.

    compute-sanitizer --tool memcheck python -m bench.sanitize_target

For each dtype and vocabulary: rows back to back from an aligned base, then rows one element apart from a base one
element off, in a buffer that ends with the last row, whose guards are looked at afterwards. (With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck sees the end of the buffer too, and reports the granules that reach past it.)
Every third row is ignored. Inputs are made, and results judged, on the CPU: the kernels watched are those of the
library. Wrong labels run too, since they must not cause a wild access.
"""

import argparse
import sys
from typing import NamedTuple

import torch

from bench.cases import DTYPES, SEED, dtype_name, parse_dtypes, parse_integers
from bench.check import Mismatch, Outcome, Reference
from bench.tune_fused import target_arch
from dsl_kernels.cross_entropy import plan
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

DEFAULT_VOCABS = "1,3,127,1000,4097,33001,70001,140001,270001,530001,1000000,2000003"
"""Odd and even sizes in every block size and every cluster from 1 to 16, and rows that no cluster holds."""

MANY_ROWS = 2 * plan.SUM_CLUSTER_ROWS + 1
IGNORE_INDEX = -100
LAYOUTS = ((0, 0), (1, 1))
"""(elements before the first row, elements between two rows)."""

GUARD = 7.0
"""Value of the buffer's elements that belong to no row."""


class Laid(NamedTuple):
    """Rows in a buffer on the device."""

    buffer: torch.Tensor
    rows: torch.Tensor


def main(arguments: list[str] | None = None) -> int:
    """Run every case and return the exit code: 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.sanitize_target", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabs", type=parse_integers, default=DEFAULT_VOCABS)
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16,fp16,fp32", help=f"out of {', '.join(DTYPES)}")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    arch = target_arch(device)
    # Clusters take rows in turn, as they do in large batches: the next row is fetched while the last is written.
    plan.TURNS_MIN_BLOCKS = 0.001  # type: ignore[assignment]
    plans = set()
    calls = 0
    wrong: list[str] = []
    for dtype in options.dtypes:
        for vocab in options.vocabs:
            spec, launch = plan.select_fused(arch, dtype_name(dtype), vocab, True)
            plans.add("streamed" if spec.streamed else f"{spec.threads}x{launch.cluster}")
            for before, between in LAYOUTS:
                calls += run_case(options.rows, vocab, dtype, before, between, device, wrong)
    # Enough rows for several a cluster, and for their losses to be added by a cluster.
    calls += run_case(MANY_ROWS, 9, options.dtypes[0], *LAYOUTS[1], device, wrong)
    print(f"plans (threads x cluster): {', '.join(sorted(plans))}")
    for reason in wrong:
        print(f"WRONG {reason}")
    print(f"{calls} calls on {device.type}, {len(wrong)} wrong results")
    return 1 if wrong else 0


def run_case(
    rows: int, vocab: int, dtype: torch.dtype, before: int, between: int, device: torch.device, wrong: list[str]
) -> int:
    """Run every call on one layout, add what is wrong to `wrong`, and return the number of calls."""
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.empty(rows, vocab).normal_(generator=generator).to(dtype)
    labels = torch.tensor([(0, IGNORE_INDEX, vocab - 1)[row % 3] for row in range(rows)])
    valid = labels != IGNORE_INDEX
    reference = Reference(logits[valid], labels[valid])
    on_device = labels.to(device)
    name = f"{rows}x{vocab} {dtype_name(dtype)} {before} before, {between} between"

    def judge(call: str, mean_loss: torch.Tensor, grad: torch.Tensor | None, grad_of: str) -> None:
        try:
            reference.verify(Outcome(mean_loss.detach().cpu(), None if grad is None else grad[valid], grad_of))
            if grad is not None and bool((grad[~valid] != 0).any()):
                raise Mismatch("an ignored row's gradient is not 0")
        except Mismatch as error:
            wrong.append(f"{call}, {name}: {error}")

    laid = lay(logits, before, between, device)
    ce_sum, _, n_valid = cross_entropy_with_grad_kernel(laid.rows, on_device)
    judge("raw", ce_sum.cpu() / n_valid.cpu(), laid.rows.cpu(), "sum")
    if not guards_stand(laid, before, between):
        wrong.append(f"raw, {name}: wrote outside its rows")

    laid = lay(logits, before, between, device)
    with torch.no_grad():
        judge("fwd", cross_entropy(laid.rows, on_device), None, "mean")
    laid.rows.requires_grad_()
    for factor in (1.0, 2.0):  # 2 takes the kernel that scales in backward past its early return
        loss = cross_entropy(laid.rows, on_device)
        (grad,) = torch.autograd.grad(loss, laid.rows, torch.tensor(factor).to(device))
        judge(f"fwd+bwd x {factor}", loss, grad.cpu() / factor, "mean")
    if not torch.equal(laid.rows.detach().cpu(), logits):
        wrong.append(f"fwd+bwd, {name}: the logits changed")
    if device.type == "cpu":  # where a wrong label is an IndexError
        return 4
    for label in (vocab, -1, 2**40):
        laid = lay(logits, before, between, device)
        ce_sum, _, _ = cross_entropy_with_grad_kernel(laid.rows, torch.full((rows,), label).to(device))
        if not (ce_sum.isnan().cpu() and laid.rows.cpu().isnan().all()):
            wrong.append(f"raw, {name}: label {label} did not give NaN")
    return 7


def lay(logits: torch.Tensor, before: int, between: int, device: torch.device) -> Laid:
    """Copy `logits` to the device, as rows `between` elements apart in a buffer that ends with the last row."""
    rows, vocab = logits.shape
    stride = vocab + between
    buffer = torch.full((before + (rows - 1) * stride + vocab,), GUARD, dtype=logits.dtype)
    buffer.as_strided((rows, vocab), (stride, 1), before).copy_(logits)
    buffer = buffer.to(device)
    return Laid(buffer, buffer.as_strided((rows, vocab), (stride, 1), before))


def guards_stand(laid: Laid, before: int, between: int) -> bool:
    """Return whether every element of the buffer that belongs to no row has kept its value."""
    buffer = laid.buffer.cpu()
    rows, vocab = laid.rows.shape
    buffer.as_strided((rows, vocab), (vocab + between, 1), before).fill_(GUARD)
    return bool((buffer == GUARD).all())


if __name__ == "__main__":
    sys.exit(main())
