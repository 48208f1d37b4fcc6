"""What a person should look at: pure functions of what is known of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.monitoring.heartbeat import Beat

SILENT_S = 15.0
"""Seconds without a beat after which a rank is called silent."""

STUCK_S = 120.0
"""Seconds without a step after which a run is said to make no progress."""

RECENT_S = 600.0
"""How long after a fault a run at work is marked for it."""

LEAST_DISK = (0.02, 2 * 2**30)
"""A disk is nearly full with less than this share *and* less than so many bytes free."""

_TOLD = {"fault": "a worker was lost", "node lost": "a machine was lost", "hang": "training hung"}


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing to look at.

    Attributes:
        kind: "loss", "progress", "silent", "disk", "fault", "checkpoint", "corruption", "ended" or "damaged".
        severity: "error": the run is not all right; "warning": it goes on.
        text: what, in words.
    """

    kind: str
    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What alerts are made from.

    Attributes:
        state: the run's.
        problem: what failed or is damaged, where something is.
        events: the last ones, oldest first.
        beats: the last of each rank.
        nonfinite: steps whose loss was NaN or infinite.
        disk: free and all bytes of the run's disk, None where that is unknown.
        now: Unix time.
    """

    state: str
    problem: str | None
    events: Sequence[Mapping[str, Any]]
    beats: Sequence[Beat]
    nonfinite: Sequence[int]
    disk: tuple[int, int] | None
    now: float


def alerts(facts: Facts) -> list[Alert]:
    """What to look at, the worst first."""
    found: list[Alert] = []
    if facts.state in ("failed", "crashed", "damaged"):
        found.append(Alert(kind="ended", severity="error", text=_end(facts)))
    if facts.nonfinite:
        text = f"the loss was NaN or infinite at step {facts.nonfinite[-1]}"
        found.append(Alert(kind="loss", severity="error", text=text))
    if facts.state in ("running", "waiting"):
        found += _at_work(facts)
    found += _saving(facts.events)
    return sorted(found, key=lambda alert: alert.severity != "error")


def _end(facts: Facts) -> str:
    if facts.state == "crashed":
        return "it ended without a word: killed, or its machine went down"
    return facts.problem or facts.state


def _at_work(facts: Facts) -> list[Alert]:
    found = []
    silent = [beat for beat in facts.beats if is_silent(beat, facts.now)]
    if silent:
        oldest = min(beat.time for beat in silent)
        who = ", ".join(f"{beat.rank} ({beat.host})" for beat in silent[:4])
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        text = f"no heartbeat for {facts.now - oldest:.0f} s from rank {who}{more}"
        found.append(Alert(kind="silent", severity="error", text=text))
    moved = max((beat.stepped for beat in facts.beats), default=None)
    if moved is not None and facts.now - moved > STUCK_S:
        text = f"no step for {facts.now - moved:.0f} s"
        found.append(Alert(kind="progress", severity="warning", text=text))
    if facts.disk is not None:
        free, total = facts.disk
        if free < LEAST_DISK[1] and free < LEAST_DISK[0] * total:
            text = f"the disk is nearly full: {free / 2**30:.2f} GiB free"
            found.append(Alert(kind="disk", severity="warning", text=text))
    recent = [e for e in facts.events if facts.now - float(e.get("time", 0.0)) < RECENT_S]
    for kind, told in _TOLD.items():
        number = sum(event.get("event") == kind for event in recent)
        if number:
            times = f" ({number} times)" if number > 1 else ""
            text = f"{told} in the last {RECENT_S / 60:.0f} minutes{times}"
            found.append(Alert(kind="fault", severity="warning", text=text))
    return found


def _saving(events: Sequence[Mapping[str, Any]]) -> list[Alert]:
    """What was not saved since the last time that it was; a corruption, whenever it was."""
    found = []
    for good, bad in (("checkpoint", "checkpoint failed"), ("backup", "backup failed")):
        last = next((event for event in reversed(events) if event.get("event") in (good, bad)), None)
        if last is not None and last["event"] == bad:
            text = f"the last {good} failed: {last.get('error', '')}"
            found.append(Alert(kind="checkpoint", severity="warning", text=text))
    corrupt = next((event for event in reversed(events) if event.get("event") == "corruption"), None)
    if corrupt is not None:
        text = str(corrupt.get("sentence", "a rank computed other bits than the others"))
        found.append(Alert(kind="corruption", severity="warning", text=text))
    return found


def is_silent(beat: Beat, now: float) -> bool:
    """Whether a rank should have told something by now."""
    return not beat.left and now - beat.time > SILENT_S
