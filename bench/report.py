"""The comparison as Markdown tables, and where Greyhound does not win.

    python -m bench.report                       the rows of the commit measured last
    python -m bench.report --commit abc,def      the rows of these commits
    python -m bench.report --shapes all          every shape with a row, in place of the core grid's

A ratio above 1 says how many times as long the peer takes. A cell without a row is empty: the run that made the rows
says why (not supported, not fit, failed).
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cases import Shape
from bench.grids import CORE
from bench.results import FOLDER, MODES, Row, Selection, read_folder, select_rows

OURS = "greyhound"
COPY = "copy"
NEAR = 0.05
"""A peer whose time exceeds ours by less than this share is listed as near."""


class Cell(NamedTuple):
    """What rows of different providers have in common."""

    rows: int
    vocab: int
    dtype: str
    mode: str


class Duel(NamedTuple):
    """One peer against Greyhound on one cell."""

    cell: Cell
    peer: str
    ratio: float
    """The peer's time over Greyhound's."""


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, Row]]:
    """Return cell -> provider -> row, the largest tensors first within a dtype, bf16 first."""
    table: dict[Cell, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: (row.dtype != "bfloat16", row.dtype, -row.rows * row.vocab, -row.rows)):
        table.setdefault(Cell(row.rows, row.vocab, row.dtype, row.mode), {})[row.provider] = row
    return table


def providers_in(rows: Iterable[Row], *, without: Sequence[str] = ()) -> list[str]:
    """Return the providers that have rows: Greyhound first, the others by name."""
    names = {row.provider for row in rows} - set(without)
    return sorted(names, key=lambda name: (name != OURS, name))


def duels(rows: Iterable[Row]) -> list[Duel]:
    """Return every peer's ratio on every cell that it shares with Greyhound, the smallest first."""
    found = [
        Duel(cell, name, row.ms / present[OURS].ms)
        for cell, present in by_cell(rows).items()
        if OURS in present
        for name, row in present.items()
        if name not in (OURS, COPY)
    ]
    return sorted(found, key=lambda duel: duel.ratio)


def faster_peers(rows: Iterable[Row]) -> list[Duel]:
    """Return where a peer takes less time than Greyhound."""
    return [duel for duel in duels(rows) if duel.ratio < 1.0]


def near_peers(rows: Iterable[Row]) -> list[Duel]:
    """Return where a peer takes as long as Greyhound or up to `NEAR` longer."""
    return [duel for duel in duels(rows) if 1.0 <= duel.ratio < 1.0 + NEAR]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns but the first are numbers, or `none` where there are no lines."""
    body = ["| " + " | ".join(line) + " |" for line in lines]
    if not body:
        return "none"
    return "\n".join(["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1), *body])


def cell_label(cell: Cell) -> str:
    """Return a cell's size and dtype."""
    return f"{cell.rows} x {cell.vocab} {short_dtype(cell.dtype)}"


def short_dtype(dtype: str) -> str:
    """Return the dtype's short name, e.g. `bf16`."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)


def share_table(rows: Sequence[Row], mode: str) -> str:
    """Return the share of the copy of each provider, a line a shape; the copy itself in milliseconds."""
    names = providers_in((row for row in rows if row.mode == mode), without=[COPY])
    lines = []
    for cell, present in by_cell(row for row in rows if row.mode == mode and row.provider in names).items():
        copy_ms = present.get(OURS, next(iter(present.values()))).copy_ms
        shares = [f"{present[name].of_copy:.2f}" if name in present else "" for name in names]
        lines.append([cell_label(cell), f"{copy_ms:.3f}", *shares])
    return markdown(["rows x vocabulary", "copy ms", *names], lines)


def ratio_table(rows: Sequence[Row], mode: str) -> str:
    """Return how many times as long as Greyhound each peer takes, a line a shape."""
    ratios = {(duel.cell, duel.peer): duel.ratio for duel in duels(row for row in rows if row.mode == mode)}
    names = [name for name in providers_in(rows) if any(name == peer for _, peer in ratios)]
    lines = []
    for cell, present in by_cell(row for row in rows if row.mode == mode).items():
        if OURS in present and any((cell, name) in ratios for name in names):
            shown = [f"{ratios[cell, name]:.2f}" if (cell, name) in ratios else "" for name in names]
            lines.append([cell_label(cell), f"{present[OURS].ms:.3f}", *shown])
    return markdown(["rows x vocabulary", f"{OURS} ms", *names], lines)


def host_table(rows: Sequence[Row]) -> str:
    """Return the host's microseconds of one call, a line a shape and mode."""
    timed = [row for row in rows if row.host_us is not None]
    names = providers_in(timed, without=[COPY])
    lines = []
    for cell, present in by_cell(timed).items():
        shown = [f"{present[name].host_us:.0f}" if name in present else "" for name in names]
        if any(shown):
            lines.append([f"{cell_label(cell)} {cell.mode}", *shown])
    return markdown(["rows x vocabulary", *names], lines)


