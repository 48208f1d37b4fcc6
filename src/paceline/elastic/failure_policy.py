"""The policy after a failure: a replacement, a rejection, or the end of the job; and the record of recoveries."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from paceline.core.standard_streams import print_status
from paceline.data.ledger import read_ledger
from paceline.data.order import restore_order
from paceline.elastic.group_planner import WorkerGroup
from paceline.elastic.node import Ended
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.runs.directory import EpochSteps, RunDirectory
from paceline.runs.failures import STOPPED, FailureRecord, ProcessExit, advise, describe, report_job_failure

if TYPE_CHECKING:
    from paceline.data.order import DeterministicSampler


# --- The message about a crash loop: the step, its samples and the error. No torch


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
    """Describe a job whose replacements are used up.

    Args:
        steps: steps done; -1 if unknown.
        how: the last worker's end.
        failure: the error that it recorded.
        rank: its rank in its last group, or None.
        ranks: number of active ranks in that group.
    """
    position = f"at step {steps}" if steps >= 0 else "before its first step"
    text = f"The run is still {position} after {replacements} replacements, the last of which {how}: "
    text += " ".join(["another one would fail the same way.", *advise(how)])
    samples = "" if steps < 0 or rank is None or rank >= ranks else _samples(directory, steps, rank, ranks)
    if samples:
        text += f"\n  In step {steps + 1}, rank {rank} computes {samples}."
    if failure is not None and not failure.victim:
        text += f"\n  Its last error: {failure.type}: {failure.message}"
    return text


def _samples(directory: RunDirectory, steps: int, rank: int, ranks: int) -> str:
    """Describe the samples of a rank in the step after ``steps``, as far as the run's files contain them."""
    try:
        manifest = directory.read_manifest()
        order = restore_order(read_ledger(directory.ledger).order, directory)
        return of_rank(manifest, order, steps, rank, ranks)
    except (RunDirectoryError, KeyError, TypeError, ValueError, IndexError):
        # This extra information must not hide why the job ends.
        return ""


def of_rank(manifest: Mapping[str, Any], order: DeterministicSampler | None, steps: int, rank: int, ranks: int) -> str:
    """Describe the micro-batches and samples of a rank in the step after ``steps``; "" if it has none.

    Args:
        manifest: the content of ``run.toml``.
        order: of the training samples; None for streams, whose samples are only counted.
        steps: steps done.
        ranks: number of ranks, with an equal split.
    """
    config, epochs = manifest["config"], EpochSteps.of(manifest)
    microbatches = ReductionPlan(int(config["microbatches"]), ranks).microbatches_of(rank)
    named = (
        f"micro-batch {microbatches[0]}"
        if len(microbatches) == 1
        else f"micro-batches {microbatches[0]} to {microbatches[-1]}"
    )
    if order is None or epochs is None:
        return f"{named} of the stream, after about {steps * int(config['global_batch_size'])} samples in all"
    epoch, step = epochs.position(steps)
    bounds = order.microbatch_bounds(step)[microbatches.start : microbatches.stop]
    return f"{named}: {order.describe(epoch, bounds[0][0], bounds[-1][1])}" if bounds else ""


# --- The classification of a worker's exit, and the restart budget. Pure ---


ExitClass = Literal["done", "asked", "fatal", "fault"]
"""done: a normal end; asked: killed by a forwarded stop signal; fatal: it would fail again; fault: a replacement
continues the run."""

_FATAL = tuple(kind.__name__ for kind in (NonFiniteLossError, CheckpointError, NondeterminismError))


def is_corruption(failure: FailureRecord | None) -> bool:
    """Return whether a worker ended because the others found that it computes wrongly."""
    return failure is not None and failure.type == SilentDataCorruptionError.__name__


