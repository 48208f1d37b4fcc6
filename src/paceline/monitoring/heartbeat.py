"""Where each rank is, in a small file of its own that a dashboard on any machine can read. No torch.

``heartbeats/rank-N.json`` is replaced every two seconds by a thread, so that a slow disk holds no step up and
a process that hangs in C code, is stopped or is killed can be told from one that works.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from paceline.run_directory import RunDirectory

BEAT_S = 2.0
"""Seconds between two beats; one costs about 0.1 ms of a thread beside the training."""

_LEAVE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank last told.

    Attributes:
        time: Unix time of the beat, by the rank's own clock.
        rank, world_size: its place.
        host, pid: the process.
        step: steps done.
        stepped: Unix time at which a beat first told that step.
        steps_per_s: since the beat before; None at the first.
        left: the process left in order; silence means nothing any more.
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

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """A beat as it was read.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        speed = document["steps_per_s"]
        return cls(
            time=float(document["time"]),
            rank=int(document["rank"]),
            world_size=int(document["world_size"]),
            host=str(document["host"]),
            pid=int(document["pid"]),
            step=int(document["step"]),
            stepped=float(document["stepped"]),
            steps_per_s=None if speed is None else float(speed),
            left=bool(document["left"]),
        )


class Heartbeat:
    """Beats until it is closed. A disk that does not take a beat is left alone until the next one.

    Args:
        directory: the run's.
        rank, world_size: this process's place.
        step: steps done so far.

    Attributes:
        step: steps done; the trainer writes it, and nothing else is asked of the trainer.
    """

    def __init__(self, directory: RunDirectory, *, rank: int, world_size: int, step: int) -> None:
        self.step = step
        self._path = directory.heartbeats / f"rank-{rank}.json"
        self._rank, self._world_size = rank, world_size
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._told: Beat | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell that this rank leaves; a second call does nothing."""
        self._leaving.set()
        self._thread.join(_LEAVE_S)  # no longer: a disk may hang

    def _beat(self) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        while not self._leaving.wait(BEAT_S if self._told else 0.0):
            self._tell(left=False)
        self._tell(left=True)

    def _tell(self, *, left: bool) -> None:
        now, step, before = time.time(), self.step, self._told
        moved = before is None or step != before.step
        speed = None if before is None or now <= before.time else (step - before.step) / (now - before.time)
        self._told = Beat(
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
            temporary.write_text(json.dumps(asdict(self._told)))
            temporary.replace(self._path)


def read_beats(directory: RunDirectory) -> list[Beat]:
    """The last beat of each rank of the newest group, by rank.

    Ranks that are no more, since the run went on with fewer, are left out.
    """
    beats = [beat for path in directory.heartbeats.glob("rank-*.json") if (beat := _read(path)) is not None]
    newest = max(beats, key=lambda beat: beat.time, default=None)
    if newest is None:
        return []
    return sorted((beat for beat in beats if beat.rank < newest.world_size), key=lambda beat: beat.rank)


def _read(path: Path) -> Beat | None:
    try:
        return Beat.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
