"""Another machine's node, as its leader sees it. No torch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.agent.messages import Ordered
from paceline.agent.reports import Order
from paceline.membership.roster import Term


class RemoteNode:
    """Takes :class:`~paceline.agent.reports.Orders` to the agent that carries them out.

    Args:
        send: over the link to that agent.
        term: the leader's.
    """

    def __init__(self, send: Callable[[Ordered], None], term: Term) -> None:
        self._send = send
        self._term = term

    def start(self, number: int, slot: int) -> None:
        """Start a worker."""
        self._send(Ordered(self._term, "start", (number, slot)))

    def tell(self, number: int, order: Order) -> None:
        """Tell a worker something."""
        self._send(Ordered(self._term, "tell", (number, order)))

    def kill(self, number: int, why: str) -> None:
        """Fence a worker."""
        self._send(Ordered(self._term, "kill", (number, why)))

    def stop(self, number: int) -> None:
        """Signal all workers."""
        self._send(Ordered(self._term, "stop", (number,)))

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
        self._send(Ordered(self._term, "kill_all", (why,)))
