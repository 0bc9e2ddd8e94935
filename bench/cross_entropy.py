"""Cross entropy of logits: loss, or loss and gradient, per provider, shape and dtype.

    python -m bench.cross_entropy --shapes 8192x128256,8192x32000 --dtypes bf16 --providers copy,greyhound,torch,compile
    python -m bench.cross_entropy --grid full --graphs --budget 0.1 --minutes 8     the comparison with the peers
    python -m bench.cross_entropy --grid full --graphs --budget 0.1 --resume        what that run has left

Bytes an ideal kernel moves, with B rows, V columns and s bytes an element (labels and losses, 8 + 4 bytes a row, left
out):

    raw, fwd+bwd   2 B V s   the logits read once, the gradient written once: those of the copy
    fwd            B V s     the logits read once

so a `fwd` row may show more than the copy's speed. Each provider's result is checked in float64 before it is timed. One
that fails, or is wrong, gives a printed reason, no row, and exit code 1 at the end. What a provider does not support,
what does not fit the device's memory and what a grid leaves out (`bench.grids`) is skipped, with the reason.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench import graphs
from bench.cases import dtype_name, make_inputs, parse_dtypes, parse_shapes
from bench.check import Reference
from bench.grids import GRIDS, Cell, cells, runs_on
from bench.measure import OP, Measured, first_line, free, measure_provider, too_large
from bench.peers import OLDER_FOLDER, PROVIDERS, find_older_greyhound
from bench.provenance import Provenance, provenance
from bench.providers import Provider
from bench.results import FOLDER, MODES, ResultFile, Row, row_from
from bench.timer import DEFAULT_BUDGET_S, Timer
from bench.worker import Worker, WorkerFailed

DEFAULT_SHAPES = "8192x128256,8192x32000,4096x200064,256x128256"
DEFAULT_PROVIDERS = "copy,greyhound,torch,compile"
TABLE_ROWS = 200
"""A run with more rows leaves the table to `bench.report`."""

FREE_SHARE = 0.5
"""Memory that nothing uses is given back when the allocator holds more than this share of the device's."""

Pair = tuple[Provider, str]


