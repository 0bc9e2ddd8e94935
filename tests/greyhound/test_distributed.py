"""Losses spread over the ranks of a process group: each test asserts what `ranks.py` found on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def started(ranks, command_of):
    """Start a process for each rank."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"PYTHONWARNINGS": "ignore"}
    return [
        subprocess.Popen(command_of(rank), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks)
    ]


def ended(processes, limit_s=LIMIT_S):
    """Wait for the processes, leave none behind, and return what each printed."""
    try:
        return [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Return the reports of so many ranks on a device; each number of ranks is started once."""
    known = {}

    def of(ranks, device):
        if (ranks, device) not in known:
            folder = tmp_path_factory.mktemp("ranks")
            script, files = ROOT / "tests" / "ranks.py", [folder / f"{rank}.json" for rank in range(ranks)]
            processes = started(
                ranks,
                lambda rank: [
                    *(sys.executable, str(script), str(rank), str(ranks), str(folder / "store"), device),
                    str(files[rank]),
                ],
            )
            printed = ended(processes)
            known[ranks, device] = [
                json.loads(file.read_text()) if file.exists() else {"": text}
                for file, text in zip(files, printed, strict=True)
            ]
        return known[ranks, device]

    return of


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_on_the_cpu(reports, ranks, check):
    for report in reports(ranks, "cpu"):
        assert report.get(check, report) is None, report.get(check, report)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_on_one_gpu(reports, check):
    for report in reports(2, "cuda:0"):
        assert report.get(check, report) is None, report.get(check, report)


DYING = """
import sys, datetime, torch, torch.distributed as dist
from greyhound.distributed import vocab_parallel_cross_entropy
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=5))
x, t = torch.randn(4, 10) + rank, torch.randint(20, (4,), generator=torch.Generator().manual_seed(0))
vocab_parallel_cross_entropy(x, t)
if rank == 1:
    import os
    os._exit(0)
try:
    vocab_parallel_cross_entropy(x, t)
except RuntimeError as error:
    print("raised", type(error).__name__, flush=True)
import os
os._exit(0)
"""


def test_a_rank_that_dies_leaves_the_others_with_pytorchs_error(tmp_path):
    processes = started(2, lambda rank: [sys.executable, "-c", DYING, str(rank), str(tmp_path / "store")])
    assert "raised" in ended(processes, 60)[0]


def test_without_a_process_group_the_call_to_make_is_named():
    import torch

    from greyhound.distributed import global_normalizer, vocab_parallel_cross_entropy

    with pytest.raises(ValueError, match=r"group: expected a process group.*init_process_group"):
        vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"group: expected a process group.*init_process_group"):
        global_normalizer(torch.zeros(2, dtype=torch.int64))
