"""The report as an HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.filesize import pick_unit_and_suffix

from paceline.core.inference import Encoding, TensorSpec
from paceline.core.stats import Estimate
from paceline.runs.console import duration
from paceline_pages.analysis import Analysis, Record
from paceline_pages.charts import (
    SERIES,
    calibration_chart,
    error_charts,
    phases_chart,
    ranking_charts,
    shown_rankings,
    training_charts,
    workers_chart,
)
from paceline_pages.evaluation_recorder import LargeError, MisclassifiedSample
from paceline_pages.evaluation_results import ClassScore, figure
from paceline_pages.report import RunReport, interval, number, points_of, probability
from paceline_serving.encodings import show_category

# --- Previews of model inputs: a picture if the input is an image, else its numbers ---


_MAX_PIXELS = 160  # per side, in the page
_MAX_NUMBERS = 24
_MAX_TEXT = 240
_LONG = 24  # characters of a text that needs a wide column


@dataclass(frozen=True)
class Preview:
    """A preview of an input: a picture as a ``data:`` URL, or text."""

    picture: str | None
    text: str


def show(tensor: torch.Tensor, spec: TensorSpec | None = None) -> Preview:
    """Make a preview of one sample's input, as the spec describes it.

    A tensor (1, H, W) or (3, H, W), or (H, W) of bytes, is a picture. Bytes are shown as they are; other values
    are scaled to black and white by minimum and maximum, since the model's own normalisation is unknown.
    """
    if spec is not None and spec.encoding is not None:
        return Preview(None, ", ".join(_texts(tensor, spec.encoding)))
    if tensor.dim() == 2 and tensor.dtype == torch.uint8:
        tensor = tensor[None]
    if tensor.dim() == 3 and tensor.shape[0] in (1, 3) and min(tensor.shape[1:]) > 1:
        return Preview(_png(tensor), "")
    flat = tensor.reshape(-1)
    values = [f"{value:.4g}" if tensor.is_floating_point() else str(value) for value in flat[:_MAX_NUMBERS].tolist()]
    rest = f" … ({flat.numel():,})" if flat.numel() > _MAX_NUMBERS else ""
    return Preview(None, " ".join(values) + rest)


def _png(tensor: torch.Tensor) -> str:
    from PIL import Image

    if tensor.dtype != torch.uint8:
        values = tensor.float().nan_to_num()
        low, high = float(values.min()), float(values.max())
        tensor = ((values - low) * (255 / (high - low) if high > low else 0)).round().to(torch.uint8)
    pixels = np.asarray(tensor[0] if tensor.shape[0] == 1 else tensor.permute(1, 2, 0))
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# --- The page: one HTML file without scripts, other files or network access ---


_TEMPLATES = Path(__file__).with_name("templates")
_MAX_LAYERS = 60
_MAX_ENTRIES = 80
_MAX_ELEMENTS = 16  # of an input that is shown as columns
_MAX_COLUMNS = 32
_HIDDEN_EVENTS = ("checkpoint", "backup", "created")


def render(report: RunReport) -> str:
    """Render the page."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,  # names, metrics and labels are not trusted
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "figure": figure,
        "number": number,
        "interval": interval,
        "points": points_of,
        "p": probability,
        "duration": duration,
        "show": show,
        "svg": lambda chart: Markup(chart.svg),
        "bytes": _bytes,
        "weakest": _weakest_first,
        "value": _value,
    }
    measured = [_all_metrics(analysis) for analysis in report.analyses]
    style = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("report.html").render(
        style=style,
        report=report,
        training=training_charts(report.analyses),
        rankings=ranking_charts(report.analyses),
        ranked=shown_rankings(report.analyses[0]),
        errors=error_charts(report.analyses),
        columns_of=columns_of,
        cells_of=cells_of,
        phases=phases_chart(report.analyses),
        calibration=calibration_chart(report.analyses),
        histories=[_history(index, analysis.record) for index, analysis in enumerate(report.analyses)],
        tiles=_tiles(report.analyses[0]),
        several=len(report.analyses) > 1,
        most_layers=_MAX_LAYERS,
        series=SERIES,
        now=report.versions,
        name_of=lambda labels, number: labels[number] if number < len(labels) else str(number),
        measured=measured,
        metrics=list(dict.fromkeys(name for metrics in measured for name in metrics)),
    )


def _all_metrics(analysis: Analysis) -> dict[str, Estimate]:
    """Return the task's metrics, and those of a classifier or a regression."""
    metrics = dict(analysis.metrics)
    if (regression := analysis.regression) is not None:
        metrics["mean absolute error"] = regression.mae
        metrics["root mean squared error"] = regression.rmse
        metrics["mean residual"] = regression.bias
        if regression.r2 is not None:
            metrics["R²"] = Estimate(regression.r2)
    elif (result := analysis.classification) is not None:
        metrics.setdefault("balanced accuracy", result.balanced_accuracy)
        metrics.setdefault("macro F1", result.macro_f1)
        metrics.setdefault("negative log-likelihood", result.nll)
        metrics.setdefault("Brier score", result.brier)
    return metrics


