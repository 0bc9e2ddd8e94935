"""The tensor-parallel example: its losses do not depend on the number of ranks, and fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def losses(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "bench.train_tensor_parallel", "--steps", "25", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]


def test_two_ranks_train_as_one_whether_the_logits_are_made_or_not():
    one = losses(1)
    assert len(one) == 25
    assert one[-1] < 0.8 * one[0]
    for arguments in ((), ("--linear",)):
        assert losses(2, *arguments) == pytest.approx(one, abs=2e-5)
