"""Pipeline schedules, their simulation, and the trace of a step."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

# --- The order of each rank's forwards and backwards: pure functions of numbers ---
#
# GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
# 1F1B: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021. Interleaved: Narayanan et
# al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021. Zero-bubble
# (its ZB-H1): Qi et al., "Zero Bubble Pipeline Parallelism", 2023.


Name = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "sequential", "pipedream"]
Kind = Literal["F", "B", "I", "W"]

CHUNKS: dict[Name, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero-bubble": 1,
    "sequential": 1,
    "pipedream": 1,
}
"""The number of stages per rank."""


class ScheduleAction(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: forward, backward, or the two halves of a backward: the gradients of the stage's input, for which the
            previous stage waits, and those of its weights.
        stage: from 0.
        microbatch: from 0.
    """

    kind: Kind
    stage: int
    microbatch: int


class TimedAction(NamedTuple):
    """An action, with its begin and end in seconds."""

    action: ScheduleAction
    begin: float
    end: float


Orders = tuple[tuple[ScheduleAction, ...], ...]
"""Each rank's actions, in order."""


@functools.lru_cache(maxsize=256)
def build_schedules(name: Name, ranks: int, microbatches: int) -> Orders:
    """Return the schedule for any number of micro-batches; pipedream's is that of 1f1b for a single step.

    Rank r has the stages r, r + ranks, ... In each stage, backwards are in the order of the micro-batches.
    """
    if name == "sequential":
        return tuple(
            tuple(ScheduleAction(kind, rank, k) for k in range(microbatches) for kind in _FB) for rank in range(ranks)
        )
    if name == "gpipe":
        return tuple(
            tuple(ScheduleAction(kind, rank, k) for kind in _FB for k in range(microbatches)) for rank in range(ranks)
        )
    if name == "interleaved":
        return _interleaved(ranks, microbatches)
    return _Simulator(ranks, microbatches, splits=name == "zero-bubble").run()


def _interleaved(ranks: int, microbatches: int) -> Orders:
    """Return Megatron's order, for any number of micro-batches.

    It is designed for multiples of the number of ranks and can deadlock for others; then all ranks run more forwards
    before their first backward.
    """
    for more in range(2 * microbatches + 1):
        orders = tuple(_interleaved_rank(rank, ranks, microbatches, more) for rank in range(ranks))
        if _is_deadlock_free(orders):
            return orders
    raise AssertionError("all forwards before all backwards cannot deadlock")


