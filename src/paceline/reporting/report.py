"""A report on one run or several, as JSON types."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import __version__
from paceline.intervals import LEVEL, RESAMPLES, Estimate
from paceline.reporting.analysis import Analysis
from paceline.reporting.classification import Classification
from paceline.reporting.comparison import Comparison, Setting, compare, differing_settings
from paceline.reporting.observation import Predictions
from paceline.reporting.verdict import Verdict, verdict


@dataclass(frozen=True)
class Report:
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
    comparisons: tuple[Comparison, ...]
    differing: tuple[Setting, ...]
    verdict: Verdict
    created: str
    versions: dict[str, str]


def make_report(analyses: Sequence[Analysis]) -> Report:
    """Compare the runs and say what came out."""
    comparisons = compare(analyses)
    return Report(
        analyses=tuple(analyses),
        comparisons=tuple(comparisons),
        differing=tuple(differing_settings(analyses)),
        verdict=verdict(analyses, comparisons),
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


def as_json(report: Report) -> dict[str, Any]:
    """All figures of the report; curves are in each run's ``metrics.jsonl``."""
    return {
        "verdict": report.verdict.headline,
        "explanation": report.verdict.sentence,
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
        "changed_pins": list(analysis.changed_pins),
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


def _classification(found: Classification, predictions: Predictions) -> dict[str, Any]:
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


def _comparison(comparison: Comparison) -> dict[str, Any]:
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
