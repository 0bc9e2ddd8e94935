"""The program that compute-sanitizer watches: every kernel, forced on shapes that are small and yet take every path.

    compute-sanitizer --tool memcheck python -m bench.sanitize_target
    compute-sanitizer --tool racecheck python -m bench.sanitize_target --groups narrow      (see `bench.gpu`)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck python -m bench.sanitize_target

Per dtype, each with rows back to back from an aligned base, and with rows one element apart from a base one element off
(in a buffer that ends with the last row, whose guards are looked at afterwards):

    wide       clusters of 1, 2, 8 and 16 blocks, kept, streamed and without a gradient, several rows a cluster
    narrow     one slot and two, several rows a warp
    held       every number of vectors and lanes, several rows a group of lanes
    scale      in backward, with a factor
    counts     of valid rows for a mean, and sums of losses, on both sides of where a cluster adds them
    options    every kind of kernel with options but the streamed one, for the loss and for its gradient, on narrow and
               on wide rows

and the plans that the library chooses, for `--vocabs`. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck sees where a
buffer ends, and initcheck what has never been written, where a block that is used again would count as written. Every
third row is ignored. Inputs are made, and results judged, on the CPU: the kernels watched are those of the library.
What goes to the device is filled, gaps between rows too, and outputs are copied back whole, so that initcheck also
names an element that no kernel wrote. Wrong labels run too, since they must not cause a wild access.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench.cases import DTYPES, SEED, Shape, dtype_name, parse_dtypes, parse_integers
from bench.check import Mismatch, Outcome, Reference
from bench.cross_entropy import parse_names
from bench.tune_fused import (
    Plan,
    chosen_plan,
    fits,
    forced,
    held_plan,
    multiprocessors_of,
    narrow_plan,
    target_arch,
    wide_plan,
)
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Spec
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

DEFAULT_VOCABS = "1,257,1031"
"""For the library's own choice: less than a vector, and odd sizes."""

CLUSTERS = (1, 2, 8, 16)
GROUPS = ("chosen", "narrow", "wide", "streamed", "held", "sums", "options")
"""Kinds of cases; those of a kernel are the forced ones."""

OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"logit_scale": 0.5, "return_lse": True, "return_predicted_tokens": True},
    "softcap": {"softcap": 5.0, "return_token_accuracy": True},
    "smoothing": {"label_smoothing": 0.1, "return_z_loss": True, "z_loss_multiplier": 1e-3},
    "entropy": {"return_entropy": True},
    "any": {"softcap": 5.0, "label_smoothing": 0.1, "return_entropy": True, "return_predicted_tokens": True},
}
"""Arguments that take each kind of kernel; class weights are added to the last."""

OPTIONS_VOCABS = (257, 9001)
"""Narrow and wide."""

IGNORE_INDEX = -100
LAYOUTS = ((0, 0), (1, 1))
"""(elements before the first row, elements between two rows)."""

GUARD = 7.0
"""Value of the buffer's elements that belong to no row."""


class Case(NamedTuple):
    """Rows, and the plan that they are forced to take; None for the library's choice."""

    shape: Shape
    plan: Plan | None


class Laid(NamedTuple):
    """Rows in a buffer on the device."""

    buffer: torch.Tensor
    rows: torch.Tensor


