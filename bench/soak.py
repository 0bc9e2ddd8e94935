"""Every kind of call, mixed, on several threads and streams for minutes: right results, and memory that stays flat.

    python -m bench.soak --minutes 5
    python -m bench.soak --minutes 1 --dtypes bf16 --threads 8 --seed 3

Each thread takes, in a random order that its seed decides, one prepared call and one stream after another. Shapes take
every kind of plan; the calls are

    raw       the raw helper on a copy
    loss      a mean without a gradient
    mean      a mean and its gradient, for an incoming 2
    inplace   the same, the logits overwritten in forward (of fp16 in backward)
    options   a mean with options, its outputs and its gradient
    rows      the same without a reduction
    linear    a mean of a linear layer's outputs, with the gradients of inputs and weight
    graph     a captured step, replayed on inputs that differ from replay to replay

Of each kind and thread the first result and every `--check-every`th is checked in float64 on the device. Every other
one but `linear`, whose products are PyTorch's, must have the loss that its inputs gave first, bit for bit. Once every
thread has made every call on every stream, device memory, the process's resident memory and its threads are counted; at
the end they must be what they were, device memory apart from `DEVICE_SLACK_MIB` and `CACHE_SLACK_MIB`, resident memory
from `RESIDENT_SLACK_MIB`.
"""

import argparse
import contextlib
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from bench.cases import DTYPES, Shape, dtype_name, parse_dtypes, parse_shapes
from bench.check import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Mismatch, Outcome, Reference
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

SHAPES = "4096x100,2048x3001,512x9001,256x32000,8x128256,2x600001,1x1100001,20000x64"
"""Held; a row a warp; a block a row; a cluster; few rows; 16 blocks, fp32 streamed; streamed; more entries than one
block adds.
"""

CPU_SHAPES = "16x100,4x3001,2x9001"
OPTIONS: tuple[dict[str, Any], ...] = (
    {"softcap": 30.0},
    {"label_smoothing": 0.1},
    {"return_entropy": True},
    {"logit_scale": 0.5, "return_lse": True, "z_loss_multiplier": 1e-4},
    {"softcap": 30.0, "label_smoothing": 0.1, "return_entropy": True, "return_lse": True},
)
"""Each takes another kind of kernel."""

HIDDEN, LINEAR_SHAPE = 64, Shape(96, 4000)
CHUNK_ROWS = 40
IGNORE_INDEX = -100
INCOMING = 2.0
"""A power of two: dividing by it gives the gradient back."""

GRAPH_INPUTS = 3
SYNC_EVERY = 32
"""Calls of a thread between two waits for the device: what may be on its way."""

DEVICE_SLACK_MIB = 1.0
"""Of tensors that live: less than what a few hundred calls that each leave a block behind would add."""

CACHE_SLACK_MIB = 64.0
"""Of segments that cannot be given back, since something small lies in them."""

RESIDENT_SLACK_MIB = 64.0

Results = list[torch.Tensor]


class Call(NamedTuple):
    """One prepared call."""

    kind: str
    name: str
    run: Callable[[], Results]
    """The first result is the loss."""
    verify: Callable[[Results], None]
    """Raises `Mismatch`."""
    expected: Callable[[], torch.Tensor] | None
    """The loss that the last run must have had, bit for bit; None where that is not promised."""
    done: Callable[[], None] = lambda: None
    """To be called when the results have been used."""


