"""What a leader orders of nodes, and what they report to it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.distributed.process import Failure
from paceline.membership.channel import Beat, Broken, Joined, Leave, Place, Reform, Report, Standing, Waits

Order = Place | Reform | Broken | Report | Leave
Said = Beat | Waits | Joined | Standing


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended.

    Attributes:
        code: its exit code; minus the signal's number where one killed it.
        killed: why this node killed it; "" where it did not.
        silent_s: how long it had not been heard when it ended.
        retired: it was told to end, as it is not needed.
        failure: the error that it recorded.
    """

    worker: int
    slot: int
    pid: int | None
    code: int
    killed: str
    silent_s: float
    step: int
    retired: bool
    failure: Failure | None


class Reports(Protocol):
    """Who hears what becomes of workers."""

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""

    def ended(self, end: Ended) -> None:
        """A worker's process has ended; nothing of it acts any more."""


class Orders(Protocol):
    """A node, as its leader sees it: this machine's, or another's behind a link."""

    def start(self, number: int, slot: int) -> None:
        """Start a worker."""

    def tell(self, number: int, order: Order) -> None:
        """Tell a worker something."""

    def kill(self, number: int, why: str) -> None:
        """Fence a worker."""

    def stop(self, number: int) -> None:
        """Signal all workers."""

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
