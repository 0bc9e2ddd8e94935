"""The one timer: how long a single call takes on the device when it finds nothing of its input in L2.

One round on the current stream, where everything runs in order and nothing overlaps:

    restore inputs (if the call overwrites them) | flush L2 | start event | the call | end event

A flush evicts the input, also where the restoring copy has just brought it in or a call has read it to stay
(`bench.flush`), and ends with plain writes to a buffer of `FLUSH_FACTOR` times the L2. The lines that these leave are
dirty and are written back during the call: at most one L2 of bytes, the same for every call timed, the copy included.
Rounds are enqueued back to back and the host waits once, at the end. Before the first round, and where the host is not
much the faster side before every round, enough further plain writes are enqueued that the host runs ahead of the
device: a call's time then holds no gap in which the device waits for the next launch. A call that waits for the device
itself (`.item()`) keeps the gaps it makes.

On the CPU, which serves only to try the benchmarks themselves, the call is timed by the host's clock.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

DEFAULT_BUDGET_S = 0.6
"""Seconds one measurement may take, warm-up left out."""

MIN_REPEATS = 10
MAX_REPEATS = 500
WARM_UP_CALLS = 3
PROBE_CALLS = 5
FLUSH_FACTOR = 2
MAX_FLUSH_PASSES = 40
HOST_SLACK = 3.0
"""A round lasts this many times as long as the host needs for it: for a while it may be slower than when it was asked.
With 1.5 one cell in seven of a grid had a provider, Liger aside, whose 90th percentile was 1.3 times the 10th, or
more."""
HOST_BATCHES = 15
HOST_BATCH_CALLS = 20
"""Calls between two waits when host time is taken: a hundred or so launches, far from where a launch queue blocks."""


class Timing(NamedTuple):
    """Times of one call, in milliseconds, over `repeats` calls."""

    ms: float
    """Median."""
    ms_low: float
    """10th percentile."""
    ms_high: float
    """90th percentile."""
    repeats: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the ascending values lie, linear between neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(samples_ms: Sequence[float]) -> Timing:
    """Return median, 10th and 90th percentile of the samples."""
    ordered = sorted(samples_ms)
    return Timing(statistics.median(ordered), percentile(ordered, 0.1), percentile(ordered, 0.9), len(ordered))


def repeats_within(budget_s: float, round_s: float) -> int:
    """Return how many rounds of `round_s` seconds a budget pays for, from `MIN_REPEATS` to `MAX_REPEATS`."""
    return max(MIN_REPEATS, min(MAX_REPEATS, int(budget_s / max(round_s, 1e-9))))


def flush_passes(host_s: float, round_s: float, flush_s: float) -> int:
    """Return how many times the flush's plain writes go before each call so that the host keeps ahead of the device.

    Args:
        host_s: host time of one round, one flush included.
        round_s: time of one round until the device is done.
        flush_s: device time of these writes, once.
    """
    if round_s > HOST_SLACK * host_s:
        return 1
    return max(1, min(MAX_FLUSH_PASSES, math.ceil(HOST_SLACK * host_s / flush_s)))


class Timer:
    """Times calls on one device; holds the buffer that flushes its L2."""

    def __init__(self, device: torch.device, budget_s: float = DEFAULT_BUDGET_S) -> None:
        """Allocate the flush buffer and time its plain writes.

        Args:
            device: where the calls run: a CUDA device, or the CPU to try a benchmark.
            budget_s: seconds for one measurement.
        """
        self.device = device
        self.budget_s = budget_s
        if device.type == "cuda":
            from bench import flush  # needs Triton, which a machine without a GPU need not have

            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush_buffer = flush.buffer_of(FLUSH_FACTOR * l2_bytes, device)
            self._evict_all = flush.evict_all
            self._flush_s = self._time_writes()

    def with_budget(self, budget_s: float) -> "Timer":
        """Return this timer, its buffer included, with another budget."""
        other = copy.copy(self)
        other.budget_s = budget_s
        return other

    def measure(self, run: Callable[[], object], restore: Callable[[], object] | None = None) -> Timing:
        """Time `run`, with its inputs restored by `restore`, untimed, before each call.

        Args:
            run: the call; all its device work goes to the current stream.
            restore: puts back what `run` overwrites; None if it overwrites nothing.
        """
        for _ in range(WARM_UP_CALLS):
            self._round(run, restore, 0)
        self._synchronize()
        host_samples, round_samples = [], []
        for _ in range(PROBE_CALLS):
            begin = time.perf_counter()
            self._round(run, restore, 1)
            host_samples.append(time.perf_counter() - begin)
            self._synchronize()
            round_samples.append(time.perf_counter() - begin)
        host_s, round_s = statistics.median(host_samples), statistics.median(round_samples)
        if self.device.type != "cuda":
            return summarise([self._timed_on_host(run, restore) for _ in range(repeats_within(self.budget_s, round_s))])
        passes = flush_passes(host_s, round_s, self._flush_s)
        repeats = repeats_within(self.budget_s, max(round_s, host_s + passes * self._flush_s))
        starts = [_event() for _ in range(repeats)]
        ends = [_event() for _ in range(repeats)]
        self._flush(min(MAX_FLUSH_PASSES, math.ceil(2.0 * HOST_SLACK * host_s / self._flush_s)))
        for start, end in zip(starts, ends, strict=True):
            if restore is not None:
                restore()
            self._flush(passes)
            start.record()
            run()
            end.record()
        self._synchronize()
        return summarise([start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)])

    def host_us(self, run: Callable[[], object]) -> float:
        """Return the host's time for one call in microseconds: the median over batches that do not wait for the device.

        A call that itself waits for the device counts that wait. Inputs are not restored: values do not matter here.
        """
        for _ in range(WARM_UP_CALLS):
            run()
        samples = []
        for _ in range(HOST_BATCHES):
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_BATCH_CALLS):
                run()
            samples.append((time.perf_counter() - begin) / HOST_BATCH_CALLS)
        self._synchronize()
        return statistics.median(samples) * 1e6

    def _round(self, run: Callable[[], object], restore: Callable[[], object] | None, passes: int) -> None:
        if restore is not None:
            restore()
        self._flush(passes)
        run()

    def _timed_on_host(self, run: Callable[[], object], restore: Callable[[], object] | None) -> float:
        if restore is not None:
            restore()
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3

    def _flush(self, passes: int) -> None:
        if self.device.type == "cuda":
            self._evict_all(self._flush_buffer)
            self._write(passes)

    def _write(self, passes: int) -> None:
        for _ in range(passes):
            self._flush_buffer.zero_()

    def _time_writes(self) -> float:
        passes = 20
        self._write(passes)
        start, end = _event(), _event()
        start.record()
        self._write(passes)
        end.record()
        self._synchronize()
        return float(start.elapsed_time(end)) / 1e3 / passes

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
