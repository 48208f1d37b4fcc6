"""A report: the headline, the comparison with other runs, and the files."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.core.stats import LEVEL, RESAMPLES, Difference, Estimate, holm, mcnemar, paired
from paceline.insight.analysis import Analysis
from paceline.insight.classification import ClassificationResult
from paceline.insight.evaluation_recorder import Predictions

# --- Runs beside each other: whether one is better, and in what they differ ---


SIGNIFICANT = 0.05


@dataclass(frozen=True)
class RunComparison:
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


def compare(analyses: Sequence[Analysis]) -> list[RunComparison]:
    """Each run but the first beside the first, by its main metric."""
    first, found = analyses[0], []
    metric = first.main_metric
    for other in analyses[1:]:
        difference, why_not = _difference(first, other, metric)
        found.append(RunComparison(other.record.name, metric, difference, None, why_not))
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


# --- What a report says first ---


@dataclass(frozen=True)
class Headline:
    """The first screen.

    Attributes:
        headline: a few words.
        sentence: what they rest on.
        marks: (tone, text): "good", "bad" or "plain".
    """

    headline: str
    sentence: str
    marks: tuple[tuple[str, str], ...]


def headline(analyses: Sequence[Analysis], comparisons: Sequence[RunComparison]) -> Headline:
    """Of one run, what it reached; of several, who is better."""
    first = analyses[0]
    if len(analyses) == 1:
        name = first.main_metric
        estimate = first.metrics[name]
        return Headline(f"{number(estimate)} {name}", _measured(first, estimate), tuple(_marks(first)))
    better = [c.name for c in comparisons if c.better]
    worse = [c.name for c in comparisons if c.better is False]
    # With more than two runs: each is held against the first only, and that is what is said.
    if better:
        headline = f"{_listed(better)} {'is' if len(better) == 1 else 'are'} better than {first.record.name}"
    elif worse and len(worse) == len(comparisons):
        headline = f"{first.record.name} is better than {_listed(worse)}"
    elif all(c.difference is None for c in comparisons):
        headline = "These runs cannot be compared"
    else:
        told = f", and better than {_listed(worse)}" if worse else ""
        others = _listed([c.name for c in comparisons if c.difference is not None and c.better is None])
        headline = f"{first.record.name} cannot be told from {others}{told}"
    return Headline(headline, " ".join(map(_compared, comparisons)), ())


def number(estimate: Estimate) -> str:
    """For people: a share in per cent, anything else with four digits."""
    return shown(estimate.value, estimate)


def interval(estimate: Estimate) -> str:
    """Both ends, or nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{shown(estimate.low, estimate).removesuffix(' %')} to {shown(estimate.high, estimate)}"


def shown(value: float, like: Estimate) -> str:
    """A number, written as ``like`` is."""
    return f"{100 * value:.2f} %" if like.is_share else f"{value:#.4g}".removesuffix(".")


def probability(value: float) -> str:
    """A p-value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _measured(analysis: Analysis, estimate: Estimate) -> str:
    sure = f"95 % interval {interval(estimate)}. " if estimate.low is not None else ""
    which = "best" if analysis.is_best else "model"
    return (
        f"{sure}Measured on the {analysis.data.samples:,} samples of the {analysis.split} split, with the "
        f"{which + ' model' if analysis.is_best else which} after step {analysis.step:,}."
    )


def _marks(analysis: Analysis) -> list[tuple[str, str]]:
    record = analysis.record
    marks = [("good" if record.state == "finished" else "bad", record.state)]
    if analysis.recorded:
        differ = [n for n, e in analysis.metrics.items() if analysis.recorded.get(n) not in (None, e.value)]
        same = "the numbers that the run recorded, to the last bit"
        marks.append(("bad", f"the run recorded another {_listed(differ)}") if differ else ("good", same))
    faults = sum(1 for entry in record.timeline.entries if entry.event in ("fault", "node lost", "hang"))
    recoveries = (record.result or {}).get("recoveries")
    if faults:
        told = f"{faults} fault{'s' if faults > 1 else ''}"
        marks.append(("plain", f"{told}, {recoveries} recovered in place" if recoveries else told))
    else:
        marks.append(("plain", "no faults"))
    return marks


def _compared(comparison: RunComparison) -> str:
    difference = comparison.difference
    if difference is None:
        return f"{comparison.name} cannot be compared: {comparison.why_not}."
    points = f"{comparison.metric} {points_of(difference.estimate)}"
    said = {True: "better", False: "worse", None: "no difference that chance does not explain"}
    return (
        f"{comparison.name}: {points}, {said[comparison.better]} "
        f"({difference.test}, {probability(difference.p_value)})."
    )


def points_of(estimate: Estimate) -> str:
    """A difference with its sign and its interval; of shares, in percentage points."""

    def signed(value: float) -> str:
        return (f"{100 * value:+.2f}" if estimate.is_share else f"{value:+.4f}").replace("-", "−")

    known = estimate.low is not None and estimate.high is not None
    ends = f" ({signed(estimate.low or 0.0)} to {signed(estimate.high or 0.0)})" if known else ""
    return f"{signed(estimate.value)}{ends}{' points' if estimate.is_share else ''}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# --- A report on one run or several, as JSON types ---


@dataclass(frozen=True)
class RunReport:
    """Runs and what follows from them.

    Attributes:
        analyses: the runs, as they were named.
        comparisons: each but the first beside the first.
        differing: options and fields that are not the same in all.
        verdict: what is said first.
        created: when, local time.
        versions: of what evaluated the models.
    """

    analyses: tuple[Analysis, ...]
    comparisons: tuple[RunComparison, ...]
    differing: tuple[Setting, ...]
    headline: Headline
    created: str
    versions: dict[str, str]


def make_report(analyses: Sequence[Analysis]) -> RunReport:
    """Compare the runs and say what came out."""
    comparisons = compare(analyses)
    return RunReport(
        analyses=tuple(analyses),
        comparisons=tuple(comparisons),
        differing=tuple(differing_settings(analyses)),
        headline=headline(analyses, comparisons),
        created=time.strftime("%Y-%m-%d %H:%M %z"),
        versions=versions_now(),
    )


def versions_now() -> dict[str, str]:
    """As ``run.toml`` records them."""
    return {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def as_json(report: RunReport) -> dict[str, Any]:
    """All figures of the report; curves are in each run's ``metrics.jsonl``."""
    return {
        "verdict": report.headline.headline,
        "explanation": report.headline.sentence,
        "created": report.created,
        "versions": report.versions,
        "intervals": {"level": LEVEL, "resamples": RESAMPLES},
        "runs": [_run(analysis) for analysis in report.analyses],
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "differing_settings": {setting.name: list(setting.values) for setting in report.differing},
    }


