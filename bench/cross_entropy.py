"""Cross entropy of logits: loss, or loss and gradient, per provider, shape and dtype.

    python -m bench.cross_entropy --shapes 8192x128256,8192x32000 --dtypes bf16 --providers copy,greyhound,torch,compile

Bytes an ideal kernel moves, with B rows, V columns and s bytes an element (labels and losses, 8 + 4 bytes a row, left
out):

    raw, fwd+bwd   2 B V s   the logits read once, the gradient written once: those of the copy
    fwd            B V s     the logits read once

so a `fwd` row may show more than the copy's speed. Each provider's result is checked in float64 before it is timed. One
that fails, or is wrong, gives a printed reason, no row, and exit code 1 at the end.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.cases import Inputs, Shape, dtype_name, make_inputs, parse_dtypes, parse_shapes
from bench.check import Reference
from bench.memory import peak_mib
from bench.provenance import Provenance, provenance
from bench.providers import PROVIDERS, Provider
from bench.results import FOLDER, MODES, ResultFile, Row
from bench.timer import DEFAULT_BUDGET_S, Timer

OP = "cross_entropy"
DEFAULT_SHAPES = "8192x128256,8192x32000,4096x200064,256x128256"
DEFAULT_PROVIDERS = "copy,greyhound,torch,compile"
COPY_BUDGET_SHARE = 0.5
"""The copy beside each row takes this share of a measurement's budget."""


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


def measure(
    which: Provider,
    mode: str,
    inputs: Inputs,
    reference: Reference,
    timer: Timer,
    about: Provenance,
    *,
    host_time: bool,
) -> Row:
    """Check one provider in one mode, then time it, with the copy just before, and return its row.

    Raises:
        Mismatch: its result is wrong. Whatever else the provider raises passes through.
    """
    rows, vocab = inputs.logits.shape
    prepared = which.build(inputs, mode)
    outcome = prepared.result()
    if outcome is not None:
        reference.verify(outcome)
    del outcome
    peak = peak_mib(prepared.run, timer.device)
    copy = PROVIDERS["copy"].build(inputs, "raw")
    copy_timer = timer.with_budget(timer.budget_s * COPY_BUDGET_SHARE)
    copy_ms = copy_timer.measure(copy.run).ms
    del copy
    timing = timer.measure(prepared.run, prepared.restore)
    if which.name == "copy":
        copy_ms = timing.ms
    return Row(
        op=OP,
        provider=which.name,
        mode=mode,
        rows=rows,
        vocab=vocab,
        dtype=dtype_name(inputs.logits.dtype),
        ms=round(timing.ms, 5),
        ms_low=round(timing.ms_low, 5),
        ms_high=round(timing.ms_high, 5),
        copy_ms=round(copy_ms, 5),
        of_copy=round(copy_ms / timing.ms, 4),
        peak_mib=None if peak is None else round(peak, 1),
        host_us=round(timer.host_us(prepared.run), 1) if host_time else None,
        date=about.today(),
        **about._asdict(),
    )


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


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@dataclass(frozen=True)
class Run:
    """One run of the benchmark: what it measures with, and what came of it."""

    timer: Timer
    about: Provenance
    file: ResultFile
    host_time: bool
    shown: list[Row]
    """Rows for the table: those measured, and those found by `--resume`."""
    failures: list[str]

    def still_wanted(
        self, shape: Shape, dtype: torch.dtype, pairs: list[tuple[Provider, str]]
    ) -> list[tuple[Provider, str]]:
        """Return the providers and modes that have no row at this commit yet; the others' rows go to the table."""
        wanted = []
        for which, mode in pairs:
            key = (OP, which.name, mode, shape.rows, shape.vocab, dtype_name(dtype), self.about.gpu)
            there = self.file.find(key, self.about.commit)
            if there is None:
                wanted.append((which, mode))
            else:
                self.shown.append(there)
        return wanted

    def shape(self, shape: Shape, dtype: torch.dtype, pairs: list[tuple[Provider, str]]) -> None:
        """Measure every pair on one shape and write its row; a failure is noted and the others still run.

        Raises:
            RuntimeError: a kernel has left the device unusable.
        """
        label = f"{shape} {dtype_name(dtype)}"
        try:
            inputs = make_inputs(shape, dtype, self.timer.device)
            reference = Reference(inputs.logits, inputs.labels)
        except torch.OutOfMemoryError as error:
            self.fail(f"{label}: {first_line(error)}")
            return
        for which, mode in pairs:
            try:
                row = measure(which, mode, inputs, reference, self.timer, self.about, host_time=self.host_time)
            except Exception as error:
                self.fail(f"{which.name} {mode} {label}: {first_line(error)}")
            else:
                self.file.put(row)
                self.shown.append(row)
                print(f"{which.name} {mode} {label}: {row.ms:.4f} ms, {row.of_copy:.3f} of the copy", flush=True)
            gc.collect()
            if self.timer.device.type == "cuda":
                torch.cuda.synchronize(self.timer.device)
                torch.cuda.empty_cache()

    def fail(self, reason: str) -> None:
        """Note a failure, and print it now."""
        self.failures.append(reason)
        print(f"FAILED {reason}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--shapes", type=parse_shapes, default=DEFAULT_SHAPES, help="ROWSxVOCAB[,...]")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16", help="out of bf16, fp16, fp32")
    parser.add_argument(
        "--providers", type=parse_names(PROVIDERS), default=DEFAULT_PROVIDERS, help=", ".join(PROVIDERS)
    )
    parser.add_argument("--modes", type=parse_names(MODES), default=",".join(MODES), help=", ".join(MODES))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for one measurement")
    parser.add_argument("--host-time", action="store_true", help="also the host's time of one call")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="skip rows that are there for this commit")
    parser.add_argument("--commit", help="the source's commit, where git cannot tell")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and return the exit code: 1 if a provider failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cross_entropy", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device, options.budget)
    about = provenance(device, options.commit)
    if about.commit is None:
        print("commit unknown: rows are written without one; --commit names it", flush=True)
    file = ResultFile(options.out, about.gpu)
    run = Run(timer, about, file, options.host_time, [], [])
    pairs = [
        (PROVIDERS[name], mode) for name in options.providers for mode in options.modes if mode in PROVIDERS[name].modes
    ]
    try:
        for dtype in options.dtypes:
            for shape in options.shapes:
                wanted = run.still_wanted(shape, dtype, pairs) if options.resume else pairs
                if wanted:
                    run.shape(shape, dtype, wanted)
    except RuntimeError as error:
        run.failures.append(f"the device is unusable, the run ends here: {first_line(error)}")
    print(f"\n{about.gpu}, driver {about.driver}, torch {about.torch}, dsl {about.dsl}, commit {about.commit}")
    print(format_table(run.shown))
    for failure in run.failures:
        print(f"FAILED {failure}")
    print(f"{len(run.shown)} rows in {file.path}, {len(run.failures)} failures")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
