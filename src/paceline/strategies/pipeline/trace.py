"""What the ranks of a pipeline did in a step, and when: written beside the run, read by people. No torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from paceline.errors import RunDirectoryError
from paceline.strategies.pipeline.schedule import CHUNKS, Action, Name, Timed, idle_share, predicted

FILE = "pipeline.json"
"""In a run's directory."""


@dataclass(frozen=True)
class Trace:
    """One step of one copy of the model.

    Attributes:
        schedule: the order of the work.
        step: how many steps of the processes' came before, and this one.
        ranks: each rank's actions, by the clock of its machine.
    """

    schedule: Name
    step: int
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def microbatches(self) -> int:
        """Of the step."""
        return 1 + max((t.action.microbatch for of_rank in self.ranks for t in of_rank), default=-1)

    @property
    def idle(self) -> float:
        """The share of the ranks' time that they waited."""
        return idle_share(self.ranks)

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
            found[name] = idle_share(predicted(name, ranks, self.microbatches, _on(times, ranks, chunks)))
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


def read(path: Path) -> Trace:
    """Read a trace.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    try:
        found = json.loads(path.read_text())
        ranks = tuple(
            tuple(Timed(Action(kind, stage, k), begin, end) for kind, stage, k, begin, end in rows)
            for rows in found["ranks"]
        )
        return Trace(cast(Name, found["schedule"]), int(found["step"]), ranks)
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


def draw(trace: Trace) -> str:
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
                    f'<text x="{x + wide / 2:.1f}" y="{y + 22}" text-anchor="middle" '
                    f'font-size="10">{k}</text>'
                )
    kinds = sorted({t.action.kind for of_rank in trace.ranks for t in of_rank}, key="FBIW".index)
    for number, kind in enumerate(kinds):
        x, y = _LEFT + 190 * number, height - 32
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{_NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])
