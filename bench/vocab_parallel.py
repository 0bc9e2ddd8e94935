"""Cross entropy of logits in shards, on several GPUs of one host over NCCL: is it right, and how long does it take.

    torchrun --standalone --nproc-per-node 2 -m bench.vocab_parallel                  checks, then times
    torchrun --standalone --nproc-per-node 2 -m bench.vocab_parallel --checks         checks alone
    torchrun --standalone --nproc-per-node 2 -m bench.vocab_parallel --times --shapes 8192x128256 --out DIR

Checks, each on every rank: loss and gradient against one GPU's of the whole logits, in every dtype, for even and uneven
shards, 20 times with the same bits; DTensor logits; means of ranks with rows of their own; a captured graph; and, in
processes of their own, first calls on a GPU that is not current, and two threads with a GPU each.

Times, forward and backward of the mean loss in bf16, medians of the slowest rank's: `greyhound`; `one-gpu`, what
`greyhound.nn.functional.cross_entropy` takes for the whole logits; `all-reduces`, the loss as Megatron-LM writes it,
with three all-reduces and PyTorch's operations; `loss-parallel`, PyTorch's own for DTensors; `liger`, where it is
installed. Each gradient is checked first. In the rows `copy_ms` is what moving the bytes of a shard takes at the copy's
speed, two reads and one write, and `of_copy` that over the provider's time; `op` names the ranks.
"""

import argparse
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from bench.cases import Shape, parse_shapes
from bench.provenance import ROOT, provenance
from bench.results import FOLDER, ResultFile, row_from
from greyhound.distributed import global_normalizer, vocab_parallel_cross_entropy
from greyhound.nn.functional import cross_entropy

OUT = FOLDER / "vocab_parallel"
DEFAULT_SHAPES = "8192x128256,8192x262144"
IGNORED = -100
WARM_UP, REPEATS = 3, 15
FLUSH_BYTES = 64 << 20
"""Written between calls, so that the L2 cache holds nothing of the logits."""


