"""Reports on runs: comparison, headline and JSON."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.core.stats import LEVEL, RESAMPLES, Estimate
from paceline.runs.directory import RunDirectory
from paceline.runs.purity import read_purity
from paceline_pages.analysis import Analysis
from paceline_pages.comparison import differing_settings
from paceline_pages.evaluation_results import ClassificationResult, Difference, RegressionResult, holm, mcnemar, paired

# --- Comparison of runs: is one better, and how do their settings differ? ---


SIGNIFICANT = 0.05


@dataclass(frozen=True)
class RunComparison:
    """A comparison of a run with the first run.

    Attributes:
        difference: this run minus the first one, with its p-value corrected for the number of comparisons;
            None if they cannot be compared.
        better: whether it is significantly better or worse than the first; None if neither.
    """

    name: str
    metric: str
    difference: Difference | None
    better: bool | None
    why_not: str


def compare(analyses: Sequence[Analysis]) -> list[RunComparison]:
    """Compare each run with the first by the first run's main metric."""
    first = analyses[0]
    metric = first.main_metric
    found = [_difference(first, other, metric) for other in analyses[1:]]
    p_values = iter(holm([difference.p_value for difference, _ in found if difference is not None]))
    comparisons = []
    for other, (difference, why_not) in zip(analyses[1:], found, strict=True):
        better = None
        if difference is not None:
            difference = replace(difference, p_value=next(p_values))
            gain = difference.estimate.value * (1 if first.more_is_better else -1)
            better = gain > 0 if difference.p_value < SIGNIFICANT else None
        comparisons.append(RunComparison(other.record.name, metric, difference, better, why_not))
    return comparisons


def _difference(first: Analysis, other: Analysis, metric: str) -> tuple[Difference | None, str]:
    if metric not in other.metrics:
        return None, f"it does not have {metric}"
    if first.data.sha256 != other.data.sha256:
        return None, f"its {other.split} split has other data, or the same data with other padding"
    if metric not in first.per_sample or metric not in other.per_sample:
        return None, f"{metric} has no value for each sample"
    for analysis in (first, other):
        values = analysis.per_sample[metric]
        if num_nonfinite := int((~np.isfinite(values)).sum()):
            share = f"{num_nonfinite:,} of {analysis.record.name}'s {len(values):,} samples"
            return None, f"{metric} is NaN or infinite for {share}"
    before, after = first.per_sample[metric], other.per_sample[metric]
    if all(bool(((values == 0) | (values == 1)).all()) for values in (before, after)):
        return mcnemar(before == 1, after == 1), ""
    return paired(before, after), ""


# --- The headline ---


@dataclass(frozen=True)
class Headline:
    """The first lines of a report.

    Attributes:
        marks: (tone, text): "good", "bad" or "plain".
    """

    headline: str
    sentence: str
    marks: tuple[tuple[str, str], ...]


def headline(analyses: Sequence[Analysis], comparisons: Sequence[RunComparison]) -> Headline:
    """State a single run's main result, or which of several runs is better."""
    first = analyses[0]
    if len(analyses) == 1:
        name = first.main_metric
        estimate = first.metrics[name]
        return Headline(f"{number(estimate)} {name}", _measured(first, estimate), tuple(_marks(first)))
    better = [c.name for c in comparisons if c.better]
    worse = [c.name for c in comparisons if c.better is False]
    # Each run is compared with the first only, also if there are more than two.
    if better:
        headline = f"{_join_names(better)} {'is' if len(better) == 1 else 'are'} better than {first.record.name}"
    elif worse and len(worse) == len(comparisons):
        headline = f"{first.record.name} is better than {_join_names(worse)}"
    elif all(c.difference is None for c in comparisons):
        headline = "These runs cannot be compared"
    else:
        suffix = f", and is better than {_join_names(worse)}" if worse else ""
        equals = _join_names([c.name for c in comparisons if c.difference is not None and c.better is None])
        headline = f"{first.record.name} does not differ significantly from {equals}{suffix}"
    return Headline(headline, " ".join(map(_describe_comparison, comparisons)), ())


def number(estimate: Estimate) -> str:
    """Format a share in per cent, and another value with four digits."""
    return shown(estimate.value, estimate)


def interval(estimate: Estimate) -> str:
    """Format both ends of an interval; "" if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{shown(estimate.low, estimate).removesuffix(' %')} to {shown(estimate.high, estimate)}"


def shown(value: float, like: Estimate) -> str:
    """Format a value like ``like``."""
    return f"{100 * value:.2f} %" if like.is_share else f"{value:#.4g}".removesuffix(".")


def probability(value: float) -> str:
    """Format a p-value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _measured(analysis: Analysis, estimate: Estimate) -> str:
    bounds = f"95 % interval {interval(estimate)}. " if estimate.low is not None else ""
    which = "best" if analysis.is_best else "model"
    return (
        f"{bounds}Measured on the {analysis.data.samples:,} samples of the {analysis.split} split, with the "
        f"{which + ' model' if analysis.is_best else which} after step {analysis.step:,}."
    )


