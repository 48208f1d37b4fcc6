"""The report's charts: SVG for embedding in a page, with the page's CSS variables as colours and its font."""

from __future__ import annotations

import html
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from paceline.core.inference import name_with_unit
from paceline_pages.analysis import Analysis, Curve, Record
from paceline_pages.evaluation_results import BINS, ClassScore, Ranking

_T = TypeVar("_T")

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = 8
"""Number of distinct colours of series; the ninth series repeats the first colour."""

# matplotlib writes these colours into the SVG, where the CSS variable of the same name replaces them.
_COLOURS = {name: f"#0a0b{number:02x}" for number, name in enumerate(("ink", "muted", "line", "bad"), 1)} | {
    f"s{number}": f"#0a0c{number:02x}" for number in range(1, SERIES + 1)
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a run's name may hold dollar signs
    "font.size": 10,
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
    "patch.linewidth": 0,
}
_GUIDE: dict[str, Any] = {"color": _COLOURS["muted"], "linewidth": 1, "linestyle": (0, (2, 3))}
_POINTS = 300
_POINTS_IN_ALL = 1500
_ROWS = 12  # of the table of numbers
_BINS = 40
_MAX_METRICS = 6
_WIDE = 500  # points; wider drawings scroll on a phone, where their text would be too small


@dataclass(frozen=True)
class Chart:
    """A drawing and its numbers.

    Attributes:
        name: an identifier, unique in the page.
        svg: for embedding in a page as it is.
        legend: (colour, label) of each series, if there are several.
        columns, rows: of the table of numbers.
    """

    name: str
    title: str
    svg: str
    legend: tuple[tuple[int, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``colour`` is its index, from 0."""

    label: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False


def training_charts(analyses: Sequence[Analysis]) -> list[Chart]:
    """Draw the losses, next to them the validation's other metrics, and how the training went."""
    several = len(analyses) > 1

    def series(curve: Callable[[Record], Curve], part: str = "", **line: Any) -> list[Series]:
        found = []
        for index, analysis in enumerate(analyses):
            if points := curve(analysis.record):
                label = " ".join(word for word in (analysis.record.name if several else "", part) if word)
                steps, values = zip(*points, strict=True)
                found.append(Series(label or analysis.record.name, index, steps, values, **line))
        return found

    losses = series(lambda its: its.curve("loss"), "training")
    # With one run the colour, and with several the line, tells validation from training.
    part = "validation (dashed)" if several else "validation"
    validation = series(lambda its: its.metric("val", "loss"), part, dashed=several)
    losses += validation if several else [replace(line, colour=1) for line in validation]
    metrics = [name for name in analyses[0].record.metrics_of("val") if name != "loss"][:_MAX_METRICS]
    from_zero = {"from_zero": True}
    charts: list[tuple[str, str, list[Series], str, dict[str, bool]]] = [
        ("loss", "Loss", losses, "loss", {"log": True}),
        *(
            (f"val-{k}", f"Validation {name}", series(partial(Record.metric, split="val", name=name)), name, {})
            for k, name in enumerate(metrics)
        ),
        ("lr", "Learning rate", series(lambda its: its.curve("lr")), "learning rate", {}),
        ("throughput", "Throughput", series(lambda its: its.curve("samples_per_s")), "samples/s", from_zero),
        ("memory", "Memory of the largest rank", series(Record.memory), "MiB", from_zero),
    ]
    return [_curves(name, title, lines, y_label=y, **more) for name, title, lines, y, more in charts if lines]


def ranking_charts(analyses: Sequence[Analysis]) -> list[Chart]:
    """Draw the ROC and precision-recall curves: of each class of one run, or of the first run's weakest class."""
    first, shown = analyses[0].classification, shown_rankings(analyses[0])
    if first is None or not shown:
        return []
    found: list[tuple[str, Ranking | None]] = [(score.label, score.ranking) for score in shown]
    of = ""
    if len(analyses) > 1:
        number, of = first.classes.index(shown[0]), f" of {shown[0].label}"
        several = [(a.record.name, a.classification.classes) for a in analyses if a.classification is not None]
        found = [(name, classes[number].ranking) for name, classes in several if number < len(classes)]
    lines = [(label, ranking) for label, ranking in found if ranking is not None]
    roc = [Series(label, i, r.false_positive_rate.tolist(), r.recall.tolist()) for i, (label, r) in enumerate(lines)]
    pr = [Series(label, i, r.recall.tolist(), r.precision.tolist()) for i, (label, r) in enumerate(lines)]
    return [
        _rates("roc", f"ROC{of}", roc, "false positive rate", "recall (true positive rate)", diagonal=True),
        _rates("pr", f"Precision and recall{of}", pr, "recall", "precision"),
    ]


def shown_rankings(analysis: Analysis) -> list[ClassScore]:
    """Return the classes with a curve, those with the smallest area first; of two, the second is the other's mirror."""
    classes = () if analysis.classification is None else analysis.classification.classes
    ranked = [(score.ranking.auc, score) for score in classes if score.ranking is not None]
    if len(classes) == 2:
        return [score for _, score in ranked[-1:]]
    return [score for _, score in sorted(ranked, key=lambda pair: pair[0])][:SERIES]


def error_charts(analyses: Sequence[Analysis]) -> list[Chart]:
    """Draw the values and the residuals of a regression."""
    found = [(i, a.record.name, a.regression.values) for i, a in enumerate(analyses) if a.regression is not None]
    if not found:
        return []
    target, unit = found[0][2].target, found[0][2].unit
    true, predicted = (f"{which} {name_with_unit(target, unit)}" for which in ("true", "predicted"))
    residual = "residual (predicted - true)"
    residuals = [Series(name, i, v.predicted.tolist(), (v.predicted - v.actual).tolist()) for i, name, v in found]
    against = [Series(name, i, v.actual.tolist(), v.predicted.tolist()) for i, name, v in found]
    return [
        _scatter("predicted", "Predicted and true", against, true, predicted, reference="equal"),
        _scatter("residuals", "Residuals", residuals, predicted, residual, reference="zero"),
        _histogram("residual-shares", "Distribution of the residuals", residuals, residual),
    ]


def calibration_chart(analyses: Sequence[Analysis]) -> Chart | None:
    """Draw accuracy over confidence, and below it the share of the first run's samples by confidence."""
    found = [(i, a.record.name, a.classification.bins) for i, a in enumerate(analyses) if a.classification is not None]
    if not found:
        return None
    series = [
        Series(name, i, [b.confidence for b in bins], [b.accuracy.value for b in bins]) for i, name, bins in found
    ]
    first = found[0][2]
    total = sum(b.count for b in first)
    name, title = "calibration", "Accuracy by confidence"
    with _figure(name, (4.6, 3.9), heights=(4, 1)) as (figure, top, bottom):
        top.plot([0, 1], [0, 1], **_GUIDE)
        for line in series:
            top.plot(line.xs, line.ys, color=_series_colour(line.colour), marker="o", markersize=4)
        top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
        top.tick_params(labelbottom=False)
        centres = [(b.low + b.high) / 2 for b in first]
        bottom.bar(centres, [b.count / total for b in first], width=0.9 / BINS, color=_COLOURS["s1"])
        bottom.set(xlim=(0, 1), xlabel="confidence", ylabel="share")
        bottom.grid(visible=False)
        rows = [(line.label, f"{x:.3f}", f"{y:.3f}") for line in series for x, y in zip(line.xs, line.ys, strict=True)]
        return _chart(figure, name, title, ("run", "confidence", "accuracy"), rows, _legend(series))


def phases_chart(analyses: Sequence[Analysis]) -> Chart | None:
    """Draw one bar per run, divided into the seconds of its phases, the longest first."""
    bars = [(a.record.name, a.record.phases_s) for a in analyses if a.record.phases_s]
    if not bars:
        return None
    totals: Counter[str] = Counter()
    for _, parts in bars:
        totals.update(parts)
    order = [part for part, total in totals.most_common() if total > 0]
    with _figure("phases", (9.6, 0.75 + 0.42 * len(bars))) as (figure, axes):
        for row, (_, parts) in enumerate(bars):
            left = 0.0
            for number, part in enumerate(order):
                value = parts.get(part, 0.0)
                axes.barh(row, value, left=left, height=0.62, color=_series_colour(number))
                left += value
        axes.margins(x=0)
        axes.set_yticks(range(len(bars)), [_short(label) for label, _ in bars] if len(bars) > 1 else [""])
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        rows = [(label, *(f"{parts.get(part, 0.0):.2f}" for part in order)) for label, parts in bars]
        title = "Seconds by phase, rank 0"
        return _chart(figure, "phases", title, ("run", *order), rows, tuple(enumerate(order)))


def workers_chart(name: str, record: Record) -> Chart | None:
    """Draw the number of active workers over time, and mark when nothing was trained."""
    from matplotlib.ticker import MaxNLocator

    history = record.timeline
    if not history.worlds:
        return None
    end = max([entry.seconds for entry in history.entries] + [history.goodput.active_s, 1.0])
    with _figure(name, (9.6, 1.7)) as (figure, axes):
        xs, ys = [world.seconds for world in history.worlds], [world.world_size for world in history.worlds]
        axes.step([*xs, end], [*ys, ys[-1]], where="post", color=_COLOURS["s1"])
        for lost in history.interruptions:
            # Most interruptions are shorter than a pixel, so give each a minimal width.
            axes.axvspan(lost.begin, max(lost.end, lost.begin + end / 300), color=_COLOURS["bad"], alpha=0.55)
        axes.set_ylim(0, max(ys) + 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="seconds", ylabel="workers")
        axes.grid(visible=False, axis="x")
        rows = [(f"{x:.1f}", str(y)) for x, y in zip(xs, ys, strict=True)]
        return _chart(figure, name, f"Workers of {record.name}", ("seconds", "workers"), rows)


def _curves(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    log: bool = False,
    from_zero: bool = False,
) -> Chart:
    """Draw lines over steps, averaging more points than can be seen."""
    with _figure(name) as (figure, axes):
        for line in series:
            xs, ys = _downsample(line.xs, line.ys)
            style: Any = {"linestyle": (0, (4, 2)) if line.dashed else "-", "marker": "o" if len(xs) < 12 else ""}
            axes.plot(xs, ys, color=_series_colour(line.colour), markersize=3.5, **style)
        if log and all(y > 0 for line in series for y in line.ys):
            _scale_by_decades(axes)
        elif from_zero:
            highest = max((y for line in series for y in line.ys), default=0.0)
            axes.set_ylim(0, 1.08 * highest if highest > 0 else None)
        axes.set(xlabel="step", ylabel=y_label)
        axes.grid(visible=False, axis="x")
        steps = sorted({x for line in series for x in _sample(list(line.xs))})
        values = [dict(zip(line.xs, line.ys, strict=True)) for line in series]
        rows = [(_number(step), *(_number(points.get(step)) for points in values)) for step in _sample(steps)]
        return _chart(figure, name, title, ("step", *(line.label for line in series)), rows, _legend(series))


def _rates(
    name: str, title: str, series: Sequence[Series], x_label: str, y_label: str, *, diagonal: bool = False
) -> Chart:
    """Draw rates between 0 and 1 over each other, such as a ROC curve; ``diagonal`` shows what guessing gives."""
    with _figure(name, (4.6, 3.4)) as (figure, axes):
        if diagonal:
            axes.plot([0, 1], [0, 1], **_GUIDE)
        for line in series:
            axes.plot(line.xs, line.ys, color=_series_colour(line.colour))
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02), xlabel=x_label, ylabel=y_label)
        points = [(line.label, x, y) for line in series for x, y in _sample([*zip(line.xs, line.ys, strict=True)])]
        rows = [(label, f"{x:.4f}", f"{y:.4f}") for label, x, y in points]
        return _chart(figure, name, title, ("curve", x_label, y_label), rows, _legend(series))


