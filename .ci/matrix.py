"""Whether the package installs, works on a CPU and leaves nothing behind, for each Python and PyTorch that it accepts.

    python .ci/matrix.py [PYTHON:TORCH ...]        # python .ci/matrix.py python3.12:2.13.0 python3.11:2.9.*

Builds the sdist and from it the wheel, both in isolation, from a copy of what git has or would take. Then, for each
row, in a fresh environment: installs that PyTorch and the wheel, imports every module, compares losses and gradients
with numbers known beforehand, runs the main job, uninstalls, and looks for what is left. Prints a table and returns 1
if a row failed. PYTHON is a name on the PATH or a path, TORCH a version for pip; without rows, those of `default_rows`.

pip takes the build of PyTorch that its index offers. One for CUDA is several GB, which are given back before the next
row begins; it does not import without the CUDA libraries that it depends on. Run by hand.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
"""Each with the PyTorch of `constraints.txt`."""
OLDER_TORCHES = ("2.9.0", "2.10.*", "2.11.*", "2.12.*")
"""Each with the first Python; the first of these is the least that the package accepts."""

SHOWN_LINES = 25
PACKAGES = ("greyhound", "dsl_kernels")
"""The first is also how the name of the distribution begins."""

CHECK = """
import importlib, json, math, pathlib, pkgutil, sys
import torch

modules = []
for package in ("greyhound", "dsl_kernels"):
    folder = pathlib.Path(importlib.import_module(package).__file__).parent
    modules += [found.name for found in pkgutil.walk_packages([str(folder)], f"{package}.")]
for name in modules:
    importlib.import_module(name)

from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

# The softmax of log 1, ..., log 4 is 0.1, ..., 0.4. The second row is left out.
scores = torch.log(torch.tensor([1.0, 2.0, 3.0, 4.0]))
labels = torch.tensor([2, -100])
expected_loss = torch.tensor(math.log(10 / 3))
expected_grad = torch.tensor([[0.1, 0.2, -0.7, 0.4], [0.0, 0.0, 0.0, 0.0]])
close = torch.testing.assert_close

logits = scores.repeat(2, 1).requires_grad_()
loss = cross_entropy(logits, labels)
loss.backward()
close(loss, expected_loss)
close(logits.grad, expected_grad)

buffer = scores.repeat(2, 1)
ce_sum, z_sum, n_valid = cross_entropy_with_grad_kernel(buffer, labels)
close(ce_sum, expected_loss)
close(z_sum, torch.tensor(math.log(10) ** 2))
close(n_valid, torch.tensor(1.0))
close(buffer, expected_grad)

hidden, weight = torch.ones(2, 1, requires_grad=True), scores.unsqueeze(1).requires_grad_()
loss = chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=1)
loss.backward()
close(loss, expected_loss)
close(weight.grad, expected_grad[:1].T)
close(hidden.grad, expected_grad @ scores.unsqueeze(1))

print(json.dumps({"modules": len(modules), "python": sys.version.split()[0], "torch": torch.__version__}))
"""

LEFT = """
import json, pathlib, sys, sysconfig
folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts", "data")}
paths = (path for folder in folders for path in pathlib.Path(folder).rglob("*"))
print(json.dumps(sorted({str(path) for path in paths if path.name.startswith(tuple(sys.argv[1:]))})))
"""


class Row(NamedTuple):
    """An environment: an interpreter and what pip is asked for as the version of PyTorch."""

    python: str
    torch: str


class Failure(Exception):
    """What went wrong in a row, for its line of the table, and what was printed."""


def default_rows() -> list[Row]:
    """Return every Python with the pinned PyTorch, then the first one with every older PyTorch."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line.split("==")[1] for line in constraints if line.startswith("torch=="))
    rows = [Row(f"python{version}", pinned) for version in PYTHONS]
    return rows + [Row(f"python{PYTHONS[0]}", version) for version in OLDER_TORCHES]


