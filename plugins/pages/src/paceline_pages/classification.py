"""Results of a classifier: scores by class, ROC and precision-recall, confusions and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from paceline.core.stats import Estimate, Floats, mean, wilson
from paceline_pages.evaluation_recorder import Predictions
from paceline_pages.significance import Counts, of_counts

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