class Data:
    """Logits and labels, a third of the rows ignored, and the float64 answer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.logits = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        self.labels = torch.randint(shape.vocab, (shape.rows,), device=device, generator=generator)
        self.labels[1::3] = IGNORE_INDEX
        self.row_weight = torch.rand(shape.rows, device=device, generator=generator) + 0.5
        self.valid = self.labels != IGNORE_INDEX
        self.reference = Reference(self.logits[self.valid], self.labels[self.valid])

    def verify(self, mean_loss: torch.Tensor, grad: torch.Tensor | None, grad_of: str) -> None:
        """Raise `Mismatch` unless these are right."""
        of_valid = None if grad is None else grad[self.valid]
        self.reference.verify(Outcome(mean_loss, of_valid, grad_of))
        if grad is not None and bool(grad[~self.valid].any()):
            raise Mismatch("an ignored row's gradient is not 0")


@dataclass
class Counts:
    """Of one thread, or of all."""

    calls: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)


class Usage(NamedTuple):
    """What a process holds."""

    allocated_mib: float
    reserved_mib: float
    resident_mib: float
    threads: int

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"{self.allocated_mib:.1f} MiB of tensors, {self.reserved_mib:.1f} MiB of device memory, "
            f"{self.resident_mib:.1f} MiB resident, {self.threads} threads"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run it and return the exit code: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--shapes", type=parse_shapes, help=f"ROWSxVOCAB[,...]; default {SHAPES}")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16,fp16,fp32", help=f"out of {', '.join(DTYPES)}")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--check-every", type=int, default=200, metavar="CALLS", help="at most 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    for name, most in (("threads", 64), ("streams", 64), ("check_every", 1000)):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name.replace('_', '-')}: expected 1 to {most}, got {getattr(options, name)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    shapes = options.shapes or parse_shapes(SHAPES if device.type == "cuda" else CPU_SHAPES)
    return Soak(device, shapes, options).run()


class Soak:
    """The prepared calls, and the threads that make them."""

    def __init__(self, device: torch.device, shapes: Sequence[Shape], options: argparse.Namespace) -> None:
        self.device, self.seconds, self.seed = device, 60.0 * options.minutes, options.seed
        self.check_every, self.threads = options.check_every, options.threads
        is_cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) if is_cuda else None for _ in range(options.streams)]
        self.failures: list[str] = []
        self.stop = threading.Event()
        self.barrier = threading.Barrier(self.threads + 1)
        self.deadline = 0.0
        shared: list[Call] = []
        replayed: list[list[Call]] = [[] for _ in range(self.threads)]
        for number, dtype in enumerate(options.dtypes):
            for place, shape in enumerate(shapes):
                drawn = range(GRAPH_INPUTS if is_cuda else 1)
                inputs = [Data(shape, dtype, device, 100 * place + each) for each in drawn]
                given = [OPTIONS[(number + place + each) % len(OPTIONS)] for each in (0, 2)]
                shared += list(plain_calls(inputs[0], f"{shape} {dtype_name(dtype)}"))
                shared += [
                    options_call(inputs[0], f"{shape} {dtype_name(dtype)}", reduction, each)
                    for reduction, each in zip(("mean", "none"), given, strict=True)
                ]
                for thread in range(self.threads if is_cuda else 0):
                    # A graph writes where it was captured, so each thread has graphs of its own, of one dtype.
                    if thread % len(options.dtypes) == number:
                        stream = self.streams[thread % len(self.streams)]
                        replayed[thread].append(graph_call(inputs, f"{shape} {dtype_name(dtype)}", stream))
            shared.append(linear_call(dtype, device))
        self.calls = [[*shared, *each] for each in replayed]
        self.counts = [Counts() for _ in range(self.threads)]

    def run(self) -> int:
        """Run all threads to the deadline, print what happened, and return the exit code."""
        before = after = None
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(self.threads)]
        for thread in threads:
            thread.start()
        peak_mib = 0.0
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait()  # all have made every call
            before = usage(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.deadline = time.monotonic() + self.seconds
            self.barrier.wait()  # they may begin
            self.barrier.wait()  # all have ended, and are still there
            if self.device.type == "cuda":
                peak_mib = torch.cuda.max_memory_allocated(self.device) / 2**20
            after = usage(self.device)
            self.barrier.wait()  # they may leave
        for thread in threads:
            thread.join()
        if before is not None and after is not None:
            self.failures += grown(before, after)
            print(f"before: {before}\nafter:  {after}\nmost at a time: {peak_mib:.1f} MiB of tensors")
        total = Counts()
        for counts in self.counts:
            total.calls += counts.calls
            total.checks += counts.checks
        for kind in sorted({call.kind for calls in self.calls for call in calls}):
            print(f"{kind:<8} {total.calls[kind]:>9} calls, {total.checks[kind]:>6} checked in float64")
        if not total.checks:
            self.failures.append("nothing was checked")
        for failure in self.failures:
            print(f"FAILED {failure}")
        print(
            f"soak {'FAILED' if self.failures else 'passed'}: {total.calls.total()} calls on {self.device.type}, "
            f"{total.checks.total()} checked, {len(self.failures)} failures"
        )
        return 1 if self.failures else 0

    def work(self, number: int) -> None:
        """Be one of the threads."""
        try:
            calls = self.calls[number]
            # How often a call's loss was another one, by stream: each is written on its own stream alone.
            differs = [torch.zeros(len(calls), dtype=torch.int64, device=self.device) for _ in self.streams]
            synchronize(self.device)
            self.warm_up(calls)
            self.barrier.wait()
            self.barrier.wait()
            self.take_turns(number, calls, differs)
            self.barrier.wait()
            self.barrier.wait()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self.failures.append(f"thread {number}: {type(error).__name__}: {error}")
            self.stop.set()
            self.barrier.abort()

    def warm_up(self, calls: Sequence[Call]) -> None:
        """Make every call on every stream once, so that what is allocated once is there."""
        for stream in self.streams:
            with current(stream):
                for call in calls:
                    results = call.run()
                    if call.kind == "linear":  # whose check has products too, and they a workspace for each stream
                        call.verify(results)
                    call.done()
                    del results
            synchronize(self.device)

    def take_turns(self, number: int, calls: Sequence[Call], differs: Sequence[torch.Tensor]) -> None:
        """Make calls until the time is over or something is wrong."""
        order = random.Random(self.seed * 1000 + number)
        counts = self.counts[number]
        kinds: dict[str, list[int]] = {}
        for index, call in enumerate(calls):
            kinds.setdefault(call.kind, []).append(index)
        names = sorted(kinds)
        made = 0
        while not self.stop.is_set() and time.monotonic() < self.deadline:
            kind = order.choice(names)  # as many of each, however many are prepared
            index, place = order.choice(kinds[kind]), order.randrange(len(self.streams))
            call = calls[index]
            with current(self.streams[place]):
                results = call.run()
                if call.expected is not None:
                    differs[place][index] += (bits(results[0]) != bits(call.expected())).any()
                if counts.calls[kind] % self.check_every == 0:
                    try:
                        call.verify(results)
                    except Mismatch as error:
                        raise Mismatch(f"{call.kind} {call.name}, call {made}: {error}") from error
                    counts.checks[kind] += 1
                call.done()
                del results
            counts.calls[kind] += 1
            made += 1
            if made % SYNC_EVERY == 0:
                self.look_at(calls, differs)
        self.look_at(calls, differs)

    def look_at(self, calls: Sequence[Call], differs: Sequence[torch.Tensor]) -> None:
        """Wait for the device and raise `Mismatch` if a loss was another one than before."""
        synchronize(self.device)
        wrong = torch.stack(list(differs)).sum(dim=0).nonzero().flatten().tolist()
        if wrong:
            names = ", ".join(f"{calls[index].kind} {calls[index].name}" for index in wrong)
            raise Mismatch(f"another loss than that of the same inputs before: {names}")


def plain_calls(data: Data, name: str) -> Iterator[Call]:
    """Yield the calls without options, each verified once."""

    def raw() -> Results:
        x = data.logits.clone()
        ce_sum, _, n_valid = cross_entropy_with_grad_kernel(x, data.labels)
        return [ce_sum / n_valid, x]

    def loss() -> Results:
        with torch.no_grad():
            return [cross_entropy(data.logits, data.labels)]

    def mean() -> Results:
        return with_gradient(data.logits.detach().requires_grad_(), data.labels)

    def inplace() -> Results:
        leaf = data.logits.detach().requires_grad_()
        return with_gradient(leaf, data.labels, leaf * 1, inplace=True)

    yield prepared("raw", name, raw, lambda results: data.verify(results[0], results[1], "sum"))
    yield prepared("loss", name, loss, lambda results: data.verify(results[0], None, "mean"))
    for run in (mean, inplace):
        yield prepared(run.__name__, name, run, lambda results: data.verify(results[0], results[1] / INCOMING, "mean"))


def with_gradient(
    leaf: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor | None = None, **options: Any
) -> Results:
    """Return a mean and the leaf's gradient for `INCOMING`."""
    loss = cross_entropy(leaf if logits is None else logits, labels, **options)
    (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, INCOMING))
    return [loss.detach(), grad]


