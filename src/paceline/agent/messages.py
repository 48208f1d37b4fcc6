"""What agents tell each other, as JSON objects over links. No torch.

Reading is apart from acting on it: what cannot be read is the sender's fault, and it is dropped for that;
what goes wrong afterwards is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from paceline.agent.reports import Ended, Order, Orders, Said
from paceline.distributed.process import to_failure
from paceline.errors import PacelineError
from paceline.membership import votes
from paceline.membership.channel import ChannelError, from_document, to_document
from paceline.membership.roster import Term
from paceline.membership.views import Seat, Status


class MessageError(PacelineError):
    """What came from another agent can be no message: it is another version, or out of its mind."""


@dataclass(frozen=True)
class Ordered:
    """Leader to follower: an order for its node.

    Attributes:
        term: the leader's; an agent that has promised a higher one does not obey.
        order: a method of :class:`~paceline.agent.reports.Orders`.
        arguments: what it is called with.
    """

    term: Term
    order: Literal["start", "tell", "kill", "stop", "kill_all"]
    arguments: tuple[Any, ...]

    def carry_out(self, node: Orders) -> None:
        """Do as is ordered."""
        getattr(node, self.order)(*self.arguments)


@dataclass(frozen=True)
class Reported:
    """Follower to leader: a worker of its node has sent this."""

    worker: int
    message: Said


@dataclass(frozen=True)
class Workers:
    """Follower to leader: all that its node has; who is not in the roster asks to be admitted with it.

    Attributes:
        nproc: how many there shall be for computing.
        seats: by worker: the generation that it was in last, -1 for none, and what it does now.
    """

    nproc: int
    seats: Mapping[int, tuple[int, Seat]]


@dataclass(frozen=True)
class Clear:
    """To the node of the term that was promised: no worker here acts in a view that was formed before."""

    term: Term


@dataclass(frozen=True)
class Signalled:
    """Follower to leader: this signal asks its machine to stop."""

    signal: int


@dataclass(frozen=True)
class Book:
    """Leader to followers: where all agents listen, in the order in which they came."""

    agents: tuple[tuple[str, tuple[str, int]], ...]


@dataclass(frozen=True)
class Over:
    """Leader to follower: the job has ended, as far as that machine has a part in it."""

    code: int


@dataclass(frozen=True)
class SeenOff:
    """Leader to follower: it will be taken out of the roster, as it was asked to leave."""


@dataclass(frozen=True)
class SentHome:
    """Leader to who wants to join: it cannot."""

    why: str


Message = (
    Ordered
    | Reported
    | Ended
    | Workers
    | Clear
    | Signalled
    | Book
    | Over
    | SeenOff
    | SentHome
    | votes.Message
)


def write(message: Message) -> dict[str, Any]:
    """A message as a JSON object."""
    match message:
        case Ordered(term, "tell" as order, (worker, told)):
            return _ordered(term, order, worker, to_document(told))
        case Ordered(term, order, arguments):
            return _ordered(term, order, *arguments)
        case Reported(worker, said):
            return {"kind": "said", "worker": worker, "message": to_document(said)}
        case Ended():
            return {"kind": "ended", **asdict(message)}
        case Workers(nproc, seats):
            listed = [[worker, generation, s.slot, s.status] for worker, (generation, s) in seats.items()]
            return {"kind": "workers", "nproc": nproc, "workers": listed}
        case Clear(term):
            return {"kind": "clear", "term": [term.number, term.node]}
        case Signalled(number):
            return {"kind": "signalled", "signal": number}
        case Book(agents):
            return {"kind": "book", "agents": [[name, *address] for name, address in agents]}
        case Over(code):
            return {"kind": "over", "code": code}
        case SeenOff():
            return {"kind": "seen off"}
        case SentHome(why):
            return {"kind": "sent home", "why": why}
        case _:
            return votes.encode(message)


def _ordered(term: Term, order: str, *arguments: Any) -> dict[str, Any]:
    return {"kind": "order", "term": [term.number, term.node], "order": order, "arguments": list(arguments)}


def read(document: Mapping[str, Any]) -> Message:
    """The message of a JSON object.

    Raises:
        MessageError: it is none.
    """
    try:
        match document:
            case {"kind": "order", "term": term, "order": order, "arguments": arguments}:
                return _order(_term(term), order, arguments)
            case {"kind": "said", "worker": int(worker), "message": said}:
                return Reported(worker, _said(said))
            case {"kind": "ended", **values}:
                return _ended(values)
            case {"kind": "workers", "nproc": int(nproc), "workers": list(listed)}:
                return Workers(nproc, dict(_seat(item) for item in listed))
            case {"kind": "clear", "term": term}:
                return Clear(_term(term))
            case {"kind": "signalled", "signal": int(number)}:
                return Signalled(number)
            case {"kind": "book", "agents": list(agents)}:
                return Book(tuple(_agent(item) for item in agents))
            case {"kind": "over", "code": int(code)}:
                return Over(code)
            case {"kind": "seen off"}:
                return SeenOff()
            case {"kind": "sent home", "why": str(why)}:
                return SentHome(why)
            case _:
                return votes.decode(document)
    except (ValueError, TypeError, ChannelError, votes.VoteError) as error:
        raise MessageError(f"an agent's message cannot be read: {str(document)[:200]}") from error


def _order(term: Term, order: Any, arguments: Any) -> Ordered:
    match order, arguments:
        case "start", [int(worker), int(slot)]:
            return Ordered(term, "start", (worker, slot))
        case "tell", [int(worker), document]:
            told = from_document(document)
            if isinstance(told, Order):
                return Ordered(term, "tell", (worker, told))
        case "kill", [int(worker), str(why)]:
            return Ordered(term, "kill", (worker, why))
        case "stop", [int(number)]:
            return Ordered(term, "stop", (number,))
        case "kill_all", [str(why)]:
            return Ordered(term, "kill_all", (why,))
    raise ValueError("an unknown order")


def _said(document: Any) -> Said:
    message = from_document(document)
    if not isinstance(message, Said):
        raise ValueError("an agent's message, where a worker's should be")
    return message


def _ended(values: dict[str, Any]) -> Ended:
    match values:
        case {
            "worker": int(),
            "slot": int(),
            "pid": int() | None,
            "code": int(),
            "killed": str(),
            "silent_s": int() | float(),
            "step": int(),
            "retired": bool(),
            "failure": failure,
        }:
            return Ended(**{**values, "failure": None if failure is None else to_failure(failure)})
    raise ValueError("no worker's end")


def _seat(item: Any) -> tuple[int, tuple[int, Seat]]:
    match item:
        case [int(worker), int(generation), int(slot), status] if status in get_args(Status):
            return worker, (generation, Seat(slot, status))
    raise ValueError("no worker")


def _agent(item: Any) -> tuple[str, tuple[str, int]]:
    match item:
        case [str(name), str(host), int(port)]:
            return name, (host, port)
    raise ValueError("no agent")


def _term(value: Any) -> Term:
    match value:
        case [int(number), str(node)]:
            return Term(number, node)
    raise ValueError("no term")
