"""The timeline and goodput of a run: pure functions of ``events.jsonl``.

*Goodput* is the share of the active time that went into steps that count. A run is active from each start to the stop,
failure or end that follows. Lost time is

- interruptions: from the loss or the exit of a group's member to the moment at which all members of the next group hold
the state. The loss of a silent worker counts from its last heartbeat, so it includes the agent's timeout;
- steps recomputed after the loss of all workers, at the mean time of a step.

Evaluations and saves count as good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

REPEATED = "recomputed steps"
_ENDS = ("stopped", "failed", "finished")


@dataclass(frozen=True)
class TimelineEntry:
    """One line of the timeline.

    Attributes:
        seconds: since the run's first event.
        step: steps done, if the event names them.
        event: its kind in ``events.jsonl``.
    """

    seconds: float
    step: int | None
    event: str
    text: str


@dataclass(frozen=True)
class Interruption:
    """A period without training.

    Attributes:
        cause: "killed", "silent", "hung" or "error" for a lost worker, "machine lost" for a lost node, "restart" after
            the loss of all workers; "joining", "leaving", "gathering" or "re-forming" if requested.
        begin, end: seconds since the run's first event.
        generation: of the group that ended it.
    """

    cause: str
    begin: float
    end: float
    generation: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class WorldChange:
    """The number of computing workers from a point in time on."""

    seconds: float
    world_size: int


@dataclass(frozen=True)
class Goodput:
    """The active time, and its losses by cause.

    Attributes:
        active_s: active seconds, over all starts.
        lost_s: cause -> seconds.
        interruptions: cause -> number.
        repeated_steps: steps recomputed after the loss of all workers that had them.
    """

    active_s: float
    lost_s: Mapping[str, float]
    interruptions: Mapping[str, int]
    repeated_steps: int

    @property
    def good_s(self) -> float:
        """Seconds in steps that count."""
        return max(0.0, self.active_s - sum(self.lost_s.values()))

    @property
    def share(self) -> float | None:
        """``good_s`` over ``active_s``; None before the start."""
        return self.good_s / self.active_s if self.active_s > 0 else None


@dataclass(frozen=True)
class Timeline:
    """A run's history; :func:`timeline` builds it."""

    entries: tuple[TimelineEntry, ...]
    interruptions: tuple[Interruption, ...]
    worlds: tuple[WorldChange, ...]
    goodput: Goodput


def timeline(events: Sequence[Event], *, until: float | None = None, repeated_steps: int = 0) -> Timeline:
    """Build the timeline of a run's events.

    Args:
        events: the records of ``events.jsonl``, oldest first.
        until: Unix time of the last sign of activity, if later than the last event.
        repeated_steps: the ledger's number. Events count steps up to the last heartbeat, the ledger those that were
            flushed; the higher number is used.
    """
    reader = _TimelineReader(float(events[0]["time"]) if events else 0.0)
    for event in events:
        reader.read(event)
    return reader.finish(until, repeated_steps)


class _TimelineReader:
    def __init__(self, first: float) -> None:
        self._first = first
        self._entries: list[TimelineEntry] = []
        self._interruptions: list[Interruption] = []
        self._worlds: list[WorldChange] = []
        self._active = 0.0  # of the starts that ended
        self._since: float | None = None  # the current start
        self._last = 0.0
        self._in_group: list[int] = []  # local indices of the current group's workers
        self._computing = 0  # members that are not spares
        self._causes: list[str] = []  # of members lost since the group was formed
        self._began: float | None = None  # start of the current interruption
        self._cause = ""
        self._forming = -1
        self._gathering = False
        self._reached = 0  # the highest step
        self._net = 0  # steps done at the last event
        self._repeated = 0

    def read(self, event: Event) -> None:
        kind, seconds = str(event["event"]), float(event["time"]) - self._first
        step = event.get("step")
        step = step if isinstance(step, int) and step >= 0 else None
        if kind == "started":
            self._started(event, seconds, step or 0)
        elif kind == "fault" and event.get("local_index") in self._in_group:
            self._causes.append(_cause(str(event.get("how", ""))))
        elif kind == "node lost":
            self._causes.append("machine lost")
        elif kind == "gather":
            self._gathering = True
        elif kind == "group":
            self._formed(event, seconds)
        elif kind == "joined" and self._began is not None:
            self._interruptions.append(Interruption(self._cause, self._began, seconds, self._forming))
            self._worlds.append(WorldChange(seconds, self._computing))
            self._began = None
        elif kind in _ENDS:
            self._ended(seconds)
        if step is not None:
            self._reached = max(self._reached, step)
            self._net = step
        self._last = max(self._last, seconds)
        self._entries.append(TimelineEntry(round(seconds, 3), step, kind, describe(event)))

    def finish(self, until: float | None, repeated_steps: int) -> Timeline:
        if until is not None and self._since is not None:
            self._last = max(self._last, until - self._first)
        self._ended(self._last)
        lost: dict[str, float] = {}
        for interruption in self._interruptions:
            lost[interruption.cause] = lost.get(interruption.cause, 0.0) + interruption.seconds
        repeated = max(self._repeated, repeated_steps)
        trained = max(0.0, self._active - sum(lost.values()))
        if repeated:
            lost[REPEATED] = trained * repeated / (repeated + max(self._net, 1))
        goodput = Goodput(
            active_s=round(self._active, 3),
            lost_s={cause: round(seconds, 3) for cause, seconds in lost.items()},
            interruptions=dict(Counter(i.cause for i in self._interruptions)),
            repeated_steps=repeated,
        )
        return Timeline(tuple(self._entries), tuple(self._interruptions), tuple(self._worlds), goodput)

    def _started(self, event: Event, seconds: float, step: int) -> None:
        self._repeated += max(0, self._reached - step)
        self._reached = step
        if self._began is not None and event.get("generation") == self._forming:
            self._cause = "restart"
            return
        self._ended(self._last)  # the previous start may have ended without an event
        self._since = seconds
        world_size = int(event.get("world_size", 1))
        self._in_group = list(range(world_size))
        self._worlds.append(WorldChange(seconds, world_size))

    def _formed(self, event: Event, seconds: float) -> None:
        in_group = list(event.get("members", ()))
        before = len(self._in_group)
        if self._began is None:
            self._began = seconds - float(event.get("seconds") or 0.0)
            if self._gathering:
                self._cause = "gathering"
            elif self._causes:
                self._cause = self._causes[0]
            elif len(in_group) == before:
                self._cause = "re-forming"
            else:
                self._cause = "joining" if len(in_group) > before else "leaving"
        self._in_group = in_group
        self._causes = []
        self._gathering = False
        self._computing = int(event.get("computing", len(in_group)))
        self._forming = int(event["generation"])

    def _ended(self, seconds: float) -> None:
        if self._since is None:
            return
        if self._began is not None:
            self._interruptions.append(Interruption(self._cause, self._began, seconds, self._forming))
        self._active += seconds - self._since
        self._since = None
        self._began = None
        self._causes = []


