"""Results as data: one JSON file per GPU, a list of rows, one line each.

    {op, provider, mode, rows, vocab, dtype, ms, ms_low, ms_high, copy_ms, of_copy, peak_mib, host_us, graph,
     gpu, driver, torch, dsl, commit, date}

`ms` is the median, `ms_low` and `ms_high` the 10th and 90th percentile; `copy_ms` is the device-to-device copy of one
logits tensor, timed just before in the same process, and `of_copy = copy_ms / ms`; `peak_mib` is what one call
allocates beyond its inputs at the worst moment; `host_us`, null where it was not asked for, is the host's time of one
call; `graph`, null where it was not tried, says whether a CUDA graph can hold the call: that is tried once for a
provider and mode, at one shape, and copied into all their rows. A row replaces the one with the same key (`KEY`). Rows
are written as they come, into a new file that then takes the old one's place, so a run that is cut keeps what it has.

    python -m bench.results DIR      merges the rows in DIR/*.json, measured elsewhere, into bench/results
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"
KEY = ("op", "provider", "mode", "rows", "vocab", "dtype", "gpu")
DIRTY = "-dirty"
"""End of a commit whose files had changed when it was measured."""

MODES = ("raw", "fwd", "fwd+bwd")
"""raw: the gradient overwrites the logits; fwd: the loss, no gradient wanted; fwd+bwd: the loss and its backward."""


@dataclass(frozen=True)
class Row:
    """One measurement; see the module for the fields."""

    op: str
    provider: str
    mode: str
    rows: int
    vocab: int
    dtype: str
    ms: float
    ms_low: float
    ms_high: float
    copy_ms: float
    of_copy: float
    peak_mib: float | None
    host_us: float | None
    graph: bool | None
    gpu: str
    driver: str | None
    torch: str
    dsl: str | None
    commit: str | None
    date: str

    def __post_init__(self) -> None:
        """Refuse what is not a measurement."""
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        for name in ("ms", "ms_low", "ms_high", "copy_ms", "of_copy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a positive time or ratio, got {value}")

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later measurement of the same thing shares with this one."""
        return tuple(getattr(self, name) for name in KEY)