def prepared(kind: str, name: str, run: Callable[[], Results], verify: Callable[[Results], None]) -> Call:
    """Return a call whose first result is right, and whose loss the others must have.

    Raises:
        Mismatch: it is not.
    """
    results = run()
    try:
        verify(results)
    except Mismatch as error:
        raise Mismatch(f"{kind} {name}, first call: {error}") from error
    first = results[0].clone()
    return Call(kind, name, run, verify, lambda: first)


def options_call(data: Data, name: str, reduction: str, options: dict[str, Any]) -> Call:
    """Return a call with options, verified once."""

    def run() -> Results:
        leaf = data.logits.detach().requires_grad_()
        given = {**options, "reduction": reduction, "row_weight": data.row_weight, "return_predicted_tokens": True}
        output = cross_entropy(leaf, data.labels, **given)
        outputs = [each for each in (output.loss, output.lse, output.entropy) if each is not None]
        (grad,) = torch.autograd.grad(outputs, leaf, [torch.ones_like(each) for each in outputs])
        return [*(each.detach() for each in outputs), grad, output.predicted_tokens]

    def verify(results: Results) -> None:
        *outputs, grad, predicted = results
        exact, exact_grad, size = options_in_float64(data, reduction, options)
        for number, (got, expected) in enumerate(zip(outputs, exact, strict=True)):
            if not bool(((got.double() - expected).abs() <= 5e-5 + 2e-5 * expected.abs()).all()):
                raise Mismatch(f"{options}, {reduction}: output {number}")
        number_format = torch.finfo(grad.dtype)
        # One rounding, fp32 arithmetic relative to the terms, and what the dtype cannot hold.
        allowed = (number_format.eps + 1e-5) * exact_grad.abs() + 1e-4 * size
        allowed += number_format.smallest_normal * number_format.eps
        if not bool(((grad.double() - exact_grad).abs() <= allowed).all()):
            raise Mismatch(f"{options}, {reduction}: gradient")
        # A softcap may make equal what is not quite.
        if bool((data.logits.gather(1, predicted[:, None])[:, 0] < data.logits.amax(dim=1) - 1e-5).any()):
            raise Mismatch(f"{options}, {reduction}: predicted tokens")

    return prepared("options" if reduction == "mean" else "rows", f"{name} {options}", run, verify)


