"""Sweep the fused kernel's plans: every (threads, cluster, rows) that fits, forced, as a share of the copy.

    python -m bench.tune_fused --shapes 8192x128256,8192x32000 --dtypes bf16 --threads 128,256 --clusters 1,2,4 --rows
    1,2,4

Each plan is checked, then timed in place with the benchmark's timer; the copy is timed beside. An asterisk marks the
plan that `plan.select_fused` chooses. Bytes of one call with a gradient: B x V x (one read + one write), those of the
copy; without one (`--loss-only`) half of that, so its share of the copy may exceed 1.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

from bench.cases import Inputs, Shape, dtype_name, make_inputs, parse_dtypes, parse_integers, parse_shapes
from bench.check import Mismatch, Outcome, Reference
from bench.timer import Timer, Timing
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Spec
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as kernels

DEFAULT_BUDGET_S = 0.2


class Entry(NamedTuple):
    """One measured plan."""

    spec: Spec
    launch: plan.FusedLaunch
    timing: Timing
    chosen: bool


class Refused(NamedTuple):
    """One plan that gave no time."""

    spec: Spec
    cluster: int
    rows: int
    reason: str
    failed: bool
    """Whether that is an error rather than a plan that cannot exist."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep and return the exit code: 1 if a plan failed or gave a wrong result."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_fused", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=parse_shapes, required=True, help="ROWSxVOCAB[,...]")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16")
    parser.add_argument("--threads", type=parse_integers, default="128,256,512")
    parser.add_argument("--clusters", type=parse_integers, default="1,2,4,8,16")
    parser.add_argument("--rows", type=parse_integers, default="1,2,4", help="rows a cluster takes in turn")
    parser.add_argument("--loss-only", action="store_true", help="the specs that write no gradient")
    parser.add_argument("--streamed", action="store_true", help="also the spec that reads the row twice")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for one measurement")
    parser.add_argument("--top", type=int, default=0, help="show only this many plans of a shape (0: all)")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    arch = target_arch(device)
    timer = Timer(device, options.budget)
    specs = [(threads, False) for threads in options.threads]
    specs += [(plan.STREAM.threads, True)] if options.streamed else []
    timed = failed = 0
    for dtype in options.dtypes:
        for shape in options.shapes:
            candidates = [
                (
                    Spec("fused", dtype_name(dtype), threads, grad=not options.loss_only, streamed=streamed),
                    cluster,
                    rows,
                )
                for threads, streamed in specs
                for cluster in options.clusters
                for rows in options.rows
            ]
            copy_ms, entries, refused = sweep(arch, shape, dtype, candidates, timer)
            print(format_sweep(shape, dtype, copy_ms, entries, refused, options.top), flush=True)
            failed += sum(entry.failed for entry in refused)
            timed += len(entries)
    print(f"{timed} plans timed, {failed} failed")
    return 1 if failed else 0


def target_arch(device: torch.device) -> str:
    """Return the arch whose artifacts this device runs; the CPU stands in for sm_90a."""
    if device.type != "cuda":
        return "sm_90a"
    arch = _artifacts.arch_for_capability(*torch.cuda.get_device_capability(device))
    if arch is None:
        raise SystemExit(f"{torch.cuda.get_device_name(device)} has no compiled kernel")
    return str(arch)