def main(arguments: list[str] | None = None) -> int:
    """Run every case and return the exit code: 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.sanitize_target", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabs", type=parse_integers, default=DEFAULT_VOCABS, help="for the plans that are chosen")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16,fp16,fp32", help=f"out of {', '.join(DTYPES)}")
    parser.add_argument("--rows", type=int, default=7)
    parser.add_argument(
        "--groups", type=parse_names(GROUPS), default=",".join(GROUPS), help=f"out of {', '.join(GROUPS)}"
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    arch = target_arch(device)
    plans: dict[str, None] = {}
    calls = 0
    wrong: list[str] = []
    for dtype in options.dtypes:
        cases = [Case(Shape(options.rows, vocab), None) for vocab in options.vocabs]
        cases += [*counted_cases(), *forced_cases(arch, dtype, options.rows), *sum_cases(arch, dtype)]
        for case in cases:
            if group_of(case) not in options.groups:
                continue
            # Said now: a run that is cut shows how far it came.
            print(f"{dtype_name(dtype)} {case.shape} {case.plan or 'chosen'}", flush=True)
            for before, between in LAYOUTS:
                calls += run_case(case, dtype, before, between, device, wrong)
            taken = case.plan or chosen_plan(
                arch, dtype, case.shape.vocab, True, case.shape.rows, multiprocessors_of(device)
            )
            plans[f"{case.shape} {taken}"] = None
        if "options" in options.groups:
            for vocab, kind, reduction in itertools.product(OPTIONS_VOCABS, OPTIONS, ("mean", "none")):
                print(f"{dtype_name(dtype)} {options.rows}x{vocab} options {kind}, {reduction}", flush=True)
                for before, between in LAYOUTS:
                    calls += run_options(
                        Shape(options.rows, vocab), dtype, kind, reduction, before, between, device, wrong
                    )
    print(f"plans: {'; '.join(plans)}")
    for reason in wrong:
        print(f"WRONG {reason}")
    print(f"{calls} calls on {device.type}, {len(wrong)} wrong results")
    return 1 if wrong else 0


def run_options(
    shape: Shape,
    dtype: torch.dtype,
    kind: str,
    reduction: str,
    before: int,
    between: int,
    device: torch.device,
    wrong: list[str],
) -> int:
    """Compare loss, gradient and all else of one kind of kernel with what the portable code gives on the CPU, add what
    is wrong to `wrong`, and return the number of calls.
    """
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.empty(shape).normal_(generator=generator).to(dtype)
    labels = torch.tensor([(0, IGNORE_INDEX, shape.vocab - 1)[row % 3] for row in range(shape.rows)])
    weights = torch.rand(shape.vocab, generator=generator), torch.rand(shape.rows, generator=generator)
    results = []
    laid = lay(logits, before, between, device)
    for rows in (laid.rows, logits.clone()):
        rows.requires_grad_()
        given: dict[str, Any] = {"z_loss_multiplier": 0.0, **OPTIONS[kind], "reduction": reduction}
        if kind == "any":
            given["weight"] = weights[0].to(rows.device)
        output: Any = cross_entropy(
            rows, labels.to(rows.device), IGNORE_INDEX, row_weight=weights[1].to(rows.device), **given
        )
        outputs = [output] if isinstance(output, torch.Tensor) else [each for each in output if each is not None]
        total = torch.stack([each.sum() for each in outputs if each.requires_grad]).sum()
        results.append([each.detach().cpu().double() for each in (*outputs, *torch.autograd.grad(total, rows))])
    rounding = torch.finfo(dtype).eps
    for number, (got, expected) in enumerate(zip(*results, strict=True)):
        slack = 1e-4 + 1e-5 * expected.abs() + (rounding * expected.abs() if number == len(results[0]) - 1 else 0.0)
        if bool(((got - expected).abs() > slack).any()):
            wrong.append(f"options {kind}, {reduction}, {shape} {dtype_name(dtype)} {before} before: result {number}")
    if not torch.equal(laid.rows.detach().cpu(), logits) or not guards_stand(laid, before, between):
        wrong.append(f"options {kind}, {shape} {dtype_name(dtype)}: the logits changed")
    return 1


def specs_of(dtype: torch.dtype) -> list[Spec]:
    """Return the fused kernels of a dtype without options, whose plans can be forced."""
    return [spec for spec in plan.SPECS if spec.op == "fused" and spec.dtype == dtype_name(dtype) and not spec.options]


def forced_cases(arch: str, dtype: torch.dtype, rows: int) -> Iterator[Case]:
    """Yield every kernel with plans that take several rows in turn, use places again, and share rows every way."""
    for spec in specs_of(dtype):
        chunk = plan.STEPS * spec.threads * spec.vector_elements
        if spec.held:
            vocab = spec.held * spec.lanes * spec.vector_elements - 1
            yield from (Case(Shape(rows, vocab), held_plan(spec, rows, turns)) for turns in (1, 3))
        elif spec.narrow:
            # More than the vectors that a warp takes at a time, and none of its parts whole.
            vocab = 3 * plan.STEPS * plan.WARP * spec.vector_elements // 2 + 1
            for slots, turns in ((1, 1), (1, 3), (2, 3)):
                yield Case(Shape(rows, vocab), narrow_plan(spec, vocab, rows, slots, turns))
        else:
            kept = spec.grad and not spec.streamed
            for cluster in CLUSTERS:
                # Chunks of a slice: two and a part, of which a block that does not keep them holds two.
                vocab = cluster * 2 * chunk + chunk // 4 + 1 if cluster == 1 else cluster * chunk + chunk + 1
                for turns, tail in ((1, 0), (3, 1)):
                    taken = wide_plan(arch, spec, vocab, rows, cluster, turns, tail, places=0 if kept else 2)
                    if fits(arch, taken, vocab):
                        yield Case(Shape(rows, vocab), taken)


def group_of(case: Case) -> str:
    """Return which of `GROUPS` a case belongs to."""
    if case.plan is None:
        return "chosen"
    spec = case.plan.spec
    if case.shape.rows >= plan.SUM_CLUSTER_ENTRIES - 1:
        return "sums"
    return "held" if spec.held else "narrow" if spec.narrow else "streamed" if spec.streamed else "wide"


def counted_cases() -> Iterator[Case]:
    """Yield batches whose labels a kernel counts before the rows, with one block and with several."""
    yield from (Case(Shape(rows, 9), None) for rows in (plan.FEW_LABELS + 1, plan.SUM_CLUSTER_ENTRIES))


def sum_cases(arch: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield batches on both sides of where several blocks add the entries, an entry a row."""
    vocab = 9
    for spec in specs_of(dtype):
        if spec.grad and not (spec.held or spec.narrow or spec.streamed):
            for rows in (plan.SUM_CLUSTER_ENTRIES - 1, plan.SUM_CLUSTER_ENTRIES):
                yield Case(Shape(rows, vocab), wide_plan(arch, spec, vocab, rows, 1, 8, 0))


