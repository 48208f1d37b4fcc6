"""Draws the loss curves of runs, for the docs: ``python scripts/curves.py PICTURE.svg NAME=RUN...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline_checks.bench_report import Point, line_chart

_NEXT = 1.15  # a point is drawn once its step is so many times the last one's


def losses(run: Path) -> list[Point]:
    """(step, loss) from a run's ``metrics.jsonl``, ever sparser."""
    points: list[Point] = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "train" and (not points or record["step"] >= _NEXT * points[-1][0]):
            points.append((record["step"], record["loss"]))
    return points


def main() -> None:
    """Write the picture."""
    picture, *named = sys.argv[1:]
    runs = dict(argument.split("=", 1) for argument in named)
    series = {name: losses(Path(run)) for name, run in runs.items()}
    line_chart(series, Path(picture), title="Training loss", x_label="step", y_label="loss of a step's batch")


if __name__ == "__main__":
    main()