@dataclass
class RestartBudget:
    """The remaining replacements; progress refills the budget.

    Attributes:
        most: maximum number of replacements without progress.
        first: the step at which the job began, None before any worker reported one.
        step: the highest reported step.
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
        """Report the steps that a worker has done; -1: unknown."""
        if step > self.step:
            self.first = step if self.first is None else self.first
            self.step = step
            self.spent = 0

    def spend(self) -> bool:
        """Use one replacement; return False if none is left."""
        self.spent += 1
        return not self.overspent

    @property
    def overspent(self) -> bool:
        """Whether the budget is exceeded."""
        return self.spent > self.most


# --- The policy of one job. No torch ---


class FailurePolicy:
    """Decides whether a job continues after a worker's exit.

    Attributes:
        recoveries: workers lost so far.
        reason: why the job ends; "" if it does not.
    """

    def __init__(self, directory: RunDirectory, budget: RestartBudget) -> None:
        self._directory = directory
        self.budget = budget
        self.recoveries = 0
        self.reason = ""
        self._exits: list[ProcessExit] = []  # exits that determine the job's exit code
        self._lost: list[ProcessExit] = []  # faults without a replacement
        self._distrusted: set[int] = set()  # local indices of workers that computed wrongly

    def is_unfit(self, end: Ended, *, stopping: bool) -> bool:
        """Return whether a worker of a new node failed by itself, so that the job continues without the node."""
        by_itself = not end.killed and end.failure is not None and not end.failure.victim
        return by_itself and not stopping and self._exit_class(end, stopping) != "done"

    def classify(self, end: Ended, *, stopping: bool) -> ExitClass:
        """Classify an exit; for a fault, also call :meth:`may_go_on`.

        Args:
            end: of a worker that was not retired.
            stopping: whether the workers got the order to stop.
        """
        exit_class = self._exit_class(end, stopping)
        if is_corruption(end.failure):
            self._distrusted.add(end.local_index)
        if exit_class == "fault" and stopping and end.killed:
            exit_class = "asked"
        if exit_class == "done":
            self._exits.append(_exit_of(end, code=max(end.code, 0)))
        elif exit_class != "fault":
            self._exits.append(_exit_of(end, stopped=exit_class == "asked"))
        return exit_class

    def _exit_class(self, end: Ended, stopping: bool) -> ExitClass:
        failure, progressed = end.failure, self.budget.progressed  # an exception before the first step is a bug
        if end.code == 0 or end.code in STOPPED or end.finished:
            return "done"
        if stopping and -end.code in WORKER_STOP_SIGNALS:
            return "asked"
        if end.code < 0:
            return "fault"
        if failure is None:
            # Paceline never exits so; the cause is os._exit() in the user's code, or a broken interpreter.
            return "fault" if progressed else "fatal"
        if is_corruption(failure):
            # An earlier worker in its place computed wrongly too: the device does.
            return "fatal" if end.local_index in self._distrusted else "fault"
        if failure.user_error or failure.type in _FATAL:
            return "fatal"
        return "fault" if failure.victim or progressed else "fatal"

    def rejection_message(self, end: Ended) -> str:
        """Return the message for a newcomer's node."""
        assert end.failure is not None
        what_failed = describe(end.failure, self._directory)
        return f"this node cannot take part in the run; the other nodes continue:\n  {what_failed}"

    def may_go_on(
        self, end: Ended, group: WorkerGroup | None, *, may_spawn: bool, again: bool = False, shared: bool = False
    ) -> bool:
        """Return whether the job continues after a fault; if not, :attr:`reason` explains.

        Args:
            may_spawn: whether a replacement is started.
            again: whether this fault was already counted with another exit.
            shared: whether it is the consequence of another worker's fault.
        """
        if again:
            if not self.budget.overspent:
                return True
        else:
            self.recoveries += 1
            if not may_spawn:
                self._lost.append(_exit_of(end))
                return True
            if end.retired or self.budget.spend():
                return True
        if not shared:
            self._exits.append(_exit_of(end))
        workers = () if group is None else group.workers
        self.reason = describe_crash_loop(
            self._directory,
            steps=self.budget.step,
            replacements=self.budget.most,
            how=describe_end(end),
            failure=end.failure,
            rank=workers.index(end.worker) if end.worker in workers else None,
            ranks=len(workers) if group is None else group.active,
        )
        return False

    def conclude(self, asked: int | None) -> int:
        """Print one message if the job failed; return its exit code.

        Args:
            asked: the signal that requested the stop.
        """
        return report_job_failure(self._directory, self._exits or self._lost, asked, self.reason)


def _exit_of(end: Ended, *, code: int | None = None, stopped: bool = False) -> ProcessExit:
    code = end.code if code is None else code
    return ProcessExit(end.local_index, code, time.time(), stopped, failure=end.failure)


def describe_end(end: Ended) -> str:
    """Describe a fault."""
    if end.killed or end.code >= 0:
        return end.killed or f"exited with status {end.code}"
    return f"was killed by {signal.Signals(-end.code).name if -end.code in signal.valid_signals() else -end.code}"


