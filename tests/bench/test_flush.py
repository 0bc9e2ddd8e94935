"""That the timer's flush evicts what a kernel has read to stay in L2."""

import pytest
import torch

from bench.timer import Timer
from greyhound.nn.functional import cross_entropy

ROWS, VOCAB = 128, 65536


@pytest.mark.gpu
def test_a_copy_is_no_faster_after_a_kernel_has_read_its_source_to_stay() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device, budget_s=0.1)
    logits = torch.randn(ROWS, VOCAB, dtype=torch.bfloat16, device=device)
    labels = torch.randint(VOCAB, (ROWS,), device=device)
    out = torch.empty_like(logits)
    alone = timer.measure(lambda: out.copy_(logits)).ms
    after = timer.measure(lambda: out.copy_(logits), lambda: cross_entropy(logits, labels)).ms
    assert after > 0.95 * alone
