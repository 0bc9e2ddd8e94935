"""Where and with what a row was measured: the fields `gpu`, `driver`, `torch`, `dsl`, `commit` and `date`."""

import datetime
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from bench.results import DIRTY

ROOT = Path(__file__).resolve().parent.parent


class Provenance(NamedTuple):
    """The fields of a result row that are the same for a whole run, save the date."""

    gpu: str
    driver: str | None
    torch: str
    dsl: str | None
    commit: str | None

    @staticmethod
    def today() -> str:
        """Return the date, UTC."""
        return datetime.datetime.now(datetime.UTC).date().isoformat()


def provenance(device: torch.device, commit: str | None = None) -> Provenance:
    """Return what this process measures with.

    Args:
        device: the device measured.
        commit: the source's commit where the caller knows it; else git is asked, and null stands for not knowing.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    driver = (
        _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else None
    )
    return Provenance(gpu, driver, torch.__version__, dsl_version(), commit or git_commit())


def dsl_version() -> str | None:
    """Return the DSL's version: the installed one, else the one that the built artifacts name."""
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        pass
    manifest = ROOT / "greyhound" / "artifacts" / "manifest.json"
    if not manifest.exists():
        return None
    version = json.loads(manifest.read_text()).get("dsl")
    return None if version is None else str(version)


def git_commit() -> str | None:
    """Return the checked out commit, marked `DIRTY` where a file differs from it; None outside a git checkout."""
    commit = _first_line("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _first_line("git", "status", "--porcelain", "--", ".", ":!bench/results")
    return f"{commit}{DIRTY}" if changed else commit


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else None