# --- Restart recovery: the loss of one member ends all members of a group. No torch ---


_WITH_PEERS = "ended with its peers"


class RestartAllPolicy:
    """Ends the members of a group together, and groups their exits into one fault.

    Args:
        kill: ends workers, with a reason.
    """

    def __init__(self, kill: Callable[[Iterable[int], str], None]) -> None:
        self._kill = kill
        self._generation = -1  # the generation being killed and restarted
        self._counted = -1  # the generation whose fault was counted

    def end(self, generation: int, workers: Iterable[int]) -> None:
        """Kill these workers of a group, so that none survives into the next one."""
        self._generation = generation
        self._kill(workers, _WITH_PEERS)

    def shares_fault(self, end: Ended, generation: int) -> bool:
        """Return whether a worker ended because another member of the current group was lost."""
        with_peers = end.killed == _WITH_PEERS or (end.failure is not None and end.failure.victim)
        return self._generation == generation and with_peers

    def counts(self, generation: int) -> bool:
        """Return whether a fault of this group is its first; further exits belong to the same restart."""
        first = self._counted != generation
        self._counted = generation
        return first


# --- The record of a run's recoveries: the end of each group, and the time that the next one took. No torch ---


class RecoveryLog:
    """Records the groups that one leader forms.

    Args:
        first: the job's first generation, which replaces no other; -1 if another leader of the job formed it.
    """

    def __init__(self, directory: RunDirectory, first: int) -> None:
        self._directory = directory
        self._first = first
        self._lost_at: float | None = None  # when the group being replaced was broken or left
        self._hit = False  # whether a worker or node was lost since the current group was formed
        self._why = ""  # the reason from the first member that left the current group
        self._joined: set[int] = set()  # members of the current group that have its state
        self._has_told = False  # whether the user knows of a loss, and not yet that all is as before
        self._secondary = ""  # a loss to tell if no root cause is reported

    def record(self, kind: str, **fields: object) -> None:
        self._directory.queue_event(kind, **fields)

    def lost(self, since: float | None = None) -> None:
        """Record that the group is broken or left, now or at ``since`` by the monotonic clock."""
        since = time.monotonic() if since is None else since
        self._lost_at = since if self._lost_at is None else min(since, self._lost_at)

    def hit(self) -> None:
        """Record the loss of a worker or node."""
        self._hit = True

    def tell(self, loss: str, *, is_root_cause: bool = True) -> None:
        """Tell the user of a loss, and later how training continues.

        It prints a secondary loss when the next group forms, if no root cause was reported until then.
        """
        self._secondary = "" if is_root_cause else loss
        if is_root_cause:
            print_status(loss)
            self._has_told = True

    def left(self, why: str) -> None:
        """Record that a worker has left its group, and why."""
        self._why = self._why or why

    def formed(
        self, group: WorkerGroup, local_indices: Sequence[int], nodes: Sequence[str], step: int, *, is_asked: bool
    ) -> None:
        """Record a new group.

        Args:
            nodes: its members' nodes.
            step: their step; -1 if unknown yet.
            is_asked: whether the members of the last group got the order to leave it.
        """
        if group.generation > self._first:
            if self._secondary:
                self.tell(self._secondary)
            self.record(
                "group",
                generation=group.generation,
                members=list(local_indices),
                world_size=len(group.workers),
                computing=group.active,
                nodes=len(set(nodes)),
                why=self._why,
                recovery=self._hit or not is_asked,
                step=step,
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why = ""
        self._hit = False

    def joined(self, group: WorkerGroup, worker: int, step: int, full_size: int) -> None:
        """Record that a member of the current group has its state; ``full_size``: of a group without losses."""
        self._joined.add(worker)
        if not self.is_whole(group) or group.generation <= self._first:
            return
        seconds = self._since_loss()
        self.record("joined", generation=group.generation, step=step, seconds=seconds)
        self._lost_at = None
        if self._has_told:
            when = f" after step {step}" if step >= 0 else ""
            pause = "" if seconds is None else f", {seconds:.1f} s later"
            size = len(group.workers)
            print_status(f"training continues{when} with {size} worker{'s' if size > 1 else ''}{pause}.")
            self._has_told = len(group.workers) < full_size

    def is_whole(self, group: WorkerGroup | None) -> bool:
        """Return whether all members of the current group have its state."""
        return group is not None and self._joined >= set(group.workers)

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)
