"""Pipeline schedules, their simulation, and the trace of a step."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from paceline.core.errors import RunDirectoryError

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


def bubble_fraction(timed: Sequence[Sequence[TimedAction]]) -> float:
    """Return the share of the ranks' time in which they are idle: the bubble."""
    begin = min((t.begin for of_rank in timed for t in of_rank), default=0.0)
    end = max((t.end for of_rank in timed for t in of_rank), default=0.0)
    busy = sum(t.end - t.begin for of_rank in timed for t in of_rank)
    whole = len(timed) * (end - begin)
    return 1.0 - busy / whole if whole > 0 else 0.0


def max_in_flight(plan: Orders) -> dict[int, int]:
    """Return for each stage the maximum number of micro-batches whose activations it keeps."""
    kept: dict[int, int] = {}
    most: dict[int, int] = {}
    for actions in plan:
        for kind, stage, _ in actions:
            kept[stage] = kept.get(stage, 0) + {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[stage] = max(most.get(stage, 0), kept[stage])
    return most


def predicted(
    name: Name, ranks: int, microbatches: int, stages_s: Sequence[tuple[float, float]]
) -> tuple[tuple[TimedAction, ...], ...]:
    """Return the timeline of a step, from each stage's seconds for forward and backward.

    Args:
        stages_s: of each stage; half of a backward is assumed to be its input's part.
    """
    shares: dict[Kind, tuple[float, float]] = {"F": (1, 0), "B": (0, 1), "I": (0, 0.5), "W": (0, 0.5)}

    def seconds(action: ScheduleAction) -> float:
        forward_s, backward_s = stages_s[action.stage]
        of_forward, of_backward = shares[action.kind]
        return of_forward * forward_s + of_backward * backward_s

    return timeline(build_schedules(name, ranks, microbatches), seconds)


# --- The trace of a step, in the run directory. No torch


FILE = "pipeline.json"
"""The trace's file in a run directory."""


@dataclass(frozen=True)
class PipelineTrace:
    """One step of one model replica.

    Attributes:
        step: number of steps of these processes, including this one.
        ranks: each rank's actions, by the clock of its node.
    """

    schedule: Name
    step: int
    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of the step."""
        return 1 + max((t.action.microbatch for of_rank in self.ranks for t in of_rank), default=-1)

    @property
    def idle(self) -> float:
        """The share of the ranks' time that they waited."""
        return bubble_fraction(self.ranks)

    def stages_s(self) -> list[tuple[float, float]]:
        """Return each stage's mean seconds for the forward and the backward of a micro-batch."""
        spent: dict[tuple[int, bool], float] = defaultdict(float)
        for of_rank in self.ranks:
            for (kind, stage, _), begin, end in of_rank:
                spent[stage, kind == "F"] += end - begin
        number = self.microbatches
        stages = sorted({stage for stage, _ in spent})
        return [(spent[stage, True] / number, spent[stage, False] / number) for stage in stages]

    def counted(self) -> dict[Name, float]:
        """Return the idle share of each schedule, computed from this step's mean times of each stage.

        Sends take no time in this model. A schedule with two stages per rank is computed with halved stages, and the
        other way round.
        """
        ranks, times = len(self.ranks), self.stages_s()
        shares: dict[Name, float] = {}
        for name, chunks in CHUNKS.items():
            if name == "pipedream":  # its steps overlap
                continue
            shares[name] = bubble_fraction(
                predicted(name, ranks, self.microbatches, _redistribute(times, ranks, chunks))
            )
        return shares


def _redistribute(times: Sequence[tuple[float, float]], ranks: int, chunks: int) -> list[tuple[float, float]]:
    per_rank = len(times) // ranks
    of_rank = [tuple(sum(t[i] for t in times[rank::ranks]) / per_rank for i in (0, 1)) for rank in range(ranks)]
    if per_rank == chunks:
        return list(times)
    return [(f * per_rank / chunks, b * per_rank / chunks) for f, b in of_rank] * chunks


def write(path: Path, schedule: Name, step: int, ranks: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Write a trace, given as rows of kind, stage, micro-batch, begin and end.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps({"schedule": schedule, "step": step, "ranks": ranks}))


def read(path: Path) -> PipelineTrace:
    """Read a trace.

    Raises:
        RunDirectoryError: it is missing or damaged.
    """
    try:
        document = json.loads(path.read_text())
        ranks = tuple(
            tuple(TimedAction(ScheduleAction(kind, stage, k), begin, end) for kind, stage, k, begin, end in rows)
            for rows in document["ranks"]
        )
        return PipelineTrace(cast(Name, document["schedule"]), int(document["step"]), ranks)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"there is no {path}: the run uses no pipeline, or has not done two steps. Train one: "
            "paceline train TASK --nproc 2 --strategy pp."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error!r}.") from error


_WIDTH, _ROW_HEIGHT, _LEFT, _TOP = 960, 44, 70, 48
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#eeca3b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def draw(trace: PipelineTrace) -> str:
    """Draw the step as SVG: a row for each rank, a box for each action with its micro-batch's number."""
    begin = min(t.begin for of_rank in trace.ranks for t in of_rank)
    end = max(t.end for of_rank in trace.ranks for t in of_rank)
    scale = (_WIDTH - _LEFT - 20) / max(end - begin, 1e-9)
    height = _TOP + _ROW_HEIGHT * len(trace.ranks) + 56
    title = (
        f"{trace.schedule}, {len(trace.ranks)} ranks, {trace.microbatches} micro-batches: "
        f"{(end - begin) * 1e3:.1f} ms, {trace.idle:.0%} idle"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="15">{escape(title)}</text>',
    ]
    for rank, of_rank in enumerate(trace.ranks):
        y = _TOP + _ROW_HEIGHT * rank
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 20}" height="34" fill="#f2f2f2"/>')
        for (kind, stage, k), start, stop in of_rank:
            x, wide = _LEFT + (start - begin) * scale, max((stop - start) * scale, 0.5)
            shade = 1.0 if stage < len(trace.ranks) else 0.6
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="34" fill="{_COLOURS[kind]}" '
                f'fill-opacity="{shade}" stroke="white"><title>{_NAMES[kind]} of micro-batch {k}, '
                f"stage {stage}: {(stop - start) * 1e3:.2f} ms</title></rect>"
            )
            if wide > 9:
                parts.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 22}" text-anchor="middle" font-size="10">{k}</text>'
                )
    kinds = sorted({t.action.kind for of_rank in trace.ranks for t in of_rank}, key="FBIW".index)
    for number, kind in enumerate(kinds):
        x, y = _LEFT + 190 * number, height - 32
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{_NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])
