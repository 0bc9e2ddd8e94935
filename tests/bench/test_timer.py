import pytest
import torch

from bench import timer as timers
from bench.timer import Timer, flush_passes, percentile, repeats_within, summarise


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1.0), (0.5, 3.0), (1.0, 5.0), (0.1, 1.4), (0.9, 4.6)],
)
def test_a_percentile_is_linear_between_neighbouring_values(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], share) == pytest.approx(expected)


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 0.9) == 7.0


def test_a_timing_is_the_median_and_the_spread_in_whatever_order_samples_come() -> None:
    timing = summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert timing == pytest.approx((3.0, 1.4, 4.6, 5))


def test_one_slow_sample_does_not_move_the_median() -> None:
    assert summarise([1.0] * 10 + [1000.0]).ms == 1.0


@pytest.mark.parametrize(
    ("budget_s", "round_s", "expected"),
    [
        (0.6, 0.002, 300),
        (0.6, 1.0, timers.MIN_REPEATS),  # too slow for the budget
        (0.6, 1e-6, timers.MAX_REPEATS),  # more rounds than the median needs
        (0.6, 0.0, timers.MAX_REPEATS),  # below the clock's resolution
    ],
)
def test_repeats_fill_the_budget_within_their_limits(budget_s: float, round_s: float, expected: int) -> None:
    assert repeats_within(budget_s, round_s) == expected


def test_a_device_that_is_the_slower_side_needs_one_pass_of_writes() -> None:
    assert flush_passes(host_s=20e-6, round_s=1e-3, flush_s=35e-6) == 1


def test_writes_outlast_a_host_that_is_the_slower_side() -> None:
    host_s, flush_s = 400e-6, 35e-6
    passes = flush_passes(host_s, round_s=410e-6, flush_s=flush_s)
    assert 3 * host_s <= passes * flush_s < 3 * host_s + flush_s


def test_a_device_that_is_hardly_slower_than_the_host_gets_more_to_do() -> None:
    host_s, flush_s = 100e-6, 35e-6
    assert flush_passes(host_s, timers.HOST_SLACK * host_s * 1.01, flush_s) == 1
    assert flush_passes(host_s, timers.HOST_SLACK * host_s * 0.99, flush_s) == 9


def test_writes_are_bounded_where_a_call_waits_for_the_device() -> None:
    assert flush_passes(host_s=1.0, round_s=1.0, flush_s=35e-6) == timers.MAX_FLUSH_PASSES


def test_inputs_are_restored_before_every_call() -> None:
    calls: list[str] = []
    timing = Timer(torch.device("cpu"), budget_s=0.0).measure(
        lambda: calls.append("run"), lambda: calls.append("restore")
    )
    assert timing.repeats == timers.MIN_REPEATS
    assert calls == ["restore", "run"] * (timers.WARM_UP_CALLS + timers.PROBE_CALLS + timing.repeats)


def test_another_budget_leaves_the_first_timer_as_it_was() -> None:
    first = Timer(torch.device("cpu"), budget_s=0.5)
    assert first.with_budget(0.1).budget_s == 0.1
    assert first.budget_s == 0.5
