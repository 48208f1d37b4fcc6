"""What follows from a failure: another try, another worker, or the end of the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import (
    CheckpointError,
    NondeterminismError,
    NonFiniteLossError,
    RunDirectoryError,
    SilentDataCorruptionError,
)
from paceline.core.signals import WORKER_STOP_SIGNALS
from paceline.data.ledger import read_ledger
from paceline.data.order import with_saved_sizes
from paceline.elastic.coordinator import WorkerGroup
from paceline.elastic.node import Ended
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED, FailureRecord, ProcessExit, describe, report_job_failure

if TYPE_CHECKING:
    from paceline.data.order import DeterministicSampler


# --- What to say of a step that fails again and again: which, on which samples, with which error. No torch


def describe_crash_loop(
    directory: RunDirectory,
    *,
    steps: int,
    replacements: int,
    how: str,
    failure: FailureRecord | None,
    rank: int | None,
    ranks: int,
) -> str:
    """The verdict on a job whose replacements are used up.

    Args:
        directory: the run's.
        steps: done so far; -1 for none that is known.
        replacements: that did not help.
        how: the last worker's end.
        failure: the error that it recorded.
        rank: its rank in its last view, None where it was in none.
        ranks: how many computed in that view.
    """
    where = f"at step {steps}" if steps >= 0 else "before its first step"
    text = f"The run is still {where} after {replacements} replacements, the last of which {how}: "
    text += "it would happen again."
    samples = "" if steps < 0 or rank is None or rank >= ranks else _samples(directory, steps, rank, ranks)
    if samples:
        text += f"\n  In step {steps + 1}, rank {rank} computes {samples}."
    if failure is not None and not failure.victim:
        text += f"\n  Its last error: {failure.type}: {failure.message}"
    return text


def _samples(directory: RunDirectory, steps: int, rank: int, ranks: int) -> str:
    """What a rank computes in the step after so many, as far as the run's files tell."""
    try:
        config = directory.read_manifest()["config"]
        order = with_saved_sizes(read_ledger(directory.ledger).order, directory.sample_lengths)
        return of_rank(config, order, steps, rank, ranks)
    except (RunDirectoryError, KeyError, TypeError, ValueError, IndexError):
        # What is said in passing must not hide why the job ends.
        return ""


def of_rank(config: Mapping[str, Any], order: DeterministicSampler | None, steps: int, rank: int, ranks: int) -> str:
    """The micro-batches and samples of a rank in the step after so many; "" where it has none.

    Args:
        config: the run's options.
        order: of the training samples; None for streams, whose samples are counted only.
        steps: done so far.
        rank: who computes.
        ranks: among how many, evenly.
    """
    microbatches = ReductionPlan(int(config["microbatches"]), ranks).microbatches_of(rank)
    named = (
        f"micro-batch {microbatches[0]}"
        if len(microbatches) == 1
        else f"micro-batches {microbatches[0]} to {microbatches[-1]}"
    )
    if order is None:
        return f"{named} of the stream, after about {steps * int(config['global_batch_size'])} samples in all"
    epoch, step = divmod(steps, order.steps_per_epoch)
    bounds = order.microbatch_bounds(step)[microbatches.start : microbatches.stop]
    return f"{named}: {order.describe(epoch, bounds[0][0], bounds[-1][1])}" if bounds else ""


# --- What the end of a worker means for its run, and how often it may be made good. Pure ---


ExitClass = Literal["done", "asked", "fatal", "fault"]
"""done: it ended in good order; asked: it died of a signal that the agent passed on; fatal: it would
happen again; fault: a replacement goes on from where the run stands."""

_FATAL = tuple(kind.__name__ for kind in (NonFiniteLossError, CheckpointError, NondeterminismError))


def classify_exit(
    code: int,
    failure: FailureRecord | None,
    *,
    finished: bool,
    stopping: bool,
    progressed: bool,
    distrusted: bool = False,
) -> ExitClass:
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


