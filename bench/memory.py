"""How much device memory a call takes beyond its inputs."""

from collections.abc import Callable

import torch


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the most MiB that one call of `run` has allocated at a time, its result included; None off the GPU.

    Args:
        run: the call, warmed up: what it allocates once and keeps does not count.
        device: where it runs.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return (peak - before) / 2**20