def options_in_float64(
    data: Data, reduction: str, options: dict[str, Any]
) -> tuple[Results, torch.Tensor, torch.Tensor]:
    """Return the loss and what else is asked for, the gradient of their sum, and the size of its terms."""
    softcap, smoothing = options.get("softcap"), options.get("label_smoothing", 0.0)
    z, scale = options.get("z_loss_multiplier", 0.0), options.get("logit_scale", 1.0)
    leaf = data.logits.double().requires_grad_()
    u = leaf * scale
    u = softcap * torch.tanh(u / softcap) if softcap else u
    lse = u.logsumexp(dim=1)
    at_target = u.gather(1, data.labels.clamp(min=0)[:, None])[:, 0]
    ce = lse - (1.0 - smoothing) * at_target - smoothing * u.mean(dim=1)
    divisor = data.valid.sum() if reduction == "mean" else 1
    rows = torch.where(data.valid, data.row_weight * (ce + z * lse.square()), 0.0) / divisor
    outputs = [rows.sum() if reduction == "mean" else rows]
    p = (u - lse[:, None]).exp()
    of_row = data.row_weight / divisor * data.valid
    size = p * (of_row * (1.0 + 2.0 * z * lse.abs()))[:, None] + (of_row * smoothing / u.shape[1])[:, None]
    if options.get("return_lse"):
        outputs.append(lse)
        size = size + p
    if options.get("return_entropy"):
        outputs.append(lse - (p * u).sum(dim=1))
        size = size + p * ((u - lse[:, None]).abs() + outputs[-1][:, None])
    (grad,) = torch.autograd.grad(torch.stack([each.sum() for each in outputs]).sum(), leaf)
    return [each.detach() for each in outputs], grad, size.detach()


