"""Whether a CUDA graph can hold a provider's call: captured, replayed on fresh outputs, and the result checked.

A call that waits for the device (`.item()`), or launches on another stream than the current one, fails here. A capture
that fails may leave CUDA unusable for the process, so `capture` runs in a worker, and one that has failed is not used
again. This is tried once for a provider and mode, on `SHAPE`: what prevents a capture does not depend on the shape.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from bench.cases import Shape
from bench.check import Mismatch, Reference
from bench.providers import Prepared, Provider

SHAPE = Shape(64, 32000)
"""Every provider supports it, in every dtype."""

DTYPE = "bf16"
WARM_UP_CALLS = 3
TIMEOUT_S = 90.0
"""For one mode, imports and compilation included; a capture that hangs must not cost the run its time."""

AT_A_TIME = 4
"""Workers at once: they mostly import and compile, on the host."""

Flags = dict[tuple[str, str], bool]
"""(provider, mode) -> whether a graph can hold it."""


class Asks(Protocol):
    """What is needed of a `bench.worker.Worker`."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request."""

    def close(self) -> None:
        """End the process."""


def capture(prepared: Prepared, reference: Reference, device: torch.device) -> str | None:
    """Capture one call, its fresh inputs included, replay it, and return why that failed, None if it did not.

    The process may be left without a usable CUDA context.
    """
    try:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                prepared.result()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outcome = prepared.result()
        assert outcome is not None
        # What a replay does not write again stays NaN, and the check refuses it.
        outcome.mean_loss.fill_(float("nan"))
        if outcome.grad is not None:
            outcome.grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(device)
        reference.verify(outcome)
    except Mismatch as error:
        return f"the replay computes something else: {error}"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def check(
    pairs: Iterable[tuple[Provider, str]],
    device: str,
    worker_for: Callable[[Provider], Asks],
    say: Callable[[str], object] = print,
) -> Flags:
    """Try every (provider, mode), each provider in workers of its own, and return what is known now.

    Args:
        pairs: what to try.
        device: the device, as `torch.device` reads it.
        worker_for: starts a worker for a provider.
        say: takes one line for each pair, with the reason where a graph cannot hold it or it cannot run.
    """
    modes: dict[str, tuple[Provider, list[str]]] = {}
    for which, mode in pairs:
        modes.setdefault(which.name, (which, []))[1].append(mode)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        parts = list(pool.map(lambda part: _check_provider(part[0], part[1], device, worker_for), modes.values()))
    flags: Flags = {}
    for name, results in zip(modes, parts, strict=True):
        for mode, (flag, reason) in results.items():
            verdict = {True: "yes", False: "no", None: "unknown"}[flag]
            say(f"graph {name} {mode}: {verdict}{f' ({reason})' if reason else ''}")
            if flag is not None:
                flags[name, mode] = flag
    return flags


def _check_provider(
    which: Provider, modes: list[str], device: str, worker_for: Callable[[Provider], Asks]
) -> dict[str, tuple[bool | None, str | None]]:
    results: dict[str, tuple[bool | None, str | None]] = {}
    worker: Asks | None = None
    try:
        for mode in modes:
            worker = worker or worker_for(which)
            request = {"job": "graph", "provider": which.name, "modes": [mode], "device": device, "dtype": DTYPE}
            try:
                answer = worker.ask({**request, **SHAPE._asdict()})
            except Exception as error:  # a worker that died has not said why: that is no answer
                results[mode] = None, str(error)
            else:
                results[mode] = answer["graph"], answer["reason"]
            if results[mode][0] is not True:
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()
    return results
