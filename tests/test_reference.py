"""The yardstick itself: what no kernel is compared with."""

import math

import pytest
import reference
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_an_ulp_is_half_the_way_to_the_next_number(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    # A subnormal number, those on both sides of the smallest normal one and of a power of 2, and a large one.
    below = torch.nextafter(torch.tensor([smallest, 2.0], dtype=dtype), torch.zeros(2, dtype=dtype)).tolist()
    values = torch.tensor([0.0, smallest / 4, below[0], smallest, 0.75, below[1], 2.0, 3000.0], dtype=dtype)
    following = torch.nextafter(values, torch.full_like(values, math.inf)).double()
    expected = (following - values.double()) / 2
    assert torch.equal(reference._half_ulp(values.double(), dtype), expected)
    assert torch.equal(reference._half_ulp(-values.double(), dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_an_ulp_of_what_is_no_number_is_finite(dtype):
    values = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    found = reference._half_ulp(values, dtype)
    assert bool(found.isfinite().all())
    assert bool((found > 0).all())