def _interleaved_rank(rank: int, ranks: int, microbatches: int, more: int) -> tuple[ScheduleAction, ...]:
    chunks = CHUNKS["interleaved"]
    stages, numbers = range(rank, ranks * chunks, ranks), range(microbatches)
    # Groups of as many micro-batches as ranks run through a rank's stages in turn.
    ahead = sorted((k // ranks, stage, k) for stage in stages for k in numbers)
    back = sorted((k // ranks, -stage, k) for stage in stages for k in numbers)
    forwards = [ScheduleAction("F", stage, k) for _, stage, k in ahead]
    backwards = [ScheduleAction("B", -stage, k) for _, stage, k in back]
    first = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * ranks + more)
    actions = forwards[:first]
    for number, forward in enumerate(forwards[first:]):
        actions += [forward, backwards[number]]
    return (*actions, *backwards[len(forwards) - first :])


_FB: tuple[Kind, Kind] = ("F", "B")
_DURATIONS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Assumed durations of actions, by the usual rule of thumb."""


@dataclass
class _Rank:
    forwards: list[ScheduleAction]
    backwards: list[ScheduleAction]
    weights: list[ScheduleAction]
    open: int  # maximum number of forwards without input gradients
    kept: int  # maximum number of forwards whose backward is not done
    free_at: float = 0.0
    forwarded: int = 0
    returned: int = 0
    weighted: int = 0


class _Simulator:
    """Simulates greedy ranks that prefer a backward to a forward to weight gradients."""

    def __init__(self, ranks: int, microbatches: int, *, splits: bool) -> None:
        self._last = ranks - 1
        back: Kind = "I" if splits else "B"
        numbers = range(microbatches)
        self._ranks = [
            _Rank(
                [ScheduleAction("F", rank, k) for k in numbers],
                [ScheduleAction(back, rank, k) for k in numbers],
                [ScheduleAction("W", rank, k) for k in numbers] if splits else [],
                open=ranks - rank,
                kept=ranks if splits else ranks - rank,
            )
            for rank in range(ranks)
        ]
        self._done: dict[ScheduleAction, float] = {}

    def run(self) -> Orders:
        actions_of_ranks: list[list[ScheduleAction]] = [[] for _ in self._ranks]
        remaining = sum(len(r.forwards) + len(r.backwards) + len(r.weights) for r in self._ranks)
        while remaining:
            begin, _, rank, action = min(
                (max(state.free_at, ready), order, rank, action)
                for rank, state in enumerate(self._ranks)
                for order, ready, action in self._possible(state)
            )
            state = self._ranks[rank]
            state.free_at = self._done[action] = begin + _DURATIONS[action.kind]
            state.forwarded += action.kind == "F"
            state.returned += action.kind in ("B", "I")
            state.weighted += action.kind in ("B", "W")
            actions_of_ranks[rank].append(action)
            remaining -= 1
        return tuple(tuple(actions) for actions in actions_of_ranks)

    def _possible(self, state: _Rank) -> Iterable[tuple[int, float, ScheduleAction]]:
        """Yield the rank's possible next actions, each with its preference and the time when it is ready."""
        if state.returned < len(state.backwards):
            action = state.backwards[state.returned]
            ready = self._ready(action)
            if ready is not None:
                yield 0, ready, action
        if (
            state.forwarded < len(state.forwards)
            and state.forwarded - state.returned < state.open
            and state.forwarded - state.weighted < state.kept
        ):
            action = state.forwards[state.forwarded]
            ready = self._ready(action)
            if ready is not None:
                yield 1, ready, action
        if state.weighted < min(len(state.weights), state.returned):
            yield 2, 0.0, state.weights[state.weighted]

    def _ready(self, action: ScheduleAction) -> float | None:
        prerequisites = needs(action, self._last)
        if not all(n in self._done for n in prerequisites):
            return None
        return max((self._done[n] for n in prerequisites), default=0.0)


def needs(action: ScheduleAction, last: int) -> tuple[ScheduleAction, ...]:
    """Return the actions that must precede an action, on any rank.

    Args:
        action: a forward, a backward, or half of one.
    """
    kind, stage, k = action
    if kind == "F":
        return (ScheduleAction("F", stage - 1, k),) if stage else ()
    if kind == "W":
        return (ScheduleAction("I", stage, k),)
    return (ScheduleAction("F", stage, k), *((ScheduleAction(kind, stage + 1, k),) if stage < last else ()))


def timeline(plan: Orders, seconds: Callable[[ScheduleAction], float]) -> tuple[tuple[TimedAction, ...], ...]:
    """Return the timeline of the ranks, limited only by their orders and dependencies.

    Args:
        plan: each rank's actions.
    """
    result = _simulate(plan, seconds)
    assert result is not None, "this schedule deadlocks"
    return result


def _is_deadlock_free(plan: Orders) -> bool:
    """Return whether the schedule runs without a deadlock."""
    return _simulate(plan, lambda action: _DURATIONS[action.kind]) is not None


def _simulate(plan: Orders, seconds: Callable[[ScheduleAction], float]) -> tuple[tuple[TimedAction, ...], ...] | None:
    last = max((action.stage for actions in plan for action in actions), default=0)
    done: dict[ScheduleAction, float] = {}
    timelines: list[list[TimedAction]] = [[] for _ in plan]
    while any(len(of_rank) < len(actions) for of_rank, actions in zip(timelines, plan, strict=True)):
        has_progress = False
        for of_rank, actions in zip(timelines, plan, strict=True):
            for action in actions[len(of_rank) :]:
                prerequisites = needs(action, last)
                if not all(n in done for n in prerequisites):
                    break
                begin = max([of_rank[-1].end if of_rank else 0.0, *(done[n] for n in prerequisites)])
                done[action] = begin + seconds(action)
                of_rank.append(TimedAction(action, begin, done[action]))
                has_progress = True
        if not has_progress:
            return None
    return tuple(tuple(of_rank) for of_rank in timelines)


def max_in_flight(plan: Orders) -> dict[int, int]:
    """Return for each stage the maximum number of micro-batches whose activations it keeps."""
    kept: dict[int, int] = {}
    most: dict[int, int] = {}
    for actions in plan:
        for kind, stage, _ in actions:
            kept[stage] = kept.get(stage, 0) + {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[stage] = max(most.get(stage, 0), kept[stage])
    return most


# --- The trace of a step, in the run directory. No torch


FILE = "pipeline.json"
"""The trace's file in a run directory."""


def write(path: Path, schedule: Name, step: int, ranks: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Write a trace, given as rows of kind, stage, micro-batch, begin and end.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps({"schedule": schedule, "step": step, "ranks": ranks}))
