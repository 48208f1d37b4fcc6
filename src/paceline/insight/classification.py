"""How a classifier does: by class, what it mixes up, and whether its probabilities can be believed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.core.stats import Counts, Estimate, Floats, mean, of_counts, wilson
from paceline.insight.evaluation_recorder import Predictions

BINS = 15
"""Of equal width, as in Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017)."""
_PAIRS = 10


@dataclass(frozen=True)
class ClassScore:
    """One class.

    Attributes:
        label: its name.
        support: how many samples there are of it.
        predicted: how many samples were said to be of it.
        precision: how many of these are; None where there are none.
        recall: how many of its samples were found; None where there are none.
        f1: their harmonic mean; None where it has neither samples nor predictions.
    """

    label: str
    support: int
    predicted: int
    precision: Estimate | None
    recall: Estimate | None
    f1: float | None


@dataclass(frozen=True)
class Bin:
    """The samples whose confidence is between ``low`` and ``high``.

    Attributes:
        count: how many.
        confidence: their mean confidence.
        accuracy: the share of them that is right.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: Estimate


@dataclass(frozen=True)
class Confusion:
    """Samples of one class that were taken for another."""

    actual: str
    predicted: str
    count: int


@dataclass(frozen=True)
class ClassificationResult:
    """A classifier on one split.

    Attributes:
        accuracy: the share that is right.
        balanced_accuracy: the mean recall of the classes that have samples.
        macro_f1: the mean F1 of the classes that have samples or predictions.
        nll: the mean negative logarithm of the actual class's probability, in nats.
        brier: the mean squared distance of the probabilities from the truth.
        calibration_error: the expected calibration error, ECE: the mean distance between confidence and
            accuracy over the bins, weighted by their samples (Naeini et al., AAAI 2015).
        classes: by number.
        matrix: (classes, classes) counts, actual by predicted; None where there are more than ``MATRIX``.
        confusions: the most frequent ones, most frequent first.
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
"""Up to so many classes, the matrix of all confusions can be read."""


def classify(found: Predictions) -> ClassificationResult:
    """All of it, of a split with at least one sample."""
    number = max(len(found.labels), int(found.actual.max()) + 1, int(found.predicted.max()) + 1)
    labels = tuple(found.labels[k] if k < len(found.labels) else str(k) for k in range(number))
    # Only the cells that hold samples: a vocabulary's matrix would have billions.
    cells, counts = np.unique(found.actual * number + found.predicted, return_counts=True)
    actual, predicted = cells // number, cells % number
    support = np.bincount(actual, counts, number)
    said = np.bincount(predicted, counts, number)
    hits = np.zeros(number)
    hits[actual[actual == predicted]] = counts[actual == predicted]
    matrix = None
    if number <= MATRIX:
        matrix = np.zeros((number, number), dtype=np.int64)
        matrix[actual, predicted] = counts
    wrong = [
        Confusion(labels[a], labels[p], int(n)) for a, p, n in zip(actual, predicted, counts, strict=True) if a != p
    ]
    return ClassificationResult(
        accuracy=wilson(int(found.right.sum()), len(found.actual)),
        balanced_accuracy=of_counts(counts, partial(_balanced, actual, predicted)),
        macro_f1=of_counts(counts, partial(_macro_f1, actual, predicted)),
        nll=mean(-np.log(np.maximum(found.actual_probability, np.finfo(np.float64).tiny))),
        brier=mean(found.brier),
        calibration_error=_calibration_error(found),
        classes=tuple(
            _score(labels[k], int(support[k]), int(said[k]), int(hits[k]))
            for k in range(number)
            if number <= MATRIX or support[k] or said[k]
        ),
        matrix=matrix,
        confusions=tuple(sorted(wrong, key=lambda c: -c.count)[:_PAIRS]),
        bins=_bins(found),
    )


def _score(label: str, support: int, said: int, hits: int) -> ClassScore:
    return ClassScore(
        label=label,
        support=support,
        predicted=said,
        precision=wilson(hits, said) if said else None,
        recall=wilson(hits, support) if support else None,
        f1=2 * hits / (support + said) if support + said else None,
    )


def _sums(classes: Counts, counts: Floats) -> Floats:
    """Counts (R, cells) summed by each cell's class -> (R, distinct classes)."""
    order = np.argsort(classes, kind="stable")
    _, starts = np.unique(classes[order], return_index=True)
    return np.add.reduceat(counts[:, order], starts, axis=1)


def _balanced(actual: Counts, predicted: Counts, counts: Floats) -> Floats:
    support = _sums(actual, counts)
    hits = _sums(actual, counts * (actual == predicted))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nanmean(hits / support, axis=1))


def _macro_f1(actual: Counts, predicted: Counts, counts: Floats) -> Floats:
    # Each class occurs in both lists, so that sums line up; the empty cells that this adds count nothing.
    classes = np.union1d(actual, predicted)
    nothing = np.zeros((len(counts), len(classes)))
    support = _sums(np.concatenate([actual, classes]), np.concatenate([counts, nothing], axis=1))
    said = _sums(np.concatenate([predicted, classes]), np.concatenate([counts, nothing], axis=1))
    right = counts * (actual == predicted)
    hits = _sums(np.concatenate([actual, classes]), np.concatenate([right, nothing], axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nanmean(2 * hits / (support + said), axis=1))


def _bin_numbers(found: Predictions) -> Counts:
    return np.clip(np.ceil(found.confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def _bins(found: Predictions) -> tuple[Bin, ...]:
    numbers = _bin_numbers(found)
    bins = []
    for k in range(BINS):
        inside = numbers == k
        count = int(inside.sum())
        if count:
            bins.append(
                Bin(
                    low=k / BINS,
                    high=(k + 1) / BINS,
                    count=count,
                    confidence=float(found.confidence[inside].mean()),
                    accuracy=wilson(int(found.right[inside].sum()), count),
                )
            )
    return tuple(bins)


def _calibration_error(found: Predictions) -> float:
    gaps = np.bincount(_bin_numbers(found), found.right - found.confidence, BINS)
    return float(np.abs(gaps).sum() / len(found.actual))
