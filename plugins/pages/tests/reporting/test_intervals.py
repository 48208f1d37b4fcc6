"""Intervals and tests: against published numbers, scipy's, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from paceline.core.stats import Estimate, mean, ratio, wilson
from paceline_pages.evaluation_results import holm, mcnemar, of_counts, paired


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611)}
    for (successes, total), (low, high) in published.items():
        found = wilson(successes, total)
        assert found.value == successes / total
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(("successes", "total"), [(1, 0), (3, 2), (-1, 2)])
def test_what_is_no_share_has_no_interval(successes: int, total: int) -> None:
    with pytest.raises(ValueError, match="is not a share"):
        wilson(successes, total)


def test_zeros_and_ones_are_a_share_and_other_numbers_are_resampled() -> None:
    assert mean(np.array([0.0, 1.0, 1.0, 1.0])).method == "Wilson score"
    values = np.linspace(0, 3, 400)
    found = mean(values)
    assert found.value == pytest.approx(1.5)
    assert found.method == "bootstrap over samples"
    half = 1.96 * values.std() / np.sqrt(400)
    assert (found.low, found.high) == (
        pytest.approx(1.5 - half, rel=0.05),
        pytest.approx(1.5 + half, rel=0.05),
    )
    assert mean(values) == found, "an interval is the same each time"


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(100):
        found = mean(generator.exponential(2.0, size=120))
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 2.0 <= found.high
    assert 86 <= inside <= 100  # 95 of 100; fewer than 86 has a probability below 0.001


def test_large_samples_have_the_normal_interval_which_agrees() -> None:
    generator = np.random.default_rng(4)
    sums, weights = generator.random(200_001), generator.random(200_001) + 1
    large = ratio(sums, weights)
    assert large.method == "normal"
    assert large.low is not None
    assert large.high is not None
    assert large.low < large.value < large.high
    resampled = ratio(sums[:20_000], weights[:20_000])
    assert resampled.low is not None
    assert resampled.high is not None
    assert (large.high - large.low) * np.sqrt(10) == pytest.approx(resampled.high - resampled.low, rel=0.1)


def test_a_ratio_of_few_batches_has_no_interval() -> None:
    assert ratio(np.array([1.0, 2.0]), np.array([2.0, 2.0])) == Estimate(0.75)
    assert np.isnan(ratio(np.zeros(3), np.zeros(3)).value)
    assert ratio(np.array([1.0, np.inf]), np.ones(2)).value == np.inf
    assert np.isnan(ratio(np.array([-np.inf, np.inf]), np.ones(2)).value)


def test_resampling_cells_is_resampling_samples() -> None:
    share = of_counts(np.array([300, 100]), lambda counts: counts[:, 0] / counts.sum(axis=1))
    by_sample = ratio(np.repeat([1.0, 0.0], [300, 100]), np.ones(400))
    assert share.value == by_sample.value == 0.75
    assert (share.low, share.high) == (
        pytest.approx(by_sample.low, abs=0.006),
        pytest.approx(by_sample.high, abs=0.006),
    )


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 9), (30, 20), (700, 900)])
def test_mcnemars_p_value_is_the_binomial_tests(gained: int, lost: int) -> None:
    first = np.repeat([False, True, True, False], [gained, lost, 40, 10])
    second = np.repeat([True, False, True, False], [gained, lost, 40, 10])
    found = mcnemar(first, second)
    expected = binomtest(min(gained, lost), gained + lost).pvalue if gained + lost else 1.0
    assert found.p_value == pytest.approx(expected)
    assert found.estimate.value == pytest.approx((gained - lost) / len(first))


def test_a_paired_difference_is_seen_where_unpaired_numbers_hide_it() -> None:
    generator = np.random.default_rng(5)
    first = generator.normal(0, 10, size=500)
    better = paired(first, first + generator.normal(0.1, 0.3, size=500))
    assert better.p_value < 0.001
    assert better.estimate.low is not None
    assert better.estimate.low > 0
    assert paired(first, first).p_value == 1.0
    shuffled = paired(first, first + generator.permutation(np.repeat([-0.3, 0.3], 250)))
    assert shuffled.p_value > 0.9
    many = np.zeros(200_001)
    assert paired(many, many + 0.5).p_value == 0.0


def test_holms_correction_is_the_published_one() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
