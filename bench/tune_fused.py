"""Sweep the fused kernels' plans: every kernel and every launch that fits, forced, as a share of the copy.

    python -m bench.tune_fused --shapes 8192x128256,8192x32000 --dtypes bf16 --clusters 4,8 --turns 1,2,3 --tail 0,0.5
    python -m bench.tune_fused --shapes 65536x2048 --kernel narrow,wide --slots 1,2
    python -m bench.tune_fused --shapes 8192x50257 --loss-only --places 4,8

Without `--kernel` those of the kind that serves a shape are swept. Each plan is checked, then timed in place with the
benchmark's timer; the copy is timed beside. An asterisk marks the plan that `plan.select_fused` chooses. Bytes of one
call with a gradient: B x V x (one read + one write), those of the copy; without one (`--loss-only`) half of that, so
its share of the copy may exceed 1.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.cases import Shape, dtype_name, make_inputs, parse_dtypes, parse_integers, parse_shapes
from bench.check import Mismatch, Outcome, Reference
from bench.timer import Timer, Timing
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import VECTOR_BYTES, Spec, sums_elements
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as kernels

DEFAULT_BUDGET_S = 0.2
KINDS = ("wide", "narrow", "held")
CPU_MULTIPROCESSORS = 132
"""Of the GPU that the CPU stands in for."""

Numbers = tuple[int, int, int, int, int, int]


class Plan(NamedTuple):
    """A kernel and the six numbers that it is launched with for a batch."""

    spec: Spec
    numbers: Numbers

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return "held" if self.spec.held else "narrow" if self.spec.narrow else "wide"

    def __str__(self) -> str:
        """Return it in words: who shares a row, and who takes how many."""
        a, blocks, b, c, d, smem_bytes = self.numbers
        name = f"{self.kind:<6} t{self.spec.threads}"
        if self.kind == "held":
            return f"{name} {self.spec.held}x{self.spec.lanes}, turns {a}"
        if self.kind == "narrow":
            return f"{name}, slots {a}, turns {c}, {smem_bytes / 1024:.1f} KiB"
        kept = self.spec.grad and not self.spec.streamed
        streamed = " streamed" if self.spec.streamed else ""
        places = "" if kept else f", places {places_of(self.spec, smem_bytes)}"
        tail = f"{b} x {c} + {blocks - b} x {d} rows"
        return f"{name}{streamed}, cluster {a}{places}, {tail}, {smem_bytes / 1024:.1f} KiB"


class ForcedLaunch(NamedTuple):
    """Stands in for the launch of a plan."""

    fixed: Numbers

    def numbers(self, B: int, multiprocessors: int) -> Numbers:
        """Return the same numbers for any batch."""
        return self.fixed


class Entry(NamedTuple):
    """One measured plan."""

    plan: Plan
    timing: Timing
    chosen: bool


class Refused(NamedTuple):
    """One plan that gave no time."""

    plan: Plan
    reason: str
    failed: bool
    """Whether that is an error rather than a plan that cannot exist."""


def places_of(spec: Spec, smem_bytes: int) -> int:
    """Return how many chunks the shared memory of a block of wide rows holds."""
    return (smem_bytes - plan.slice_offset_bytes(spec)) // (plan.STEPS * spec.threads * VECTOR_BYTES)


def wide_plan(
    arch: str, spec: Spec, V: int, B: int, cluster: int, turns: int, tail: int, *, tail_turns: int = 1, places: int = 0
) -> Plan:
    """Return the plan of wide rows whose clusters take `turns` rows each, but for the last ones.

    Args:
        arch: the arch.
        spec: a wide kernel.
        V: columns.
        B: rows.
        cluster: blocks that share a row.
        turns: rows of the clusters that come first.
        tail: rows, at least, of the clusters that come last.
        tail_turns: rows that each of those takes, a divisor of what is left.
        places: chunks that a block holds, where it does not keep its slice.
    """
    smem_bytes = plan.wide_launch(arch, spec, V, cluster, turns, places).smem_bytes
    long = max(0, B - tail) // turns if turns > 1 else 0
    rest = B - long * turns
    if rest % tail_turns:
        raise ValueError(f"tail_turns: expected a divisor of {rest}, got {tail_turns}")
    return Plan(spec, (cluster, long + rest // tail_turns, long, turns, tail_turns, smem_bytes))


def narrow_plan(spec: Spec, V: int, B: int, slots: int, turns: int) -> Plan:
    """Return the plan of narrow rows whose warps fetch `slots` rows at a time and take `turns` each."""
    launch = plan.narrow_launch(spec, V)
    smem_bytes = plan.narrow_slots_offset(launch.warps, slots) + launch.warps * slots * launch.slot_bytes
    return Plan(spec, (slots, -(-B // (launch.warps * turns)), launch.slot_bytes, turns, 0, smem_bytes))


def held_plan(spec: Spec, B: int, turns: int) -> Plan:
    """Return the plan of held rows whose groups of lanes take `turns` each."""
    return Plan(spec, (turns, -(-B // (spec.threads // spec.lanes * turns)), 0, 0, 0, 0))


def fits(arch: str, candidate: Plan, V: int) -> bool:
    """Return whether rows of V elements can be served like this: what a block holds, and what the arch grants."""
    spec, numbers = candidate
    if candidate.kind == "held":
        return spec.held * spec.lanes * spec.vector_elements >= V
    if candidate.kind == "narrow":
        return plan.fits(arch, spec, plan.narrow_launch(spec, V)._replace(smem_bytes=numbers[5]))
    launch = plan.wide_launch(arch, spec, V, numbers[0], numbers[3])
    return plan.fits(arch, spec, launch._replace(smem_bytes=numbers[5]))


def chosen_plan(arch: str, dtype: torch.dtype, V: int, grad: bool, B: int, multiprocessors: int) -> Plan:
    """Return the plan that a call takes."""
    spec, launch = plan.select_fused(arch, dtype_name(dtype), V, grad, B, multiprocessors)
    return Plan(spec, launch.numbers(B, multiprocessors))


@contextlib.contextmanager
def forced(taken: Plan) -> Iterator[None]:
    """Make every fused call of its kind, with a gradient or without, take this plan, whatever its shape: of those that
    it does not fit the result is wrong.
    """
    chosen = plan.select_fused

    def select(arch: str, dtype: str, columns: int, with_grad: bool, *rest: Any) -> tuple[Spec, Any]:
        if with_grad != taken.spec.grad:
            return chosen(arch, dtype, columns, with_grad, *rest)
        return taken.spec, ForcedLaunch(taken.numbers)

    kernels._compiled_fused.cache_clear()
    try:
        with mock.patch.object(plan, "select_fused", side_effect=select):
            yield
    finally:
        kernels._compiled_fused.cache_clear()


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep and return the exit code: 1 if a plan failed or gave a wrong result."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_fused", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=parse_shapes, required=True, help="ROWSxVOCAB[,...]")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16")
    parser.add_argument(
        "--kernel", type=parse_kinds, help=f"out of {','.join(KINDS)}; default: that of the shape's plan"
    )
    parser.add_argument("--clusters", type=parse_integers, default="1,2,4,8,16", help="wide: blocks that share a row")
    parser.add_argument(
        "--turns", type=parse_integers, default="1,2,4", help="rows a cluster, warp or group of lanes takes"
    )
    parser.add_argument("--tail", type=parse_shares, default="0.5", help="wide: rows taken singly at the end, in waves")
    parser.add_argument(
        "--places", type=parse_integers, default="4,8", help="wide, where slices are not kept: chunks held"
    )
    parser.add_argument("--slots", type=parse_integers, default="1,2", help="narrow: rows a warp fetches at a time")
    parser.add_argument("--loss-only", action="store_true", help="the kernels that write no gradient")
    parser.add_argument("--streamed", action="store_true", help="wide: also the kernel that reads the row twice")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for one measurement")
    parser.add_argument("--top", type=int, default=0, help="show only this many plans of a shape (0: all)")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    arch = target_arch(device)
    timer = Timer(device, options.budget)
    timed = failed = 0
    for dtype in options.dtypes:
        for shape in options.shapes:
            chosen = chosen_plan(
                arch, dtype, shape.vocab, not options.loss_only, shape.rows, multiprocessors_of(device)
            )
            asked = candidates(arch, shape, dtype, options, options.kernel or [chosen.kind], multiprocessors_of(device))
            copy_ms, entries, refused = sweep(arch, shape, dtype, chosen, asked, timer)
            print(format_sweep(shape, dtype, copy_ms, entries, refused, options.top), flush=True)
            failed += sum(entry.failed for entry in refused)
            timed += len(entries)
    print(f"{timed} plans timed, {failed} failed")
    return 1 if failed else 0


def parse_kinds(text: str) -> list[str]:
    """Return the kinds in text such as `wide,narrow`."""
    kinds = [part.strip() for part in text.split(",")]
    if not set(kinds) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"expected kinds out of {', '.join(KINDS)}, got {text!r}")
    return kinds


def parse_shares(text: str) -> list[float]:
    """Return the numbers from 0 on in text such as `0,0.5`."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(share >= 0 for share in shares):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 on with commas between, got {text!r}")
    return shares