class Ranks(NamedTuple):
    """A process, and those it works with."""

    rank: int
    size: int
    device: torch.device

    def part(self, V: int, *, even: bool = True) -> slice:
        """Return this rank's columns."""
        edges = [rank * V // self.size for rank in range(self.size + 1)]
        if not even:
            edges = [0, *(max(edge * 2 // 3, 1) for edge in edges[1:-1]), V]
        return slice(edges[self.rank], edges[self.rank + 1])

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values on every rank."""
        dist.broadcast(tensor, 0)
        return tensor

    def drawn(self, B: int, V: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole logits and targets, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        logits = torch.randn(B, V, device=self.device, generator=generator).mul_(2.0).to(dtype)
        target = torch.randint(V, (B,), device=self.device, generator=generator)
        target[::17] = IGNORED
        return self.same(logits), self.same(target)


def step(function: Callable[..., torch.Tensor], logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Return (loss, gradient)."""
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, *arguments, **options)
    loss.backward(torch.ones_like(loss))
    return loss.detach(), leaf.grad


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of floats are equal, bit for bit."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# --- Checks -----------------------------------------------------------------------------------------------------


def check_one_gpu(ranks: Ranks) -> None:
    """Loss and gradient are those of the whole logits, and the same bits 20 times and on every rank."""
    B, V = (512, 50257) if ranks.device.type == "cuda" else (8, 501)
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for even in (True, False):
            for options in ({}, {"label_smoothing": 0.1, "z_loss_multiplier": 1e-4}, {"softcap": 30.0}):
                x, target = ranks.drawn(B, V, dtype, seed)
                part = ranks.part(V, even=even)
                rows = slice(0, B - 1 if even else B)  # a rank may have as many columns in both
                x, target = x[rows], target[rows]
                loss, grad = step(cross_entropy, x, target, **options)
                runs = [step(vocab_parallel_cross_entropy, x[:, part], target, **options) for _ in range(20)]
                torch.testing.assert_close(runs[0][0], loss, rtol=3e-6, atol=3e-6)
                eps = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
                torch.testing.assert_close(runs[0][1], grad[:, part], rtol=eps, atol=6e-8)
                assert all(same_bits(each[0], runs[0][0]) and same_bits(each[1], runs[0][1]) for each in runs)
                assert same_bits(ranks.same(runs[0][0].clone()), runs[0][0])


def check_dtensors(ranks: Ranks) -> None:
    """Logits that are a DTensor, by columns and by rows, give what the whole gives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    x, target = ranks.drawn(64 * ranks.size + 3, 5003, torch.float32, 7)
    loss, grad = step(cross_entropy, x, target)
    for placement, of_target in ((Shard(1), Replicate()), (Shard(0), Shard(0)), (Replicate(), Replicate())):
        logits = distribute_tensor(x, mesh, [placement]).requires_grad_()
        found = cross_entropy(logits, distribute_tensor(target, mesh, [of_target]))
        found.backward()
        torch.testing.assert_close(found, loss, rtol=3e-6, atol=3e-6)
        whole: Any = logits.grad
        torch.testing.assert_close(whole.full_tensor(), grad, rtol=2e-5, atol=1e-8)


def check_data_parallel_means(ranks: Ranks) -> None:
    """Ranks with unequal numbers of valid rows train as one batch."""
    x, target = ranks.drawn(32 * ranks.size, 1000, torch.float32, 9)
    target[:25] = IGNORED
    loss, grad = step(cross_entropy, x, target)
    mine = slice(32 * ranks.rank, 32 * (ranks.rank + 1))
    normalizer = global_normalizer(target[mine], averaged=False)
    found, part = step(cross_entropy, x[mine], target[mine], normalizer=normalizer)
    dist.all_reduce(found)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part, grad[mine], rtol=1e-5, atol=1e-9)


def check_graph(ranks: Ranks) -> None:
    """A step is captured, its exchange too, and follows its inputs: nothing in it waits for the GPU."""
    if ranks.device.type != "cuda":
        return
    x, target = ranks.drawn(256, 32000, torch.bfloat16, 11)
    local = x[:, ranks.part(32000)].contiguous().requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        loss = vocab_parallel_cross_entropy(local, target)
        (grad,) = torch.autograd.grad(loss, local)
        return loss, grad

    side = torch.cuda.Stream(ranks.device)
    side.wait_stream(torch.cuda.current_stream(ranks.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize(ranks.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss, grad = run()
    other, _ = ranks.drawn(256, 32000, torch.bfloat16, 12)
    with torch.no_grad():
        local.copy_(other[:, ranks.part(32000)])
    graph.replay()
    torch.cuda.synchronize(ranks.device)
    expected = run()
    assert same_bits(loss, expected[0])
    assert same_bits(grad, expected[1])


OTHER_GPU = """
import sys, threading, torch
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn.functional import cross_entropy
def right(index):
    device = torch.device("cuda", index)
    for dtype in (torch.bfloat16, torch.float32):
        for V in (1000, 50257):
            x = torch.randn(64, V, generator=torch.Generator().manual_seed(index)).to(device, dtype).requires_grad_()
            t = torch.randint(V, (64,), generator=torch.Generator().manual_seed(index)).to(device)
            loss = cross_entropy(x, t)
            loss.backward()
            exact = x.detach().double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(exact, t)
            expected.backward()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=1e-7)
            raw = x.detach().clone()
            cross_entropy_with_grad_kernel(raw, t)
            torch.testing.assert_close(raw.double() / 64, exact.grad, rtol=1e-2, atol=1e-7)
mode = sys.argv[1]
if mode == "threads":
    errors = []
    def work(index):
        try:
            for _ in range(20):
                right(index)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors
else:
    current, other = (int(each) for each in mode.split(","))
    torch.cuda.set_device(current)
    right(other)
    assert torch.cuda.current_device() == current
    right(current)
"""


def check_other_gpus(ranks: Ranks) -> None:
    """A process's first call on a GPU that is not current, both ways round, and two threads with a GPU each."""
    if ranks.device.type == "cuda" and ranks.rank == 0 and torch.cuda.device_count() > 1:
        for mode in ("0,1", "1,0", "threads"):
            command = [sys.executable, "-c", OTHER_GPU, mode]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, f"{mode}: {done.stderr}"


def check_providers(ranks: Ranks) -> None:
    """What is compared with computes the same, on a small shape."""
    x, target = ranks.drawn(64, 4096, torch.bfloat16, 13)
    for name, make in PROVIDERS.items():
        if name == "liger" or (name == "loss-parallel" and ranks.device.type == "cpu"):
            continue  # perhaps not installed; and slow here
        try:
            verify(ranks, name, make(ranks, x, target), x, target)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


CHECKS = (check_one_gpu, check_dtensors, check_data_parallel_means, check_graph, check_other_gpus, check_providers)


def run_checks(ranks: Ranks) -> int:
    """Run every check and return how many failed on any rank."""
    failed = 0
    for check in CHECKS:
        try:
            check(ranks)
            problem = ""
        except Exception:
            problem = traceback.format_exc(limit=-3)
        found: list[Any] = [None] * ranks.size
        dist.all_gather_object(found, problem)
        failed += any(found)
        if ranks.rank == 0:
            print(f"{'FAILED' if any(found) else 'ok    '} {check.__name__}", flush=True)
            print("".join(f"rank {rank}: {text}\n" for rank, text in enumerate(found) if text), end="", flush=True)
        if any(found):
            break  # the ranks may be at different calls
    return failed


# --- Times --------------------------------------------------------------------------------------------------------


def all_reduces(local: torch.Tensor, target: torch.Tensor, start: int) -> torch.Tensor:
    """Return the mean loss as Megatron-LM computes it, by PyTorch's operations."""
    function: Any = _AllReduces
    loss: torch.Tensor = function.apply(local, target, start)
    return loss


class _AllReduces(torch.autograd.Function):
    """Three all-reduces: of the largest logits, the targets' logits and the sums."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, target: torch.Tensor, start: int) -> torch.Tensor:
        """Return the mean over the valid rows."""
        x = local.float()
        largest = x.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        x -= largest[:, None]
        here = (target >= start) & (target < start + x.shape[1])
        column = torch.where(here, target - start, 0)[:, None]
        predicted = torch.where(here, x.gather(1, column)[:, 0], 0.0)
        dist.all_reduce(predicted)
        torch.exp(x, out=x)
        total = x.sum(dim=1)
        dist.all_reduce(total)
        valid = target != IGNORED
        count = valid.sum().clamp(min=1)
        x /= total[:, None]
        ctx.save_for_backward(x, here, column, valid / count)
        ctx.dtype = local.dtype
        return torch.where(valid, total.log() - predicted, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of this rank's logits."""
        x, here, column, share = ctx.saved_tensors
        x.scatter_add_(1, column, -here.to(x.dtype)[:, None])
        x *= (share * grad)[:, None]
        return x.to(ctx.dtype), None, None


ROUNDINGS, LOSS_PARALLEL_ROUNDINGS = 4, 16
"""Of bf16 in an element of a gradient. PyTorch's loss rounds the logarithms of the softmax to bf16: at 16 to 32 they
are off by up to 2^-4, and the softmax by 8 of these more."""

Call = Callable[[], Any]
"""Runs forward and backward and returns the gradient, perhaps in a tuple."""


def verify(ranks: Ranks, name: str, call: Call, x: torch.Tensor, target: torch.Tensor) -> None:
    """Raise `AssertionError` where a provider's gradient is not that of one GPU to some roundings of bf16."""
    found = call()
    found = found[0] if isinstance(found, tuple) else found
    found = found.to_local() if hasattr(found, "to_local") else found
    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(leaf, target), leaf)
    part = slice(None) if name == "one-gpu" else ranks.part(x.shape[1])
    found, expected = found.reshape(len(x), -1)[:256].float(), expected[:256, part].float()
    roundings = LOSS_PARALLEL_ROUNDINGS if name == "loss-parallel" else ROUNDINGS
    tolerance = roundings * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-9)


