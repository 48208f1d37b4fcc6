"""Runs beside each other: whether one is better, and in what they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.intervals import Difference, holm, mcnemar, paired
from paceline.reporting.analysis import Analysis

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Comparison:
    """A run beside the first one.

    Attributes:
        name: of the run.
        metric: what is compared.
        difference: this run minus the first one, its p-value corrected for the number of comparisons;
            None where they cannot be compared.
        better: whether it is better than the first, by more than chance; None where that cannot be told.
        why_not: why they cannot be compared.
    """

    name: str
    metric: str
    difference: Difference | None
    better: bool | None
    why_not: str = ""


@dataclass(frozen=True)
class Setting:
    """An option or field that is not the same in all runs; one value a run, None where it has none."""

    name: str
    values: tuple[Any, ...]


def compare(analyses: Sequence[Analysis]) -> list[Comparison]:
    """Each run but the first beside the first, by its main metric."""
    first, found = analyses[0], []
    metric = first.main_metric
    for other in analyses[1:]:
        difference, why_not = _difference(first, other, metric)
        found.append(Comparison(other.record.name, metric, difference, None, why_not))
    tested = [index for index, c in enumerate(found) if c.difference is not None]
    p_values = [d.p_value for c in found if (d := c.difference) is not None]
    for index, p_value in zip(tested, holm(p_values), strict=True):
        difference = found[index].difference
        assert difference is not None
        gain = difference.estimate.value * (1 if first.more_is_better else -1)
        better = gain > 0 if p_value < SIGNIFICANT else None
        found[index] = replace(found[index], difference=replace(difference, p_value=p_value), better=better)
    return found


def differing_settings(analyses: Sequence[Analysis]) -> list[Setting]:
    """The options and fields whose values are not the same in all runs."""
    settings = [analysis.record.settings for analysis in analyses]
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    rows = [Setting(name, tuple(of_run.get(name) for of_run in settings)) for name in names]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def _difference(first: Analysis, other: Analysis, metric: str) -> tuple[Difference | None, str]:
    if metric not in other.metrics:
        return None, f"it has no {metric}"
    if first.data.sha256 != other.data.sha256:
        return None, f"its {other.split} split holds other data, or the same but padded otherwise"
    if metric not in first.per_sample or metric not in other.per_sample:
        return None, f"{metric} has no value for each sample"
    for analysis in (first, other):
        values = analysis.per_sample[metric]
        if strange := int((~np.isfinite(values)).sum()):
            of_all = f"{strange:,} of {analysis.record.name}'s {len(values):,} samples"
            return None, f"{metric} is NaN or infinite for {of_all}"
    before, after = first.per_sample[metric], other.per_sample[metric]
    if all(bool(((values == 0) | (values == 1)).all()) for values in (before, after)):
        return mcnemar(before == 1, after == 1), ""
    return paired(before, after), ""
