"""Notices a hang where no agent watches: the ranks tell each other through the run's directory. No torch.

A thread in each rank looks once a second. Who is overdue asks, by a file, and then every rank writes where
it stands. The lowest that is overdue judges, and ends the job: its launcher may start it again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.distributed.activity import Activity
from paceline.distributed.process import exit_code_of, record_failure
from paceline.distributed.process_state import describe_silence
from paceline.errors import HangError, PeerLostError
from paceline.membership.channel import Standing
from paceline.membership.hang import Silence, verdict
from paceline.membership.hang_record import record_hang, record_slow
from paceline.membership.standing import standing_of
from paceline.run_directory import RunDirectory, write_atomically
from paceline.stacks import offer_stacks, stacks_of

_GLANCE_S = 1.0
_ANSWER_S = 5.0
_SLOW_EVERY_S = 60.0


@dataclass(frozen=True)
class _Note:
    """What a rank leaves in the run's directory: its process, and where it stood when it was last asked."""

    generation: int
    pid: int
    time: float
    standing: dict[str, Any] | None


class Watchdog:
    """Watches over this rank and, where it is the first to be held up, over all.

    Use it as a context manager: the thread and the files end with it.

    Args:
        activity: this rank's.
        directory: the run's.
        rank, world_size, generation: this rank's place.
        one_host: whether the other ranks' processes can be looked at.
        tell: where the verdict goes, unless a launcher reads it from the run's directory.
    """

    def __init__(
        self,
        activity: Activity,
        directory: RunDirectory,
        *,
        rank: int,
        world_size: int,
        generation: int,
        one_host: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._activity = activity
        self._directory = directory
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._one_host = one_host
        self._tell = tell
        self._asked = directory.logs / f"hang-asked-{generation}"
        self._judged = directory.logs / f"hang-judged-{generation}"
        self._over = threading.Event()
        self._next_slow = -1.0
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> Self:
        offer_stacks()
        if self._rank == 0:
            for old in self._directory.logs.glob("hang-*"):
                old.unlink(missing_ok=True)
        self._note(None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for path in (self._file(self._rank), self._asked):
            path.unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self._directory.logs / f"rank-{rank}.standing.json"

    def _note(self, standing: Standing | None) -> None:
        content = None if standing is None else asdict(standing)
        document = _Note(self._generation, os.getpid(), time.time(), content)
        # Where the disk is full, this rank is told by its process alone.
        with suppress(OSError):
            write_atomically(self._file(self._rank), json.dumps(asdict(document)).encode())

    def _watch(self) -> None:
        asked_at: float | None = None
        while not self._over.wait(_GLANCE_S):
            # Who was not asked is not meant: the file may be older than this process.
            if asked_at is not None and self._judged.exists():
                self._end(PeerLostError("the job was ended, because another rank held it up"))
            overdue = self._activity.overdue
            if not self._asked.exists():
                asked_at = None
                if not overdue:
                    continue
                with suppress(OSError):
                    self._asked.touch()
            asked_at = asked_at or time.time()
            self._note(standing_of(self._activity, self._generation, self._rank))
            if overdue:
                self._judge(asked_at)

    def _judge(self, asked_at: float) -> None:
        """Judge, if it is this rank's turn and all have answered that will."""
        notes = {rank: self._read(rank) for rank in range(self._world_size)}
        reports: list[Standing | Silence] = []
        unseen = []
        for rank, note in notes.items():
            if note is None:
                unseen.append(rank)
            elif note.standing is not None and note.time >= asked_at - _GLANCE_S:
                reports.append(Standing(**note.standing))
            elif time.time() < asked_at + _ANSWER_S:
                return
            else:
                pid = note.pid if self._one_host else None
                reports.append(Silence(rank, describe_silence(pid), stacks_of(pid) if pid else ""))
        if self._rank != min(r.rank for r in reports if isinstance(r, Standing) and r.overdue):
            return
        found = verdict(reports)
        if not found.certain:
            if found.culprits and time.monotonic() >= self._next_slow:
                self._next_slow = time.monotonic() + _SLOW_EVERY_S
                record_slow(self._directory, found)
            self._asked.unlink(missing_ok=True)
            return
        folder = record_hang(self._directory, found, reports)
        text = f"{found.sentence}. All stacks: {folder}"
        if unseen:
            text += f". Nothing is known of ranks {unseen}, which do not share this directory"
        self._end(HangError(text))

    def _read(self, rank: int) -> _Note | None:
        try:
            note = _Note(**json.loads(self._file(rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return note if note.generation == self._generation else None

    def _end(self, error: HangError | PeerLostError) -> None:
        """End this process, whatever its main thread waits in."""
        record_failure(self._directory, self._rank, error)
        if isinstance(error, HangError):
            self._tell(str(error))
            with suppress(OSError):
                self._judged.touch()
                self._asked.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code_of(error))