def graph_table(rows: Sequence[Row]) -> str:
    """Return whether a CUDA graph can hold each provider's call, a line a provider."""
    known = {(row.provider, row.mode): row.graph for row in rows if row.graph is not None}
    words = {True: "yes", False: "no", None: ""}
    names = providers_in(row for row in rows if (row.provider, row.mode) in known)
    return markdown(["", *MODES], [[name, *(words[known.get((name, mode))] for mode in MODES)] for name in names])


def duel_lines(found: Sequence[Duel]) -> str:
    """Return a list item for each duel, or that there is none."""
    items = [f"- {cell_label(duel.cell)} {duel.cell.mode}: {duel.peer}, ratio {duel.ratio:.3f}" for duel in found]
    return "\n".join(items or ["none"])


def report(selection: Selection, shapes: Sequence[Shape] | None) -> str:
    """Return the whole report.

    Args:
        selection: the rows and what was left out of them.
        shapes: the shapes of the tables, None for all; the lists of lost and near cells always take every row.
    """
    rows = selection.rows
    shown = [row for row in rows if shapes is None or Shape(row.rows, row.vocab) in shapes]
    compared = len(duels(rows))
    parts = [f"# {selection.about}"]
    if selection.left_out:
        parts.append("Left out:\n" + "\n".join(f"- {line}" for line in selection.left_out))
    for mode in ("raw", "fwd+bwd", "fwd"):
        parts.append(f"## Share of the copy, {mode}\n\n{share_table(shown, mode)}")
    for mode in ("raw", "fwd+bwd", "fwd"):
        parts.append(f"## Peer's time over {OURS}'s, {mode}\n\n{ratio_table(shown, mode)}")
    parts.append(f"## Host microseconds of one call\n\n{host_table(rows)}")
    parts.append(f"## Fits a CUDA graph\n\n{graph_table(rows)}")
    faster, near = faster_peers(rows), near_peers(rows)
    parts.append(f"## A peer is faster: {len(faster)} of {compared}\n\n{duel_lines(faster)}")
    parts.append(f"## A peer is within {NEAR:.0%}: {len(near)} of {compared}\n\n{duel_lines(near)}")
    return "\n\n".join(parts)


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which rows are taken."""
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument(
        "--commit", help="take the rows of these commits, with commas between; default: the one measured last"
    )
    parser.add_argument("--gpu", help="a part of the GPU's name; default: the one with the most rows")


def selected(options: argparse.Namespace) -> Selection:
    """Return the rows that the command line asks for, or end the program with the reason."""
    commits = [part.strip() for part in options.commit.split(",")] if options.commit else None
    try:
        return select_rows(read_folder(options.results), commits, options.gpu)
    except ValueError as error:
        raise SystemExit(f"{options.results}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").split("\n")[0])
    add_selection_arguments(parser)
    parser.add_argument("--shapes", choices=("core", "all"), default="core", help="shapes of the tables")
    options = parser.parse_args(arguments)
    print(report(selected(options), CORE if options.shapes == "core" else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
