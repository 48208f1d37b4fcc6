"""What the end of a worker means for its run, and how often it may be made good. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from paceline.distributed.process import WORKER_STOP_SIGNALS, Failure
from paceline.errors import CheckpointError, CorruptionError, IrreproducibleStepError, NonFiniteLossError
from paceline.launchers.local.failures import STOPPED

Meaning = Literal["done", "asked", "fatal", "fault"]
"""done: it ended in good order; asked: it died of a signal that the agent passed on; fatal: it would
happen again; fault: a replacement goes on from where the run stands."""

_FATAL = tuple(kind.__name__ for kind in (NonFiniteLossError, CheckpointError, IrreproducibleStepError))


def meaning(
    code: int,
    failure: Failure | None,
    *,
    finished: bool,
    stopping: bool,
    progressed: bool,
    distrusted: bool = False,
) -> Meaning:
    """What a worker's end means.

    Args:
        code: its exit code; minus the signal's number where one killed it.
        failure: the error that it recorded.
        finished: the run has its result.
        stopping: the agent has told the workers to stop.
        progressed: a step was done since the job began; an exception before that is a bug.
        distrusted: a worker in its place was found to compute wrongly before.
    """
    if code == 0 or code in STOPPED or finished:
        return "done"
    if stopping and -code in WORKER_STOP_SIGNALS:
        return "asked"
    if code < 0:
        return "fault"
    if failure is None:
        # Nothing of ours ends like that: os._exit() in the user's code, or a broken interpreter.
        return "fault" if progressed else "fatal"
    if is_corruption(failure):
        return "fatal" if distrusted else "fault"
    if failure.user_error or failure.type in _FATAL:
        return "fatal"
    return "fault" if failure.victim or progressed else "fatal"


def is_corruption(failure: Failure | None) -> bool:
    """Whether a worker ended because the others found that it computes wrongly."""
    return failure is not None and failure.type == CorruptionError.__name__


def describe_code(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name if -code in signal.valid_signals() else -code}"


@dataclass
class Budget:
    """Replacements that are left; progress refills it.

    Attributes:
        most: replacements without progress.
        first: the step at which the job began, None before any worker told its own.
        step: the highest step that any worker has told.
        spent: replacements since it rose.
    """

    most: int
    first: int | None = None
    step: int = -1
    spent: int = 0

    @property
    def progressed(self) -> bool:
        """Whether a step was done since the job began."""
        return self.first is not None and self.step > self.first

    def stands_at(self, step: int) -> None:
        """A worker has done this many steps; -1: it does not know yet."""
        if step > self.step:
            self.first = step if self.first is None else self.first
            self.step, self.spent = step, 0

    def spend(self) -> bool:
        """Take one replacement; False where none is left."""
        self.spent += 1
        return not self.overspent

    @property
    def overspent(self) -> bool:
        """Whether more were needed than there are."""
        return self.spent > self.most
