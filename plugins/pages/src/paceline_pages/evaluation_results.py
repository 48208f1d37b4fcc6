"""Results of a classifier and of a regression on a split, and tests of whether two runs differ.

Tests and intervals of shares of counts are computed by arithmetic alone.

- McNemar's test in its exact form for two classifiers on the same samples: Q. McNemar, Psychometrika 12
  (1947); T. G. Dietterich, "Approximate Statistical Tests for Comparing Supervised Classification Learning
  Algorithms", Neural Computation 10 (1998).
- Holm's correction for comparisons of several runs: S. Holm, Scandinavian Journal of Statistics 6 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    mean,
    pieces,
    ratio,
    resampled_ratios,
    wilson,
)
from paceline_pages.evaluation_recorder import Column, Predictions, RegressionValues
from paceline_serving.encodings import show_category

# --- Differences of runs, and shares of counts ---


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


# --- A classifier: scores by class, ROC and precision-recall, confusions and calibration ---


BINS = 15
"""Number of bins of equal width, as in Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017)."""
_PAIRS = 10
_POINTS = 200


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class.

    Attributes:
        support: number of samples of the class.
        predicted: number of samples predicted as the class.
        precision: None without predictions.
        recall: None without samples.
        f1: None without samples and predictions.
        ranking: how well its probability separates its samples from the others; None if there are none of either, or
            more than ``CURVES`` classes.
    """

    label: str
    support: int
    predicted: int
    precision: Estimate | None
    recall: Estimate | None
    f1: float | None
    ranking: Ranking | None = None


@dataclass(frozen=True)
class Ranking:
    """The rates for each threshold of a class's probability, the highest threshold first.

    Attributes:
        false_positive_rate, recall, precision: at most ``_POINTS`` of them.
        auc: area under the ROC curve: the probability that a sample of the class gets the higher one of two.
        average_precision: the mean precision, weighted by the steps of recall.
    """

    false_positive_rate: Floats
    recall: Floats
    precision: Floats
    auc: float
    average_precision: float


@dataclass(frozen=True)
class Bin:
    """The samples whose confidence is between ``low`` and ``high``, and their mean confidence and accuracy."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: Estimate


@dataclass(frozen=True)
class Confusion:
    """Number of samples of one class that were predicted as another."""

    actual: str
    predicted: str
    count: int


@dataclass(frozen=True)
class ClassificationResult:
    """Results of a classifier on one split.

    Attributes:
        balanced_accuracy: mean recall of the classes that have samples.
        macro_f1: mean F1 of the classes that have samples or predictions.
        nll: mean negative log-probability of the actual class, in nats.
        brier: mean squared distance of the probabilities from the truth.
        calibration_error: expected calibration error (ECE): the mean distance between confidence and
            accuracy over the bins, weighted by their samples (Naeini et al., AAAI 2015).
        classes: by index.
        matrix: (classes, classes) counts, actual by predicted; None with more than ``MATRIX`` classes.
        confusions: most frequent first.
        bins: those that hold samples.
    """

    accuracy: Estimate
    balanced_accuracy: Estimate
    macro_f1: Estimate
    nll: Estimate
    brier: Estimate
    calibration_error: float
    classes: tuple[ClassScore, ...]
    matrix: Counts | None
    confusions: tuple[Confusion, ...]
    bins: tuple[Bin, ...]
    predictions: Predictions

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus accuracy."""
        total = sum(b.count for b in self.bins)
        return sum(b.count * (b.confidence - b.accuracy.value) for b in self.bins) / total


MATRIX = 20
"""Largest number of classes for which the whole confusion matrix is shown."""


