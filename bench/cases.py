"""What a benchmark is run on: shapes and dtypes from the command line, and the tensors made from them."""

import argparse
from typing import NamedTuple

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
SEED = 20


class Shape(NamedTuple):
    """Size of the logits."""

    rows: int
    vocab: int

    def __str__(self) -> str:
        """Return it as it is written on the command line."""
        return f"{self.rows}x{self.vocab}"


class Inputs(NamedTuple):
    """Logits and labels that nobody may change; a provider that overwrites logits works on a copy."""

    logits: torch.Tensor
    """(B, V), contiguous."""
    labels: torch.Tensor
    """(B,) int64, all in 0..V-1."""


def parse_shapes(text: str) -> list[Shape]:
    """Return the shapes in text such as `8192x128256,8192x32000`."""
    shapes = []
    for part in text.split(","):
        rows, _, vocab = part.strip().lower().partition("x")
        if not (rows.isdecimal() and vocab.isdecimal() and int(rows) > 0 and int(vocab) > 0):
            raise argparse.ArgumentTypeError(f"expected ROWSxVOCAB[,ROWSxVOCAB...], got {part.strip()!r} in {text!r}")
        shapes.append(Shape(int(rows), int(vocab)))
    return shapes


def parse_dtypes(text: str) -> list[torch.dtype]:
    """Return the dtypes in text such as `bf16,fp32`."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"expected dtypes out of {', '.join(DTYPES)}, got {name!r}")
    return [DTYPES[name] for name in names]


def parse_integers(text: str) -> list[int]:
    """Return the positive integers in text such as `128,256`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive integers with commas between, got {text!r}")
    return [int(part) for part in parts]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype as result rows spell it, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Return normally distributed logits and uniform labels, the same for the same shape, dtype and kind of device."""
    generator = torch.Generator(device=device).manual_seed(SEED)
    logits = torch.empty(shape.rows, shape.vocab, dtype=dtype, device=device)
    logits.normal_(generator=generator)
    labels = torch.randint(shape.vocab, (shape.rows,), generator=generator, device=device)
    return Inputs(logits, labels)
