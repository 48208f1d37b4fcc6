"""What a leading agent tells the others, and they it, as JSON objects over links. No torch.

Orders name the leader's term: an agent that has promised a higher one obeys them no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, get_args

from paceline.agent.node import Ended, Node, Order, Reports, Said
from paceline.distributed.process import Failure
from paceline.errors import PacelineError
from paceline.membership.channel import ChannelError, from_document, to_document
from paceline.membership.coordinator import Seat, Status
from paceline.membership.roster import Term


class OrderError(PacelineError):
    """What came from another agent can be no order and no report."""


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


class RemoteNode:
    """Another machine's node.

    Args:
        send: over the link to its agent.
        term: the leader's.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None], term: Term) -> None:
        self._send = send
        self._term = [term.number, term.node]

    def start(self, number: int, slot: int) -> None:
        """Start a worker."""
        self._order("start", number, slot)

    def tell(self, number: int, order: Order) -> None:
        """Tell a worker something."""
        self._order("tell", number, to_document(order))

    def kill(self, number: int, why: str) -> None:
        """Fence a worker."""
        self._order("kill", number, why)

    def stop(self, number: int) -> None:
        """Signal all workers."""
        self._order("stop", number)

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
        self._order("kill_all", why)

    def _order(self, order: str, *arguments: Any) -> None:
        self._send({"kind": "order", "term": self._term, "order": order, "arguments": arguments})


def obey(message: Mapping[str, Any], followed: Term, node: Node) -> None:
    """Carry out an order, unless it is of another term than the one that is followed.

    Raises:
        OrderError: it is none.
    """
    try:
        number, name = message["term"]
        arguments = list(message["arguments"])
        if Term(int(number), str(name)) != followed:
            return
        match message["order"], arguments:
            case "start", [int(worker), int(slot)]:
                node.start(worker, slot)
            case "tell", [int(worker), order]:
                told = from_document(order)
                if not isinstance(told, Order):
                    raise OrderError(f"an order that is a worker's message: {order}")
                node.tell(worker, told)
            case "kill", [int(worker), str(why)]:
                node.kill(worker, why)
            case "stop", [int(signal)]:
                node.stop(signal)
            case "kill_all", [str(why)]:
                node.kill_all(why)
            case _:
                raise OrderError(f"an unknown order: {str(message)[:200]}")
    except (KeyError, TypeError, ValueError, ChannelError) as error:
        raise OrderError(f"an order cannot be read: {str(message)[:200]}") from error


def said(worker: int, message: Said) -> dict[str, Any]:
    """The report of what a worker sent."""
    return {"kind": "said", "worker": worker, "message": to_document(message)}


def ended(end: Ended) -> dict[str, Any]:
    """The report of a worker's end."""
    return {"kind": "ended", **asdict(end)}


def workers(nproc: int, seats: Mapping[int, tuple[int, Seat]]) -> dict[str, Any]:
    """The report of all workers that a node has."""
    listed = [[number, generation, s.slot, s.status] for number, (generation, s) in seats.items()]
    return {"kind": "workers", "nproc": nproc, "workers": listed}


def report(message: Mapping[str, Any], hearer: Reports) -> None:
    """Pass a worker's report on.

    Raises:
        OrderError: it is none.
    """
    try:
        if message["kind"] == "said":
            inner = from_document(message["message"])
            if not isinstance(inner, Said):
                raise OrderError(f"a report that is an agent's message: {str(message)[:200]}")
            hearer.said(int(message["worker"]), inner)
        else:
            values = {name: value for name, value in message.items() if name != "kind"}
            failure = values.pop("failure")
            hearer.ended(Ended(**values, failure=None if failure is None else Failure(**failure)))
    except (KeyError, TypeError, ValueError, ChannelError) as error:
        raise OrderError(f"a report cannot be read: {str(message)[:200]}") from error


def read_workers(message: Mapping[str, Any]) -> tuple[int, int, dict[int, Seat]]:
    """A node's number of processes, the last generation that it knows of, and its workers.

    Raises:
        OrderError: it is no such report.
    """
    try:
        seats = {int(w): Seat(int(slot), status) for w, _, slot, status in message["workers"]}
        if not all(seat.status in get_args(Status) for seat in seats.values()):
            raise ValueError
        generation = max((int(g) for _, g, _, _ in message["workers"]), default=-1)
        return int(message["nproc"]), generation, seats
    except (KeyError, TypeError, ValueError) as error:
        raise OrderError(f"a report cannot be read: {str(message)[:200]}") from error
