"""The comparison as pictures, from the rows in bench/results, into bench/results/plots.

python -m bench.plot                      the rows of the commit measured last
python -m bench.plot --commit abc,def     the rows of these commits

share.png       share of the copy's speed against the vocabulary, a panel for each mode, one number of rows
speedup.png     each peer's time over Greyhound's, raw and fwd+bwd, on the core shapes in bf16
host.png        the host's time of one call, where it weighs: on the smallest shape that has it
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cases import Shape
from bench.grids import CORE
from bench.report import COPY, OURS, add_selection_arguments, duels, providers_in, selected
from bench.results import MODES, Row, Selection

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WANTED_ROWS = 8192
DTYPE = "bfloat16"
DPI = 100
TIMES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Marks of the axis of ratios, as far as they lie within it."""

COLOURS = {
    OURS: "#111111",
    "quack": "#1f77b4",
    "liger": "#d62728",
    "liger_cute": "#ff7f0e",
    "torch": "#7f7f7f",
    "compile": "#9467bd",
    "greyhound_0_1": "#8c564b",
    "triton": "#2ca02c",
}
OTHER_COLOUR = "#17becf"


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, in inches, that needs no display.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"the pictures need matplotlib, the extra `bench` of this package: {error}") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", title: str, selection: Selection, path: Path) -> Path:
    """Write the figure under its title and what it was measured with."""
    figure.suptitle(f"{title}\n{selection.about}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def nearest_rows(rows: Sequence[Row]) -> int:
    """Return the number of rows nearest to `WANTED_ROWS`, in ratio, that has at least two vocabularies."""
    vocabs = defaultdict(set)
    for row in rows:
        vocabs[row.rows].add(row.vocab)
    candidates = [count for count, found in vocabs.items() if len(found) > 1] or list(vocabs)
    return min(candidates, key=lambda count: abs(math.log(count / WANTED_ROWS)))


def draw_share(selection: Selection, path: Path) -> Path:
    """Draw the share of the copy against the vocabulary, a panel for each mode."""
    rows = [row for row in selection.rows if row.dtype == DTYPE and row.provider != COPY]
    count = nearest_rows(rows)
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    figure = new_figure(4.2 * len(modes), 4.2)
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        for name in providers_in(rows):
            points = sorted(
                (row.vocab, row.of_copy) for row in rows if (row.rows, row.mode, row.provider) == (count, mode, name)
            )
            if points:
                ours = name == OURS
                panel.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=4 if ours else 3,
                    linewidth=2.2 if ours else 1.2,
                    color=COLOURS.get(name, OTHER_COLOUR),
                    zorder=3 if ours else 2,
                    label=name,
                )
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set_title(mode, fontsize=10)
        panel.set_xlabel("vocabulary")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the copy's speed (fwd moves half its bytes)", fontsize=8)
    legend(figure, panels)
    return save(figure, f"Share of the copy, {count} rows, bf16", selection, path)


def draw_speedup(selection: Selection, path: Path) -> Path:
    """Draw each peer's time over Greyhound's on the core shapes, a panel for raw and one for fwd+bwd."""
    rows = [row for row in selection.rows if row.dtype == DTYPE and Shape(row.rows, row.vocab) in CORE]
    figure = new_figure(11, 7)
    panels = figure.subplots(2, 1)
    for panel, mode in zip(panels, ("raw", "fwd+bwd"), strict=True):
        ratios = {
            (Shape(duel.cell.rows, duel.cell.vocab), duel.peer): duel.ratio
            for duel in duels(row for row in rows if row.mode == mode)
        }
        shapes = [shape for shape in CORE if any(shape == there for there, _ in ratios)]
        names = [name for name in providers_in(rows) if any(name == peer for _, peer in ratios)]
        width = 0.85 / max(len(names), 1)
        for place, name in enumerate(names):
            bars = [(at, ratios[shape, name]) for at, shape in enumerate(shapes) if (shape, name) in ratios]
            panel.bar(
                [at + (place - (len(names) - 1) / 2) * width for at, _ in bars],
                # from 1, which is a tie: a bar that hangs down is a peer that is faster
                [ratio - 1.0 for _, ratio in bars],
                width,
                bottom=1.0,
                color=COLOURS.get(name, OTHER_COLOUR),
                label=name,
            )
        panel.axhline(1.0, color="black", linewidth=1.0)
        panel.set_yscale("log", base=2)
        low, high = panel.get_ylim()
        panel.set_yticks([time for time in TIMES if low <= time <= high], minor=False)
        panel.set_ylim(low, high)
        panel.yaxis.set_major_formatter("{x:g}x")
        panel.set_xticks(range(len(shapes)), [f"{shape.rows}\nx {shape.vocab}" for shape in shapes], fontsize=7)
        panel.set_ylabel(f"{mode}: peer's time / {OURS}'s", fontsize=8)
        panel.grid(axis="y", alpha=0.3)
    legend(figure, panels)
    return save(figure, f"How many times as long a peer takes as {OURS}, bf16", selection, path)


def draw_host(selection: Selection, path: Path) -> Path | None:
    """Draw the host's time of one call, a group of bars for each mode; None, and no file, where no row has it."""
    timed = [row for row in selection.rows if row.dtype == DTYPE and row.host_us is not None and row.provider != COPY]
    if not timed:
        return None
    # The shape with the most providers, then the smallest: there the host's time is the whole time.
    shape = max(
        {(row.rows, row.vocab) for row in timed},
        key=lambda size: (len({row.provider for row in timed if (row.rows, row.vocab) == size}), -size[0] * size[1]),
    )
    timed = [row for row in timed if (row.rows, row.vocab) == shape]
    modes = [mode for mode in MODES if any(row.mode == mode for row in timed)]
    names = providers_in(timed)
    figure = new_figure(8, 4)
    panel = figure.subplots()
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        bars = [(modes.index(row.mode), row.host_us or 0.0) for row in timed if row.provider == name]
        drawn = panel.bar(
            [at + (place - (len(names) - 1) / 2) * width for at, _ in bars],
            [value for _, value in bars],
            width,
            color=COLOURS.get(name, OTHER_COLOUR),
            label=name,
        )
        panel.bar_label(drawn, fmt="%.0f", fontsize=6)
    panel.set_xticks(range(len(modes)), modes)
    panel.set_ylabel("host microseconds of one call")
    panel.grid(axis="y", alpha=0.3)
    legend(figure, [panel])
    return save(figure, f"Host time of one call, {shape[0]} x {shape[1]} bf16", selection, path)


def legend(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """Name every provider once, below the panels."""
    named: dict[str, Artist] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=8, fontsize=8, frameon=False)


def draw_all(selection: Selection, folder: Path) -> list[Path]:
    """Draw every picture that the rows allow and return the files."""
    drawn = [
        draw_share(selection, folder / "share.png"),
        draw_speedup(selection, folder / "speedup.png"),
        draw_host(selection, folder / "host.png"),
    ]
    return [path for path in drawn if path is not None]


def main(arguments: list[str] | None = None) -> int:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=(__doc__ or "").split("\n")[0])
    add_selection_arguments(parser)
    parser.add_argument("--out", type=Path, help="folder of the pictures; default: plots in the results' folder")
    options = parser.parse_args(arguments)
    selection = selected(options)
    for line in selection.left_out:
        print(f"left out: {line}")
    for path in draw_all(selection, options.out or options.results / "plots"):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