def _scatter(
    name: str, title: str, series: Sequence[Series], x_label: str, y_label: str, *, reference: Literal["equal", "zero"]
) -> Chart:
    """Draw samples as points, at most ``_POINTS_IN_ALL``, with the line on which they should be.

    Args:
        reference: "equal": both axes are equal there; "zero": y is 0.
    """
    most = max(1, _POINTS_IN_ALL // max(1, len(series)))
    shown = [(line, range(0, len(line.xs), -(-len(line.xs) // most))) for line in series]
    with _figure(name, (4.6, 3.4)) as (figure, axes):
        for line, chosen in shown:
            xs, ys = [line.xs[i] for i in chosen], [line.ys[i] for i in chosen]
            axes.plot(xs, ys, ".", color=_series_colour(line.colour), markersize=4, alpha=0.5, markeredgewidth=0)
        if reference == "equal":
            axes.axline((0, 0), slope=1, **_GUIDE)
        else:
            axes.axhline(0, **_GUIDE)
        axes.set(xlabel=x_label, ylabel=y_label)
        _space_ticks(axes)
        numbered = [(line, i) for line, chosen in shown for i in _sample(list(chosen))]
        rows = [(line.label, _number(line.xs[i]), _number(line.ys[i])) for line, i in numbered]
        return _chart(figure, name, title, ("run", x_label, y_label), rows, _legend(series))


def _histogram(name: str, title: str, series: Sequence[Series], x_label: str) -> Chart:
    """Draw which share of a line's samples, also of those that are not finite, has which value of y."""
    values = [np.asarray(line.ys) for line in series]
    finite = np.concatenate([ys[np.isfinite(ys)] for ys in values])
    edges = np.histogram_bin_edges(finite, bins=_BINS) if len(finite) else np.array([-1.0, 1.0])
    shares = [np.histogram(ys[np.isfinite(ys)], edges)[0] / len(ys) for ys in values]
    with _figure(name, (4.6, 3.4)) as (figure, axes):
        for line, bars in zip(series, shares, strict=True):
            axes.stairs(bars, edges, color=_series_colour(line.colour), fill=len(series) == 1, alpha=0.85)
        axes.axvline(0, **_GUIDE)
        axes.set(xlabel=x_label, ylabel="share of samples")
        axes.grid(visible=False, axis="x")
        _space_ticks(axes)
        rows = [
            (line.label, f"{edges[i]:.4g} to {edges[i + 1]:.4g}", f"{share:.4f}")
            for line, bars in zip(series, shares, strict=True)
            for i, share in enumerate(bars)
        ]
        return _chart(figure, name, title, ("run", x_label, "share of samples"), rows, _legend(series))


@contextmanager
def _figure(
    name: str, size: tuple[float, float] = (4.6, 2.7), *, heights: Sequence[int] = (1,)
) -> Iterator[tuple[Any, ...]]:
    """Make a figure in our style, and the axes below each other in it; sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, *figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]


def _chart(
    figure: Any,
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    legend: tuple[tuple[int, str], ...] = (),
) -> Chart:
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return Chart(name, title, _to_page_svg(buffer.getvalue(), name, title), legend, tuple(columns), tuple(rows))


def _to_page_svg(svg: str, name: str, title: str) -> str:
    """Return an SVG file's content with the chart's own identifiers and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'(\sid=")', rf"\1{name}-", svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\1{name}-", svg)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    opening, _, rest = svg.partition(">")
    view_box = re.search(r'viewBox="[^"]*"', opening)
    assert view_box is not None
    text = html.escape(title)
    kind = ' class="wide"' if float(view_box[0].split()[2]) > _WIDE else ""
    return (
        f'<svg{kind} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view_box[0]} '
        f'role="img" aria-label="{text}"><title>{text}</title>{rest}'
    )


def _scale_by_decades(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _space_ticks(axes: Axes) -> None:
    """Leave room between the numbers under an axis, which may be long."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))


def _legend(series: Sequence[Series]) -> tuple[tuple[int, str], ...]:
    return tuple((line.colour % SERIES, line.label) for line in series) if len(series) > 1 else ()


def _series_colour(number: int) -> str:
    return _COLOURS[f"s{number % SERIES + 1}"]


def _downsample(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most as many points as a chart can show, each the mean of its neighbours."""
    size = -(-len(xs) // _POINTS)
    if size <= 1:
        return list(xs), list(ys)
    starts = range(0, len(xs), size)
    return (
        [sum(xs[i : i + size]) / len(xs[i : i + size]) for i in starts],
        [sum(ys[i : i + size]) / len(ys[i : i + size]) for i in starts],
    )


def _sample(values: list[_T]) -> list[_T]:
    if len(values) <= _ROWS:
        return values
    return [values[round(i * (len(values) - 1) / (_ROWS - 1))] for i in range(_ROWS)]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _short(label: str) -> str:
    return label if len(label) <= 18 else label[:17] + "…"
