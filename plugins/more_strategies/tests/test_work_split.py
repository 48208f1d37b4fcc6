"""Shares by speed: the shortest step, and no change for nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.reduction_tree import equal_work_split, whole_subtrees
from paceline_more_strategies.load_balancing import (
    MIN_GAIN,
    WINDOWS,
    Speed,
    WorkSplitter,
    decide,
    initial_split,
    optimal_split,
    step_time,
)

SPEEDS = st.builds(Speed, st.floats(1e-4, 1.0), st.floats(0.0, 0.1))


def all_shares(num_microbatches: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each rank at least one."""
    for cuts in itertools.combinations(range(1, num_microbatches), ranks - 1):
        yield tuple(b - a for a, b in itertools.pairwise([0, *cuts, num_microbatches]))


def subtrees(shares: Sequence[int]) -> int:
    bounds = [0, *itertools.accumulate(shares)]
    return sum(len(whole_subtrees(range(a, b))) for a, b in itertools.pairwise(bounds))


@given(st.integers(1, 5), st.integers(0, 8), st.data())
def test_best_shares_make_the_shortest_step_with_the_fewest_subtrees(
    ranks: int, more: int, data: st.DataObject
) -> None:
    num_microbatches = ranks + more
    speeds = data.draw(st.lists(SPEEDS, min_size=ranks, max_size=ranks))
    found = optimal_split(num_microbatches, speeds)
    assert sum(found) == num_microbatches
    assert min(found) >= 1
    shortest = min(step_time(shares, speeds) for shares in all_shares(num_microbatches, ranks))
    assert step_time(found, speeds) == pytest.approx(shortest, rel=1e-6)
    as_short = [s for s in all_shares(num_microbatches, ranks) if step_time(s, speeds) == shortest]
    assert subtrees(found) <= min(subtrees(shares) for shares in as_short)


@pytest.mark.parametrize(
    ("microbatch_s", "shares"),
    [
        ((1.0, 1.0), (6, 6)),
        ((1.0, 2.0), (8, 4)),
        ((2.0, 1.0), (4, 8)),
        ((1.0, 1.0, 2.0), (5, 5, 2)),
        ((1.0, 1000.0), (11, 1)),
        ((1.0, 1.0, 1.0, 2.0), (4, 4, 2, 2)),
    ],
)
def test_twelve_microbatches_by_speed(microbatch_s: tuple[float, ...], shares: tuple[int, ...]) -> None:
    speeds = [Speed(seconds, 0.0) for seconds in microbatch_s]
    found = optimal_split(12, speeds)
    assert step_time(found, speeds) == step_time(shares, speeds)
    assert subtrees(found) <= subtrees(shares)


def test_a_slow_optimizer_counts_too() -> None:
    assert optimal_split(8, [Speed(1.0, 0.0), Speed(1.0, 4.0)]) == (6, 2)


def test_ranks_that_cost_nothing_yet_are_no_error() -> None:
    assert sum(optimal_split(5, [Speed(0.0, 0.0), Speed(0.0, 0.0)])) == 5


def simulate(balancer: WorkSplitter, true: Sequence[float], sigma: float, windows: int, seed: int) -> int:
    """Show so many windows of ranks with these seconds a micro-batch, with noise; how often they shared anew."""
    noise = random.Random(seed)
    return sum(
        balancer.observe([Speed(s * noise.lognormvariate(0, sigma), 0.5 * s) for s in true]) for _ in range(windows)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [12, 24])
def test_equal_ranks_never_share_anew_for_noise(ranks: int, num_microbatches: int) -> None:
    for seed in range(5):
        balancer = WorkSplitter(equal_work_split(num_microbatches, ranks))
        assert simulate(balancer, [0.01] * ranks, 0.07, 300, seed) == 0


@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_difference_below_the_threshold_changes_nothing(factor: float) -> None:
    balancer = WorkSplitter(equal_work_split(24, 2))
    assert simulate(balancer, [0.01, 0.01 * factor], 0.0, 100, 0) == 0


@pytest.mark.parametrize("sigma", [0.0, 0.05, 0.1])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_a_rank_that_becomes_slow_is_given_less_and_gets_it_back(ranks: int, slow: int, sigma: float) -> None:
    balancer = WorkSplitter(equal_work_split(12, ranks))
    true = [0.01] * ranks
    true[slow] = 0.02
    # Two changes at most: the first may come while a window is still mixed or noisy.
    assert 1 <= simulate(balancer, true, sigma, 4 * WINDOWS, 1) <= 2
    speeds = [Speed(s, 0.5 * s) for s in true]
    best = step_time(optimal_split(12, speeds), speeds)
    assert step_time(balancer.work_split, speeds) <= best * 1.15 / (1 - MIN_GAIN)
    assert balancer.work_split[slow] < 12 // ranks
    simulate(balancer, true, sigma, 100, 2)
    settled = balancer.work_split
    assert simulate(balancer, true, sigma, 200, 3) <= 1, f"oscillates around {settled}"

    assert simulate(balancer, [0.01] * ranks, sigma, 4 * WINDOWS, 4) >= 1
    speeds = [Speed(0.01, 0.005)] * ranks
    equal = step_time(equal_work_split(12, ranks), speeds)
    assert step_time(balancer.work_split, speeds) <= equal * 1.15 / (1 - MIN_GAIN)


def test_a_stall_in_a_window_decides_nothing() -> None:
    balancer = WorkSplitter((6, 6))
    usual, stalled = [Speed(0.01, 0.0)] * 2, [Speed(0.01, 0.0), Speed(0.2, 0.0)]
    for _ in range(50):
        assert not balancer.observe(stalled)
        for _ in range(WINDOWS - 1):
            assert not balancer.observe(usual)


def test_a_change_needs_as_many_windows_as_it_says() -> None:
    balancer = WorkSplitter((6, 6))
    slow = [Speed(0.01, 0.0), Speed(0.03, 0.0)]
    assert [balancer.observe(slow) for _ in range(WINDOWS)] == [False] * (WINDOWS - 1) + [True]
    assert balancer.work_split == (9, 3)
    assert balancer.speeds == slow
    # What was seen before is of other shares.
    back = [Speed(0.03, 0.0), Speed(0.01, 0.0)]
    assert [balancer.observe(back) for _ in range(WINDOWS)] == [False] * (WINDOWS - 1) + [True]
    assert balancer.work_split == (3, 9)


def test_all_who_see_the_same_decide_the_same() -> None:
    windows = [[Speed(0.01, 0.001), Speed(0.025, 0.002), Speed(0.011, 0.001)]] * WINDOWS
    assert decide((4, 4, 4), windows) == decide((4, 4, 4), windows) is not None


def test_a_new_world_begins_with_what_was_measured() -> None:
    fast, slow = Speed(0.01, 0.0), Speed(0.02, 0.0)
    assert initial_split((6, 6), [None, None]) == (6, 6)
    assert initial_split((6, 6), [fast, slow]) == (8, 4)
    assert initial_split((6, 6), [fast, Speed(0.0105, 0.0)]) == (6, 6)
    # Nobody knows how fast a newcomer is: as fast as the median.
    assert initial_split((6, 6), [slow, None]) == (6, 6)
    assert sum(initial_split((4, 4, 4), [fast, slow, None])) == 12
