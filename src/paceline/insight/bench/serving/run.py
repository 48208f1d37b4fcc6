"""``paceline bench serve``: who is measured against whom, and what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.insight.bench.bars import TargetResult
from paceline.insight.bench.comparison import BenchComparison, Quantity, compare
from paceline.insight.bench.machine import describe_machine
from paceline.insight.bench.rounds import BenchCommand, Sample, Variant, interleave
from paceline.insight.bench.serving.bars import verdicts
from paceline.insight.bench.workload import REPORT

REQUESTS = Quantity("requests_per_s", "requests/s", 0)
P50 = Quantity("p50_ms", "p50 ms")
P99 = Quantity("p99_ms", "p99 ms")
ROWS = Quantity("rows_per_s", "rows/s", 0)
_OVERLOAD = (
    Quantity("requests_per_s", "capacity, requests/s", 0),
    Quantity("unloaded_p99_ms", "p99 at capacity, ms"),
    Quantity("accepted_per_s", "answered with 200, 1/s", 0),
    Quantity("accepted_p99_ms", "p99 of these, ms"),
    Quantity("accepted_bound_ms", "its bound, ms"),
    Quantity("refused_per_s", "answered with 429, 1/s", 0),
    Quantity("refused_p99_ms", "p99 of these, ms"),
    Quantity("broken", "neither", 0),
    Quantity("not_sent_percent", "not sent by the client, %"),
    Quantity("growth_mib", "memory grown, MiB"),
)
_FAULTS = (
    Quantity("requests_per_s", "requests/s", 0),
    Quantity("p99_ms", "p99, ms"),
    Quantity("requests", "requests", 0),
    Quantity("failed", "of these failed", 0),
)
_KILLS = (
    *_FAULTS,
    Quantity("faults", "kills", 0),
    Quantity("slowest_s", "slowest to be back, s", 2),
    Quantity("untrue", "wrong words of readiness", 0),
)


@dataclass(frozen=True)
class _Suite:
    """Contenders, which are compared with the first, or else each is shown by itself.

    Attributes:
        title: of the table.
        quantities: ratios are of the first.
        contenders: name and title.
        compared: whether there is something to compare.
    """

    title: str
    quantities: Sequence[Quantity]
    contenders: Sequence[tuple[str, str]]
    compared: bool = False


_SUITES = {
    "json": _Suite(
        "ConvNet, JSON of 784 numbers, 32 connections",
        (REQUESTS, P50, P99),
        (("fastapi", "FastAPI + uvicorn"), ("litserve", "LitServe"), ("paceline", "Paceline")),
        compared=True,
    ),
    "binary": _Suite(
        "ConvNet, 32 rows a request, binary",
        (ROWS,),
        (("in-process", "the model alone, 1 thread"), ("paceline-binary", "Paceline")),
        compared=True,
    ),
    "predict": _Suite(
        "ConvNet, a file of rows, the whole command",
        (ROWS,),
        (("predict-1", "paceline predict, 1 process"), ("predict-2", "2 processes")),
        compared=True,
    ),
    "overload": _Suite("overload", _OVERLOAD, (("paceline-overload", "five times the capacity, open loop"),)),
    "swap": _Suite(
        "swap",
        (
            *_FAULTS,
            Quantity("faults", "packages exchanged", 0),
            Quantity("slowest_s", "slowest exchange, s", 2),
        ),
        (("paceline-swap", "hot swaps"),),
    ),
    "drain": _Suite(
        "drain",
        (
            *_FAULTS,
            Quantity("faults", "servers ended and started", 0),
            Quantity("slowest_s", "slowest end, s", 2),
            Quantity("refused", "connections refused", 0),
        ),
        (("paceline-drain", "SIGTERM to one of two servers"),),
    ),
    "kill": _Suite(
        "kill",
        _KILLS,
        (("paceline-kill-1", "kill -9 of 1 replica"), ("paceline-kill-2", "kill -9, 1 of 2 replicas")),
    ),
}
SUITES = tuple(_SUITES)


@dataclass(frozen=True)
class ServingResult:
    """What was found.

    Attributes:
        settings: what was asked for.
        comparisons: one for each suite, or for each contender of a suite that compares nothing.
        verdicts: the bars.
    """

    settings: dict[str, Any]
    comparisons: Sequence[BenchComparison]
    verdicts: Sequence[TargetResult]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "benchmark": "serve",
            "machine": describe_machine(),
            "settings": self.settings,
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
        }

    def notes(self) -> list[str]:
        """The setting and the machine."""
        machine = describe_machine()
        return [
            f"one replica of one thread; rounds in turns: {self.settings['rounds']}, "
            f"{self.settings['seconds']:g} s each after a warm-up; the load runs on the same machine.",
            "overload: server and client on a core each; the bound is twice the p99 at capacity, and the "
            "time in which a full queue is computed at capacity; memory is the HTTP process's, from a fifth "
            "of the time to the end.",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}; "
            f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}.",
        ]


def bench_serve(*, only: Sequence[str], rounds: int, seconds: float, progress: Callable[[str], None]) -> ServingResult:
    """Measure the suites, in each the contenders by turns.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a server failed.
    """
    if rounds < 1 or seconds <= 0:
        raise ConfigError("--rounds must be at least 1, and --seconds more than 0.")
    comparisons = []
    found: list[TargetResult] = []
    for name in only or SUITES:
        suite = _SUITES[name]
        contenders = [_contender(key, title, seconds) for key, title in suite.contenders]
        first = suite.quantities[0]

        def on_sample(number: int, contender: Variant, sample: Sample, q: Quantity = first) -> None:
            progress(f"round {number}/{rounds}  {contender.title}  {q.text(sample[q.key])} {q.title}")

        samples = interleave(contenders, rounds, on_sample)
        if suite.compared:
            comparisons.append(compare(suite.title, suite.quantities, contenders, samples))
        else:
            comparisons += [compare(c.title, suite.quantities, [c], samples) for c in contenders]
        found += verdicts(name, samples)
    return ServingResult({"rounds": rounds, "seconds": seconds}, comparisons, found)


def _contender(name: str, title: str, seconds: float) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        argv = [
            sys.executable,
            "-m",
            "paceline.insight.bench.serving.round",
            name,
            str(directory),
            str(seconds),
        ]
        return [BenchCommand(argv)]

    return Variant(name=name, title=title, commands=commands, read=_read)


def _read(directory: Path) -> Sample:
    import json

    sample: Sample = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    return sample
