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
from pathlib import Path
from typing import Any

from paceline.core.files import open_regular, parse_json_records
from paceline.core.owned_names import boot_id
from paceline.runs.event_times import stamp

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
