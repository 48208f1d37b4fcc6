"""The times of events, by a clock that no change of the system time moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.core.owned_names import boot_id

_STEP_S = 1.0  # differences below it are the clock's drift


def stamp() -> dict[str, Any]:
    """Return the Unix time, and the seconds since this boot of the machine, which count no sleep."""
    return {"time": round(time.time(), 3), "up": round(time.monotonic(), 3), "boot": boot_id()}


def without_steps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events whose times differ by the seconds that passed.

    The last event of each boot keeps its time, since a clock that was wrong is right later; earlier ones are moved by
    each step of that machine's clock. The stamps are removed.
    """
    moved: list[dict[str, Any]] = []
    later: dict[str, tuple[float, float, float]] = {}  # of each boot: Unix time and seconds of the next event, offset
    for event in reversed(events):
        kept = {name: value for name, value in event.items() if name not in ("up", "boot", "host")}
        at, up, boot = event["time"], event.get("up"), event.get("boot")
        if isinstance(up, int | float) and isinstance(boot, str):
            next_at, next_up, offset = later.get(boot, (at, up, 0.0))
            step = (next_at - at) - (next_up - up)
            offset += step if abs(step) > _STEP_S else 0.0
            later[boot] = at, up, offset
            kept["time"] = round(at + offset, 3) if offset else at
        moved.append(kept)
    return moved[::-1]
