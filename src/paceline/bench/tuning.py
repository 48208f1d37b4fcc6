"""ASHA beside a full grid of the same configurations, and what a trial costs beside ``paceline train``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.distributed.tether import tethered
from paceline.errors import LaunchError

_TASK = "fashion-mnist-mlp"
_METRIC = "accuracy"
_SPACE = ("lr=choice:0.001,0.003,0.01,0.03,0.1,0.3,1.0,3.0", "momentum=choice:0.0,0.5,0.8,0.9")
_EVERY = 20
_POINTS = 0.5
_SHARE = 0.4
_OVERHEAD_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What was measured.

    Attributes:
        trials: of each search.
        asha_best, grid_best: accuracy on the validation split.
        asha_steps, grid_steps: of all trials together.
        train_s: of each bare ``paceline train``.
        search_s: of a whole search of ``alone`` trials, one after another, with its start.
        alone: its trials.
    """

    trials: int
    asha_best: float
    grid_best: float
    asha_steps: int
    grid_steps: int
    train_s: Sequence[float]
    search_s: float
    alone: int

    @property
    def points(self) -> float:
        """By how many percentage points ASHA's best is below the grid's."""
        return 100 * (self.grid_best - self.asha_best)

    @property
    def share(self) -> float:
        """ASHA's steps as a part of the grid's."""
        return self.asha_steps / self.grid_steps

    @property
    def overhead_s(self) -> float:
        """Of a trial, with its part of the search's own start."""
        return self.search_s / self.alone - statistics.median(self.train_s)

    @property
    def comparisons(self) -> list[TuningResult]:
        """What there is to be shown."""
        return [self]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """What was measured, the figure, the bar, and whether it is met."""
        met = ("not met", "met")
        return [
            (
                f"best of ASHA below the best of the grid ({self.grid_best:.4f})",
                f"{self.points:.2f} points",
                f"at most {_POINTS}",
                met[self.points <= _POINTS],
            ),
            (
                f"steps of ASHA, of the grid's {self.grid_steps}",
                f"{self.asha_steps} ({self.share:.0%})",
                f"at most {_SHARE:.0%}",
                met[self.share <= _SHARE],
            ),
            (
                f"a trial, of {self.alone}, beside paceline train ({statistics.median(self.train_s):.2f} s)",
                f"{self.overhead_s:+.2f} s",
                f"at most {_OVERHEAD_S:g} s",
                met[self.overhead_s <= _OVERHEAD_S],
            ),
        ]

    def as_table(self) -> Table:
        """For people."""
        table = Table("", "measured", "bar", "", title=f"{self.trials} trials of {_TASK}")
        for row in self.rows():
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """For documents."""
        lines = ["| | measured | bar | |", "|---|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows())]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "points": self.points, "share": self.share, "overhead_s": self.overhead_s}

    def notes(self) -> list[str]:
        """What else is to be said."""
        return [
            f"train_s: {', '.join(f'{s:.2f}' for s in self.train_s)}; the whole search: {self.search_s:.2f} s"
        ]


def bench_tuning(
    *, trials: int, steps: int, alone: int, rounds: int, progress: Callable[[str], None]
) -> TuningResult:
    """Search with ASHA and by a grid of the same configurations; then trials one after another.

    Args:
        trials: of both searches.
        steps: of a whole trial.
        alone: trials of the search that is held against ``paceline train``.
        rounds: how often that is run.
        progress: is told what is done.

    Raises:
        LaunchError: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        home = Path(name)
        run = ("--max-steps", str(steps), "--eval-every", f"{_EVERY}steps", "--val-fraction", "0.1")
        space = [word for text in _SPACE for word in ("--search", text)]

        def search(label: str, *options: str) -> tuple[dict[str, Any], float]:
            progress(f"tune: {label}")
            began = time.perf_counter()
            words = ("tune", _TASK, *space, *run, "--run", str(home / label), *options)
            return _run(words), time.perf_counter() - began

        asha, _ = search("asha", "--trials", str(trials))
        grid, _ = search("grid", "--trials", str(trials), "--scheduler", "none")
        train_s = []
        for number in range(rounds):
            progress(f"train: round {number + 1} of {rounds}")
            began = time.perf_counter()
            _run(("train", _TASK, *run, "--threads", "1", "--run", str(home / f"train-{number}"), "--quiet"))
            train_s.append(time.perf_counter() - began)
        one_by_one = ("--trials", str(alone), "--scheduler", "none", "--cpus-per-trial", str(_cpus()))
        _, search_s = search("one-by-one", *one_by_one, "--threads", "1")
    return TuningResult(
        trials=grid["planned"],
        asha_best=asha["best"][_METRIC],
        grid_best=grid["best"][_METRIC],
        asha_steps=asha["steps"],
        grid_steps=grid["steps"],
        train_s=train_s,
        search_s=search_s,
        alone=alone,
    )


def _cpus() -> int:
    from paceline.tuning.start import own_cpus

    return own_cpus()


def _run(words: Sequence[str]) -> dict[str, Any]:
    """Run a command of Paceline's; return what it prints as JSON."""
    done = subprocess.run(
        tethered([sys.executable, "-m", "paceline", *words, "--json"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LaunchError(f"paceline {' '.join(words)} failed:\n{done.stderr.strip()}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
