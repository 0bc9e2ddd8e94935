"""Everything that needs a GPU, in one command: the GPU tests, the sanitizer on small shapes, the benchmark, the sweep.

    python -m bench.gpu                                  tests, sanitizer, benchmark
    python -m bench.gpu --tests --sanitize               those stages only
    python -m bench.gpu --sanitize --tools initcheck     another of the sanitizer's tools
    python -m bench.gpu --soak --soak-arguments "--minutes 8"
    python -m bench.gpu --tune --tune-arguments "--shapes 8192x128256 --dtypes bf16"
    python -m bench.gpu --linear --linear-arguments "--minutes 8 --resume"
    python -m bench.gpu --only-quick --out DIR           a few minutes; logs and result rows under DIR
    python -m bench.gpu --bench --bench-arguments "--grid full --graphs --budget 0.1 --minutes 8 --resume"

Each stage is a process of its own whose whole output goes to a log; what is printed is a line per stage, the
benchmark's own output, the end of a failed stage's log, and the total. A stage that fails or runs out of time does not
stop the others; the exit code is 1 if any did.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.provenance import ROOT

STAGE_TIMEOUT_S = 540.0
FAILED_LOG_LINES = 40
SANITIZER_EXIT_CODE = 9
"""What compute-sanitizer returns where it found something and the program itself did not fail."""

RACECHECK_GROUPS = ("--groups", "chosen,narrow,held,options")
"""Not the forced plans of wide rows, which racecheck (2025.3) does not follow: where a place is filled twice it calls
them wrong, or never ends. `.ci/kernel_mutations.py` says why, and shows it those kernels, in bf16 and without options,
in a form it follows. With few rows the wide kernels of "chosen" and "options" fill no place twice."""

QUICK_SANITIZE = ("--vocabs", "1,1031", "--dtypes", "bf16")
QUICK_BENCH = ("--shapes", "8192x32000,256x128256", "--providers", "copy,greyhound", "--budget", "0.2")
QUICK_SOAK = ("--minutes", "0.5", "--dtypes", "bf16")
QUICK_LINEAR = ("--shapes", "4096x1024x32000", "--providers", "products,greyhound", "--budget", "0.2")
SUMMARY_MARKS = ("wrong results", "ERROR SUMMARY", "RACECHECK SUMMARY")
"""Lines that say what a stage found, where its last line does not."""


@dataclass(frozen=True)
class Stage:
    """One process to run."""

    name: str
    command: Sequence[str]
    echo: bool = False
    """Whether its output is also printed as it comes."""
    environment: dict[str, str] = field(default_factory=dict)
    must_say: str = ""
    """What its summary holds where it did its work: an exit code of 0 is also that of tests that were all skipped."""


@dataclass(frozen=True)
class Ended:
    """How a stage ended."""

    stage: Stage
    passed: bool
    summary: str
    seconds: float
    log: Path


def main(arguments: list[str] | None = None) -> int:
    """Run the stages asked for and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tests", action="store_true", help="pytest -m gpu")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer memcheck and racecheck")
    parser.add_argument("--bench", action="store_true", help="bench.cross_entropy")
    parser.add_argument("--linear", action="store_true", help="bench.linear_cross_entropy")
    parser.add_argument(
        "--tune", action="store_true", help="bench.tune_fused, which names its shapes in --tune-arguments"
    )
    parser.add_argument("--soak", action="store_true", help="bench.soak: every kind of call, mixed, for minutes")
    parser.add_argument("--only-quick", action="store_true", help="no slow tests, fewer shapes and providers")
    parser.add_argument("--test-arguments", default="", metavar="TEXT", help="passed on to pytest")
    parser.add_argument("--sanitize-arguments", default="", metavar="TEXT", help="passed on to bench.sanitize_target")
    parser.add_argument("--bench-arguments", default="", metavar="TEXT", help="passed on to bench.cross_entropy")
    parser.add_argument(
        "--linear-arguments", default="", metavar="TEXT", help="passed on to bench.linear_cross_entropy"
    )
    parser.add_argument("--tune-arguments", default="", metavar="TEXT", help="passed on to bench.tune_fused")
    parser.add_argument("--soak-arguments", default="", metavar="TEXT", help="passed on to bench.soak")
    parser.add_argument("--tools", default="memcheck,racecheck", help="compute-sanitizer's tools, with commas between")
    parser.add_argument("--out", type=Path, help="folder for logs and result rows; else a new one, and bench/results")
    parser.add_argument("--commit", help="the source's commit, where git cannot tell")
    parser.add_argument("--stage-timeout", type=float, default=STAGE_TIMEOUT_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if not any((options.tests, options.sanitize, options.bench, options.linear, options.tune, options.soak)):
        options.tests = options.sanitize = options.bench = True
    logs = options.out / "logs" if options.out else Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    return run_stages(stages(options), logs, options.stage_timeout)


def stages(options: argparse.Namespace) -> list[Stage]:
    """Return the stages that the command line asks for, in order."""
    python = (sys.executable, "-m")
    quick = options.only_quick
    chosen = []
    if options.tests:
        marks = "gpu and not slow" if quick else "gpu"
        command = [*python, "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "tests"]
        chosen.append(Stage("tests", [*command, *shlex.split(options.test_arguments)], must_say=" passed"))
    if options.sanitize:
        target = [*python, "bench.sanitize_target", *(QUICK_SANITIZE if quick else ())]
        given = shlex.split(options.sanitize_arguments)
        for tool in options.tools.split(","):
            watcher = [
                sanitizer_path(),
                "--tool",
                tool,
                "--error-exitcode",
                str(SANITIZER_EXIT_CODE),
                "--print-limit",
                "20",
            ]
            # Without PyTorch's caching allocator a tensor ends where its allocation ends.
            environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            command = [*watcher, *target, *(RACECHECK_GROUPS if tool == "racecheck" else ()), *given]
            chosen.append(Stage(tool, command, environment=environment, must_say=" 0 wrong results"))
    if options.soak:
        command = [*python, "bench.soak", *(QUICK_SOAK if quick else ()), *shlex.split(options.soak_arguments)]
        chosen.append(Stage("soak", command, must_say=" 0 failures"))
    if options.bench:
        command = [*python, "bench.cross_entropy", *(QUICK_BENCH if quick else ())]
        command += ["--out", str(options.out / "results")] if options.out else []
        command += ["--commit", options.commit] if options.commit else []
        chosen.append(Stage("bench", [*command, *shlex.split(options.bench_arguments)], echo=True))
    if options.linear:
        command = [*python, "bench.linear_cross_entropy", *(QUICK_LINEAR if quick else ())]
        command += ["--out", str(options.out / "results" / "linear")] if options.out else []
        command += ["--commit", options.commit] if options.commit else []
        chosen.append(Stage("linear", [*command, *shlex.split(options.linear_arguments)], echo=True))
    if options.tune:
        chosen.append(Stage("tune", [*python, "bench.tune_fused", *shlex.split(options.tune_arguments)], echo=True))
    return chosen


def sanitizer_path() -> str:
    """Return where compute-sanitizer is; its bare name, for the error message, where it is not found."""
    beside_toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (
        str(beside_toolkit) if beside_toolkit.exists() else "compute-sanitizer"
    )


def run_stages(chosen: Sequence[Stage], logs: Path, timeout_s: float) -> int:
    """Run the stages one after another, print how each ended, and return 1 if any failed."""
    begin = time.monotonic()
    ended = []
    for stage in chosen:
        result = run_stage(stage, logs, timeout_s)
        ended.append(result)
        if not result.passed and not stage.echo:
            print("\n".join(result.log.read_text(errors="replace").splitlines()[-FAILED_LOG_LINES:]))
        print(format_ended(result), flush=True)
    print(f"\ntotal {time.monotonic() - begin:.1f} s, logs in {logs}")
    for result in ended:
        print(format_ended(result))
    return 0 if all(result.passed for result in ended) else 1


def format_ended(ended: Ended) -> str:
    """Return the one line that says how a stage ended."""
    return f"{'ok    ' if ended.passed else 'FAILED'} {ended.stage.name:<10} {ended.seconds:>6.1f} s  {ended.summary}"


def run_stage(stage: Stage, logs: Path, timeout_s: float) -> Ended:
    """Run one stage to its end, or kill it and its children when its time is over."""
    log = logs / f"{stage.name}.log"
    begin = time.monotonic()
    late = threading.Event()
    with log.open("w") as file:
        file.write(f"{shlex.join(stage.command)}\n")
        try:
            process = subprocess.Popen(
                stage.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return Ended(stage, False, str(error), time.monotonic() - begin, log)

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        alarm = threading.Timer(timeout_s, stop)
        alarm.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                if stage.echo:
                    print(line, end="", flush=True)
            code = process.wait()
        finally:
            alarm.cancel()
    seconds = time.monotonic() - begin
    summary = summary_line(log.read_text(errors="replace"))
    passed = code == 0 and stage.must_say in summary and not late.is_set()
    if late.is_set():
        summary = f"stopped after {timeout_s:.0f} s; {summary}"
    elif code:
        summary = f"exit code {code}; {summary}"
    return Ended(stage, passed, summary, seconds, log)


def summary_line(output: str) -> str:
    """Return what a stage's output says it found: the lines with `SUMMARY_MARKS`, else the last line."""
    lines = [line.strip(" =\n") for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if any(mark in line for mark in SUMMARY_MARKS)]
    return "; ".join(marked) if marked else (lines or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