def gpu_slug(gpu: str) -> str:
    """Return the file name's stem for a GPU, e.g. `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def row_from(record: dict[str, Any]) -> Row:
    """Return the row in a JSON object; a field that the file was written without is null."""
    unknown = record.keys() - {field.name for field in fields(Row)}
    if unknown:
        raise ValueError(f"result row: unknown fields {', '.join(sorted(unknown))}")
    return Row(**{field.name: record.get(field.name) for field in fields(Row)})  # type: ignore[arg-type]


class ResultFile:
    """The rows of one GPU on disk."""

    def __init__(self, folder: Path, gpu: str) -> None:
        """Name the file; nothing is created before the first row.

        Args:
            folder: where result files lie.
            gpu: the GPU's name, as the driver gives it.
        """
        self.path = folder / f"{gpu_slug(gpu)}.json"
        self._seen: tuple[object, list[Row]] = (None, [])

    def read(self) -> list[Row]:
        """Return all rows, in the order of their keys."""
        if not self.path.exists():
            return []
        version = self._version(self.path)
        if self._seen[0] != version:  # a grid asks for thousands of rows while the file stays as it is
            self._seen = (version, [row_from(record) for record in json.loads(self.path.read_text())])
        return list(self._seen[1])

    @staticmethod
    def _version(path: Path) -> tuple[int, int, int]:
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def find(self, key: tuple[Any, ...], commit: str | None) -> Row | None:
        """Return the row with this key if it was measured at this commit; an unknown or changed source matches none."""
        if commit is None or commit.endswith(DIRTY):
            return None
        return next((row for row in self.read() if row.key == key and row.commit == commit), None)

    def put(self, *rows: Row) -> None:
        """Write `rows`, each in the place of the one with its key; readers see the old file or the new one."""
        merged = {row.key: row for row in (*self.read(), *rows)}
        kept = [merged[key] for key in sorted(merged)]
        lines = [json.dumps(vars(row), allow_nan=False) for row in kept]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write("[\n" + ",\n".join(lines) + "\n]\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            version = self._version(Path(temporary))
            Path(temporary).replace(self.path)
            self._seen = (version, kept)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def merge(source: Path, target: Path) -> int:
    """Put every row of the result files in `source` into those in `target`, and return how many there were."""
    rows = read_folder(source)
    for gpu in sorted({row.gpu for row in rows}):
        ResultFile(target, gpu).put(*(row for row in rows if row.gpu == gpu))
    return len(rows)


def read_folder(folder: Path) -> list[Row]:
    """Return the rows of all result files in `folder`."""
    return [row_from(record) for path in sorted(folder.glob("*.json")) for record in json.loads(path.read_text())]


@dataclass(frozen=True)
class Selection:
    """The rows that one table or picture shows: one GPU, and the commits asked for."""

    rows: list[Row]
    left_out: list[str]
    """What was not taken, a line for each GPU and commit; empty where everything was."""

    @property
    def about(self) -> str:
        """GPU, versions, commits and dates of the rows, for a title."""

        def every(name: str) -> str:
            return ", ".join(sorted({str(getattr(row, name)) for row in self.rows}))

        versions = f"torch {every('torch')}, DSL {every('dsl')}, commit {every('commit')}"
        return f"{every('gpu')}, {versions}, {every('date')}"


def select_rows(rows: list[Row], commits: list[str] | None = None, gpu: str | None = None) -> Selection:
    """Return the rows of one GPU and of the named commits, so that measurements of several are never mixed silently.

    Args:
        rows: the candidates.
        commits: the commits wanted, each in full or its beginning; None takes the one measured last (of several
            measured on the same day, the one that git places last, else the one with the most rows).
        gpu: the GPU's name or a part of it; None takes the one with the most rows.

    Raises:
        ValueError: no row is left.
    """
    wanted = [row for row in rows if gpu is None or gpu.lower() in row.gpu.lower()]
    names = Counter(row.gpu for row in wanted)
    if not names:
        raise ValueError(f"no rows of a GPU named {gpu!r}" if rows else "no rows")
    of_gpu = [row for row in wanted if row.gpu == names.most_common(1)[0][0]]
    if commits is None:
        last = newest_commit(of_gpu)
        taken = [row for row in of_gpu if row.commit == last]
    else:
        taken = [row for row in of_gpu if any(str(row.commit).startswith(commit) for commit in commits)]
    if not taken:
        known = ", ".join(sorted({str(row.commit) for row in of_gpu}))
        raise ValueError(f"no rows of commit {', '.join(commits or [])}; there are {known}")
    there = {id(row) for row in taken}
    others = Counter((row.gpu, str(row.commit)) for row in rows if id(row) not in there)
    left_out = [f"{count} rows of {gpu}, commit {commit}" for (gpu, commit), count in sorted(others.items())]
    return Selection(taken, left_out)


def newest_commit(rows: list[Row]) -> str | None:
    """Return the commit measured last; `select_rows` says how a tie is broken."""
    last_date = max(row.date for row in rows)
    counts = Counter(row.commit for row in rows if row.date == last_date)
    history = git_history()

    def rank(commit: str | None) -> tuple[int, int]:
        name = (commit or "").removesuffix(DIRTY)
        place = next((place for place, known in enumerate(history) if name and known.startswith(name)), len(history))
        return -place, counts[commit]

    return max(counts, key=rank)


def git_history() -> list[str]:
    """Return the hashes of the checked out commit and its ancestors, newest first; empty outside a git checkout."""
    try:
        command = ["git", "log", "--format=%H"]
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def main(arguments: list[str] | None = None) -> int:
    """Merge result files; the module's docstring has the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description="Merge result files measured elsewhere."
    )
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("--into", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    print(f"{merge(options.source, options.into)} rows merged into {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
