"""The files of a run's events: one for each node, since clients of NFS overwrite each other's appended lines.

The node that creates ``events.jsonl`` appends to it; its first record names it. Another node appends to
``events-HOST-BOOT.jsonl``.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.files import open_regular, parse_json_records
from paceline.core.owned_names import boot_id

_LONGEST_RECORD = 2**16


def event_line(kind: str, **fields: Any) -> str:
    """Return the line of one event of this node, now."""
    return json.dumps({**stamp(), "host": socket.gethostname(), "event": kind, **fields}) + "\n"


def event_files(events: Path) -> list[Path]:
    """Return ``events``, which may not exist, and the files of other nodes."""
    try:
        names = os.listdir(events.parent)
    except OSError:  # which reading ``events`` reports
        names = []
    return [events, *(events.with_name(name) for name in sorted(names) if is_event_file(name) and name != events.name)]


def is_event_file(name: str) -> bool:
    """Return whether a node has its events in a file of this name."""
    return name == "events.jsonl" or fnmatch.fnmatchcase(name, "events-*.jsonl")


@functools.cache
def own_event_file(events: Path) -> Path:
    """Return the file to which this node appends; create ``events`` if there is none.

    Raises:
        OSError: the disk does not answer.
    """
    host, boot = socket.gethostname(), boot_id()
    try:
        # The server decides, also where this node has cached an absence.
        os.close(os.open(events, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return events
    except FileExistsError:
        pass
    if _writer(events) == (host, boot):
        return events
    return events.with_name(f"{events.stem}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)}-{boot}{events.suffix}")


def _writer(events: Path) -> tuple[str, str] | None:
    """Return the host and the boot of the first record; None if this node cannot see it."""
    try:
        with open_regular(events) as file:
            records = parse_json_records([file.readline(_LONGEST_RECORD).decode(errors="replace")])
    except FileNotFoundError:
        return None
    return (str(records[0].get("host")), str(records[0].get("boot"))) if records else None


# --- The times of events, by a clock that no change of the system time moves ---


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
