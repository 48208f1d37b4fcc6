"""``python -m benchmarks serve``: the contenders, their quantities and their bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import (
    BenchResult,
    Progress,
    Quantity,
    Spread,
    TargetResult,
    compare,
    take_samples,
)
from benchmarks.rounds import REPORT, BenchCommand, Sample, Variant, read_json
from paceline.core.errors import ConfigError

Samples = Mapping[str, Sequence[Sample]]
"""Contender -> what each round measured."""

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
    "exact": _Suite(
        "exact",
        (Quantity("requests_per_s", "requests/s with --exact", 0), Quantity("free_per_s", "without", 0)),
        (("paceline-exact", "two servers in turns of a second, 32 connections"),),
    ),
    "engine": _Suite(
        "engine",
        (Quantity("tokens_per_s", "tokens/s through Paceline", 0), Quantity("alone_per_s", "transformers serve", 0)),
        (("paceline-engine", "one engine in turns of five seconds, 32 streams"),),
    ),
}
SUITES = tuple(_SUITES)


def bench_serve(*, only: Sequence[str], rounds: int, seconds: float, progress: Progress) -> BenchResult:
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
        samples = take_samples(name, suite.quantities[0], contenders, rounds, progress)
        if suite.compared:
            comparisons.append(compare(suite.title, suite.quantities, contenders, samples))
        else:
            comparisons += [compare(c.title, suite.quantities, [c], samples) for c in contenders]
        found += verdicts(name, samples)
    return BenchResult(
        benchmark="serve",
        document={"settings": {"rounds": rounds, "seconds": seconds}},
        comparisons=comparisons,
        verdicts=found,
        remarks=[
            f"one replica of one thread; rounds in turns: {rounds}, {seconds:g} s each after a warm-up; the load runs "
            "on the same machine.",
            "overload: server and client on a core each; the bound is twice the p99 at capacity, and the "
            "time in which a full queue is computed at capacity; memory is the HTTP process's, from a fifth "
            "of the time to the end.",
        ],
    )


def _contender(name: str, title: str, seconds: float) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        return [BenchCommand([sys.executable, "-m", "benchmarks.serving.round", name, str(directory), str(seconds)])]

    return Variant(name=name, title=title, commands=commands, read=lambda directory: read_json(directory / REPORT))


# --- the bars ---


def verdicts(suite: str, samples: Samples) -> list[TargetResult]:
    """Each bar of a suite."""
    return _OF[suite](samples)


def _json(samples: Samples) -> list[TargetResult]:
    found = []
    for name, title, bar in (("fastapi", "FastAPI", 1.8), ("litserve", "LitServe", 3.0)):
        rates, tails = (
            [ours[key] / theirs[key] for ours, theirs in zip(samples["paceline"], samples[name], strict=True)]
            for key in ("requests_per_s", "p99_ms")
        )
        found += [
            TargetResult("json", f"requests/s against {title}", Spread.of(rates), bar),
            TargetResult("json", f"p99 against {title}", Spread.of(tails), 1.0, at_most=True),
        ]
    return found


def _binary(samples: Samples) -> list[TargetResult]:
    pairs = zip(samples["paceline-binary"], samples["in-process"], strict=True)
    ratio = Spread.of([ours["rows_per_s"] / alone["rows_per_s"] for ours, alone in pairs])
    return [TargetResult("binary", "rows/s against the model alone", ratio, 0.9)]


def _predict(samples: Samples) -> list[TargetResult]:
    pairs = zip(samples["predict-2"], samples["predict-1"], strict=True)
    ratio = Spread.of([two["rows_per_s"] / one["rows_per_s"] for two, one in pairs])
    return [TargetResult("predict", "2 processes against 1", ratio, 1.7)]


def _overload(samples: Samples) -> list[TargetResult]:
    rounds = samples["paceline-overload"]
    share = Spread.of([sample["accepted_p99_ms"] / sample["accepted_bound_ms"] for sample in rounds])
    return [
        _most("overload", "p99 of a 429", rounds, "refused_p99_ms", 20, " ms"),
        TargetResult("overload", "p99 of a 200, of its bound", share, 1.0, at_most=True),
        _most("overload", "memory grown", rounds, "growth_mib", 8, " MiB"),
        _most("overload", "neither 200 nor 429", rounds, "broken", 0, ""),
        _most("overload", "not sent by the client", rounds, "not_sent_percent", 1, " %"),
    ]


def _swap(samples: Samples) -> list[TargetResult]:
    return [_most("swap", "failed requests", samples["paceline-swap"], "failed", 0, "")]


def _drain(samples: Samples) -> list[TargetResult]:
    return [_most("drain", "failed requests", samples["paceline-drain"], "failed", 0, "")]


def _kill(samples: Samples) -> list[TargetResult]:
    found = []
    for name, title in (("paceline-kill-1", "of 1"), ("paceline-kill-2", "of 2")):
        found += [
            _most("kill", f"{title}: failed requests", samples[name], "failed", 0, ""),
            _most("kill", f"{title}: back within", samples[name], "slowest_s", 2, " s"),
            _most("kill", f"{title}: wrong readiness", samples[name], "untrue", 0, ""),
        ]
    return found


def _exact(samples: Samples) -> list[TargetResult]:
    ratio = Spread.of([sample["requests_per_s"] / sample["free_per_s"] for sample in samples["paceline-exact"]])
    return [TargetResult("exact", "requests/s against without --exact", ratio, 0.85)]


def _engine(samples: Samples) -> list[TargetResult]:
    ratio = Spread.of([sample["tokens_per_s"] / sample["alone_per_s"] for sample in samples["paceline-engine"]])
    return [TargetResult("engine", "tokens/s against transformers serve alone", ratio, 0.95)]


def _most(suite: str, title: str, rounds: Sequence[Sample], key: str, bar: float, unit: str) -> TargetResult:
    return TargetResult(suite, title, Spread.of([sample[key] for sample in rounds]), bar, at_most=True, unit=unit)


_OF: Mapping[str, Callable[[Samples], list[TargetResult]]] = {
    "json": _json,
    "binary": _binary,
    "predict": _predict,
    "overload": _overload,
    "swap": _swap,
    "drain": _drain,
    "kill": _kill,
    "exact": _exact,
    "engine": _engine,
}
