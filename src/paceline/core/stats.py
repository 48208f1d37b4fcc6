"""Confidence intervals, computed by arithmetic alone.

- Wilson's score interval for shares: E. B. Wilson, "Probable Inference, the Law of Succession, and
  Statistical Inference", JASA 22 (1927); recommended by Brown, Cai and DasGupta, "Interval Estimation for a
  Binomial Proportion", Statistical Science 16 (2001).
- Percentile bootstrap for means and ratios: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap"
  (1993), chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2000
SEED = 20_011_115  # fixed, so that an interval is reproducible
AT_ONCE = 2_000_000  # numbers drawn at a time
LARGE = 200_000  # beyond it, the bootstrap and the normal interval agree


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
    if len(sums) > LARGE:
        # The delta method: the residuals' standard error.
        error = float((sums - value * weights).std()) * math.sqrt(len(sums)) / total
        half = NormalDist().inv_cdf(0.5 + LEVEL / 2) * error
        return Estimate(value, value - half, value + half, "normal")
    drawn = resampled_ratios(sums, weights)
    return interval_between(value, drawn, method)


def _total(values: Floats) -> float:
    if np.isfinite(values).all():
        return math.fsum(values)
    with np.errstate(invalid="ignore"):  # math.fsum raises where both infinities are among them
        return float(values.sum())


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by nearest rank, which is one of the values; None without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else None


def resampled_ratios(sums: Floats, weights: Floats) -> Floats:
    """Return the ratios of two sums, each over units drawn with replacement; (``RESAMPLES``,)."""
    generator = np.random.default_rng(SEED)
    size = len(sums)
    drawn = []
    for count in pieces(RESAMPLES, max(1, AT_ONCE // size)):
        chosen = generator.integers(size, size=(count, size))
        drawn.append(sums[chosen].sum(axis=1) / weights[chosen].sum(axis=1))
    return np.concatenate(drawn)


def interval_between(value: float, drawn: Floats, method: str) -> Estimate:
    """Return a value with the interval in which most of the drawn ones lie."""
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Estimate(value)
    low, high = np.quantile(drawn, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return Estimate(value, float(low), float(high), method)


def pieces(total: int, at_once: int) -> list[int]:
    """Split a number into pieces of at most ``at_once``."""
    return [min(at_once, total - start) for start in range(0, total, at_once)]