def greyhound_calls(ranks: Ranks, x: torch.Tensor, target: torch.Tensor) -> Call:
    """Return the loss in shards, forward and backward."""
    local = x[:, ranks.part(x.shape[1])].contiguous().requires_grad_()
    return lambda: torch.autograd.grad(vocab_parallel_cross_entropy(local, target), local)


def one_gpu_calls(ranks: Ranks, x: torch.Tensor, target: torch.Tensor) -> Call:
    """Return the loss of the whole logits."""
    leaf = x.detach().requires_grad_()
    return lambda: torch.autograd.grad(cross_entropy(leaf, target), leaf)


def all_reduces_calls(ranks: Ranks, x: torch.Tensor, target: torch.Tensor) -> Call:
    """Return `all_reduces`."""
    part = ranks.part(x.shape[1])
    local = x[:, part].contiguous().requires_grad_()
    return lambda: torch.autograd.grad(all_reduces(local, target, part.start), local)


def loss_parallel_calls(ranks: Ranks, x: torch.Tensor, target: torch.Tensor) -> Call:
    """Return PyTorch's loss of a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    logits = DTensor.from_local(x[:, ranks.part(x.shape[1])].contiguous(), mesh, [Shard(1)]).requires_grad_()

    def run() -> Any:
        logits.grad = None
        with loss_parallel():
            F.cross_entropy(logits, target, ignore_index=IGNORED).backward()
        return logits.grad

    return run


def liger_calls(ranks: Ranks, x: torch.Tensor, target: torch.Tensor) -> Call:
    """Return Liger's, which gives a loss for each row."""
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

    loss = LigerVocabParallelCrossEntropy(ignore_index=IGNORED)
    local = x[:, ranks.part(x.shape[1])].contiguous()[:, None].requires_grad_()
    count = (target != IGNORED).sum()
    return lambda: torch.autograd.grad(loss(local, target[:, None], dist.group.WORLD).sum() / count, local)


