"""The order of forward and backward passes in a pipeline, and its picture."""

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

# --- In which order each rank runs its forwards and backwards: pure functions of numbers ---
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
"""How many stages a rank has."""


class ScheduleAction(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: forward, backward, or the two halves of a backward: the gradients of the stage's input, which
            the stage before waits for, and those of its weights.
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
    """The schedule for any number of micro-batches; pipedream's is that of 1f1b for a step by itself.

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
    """Megatron's order, for any number of micro-batches.

    It is made for multiples of the number of ranks. For other numbers ranks would wait for each other; then
    all of them do more forwards before their first backward.
    """
    for more in range(2 * microbatches + 1):
        found = tuple(_interleaved_rank(rank, ranks, microbatches, more) for rank in range(ranks))
        if _runs(found):
            return found
    raise AssertionError("all forwards before all backwards always run")


def _interleaved_rank(rank: int, ranks: int, microbatches: int, more: int) -> tuple[ScheduleAction, ...]:
    chunks = CHUNKS["interleaved"]
    stages, numbers = range(rank, ranks * chunks, ranks), range(microbatches)
    # A group of as many micro-batches as there are ranks goes through a rank's stages one after the other.
    ahead = sorted((k // ranks, stage, k) for stage in stages for k in numbers)
    back = sorted((k // ranks, -stage, k) for stage in stages for k in numbers)
    forwards = [ScheduleAction("F", stage, k) for _, stage, k in ahead]
    backwards = [ScheduleAction("B", -stage, k) for _, stage, k in back]
    first = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * ranks + more)
    found = forwards[:first]
    for number, forward in enumerate(forwards[first:]):
        found += [forward, backwards[number]]
    return (*found, *backwards[len(forwards) - first :])


_FB: tuple[Kind, Kind] = ("F", "B")
_SLOTS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""How long actions take where a schedule is made: the field's rule of thumb."""


@dataclass
class _Rank:
    forwards: list[ScheduleAction]
    backwards: list[ScheduleAction]
    weights: list[ScheduleAction]
    open: int  # most forwards whose input gradients are not computed yet
    kept: int  # most forwards whose backward is not done
    free_at: float = 0.0
    forwarded: int = 0
    returned: int = 0
    weighted: int = 0


class _Simulator:
    """Simulates the ranks: each does what is ready, a backward before a forward before weights."""

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
        found: list[list[ScheduleAction]] = [[] for _ in self._ranks]
        left = sum(len(r.forwards) + len(r.backwards) + len(r.weights) for r in self._ranks)
        while left:
            begin, _, rank, action = min(
                (max(state.free_at, ready), order, rank, action)
                for rank, state in enumerate(self._ranks)
                for order, ready, action in self._possible(state)
            )
            state = self._ranks[rank]
            state.free_at = self._done[action] = begin + _SLOTS[action.kind]
            state.forwarded += action.kind == "F"
            state.returned += action.kind in ("B", "I")
            state.weighted += action.kind in ("B", "W")
            found[rank].append(action)
            left -= 1
        return tuple(tuple(actions) for actions in found)

    def _possible(self, state: _Rank) -> Iterable[tuple[int, float, ScheduleAction]]:
        """What the rank could do next: its preference, when it is ready, and the action."""
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
        before = needs(action, self._last)
        if not all(n in self._done for n in before):
            return None
        return max((self._done[n] for n in before), default=0.0)


def needs(action: ScheduleAction, last: int) -> tuple[ScheduleAction, ...]:
    """What has to be done before an action, on whichever rank.

    Args:
        action: a forward, a backward, or half of one.
        last: the last stage.
    """
    kind, stage, k = action
    if kind == "F":
        return (ScheduleAction("F", stage - 1, k),) if stage else ()
    if kind == "W":
        return (ScheduleAction("I", stage, k),)
    return (ScheduleAction("F", stage, k), *((ScheduleAction(kind, stage + 1, k),) if stage < last else ()))


def timeline(plan: Orders, seconds: Callable[[ScheduleAction], float]) -> tuple[tuple[TimedAction, ...], ...]:
    """When each rank does what, if nothing but its orders and what it waits for holds it up.

    Args:
        plan: each rank's actions.
        seconds: how long an action takes.
    """
    found = _simulated(plan, seconds)
    assert found is not None, "the ranks of this schedule wait for each other"
    return found


def _runs(plan: Orders) -> bool:
    """Whether the ranks come to an end."""
    return _simulated(plan, lambda action: _SLOTS[action.kind]) is not None


def _simulated(plan: Orders, seconds: Callable[[ScheduleAction], float]) -> tuple[tuple[TimedAction, ...], ...] | None:
    last = max((action.stage for actions in plan for action in actions), default=0)
    done: dict[ScheduleAction, float] = {}
    found: list[list[TimedAction]] = [[] for _ in plan]
    while any(len(of_rank) < len(actions) for of_rank, actions in zip(found, plan, strict=True)):
        moved = False
        for of_rank, actions in zip(found, plan, strict=True):
            for action in actions[len(of_rank) :]:
                before = needs(action, last)
                if not all(n in done for n in before):
                    break
                begin = max([of_rank[-1].end if of_rank else 0.0, *(done[n] for n in before)])
                done[action] = begin + seconds(action)
                of_rank.append(TimedAction(action, begin, done[action]))
                moved = True
        if not moved:
            return None
    return tuple(tuple(of_rank) for of_rank in found)


def bubble_fraction(timed: Sequence[Sequence[TimedAction]]) -> float:
    """The share of the ranks' time in which they do nothing: the bubble."""
    begin = min((t.begin for of_rank in timed for t in of_rank), default=0.0)
    end = max((t.end for of_rank in timed for t in of_rank), default=0.0)
    busy = sum(t.end - t.begin for of_rank in timed for t in of_rank)
    whole = len(timed) * (end - begin)
    return 1.0 - busy / whole if whole > 0 else 0.0


def max_in_flight(plan: Orders) -> dict[int, int]:
    """For each stage, of how many micro-batches it keeps activations at once, at most."""
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
    """The timeline of a step, from each stage's seconds for forward and backward.

    Args:
        name: of the schedule.
        ranks: how many.
        microbatches: of a step.
        stages_s: of each stage; half of a backward is taken to be its input's part.
    """
    shares: dict[Kind, tuple[float, float]] = {"F": (1, 0), "B": (0, 1), "I": (0, 0.5), "W": (0, 0.5)}

    def seconds(action: ScheduleAction) -> float:
        forward_s, backward_s = stages_s[action.stage]
        of_forward, of_backward = shares[action.kind]
        return of_forward * forward_s + of_backward * backward_s

    return timeline(build_schedules(name, ranks, microbatches), seconds)


# --- What the ranks of a pipeline did in a step, and when: written beside the run, read by people. No torch


FILE = "pipeline.json"
"""In a run's directory."""


@dataclass(frozen=True)
class PipelineTrace:
    """One step of one copy of the model.

    Attributes:
        schedule: the order of the work.
        step: how many steps of the processes' came before, and this one.
        ranks: each rank's actions, by the clock of its machine.
    """

    schedule: Name
    step: int
    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def microbatches(self) -> int:
        """Of the step."""
        return 1 + max((t.action.microbatch for of_rank in self.ranks for t in of_rank), default=-1)

    @property
    def idle(self) -> float:
        """The share of the ranks' time that they waited."""
        return bubble_fraction(self.ranks)

    def stages_s(self) -> list[tuple[float, float]]:
        """Each stage's mean seconds for the forward and the backward of a micro-batch."""
        spent: dict[tuple[int, bool], float] = defaultdict(float)
        for of_rank in self.ranks:
            for (kind, stage, _), begin, end in of_rank:
                spent[stage, kind == "F"] += end - begin
        number = self.microbatches
        stages = sorted({stage for stage, _ in spent})
        return [(spent[stage, True] / number, spent[stage, False] / number) for stage in stages]

    def counted(self) -> dict[Name, float]:
        """The share of idle slots of each schedule, counted from this step's mean times of each stage.

        Sends take no time there. Where a schedule has two stages a rank and the step had one, each of them is
        taken to be half of it, and the other way round.
        """
        ranks, times = len(self.ranks), self.stages_s()
        found: dict[Name, float] = {}
        for name, chunks in CHUNKS.items():
            if name == "pipedream":  # no step of it stands by itself
                continue
            found[name] = bubble_fraction(predicted(name, ranks, self.microbatches, _on(times, ranks, chunks)))
        return found


def _on(times: Sequence[tuple[float, float]], ranks: int, chunks: int) -> list[tuple[float, float]]:
    there = len(times) // ranks
    of_rank = [tuple(sum(t[i] for t in times[rank::ranks]) / there for i in (0, 1)) for rank in range(ranks)]
    if there == chunks:
        return list(times)
    return [(f * there / chunks, b * there / chunks) for f, b in of_rank] * chunks


def write(path: Path, schedule: Name, step: int, ranks: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Write a trace, given as rows of kind, stage, micro-batch, begin and end.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps({"schedule": schedule, "step": step, "ranks": ranks}))


def read(path: Path) -> PipelineTrace:
    """Read a trace.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    try:
        found = json.loads(path.read_text())
        ranks = tuple(
            tuple(TimedAction(ScheduleAction(kind, stage, k), begin, end) for kind, stage, k, begin, end in rows)
            for rows in found["ranks"]
        )
        return PipelineTrace(cast(Name, found["schedule"]), int(found["step"]), ranks)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"there is no {path}: the run is no pipeline's, or has not done two steps. Train one: "
            "paceline train TASK --nproc 2 --strategy pp."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error!r}.") from error


_WIDTH, _LANE, _LEFT, _TOP = 960, 44, 70, 48
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#eeca3b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def draw(trace: PipelineTrace) -> str:
    """The step as SVG: a lane for each rank, a box for each action with its micro-batch's number."""
    begin = min(t.begin for of_rank in trace.ranks for t in of_rank)
    end = max(t.end for of_rank in trace.ranks for t in of_rank)
    scale = (_WIDTH - _LEFT - 20) / max(end - begin, 1e-9)
    height = _TOP + _LANE * len(trace.ranks) + 56
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
        y = _TOP + _LANE * rank
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