def is_corruption(failure: FailureRecord | None) -> bool:
    """Whether a worker ended because the others found that it computes wrongly."""
    return failure is not None and failure.type == SilentDataCorruptionError.__name__


def describe_code(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name if -code in signal.valid_signals() else -code}"


@dataclass
class RestartBudget:
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


# --- What the ends of workers come to: faults that are made good, or the end of the job. No torch ---


class FailurePolicy:
    """Of one job.

    Args:
        directory: the run's.
        budget: replacements that are left.

    Attributes:
        budget: as given.
        recoveries: workers lost so far.
        verdict: why the job is ended; "" where it is not.
    """

    def __init__(self, directory: RunDirectory, budget: RestartBudget) -> None:
        self._directory, self.budget = directory, budget
        self.recoveries = 0
        self.reason = ""
        self._exits: list[ProcessExit] = []  # those that decide the job's exit code
        self._lost: list[ProcessExit] = []  # faults after which nobody was started
        self._distrusted: set[int] = set()  # slots whose worker was found to compute wrongly

    def classify(self, end: Ended, *, stopping: bool, newcomer: bool) -> ExitClass | Literal["unfit"]:
        """What an end means; of a fault, :meth:`may_go_on` is to be asked too.

        Args:
            end: of a worker that was not retired in good order.
            stopping: the workers were told to stop.
            newcomer: its machine never took part, and others do.

        Returns:
            "unfit" where a newcomer failed by itself: the job goes on without its machine.
        """
        what = classify_exit(
            end.code,
            end.failure,
            finished=self._directory.result.is_file(),
            stopping=stopping,
            progressed=self.budget.progressed,
            distrusted=end.local_index in self._distrusted,
        )
        if is_corruption(end.failure):
            self._distrusted.add(end.local_index)
        by_itself = not end.killed and end.failure is not None and not end.failure.victim
        if what != "done" and newcomer and by_itself and not stopping:
            return "unfit"
        if what == "fault" and stopping and end.killed:
            what = "asked"
        if what == "done":
            self._exits.append(ProcessExit(end.local_index, max(end.code, 0), time.time()))
        elif what != "fault":
            self._exits.append(ProcessExit(end.local_index, end.code, time.time(), stopped=what == "asked"))
        return what

    def rejection_message(self, end: Ended) -> str:
        """What to tell a newcomer's machine."""
        assert end.failure is not None
        what_failed = describe(end.failure, self._directory)
        return f"this machine cannot take part in the run, and the others go on:\n  {what_failed}"

    def may_go_on(
        self, end: Ended, view: WorkerGroup | None, *, hiring: bool, again: bool = False, shared: bool = False
    ) -> bool:
        """Whether the job goes on after a fault; else :attr:`verdict` says why not.

        Args:
            end: the fault.
            view: the current one.
            hiring: whether anybody is started in its place.
            again: this fault was counted before, when another end told of it.
            shared: it ended because of another's fault.
        """
        if again:
            if not self.budget.overspent:
                return True
        else:
            self.recoveries += 1
            if not hiring:
                self._lost.append(ProcessExit(end.local_index, end.code, time.time()))
                return True
            if end.retired or self.budget.spend():
                return True
        if not shared:
            self._exits.append(ProcessExit(end.local_index, end.code, time.time()))
        members = () if view is None else view.members
        self.reason = describe_crash_loop(
            self._directory,
            steps=self.budget.step,
            replacements=self.budget.most,
            how=describe_end(end),
            failure=end.failure,
            rank=members.index(end.worker) if end.worker in members else None,
            ranks=len(members) if view is None or view.active is None else view.active,
        )
        return False

    def conclude(self, asked: int | None) -> int:
        """Print one message if the job failed; return its exit code.

        Args:
            asked: the signal that asked it to stop.
        """
        return report_job_failure(self._directory, self._exits or self._lost, asked, self.reason)


def describe_end(end: Ended) -> str:
    """A fault in words."""
    return end.killed or describe_code(end.code)
