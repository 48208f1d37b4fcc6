"""What the ends of workers come to: faults that are made good, or the end of the job. No torch."""

from __future__ import annotations

import time
from typing import Literal

from paceline.agent.policy import Budget, Meaning, describe_code, is_corruption, meaning
from paceline.agent.repetition import describe_repetition
from paceline.agent.reports import Ended
from paceline.distributed.process import describe
from paceline.launchers.local.failures import Exit, conclude
from paceline.membership.views import View
from paceline.run_directory import RunDirectory


class Judgement:
    """Of one job.

    Args:
        directory: the run's.
        budget: replacements that are left.

    Attributes:
        budget: as given.
        recoveries: workers lost so far.
        verdict: why the job is ended; "" where it is not.
    """

    def __init__(self, directory: RunDirectory, budget: Budget) -> None:
        self._directory, self.budget = directory, budget
        self.recoveries = 0
        self.verdict = ""
        self._exits: list[Exit] = []  # those that decide the job's exit code
        self._lost: list[Exit] = []  # faults after which nobody was started
        self._distrusted: set[int] = set()  # slots whose worker was found to compute wrongly

    def of(self, end: Ended, *, stopping: bool, newcomer: bool) -> Meaning | Literal["unfit"]:
        """What an end means; of a fault, :meth:`may_go_on` is to be asked too.

        Args:
            end: of a worker that was not retired in good order.
            stopping: the workers were told to stop.
            newcomer: its machine never took part, and others do.

        Returns:
            "unfit" where a newcomer failed by itself: the job goes on without its machine.
        """
        what = meaning(
            end.code,
            end.failure,
            finished=self._directory.result.is_file(),
            stopping=stopping,
            progressed=self.budget.progressed,
            distrusted=end.slot in self._distrusted,
        )
        if is_corruption(end.failure):
            self._distrusted.add(end.slot)
        by_itself = not end.killed and end.failure is not None and not end.failure.victim
        if what != "done" and newcomer and by_itself and not stopping:
            return "unfit"
        if what == "fault" and stopping and end.killed:
            what = "asked"
        if what == "done":
            self._exits.append(Exit(end.slot, max(end.code, 0), time.time()))
        elif what != "fault":
            self._exits.append(Exit(end.slot, end.code, time.time(), stopped=what == "asked"))
        return what

    def why_unfit(self, end: Ended) -> str:
        """What to tell a newcomer's machine."""
        assert end.failure is not None
        what_failed = describe(end.failure, self._directory)
        return f"this machine cannot take part in the run, and the others go on:\n  {what_failed}"

    def may_go_on(
        self, end: Ended, view: View | None, *, hiring: bool, again: bool = False, shared: bool = False
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
                self._lost.append(Exit(end.slot, end.code, time.time()))
                return True
            if end.retired or self.budget.spend():
                return True
        if not shared:
            self._exits.append(Exit(end.slot, end.code, time.time()))
        members = () if view is None else view.members
        self.verdict = describe_repetition(
            self._directory,
            steps=self.budget.step,
            replacements=self.budget.most,
            how=how_it_ended(end),
            failure=end.failure,
            rank=members.index(end.worker) if end.worker in members else None,
            ranks=len(members) if view is None or view.computing is None else view.computing,
        )
        return False

    def conclude(self, asked: int | None) -> int:
        """Print one message if the job failed; return its exit code.

        Args:
            asked: the signal that asked it to stop.
        """
        return conclude(self._directory, self._exits or self._lost, asked, self.verdict)


def how_it_ended(end: Ended) -> str:
    """A fault in words."""
    return end.killed or describe_code(end.code)