def _marks(analysis: Analysis) -> list[tuple[str, str]]:
    record = analysis.record
    marks = [("good" if record.state == "finished" else "bad", record.state)]
    if analysis.recorded:
        differ = [n for n, e in analysis.metrics.items() if analysis.recorded.get(n) not in (None, e.value)]
        same = "bitwise equal to the metrics that the run recorded"
        marks.append(
            ("bad", f"the run recorded different values of {_join_names(differ)}") if differ else ("good", same)
        )
    faults = sum(1 for entry in record.timeline.entries if entry.event in ("fault", "node lost", "hang"))
    recoveries = (record.result or {}).get("recoveries")
    if faults:
        count = f"{faults} fault{'s' if faults > 1 else ''}"
        marks.append(("plain", f"{count}, {recoveries} recovered in place" if recoveries else count))
    else:
        marks.append(("plain", "no faults"))
    purity = read_purity(RunDirectory(record.path))
    if purity.found:
        marks.append(("bad", f"the purity guard found {len(purity.found)}; see the timeline"))
    elif purity.mode in ("error", "warn"):
        marks.append(("good", "the purity guard found nothing"))
    else:
        marks.append(("plain", "not checked by the purity guard"))
    return marks


def _describe_comparison(comparison: RunComparison) -> str:
    difference = comparison.difference
    if difference is None:
        return f"{comparison.name} cannot be compared: {comparison.why_not}."
    points = f"{comparison.metric} {points_of(difference.estimate)}"
    verdicts = {True: "better", False: "worse", None: "no significant difference"}
    return (
        f"{comparison.name}: {points}, {verdicts[comparison.better]} "
        f"({difference.test}, {probability(difference.p_value)})."
    )


def points_of(estimate: Estimate) -> str:
    """Format a difference with its sign and interval; shares in percentage points."""

    def signed(value: float) -> str:
        return (f"{100 * value:+.2f}" if estimate.is_share else f"{value:+.4f}").replace("-", "−")

    has_interval = estimate.low is not None and estimate.high is not None
    ends = f" ({signed(estimate.low or 0.0)} to {signed(estimate.high or 0.0)})" if has_interval else ""
    return f"{signed(estimate.value)}{ends}{' points' if estimate.is_share else ''}"


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# --- The report as JSON ---


@dataclass(frozen=True)
class RunReport:
    """Analysed runs with their comparison.

    Attributes:
        comparisons: of each further run with the first.
        differing: the values of options and fields that differ between the runs, one for each run.
        created: local time.
        versions: of the libraries that evaluated the models.
    """

    analyses: tuple[Analysis, ...]
    comparisons: tuple[RunComparison, ...]
    differing: Mapping[str, Sequence[Any]]
    headline: Headline
    created: str
    versions: dict[str, str]


def make_report(analyses: Sequence[Analysis]) -> RunReport:
    """Compare the runs and build the report."""
    comparisons = compare(analyses)
    return RunReport(
        analyses=tuple(analyses),
        comparisons=tuple(comparisons),
        differing=differing_settings([analysis.record.settings for analysis in analyses]),
        headline=headline(analyses, comparisons),
        created=time.strftime("%Y-%m-%d %H:%M %z"),
        versions=versions_now(),
    )


def versions_now() -> dict[str, str]:
    """Return the installed versions as ``run.toml`` records them."""
    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def as_json(report: RunReport) -> dict[str, Any]:
    """Return all results of the report; curves are in each run's ``metrics.jsonl``."""
    return {
        "verdict": report.headline.headline,
        "explanation": report.headline.sentence,
        "created": report.created,
        "versions": report.versions,
        "intervals": {"level": LEVEL, "resamples": RESAMPLES},
        "runs": [_run(analysis) for analysis in report.analyses],
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "differing_settings": _plain(report.differing),
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
        "purity": read_purity(RunDirectory(record.path)).to_json(),
        "main_metric": analysis.main_metric,
        "metrics": _plain(analysis.metrics),
        "recorded": dict(analysis.recorded),
        "changed_numerics": list(analysis.changed_numerics),
        "classification": _classification(analysis.classification),
        "regression": _regression(analysis.regression),
        "parameters": analysis.architecture.parameters,
        "trained_parameters": analysis.architecture.trained,
        "layers": _plain(analysis.architecture.layers),
        "phases_s": record.phases_s,
        "goodput": {"share": goodput.share, **_plain(goodput)},
        "timeline": _plain(record.timeline.entries),
        "recorded_versions": record.manifest.get("versions", {}),
        "pins": record.manifest.get("pins", {}),
        "command": record.command,
    }


def _classification(result: ClassificationResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    rankings = [score.ranking for score in result.classes]
    areas = [{name: getattr(each, name, None) for name in ("auc", "average_precision")} for each in rankings]
    return {
        **_plain(result, "predictions"),
        "overconfidence": result.overconfidence,
        "classes": [_plain(score, "ranking") | area for score, area in zip(result.classes, areas, strict=True)],
        "mistakes": [_plain(mistake, "inputs") for mistake in result.predictions.mistakes],
    }


def _regression(result: RegressionResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    errors = [_plain(miss, "inputs") for miss in result.values.misses]
    return {"target": result.values.target, **_plain(result, "values"), "largest_errors": errors}


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


def _plain(value: Any, leave_out: str = "") -> Any:
    """Return records, their fields but ``leave_out``, estimates and arrays as JSON types."""
    if isinstance(value, Estimate):
        return value.as_json()
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value) if f.name != leave_out)
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