def classify(predictions: Predictions) -> ClassificationResult:
    """Compute all results of a split with at least one sample."""
    num_classes = max(len(predictions.labels), int(predictions.actual.max()) + 1, int(predictions.predicted.max()) + 1)
    labels = tuple(predictions.labels[k] if k < len(predictions.labels) else str(k) for k in range(num_classes))
    # Count only cells that hold samples: a vocabulary's matrix would have billions of cells.
    cells, counts = np.unique(predictions.actual * num_classes + predictions.predicted, return_counts=True)
    actual, predicted = cells // num_classes, cells % num_classes
    support = np.bincount(actual, counts, num_classes)
    num_predicted = np.bincount(predicted, counts, num_classes)
    hits = np.zeros(num_classes)
    hits[actual[actual == predicted]] = counts[actual == predicted]
    matrix = None
    if num_classes <= MATRIX:
        matrix = np.zeros((num_classes, num_classes), dtype=np.int64)
        matrix[actual, predicted] = counts
    wrong = [
        Confusion(labels[a], labels[p], int(n)) for a, p, n in zip(actual, predicted, counts, strict=True) if a != p
    ]
    gaps = np.bincount(_bin_numbers(predictions), predictions.right - predictions.confidence, BINS)
    return ClassificationResult(
        accuracy=wilson(int(predictions.right.sum()), len(predictions.actual)),
        balanced_accuracy=of_counts(counts, partial(_balanced, actual, predicted)),
        macro_f1=of_counts(counts, partial(_macro_f1, actual, predicted)),
        nll=mean(-np.log(np.maximum(predictions.actual_probability, np.finfo(np.float64).tiny))),
        brier=mean(predictions.brier),
        calibration_error=float(np.abs(gaps).sum() / len(predictions.actual)),
        classes=tuple(
            ClassScore(
                label=labels[k],
                support=int(support[k]),
                predicted=int(num_predicted[k]),
                precision=wilson(int(hits[k]), int(num_predicted[k])) if num_predicted[k] else None,
                recall=wilson(int(hits[k]), int(support[k])) if support[k] else None,
                f1=float(2 * hits[k] / (support[k] + num_predicted[k])) if support[k] + num_predicted[k] else None,
                ranking=_ranking_of(predictions, k),
            )
            for k in range(num_classes)
            if num_classes <= MATRIX or support[k] or num_predicted[k]
        ),
        matrix=matrix,
        confusions=tuple(sorted(wrong, key=lambda c: -c.count)[:_PAIRS]),
        bins=_bins(predictions),
        predictions=predictions,
    )


def rank(scores: Floats, positive: npt.NDArray[np.bool_]) -> Ranking | None:
    """Compute the rates at each threshold of the scores (N,); None if all samples are positive, or none is."""
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative or not np.isfinite(scores).all():
        return None
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # equal scores have one threshold
    hits = np.cumsum(positive[order])[ends]
    precision, recall = hits / (ends + 1), hits / num_positive
    false_rate = (ends + 1 - hits) / num_negative
    at = np.linspace(0, 1, _POINTS // 2)
    kept = np.unique(np.concatenate([np.searchsorted(rates, at) for rates in (recall, false_rate)]))
    kept = np.minimum(kept, len(ends) - 1)
    return Ranking(
        false_positive_rate=np.append(0.0, false_rate[kept]),
        recall=np.append(0.0, recall[kept]),
        precision=np.append(precision[0], precision[kept]),
        auc=float(np.trapezoid(np.append(0.0, recall), np.append(0.0, false_rate))),
        average_precision=float(np.sum(np.diff(recall, prepend=0.0) * precision)),
    )


def _ranking_of(predictions: Predictions, number: int) -> Ranking | None:
    probabilities = predictions.probabilities
    if probabilities is None or number >= probabilities.shape[1]:
        return None
    return rank(probabilities[:, number].astype(np.float64), predictions.actual == number)


def _sums(classes: Counts, counts: Floats) -> Floats:
    """Sum counts (R, cells) by each cell's class -> (R, distinct classes)."""
    order = np.argsort(classes, kind="stable")
    _, starts = np.unique(classes[order], return_index=True)
    return np.add.reduceat(counts[:, order], starts, axis=1)


def _balanced(actual: Counts, predicted: Counts, counts: Floats) -> Floats:
    support = _sums(actual, counts)
    hits = _sums(actual, counts * (actual == predicted))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nanmean(hits / support, axis=1))


def _macro_f1(actual: Counts, predicted: Counts, counts: Floats) -> Floats:
    # Each class occurs in both lists so that sums align; the added empty cells count nothing.
    classes = np.union1d(actual, predicted)
    zeros = np.zeros((len(counts), len(classes)))

    def by_class(of: Counts, cells: Floats) -> Floats:
        return _sums(np.concatenate([of, classes]), np.concatenate([cells, zeros], axis=1))

    support, num_predicted = by_class(actual, counts), by_class(predicted, counts)
    hits = by_class(actual, counts * (actual == predicted))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nanmean(2 * hits / (support + num_predicted), axis=1))


