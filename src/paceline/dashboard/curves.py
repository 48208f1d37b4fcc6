"""The curves of a run: ``metrics.jsonl``, followed as it grows, in bounded memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MOST_POINTS = 800
"""Of a curve; above, neighbours are merged."""

_MOST_CURVES = 64
_LONGEST_NAME = 100
_CHUNK = 4 * 2**20  # bytes read at once
_MOST_BYTES = 64 * 2**20  # of a file that was never read: what is before is left out


class Point(NamedTuple):
    """One or several neighbouring records.

    Attributes:
        step: of the last of them.
        mean, low, high: of their values.
        records: how many.
    """

    step: int
    mean: float
    low: float
    high: float
    records: int


class Curve:
    """At most :data:`MOST_POINTS` points; a spike stays visible as a point's ``high`` or ``low``."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._group = 1  # records a point

    def add(self, step: int, value: float) -> None:
        """Add a record's value; steps do not fall."""
        last = self.points[-1] if self.points else None
        if last is None or last.records >= self._group:
            self.points.append(Point(step, value, value, value, 1))
        else:
            self.points[-1] = _merged(last, Point(step, value, value, value, 1))
        if len(self.points) > MOST_POINTS:
            halves = iter(self.points)
            self.points = [_merged(a, b) if (b := next(halves, None)) else a for a in halves]
            self._group *= 2

    def as_json(self) -> dict[str, Any]:
        """The points, as columns; lows and highs only where records were merged."""
        columns: dict[str, Any] = {
            "step": [p.step for p in self.points],
            "mean": [p.mean for p in self.points],
        }
        if self._group > 1:
            columns |= {"low": [p.low for p in self.points], "high": [p.high for p in self.points]}
        return columns


def _merged(a: Point, b: Point) -> Point:
    records = a.records + b.records
    mean = (a.mean * a.records + b.mean * b.records) / records
    return Point(b.step, mean, min(a.low, b.low), max(a.high, b.high), records)


class Curves:
    """Follows one file: each update reads what was added since the last one.

    Attributes:
        ranks: the newest record's rows, one a rank.
        nonfinite: steps whose loss was NaN or infinite, the newest ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._curves: dict[str, Curve] = {}
        self.ranks: list[dict[str, Any]] = []
        self.nonfinite: list[int] = []

    def update(self) -> None:
        """Read what is new; a file that was replaced, as a resume does, is read anew."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._forget()
                    self._file = (status.st_dev, status.st_ino)
                    self._offset = max(0, status.st_size - _MOST_BYTES)
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    whole, newline, rest = chunk.rpartition(b"\n")
                    if not newline:
                        break  # a line that has not ended is read again, once it has
                    self._offset += len(whole) + 1
                    file.seek(self._offset)
                    for line in whole.split(b"\n"):
                        self._read(line)
                    if len(rest) == 0 and len(chunk) < _CHUNK:
                        break
        except OSError:
            self._forget()

    def as_json(self) -> dict[str, Any]:
        """Each curve's points, as columns."""
        return {name: curve.as_json() for name, curve in self._curves.items()}

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = int(record["step"])
            if record["kind"] == "train":
                rows = record.get("ranks")
                self.ranks = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
                if record.get("loss") is None:
                    self.nonfinite = [*self.nonfinite[-9:], step]
            for name, value in _values(record):
                self._add(name[:_LONGEST_NAME], step, value)
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # a foreign or torn line

    def _add(self, name: str, step: int, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return
        curve = self._curves.get(name)
        if curve is None:
            if len(self._curves) >= _MOST_CURVES:
                return
            curve = self._curves[name] = Curve()
        curve.add(step, float(value))


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    if record["kind"] == "eval":
        for name, value in record["metrics"].items():
            yield f"{record['split']}.{name}", value
    elif record["kind"] == "train":
        for name in ("loss", "lr", "samples_per_s", "imbalance"):
            yield name, record.get(name)
        for name, value in record.get("logged", {}).items():
            yield f"logged.{name}", value
