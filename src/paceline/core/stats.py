"""Confidence intervals and paired tests, computed by arithmetic alone.

- Wilson's score interval for shares: E. B. Wilson, "Probable Inference, the Law of Succession, and
  Statistical Inference", JASA 22 (1927); recommended by Brown, Cai and DasGupta, "Interval Estimation for a
  Binomial Proportion", Statistical Science 16 (2001).
- Percentile bootstrap for means and ratios: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap"
  (1993), chapter 13.
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
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LEVEL = 0.95
RESAMPLES = 2000
_SEED = 20_011_115  # fixed, so that an interval is reproducible
_AT_ONCE = 2_000_000  # numbers drawn at a time
_LARGE = 200_000  # beyond it, the bootstrap and the normal interval agree


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval.

    Attributes:
        value: as measured.
        low, high: the ends of the interval at ``LEVEL``, or None.
        method: the method of the interval; "" without one.
        is_share: whether it is a share of a whole, from 0 to 1.
    """

    value: float
    low: float | None = None
    high: float | None = None
    method: str = ""
    is_share: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return JSON types, with null for values that are not finite."""
        ends = {"low": self.low, "high": self.high}
        return {
            "value": self.value if math.isfinite(self.value) else None,
            **{name: end if end is not None and math.isfinite(end) else None for name, end in ends.items()},
            "method": self.method,
        }


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


def wilson(successes: int, total: int, level: float = LEVEL) -> Estimate:
    """Return a share with Wilson's score interval.

    Raises:
        ValueError: ``total`` is 0, or less than ``successes``.
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} of {total} is not a share")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half), "Wilson score", is_share=True)


def mean(values: Floats) -> Estimate:
    """Estimate the mean of independent values, one per sample; a share if all are 0 or 1."""
    if len(values) and bool(np.isin(values, (0.0, 1.0)).all()):
        return wilson(int(values.sum()), len(values))
    return ratio(values, np.ones_like(values), "bootstrap over samples")


def ratio(sums: Floats, weights: Floats, method: str = "bootstrap over batches") -> Estimate:
    """Estimate the ratio of two sums, resampled together; both (N,), one entry per unit."""
    total = math.fsum(weights)
    value = _total(sums) / total if total else math.nan
    if len(sums) < 10 or not math.isfinite(value):
        return Estimate(value)
    if len(sums) > _LARGE:
        # The delta method: the residuals' standard error.
        error = float((sums - value * weights).std()) * math.sqrt(len(sums)) / total
        half = NormalDist().inv_cdf(0.5 + LEVEL / 2) * error
        return Estimate(value, value - half, value + half, "normal")
    drawn = _resampled_ratios(sums, weights)
    return _between(value, drawn, method)


def _total(values: Floats) -> float:
    if np.isfinite(values).all():
        return math.fsum(values)
    with np.errstate(invalid="ignore"):  # math.fsum raises where both infinities are among them
        return float(values.sum())


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by nearest rank, which is one of the values; None without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else None


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
    generator = np.random.default_rng(_SEED)
    at_once = max(1, min(RESAMPLES, _AT_ONCE // max(1, len(counts))))
    drawn = [
        statistic(generator.multinomial(total, counts / total, size=size).astype(np.float64))
        for size in _pieces(RESAMPLES, at_once)
    ]
    return replace(_between(value, np.concatenate(drawn), "bootstrap over samples"), is_share=True)


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
    if len(change) > _LARGE:
        error = float(change.std()) / math.sqrt(len(change))
        z = abs(float(change.mean())) / error if error else math.inf
        return Difference(estimate, 2 * NormalDist().cdf(-z), "normal test of paired differences")
    drawn = _resampled_ratios(centred, np.ones_like(centred))
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
    """Return the two-sided p-value for a fair coin."""
    if total == 0:
        return 1.0
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - total * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def _resampled_ratios(sums: Floats, weights: Floats) -> Floats:
    generator = np.random.default_rng(_SEED)
    size = len(sums)
    drawn = []
    for count in _pieces(RESAMPLES, max(1, _AT_ONCE // size)):
        chosen = generator.integers(size, size=(count, size))
        drawn.append(sums[chosen].sum(axis=1) / weights[chosen].sum(axis=1))
    return np.concatenate(drawn)


def _between(value: float, drawn: Floats, method: str) -> Estimate:
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Estimate(value)
    low, high = np.quantile(drawn, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return Estimate(value, float(low), float(high), method)


def _pieces(total: int, at_once: int) -> list[int]:
    return [min(at_once, total - start) for start in range(0, total, at_once)]