def _cause(how: str) -> str:
    if how.startswith("was killed"):
        return "killed"
    if how.startswith(("has not entered", "has been at")):
        return "hung"
    return "error" if how.startswith("exited") else "silent"


def describe(event: Event) -> str:
    """Describe an event in words; unknown kinds are listed with their fields."""
    match event:
        case {"event": "created", "task": task}:
            return f"created: {task}"
        case {"event": "forked", "path": path, "step": int() as step, "changed": changed}:
            names = [*changed, *(event.get("options") or ())]
            different = f", with another {', '.join(map(str, names))}" if names else ""
            return f"forked from step {step:,} of {path}{different}"
        case {"event": "started", "step": 0, "world_size": size}:
            return f"training begins on {_workers(size)}"
        case {"event": "started", "step": _, "world_size": size}:
            return f"training resumes from a checkpoint on {_workers(size)}"
        case {"event": "checkpoint"}:
            return "checkpoint saved"
        case {"event": "checkpoint failed", "error": error}:
            return f"a checkpoint could not be saved: {error}"
        case {"event": "backup"}:
            return "checkpoint backed up"
        case {"event": "backup failed", "error": error}:
            return f"a checkpoint could not be backed up: {error}"
        case {"event": "impure", "message": message}:
            return f"the purity guard found: {message}"
        case {"event": "code changed", "files": [*files]}:
            return f"a process has other code: {', '.join(map(str, files))}"
        case {"event": "fallback", "reason": reason}:
            return f"skipped a checkpoint: {reason}"
        case {"event": "fault", "local_index": index, "how": how}:
            return f"worker {index} {how}"
        case {"event": "hang" | "slow" as kind, "sentence": sentence}:
            return f"{kind}: {sentence}"
        case {"event": "group", "generation": generation, "members": [*indices]}:
            return f"generation {generation}: {_workers(len(indices))}: {', '.join(map(str, indices))}"
        case {"event": "node lost", "node": node, "why": why}:
            return f"machine {node} is lost: {why}"
        case {"event": "machines", "nodes": [*nodes]}:
            return f"machines that take part: {', '.join(map(str, nodes))}"
        case {"event": "takeover", "node": node}:
            return f"the agent of machine {node} takes the lead"
        case {"event": "excluded", "node": node, "cut": [*others]}:
            return f"machine {node} waits: it and {', '.join(map(str, others))} cannot reach each other"
        case {"event": "included", "node": node}:
            return f"machine {node} takes part again"
        case {"event": "paused", "node": node, "why": why}:
            return f"machine {node} waits: {why}"
        case {"event": "joined", "generation": generation, "seconds": int() | float() as seconds}:
            return f"generation {generation} trains, {_duration(seconds)} after the last one was left"
        case {"event": "joined", "generation": generation}:
            return f"generation {generation} trains"
        case {"event": "shares", "before": [*before], "shares": [*shares]}:
            return f"micro-batches are shared {_shares(shares)}, no longer {_shares(before)}"
        case {"event": "scale", "nodes": nodes}:
            return f"asked to go to {nodes} machine{'s' if nodes != 1 else ''}"
        case {"event": "retired", "local_index": index}:
            return f"worker {index} left, as asked"
        case {"event": "scale", "before": before, "target": target}:
            return f"asked to go from {before} to {_workers(target)}"
        case {"event": "gather"}:
            return "requested to continue only with all workers"
        case {"event": "stopped", "cause": "walltime"}:
            return "stopped before --walltime was over; everything is saved"
        case {"event": "stopped", "cause": cause}:
            return f"stopped by {cause}; everything is saved"
        case {"event": "corruption", "sentence": sentence}:
            return f"{sentence} The step is not applied"
        case {"event": "failed", "error": error}:
            rank = event.get("rank", event.get("local_index"))
            return f"failed: {error}" if rank is None else f"failed in rank {rank}: {error}"
        case {"event": "finished"}:
            return "finished"
    fields = {name: value for name, value in event.items() if name not in ("time", "event", "step")}
    field_list = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{event['event']}: {field_list}" if field_list else str(event["event"])


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"


def _shares(shares: Sequence[object]) -> str:
    return " : ".join(map(str, shares))


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
