"""A stand-in for the older greyhound on the CPU, with its import name, API and version; and rows of a comparison."""

from pathlib import Path

import pytest

from bench.cases import Shape
from bench.results import MODES, Row

SOURCES = {
    "__init__.py": 'VERSION = "0.1.0"\nprint("noise on stdout")\n',
    "nn/__init__.py": "",
    "nn/functional.py": "from torch.nn.functional import cross_entropy\n",
    "kernels/__init__.py": "",
    "kernels/cross_entropy.py": """
import torch

def cross_entropy_with_grad_kernel(logits, labels, z_loss_multiplier, ignore_index):
    rows = torch.arange(len(logits))
    grad = logits.double().softmax(1)
    loss = -grad[rows, labels].log().sum().float()
    grad[rows, labels] -= 1
    logits.copy_(grad)
    return loss, torch.zeros(()), torch.tensor(float(len(logits)))
""",
}


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in."""
    folder = tmp_path_factory.mktemp("site") / "_older_greyhound"
    for name, source in SOURCES.items():
        path = folder / "greyhound" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


@pytest.fixture
def comparison() -> list[Row]:
    """Rows as a run of the comparison leaves them: three shapes, four providers, one of them slow to compile."""
    speeds = {"greyhound": 1.25, "quack": 1.5, "torch": 4.0, "liger": 2.0}  # times of the copy's time
    rows = []
    for shape in (Shape(8192, 128256), Shape(8192, 32000), Shape(64, 32000)):
        for mode in MODES:
            for name, speed in {"copy": 1.0, **speeds}.items():
                if (name, mode) in {("torch", "raw"), ("copy", "fwd"), ("copy", "fwd+bwd")}:
                    continue
                copy_ms = shape.rows * shape.vocab / 1e9
                rows.append(
                    Row(
                        op="cross_entropy",
                        provider=name,
                        mode=mode,
                        rows=shape.rows,
                        vocab=shape.vocab,
                        dtype="bfloat16",
                        ms=copy_ms * speed,
                        ms_low=copy_ms,
                        ms_high=copy_ms * 5,
                        copy_ms=copy_ms,
                        of_copy=1 / speed,
                        peak_mib=1.0,
                        host_us=25.4 * speed if shape.rows == 64 else None,
                        graph=None if name == "copy" else name != "liger",
                        gpu="NVIDIA H200",
                        driver="580.0",
                        torch="2.11.0",
                        dsl="4.8.1",
                        commit="abc",
                        date="2026-11-30",
                    )
                )
    return rows
