"""SVG charts for embedding in a page, with the page's CSS variables as colours and its font."""

from __future__ import annotations

import html
import importlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline.core.errors import ConfigError

_T = TypeVar("_T")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_POINTS = 300
_POINTS_IN_ALL = 1500
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


def require_matplotlib() -> None:
    """Check that the libraries of a report are installed.

    Raises:
        ConfigError: matplotlib, Pillow or Jinja is not installed.
    """
    try:
        for module in ("jinja2", "matplotlib", "PIL"):
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"a report needs {error.name}, which is not installed. Install it: pip install 'paceline[report]'"
        ) from error


def curves(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    y_label: str = "",
    log: bool = False,
    from_zero: bool = False,
) -> Chart:
    """Draw lines over steps, averaging more points than can be seen."""
    with _drawing(name, title) as drawing:
        axes = drawing.axes
        for line in series:
            xs, ys = _downsample(line.xs, line.ys)
            axes.plot(
                xs,
                ys,
                color=_series_colour(line.colour),
                linestyle=(0, (4, 2)) if line.dashed else "-",
                marker="o" if len(xs) < 12 else "",
                markersize=3.5,
            )
        if log and all(y > 0 for line in series for y in line.ys):
            _scale_by_decades(axes)
        elif from_zero:
            highest = max((y for line in series for y in line.ys), default=0.0)
            axes.set_ylim(0, 1.08 * highest if highest > 0 else None)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(visible=False, axis="x")
    steps = sorted({x for line in series for x in _sample(list(line.xs))})
    values = [dict(zip(line.xs, line.ys, strict=True)) for line in series]
    rows = [(_number(step), *(_number(points.get(step)) for points in values)) for step in _sample(steps)]
    return drawing.chart((x_label, *(line.label for line in series)), rows, _legend(series))


def reliability(
    name: str, title: str, series: Sequence[Series], shares: Sequence[tuple[float, float]], total: int
) -> Chart:
    """Draw accuracy over confidence, and below it the share of samples by confidence.

    Args:
        name: the chart's identifier.
        series: one line per run.
        shares: (centre of the bin, share of the samples) of the first run.
        total: number of bins.
    """
    with _drawing(name, title, size=(4.6, 3.9), rows=(4, 1)) as drawing:
        top, bottom = drawing.all_axes
        top.plot([0, 1], [0, 1], color=_COLOURS["muted"], linewidth=1, linestyle=(0, (2, 3)))
        for line in series:
            top.plot(
                line.xs,
                line.ys,
                color=_series_colour(line.colour),
                marker="o",
                markersize=4,
                linestyle=(0, (4, 2)) if line.dashed else "-",
            )
        top.set_xlim(0, 1)
        top.set_ylim(0, 1.02)
        top.set_ylabel("accuracy")
        top.tick_params(labelbottom=False)
        bottom.bar([x for x, _ in shares], [y for _, y in shares], width=0.9 / total, color=_COLOURS["s1"])
        bottom.set_xlim(0, 1)
        bottom.set_ylabel("share")
        bottom.set_xlabel("confidence")
        bottom.grid(visible=False)
    rows = [(line.label, f"{x:.3f}", f"{y:.3f}") for line in series for x, y in zip(line.xs, line.ys, strict=True)]
    return drawing.chart(("run", "confidence", "accuracy"), rows, _legend(series))


def rates(
    name: str, title: str, series: Sequence[Series], x_label: str, y_label: str, *, diagonal: bool = False
) -> Chart:
    """Draw rates between 0 and 1 over each other, such as a ROC curve; ``diagonal`` shows what guessing gives."""
    with _drawing(name, title, size=(4.6, 3.4)) as drawing:
        axes = drawing.axes
        if diagonal:
            axes.plot([0, 1], [0, 1], color=_COLOURS["muted"], linewidth=1, linestyle=(0, (2, 3)))
        for line in series:
            axes.plot(line.xs, line.ys, color=_series_colour(line.colour))
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.02)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    rows = [
        (line.label, f"{line.xs[i]:.4f}", f"{line.ys[i]:.4f}")
        for line in series
        for i in _sample(list(range(len(line.xs))))
    ]
    return drawing.chart(("curve", x_label, y_label), rows, _legend(series))


