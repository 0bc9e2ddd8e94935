"""A small tensor-parallel language model trained on this repository's own prose: the loss of logits in shards at work.

    torchrun --standalone --nproc-per-node 1 -m bench.train_tensor_parallel
    torchrun --standalone --nproc-per-node 2 -m bench.train_tensor_parallel           the same losses
    torchrun --standalone --nproc-per-node 2 -m bench.train_tensor_parallel --linear  the projection with the loss

Bytes are predicted from the `CONTEXT` before them: an embedding, an MLP whose hidden units are spread over the ranks,
and a head whose rows, one for each of 256 bytes, are too. A rank has H / n hidden units and 256 / n columns of the
logits, and never sees the others'. Every rank takes the same batches; the parameters that all ranks have stay the same,
since their gradients are. Runs on the CPU over gloo, on GPUs over NCCL with --device cuda.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from bench.provenance import ROOT
from greyhound.distributed import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

VOCAB = 256
CONTEXT = 12
EMBEDDING = 24
HIDDEN = 192
WIDTH = 96
BATCH = 128
TEXT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


class IntoShards(torch.autograd.Function):
    """What every rank has goes into columns that each has some of: their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = grad.clone()
        dist.all_reduce(total)
        return total


class OutOfShards(torch.autograd.Function):
    """Each rank's part of a sum becomes the sum, which every rank has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return grad


into_shards: Callable[[torch.Tensor], torch.Tensor] = IntoShards.apply
out_of_shards: Callable[[torch.Tensor], torch.Tensor] = OutOfShards.apply


class Model(torch.nn.Module):
    """A rank's part."""

    def __init__(self, rank: int, ranks: int) -> None:
        """Cut parameters that are the same for any number of ranks."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * math.sqrt(1 / columns)

        def part(size: int) -> slice:
            return slice(rank * size // ranks, (rank + 1) * size // ranks)

        embedding, up = drawn(VOCAB, EMBEDDING), drawn(HIDDEN, CONTEXT * EMBEDDING)
        down, head = drawn(WIDTH, HIDDEN), drawn(VOCAB, WIDTH)
        self.embedding = torch.nn.Parameter(embedding)
        self.up = torch.nn.Parameter(up[part(HIDDEN)].clone())
        self.down = torch.nn.Parameter(down[:, part(HIDDEN)].clone())
        self.head = torch.nn.Parameter(head[part(VOCAB)].clone())

    def hidden(self, context: torch.Tensor) -> torch.Tensor:
        """Return what the head takes, `(B, WIDTH)`, for bytes `(B, CONTEXT)`."""
        x: torch.Tensor = F.embedding(context, self.embedding).flatten(1)
        x = F.linear(into_shards(x), self.up).relu()
        return out_of_shards(F.linear(x, self.down))

    def loss(self, context: torch.Tensor, target: torch.Tensor, linear: bool) -> torch.Tensor:
        """Return the mean loss, the same on every rank."""
        x = self.hidden(context)
        if linear:
            return vocab_parallel_linear_cross_entropy(x, self.head, target, vocab_size=VOCAB)
        return vocab_parallel_cross_entropy(F.linear(into_shards(x), self.head), target, vocab_size=VOCAB)


def text() -> torch.Tensor:
    """Return the bytes to learn from."""
    content = b"\n".join((ROOT / name).read_bytes() for name in TEXT)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(torch.int64)


def main(arguments: list[str] | None = None) -> int:
    """Train, and have the first rank print the loss of each step."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_tensor_parallel", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--linear", action="store_true", help="the head's product with the loss, chunk by chunk")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = Model(dist.get_rank(), dist.get_world_size()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    content, generator = text().to(device), torch.Generator().manual_seed(1)
    for step in range(options.steps):
        start = torch.randint(len(content) - CONTEXT, (BATCH, 1), generator=generator).to(device)
        window = content[start + torch.arange(CONTEXT + 1, device=device)]
        loss = model.loss(window[:, :-1], window[:, -1], options.linear)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.barrier()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not the interpreter's end, which the threads of gloo's groups abort now and then (PyTorch 2.13).
    os._exit(code)