@dataclass(frozen=True)
class Cell:
    """A cell of a sample that is a row of a table; ``kind`` is its class in the page: a number or a long text."""

    text: str
    kind: Literal["n", "long", ""]


def columns_of(samples: Sequence[MisclassifiedSample | LargeError], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the columns of samples that are rows of a table: if all inputs are texts or few numbers; else none."""
    inputs = samples[0].inputs if samples else {}
    if not inputs or any(len(_cells(tensor, specs[name])) > _MAX_ELEMENTS for name, tensor in inputs.items()):
        return []
    return list(cells_of(samples[0], specs))[:_MAX_COLUMNS]


def cells_of(sample: MisclassifiedSample | LargeError, specs: Mapping[str, TensorSpec]) -> dict[str, Cell]:
    """Return a sample's cells by column: a number, a category or a text."""
    found: dict[str, Cell] = {}
    for name, tensor in sample.inputs.items():
        cells, spec = _cells(tensor, specs[name]), specs[name]
        is_single = tensor.dim() == 0 or (spec.encoding is not None and bool(spec.encoding.shape))
        numbered = [name] if is_single else [f"{name}[{i}]" for i in range(len(cells))]
        # A signature may be wrong, which export says.
        columns = list(spec.columns) if len(spec.columns) == len(cells) else numbered
        found |= dict(zip(columns, cells, strict=True))
    return found


def _cells(tensor: torch.Tensor, spec: TensorSpec) -> list[Cell]:
    if spec.encoding is not None:
        return [Cell(text, "long" if len(text) > _LONG else "") for text in _texts(tensor, spec.encoding)]
    return [
        Cell("–" if value != value else figure(value) if isinstance(value, float) else str(value), "n")
        for value in tensor.reshape(-1).tolist()
    ]


def _texts(tensor: torch.Tensor, encoding: Encoding) -> list[str]:
    """Return the categories or the text that an input's numbers stand for."""
    rows = [tensor.tolist()] if encoding.shape else tensor.reshape(-1).tolist()
    texts = [
        encoding.describe(numbers) if encoding.shape else show_category(encoding.decode(numbers)) for numbers in rows
    ]
    return [text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…" for text in texts]


def _history(index: int, record: Record) -> dict[str, Any]:
    timeline = record.timeline
    shown = [entry for entry in timeline.entries if entry.event not in _HIDDEN_EVENTS]
    return {
        "chart": workers_chart(f"workers-{index}", record),
        "entries": shown[:_MAX_ENTRIES],
        "left_out": max(0, len(shown) - _MAX_ENTRIES),
        "checkpoints": sum(entry.event == "checkpoint" for entry in timeline.entries),
        "goodput": timeline.goodput,
        "interruptions": timeline.interruptions,
    }


def _tiles(analysis: Analysis) -> list[tuple[str, str, str]]:
    """Return (name, number, meaning) of the most important figures."""
    record, classification = analysis.record, analysis.classification
    result, goodput = record.result or {}, record.timeline.goodput
    tiles = [
        (name, number(estimate), interval(estimate))
        for name, estimate in analysis.metrics.items()
        if name != analysis.main_metric
    ][: 1 if classification is not None else 2]
    if classification is not None:
        tiles.append(("macro F1", number(classification.macro_f1), interval(classification.macro_f1)))
        lean = "overconfident" if classification.overconfidence > 0 else "underconfident"
        tiles.append(("calibration error", f"{classification.calibration_error:.4f}", f"{lean} on average"))
    tiles.append(("parameters", f"{analysis.architecture.parameters:,}", _bytes(analysis.architecture.bytes)))
    if isinstance(result.get("seconds"), int | float):
        speed = result.get("samples_per_s")
        rate = f"{speed:,.0f} samples/s" if isinstance(speed, int | float) else ""
        tiles.append(("time", duration(float(result["seconds"])), rate))
    if goodput.share is not None:
        tiles.append(("goodput", f"{goodput.share:.1%}".replace("%", " %"), "of the time spent in steps"))
    return tiles


def _weakest_first(classes: Sequence[ClassScore]) -> list[ClassScore]:
    """Sort by F1 ascending, then by samples descending; classes without samples and predictions come last."""
    return sorted(classes, key=lambda score: (score.f1 is None, score.f1 or 0.0, -score.support))


def _bytes(size: int) -> str:
    one, unit = pick_unit_and_suffix(size, ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{size / one:,.{0 if one == 1 else 1}f} {unit}"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
