"""What is to be reached by a server, and whether it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.insight.bench.bars import TargetResult
from paceline.insight.bench.comparison import Spread
from paceline.insight.bench.rounds import Sample

Samples = Mapping[str, Sequence[Sample]]
"""Contender -> what each round measured."""


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
}
