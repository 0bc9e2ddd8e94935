"""One provider on one shape: each mode checked, then timed, the copy of the same bytes just before."""

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench.cases import Inputs, dtype_name
from bench.check import Reference
from bench.memory import peak_mib
from bench.provenance import Provenance
from bench.providers import PROVIDERS, Provider, Unsupported
from bench.results import Row
from bench.timer import Timer

OP = "cross_entropy"
COPY_BUDGET_SHARE = 0.5
"""The copy, timed once for all modes of a provider on a shape, takes this share of a measurement's budget."""

HOST_TIME_ELEMENTS = 1 << 22
"""Host time is taken on logits of up to this many elements: beyond, the device's time hides it and the queue fills."""

SPARE_BYTES = 2 << 30
"""What contexts, the timer's buffer and the check take beside the tensors the size of the logits."""


class Measured(NamedTuple):
    """What came of one provider on one shape: each mode asked for has a row, a failure or a limit."""

    rows: list[Row]
    failures: dict[str, str]
    """Mode -> reason: an error, or a wrong result."""
    unsupported: dict[str, str]
    """Mode -> reason: outside the provider's own limits."""
    missing: list[str]
    """Those failed modes whose package could not be imported, so that further shapes need not be tried."""


def measure_provider(
    which: Provider,
    modes: Sequence[str],
    inputs: Inputs,
    reference: Reference,
    timer: Timer,
    about: Provenance,
    *,
    host_time: bool,
) -> Measured:
    """Measure one provider in the given modes; what fails becomes a reason, and the other modes still run.

    Raises:
        RuntimeError: a kernel has left the device unusable.
    """
    measured = Measured([], {}, {}, [])
    copy_ms: float | None = None
    for mode in modes:
        try:
            if copy_ms is None:
                copy_ms = _copy_ms(inputs, timer)
            measured.rows.append(_measure(which, mode, inputs, reference, timer, about, copy_ms, host_time))
        except Unsupported as reason:
            measured.unsupported[mode] = str(reason)
        except Exception as error:
            measured.failures[mode] = first_line(error)
            if isinstance(error, ImportError):
                measured.missing.append(mode)
            free(timer.device)
            if timer.device.type == "cuda":
                torch.cuda.synchronize(timer.device)  # raises where the device is left unusable
    return measured


def _copy_ms(inputs: Inputs, timer: Timer) -> float:
    copy = PROVIDERS["copy"].build(inputs, "raw")
    return timer.with_budget(timer.budget_s * COPY_BUDGET_SHARE).measure(copy.run).ms


def _measure(
    which: Provider,
    mode: str,
    inputs: Inputs,
    reference: Reference,
    timer: Timer,
    about: Provenance,
    copy_ms: float,
    host_time: bool,
) -> Row:
    rows, vocab = inputs.logits.shape
    prepared = which.build(inputs, mode)
    outcome = prepared.result()
    if outcome is not None:
        reference.verify(outcome)
    del outcome
    peak = peak_mib(prepared.run, timer.device)
    timing = timer.measure(prepared.run, prepared.restore)
    if which.name == "copy":
        copy_ms = timing.ms
    takes_host_time = host_time and inputs.logits.numel() <= HOST_TIME_ELEMENTS
    return Row(
        op=OP,
        provider=which.name,
        mode=mode,
        rows=rows,
        vocab=vocab,
        dtype=dtype_name(inputs.logits.dtype),
        ms=round(timing.ms, 5),
        ms_low=round(timing.ms_low, 5),
        ms_high=round(timing.ms_high, 5),
        copy_ms=round(copy_ms, 5),
        of_copy=float(f"{copy_ms / timing.ms:.4g}"),  # never rounded to nothing
        peak_mib=None if peak is None else round(peak, 1),
        host_us=round(timer.host_us(prepared.run), 1) if takes_host_time else None,
        graph=None,
        date=about.today(),
        **about._asdict(),
    )


def too_large(which: Provider, rows: int, vocab: int, dtype: torch.dtype, memory_bytes: int) -> str | None:
    """Return why the device cannot hold what this provider needs for (rows, vocab), None if it can."""
    needed = (which.buffers + 1) * rows * vocab * dtype.itemsize + SPARE_BYTES
    if needed <= memory_bytes:
        return None
    return f"it needs {needed / 2**30:.1f} GiB, the device has {memory_bytes / 2**30:.1f}"


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def free(device: torch.device) -> None:
    """Give back the memory that nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
