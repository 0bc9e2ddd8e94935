"""A process of its own for what must not share this one: JSON lines in, JSON lines out, one answer for each request.

Two things need it. The older public Greyhound has our import name, so its folder comes first on the worker's
`sys.path`. And a capture that fails can leave a process's CUDA context with an invalid stream, so captures are tried
where nothing else is lost. A worker serves any number of requests: starting one takes seconds.

    {"job": "measure", "provider", "modes", "rows", "vocab", "dtype", "device", "budget_s", "host_time", "about"}
        -> {"rows", "failures", "unsupported", "missing"}         the fields of `bench.measure.Measured`
    {"job": "graph", "provider", "modes", "rows", "vocab", "dtype", "device"}
        -> {"graph": true | false | null, "reason"}               for the one mode in "modes"; null: it cannot run
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import torch

from bench.cases import DTYPES, Shape, make_inputs
from bench.check import Reference
from bench.graphs import capture
from bench.measure import first_line, free, measure_provider
from bench.peers import PROVIDERS
from bench.provenance import ROOT, Provenance
from bench.timer import Timer

ANSWER_TIMEOUT_S = 180.0
EXIT_TIMEOUT_S = 5.0


class WorkerFailed(Exception):
    """The worker ended, or was ended for want of an answer."""


class Worker:
    """The parent's side. The process starts with the first request, and anew after one that it did not survive."""

    def __init__(self, older_greyhound: Path | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Start nothing yet.

        Args:
            older_greyhound: folder that comes first on the worker's `sys.path`.
            timeout_s: seconds after which a request without an answer has failed.
        """
        self.older_greyhound = older_greyhound
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer.

        Raises:
            WorkerFailed: there is none; a later request starts a new process.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(self.timeout_s, process.kill)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            alarm.cancel()
        if not line:
            self.close()
            raise WorkerFailed(f"the worker ended with exit code {process.returncode} and without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=EXIT_TIMEOUT_S)  # it ends with its input
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        older = ["--older-greyhound", str(self.older_greyhound)] if self.older_greyhound else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", *older],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._process


def answer(request: dict[str, Any], timers: dict[str, Timer]) -> dict[str, Any]:
    """Do what a request asks for, in this process; the module's docstring has the fields.

    Args:
        request: one request.
        timers: by device, filled here: a timer holds a buffer.
    """
    device = torch.device(request["device"])
    shape, dtype = Shape(request["rows"], request["vocab"]), DTYPES[request["dtype"]]
    which = PROVIDERS[request["provider"]]
    inputs = make_inputs(shape, dtype, device)
    reference = Reference(inputs.logits, inputs.labels)
    if request["job"] == "graph":
        (mode,) = request["modes"]
        if device.type != "cuda":
            return {"graph": None, "reason": "no CUDA device"}
        try:
            prepared = which.build(inputs, mode)
            prepared.result()
        except Exception as error:
            return {"graph": None, "reason": first_line(error)}
        reason = capture(prepared, reference, device)
        return {"graph": reason is None, "reason": reason}
    timer = timers.setdefault(request["device"], Timer(device)).with_budget(request["budget_s"])
    about = Provenance(**request["about"])
    host_time = request["host_time"]
    measured = measure_provider(which, request["modes"], inputs, reference, timer, about, host_time=host_time)
    return {**measured._asdict(), "rows": [vars(row) for row in measured.rows]}


def serve(requests: TextIO, answers: TextIO) -> int:
    """Answer line by line until the requests end; an error that `answer` lets through ends the process."""
    timers: dict[str, Timer] = {}
    for line in requests:
        request = json.loads(line)
        answers.write(json.dumps(answer(request, timers)) + "\n")
        answers.flush()
        free(torch.device(request["device"]))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a worker; what packages print goes to stderr, so that stdout holds answers alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--older-greyhound", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.older_greyhound:
        sys.path.insert(0, str(options.older_greyhound))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return serve(sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
