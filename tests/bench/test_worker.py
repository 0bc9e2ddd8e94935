import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import worker as workers
from bench.provenance import Provenance
from bench.results import row_from
from bench.timer import Timer
from bench.worker import Worker, WorkerFailed, serve

NO_PROBLEM = {"failures": {}, "unsupported": {}, "missing": []}
NOT_THERE = "ImportError: the greyhound first on sys.path is not version 0.1"
SIZE = {"rows": 6, "vocab": 33, "dtype": "bf16", "device": "cpu"}


def request_for(provider: str, *modes: str, **changes: object) -> dict[str, Any]:
    about = Provenance("a GPU", "driver", "torch", "dsl", "abc")._asdict()
    fixed = {"job": "measure", "budget_s": 0.0, "host_time": True, "about": about}
    return {**fixed, **SIZE, "provider": provider, "modes": list(modes), **changes}


@pytest.fixture(scope="module")
def older_worker(older: Path) -> Iterator[Worker]:
    worker = Worker(older)
    yield worker
    worker.close()


def test_the_older_greyhound_is_measured_in_one_process_for_a_list_of_cells(older_worker: Worker) -> None:
    seen = set()
    for vocab in (33, 7):
        answer = older_worker.ask(request_for("greyhound_0_1", "raw", "fwd", "fwd+bwd", vocab=vocab))
        assert {name: answer[name] for name in answer if name != "rows"} == NO_PROBLEM
        rows = [row_from(record) for record in answer["rows"]]
        assert [(row.provider, row.mode, row.vocab) for row in rows] == [
            ("greyhound_0_1", mode, vocab) for mode in ("raw", "fwd", "fwd+bwd")
        ]
        assert all(row.commit == "abc" and row.host_us and row.of_copy > 0 for row in rows)
        assert older_worker._process is not None
        seen.add(older_worker._process.pid)
    assert len(seen) == 1


def test_a_worker_that_dies_says_so_and_the_next_request_starts_another(older: Path) -> None:
    worker = Worker(older)
    with pytest.raises(WorkerFailed, match="ended with exit code 1 and without an answer"):
        worker.ask(request_for("nobody", "raw"))
    assert worker.ask(request_for("copy", "raw"))["failures"] == {}
    worker.close()


def test_a_worker_that_does_not_answer_in_time_is_ended() -> None:
    worker = Worker(timeout_s=0.05)  # less than the interpreter takes to start
    with pytest.raises(WorkerFailed, match="exit code -9"):
        worker.ask(request_for("copy", "raw"))


def answers_to(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    assert serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), out) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_each_request_has_one_line_of_answer() -> None:
    first, second = answers_to(request_for("copy", "raw"), request_for("torch", "fwd", "fwd+bwd"))
    assert [row["mode"] for row in first["rows"]] == ["raw"]
    assert [row["mode"] for row in second["rows"]] == ["fwd", "fwd+bwd"]


def test_a_provider_whose_package_is_elsewhere_is_answered_with_the_reason() -> None:
    (answer,) = answers_to(request_for("greyhound_0_1", "raw"))
    assert answer["failures"] == {"raw": NOT_THERE}
    assert answer["missing"] == ["raw"]


def test_a_graph_without_a_gpu_is_unknown_not_refused() -> None:
    (answer,) = answers_to(request_for("torch", "fwd", job="graph"))
    assert answer == {"graph": None, "reason": "no CUDA device"}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU answers for the GPU where a request names one."""
    real = torch.device
    make_inputs = workers.make_inputs
    monkeypatch.setattr(workers, "make_inputs", lambda shape, dtype, device: make_inputs(shape, dtype, real("cpu")))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("provider", "failure", "expected"),
    [
        ("torch", None, {"graph": True, "reason": None}),
        ("torch", "it waits", {"graph": False, "reason": "it waits"}),
        ("greyhound_0_1", None, {"graph": None, "reason": NOT_THERE}),
    ],
)
def test_a_graph_is_told_from_a_refusal_and_from_a_call_that_cannot_run(
    provider: str, failure: str | None, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "capture", lambda prepared, reference, device: failure)
    timers: dict[str, Timer] = {}
    assert workers.answer(request_for(provider, "fwd", job="graph", device="cuda"), timers) == expected