PROVIDERS: dict[str, Callable[[Ranks, torch.Tensor, torch.Tensor], Call]] = {
    "one-gpu": one_gpu_calls,
    "greyhound": greyhound_calls,
    "all-reduces": all_reduces_calls,
    "loss-parallel": loss_parallel_calls,
    "liger": liger_calls,
}


def times(ranks: Ranks, call: Call) -> list[float]:
    """Return the milliseconds of each of `REPEATS` calls, those of the slowest rank."""
    for _ in range(WARM_UP):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=ranks.device)
    found = []
    for _ in range(REPEATS):
        flush.zero_()
        torch.cuda.synchronize(ranks.device)
        dist.barrier()
        torch.cuda._sleep(1_000_000)  # the host hands out the whole call meanwhile
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(ranks.device)
        found.append(start.elapsed_time(end))
    slowest = torch.tensor(found, device=ranks.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return sorted(slowest.tolist())


def run_times(ranks: Ranks, shapes: list[Shape], out: Path, commit: str | None) -> int:
    """Time every provider on every shape, write rows, and return how many failed."""
    about = provenance(ranks.device, commit)
    file, failed = ResultFile(out, about.gpu), 0
    for shape in shapes:
        x, target = ranks.drawn(shape.rows, shape.vocab, torch.bfloat16, 1)
        local = x[:, ranks.part(shape.vocab)].contiguous()
        other = torch.empty_like(local)

        def copy(other: torch.Tensor = other, local: torch.Tensor = local) -> torch.Tensor:
            return other.copy_(local)

        floor = 1.5 * statistics.median(times(ranks, copy))
        del copy, local, other
        one = None
        for name, make in PROVIDERS.items():
            try:
                call = make(ranks, x, target)
                verify(ranks, name, call, x, target)
                found = times(ranks, call)
            except ImportError as error:
                if ranks.rank == 0:
                    print(f"skipped {name}: {error}", flush=True)
                continue
            except Exception as error:
                failed += 1
                print(f"FAILED {name} {shape} on rank {ranks.rank}: {error}", flush=True)
                continue
            median = statistics.median(found)
            one = median if name == "one-gpu" else one
            low, high = found[len(found) // 10], found[-1 - len(found) // 10]
            if ranks.rank == 0:
                of_one = f", {median / one:.3f} of one GPU's" if one else ""
                print(
                    f"{name} {shape} bf16: {median:.4f} ms, {floor / median:.3f} of the bytes' floor{of_one}",
                    flush=True,
                )
                file.put(
                    row_from(
                        {
                            "op": f"vocab_parallel, ranks={ranks.size}",
                            "provider": name,
                            "mode": "fwd+bwd",
                            **shape._asdict(),
                            "dtype": "bfloat16",
                            "ms": round(median, 5),
                            "ms_low": round(low, 5),
                            "ms_high": round(high, 5),
                            "copy_ms": round(floor, 5),
                            "of_copy": round(floor / median, 4),
                            **about._asdict(),
                            "date": about.today(),
                        }
                    )
                )
            torch.cuda.empty_cache()
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Check and time, and return the exit code: 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.vocab_parallel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--shapes", type=parse_shapes, default=DEFAULT_SHAPES)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--commit", help="the source's commit, where git cannot tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the checks alone, over gloo")
    options = parser.parse_args(arguments)
    both = not options.checks and not options.times
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    failed = run_checks(ranks) if options.checks or both else 0
    if device.type == "cuda" and not failed and (options.times or both):
        failed += run_times(ranks, options.shapes, options.out, options.commit)
    if not failed:
        dist.barrier()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not the interpreter's end, which the threads of gloo's groups abort now and then (PyTorch 2.13).
    os._exit(code)
