"""Requests that all ranks obey after a step, and the signals by which a worker is asked to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.core.errors import RESTART_EXIT_CODE
from paceline.core.signals import ECHO_S, WORKER_STOP_SIGNALS, StopRequests, forwarded_signal
from paceline.runs.metric_writers import STATUS_WIDTH

# --- Control flags: they carry each rank's own decisions to all ranks ---
#
# A signal, the end of --walltime, a save that is due by the clock or the end of a stream is seen by one
# rank at its own time. Each puts it into its row of the step's reduction; after the step all ranks read
# the same rows, and obey alike.


class StopCause(IntEnum):
    """Why the ranks stop: a signal, by its number, or one of Paceline's own reasons, above all numbers of signals.

    If ranks have different causes, the highest counts.

    Attributes:
        description: for events and messages.
        exit_code: of the stopped run: 130 after Ctrl-C, else 75, "run me again".
    """

    NONE = 0
    SIGINT = signal.SIGINT
    SIGUSR1 = signal.SIGUSR1
    SIGTERM = signal.SIGTERM
    WALLTIME = 1000
    TRIAL_SCHEDULER = 1001
    """A search's scheduler ends this trial."""

    @property
    def description(self) -> str:
        return {StopCause.WALLTIME: "walltime", StopCause.TRIAL_SCHEDULER: "the search"}.get(self, self.name)

    @property
    def exit_code(self) -> int:
        return 130 if self is StopCause.SIGINT else RESTART_EXIT_CODE


@dataclass(frozen=True)
class ControlFlags:
    """The control flags of one rank, or the merged ones of all.

    Attributes:
        save: a save is due by the clock.
        has_next_batch: there is another step's data in this epoch (streams; else always true).
        reform: the ranks shall leave their group after this step, for another one.
        computed, recomputed: fingerprints of the gradient that is verified in this step: of the rank that has its
            micro-batch, and of another one; 0 elsewhere.
        impure: the purity guard found something that the ranks have to settle.
        samples_fingerprint: of some samples, as this rank reads them; 0 if it does not know. Merged: negative if two
            ranks have different ones.
        has_values: the losses of this rank's micro-batches gave values to record.
        microbatch_s, step_s: this rank's seconds for a micro-batch, and further ones for a step; 0 if not measured.
    """

    stop: StopCause = StopCause.NONE
    save: bool = False
    has_next_batch: bool = True
    reform: bool = False
    computed: int = 0
    recomputed: int = 0
    impure: bool = False
    samples_fingerprint: int = 0
    has_values: bool = False
    microbatch_s: float = 0.0
    step_s: float = 0.0

    def row(self, status: Sequence[float] | None = None) -> list[float]:
        """Return the rank's row, with its status if a record is due."""
        return [*map(float, vars(self).values()), *([0.0] * STATUS_WIDTH if status is None else status)]


_NAMES = [field.name for field in fields(ControlFlags)]
ROW_LENGTH = len(_NAMES) + STATUS_WIDTH
"""Numbers in a rank's row: the control flags, then its status."""


def merge(rows: Sequence[Sequence[float]]) -> ControlFlags:
    """Merge the control flags that all ranks obey; without any row, no flag is set."""
    if not rows:
        return ControlFlags()
    flags = [dict(zip(_NAMES, map(int, row), strict=False)) for row in rows]
    highest = {name: max(of_rank[name] for of_rank in flags) for name in _NAMES}
    fingerprints = {of_rank["samples_fingerprint"] for of_rank in flags} - {0}
    return ControlFlags(
        stop=StopCause(highest["stop"]),
        save=bool(highest["save"]),
        has_next_batch=bool(highest["has_next_batch"]),
        reform=bool(highest["reform"]),
        computed=highest["computed"],
        recomputed=highest["recomputed"],
        impure=bool(highest["impure"]),
        samples_fingerprint=-1 if len(fingerprints) > 1 else max(fingerprints, default=0),
        has_values=bool(highest["has_values"]),
    )


def statuses(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return each rank's status."""
    return [row[len(_NAMES) : ROW_LENGTH] for row in rows]


def values_of(rows: Sequence[Sequence[float]], name: str) -> list[float]:
    """Return each rank's value of a control flag."""
    return [row[_NAMES.index(name)] for row in rows]


# --- The signals by which a worker is asked to stop ---


_END = b"\0"
_entered: list[StopSignals] = []


class StopSignals:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a flag; Ctrl-C after another signal ends the process immediately.

    The end of its terminal (SIGHUP) counts as SIGTERM where no launcher hears it, and ``nohup`` has not been used.

    Python runs handlers in the main thread, and not while that is inside C++ (a long operation, a
    wait for a dead peer). So a thread of its own reads the signals' numbers from a pipe, and
    judges them. Outside the main thread signals cannot be handled, and none is.

    Args:
        launched: another process may pass on what a terminal sends to this one, too.

    Attributes:
        received: the first signal, or ``StopCause.NONE``.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = StopCause.NONE
        self._launched = launched
        self._requests = StopRequests(ECHO_S if launched else 0.0)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="paceline-signals", daemon=True)
            self._watcher.start()
            hears_hangup = not self._launched and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            for number in (*WORKER_STOP_SIGNALS, *([signal.SIGHUP] if hears_hangup else [])):
                self._before[number] = signal.signal(number, self._on_signal)
            _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            _entered.remove(self)
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._pipe[1], _END)
            self._watcher.join()
            for descriptor in self._pipe:
                os.close(descriptor)

    @property
    def handled(self) -> tuple[int, ...]:
        """The signals that it handles now."""
        return tuple(self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or StopCause(forwarded_signal(number))

    def _watch(self) -> None:
        while (content := os.read(self._pipe[0], 1)) != _END:
            if content[0] in self._before:
                if self._requests.hear(content[0]) == "end":
                    os._exit(128 + content[0])
                self.received = self.received or StopCause(forwarded_signal(content[0]))


def _let_go() -> None:
    """Reset the handlers in a forked child, whose signals must not reach its parent's pipe."""
    if _entered:
        signal.set_wakeup_fd(-1)
        for number in _entered[-1].handled:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_go)
