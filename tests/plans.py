"""Which kernels a test's calls take, where its own batch would not meet them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dsl_kernels.cross_entropy import plan
from greyhound.kernels import cross_entropy as kernels
from greyhound.kernels import options as options_kernels


@contextlib.contextmanager
def planned_for(B: int) -> Iterator[None]:
    """Make every call take the kernel, and as many blocks for a row, as a call with B rows takes."""
    chosen = plan.select_fused

    def select(arch: str, dtype: str, V: int, grad: bool, rows: int, *rest: Any) -> Any:
        return chosen(arch, dtype, V, grad, B, *rest)

    with _without_caches(), mock.patch.object(plan, "select_fused", side_effect=select):
        yield


@contextlib.contextmanager
def narrow_from(rows_of_a_multiprocessor: int) -> Iterator[None]:
    """Make rows narrow in batches of more than so many for each multiprocessor; 0: in any."""
    with _without_caches(), mock.patch.object(plan, "NARROW_MIN_ROWS", rows_of_a_multiprocessor):
        yield


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    caches = kernels._compiled_fused, options_kernels._compiled
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()
