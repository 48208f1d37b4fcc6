"""Restart recovery: when one member of a view is lost, all others end with it. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.agent.reports import Ended
from paceline.agent.workforce import Workforce

_WITH_PEERS = "ended with its peers"


class Restart:
    """Ends the members of a view together, and tells which ends are but one fault.

    Args:
        workforce: all workers.
    """

    def __init__(self, workforce: Workforce) -> None:
        self._workforce = workforce
        self._generation = -1  # whose members are being killed, to be started again
        self._counted = -1  # whose fault was counted

    def end(self, generation: int, members: Iterable[int]) -> None:
        """Kill these members of a view: none of them may survive into the next one."""
        self._generation = generation
        self._workforce.kill(members, _WITH_PEERS)

    def shares_fault(self, end: Ended, generation: int) -> bool:
        """Whether a worker ended because another one of the current view was lost."""
        with_peers = end.killed == _WITH_PEERS or (end.failure is not None and end.failure.victim)
        return self._generation == generation and with_peers

    def counts(self, generation: int) -> bool:
        """Whether a fault of this view is its first; the ends of the others belong to the same restart."""
        first = self._counted != generation
        self._counted = generation
        return first
