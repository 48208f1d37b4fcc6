"""``paceline runs pipeline RUN``: how long each rank waited in a step of a pipeline."""

from __future__ import annotations

import json as json_module
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, cast

from cyclopts import Parameter

from paceline.core.errors import RunDirectoryError
from paceline.parallel.pipeline.schedules import (
    CHUNKS,
    FILE,
    Kind,
    Name,
    ScheduleAction,
    TimedAction,
    build_schedules,
    timeline,
)
from paceline.runs.directory import RunDirectory


def pipeline(run: Path, *, svg: Path | None = None, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show a pipeline's bubble: the share of its ranks' time in which they wait.

    Uses the last recorded step (the processes record the 2nd, 4th, 8th, ...). Also shows the bubble that each
    schedule would have with the same stage times if communication took no time.

    Args:
        run: The run's directory.
        svg: Draw the step into this file: a row per rank, a box per forward and backward.
        json: Print one JSON object.
    """
    trace = read(RunDirectory(run).path / FILE)
    if svg is not None:
        try:
            svg.write_text(draw(trace))
        except OSError as error:
            raise RunDirectoryError(f"--svg {svg} cannot be written: {error.strerror}.") from error
    counted, times = trace.counted(), trace.stages_s()
    if json:
        document = {name: getattr(trace, name) for name in ("schedule", "step", "microbatches", "idle")}
        stages = [{"forward_s": f, "backward_s": b} for f, b in times]
        print(json_module.dumps({**document, "counted": counted, "stages": stages}))
        return 0
    print(f"{trace.schedule}, {len(trace.ranks)} ranks, {trace.microbatches} micro-batches, step {trace.step}")
    for stage, (forward_s, backward_s) in enumerate(times):
        print(f"  stage {stage}: forward {forward_s * 1e3:.2f} ms, backward {backward_s * 1e3:.2f} ms")
    print(f"idle: {trace.idle:.1%} measured, {counted[trace.schedule]:.1%} computed from these times")
    for name, share in counted.items():
        if name != trace.schedule:
            print(f"  with {name}: {share:.1%} computed")
    if svg is not None:
        print(f"drawing: {svg}")
    return 0


# --- The trace of a step, and schedules with the same times ---


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
        return {
            name: bubble_fraction(predicted(name, ranks, self.microbatches, _redistribute(times, ranks, chunks)))
            for name, chunks in CHUNKS.items()
            if name != "pipedream"  # its steps overlap
        }


def _redistribute(times: Sequence[tuple[float, float]], ranks: int, chunks: int) -> list[tuple[float, float]]:
    per_rank = len(times) // ranks
    of_rank = [tuple(sum(t[i] for t in times[rank::ranks]) / per_rank for i in (0, 1)) for rank in range(ranks)]
    if per_rank == chunks:
        return list(times)
    return [(f * per_rank / chunks, b * per_rank / chunks) for f, b in of_rank] * chunks


def bubble_fraction(timed: Sequence[Sequence[TimedAction]]) -> float:
    """Return the share of the ranks' time in which they are idle: the bubble."""
    begin = min((t.begin for of_rank in timed for t in of_rank), default=0.0)
    end = max((t.end for of_rank in timed for t in of_rank), default=0.0)
    busy = sum(t.end - t.begin for of_rank in timed for t in of_rank)
    whole = len(timed) * (end - begin)
    return 1.0 - busy / whole if whole > 0 else 0.0


def predicted(
    name: Name, ranks: int, microbatches: int, stages_s: Sequence[tuple[float, float]]
) -> tuple[tuple[TimedAction, ...], ...]:
    """Return the timeline of a step, from each stage's seconds for forward and backward.

    Half of a backward is assumed to be its input's part.
    """
    shares: dict[Kind, tuple[float, float]] = {"F": (1, 0), "B": (0, 1), "I": (0, 0.5), "W": (0, 0.5)}

    def seconds(action: ScheduleAction) -> float:
        forward_s, backward_s = stages_s[action.stage]
        of_forward, of_backward = shares[action.kind]
        return of_forward * forward_s + of_backward * backward_s

    return timeline(build_schedules(name, ranks, microbatches), seconds)


def read(path: Path) -> PipelineTrace:
    """Read a trace.

    Raises:
        RunDirectoryError: it is missing or damaged.
    """
    try:
        document = json_module.loads(path.read_text())
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
                place = f'x="{x + wide / 2:.1f}" y="{y + 22}" text-anchor="middle"'
                parts.append(f'<text {place} font-size="10">{k}</text>')
    kinds = sorted({t.action.kind for of_rank in trace.ranks for t in of_rank}, key="FBIW".index)
    for number, kind in enumerate(kinds):
        x, y = _LEFT + 190 * number, height - 32
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{_NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])
