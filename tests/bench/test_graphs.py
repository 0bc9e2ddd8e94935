from typing import Any

import pytest
import torch

from bench import graphs
from bench.cases import Shape, make_inputs
from bench.check import Outcome, Reference
from bench.graphs import capture, check
from bench.peers import PROVIDERS
from bench.providers import Prepared, Provider
from bench.worker import WorkerFailed


class Scripted:
    """A worker whose answers are given; it counts how many were started."""

    started: list[str]

    def __init__(self, script: dict[str, bool | Exception | None]) -> None:
        self.script = script
        self.started = []
        self.closed = 0

    def start(self, which: Provider) -> "Scripted":
        self.started.append(which.name)
        return self

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        (mode,) = request["modes"]
        assert (request["job"], request["rows"], request["vocab"]) == ("graph", *graphs.SHAPE)
        answer = self.script[mode]
        if isinstance(answer, Exception):
            raise answer
        return {"graph": answer, "reason": None if answer else "why"}

    def close(self) -> None:
        self.closed += 1


def run(script: dict[str, bool | Exception | None]) -> tuple[graphs.Flags, Scripted, list[str]]:
    worker = Scripted(script)
    said: list[str] = []
    flags = check([(PROVIDERS["liger"], mode) for mode in script], "cuda", worker.start, said.append)
    return flags, worker, said


def test_modes_that_are_captured_share_a_worker() -> None:
    flags, worker, _ = run({"raw": True, "fwd": True})
    assert flags == {("liger", "raw"): True, ("liger", "fwd"): True}
    assert (worker.started, worker.closed) == (["liger"], 1)


def test_after_a_capture_that_fails_the_next_mode_has_a_new_worker() -> None:
    flags, worker, said = run({"raw": False, "fwd": True})
    assert flags == {("liger", "raw"): False, ("liger", "fwd"): True}
    assert (worker.started, worker.closed) == (["liger", "liger"], 2)
    assert said == ["graph liger raw: no (why)", "graph liger fwd: yes"]


@pytest.mark.parametrize("answer", [None, WorkerFailed("it ended")])
def test_what_cannot_run_has_no_flag(answer: Exception | None) -> None:
    flags, worker, said = run({"raw": answer, "fwd": True})
    assert flags == {("liger", "fwd"): True}
    assert said[0].startswith("graph liger raw: unknown (")
    assert worker.closed == 2


class FakeGraph:
    """Runs the call once more on replay, as a graph that holds it does, unless it holds nothing."""

    def __init__(self, call: Prepared, holds: bool) -> None:
        self.call = call
        self.holds = holds

    def replay(self) -> None:
        if self.holds:
            self.call.run()


class Nothing:
    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *arguments: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


@pytest.mark.parametrize("holds", [True, False])
def test_a_replay_that_writes_nothing_is_no_graph(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Shape(4, 9), torch.float32, torch.device("cpu"))
    loss, grad = torch.zeros(()), torch.zeros(4, 9)

    def call() -> Outcome:
        loss.copy_(torch.nn.functional.cross_entropy(*inputs))
        grad.copy_((torch.softmax(inputs.logits, 1) - torch.nn.functional.one_hot(inputs.labels, 9)) / 4)
        return Outcome(loss, grad, "mean")

    prepared = Prepared(call, call)
    for name in ("Stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(prepared, holds))
    reason = capture(prepared, Reference(*inputs), torch.device("cpu"))
    assert (reason is None) == holds
    assert holds or "the replay computes something else" in str(reason)


def test_a_call_that_waits_for_the_device_is_refused_with_the_first_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call() -> Outcome:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for name in ("Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    inputs = make_inputs(Shape(4, 9), torch.float32, torch.device("cpu"))
    reason = capture(Prepared(call, call), Reference(*inputs), torch.device("cpu"))
    assert reason == "RuntimeError: operation not permitted when stream is capturing"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["raw", "fwd", "fwd+bwd"])
def test_our_calls_fit_a_graph(mode: str, cuda: torch.device) -> None:
    inputs = make_inputs(graphs.SHAPE, torch.bfloat16, cuda)
    assert capture(PROVIDERS["greyhound"].build(inputs, mode), Reference(*inputs), cuda) is None
