"""A line chart as SVG: small enough to be its own library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 150, 40, 52
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """Lines over a horizontal axis with equal steps for equal ratios; the vertical axis begins at 0.

    Args:
        series: points by name, each with x above 0.
        title: above the chart.
        x_label: below it.
        y_label: beside it.
        x_text: how a number on the horizontal axis is written.
        y_text: how one on the vertical axis is.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _round_up(max((y for points in series.values() for _, y in points), default=1.0))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + along * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="16" y="{(_TOP + bottom) / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + bottom) / 2:.1f})">{escape(y_label)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        _, y = place(xs[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(value))}</text>')
    for x in xs[:: max(1, -(-len(xs) // 9))]:
        across, _ = place(x, 0)
        parts.append(f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(x_text(x))}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        at = _TOP + 14 + 20 * number
        parts.append(f'<line x1="{right + 12}" x2="{right + 32}" y1="{at}" y2="{at}" stroke="{colour}"/>')
        parts.append(f'<text x="{right + 38}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
