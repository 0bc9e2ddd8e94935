"""Losses on a `torch.distributed` process group: logits, or the weight that makes them, spread over ranks by columns.

`greyhound.nn.functional.cross_entropy` takes logits that are a DTensor by itself.
"""

from greyhound.nn.sharded import (
    global_normalizer,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)

__all__ = ["global_normalizer", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]