def scatter(
    name: str, title: str, series: Sequence[Series], x_label: str, y_label: str, *, reference: Literal["equal", "zero"]
) -> Chart:
    """Draw samples as points, at most ``_POINTS_IN_ALL``, with the line on which they should be.

    Args:
        name: the chart's identifier.
        series: the points of each run.
        reference: "equal": both axes are equal there; "zero": y is 0.
    """
    most = max(1, _POINTS_IN_ALL // max(1, len(series)))
    shown = [(line, range(0, len(line.xs), -(-len(line.xs) // most))) for line in series]
    with _drawing(name, title, size=(4.6, 3.4)) as drawing:
        axes = drawing.axes
        for line, chosen in shown:
            xs, ys = [line.xs[i] for i in chosen], [line.ys[i] for i in chosen]
            axes.plot(xs, ys, ".", color=_series_colour(line.colour), markersize=4, alpha=0.5, markeredgewidth=0)
        style: Any = {"color": _COLOURS["muted"], "linewidth": 1, "linestyle": (0, (2, 3))}
        if reference == "equal":
            axes.axline((0, 0), slope=1, **style)
        else:
            axes.axhline(0, **style)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _space_ticks(axes)
    rows = [
        (line.label, _number(line.xs[i]), _number(line.ys[i])) for line, chosen in shown for i in _sample(list(chosen))
    ]
    return drawing.chart(("run", x_label, y_label), rows, _legend(series))


def histogram(name: str, title: str, series: Sequence[Series], x_label: str) -> Chart:
    """Draw how many samples have which value; ``xs`` are the edges of the bins, and ``ys`` the shares of samples."""
    with _drawing(name, title, size=(4.6, 3.4)) as drawing:
        axes = drawing.axes
        for line in series:
            axes.stairs(line.ys, line.xs, color=_series_colour(line.colour), fill=len(series) == 1, alpha=0.85)
        axes.axvline(0, color=_COLOURS["muted"], linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xlabel(x_label)
        axes.set_ylabel("share of samples")
        axes.grid(visible=False, axis="x")
        _space_ticks(axes)
    rows = [
        (line.label, f"{line.xs[i]:.4g} to {line.xs[i + 1]:.4g}", f"{share:.4f}")
        for line in series
        for i, share in enumerate(line.ys)
    ]
    return drawing.chart(("run", x_label, "share of samples"), rows, _legend(series))


def stacked(name: str, title: str, bars: Sequence[tuple[str, dict[str, float]]], unit: str) -> Chart:
    """Draw one bar per run, divided into parts, the largest first."""
    totals: dict[str, float] = {}
    for _, parts in bars:
        for part, value in parts.items():
            totals[part] = totals.get(part, 0.0) + value
    order = sorted((part for part in totals if totals[part] > 0), key=lambda part: -totals[part])
    with _drawing(name, title, size=(9.6, 0.75 + 0.42 * len(bars))) as drawing:
        axes = drawing.axes
        for row, (_, parts) in enumerate(bars):
            left = 0.0
            for number, part in enumerate(order):
                value = parts.get(part, 0.0)
                axes.barh(row, value, left=left, height=0.62, color=_series_colour(number))
                left += value
        axes.margins(x=0)
        axes.set_yticks(range(len(bars)), [_short(label) for label, _ in bars] if len(bars) > 1 else [""])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
    rows = [(label, *(f"{parts.get(part, 0.0):.2f}" for part in order)) for label, parts in bars]
    return drawing.chart(("run", *order), rows, tuple(enumerate(order)))


def workers(
    name: str,
    title: str,
    worlds: Sequence[tuple[float, int]],
    end: float,
    lost: Sequence[tuple[float, float]],
) -> Chart:
    """Draw the number of active workers over time, and mark when nothing was trained.

    Args:
        name: the chart's identifier.
        worlds: (seconds, workers) at each change.
        end: in seconds.
        lost: (begin, end) in seconds.
    """
    require_matplotlib()
    from matplotlib.ticker import MaxNLocator

    with _drawing(name, title, size=(9.6, 1.7)) as drawing:
        axes = drawing.axes
        xs, ys = [x for x, _ in worlds], [y for _, y in worlds]
        axes.step([*xs, end], [*ys, ys[-1]], where="post", color=_COLOURS["s1"])
        for begin, stop in lost:
            # Most interruptions are shorter than a pixel, so give each a minimal width.
            axes.axvspan(begin, max(stop, begin + end / 300), color=_COLOURS["bad"], alpha=0.55)
        axes.set_ylim(0, max(ys) + 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("seconds")
        axes.set_ylabel("workers")
        axes.grid(visible=False, axis="x")
    return drawing.chart(("seconds", "workers"), [(f"{x:.1f}", str(y)) for x, y in worlds])


class _Drawing:
    def __init__(self, name: str, title: str, figure: Figure, all_axes: list[Axes]) -> None:
        self._name = name
        self._title = title
        self._figure = figure
        self._svg = ""
        self.all_axes = all_axes
        self.axes = all_axes[0]

    def finish(self) -> None:
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self._figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
        self._svg = _to_page_svg(buffer.getvalue(), self._name, self._title)

    def chart(
        self,
        columns: Sequence[str],
        rows: Sequence[tuple[str, ...]],
        legend: tuple[tuple[int, str], ...] = (),
    ) -> Chart:
        return Chart(self._name, self._title, self._svg, legend, tuple(columns), tuple(rows))


@contextmanager
def _drawing(
    name: str, title: str, *, size: tuple[float, float] = (4.6, 2.7), rows: tuple[int, ...] = (1,)
) -> Iterator[_Drawing]:
    """Create a figure in our style, and render it at the end of the context; sizes in inches."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        all_axes = list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0])
        drawing = _Drawing(name, title, figure, all_axes)
        yield drawing
        drawing.finish()


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
    view = re.search(r'viewBox="[^"]*"', opening)
    assert view is not None
    text = html.escape(title)
    kind = ' class="wide"' if float(view[0].split()[2]) > _WIDE else ""
    return (
        f'<svg{kind} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view[0]} '
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


def _sample(values: list[_T], max_values: int = 12) -> list[_T]:
    if len(values) <= max_values:
        return values
    return [values[round(i * (len(values) - 1) / (max_values - 1))] for i in range(max_values)]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _short(label: str) -> str:
    return label if len(label) <= 18 else label[:17] + "…"
