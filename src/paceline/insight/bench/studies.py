"""Suites of ``paceline bench strategies`` that measure several quantities, each with its bars; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from paceline.core.errors import LaunchError
from paceline.insight.bench import pipedream, slow_link
from paceline.insight.bench.bars import TargetResult
from paceline.insight.bench.comparison import Spread

Progress = Callable[[str], None]
StudyName = Literal["pipeline", "pipedream", "slow-link", "slow-worker"]
_LIMIT_S = 1800.0
_PAIRS_A_ROUND = 7
_POINTS = " points"


def _pipeline(rounds: int, progress: Progress) -> list[TargetResult]:
    """Balanced over equal stages, this runtime over torch's, and what 1F1B holds over what GPipe does."""
    pairs = rounds * _PAIRS_A_ROUND
    progress(f"pipeline: two processes, {pairs} times some steps of each in turn")
    with _failures_told("pipeline"):
        found = json.loads(_output([sys.executable, "-m", "paceline.insight.bench.pipeline", str(pairs)]))
    held = found["activations_of_1f1b_mib"] / found["activations_of_gpipe_mib"]
    return [
        TargetResult("pipeline", "balanced over equal stages", _spread(found["balanced_over_equal"]), 1.25),
        TargetResult("pipeline", "over torch's stages by hand", _spread(found["over_torch_by_hand"]), 0.95),
        TargetResult("pipeline", "memory of 1F1B over GPipe's", Spread.of([held]), 1.0, at_most=True),
    ]


def _pipedream(rounds: int, progress: Progress) -> list[TargetResult]:
    """PipeDream's throughput over 1F1B's on the same stages, and by how much it is less accurate."""
    progress("pipedream: trainings under 1f1b and pipedream in turns")
    with _failures_told("pipedream"), _directory() as directory:
        found = pipedream.compare(directory, rounds=rounds)
    of = found.samples_per_s
    ratios = [fast / slow for fast, slow in zip(of["pipedream"], of["1f1b"], strict=True)]
    worse = 100 * (found.accuracy["1f1b"] - found.accuracy["pipedream"])
    return [
        TargetResult("pipedream", "samples/s over 1F1B's", Spread.of(ratios), 1.15),
        TargetResult("pipedream", "less accurate by", Spread.of([worse]), 0.5, at_most=True, unit=_POINTS),
    ]


def _slow_link(rounds: int, progress: Progress) -> list[TargetResult]:
    """How many times less crosses the link than with plain ddp, and how much less accurate the model is."""
    less: dict[str, list[float]] = {}
    worse: dict[str, list[float]] = {}
    for number in range(rounds):
        progress(f"slow-link, round {number + 1}/{rounds}: two hosts, {slow_link.RATE_MBIT} Mbit/s")
        with _failures_told("slow-link"), _directory() as directory:
            plain, *others = slow_link.measure(directory, seed=number)
        for one in others:
            less.setdefault(one.name, []).append(plain.sent_bytes / one.sent_bytes)
            worse.setdefault(one.name, []).append(100 * (plain.accuracy - one.accuracy))
    bars = {contender.name: contender.bar for contender in slow_link.CONTENDERS}
    most = 100 * slow_link.MOST_WORSE
    verdicts = []
    for name, ratios in less.items():
        bar = bars[name]
        verdicts.append(TargetResult("slow-link", f"{name}: times less sent", Spread.of(ratios), bar))
        points = Spread.of(worse[name])
        limit = None if bar is None else most
        verdicts.append(
            TargetResult("slow-link", f"{name}: less accurate by", points, limit, at_most=True, unit=_POINTS)
        )
    return verdicts


def _slow_worker(rounds: int, progress: Progress) -> list[TargetResult]:
    """Parameter servers with one slow worker: throughput and accuracy against the synchronous mode's."""
    from paceline.insight.bench import slow_worker  # its task is torch's

    ratios: dict[str, list[float]] = {}
    worse: dict[str, list[float]] = {}
    for number in range(rounds):
        progress(f"slow-worker, round {number + 1}/{rounds}: a server, two workers, one of them slow")
        with _failures_told("slow-worker"), _directory() as directory:
            sync, *others = slow_worker.measure(directory)
        for one in others:
            ratios.setdefault(one.name, []).append(one.samples_per_s / sync.samples_per_s)
            worse.setdefault(one.name, []).append(100 * (sync.accuracy - one.accuracy))
    return [
        verdict
        for name in ratios
        for verdict in (
            TargetResult("slow-worker", f"{name}: samples/s over sync's", Spread.of(ratios[name]), None),
            TargetResult(
                *("slow-worker", f"{name}: less accurate by", Spread.of(worse[name]), None),
                at_most=True,
                unit=_POINTS,
            ),
        )
    ]


STUDIES: Mapping[StudyName, Callable[[int, Progress], list[TargetResult]]] = {
    "pipeline": _pipeline,
    "pipedream": _pipedream,
    "slow-link": _slow_link,
    "slow-worker": _slow_worker,
}
"""Each called with the number of rounds, and with whom to tell of progress."""

BY_DEFAULT: tuple[StudyName, ...] = ("pipeline", "pipedream", "slow-worker")
"""Those that need no root."""


def _spread(found: Mapping[str, float]) -> Spread:
    return Spread(found["median"], found["low"], found["high"])


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        yield Path(directory)


@contextmanager
def _failures_told(suite: str) -> Iterator[None]:
    """One error, whatever failed: a training, or hosts that could not be made."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        raise LaunchError(
            f"--suite {suite}: a process ended with exit code {error.returncode}" + (f": {said[-1]}" if said else ".")
        ) from error
    except RuntimeError as error:
        raise LaunchError(f"--suite {suite}: {error}. Leave the suite out, or run it as root.") from error