def _bin_numbers(predictions: Predictions) -> Counts:
    return np.clip(np.ceil(predictions.confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def _bins(predictions: Predictions) -> tuple[Bin, ...]:
    numbers = _bin_numbers(predictions)
    parts = [(k, numbers == k) for k in range(BINS)]
    return tuple(
        Bin(
            low=k / BINS,
            high=(k + 1) / BINS,
            count=int(inside.sum()),
            confidence=float(predictions.confidence[inside].mean()),
            accuracy=wilson(int(predictions.right[inside].sum()), int(inside.sum())),
        )
        for k, inside in parts
        if inside.any()
    )


# --- A regression: errors, residuals, and the slices of the data in which they are largest ---


_MOST_CATEGORIES = 8
_QUANTILES = 4
_MIN_SHARE = 0.01  # of the samples, below which a slice says nothing
_MOST_SLICES = 20


@dataclass(frozen=True)
class Slice:
    """The samples for which a column has one value, or a value between two.

    Attributes:
        column: an input, or the target.
        text: the value, or the interval.
        mae: their mean absolute error.
        bias: their mean residual.
    """

    column: str
    text: str
    samples: int
    mae: Estimate
    bias: float


@dataclass(frozen=True)
class RegressionResult:
    """Results of a regression on one split.

    Attributes:
        mae: mean absolute error.
        rmse: root of the mean squared error.
        r2: the share of the targets' variance that the model explains; None if the targets do not vary.
        bias: mean residual, predicted minus true.
        slices: those with the largest errors, the largest first.
    """

    mae: Estimate
    rmse: Estimate
    r2: float | None
    bias: Estimate
    slices: tuple[Slice, ...]
    values: RegressionValues


MISSING = "(missing)"


def figure(value: float, sign: str = "") -> str:
    """Format a value with four digits, a large one without an exponent, a positive one with its sign if it is "+"."""
    return f"{value:{sign},.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:{sign}.4g}"


def regress(values: RegressionValues) -> RegressionResult:
    """Compute all results of a split with at least one sample."""
    residuals = values.predicted - values.actual
    squares = mean(residuals**2)
    variance = float(np.var(values.actual))
    rmse = Estimate(
        float(np.sqrt(squares.value)),
        None if squares.low is None else float(np.sqrt(max(0.0, squares.low))),
        None if squares.high is None else float(np.sqrt(squares.high)),
        squares.method,
    )
    return RegressionResult(
        mae=mean(np.abs(residuals)),
        rmse=rmse,
        r2=1.0 - squares.value / variance if variance > 0 else None,
        bias=mean(residuals),
        slices=_slices({**values.columns, values.target: Column(values.actual)}, residuals),
        values=values,
    )


def _slices(columns: Mapping[str, Column], residuals: Floats) -> tuple[Slice, ...]:
    found = []
    for name, column in columns.items():
        for text, inside in _parts(column):
            if inside.sum() >= max(2.0, _MIN_SHARE * len(residuals)) and not inside.all():
                errors = residuals[inside]
                found.append(Slice(name, text, int(inside.sum()), mean(np.abs(errors)), float(errors.mean())))
    return tuple(sorted(found, key=lambda part: -part.mae.value)[:_MOST_SLICES])


def _parts(column: Column) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Divide samples by a column's categories, or its values if there are few, else at its quartiles."""
    cells = column.cells
    if (categories := column.categories) is not None:
        return [(show_category(categories.decode(code)) or MISSING, cells == code) for code in np.unique(cells)]
    finite = cells[np.isfinite(cells)]
    missing = [(MISSING, np.isnan(cells))]
    different = np.unique(finite)
    if len(different) <= _MOST_CATEGORIES:
        return missing + [(figure(value), cells == value) for value in different]
    edges = np.unique(np.quantile(finite, np.linspace(0, 1, _QUANTILES + 1)))
    ends = range(len(edges) - 1)
    return missing + [
        (
            f"{figure(edges[i])} to {figure(edges[i + 1])}",
            (cells >= edges[i]) & ((cells < edges[i + 1]) if i < ends[-1] else (cells <= edges[i + 1])),
        )
        for i in ends
    ]
