"""Results of a regression: errors, residuals, and the slices of the data in which they are largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.stats import Estimate, Floats, mean
from paceline_pages.evaluation_recorder import Column, RegressionValues
from paceline_serving.encodings import show_category

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
