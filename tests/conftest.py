"""Devices and random inputs that every test shares."""

import zlib
from collections.abc import Iterator

import pytest
import torch
from plans import narrow_from

# The matrices of the CPU tests are small: on shared cores several threads only wait for one another.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and so count, what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that has an implementation: the portable one on the CPU, the kernel on the GPU."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """Return the GPU, for tests marked `gpu`."""
    return torch.device("cuda:0")


class Draw:
    """Random inputs that are the same in every run of a test."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this test's generator of a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def logits(
        self, B: int, V: int, dtype: torch.dtype, device: torch.device, *, scale: float = 1.0, shift: float = 0.0
    ) -> torch.Tensor:
        """Return (B, V) normal logits with the given deviation and mean, rounded to `dtype`."""
        x = torch.randn(B, V, dtype=dtype, device=device, generator=self.generator(device))
        return x.mul_(scale).add_(shift)

    def labels(
        self, B: int, V: int, device: torch.device, *, ignored: float = 0.0, ignore_index: int = -100
    ) -> torch.Tensor:
        """Return (B,) labels in 0..V-1 of which about the share `ignored` is `ignore_index`."""
        labels = torch.randint(V, (B,), device=device, generator=self.generator(device))
        if ignored:
            chance = torch.rand(B, device=device, generator=self.generator(device))
            labels[chance < ignored] = ignore_index
        return labels


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Return the test's source of random inputs, seeded by its name."""
    return Draw(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def narrow_in_small_batches() -> Iterator[None]:
    """Have narrow rows taken by the kernel for them in the small batches of tests, as in large ones."""
    with narrow_from(0):
        yield


@pytest.fixture(autouse=True)
def _gpu_memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the cached buffers of one large test from crowding out the next."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > 32 << 30:
        torch.cuda.empty_cache()
