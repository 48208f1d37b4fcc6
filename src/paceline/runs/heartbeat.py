"""Heartbeats: each rank's progress in a small file, for a dashboard on any node. No torch.

A thread replaces ``heartbeats/rank-N.json`` every two seconds, so that a slow disk delays no step. A process that hangs
in C code, is stopped or is killed stops beating or stepping.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from paceline.runs.directory import RunDirectory

BEAT_S = 2.0
"""Seconds between two beats; one costs a background thread about 0.1 ms."""

_LEAVE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """A rank's last heartbeat.

    Attributes:
        time: Unix time of the beat, by the rank's own clock.
        rank, world_size: the rank's.
        host, pid: the process.
        step: steps done.
        stepped: Unix time of the first beat at that step.
        steps_per_s: since the previous beat; None at the first.
        left: the process exited in order, so there will be no more beats.
    """

    time: float
    rank: int
    world_size: int
    host: str
    pid: int
    step: int
    stepped: float
    steps_per_s: float | None
    left: bool


class Heartbeat:
    """Writes heartbeats until it is closed; a failed write is retried with the next beat.

    Args:
        directory: the run's.
        rank, world_size: this process's.
        step: steps done so far.

    Attributes:
        step: steps done; the trainer sets it.
    """

    def __init__(self, directory: RunDirectory, *, rank: int, world_size: int, step: int) -> None:
        self.step = step
        self._path = directory.heartbeats / f"rank-{rank}.json"
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._pid = os.getpid()
        self._last: HeartbeatRecord | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last beat that reports the exit; a second call does nothing."""
        self._leaving.set()
        self._thread.join(_LEAVE_S)  # bounded, because a disk may hang

    def _beat(self) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        while not self._leaving.wait(BEAT_S if self._last else 0.0):
            self._write(left=False)
        self._write(left=True)

    def _write(self, *, left: bool) -> None:
        now, step, before = time.time(), self.step, self._last
        moved = before is None or step != before.step
        speed = None if before is None or now <= before.time else (step - before.step) / (now - before.time)
        self._last = HeartbeatRecord(
            time=round(now, 3),
            rank=self._rank,
            world_size=self._world_size,
            host=self._host,
            pid=self._pid,
            step=step,
            stepped=round(now, 3) if moved or before is None else before.stepped,
            steps_per_s=None if speed is None else round(max(0.0, speed), 3),
            left=left,
        )
        temporary = self._path.with_name(f".{self._path.name}")
        with suppress(OSError):
            temporary.write_text(json.dumps(asdict(self._last)))
            temporary.replace(self._path)