def target_arch(device: torch.device) -> str:
    """Return the arch whose artifacts this device runs; the CPU stands in for sm_90a."""
    if device.type != "cuda":
        return "sm_90a"
    arch = _artifacts.arch_for_capability(*torch.cuda.get_device_capability(device))
    if arch is None:
        raise SystemExit(f"{torch.cuda.get_device_name(device)} has no compiled kernel")
    return str(arch)


def multiprocessors_of(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    if device.type != "cuda":
        return CPU_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def candidates(
    arch: str, shape: Shape, dtype: torch.dtype, options: argparse.Namespace, kinds: list[str], multiprocessors: int
) -> list[Plan]:
    """Return the plans that the command line asks for on one shape, fitting or not."""
    B, V = shape
    found = []
    for spec in plan.SPECS:
        if (spec.op, spec.dtype, spec.grad) != ("fused", dtype_name(dtype), not options.loss_only):
            continue
        if spec.options or (spec.streamed and not options.streamed):
            continue
        if spec.held and "held" in kinds:
            found += [held_plan(spec, B, turns) for turns in options.turns]
        elif spec.narrow and "narrow" in kinds:
            found += [narrow_plan(spec, V, B, *each) for each in itertools.product(options.slots, options.turns)]
        elif not spec.held and not spec.narrow and "wide" in kinds:
            kept = spec.grad and not spec.streamed
            for cluster, turns, waves, places in itertools.product(
                options.clusters, options.turns, options.tail, [0] if kept else options.places
            ):
                resident = plan.wide_launch(arch, spec, V, cluster, turns, places).resident
                tail = int(waves * max(1, multiprocessors * resident // cluster))
                found.append(wide_plan(arch, spec, V, B, cluster, turns, tail, places=places))
    return list(dict.fromkeys(found))


def sweep(
    arch: str, shape: Shape, dtype: torch.dtype, chosen: Plan, asked: list[Plan], timer: Timer
) -> tuple[float, list[Entry], list[Refused]]:
    """Return the copy's time, every plan checked and timed on one shape, best first, and those that gave no time.

    The chosen plan is timed too where it was not asked for.
    """
    device = timer.device
    inputs = make_inputs(shape, dtype, device)
    reference = Reference(inputs.logits, inputs.labels)
    work = torch.empty_like(inputs.logits)
    copy_ms = timer.measure(lambda: work.copy_(inputs.logits)).ms
    sums = torch.empty(sums_elements(shape.rows), dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    entries: list[Entry] = []
    refused: list[Refused] = []
    for candidate in dict.fromkeys([chosen, *asked]):
        if not fits(arch, candidate, shape.vocab):
            refused.append(Refused(candidate, "does not fit", failed=False))
            continue
        grad_logits = work if candidate.spec.grad else None

        def run(grad_logits: torch.Tensor | None = grad_logits) -> None:
            kernels.launch(work, inputs.labels, grad_logits, loss, sums, 0.0, -100, False, False)

        def restore() -> None:
            work.copy_(inputs.logits)

        try:
            with forced(candidate):
                restore()
                run()
                reference.verify(Outcome(sums[0] / sums[2].clamp(min=1.0), grad_logits, "sum"))
                timing = timer.measure(run, restore if candidate.spec.grad else None)
        except Mismatch as error:
            refused.append(Refused(candidate, f"wrong result: {error}", failed=True))
        except Exception as error:  # a plan that fails is reported and does not stop the others
            refused.append(Refused(candidate, f"{type(error).__name__}: {error}".splitlines()[0], failed=True))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises, and ends the run, where the device is left unusable
        else:
            entries.append(Entry(candidate, timing, candidate == chosen))
    return copy_ms, sorted(entries, key=lambda entry: entry.timing.ms), refused


def format_sweep(
    shape: Shape, dtype: torch.dtype, copy_ms: float, entries: list[Entry], refused: list[Refused], top: int = 0
) -> str:
    """Return the table of one shape, best first, then the plans that gave no time."""
    best = entries[0].timing.ms if entries else copy_ms
    lines = [f"{shape} {dtype_name(dtype)}   copy {copy_ms:.4f} ms   (* chosen by plan.select_fused)"]
    lines.append(f"  {'of copy':>8} {'of best':>8} {'ms':>9} {'low..high':>17}  plan")
    for place, entry in enumerate(entries):
        if top and place >= top and not entry.chosen:
            continue
        timing = entry.timing
        lines.append(
            f"{'*' if entry.chosen else ' '} {copy_ms / timing.ms:>8.3f} {best / timing.ms:>8.3f}"
            f" {timing.ms:>9.4f} {timing.ms_low:>8.4f}..{timing.ms_high:<7.4f}  {entry.plan}"
        )
    lines += [f"  does not fit: {entry.plan}" for entry in refused if not entry.failed]
    lines += [f"  FAILED {entry.plan}: {entry.reason}" for entry in refused if entry.failed]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