def sweep(
    arch: str, shape: Shape, dtype: torch.dtype, candidates: list[tuple[Spec, int, int]], timer: Timer
) -> tuple[float, list[Entry], list[Refused]]:
    """Return the copy's time, every plan checked and timed on one shape, best first, and those that gave no time.

    The plan that `select_fused` chooses is added to the candidates.
    """
    device = timer.device
    inputs = make_inputs(shape, dtype, device)
    reference = Reference(inputs.logits, inputs.labels)
    work = torch.empty_like(inputs.logits)
    copy_ms = timer.measure(lambda: work.copy_(inputs.logits)).ms
    grad = candidates[0][0].grad
    chosen_spec, chosen_launch = plan.select_fused(arch, dtype_name(dtype), shape.vocab, grad)
    chosen = (chosen_spec, chosen_launch.cluster, chosen_launch.rows)
    entries: list[Entry] = []
    refused: list[Refused] = []
    for spec, cluster, rows in dict.fromkeys([chosen, *candidates]):
        launch = plan.fused_launch(spec, shape.vocab, cluster, rows)
        if not plan.fits(arch, spec, launch):
            refused.append(
                Refused(spec, cluster, rows, f"does not fit ({launch.smem_bytes} bytes a block)", failed=False)
            )
            continue
        try:
            run, outcome = forced_call(spec, launch, inputs, work)
            restore = (lambda: work.copy_(inputs.logits)) if spec.grad else None
            work.copy_(inputs.logits)
            reference.verify(outcome())
            timing = timer.measure(run, restore)
        except Mismatch as error:
            refused.append(Refused(spec, cluster, rows, f"wrong result: {error}", failed=True))
        except Exception as error:  # a plan that fails is reported and does not stop the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            refused.append(Refused(spec, cluster, rows, reason, failed=True))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises, and ends the run, where the device is left unusable
        else:
            entries.append(Entry(spec, launch, timing, (spec, cluster, rows) == chosen))
    kernels._compiled_fused.cache_clear()
    return copy_ms, sorted(entries, key=lambda entry: entry.timing.ms), refused


def forced_call(
    spec: Spec, launch: plan.FusedLaunch, inputs: Inputs, work: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    """Return a call of `kernels.launch`, in place on `work`, that takes this plan, and what it computed.

    While the second is called the plan stands in for `select_fused`; the calls after it use the one then looked up.
    """
    grad_logits = work if spec.grad else None
    sums = torch.empty(kernels.sums_elements(work.shape[0]), dtype=torch.float32, device=work.device)
    loss = sums[3]

    def run() -> None:
        kernels.launch(work, inputs.labels, grad_logits, loss, sums, 0.0, -100, False, False, 1.0)

    def outcome() -> Outcome:
        kernels._compiled_fused.cache_clear()
        with mock.patch.object(plan, "select_fused", return_value=(spec, launch)):
            run()
        return Outcome(sums[0] / sums[2].clamp(min=1.0), grad_logits, "sum")

    return run, outcome


def format_sweep(
    shape: Shape, dtype: torch.dtype, copy_ms: float, entries: list[Entry], refused: list[Refused], top: int = 0
) -> str:
    """Return the table of one shape, best first, then the plans that gave no time."""
    best = entries[0].timing.ms if entries else copy_ms
    lines = [f"{shape} {dtype_name(dtype)}   copy {copy_ms:.4f} ms   (* chosen by plan.select_fused)"]
    lines.append(
        f"  {'threads':>7} {'cluster':>7} {'rows':>4} {'smem KiB':>8} {'of copy':>8}"
        f" {'of best':>8} {'ms':>9} {'low..high':>17}"
    )
    for place, entry in enumerate(entries):
        if top and place >= top and not entry.chosen:
            continue
        timing = entry.timing
        lines.append(
            f"{'*' if entry.chosen else ' '} {entry.spec.threads:>7} {entry.launch.cluster:>7} {entry.launch.rows:>4}"
            f" {entry.launch.smem_bytes / 1024:>8.1f} {copy_ms / timing.ms:>8.3f} {best / timing.ms:>8.3f}"
            f" {timing.ms:>9.4f} {timing.ms_low:>8.4f}..{timing.ms_high:<7.4f}"
            f"{' streamed' if entry.spec.streamed else ''}"
        )
    unfit = [f"{entry.spec.threads}x{entry.cluster}x{entry.rows}" for entry in refused if not entry.failed]
    if unfit:
        lines.append(f"  does not fit (threads x cluster x rows): {', '.join(unfit)}")
    lines += [
        f"  FAILED {entry.spec.threads} threads, cluster {entry.cluster}, {entry.rows} rows: {entry.reason}"
        for entry in refused
        if entry.failed
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