def linear_call(dtype: torch.dtype, device: torch.device) -> Call:
    """Return a call of a linear layer's loss, in chunks of which the last is not whole; verified once."""
    rows, vocab = LINEAR_SHAPE
    generator = torch.Generator(device).manual_seed(0)
    inputs = torch.empty(rows, HIDDEN, dtype=dtype, device=device).normal_(generator=generator)
    weight = torch.empty(vocab, HIDDEN, dtype=dtype, device=device).normal_(std=HIDDEN**-0.5, generator=generator)
    labels = torch.randint(vocab, (rows,), device=device, generator=generator)
    labels[1::3] = IGNORE_INDEX

    def run() -> Results:
        leaves = inputs.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = chunked_linear_cross_entropy(*leaves, labels, chunk_size=CHUNK_ROWS)
        grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, INCOMING))
        return [loss.detach(), *grads]

    def verify(results: Results) -> None:
        leaves = [each.double().requires_grad_() for each in (inputs, weight)]
        loss = F.cross_entropy(F.linear(*leaves), labels, ignore_index=IGNORE_INDEX)
        exact = torch.autograd.grad(loss, leaves, torch.full_like(loss, INCOMING))
        error = abs(float(results[0]) - float(loss.detach()))
        if not error <= LOSS_TOLERANCE[dtype] * max(1.0, float(loss.detach())):
            raise Mismatch(f"linear {dtype_name(dtype)}: the loss is off by {error:.3g}")
        for name, got, expected in zip(("inputs", "weight"), results[1:], exact, strict=True):
            off = float((got.double() - expected).norm() / expected.norm())
            if not off <= GRADIENT_TOLERANCE[dtype]:
                raise Mismatch(f"linear {dtype_name(dtype)}: the gradient of {name} is off by {off:.3g} of its norm")

    name = f"{rows}x{HIDDEN}x{vocab} {dtype_name(dtype)}"
    return prepared("linear", name, run, verify)._replace(expected=None)


def graph_call(inputs: Sequence[Data], name: str, stream: torch.cuda.Stream | None) -> Call:
    """Return a captured step, to be used by one thread at a time, whose inputs change from run to run; verified once.

    Its results are overwritten by the next run, which waits until `done` was called, on whatever stream that was.
    """
    leaf, labels = inputs[0].logits.clone().requires_grad_(), inputs[0].labels.clone()
    expected = [with_gradient(data.logits.detach().requires_grad_(), data.labels)[0] for data in inputs]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = with_gradient(leaf, labels)
    torch.cuda.synchronize()
    used = torch.cuda.Event()
    used.record()
    runs = 0

    def run() -> Results:
        nonlocal runs
        runs += 1
        data = inputs[runs % len(inputs)]
        torch.cuda.current_stream().wait_event(used)
        with torch.no_grad():
            leaf.copy_(data.logits)
        labels.copy_(data.labels)
        graph.replay()
        return list(results)

    def verify(found: Results) -> None:
        inputs[runs % len(inputs)].verify(found[0], found[1] / INCOMING, "mean")

    verify(run())
    used.record()
    return Call("graph", name, run, verify, lambda: expected[runs % len(inputs)], lambda: used.record())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 numbers: NaN equals itself."""
    return tensor.view(torch.int32)


def current(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Make a stream current; None on the CPU."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usage(device: torch.device) -> Usage:
    """Return what the process holds when nothing runs and what can be given back is."""
    gc.collect()
    allocated = reserved = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident_kib = int(status["VmRSS"].split()[0])
    return Usage(allocated / 2**20, reserved / 2**20, resident_kib / 1024, int(status["Threads"]))


def grown(before: Usage, after: Usage) -> list[str]:
    """Return what there is more of than there may be."""
    slacks = Usage(DEVICE_SLACK_MIB, CACHE_SLACK_MIB, RESIDENT_SLACK_MIB, 0)
    return [
        f"{name}: {was:.1f} before, {now:.1f} after"
        for name, was, now, slack in zip(Usage._fields, before, after, slacks, strict=True)
        if now > was + slack
    ]


if __name__ == "__main__":
    sys.exit(main())