def ideal_bytes(mode: str, rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Return the bytes that an ideal kernel moves; the module's docstring has the formula."""
    return (1 if mode == "fwd" else 2) * rows * vocab * dtype.itemsize


def parse_names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between, each one of `known`."""

    def parse(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(known)}, got {name!r}")
        return names

    return parse


def format_table(rows: Iterable[Row]) -> str:
    """Return the rows as text, grouped by shape and dtype, each group by mode and then fastest first."""
    header = (
        f"{'rows x vocab':>16} {'dtype':>8} {'mode':>7} {'provider':<14} {'of copy':>7} {'GB/s':>6} {'ms':>9}"
        f" {'low..high':>17} {'copy ms':>8} {'peak MiB':>9} {'host us':>8}"
    )
    lines = [header, "-" * len(header)]
    group = None
    order = {mode: place for place, mode in enumerate(MODES)}
    for row in sorted(rows, key=lambda row: (row.dtype, row.rows, row.vocab, order[row.mode], row.ms)):
        if group not in (None, (row.dtype, row.rows, row.vocab)):
            lines.append("")
        group = (row.dtype, row.rows, row.vocab)
        rate = ideal_bytes(row.mode, row.rows, row.vocab, getattr(torch, row.dtype)) / row.ms / 1e6
        peak = "" if row.peak_mib is None else f"{row.peak_mib:.1f}"
        host = "" if row.host_us is None else f"{row.host_us:.1f}"
        lines.append(
            f"{f'{row.rows} x {row.vocab}':>16} {row.dtype:>8} {row.mode:>7} {row.provider:<14} {row.of_copy:>7.3f}"
            f" {rate:>6.0f} {row.ms:>9.4f} {row.ms_low:>8.4f}..{row.ms_high:<7.4f} {row.copy_ms:>8.4f} {peak:>9}"
            f" {host:>8}"
        )
    return "\n".join(lines)


@dataclass
class Run:
    """One run of the benchmark: what it measures with, and what came of it."""

    timer: Timer
    about: Provenance
    file: ResultFile
    host_time: bool = False
    older: Worker | None = None
    """Measures the providers that need a process of their own; None where the older greyhound is not there."""
    flags: graphs.Flags = field(default_factory=dict)
    """Whether a CUDA graph can hold a call, as far as it is known."""
    shown: list[Row] = field(default_factory=list)
    """Rows for the table: those measured, and those found by `--resume`."""
    failures: list[str] = field(default_factory=list)
    missing: set[tuple[str, str]] = field(default_factory=set)
    """(provider, mode) whose package is not there; tried once."""

    def still_wanted(self, cell: Cell, pairs: list[Pair]) -> list[Pair]:
        """Return the providers and modes that have no row at this commit yet; the others' rows go to the table."""
        wanted = []
        for which, mode in pairs:
            there = self.file.find(self.key(cell, which, mode), self.about.commit)
            if there is None:
                wanted.append((which, mode))
            else:
                self.shown.append(there)
        return wanted

    def key(self, cell: Cell, which: Provider, mode: str) -> tuple[Any, ...]:
        """Return the key of the row that this measurement gives."""
        return (OP, which.name, mode, cell.shape.rows, cell.shape.vocab, dtype_name(cell.dtype), self.about.gpu)

    def check_graphs(self, pairs: list[Pair], device: str) -> None:
        """Find out which calls a CUDA graph can hold, and write it into the rows that this commit has already."""
        mine = [row for row in self.file.read() if self.file.find(row.key, self.about.commit)]
        self.flags = {(row.provider, row.mode): row.graph for row in mine if row.graph is not None}
        pairs = [(which, mode) for which, mode in pairs if which.name != "copy"]
        pairs = [(which, mode) for which, mode in pairs if (which.name, mode) not in self.flags]
        pairs = [(which, mode) for which, mode in pairs if self.older or not which.apart]

        def worker_for(which: Provider) -> Worker:
            return Worker(self.older.older_greyhound if which.apart and self.older else None, graphs.TIMEOUT_S)

        self.flags |= graphs.check(pairs, device, worker_for, lambda line: print(line, flush=True))
        changed = [self.with_flag(row) for row in mine if self.with_flag(row) != row]
        if changed:
            self.file.put(*changed)

    def with_flag(self, row: Row) -> Row:
        """Return the row with what is known of its provider and mode in a CUDA graph."""
        return replace(row, graph=self.flags.get((row.provider, row.mode), row.graph))

    def cell(self, cell: Cell, pairs: list[Pair]) -> None:
        """Measure every pair on one shape and write its row; a failure is noted and the others still run.

        Raises:
            RuntimeError: a kernel has left the device unusable.
        """
        shape, dtype = cell
        label = f"{shape} {dtype_name(dtype)}"
        device = self.timer.device
        modes: dict[str, list[str]] = {}
        for which, mode in pairs:
            if (which.name, mode) not in self.missing:
                modes.setdefault(which.name, []).append(mode)
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            for name in list(modes):
                reason = too_large(PROVIDERS[name], shape.rows, shape.vocab, dtype, memory)
                if reason:
                    skip(f"{name} {label}: {reason}")
                    del modes[name]
        if not modes:
            return
        try:
            inputs = make_inputs(shape, dtype, device)
            reference = Reference(inputs.logits, inputs.labels)
        except torch.OutOfMemoryError as error:
            self.fail(f"{label}: {first_line(error)}")
            return
        for name, wanted in modes.items():
            which = PROVIDERS[name]
            if which.apart:
                measured = self.measure_apart(which, wanted, cell)
            else:
                measured = measure_provider(
                    which, wanted, inputs, reference, self.timer, self.about, host_time=self.host_time
                )
            self.keep(which, label, measured)
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > FREE_SHARE * memory:
                free(device)
        del inputs, reference
        free(device)

    def measure_apart(self, which: Provider, modes: list[str], cell: Cell) -> Measured:
        """Return what a worker measures: like `measure_provider`, where the provider's package is found."""
        if self.older is None:
            reason = f"no folder {OLDER_FOLDER} on sys.path and no --older-greyhound"
            return Measured([], dict.fromkeys(modes, reason), {}, list(modes))
        request = {
            "job": "measure",
            "provider": which.name,
            "modes": modes,
            "dtype": dtype_name(cell.dtype),
            "device": str(self.timer.device),
            "budget_s": self.timer.budget_s,
            "host_time": self.host_time,
            "about": self.about._asdict(),
        }
        free(self.timer.device)  # the worker allocates from what this process leaves
        try:
            answer = self.older.ask({**request, **cell.shape._asdict()})
        except WorkerFailed as error:
            return Measured([], dict.fromkeys(modes, str(error)), {}, [])
        rows = [row_from(record) for record in answer["rows"]]
        return Measured(rows, answer["failures"], answer["unsupported"], answer["missing"])

    def keep(self, which: Provider, label: str, measured: Measured) -> None:
        """Write the rows, and print them and what went wrong."""
        rows = [self.with_flag(row) for row in measured.rows]
        if rows:
            self.file.put(*rows)
        self.shown += rows
        for row in rows:
            print(f"{which.name} {row.mode} {label}: {row.ms:.4f} ms, {row.of_copy:.3f} of the copy", flush=True)
        for modes, reason in by_reason(measured.unsupported):
            skip(f"{which.name} {modes} {label}: {reason}")
        for modes, reason in by_reason(measured.failures):
            self.fail(f"{which.name} {modes} {label}: {reason}")
        self.missing |= {(which.name, mode) for mode in measured.missing}

    def fail(self, reason: str) -> None:
        """Note a failure, and print it now."""
        self.failures.append(reason)
        print(f"FAILED {reason}", flush=True)


def by_reason(reasons: dict[str, str]) -> list[tuple[str, str]]:
    """Return (modes with commas between, reason) for each different reason of a dict from mode to reason."""
    return [
        (", ".join(mode for mode in reasons if reasons[mode] == reason), reason)
        for reason in dict.fromkeys(reasons.values())
    ]


def skip(reason: str) -> None:
    """Print what is not measured, and why."""
    print(f"skipped {reason}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--shapes", type=parse_shapes, help=f"ROWSxVOCAB[,...]; default {DEFAULT_SHAPES}")
    parser.add_argument("--dtypes", type=parse_dtypes, help="out of bf16, fp16, fp32; default bf16")
    parser.add_argument(
        "--grid",
        choices=GRIDS,
        help="the comparison's shapes and dtypes in place of --shapes and --dtypes, every provider unless --providers"
        " names some, and host times; compile and greyhound_0_1, which compile each shape for seconds, run on the core"
        " grid's cells only",
    )
    parser.add_argument(
        "--providers", type=parse_names(PROVIDERS), help=f"{', '.join(PROVIDERS)}; default {DEFAULT_PROVIDERS}"
    )
    parser.add_argument("--modes", type=parse_names(MODES), default=",".join(MODES), help=", ".join(MODES))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for one measurement")
    parser.add_argument("--minutes", type=float, help="begin no further shape after this time, and exit with 0")
    parser.add_argument("--host-time", action="store_true", help="also the host's time of one call, on small shapes")
    parser.add_argument("--graphs", action="store_true", help="also whether a CUDA graph can hold each call")
    parser.add_argument(
        "--older-greyhound",
        type=Path,
        metavar="DIR",
        help=f"unpacked wheel of greyhound-kernels 0.1.0; default: the first {OLDER_FOLDER} in a folder of sys.path",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="skip rows that are there for this commit")
    parser.add_argument("--commit", help="the source's commit, where git cannot tell")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the command line asks for, in the order in which they are measured."""
    if options.grid:
        return cells(options.grid)
    dtypes = options.dtypes or parse_dtypes("bf16")
    return [Cell(shape, dtype) for dtype in dtypes for shape in options.shapes or parse_shapes(DEFAULT_SHAPES)]


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and return the exit code: 1 if a provider failed."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench.cross_entropy", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.grid and (options.shapes or options.dtypes):
        parser.error("--grid has shapes and dtypes of its own")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    names = options.providers or (list(PROVIDERS) if options.grid else DEFAULT_PROVIDERS.split(","))
    pairs = [(PROVIDERS[name], mode) for name in names for mode in options.modes if mode in PROVIDERS[name].modes]
    about = provenance(device, options.commit)
    if about.commit is None:
        print("commit unknown: rows are written without one; --commit names it", flush=True)
    folder = find_older_greyhound(options.older_greyhound)
    older = Worker(folder) if folder else None
    file = ResultFile(options.out, about.gpu)
    run = Run(Timer(device, options.budget), about, file, options.host_time or options.grid is not None, older)
    left = 0
    try:
        if options.graphs:
            run.check_graphs(pairs, str(device))
        for cell in chosen_cells(options):
            wanted = [pair for pair in pairs if not options.grid or runs_on(pair[0].name, cell)]
            wanted = run.still_wanted(cell, wanted) if options.resume else wanted
            if wanted and options.minutes is not None and time.monotonic() - begin > options.minutes * 60:
                left += 1
            elif wanted:
                run.cell(cell, wanted)
    except RuntimeError as error:
        run.failures.append(f"the device is unusable, the run ends here: {first_line(error)}")
    finally:
        if older is not None:
            older.close()
    print(f"\n{about.gpu}, driver {about.driver}, torch {about.torch}, dsl {about.dsl}, commit {about.commit}")
    if len(run.shown) <= TABLE_ROWS:
        print(format_table(run.shown))
    for failure in run.failures:
        print(f"FAILED {failure}")
    if left:
        print(f"time is up, {left} cells left: --resume goes on with them")
    print(f"{len(run.shown)} rows in {file.path}, {len(run.failures)} failures, {time.monotonic() - begin:.0f} s")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
