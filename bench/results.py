"""Results as data: one JSON file per GPU, a list of rows, one line each.

    {op, provider, mode, rows, vocab, dtype, ms, ms_low, ms_high, copy_ms, of_copy, peak_mib, host_us,
     gpu, driver, torch, dsl, commit, date}

`ms` is the median, `ms_low` and `ms_high` the 10th and 90th percentile; `copy_ms` is the device-to-device copy of one
logits tensor, timed just before in the same process, and `of_copy = copy_ms / ms`; `peak_mib` is what one call
allocates beyond its inputs at the worst moment; `host_us`, null where it was not asked for, is the host's time of one
call. A row replaces the one with the same key (`KEY`). Each is written as it comes, into a new file that then takes the
old one's place, so a run that is cut keeps what it has.

    python -m bench.results DIR      merges the rows in DIR/*.json, measured elsewhere, into bench/results
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
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

    def read(self) -> list[Row]:
        """Return all rows, in the order of their keys."""
        if not self.path.exists():
            return []
        return [row_from(record) for record in json.loads(self.path.read_text())]

    def find(self, key: tuple[Any, ...], commit: str | None) -> Row | None:
        """Return the row with this key if it was measured at this commit; an unknown or changed source matches none."""
        if commit is None or commit.endswith(DIRTY):
            return None
        return next((row for row in self.read() if row.key == key and row.commit == commit), None)

    def put(self, row: Row) -> None:
        """Write `row`, in the place of the one with its key; readers see the old file or the new one."""
        kept = [other for other in self.read() if other.key != row.key]
        lines = [json.dumps(asdict(each), allow_nan=False) for each in sorted([*kept, row], key=lambda each: each.key)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write("[\n" + ",\n".join(lines) + "\n]\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def merge(source: Path, target: Path) -> int:
    """Put every row of the result files in `source` into those in `target`, and return how many there were."""
    rows = [row_from(record) for path in sorted(source.glob("*.json")) for record in json.loads(path.read_text())]
    for row in rows:
        ResultFile(target, row.gpu).put(row)
    return len(rows)


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
