"""``paceline bench serve``: who is measured against whom, and what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.comparison import Comparison, Quantity, compare
from paceline.bench.machine import describe_machine
from paceline.bench.rounds import Command, Contender, Sample, alternate
from paceline.bench.workload import REPORT
from paceline.errors import ConfigError

REQUESTS = Quantity("requests_per_s", "requests/s", 0)
P50 = Quantity("p50_ms", "p50 ms")
P99 = Quantity("p99_ms", "p99 ms")
ROWS = Quantity("rows_per_s", "rows/s", 0)
CPU = Quantity("cpu_us_per_row", "CPU us a row", 0)
_OVERLOAD = (
    Quantity("requests_per_s", "capacity, requests/s", 0),
    Quantity("unloaded_p99_ms", "p99 ms below it"),
    Quantity("accepted_per_s", "answered/s", 0),
    Quantity("accepted_p99_ms", "p99 ms of these"),
    Quantity("refused_per_s", "429/s", 0),
    Quantity("refused_p99_ms", "p99 ms of these"),
    Quantity("growth_mib", "MiB grown"),
)

_SUITES: dict[str, tuple[str, Sequence[Quantity], Sequence[tuple[str, str]]]] = {
    "json": (
        "ConvNet, JSON of 784 numbers, 32 connections",
        (REQUESTS, P50, P99),
        (("fastapi", "FastAPI + uvicorn"), ("litserve", "LitServe"), ("paceline", "Paceline")),
    ),
    "binary": (
        "ConvNet, 32 rows a request, binary",
        (ROWS,),
        (("in-process", "the model alone, 1 thread"), ("paceline-binary", "Paceline")),
    ),
    "predict": (
        "ConvNet, a file of rows, the whole command",
        (ROWS, CPU),
        (("predict-1", "paceline predict, 1 process"), ("predict-2", "2 processes")),
    ),
    "overload": (
        "five times the capacity, open loop",
        _OVERLOAD,
        (("paceline-overload", "Paceline"),),
    ),
}
SUITES = tuple(_SUITES)


@dataclass(frozen=True)
class ServingResult:
    """What was found.

    Attributes:
        settings: what was asked for.
        comparisons: one for each suite.
    """

    settings: dict[str, Any]
    comparisons: Sequence[Comparison]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "benchmark": "serve",
            "machine": describe_machine(),
            "settings": self.settings,
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }

    def notes(self) -> list[str]:
        """The setting and the machine."""
        machine = describe_machine()
        return [
            f"one replica of one thread; rounds in turns: {self.settings['rounds']}, "
            f"{self.settings['seconds']:g} s each after a warm-up; the load runs on the same machine.",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}; "
            f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}.",
        ]


def bench_serve(
    *, only: Sequence[str], rounds: int, seconds: float, progress: Callable[[str], None]
) -> ServingResult:
    """Measure the suites, in each the contenders by turns.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a server failed.
    """
    if rounds < 1 or seconds <= 0:
        raise ConfigError("--rounds must be at least 1, and --seconds more than 0.")
    comparisons = []
    for suite in only or SUITES:
        title, quantities, names = _SUITES[suite]
        contenders = [_contender(name, shown, seconds) for name, shown in names]

        def on_sample(number: int, contender: Contender, sample: Sample, q: Quantity = quantities[0]) -> None:
            progress(f"round {number}: {contender.title}: {q.text(sample[q.key])} {q.title}")

        samples = alternate(contenders, rounds, on_sample)
        comparisons.append(compare(title, quantities, contenders, samples))
    return ServingResult({"rounds": rounds, "seconds": seconds}, comparisons)


def _contender(name: str, title: str, seconds: float) -> Contender:
    def commands(directory: Path) -> list[Command]:
        argv = [sys.executable, "-m", "paceline.bench.serving.round", name, str(directory), str(seconds)]
        return [Command(argv)]

    return Contender(name=name, title=title, commands=commands, read=_read)


def _read(directory: Path) -> Sample:
    import json

    sample: Sample = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    return sample
