"""Time and order: other work on the GPU, streams, threads, processes, graphs and devices change no result."""

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch._subclasses import fake_tensor

from dsl_kernels.cross_entropy import plan
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels import options as options_kernels
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import chunked_linear_cross_entropy, cross_entropy

ROOT = Path(__file__).resolve().parents[1]

SHAPES = {
    "wide": (512, 65536, torch.bfloat16),  # a cluster a row, several rows in turn
    "narrow": (32768, 2048, torch.bfloat16),  # a warp a row, sums added by a cluster
    "few": (64, 32000, torch.bfloat16),  # larger clusters, so that all multiprocessors have some
    "streamed": (4, 600_001, torch.float32),  # read twice, rows of several alignments
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
REPEATS = 500

Results = list[torch.Tensor]


def drawn(draw: Any, shape: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the labels of one of `SHAPES`."""
    B, V, dtype = SHAPES[shape]
    return draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.1)


def raw(x: torch.Tensor, labels: torch.Tensor) -> Results:
    """Return the gradient in the logits' place and the sums."""
    grad = x.detach().clone()
    return [grad, *cross_entropy_with_grad_kernel(grad, labels, 1e-4)]


def loss_and_gradient(x: torch.Tensor, labels: torch.Tensor, **options: Any) -> Results:
    """Return the loss and its gradient times 3."""
    leaf = x.detach().requires_grad_()
    loss = cross_entropy(leaf, labels, **options)
    (grad,) = torch.autograd.grad(loss, leaf, torch.full((), 3.0, device=x.device))
    return [loss.detach(), grad]


def loss_alone(x: torch.Tensor, labels: torch.Tensor) -> Results:
    """Return the loss where no gradient is wanted."""
    with torch.no_grad():
        return [cross_entropy(x, labels)]


def every_call(x: torch.Tensor, labels: torch.Tensor) -> Results:
    """Return the results of every kind of call."""
    mean, total = (loss_and_gradient(x, labels, reduction=reduction) for reduction in ("mean", "sum"))
    return [*raw(x, labels), *mean, *total, *loss_alone(x, labels)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor's bits, of which NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differences(results: Results, expected: Results) -> torch.Tensor:
    """Return how many of the tensors differ in a bit, on their device: nothing waits for it."""
    return torch.stack([(bits(a) != bits(b)).any() for a, b in zip(results, expected, strict=True)]).sum()


def run_script(script: str, *arguments: str, timeout: float = 120) -> str:
    """Run a program in a fresh interpreter, assert that it ended well, and return what it printed."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def in_threads(work: Callable[[int], object], count: int) -> list[Any]:
    """Run `work` with 0, 1, ... in threads that start at once, and return what each returned."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def start(number: int) -> None:
        try:
            barrier.wait()
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


# --- Other work on the GPU ------------------------------------------------------------------------------


def test_the_shapes_take_the_plans_that_they_stand_for():
    taken = {}
    for name, (B, V, dtype) in SHAPES.items():
        spec, launch = plan.select_fused("sm_90a", str(dtype).removeprefix("torch."), V, True, B, 132)
        taken[name] = (spec.narrow, spec.streamed, getattr(launch, "cluster", 0), launch.numbers(B, 132)[2] > 0)
    assert taken["narrow"][:2] == (True, False)
    assert taken["streamed"][:2] == (False, True)
    assert taken["wide"] == (False, False, 6, True)
    assert taken["few"] == (False, False, 4, False)


class Load:
    """Work on streams of its own, of which some always waits to be done."""

    PENDING = 256

    def __init__(self, device: torch.device, kind: str) -> None:
        self._kind = kind
        self._streams = [torch.cuda.Stream(device) for _ in range(16 if kind == "spinning" else 1)]
        self._pending: list[torch.cuda.Event] = []
        if kind == "copies":
            self._buffers = torch.zeros(2, 1 << 28, dtype=torch.uint8, device=device)
        elif kind == "products":
            self._buffers = torch.zeros(3, 4096, 4096, dtype=torch.bfloat16, device=device)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        # Its buffers are given back, and must not be written any more.
        torch.cuda.synchronize()

    def keep_busy(self) -> None:
        """Hand out more work until enough of it waits."""
        if self._kind == "nothing":
            return
        self._pending = [event for event in self._pending if not event.query()]
        while len(self._pending) < self.PENDING:
            for stream in self._streams:
                with torch.cuda.stream(stream):
                    if self._kind == "copies":
                        self._buffers[0].copy_(self._buffers[1])
                    elif self._kind == "products":
                        torch.mm(self._buffers[0], self._buffers[1], out=self._buffers[2])
                    else:
                        torch.cuda._sleep(100_000)  # 0.05 ms in which a block of each stream keeps its place
            self._pending.append(self._streams[-1].record_event())

    def is_busy(self) -> bool:
        """Return whether some of it is still to be done."""
        return any(not event.query() for event in self._pending)


@pytest.mark.gpu
@EVERY_SHAPE
def test_500_repeats_give_the_same_bits_while_another_stream_copies(draw, cuda, shape):
    x, labels = drawn(draw, shape, cuda)
    expected = every_call(x, labels)
    torch.cuda.synchronize()
    differs = torch.zeros((), dtype=torch.int64, device=cuda)
    looks = busy = 0
    with Load(cuda, "copies") as load:
        for number in range(REPEATS):
            load.keep_busy()
            differs += differences(every_call(x, labels), expected)
            if number % 4 == 3:
                torch.cuda.current_stream(cuda).synchronize()
                looks, busy = looks + 1, busy + load.is_busy()
    assert differs == 0
    assert busy > looks / 2


@pytest.mark.gpu
@EVERY_SHAPE
@pytest.mark.parametrize("kind", ["nothing", "copies", "products", "spinning"])
def test_which_block_ends_last_decides_no_bit(draw, cuda, shape, kind):
    x, labels = drawn(draw, shape, cuda)
    expected = every_call(x, labels)
    torch.cuda.synchronize()
    differs = torch.zeros((), dtype=torch.int64, device=cuda)
    with Load(cuda, kind) as load:
        for number in range(20):
            load.keep_busy()
            # The load alone runs meanwhile, longer each time: the calls come at another moment of it.
            torch.cuda._sleep(50_000 * number)
            differs += differences(every_call(x, labels), expected)
            torch.cuda.current_stream(cuda).synchronize()
    assert differs == 0


@pytest.mark.gpu
@EVERY_SHAPE
def test_calls_that_follow_one_another_at_once_give_what_they_give_one_at_a_time(draw, cuda, shape):
    source, labels = drawn(draw, shape, cuda)

    def chain(wait: Callable[[], object]) -> Results:
        # Each call reads what was written just before it, by another call or by PyTorch, and may begin while that ends.
        x, numbers = source.clone(), []
        for _ in range(20):
            numbers += cross_entropy_with_grad_kernel(x, labels)
            wait()
            loss, grad = loss_and_gradient(x, labels)  # which counts the labels first
            wait()
            x.add_(grad, alpha=1000.0)
            loss_again, grad = loss_and_gradient(x, labels)
            wait()
            x.sub_(grad, alpha=1000.0)
            numbers += [loss, loss_again, *loss_alone(x, labels)]
            wait()
        return [x, torch.stack(numbers)]

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert differences(chain(lambda: None), expected) == 0


# --- Streams and threads --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [("few",) * 4, ("wide",) * 2, ("streamed",) * 2, tuple(SHAPES)], ids="-".join)
def test_streams_at_once_do_not_disturb_each_other_forward_and_backward(draw, cuda, shapes):
    inputs = [drawn(draw, shape, cuda) for shape in shapes]
    expected = [every_call(x, labels) for x, labels in inputs]
    streams = [torch.cuda.Stream(cuda) for _ in shapes]
    counts = torch.zeros(len(shapes), dtype=torch.int64, device=cuda)
    torch.cuda.synchronize()
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                counts[number] += differences(every_call(*inputs[number]), expected[number])
    torch.cuda.synchronize()
    assert not counts.any()


FIRST_CALLS_ON_STREAMS = """
import threading
import reference, torch
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

torch.set_num_threads(1)
shapes = [(V, dtype) for V in (100, 3001, 70000, 1200000) for dtype in (torch.bfloat16, torch.float32)]
inputs = [(torch.randn(16, V, dtype=dtype).cuda(), torch.randint(V, (16,)).cuda()) for V, dtype in shapes]
torch.cuda.synchronize()
results, errors = [None] * 8, []
barrier = threading.Barrier(8)

def work(i):
    stream = torch.cuda.Stream()
    barrier.wait()
    with torch.cuda.stream(stream):
        x, labels = inputs[i]
        leaf, raw = x.clone().requires_grad_(), x.clone()
        loss = cross_entropy(leaf, labels)
        (grad,) = torch.autograd.grad(3 * loss, leaf)
        sums = cross_entropy_with_grad_kernel(raw, labels)
        rows = cross_entropy(x, labels, reduction="none", softcap=30.0)
    stream.synchronize()
    results[i] = loss.detach(), grad, raw, sums, rows

def start(i):
    try:
        work(i)
    except BaseException as error:
        errors.append(repr(error))
        barrier.abort()

threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
for (x, labels), (loss, grad, raw, sums, rows) in zip(inputs, results, strict=True):
    assert abs(float(loss) - float(reference.loss(x, labels))) <= reference.loss_tolerance(x, labels), x.shape
    assert reference.gradient_roundings(grad, x, labels, reduction="mean", grad_output=3.0, kept=1 / 3) <= 1, x.shape
    assert reference.gradient_roundings(raw, x, labels) <= 1, x.shape
    assert abs(float(sums.ce_sum / 16) - float(loss)) <= 2 * reference.loss_tolerance(x, labels), x.shape
    expected = reference.terms_with_options(x, labels, reduction="none", softcap=30.0).loss
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.gpu
def test_eight_threads_may_make_their_first_calls_at_once_on_streams_of_their_own(tmp_path):
    script = tmp_path / "first_calls.py"
    script.write_text(FIRST_CALLS_ON_STREAMS)
    run_script(str(script))


def test_backward_of_graphs_of_their_own_may_start_in_several_threads(draw, device):
    inputs = [(draw.logits(16, 100 * (i + 1), torch.float32, device), draw.labels(16, 100, device)) for i in range(8)]
    expected = [loss_and_gradient(x, labels) for x, labels in inputs]
    leaves = [x.requires_grad_() for x, _ in inputs]
    losses = [cross_entropy(x, labels) for x, labels in inputs]

    def backward(number: int) -> torch.Tensor:
        (grad,) = torch.autograd.grad(3 * losses[number], leaves[number])
        return grad

    for grad, (_, right) in zip(in_threads(backward, 8), expected, strict=True):
        assert reference.same_bits(grad, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)  # recomputed in backward, kept
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_of_one_graph_may_run_in_several_threads_at_once(draw, device, dtype, reduction):
    x, labels = draw.logits(16, 3000, dtype, device).requires_grad_(), draw.labels(16, 3000, device, ignored=0.2)
    loss = cross_entropy(x, labels, reduction=reduction)
    factors = [torch.full(loss.shape, 0.5 * (i + 1), device=device) for i in range(8)]
    expected = [torch.autograd.grad(loss, x, factor, retain_graph=True)[0] for factor in factors]

    def backward(number: int) -> torch.Tensor:
        (grad,) = torch.autograd.grad(loss, x, factors[number], retain_graph=True)
        return grad

    for _ in range(5):
        for grad, right in zip(in_threads(backward, 8), expected, strict=True):
            assert reference.same_bits(grad, right)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_backward_pass_through_two_losses_is_right_on_any_thread(draw, device, dtype, enabled):
    x, labels = draw.logits(16, 3000, dtype, device), draw.labels(16, 3000, device, ignored=0.2)
    others = draw.labels(16, 3000, device)
    parts = []
    for target, factor, options in ((labels, 1.0, {}), (others, 3.0, {"reduction": "sum"})):
        leaf = x.clone().requires_grad_()
        loss = cross_entropy(leaf, target, **options)
        parts += torch.autograd.grad(loss, leaf, torch.full((), factor, device=device))
        kept = reference.kept_factor(dtype, factor)
        arguments = {"reduction": "mean", **options, "grad_output": factor, "kept": kept}
        assert reference.gradient_roundings(parts[-1], x, target, **arguments) <= 1
    threads: list[str] = []
    with torch.autograd.set_multithreading_enabled(enabled):
        leaf = x.clone().requires_grad_()
        logits = leaf * 1
        logits.register_hook(lambda grad: threads.append(threading.current_thread().name))
        total = cross_entropy(logits, labels) + 3 * cross_entropy(logits, others, reduction="sum")
        total.backward()
    assert reference.same_bits(leaf.grad, parts[0] + parts[1])
    # A GPU's nodes have a thread of autograd's own, unless that is switched off.
    assert (threads == [threading.current_thread().name]) == (device.type == "cpu" or not enabled)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"inplace": True}], ids=str)
def test_backward_started_in_another_thread_waits_for_the_stream_of_the_forward_pass(draw, cuda, options):
    source, labels = draw.logits(64, 5000, torch.float32, cuda), draw.labels(64, 5000, cuda)
    leaf, side = torch.full_like(source, math.nan).requires_grad_(), torch.cuda.Stream(cuda)

    def step() -> torch.Tensor:
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # about 0.05 s: a launch elsewhere would read NaN
            with torch.no_grad():
                leaf.copy_(source)
            loss = cross_entropy(leaf * 1, labels, **options).sum()

        def backward(number: int) -> torch.Tensor:
            with torch.cuda.stream(torch.cuda.Stream(cuda)):
                (grad,) = torch.autograd.grad(3 * loss, leaf)
            return grad

        (grad,) = in_threads(backward, 1)
        torch.cuda.synchronize()
        return grad

    step()  # what is loaded by a first call may wait for the whole device
    with torch.no_grad():
        leaf.fill_(math.nan)
    torch.cuda.synchronize()
    reduction = "sum" if options.get("reduction") == "none" else "mean"
    kept = None if options.get("reduction") == "none" else 1 / 3
    assert reference.gradient_roundings(step(), source, labels, reduction=reduction, grad_output=3.0, kept=kept) <= 1


# --- Processes ------------------------------------------------------------------------------------------

LOADING = '''
import sys
import reference, torch
from torch.utils.data import DataLoader, Dataset
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

def inputs(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 200, generator=generator), torch.randint(200, (6,), generator=generator)

class Scored(Dataset):
    """Its items are losses and gradients."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x, labels = inputs(i)
        loss = cross_entropy(x.requires_grad_(), labels)
        try:
            loss.backward()
            grad = x.grad
        except RuntimeError as error:
            # PyTorch's own, for any backward pass in a fork of a process with a GPU that has made one.
            assert "fork-based multiprocessing" in str(error), error
            grad = torch.zeros(0)
        raw = x.detach().clone()
        cross_entropy_with_grad_kernel(raw, labels)
        return i, loss.detach(), grad, raw

def collate(items):
    rows = torch.stack([raw[0] for _, _, _, raw in items])
    return items, cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64), reduction="none", softcap=9.0)

if __name__ == "__main__":
    method, device = sys.argv[1:]
    x, labels = inputs(100)
    x, labels = x.to(device).requires_grad_(), labels.to(device)
    cross_entropy(x, labels).backward()
    seen = []
    for items, rows in DataLoader(Scored(), 4, num_workers=2, collate_fn=collate, multiprocessing_context=method):
        assert rows.shape == (4,) and rows.isfinite().all()
        for i, loss, grad, raw in items:
            x, labels = inputs(i)
            assert abs(float(loss) - float(reference.loss(x, labels))) <= reference.loss_tolerance(x, labels)
            assert reference.gradient_roundings(raw, x, labels) <= 1
            if grad.numel():
                assert reference.gradient_roundings(grad, x, labels, reduction="mean") <= 1
            else:
                assert method == "fork" and torch.cuda.is_available()
            seen.append(i)
    assert seen == list(range(8))
    x, labels = inputs(100)
    cross_entropy(x.to(device).requires_grad_(), labels.to(device)).backward()
    print("done")
'''


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_may_use_the_cpu_after_their_parent_has_used_a_device(device, method, tmp_path):
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    assert run_script(str(script), method, str(device)).endswith("done\n")


FORKED = """
import multiprocessing, sys
import torch
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

x, labels = torch.randn(6, 3000, device="cuda"), torch.randint(3000, (6,), device="cuda")
calls = {
    "raw": lambda: cross_entropy_with_grad_kernel(x, labels),
    "loss": lambda: cross_entropy(x, labels),
    "gradient": lambda: cross_entropy(x.requires_grad_(), labels),
    "options": lambda: cross_entropy(x, labels, reduction="none", softcap=5.0),
    "new tensors": lambda: cross_entropy(torch.zeros(2, 3).cuda(), torch.zeros(2, dtype=torch.int64).cuda()),
}
with torch.no_grad():
    right = float(calls["loss"]())

def child(connection):
    for name, call in calls.items():
        try:
            result = call()
            connection.send((name, "returned", str(result)))
        except BaseException as error:
            connection.send((name, type(error).__name__, str(error)))

context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
process = context.Process(target=child, args=(theirs,))
process.start()
theirs.close()
process.join(60)
if process.is_alive():
    process.kill()
    raise SystemExit("the child hangs")
for name in calls:
    told, kind, text = ours.recv()
    assert told == name and "forked subprocess" in text, (told, kind, text)
with torch.no_grad():
    assert float(calls["loss"]()) == right
"""


@pytest.mark.gpu
def test_a_forked_child_that_calls_cuda_gets_the_error_of_pytorch(tmp_path):
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    run_script(str(script))


# --- CUDA graphs ----------------------------------------------------------------------------------------


class Step:
    """A step with inputs of its own, to be captured."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x.detach().clone().requires_grad_(), labels.clone()

    def take(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        """Copy other inputs to where the step reads its own."""
        with torch.no_grad():
            self.x.copy_(x)
        self.labels.copy_(labels)

    def run(self) -> Results:
        """Return every result."""
        return every_call(self.x, self.labels)


def captured(step: Step, stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Return a graph of a step and where its results will be."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        results = step.run()
    return graph, results


@pytest.mark.gpu
@EVERY_SHAPE
def test_1000_replays_follow_their_inputs_with_eager_calls_between(draw, cuda, shape):
    inputs = [drawn(draw, shape, cuda) for _ in range(10)]
    expected = [every_call(x, labels) for x, labels in inputs]
    other, other_labels = draw.logits(48, 5003, torch.float32, cuda), draw.labels(48, 5003, cuda)
    other_expected = every_call(other, other_labels)
    stream, differs = torch.cuda.Stream(cuda), torch.zeros((), dtype=torch.int64, device=cuda)
    step = Step(*inputs[0])
    graph, results = captured(step, stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for number in range(1000):
            step.take(*inputs[number % 10])
            graph.replay()
            if number % 7 == 0:
                differs += differences(every_call(other, other_labels), other_expected)
            differs += differences(results, expected[number % 10])
    stream.synchronize()
    assert differs == 0


@pytest.mark.gpu
@EVERY_SHAPE
def test_two_graphs_of_one_call_that_share_a_pool_may_be_replayed_in_turn(draw, cuda, shape):
    inputs = [drawn(draw, shape, cuda) for _ in range(3)]
    expected = [every_call(x, labels) for x, labels in inputs]
    stream, differs = torch.cuda.Stream(cuda), torch.zeros((), dtype=torch.int64, device=cuda)
    steps = [Step(*inputs[0]), Step(*inputs[1])]
    first, first_results = captured(steps[0], stream)
    second, second_results = captured(steps[1], stream, first.pool())
    graphs = ((first, first_results), (second, second_results))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for number in range(100):
            step, (graph, results) = steps[number % 2], graphs[number % 2]
            step.take(*inputs[number % 3])
            graph.replay()
            differs += differences(results, expected[number % 3])
    stream.synchronize()
    assert differs == 0


# --- What is kept between launches ----------------------------------------------------------------------

# Nothing: a launch that was aborted leaves no counter to reset, and its context takes the rest with it.


def test_no_compiled_kernel_has_device_memory_of_its_own():
    objects = sorted(_artifacts.artifacts_folder().glob("*.so"))
    if not objects:
        pytest.skip("no kernels are built")
    for path in objects:
        machine_code = path.read_bytes()
        assert b".nv.shared" in machine_code, path  # the sections' names can be read
        assert b".nv.global" not in machine_code, path


@contextlib.contextmanager
def memory_full_of_garbage() -> Iterator[None]:
    """Fill what is allocated without a value with NaN and the largest integers."""
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.utils.deterministic.fill_uninitialized_memory = was[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("V", [100, 3000, 9001, 70_000, 600_001])
def test_what_memory_held_before_a_call_changes_no_bit(draw, device, dtype, V):
    B = 1500 if V <= 3000 and device.type == "cuda" else 6  # more entries than one block adds
    if device.type == "cpu" and V > 10_000:
        pytest.skip("plans are those of a GPU")
    x, labels = draw.logits(B, V, dtype, device), draw.labels(B, V, device, ignored=0.2)
    names = ("z_loss", "lse", "token_accuracy", "predicted_tokens", "entropy")

    def calls() -> Results:
        leaf, results = x.detach().requires_grad_(), every_call(x, labels)
        for reduction in ("mean", "none"):
            options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 30.0}
            output = cross_entropy(leaf, labels, **options, **{f"return_{name}": True for name in names})
            total = output.loss.sum() + output.lse.sum() + output.entropy.sum()
            results += [output.loss, output.z_loss, output.lse, output.token_accuracy, output.entropy]
            results += [output.predicted_tokens.float(), *torch.autograd.grad(total, leaf)]
            padded = cross_entropy(leaf, labels.clamp(max=V - 4), reduction=reduction, valid_vocab=V - 3)
            results += [padded, *torch.autograd.grad(padded.sum(), leaf)]
        return [each.detach() for each in results]

    expected = calls()
    with memory_full_of_garbage():
        assert torch.empty(4, device=device).isnan().all()
        results = calls()
    assert differences(results, expected) == 0


@pytest.mark.gpu
@EVERY_SHAPE
def test_no_call_keeps_device_memory(draw, cuda, shape):
    x, labels = drawn(draw, shape, cuda)
    every_call(x, labels)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        results = every_call(x, labels)
        del results
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(cuda) == before


ASSERTED = """
import os
import torch
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy

x, labels = torch.randn(64, 32000, device="cuda"), torch.randint(32000, (64,), device="cuda")
assert cross_entropy(x, labels).isfinite()
cross_entropy_with_grad_kernel(x.clone(), labels)
torch.cuda.synchronize()
try:
    torch.zeros(3, device="cuda")[torch.full((1,), 5, device="cuda")]
    torch.cuda.synchronize()
    raise SystemExit("no device-side assert")
except RuntimeError:
    pass
for call in (lambda: cross_entropy_with_grad_kernel(x, labels).ce_sum, lambda: cross_entropy(x, labels)):
    try:
        print("returned", float(call()), flush=True)
    except Exception as error:
        print("raised", type(error).__name__, flush=True)
os._exit(0)  # what is destroyed at the end of the interpreter would meet the error again
"""


@pytest.mark.gpu
def test_after_an_assert_on_the_device_a_call_raises_instead_of_giving_a_number(tmp_path):
    script = tmp_path / "asserted.py"
    script.write_text(ASSERTED)
    lines = run_script(str(script)).splitlines()
    assert [line.split()[0] for line in lines] == ["raised", "raised"], lines


# --- Devices --------------------------------------------------------------------------------------------


class Guards:
    """Stands in for `torch.cuda.device` and for what says which device is current."""

    def __init__(self) -> None:
        self.current = 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Make a device current, as `torch.cuda.device` does."""
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("call", ["launch", "incoming", "scale", "options"])
def test_a_launch_is_made_with_the_device_of_the_tensors_current(monkeypatch, index, call):
    guards, made = Guards(), []

    def launcher(*arguments: object) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        made.append((guards.current, {each.device.index for each in tensors}))

    # A fake tensor has a device, which need not be there, and no memory whose address could be asked for.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *_: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: guards.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", guards.device)
    monkeypatch.setattr(kernels, "_compiled_fused", lambda *_: (launcher, (0,) * 6))
    monkeypatch.setattr(kernels, "_compiled_scale", lambda *_: (launcher, plan.ScaleLaunch(1)))
    monkeypatch.setattr(options_kernels, "_compiled", lambda *_: (launcher, (0,) * 6))
    monkeypatch.setattr(fake_tensor.FakeTensor, "data_ptr", lambda tensor: 0)
    with fake_tensor.FakeTensorMode():
        where = torch.device("cuda", index)
        x, number = torch.empty(4, 8, device=where), torch.empty((), device=where)
        labels = torch.empty(4, dtype=torch.int64, device=where)
        sums = torch.empty(40, device=where)
        if call == "scale":
            kernels.launch_scale(x, x, number)
        elif call == "options":
            loss = options_kernels.Loss(-100, 0.0, 0.0, 0.0, 1.0, True, 0.0, None, None, None)
            options_kernels.launch(x, labels, x, loss, options_kernels.Results(loss=number))
        else:
            loss, incoming = (number, None) if call == "launch" else (None, number)
            kernels.launch(x, labels, x, loss, sums, 0.0, -100, True, True, incoming)
    assert made == [(index, {index})]
    assert guards.current == 0


@pytest.mark.gpu
@EVERY_SHAPE
def test_a_call_on_another_gpu_than_the_current_one_uses_the_current_stream_of_that_gpu(draw, cuda, shape):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = torch.device("cuda", 1)
    x, labels = drawn(draw, shape, there)
    expected = every_call(x, labels)
    late, side = torch.full_like(x, math.nan), torch.cuda.Stream(there)
    torch.cuda.synchronize(there)
    with torch.cuda.stream(side), torch.cuda.device(cuda):
        with torch.cuda.device(there):
            torch.cuda._sleep(100_000_000)  # about 0.05 s: a launch on another stream would read NaN
            late.copy_(x)
        results = every_call(late, labels)
        assert torch.cuda.current_device() == 0
        torch.cuda.current_stream(cuda).synchronize()
    side.synchronize()
    assert differences(results, expected) == 0


def of_logits(tensors: dict[str, torch.Tensor]) -> object:
    """Call the loss."""
    arguments = {name: each for name, each in tensors.items() if name not in ("inputs", "bias")}
    return cross_entropy(arguments.pop("logits"), arguments.pop("target"), **arguments)


def of_inputs(tensors: dict[str, torch.Tensor]) -> object:
    """Call the linear form, whose weight is that of the layer."""
    arguments = {name: each for name, each in tensors.items() if name != "logits"}
    return chunked_linear_cross_entropy(
        arguments.pop("inputs"), tensors["inputs"].new_ones(10, 3, device=arguments.pop("weight").device), **arguments
    )


def of_labels(tensors: dict[str, torch.Tensor]) -> object:
    """Call the raw helper."""
    return cross_entropy_with_grad_kernel(tensors["logits"], tensors["target"])


@pytest.mark.parametrize(
    ("call", "argument", "named"),
    [
        (of_labels, "target", "labels"),
        *((of_logits, name, name) for name in ("target", "weight", "row_weight")),
        *((of_inputs, name, name) for name in ("target", "weight", "row_weight", "bias")),
    ],
)
def test_a_tensor_on_another_device_is_refused_by_name(device, call, argument, named):
    tensors = {
        "logits": torch.zeros(4, 10),
        "inputs": torch.zeros(4, 3),
        "bias": torch.zeros(10),
        "target": torch.zeros(4, dtype=torch.int64),
        "weight": torch.ones(10),
        "row_weight": torch.ones(4),
    }
    tensors = {name: each.to(device) for name, each in tensors.items()}
    call(tensors)
    for elsewhere in ("meta",) if device.type == "cpu" else ("meta", "cpu"):
        wrong = tensors | {argument: tensors[argument].to(elsewhere)}
        with pytest.raises(ValueError, match=rf"^{named}: expected device {device}.* got {elsewhere}"):
            call(wrong)
