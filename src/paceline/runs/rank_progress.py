"""The progress of a rank: a file for a dashboard on any node, and what hang detection reads. No torch.

A process that hangs in C code, is stopped or is killed stops beating or stepping.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Literal

from paceline.core.errors import PacelineError, PeerLostError
from paceline.runs.directory import RunDirectory

# --- Heartbeats: a small file, which a thread replaces every two seconds, so that a slow disk delays no step ---


BEAT_S = 2.0
"""Seconds between two beats; one costs a background thread about 0.1 ms."""

_LEAVE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """A rank's last heartbeat.

    Attributes:
        time: Unix time of the beat, by the rank's own clock.
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


# --- Progress for hang detection: written by the main thread, read by any other ---

# A *stage* is a unit of work for which other ranks wait (a step, an evaluation, ...); its time limit is learned from
# earlier durations. A *phase* is a part of it. An *exchange* is a collective of the whole world; exchanges are
# numbered, so that ranks can be compared.


Stage = Literal["waiting", "script", "joining", "first step", "step", "evaluation", "checkpoint"]

FLOOR_S: dict[Stage, float] = {
    "waiting": math.inf,  # no world yet, so no rank waits for this one
    "script": math.inf,  # a script's own code between the parts of a step
    "joining": 600.0,
    "first step": 300.0,  # it may compile, and fill caches
    "step": 30.0,
    "evaluation": 300.0,
    "checkpoint": 1800.0,  # the final checkpoint is awaited even on a slow disk
}
"""Minimum time limit of each stage in seconds, whatever was learned."""

_TIMES_THE_MEDIAN = 10
_RECENT = 25


class ProgressTracker:
    """The progress of one rank.

    Attributes:
        since: start of the stage, by the monotonic clock.
        moved_at: time of the last progress, within the stage too.
        step: optimizer steps done; -1 before it is known.
        exchange: the kind of the last exchange entered.
        collective_seq: number of exchanges entered in this world.
        left: number of exchanges left; less than ``collective_seq`` inside of one.
        thread: the thread that created this object, which it describes.
        helpers: returns the process ids of this rank's helper processes.

    Args:
        limit_s: time limit of a step; None: learned, ``math.inf``: no limit for any stage.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self.thread = threading.get_ident()
        self._took_s: dict[Stage, deque[float]] = {stage: deque(maxlen=_RECENT) for stage in FLOOR_S}
        self.helpers: Callable[[], Sequence[int]] = tuple
        self.step = -1
        self._suspended: tuple[Stage, float] = ("step", 0.0)
        self.join()

    def limit_steps_to(self, limit_s: float | None) -> None:
        """Set the time limit of a step; see ``limit_s`` above."""
        self._limit_s = limit_s

    def wait(self) -> None:
        """Enter the stage without a world, in which no rank waits for this one."""
        self.begin("waiting")

    def join(self) -> None:
        """Begin a world and reset the exchange numbers."""
        self.exchange = ""
        self.collective_seq = 0
        self.left = 0
        self.begin("joining")

    def begin(self, stage: Stage) -> None:
        self.stage: Stage = stage
        self.phase: str = stage
        self.since = monotonic()
        self.moved_at = self.since

    def end(self) -> None:
        """End the stage, learn its duration, and begin a step."""
        self._took_s[self.stage].append(monotonic() - self.since)
        self.begin("step")

    def suspend(self) -> None:
        """Stop the clock of the stage: the script's own code runs."""
        self._suspended = (self.stage, monotonic() - self.since)
        self.begin("script")

    def resume(self) -> None:
        """Continue the stage that :meth:`suspend` left."""
        stage, spent_s = self._suspended
        self.begin(stage)
        self.since -= spent_s

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the clock of the stage run within the context, where a script's own code is around it."""
        if self.stage != "script":
            yield
            return
        self.resume()
        try:
            yield
        finally:
            self.suspend()

    @contextmanager
    def in_stage(self, stage: Stage) -> Iterator[None]:
        """Let the clock of another stage run within the context."""
        outer, phase, spent_s = self.stage, self.phase, monotonic() - self.since
        self.begin(stage)
        try:
            yield
        finally:
            self.begin(outer)
            self.phase = phase
            self.since -= spent_s

    def move(self, phase: str) -> None:
        """Enter a phase."""
        self.phase = phase
        self.moved_at = monotonic()

    def begin_collective(self, exchange: str) -> None:
        """Begin to wait for the other ranks, in an exchange of this kind."""
        self.exchange = exchange
        self.collective_seq += 1
        self.moved_at = monotonic()

    def end_collective(self) -> None:
        self.left = self.collective_seq

    def suspend_collective(self) -> None:
        """Leave an unfinished exchange to work for it; :meth:`begin_collective` then re-enters it.

        A rank for whose work the others wait thus counts one exchange less than they do.
        """
        self.collective_seq -= 1
        self.moved_at = monotonic()

    @property
    def limit_s(self) -> float:
        """The time limit of the stage."""
        took_s = self._took_s[self.stage] or self._took_s["first step" if self.stage == "step" else self.stage]
        floor_s = FLOOR_S[self.stage]
        if self._limit_s is not None:
            if self.stage == "step":
                return self._limit_s
            floor_s = max(floor_s, self._limit_s)
        # Copied, because the main thread may append meanwhile.
        return max(floor_s, _TIMES_THE_MEDIAN * statistics.median(tuple(took_s) or (0.0,)))

    @property
    def overdue(self) -> bool:
        """Whether the stage exceeds its time limit."""
        return monotonic() - self.since > self.limit_s

    @property
    def position(self) -> str:
        """Where this rank is, for an error message: ``in step 3 during backward``."""
        if self.stage == "joining":
            return "while model and state were set up"
        during = f" during {self.phase}" if self.phase != self.stage else ""
        return f"in {name_stage(self.stage, self.step)}{during}"


def name_stage(stage: str, step: int) -> str:
    """Return the name of a stage of the run, with ``step`` steps done."""
    if stage in ("step", "first step"):
        return f"step {step + 1}"
    if stage in ("evaluation", "checkpoint"):
        return f"the {stage} after step {step}"
    return stage


@contextmanager
def note_progress(tracker: ProgressTracker) -> Iterator[None]:
    """Add a rank's position to an error; Paceline's own errors name it where it matters."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PeerLostError) or not isinstance(error, PacelineError):
            error.add_note(tracker.position)
        raise