def run_case(case: Case, dtype: torch.dtype, before: int, between: int, device: torch.device, wrong: list[str]) -> int:
    """Run every call that a case serves on one layout, add what is wrong to `wrong`, and return the number of calls."""
    taken = contextlib.nullcontext() if case.plan is None else forced(case.plan)
    with_grad = case.plan is None or case.plan.spec.grad
    loss_only = case.plan is None or not case.plan.spec.grad
    with taken:
        return run_calls(case, dtype, before, between, device, wrong, with_grad=with_grad, loss_only=loss_only)


def run_calls(
    case: Case,
    dtype: torch.dtype,
    before: int,
    between: int,
    device: torch.device,
    wrong: list[str],
    *,
    with_grad: bool,
    loss_only: bool,
) -> int:
    """Run the calls with a gradient, those without, or both."""
    rows, vocab = case.shape
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.empty(rows, vocab).normal_(generator=generator).to(dtype)
    labels = torch.tensor([(0, IGNORE_INDEX, vocab - 1)[row % 3] for row in range(rows)])
    valid = labels != IGNORE_INDEX
    reference = Reference(logits[valid], labels[valid])
    on_device = labels.to(device)
    how = "chosen" if case.plan is None else str(case.plan)
    name = f"{case.shape} {dtype_name(dtype)} {before} before, {between} between, {how}"
    calls = 0

    def judge(call: str, mean_loss: torch.Tensor, grad: torch.Tensor | None, grad_of: str) -> None:
        nonlocal calls
        calls += 1
        try:
            reference.verify(Outcome(mean_loss.detach().cpu(), None if grad is None else grad[valid], grad_of))
            if grad is not None and bool((grad[~valid] != 0).any()):
                raise Mismatch("an ignored row's gradient is not 0")
        except Mismatch as error:
            wrong.append(f"{call}, {name}: {error}")

    wrong_labels: tuple[int, ...] = (vocab, -1, 2**40) if case.plan is None else (vocab,)
    if device.type == "cpu":  # where they are an IndexError
        wrong_labels = ()
    if with_grad:
        laid = lay(logits, before, between, device)
        ce_sum, _, n_valid = cross_entropy_with_grad_kernel(laid.rows, on_device)
        judge("raw", ce_sum.cpu() / n_valid.cpu(), laid.rows.cpu(), "sum")
        if not guards_stand(laid, before, between):
            wrong.append(f"raw, {name}: wrote outside its rows")
        # Out of place: the gradient's rows follow one another from an aligned base, whatever the logits' do. A mean
        # counts first, and a factor of 2 takes the kernel that scales in backward past its early return.
        laid = lay(logits, before, between, device)
        laid.rows.requires_grad_()
        loss = cross_entropy(laid.rows, on_device)
        (grad,) = torch.autograd.grad(loss, laid.rows, torch.tensor(2.0).to(device))
        judge("fwd+bwd", loss, grad.cpu() / 2.0, "mean")
        if not torch.equal(laid.rows.detach().cpu(), logits):
            wrong.append(f"fwd+bwd, {name}: the logits changed")
        for label in wrong_labels:
            laid = lay(logits, before, between, device)
            ce_sum, _, _ = cross_entropy_with_grad_kernel(laid.rows, torch.full((rows,), label).to(device))
            calls += 1
            if not (ce_sum.isnan().cpu() and laid.rows.cpu().isnan().all()):
                wrong.append(f"raw, {name}: label {label} did not give NaN")
    if loss_only:
        laid = lay(logits, before, between, device)
        with torch.no_grad():
            judge("fwd", cross_entropy(laid.rows, on_device), None, "mean")
            for label in wrong_labels:
                loss = cross_entropy(laid.rows, torch.full((rows,), label).to(device))
                calls += 1
                if not loss.isnan().cpu():
                    wrong.append(f"fwd, {name}: label {label} did not give NaN")
        if not torch.equal(laid.rows.cpu(), logits):
            wrong.append(f"fwd, {name}: the logits changed")
    return calls


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