def environment(work: Path) -> dict[str, str]:
    """Return the variables of every command: nothing of this checkout, and a cache of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GREYHOUND_", "PYTHON"))}
    return kept | {
        "GREYHOUND_CACHE": str(work / "cache"),
        "PYTHONNOUSERSITE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(what: str, command: list[str], work: Path) -> str:
    """Run a command away from the checkout and return its standard output.

    Raises:
        Failure: it could not be started, or its exit code is not 0.
    """
    try:
        done = subprocess.run(command, cwd=work, env=environment(work), capture_output=True, text=True, check=False)
    except OSError as error:
        raise Failure(f"{what}: {error}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).splitlines()[-SHOWN_LINES:]
        raise Failure("\n    ".join([f"{what}: exit code {done.returncode}", f"$ {shlex.join(command)[:400]}", *lines]))
    return done.stdout


def demand(what: str, got: object, expected: object) -> None:
    """Fail the row where a fact is not the expected one."""
    if got != expected:
        raise Failure(f"{what}: expected {expected}, got {got}")


def new_environment(python: str, folder: Path, work: Path) -> str:
    """Make an empty virtual environment and return its interpreter."""
    found = shutil.which(python)
    if found is None:
        raise Failure(f"{python}: not found")
    run("venv", [found, "-m", "venv", str(folder)], work)
    return str(folder / "bin" / "python")


def build(python: str, work: Path) -> Path:
    """Return the wheel that is made from the sdist."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (work / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, work / "tree" / name)
    builder = new_environment(python, work / "builder", work)
    run("pip install build", [builder, "-m", "pip", "install", "--quiet", "build"], work)
    run("build", [builder, "-m", "build", "--outdir", str(work / "dist"), str(work / "tree")], work)
    (wheel,) = (work / "dist").glob("*.whl")
    demand("sdists", len(list((work / "dist").glob("*.tar.gz"))), 1)
    return wheel


def try_row(row: Row, wheel: Path, work: Path) -> str:
    """Return what was found in the environment of a row, which is gone afterwards."""
    folder = work / "environment"
    try:
        python = new_environment(row.python, folder, work)
        pip = [python, "-m", "pip"]
        run("install torch", [*pip, "install", "--quiet", f"torch=={row.torch}"], work)
        run("install the wheel", [*pip, "install", "--quiet", str(wheel)], work)
        run("pip check", [*pip, "check"], work)
        found = json.loads(run("modules and values", [python, "-c", CHECK], work))
        job = run("main job", [python, "-m", "greyhound", "--device", "cpu", "--steps", "5"], work)
        demand("main job", "the curves agree" in job, True)
        demand("kernels compiled on a CPU", (work / "cache").exists(), False)
        run("check_wheel.py", [python, str(ROOT / ".ci" / "check_wheel.py"), str(wheel)], work)
        demand("installed", bool(json.loads(run("look", [python, "-c", LEFT, *PACKAGES], work))), True)
        run("uninstall", [*pip, "uninstall", "--quiet", "--yes", "greyhound-ce"], work)
        demand("left after uninstalling", json.loads(run("look", [python, "-c", LEFT, *PACKAGES], work)), [])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"python {found['python']}, torch {found['torch']}, {found['modules']} modules"


def parse_row(text: str) -> Row:
    """Read PYTHON:TORCH."""
    python, colon, torch = text.rpartition(":")
    if not (python and colon and torch):
        raise argparse.ArgumentTypeError(f"expected PYTHON:TORCH, got {text!r}")
    return Row(python, torch)


def main() -> int:
    """Run the rows of the command line, or all."""
    parser = argparse.ArgumentParser(prog="python .ci/matrix.py", description="Try the package with several PyTorches.")
    parser.add_argument("rows", nargs="*", type=parse_row, metavar="PYTHON:TORCH", help="default: all that are claimed")
    rows = parser.parse_args().rows or default_rows()
    table: list[str] = []
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        start = time.monotonic()
        try:
            wheel = build(sys.executable, work)
        except Failure as failure:
            print(f"FAILED  {failure}")
            return 1
        print(f"{wheel.name}: built in {time.monotonic() - start:.0f} s", flush=True)
        for row in rows:
            start = time.monotonic()
            try:
                outcome, found = "ok", try_row(row, wheel, work)
            except Failure as failure:
                outcome, found = "FAILED", str(failure)
                failed += 1
            line = f"{outcome:<7} {time.monotonic() - start:>5.0f} s  {row.python} torch {row.torch}: {found}"
            print(line, flush=True)
            table.append(line.splitlines()[0])
    print("\n=== summary", *table, f"{failed} of {len(rows)} rows failed", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
