"""Tests of whether runs differ, and intervals of shares of counts, computed by arithmetic alone.

- McNemar's test in its exact form for two classifiers on the same samples: Q. McNemar, Psychometrika 12
  (1947); T. G. Dietterich, "Approximate Statistical Tests for Comparing Supervised Classification Learning
  Algorithms", Neural Computation 10 (1998).
- Holm's correction for comparisons of several runs: S. Holm, Scandinavian Journal of Statistics 6 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline.core.stats import (
    AT_ONCE,
    LARGE,
    RESAMPLES,
    SEED,
    Estimate,
    Floats,
    interval_between,
    pieces,
    ratio,
    resampled_ratios,
)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """The difference of two runs on the same samples.

    Attributes:
        estimate: the second minus the first.
        p_value: of a difference at least as large under the null hypothesis.
    """

    estimate: Estimate
    p_value: float
    test: str


def of_counts(counts: Counts, statistic: Callable[[Floats], Floats]) -> Estimate:
    """Estimate a share that depends on the number of samples in each cell, by resampling samples.

    N samples with replacement have cell counts that follow a multinomial distribution.

    Args:
        counts: (cells,).
        statistic: (R, cells) counts -> (R,) values.
    """
    total = int(counts.sum())
    value = float(statistic(counts[None].astype(np.float64))[0]) if total else math.nan
    if total < 10:
        return Estimate(value, is_share=True)
    generator = np.random.default_rng(SEED)
    at_once = max(1, min(RESAMPLES, AT_ONCE // max(1, len(counts))))
    drawn = [
        statistic(generator.multinomial(total, counts / total, size=size).astype(np.float64))
        for size in pieces(RESAMPLES, at_once)
    ]
    return replace(interval_between(value, np.concatenate(drawn), "bootstrap over samples"), is_share=True)


def mcnemar(first_right: npt.NDArray[np.bool_], second_right: npt.NDArray[np.bool_]) -> Difference:
    """Test whether the second of two classifiers is right more often; both (N,), by sample.

    The null hypothesis of the exact test: where they disagree, either is right with probability 1/2.
    """
    gained = int((second_right & ~first_right).sum())
    lost = int((first_right & ~second_right).sum())
    change = second_right.astype(np.float64) - first_right.astype(np.float64)
    estimate = ratio(change, np.ones_like(change), "paired bootstrap over samples")
    estimate = replace(estimate, is_share=True)
    return Difference(estimate, _binomial_test(min(gained, lost), gained + lost), "McNemar's exact test")


def paired(first: Floats, second: Floats) -> Difference:
    """Test whether the mean of the second differs from that of the first; both (N,), by sample, finite."""
    change = second - first
    estimate = ratio(change, np.ones_like(change), "paired bootstrap over samples")
    if not bool(change.any()):
        return Difference(Estimate(0.0, 0.0, 0.0, estimate.method), 1.0, "paired bootstrap")
    if len(change) < 10:
        return Difference(estimate, 1.0, "too few samples to tell")
    # Shifted to a mean of 0, as it would be were there no difference (Efron and Tibshirani, chapter 16).
    centred = change - change.mean()
    if len(change) > LARGE:
        error = float(change.std()) / math.sqrt(len(change))
        z = abs(float(change.mean())) / error if error else math.inf
        return Difference(estimate, 2 * NormalDist().cdf(-z), "normal test of paired differences")
    drawn = resampled_ratios(centred, np.ones_like(centred))
    extreme = int((np.abs(drawn) >= abs(float(change.mean()))).sum())
    return Difference(estimate, (extreme + 1) / (RESAMPLES + 1), "paired bootstrap")


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several comparisons for multiple testing."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = largest
    return corrected


def _binomial_test(fewer: int, total: int) -> float:
    if total == 0:
        return 1.0
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - total * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))