def _run(analysis: Analysis) -> dict[str, Any]:
    record = analysis.record
    goodput = record.timeline.goodput
    result = record.result or {}
    return {
        "run": str(record.path),
        "id": record.manifest["id"],
        "state": record.state,
        "task": record.manifest["task"]["spec"],
        "fields": record.fields,
        "split": analysis.split,
        "samples": analysis.data.samples,
        "data_sha256": analysis.data.sha256,
        "step": analysis.step,
        "best": analysis.is_best,
        "model_sha256": result.get("model_sha256"),
        "main_metric": analysis.main_metric,
        "metrics": {name: estimate.as_json() for name, estimate in analysis.metrics.items()},
        "recorded": dict(analysis.recorded),
        "changed_numerics": list(analysis.changed_numerics),
        "classification": None
        if analysis.classification is None or analysis.predictions is None
        else _classification(analysis.classification, analysis.predictions),
        "parameters": analysis.architecture.parameters,
        "trained_parameters": analysis.architecture.trained,
        "layers": [dataclasses.asdict(layer) for layer in analysis.architecture.layers],
        "phases_s": record.phases_s,
        "goodput": {"share": goodput.share, **dataclasses.asdict(goodput)},
        "timeline": [dataclasses.asdict(entry) for entry in record.timeline.entries],
        "recorded_versions": record.manifest.get("versions", {}),
        "pins": record.manifest.get("pins", {}),
        "command": record.command,
    }


def _classification(found: ClassificationResult, predictions: Predictions) -> dict[str, Any]:
    return {
        **{
            name: getattr(found, name).as_json()
            for name in ("accuracy", "balanced_accuracy", "macro_f1", "nll", "brier")
        },
        "calibration_error": found.calibration_error,
        "overconfidence": found.overconfidence,
        "classes": [
            {
                "label": score.label,
                "support": score.support,
                "predicted": score.predicted,
                "precision": _or_none(score.precision),
                "recall": _or_none(score.recall),
                "f1": score.f1,
            }
            for score in found.classes
        ],
        "matrix": None if found.matrix is None else found.matrix.tolist(),
        "confusions": [dataclasses.asdict(confusion) for confusion in found.confusions],
        "bins": [{**dataclasses.asdict(b), "accuracy": b.accuracy.as_json()} for b in found.bins],
        "mistakes": [
            {
                "number": mistake.number,
                "predicted": mistake.predicted,
                "actual": mistake.actual,
                "confidence": mistake.confidence,
                "actual_probability": mistake.actual_probability,
            }
            for mistake in predictions.mistakes
        ],
    }


def _comparison(comparison: RunComparison) -> dict[str, Any]:
    difference = comparison.difference
    return {
        "run": comparison.name,
        "metric": comparison.metric,
        "difference": None if difference is None else difference.estimate.as_json(),
        "p_value": None if difference is None else difference.p_value,
        "test": None if difference is None else difference.test,
        "better": comparison.better,
        "why_not": comparison.why_not,
    }


def _or_none(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.as_json()
