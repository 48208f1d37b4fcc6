"""What agents say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from paceline.core.errors import PacelineError
from paceline.elastic.coordinator import Status, WorkerSlot
from paceline.elastic.node import Ended, NodeCommands, Order, Said
from paceline.elastic.worker_channel import ChannelError, from_document, to_document
from paceline.runs.failures import to_failure

# --- Rosters: which nodes there are, and which of them decide. No torch ---
#
# A *roster* is the ordered set of nodes of a job; rosters follow each other by number (*generation*), and
# the next one is decided by a quorum of the one before. Any two quorums of a roster have a node in common:
# they are its strict majorities and, where a tie was broken, the one half that won it for ever
# (:mod:`paceline.elastic.consensus.witness`).


@dataclass(frozen=True, order=True)
class Term:
    """One node's leadership; higher ones depose lower ones.

    It names its node, so no two nodes can ever lead in the same term (a *ballot* in Paxos).
    """

    number: int
    node: str


NO_TERM = Term(0, "")  # before the first


@dataclass(frozen=True)
class NodeSet:
    """The nodes of a job.

    Attributes:
        generation: rises by one with every roster. All agree on what a generation's roster is, once it
            is committed.
        nodes: in the listed order, which is the order of succession. A name stands for one agent
            process: one that was left out, or started again, comes back under another name.
    """

    config_epoch: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Vote:
    """A roster that a node has accepted, and the term in which it was proposed."""

    term: Term
    node_set: NodeSet


def is_quorum(roster: NodeSet, nodes: Set[str], winners: Set[str] | None) -> bool:
    """Whether these nodes may decide for the roster.

    Args:
        roster: committed.
        nodes: those who agree; who is not in the roster does not count.
        winners: the half that has won this roster's tie, None where nobody has.
    """
    voters = nodes & set(roster.nodes)
    excess = 2 * len(voters) - len(roster.nodes)
    return excess > 0 or (excess == 0 and voters == winners)


def meets_every_quorum(roster: NodeSet, nodes: Set[str], ties: bool, winners: Set[str] | None) -> bool:
    """Whether no quorum of the roster can come about without one of these nodes.

    Args:
        roster: committed, or proposed.
        nodes: which every quorum must meet.
        ties: whether half of a roster can win a tie at all.
        winners: as for :func:`is_quorum`.
    """
    others = set(roster.nodes) - nodes
    excess = 2 * len(others) - len(roster.nodes)
    return excess < 0 or (excess == 0 and (not ties or (winners is not None and winners != others)))


# --- What the :class:`~paceline.elastic.consensus.paxos.Leadership` of one agent tells that of another. No
#     torch
#
# Every message carries the last roster that its sender knows to be committed, so that whoever hears from
# anybody is up to date. As JSON objects they travel over :class:`~paceline.elastic.consensus.transport.Link`.


@dataclass(frozen=True)
class Prepare:
    """The sender asks to lead in this term; there is no answer from who has a leader that it can reach."""

    kind: ClassVar[str] = "claim"
    term: Term
    committed: NodeSet


@dataclass(frozen=True)
class Promise:
    """The sender follows nobody of a lower term any more.

    Attributes:
        accepted: what it has accepted to follow ``committed``; it may be committed without its knowing.
    """

    kind: ClassVar[str] = "promise"
    term: Term
    committed: NodeSet
    accepted: Vote | None


@dataclass(frozen=True)
class Nack:
    """The sender does not do what was asked of it.

    Attributes:
        term: of what was asked.
        promised: the sender's own.
    """

    kind: ClassVar[str] = "refuse"
    term: Term
    committed: NodeSet
    promised: Term


@dataclass(frozen=True)
class Accept:
    """The sender proposes the roster that is to follow ``committed``."""

    kind: ClassVar[str] = "propose"
    term: Term
    committed: NodeSet
    node_set: NodeSet


@dataclass(frozen=True)
class Accepted:
    """The sender has accepted the proposal of this term for this generation."""

    kind: ClassVar[str] = "accept"
    term: Term
    committed: NodeSet
    generation: int


@dataclass(frozen=True)
class LeaderHeartbeat:
    """The term's node leads, or has led if it is in ``committed`` no more."""

    kind: ClassVar[str] = "announce"
    term: Term
    committed: NodeSet


@dataclass(frozen=True)
class StepDown:
    """The term's node leads no more: too few of the roster can be reached from it."""

    kind: ClassVar[str] = "resign"
    term: Term
    committed: NodeSet


ElectionMessage = Prepare | Promise | Nack | Accept | Accepted | LeaderHeartbeat | StepDown

_KINDS: dict[str, type[Any]] = {
    kind.kind: kind for kind in (Prepare, Promise, Nack, Accept, Accepted, LeaderHeartbeat, StepDown)
}
KINDS = frozenset(_KINDS)


class VoteError(PacelineError):
    """What came from another agent is no message of this protocol."""


def encode(message: ElectionMessage) -> dict[str, Any]:
    """A message as a JSON object; its ``kind`` is one of ``KINDS``."""
    return {"kind": message.kind, **{f.name: _plain(getattr(message, f.name)) for f in fields(message)}}


def decode(document: Mapping[str, Any]) -> ElectionMessage:
    """The message of a JSON object.

    Raises:
        VoteError: it is none.
    """
    try:
        values = dict(document)
        kind = _KINDS[values.pop("kind")]
        message: ElectionMessage = kind(**{name: _READERS[name](value) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise VoteError(f"an agent's message cannot be read: {str(document)[:200]}") from error
    return message


def _plain(value: Any) -> Any:
    match value:
        case Term(number, node):
            return [number, node]
        case NodeSet(generation, nodes):
            return [generation, list(nodes)]
        case Vote(term, roster):
            return [_plain(term), _plain(roster)]
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value


def _parse_term(value: Any) -> Term:
    number, node = _list(value)
    return Term(_int(number), _str(node))


def _node_set(value: Any) -> NodeSet:
    generation, nodes = _list(value)
    return NodeSet(_int(generation), tuple(_str(node) for node in _list(nodes)))


def _vote(value: Any) -> Vote | None:
    if value is None:
        return None
    term, roster = _list(value)
    return Vote(_parse_term(term), _node_set(roster))


_READERS = {
    "term": _parse_term,
    "promised": _parse_term,
    "committed": _node_set,
    "roster": _node_set,
    "accepted": _vote,
    "generation": _int,
}


# --- What agents tell each other, as JSON objects over links. No torch ---
#
# Reading is apart from acting on it: what cannot be read is the sender's fault, and it is dropped for that;
# what goes wrong afterwards is ours.


class MessageError(PacelineError):
    """What came from another agent can be no message: it is another version, or out of its mind."""


@dataclass(frozen=True)
class NodeCommand:
    """Leader to follower: an order for its node.

    Attributes:
        term: the leader's; an agent that has promised a higher one does not obey.
        order: a method of :class:`~paceline.elastic.node.Orders`.
        arguments: what it is called with.
    """

    term: Term
    order: Literal["start", "send", "kill", "stop", "kill_all"]
    arguments: tuple[Any, ...]

    def carry_out(self, node: NodeCommands) -> None:
        """Do as is ordered."""
        getattr(node, self.order)(*self.arguments)


@dataclass(frozen=True)
class WorkerEvent:
    """Follower to leader: a worker of its node has sent this."""

    worker: int
    message: Said


@dataclass(frozen=True)
class WorkerList:
    """Follower to leader: all that its node has; who is not in the roster asks to be admitted with it.

    Attributes:
        nproc: how many there shall be for computing.
        seats: by worker: the generation that it was in last, -1 for none, and what it does now.
    """

    nproc: int
    seats: Mapping[int, tuple[int, WorkerSlot]]


@dataclass(frozen=True)
class Quiesced:
    """To the node of the term that was promised: no worker here acts in a view that was formed before."""

    term: Term


@dataclass(frozen=True)
class SignalReceived:
    """Follower to leader: this signal asks its machine to stop."""

    signal: int


@dataclass(frozen=True)
class AddressBook:
    """Leader to followers: where all agents listen, in the order in which they came."""

    agents: tuple[tuple[str, tuple[str, int]], ...]


@dataclass(frozen=True)
class JobFinished:
    """Leader to follower: the job has ended, as far as that machine has a part in it."""

    code: int


@dataclass(frozen=True)
class Removed:
    """Leader to follower: it will be taken out of the roster, as it was asked to leave."""


@dataclass(frozen=True)
class Rejected:
    """Leader to who wants to join: it cannot."""

    why: str


Message = (
    NodeCommand
    | WorkerEvent
    | Ended
    | WorkerList
    | Quiesced
    | SignalReceived
    | AddressBook
    | JobFinished
    | Removed
    | Rejected
    | ElectionMessage
)


def write(message: Message) -> dict[str, Any]:
    """A message as a JSON object."""
    match message:
        case NodeCommand(term, "send" as order, (worker, told)):
            return _ordered(term, order, worker, to_document(told))
        case NodeCommand(term, order, arguments):
            return _ordered(term, order, *arguments)
        case WorkerEvent(worker, said):
            return {"kind": "said", "worker": worker, "message": to_document(said)}
        case Ended():
            return {"kind": "ended", **asdict(message)}
        case WorkerList(nproc, seats):
            listed = [[worker, generation, s.local_index, s.status] for worker, (generation, s) in seats.items()]
            return {"kind": "workers", "nproc": nproc, "workers": listed}
        case Quiesced(term):
            return {"kind": "clear", "term": [term.number, term.node]}
        case SignalReceived(number):
            return {"kind": "signalled", "signal": number}
        case AddressBook(agents):
            return {"kind": "book", "agents": [[name, *address] for name, address in agents]}
        case JobFinished(code):
            return {"kind": "over", "code": code}
        case Removed():
            return {"kind": "seen off"}
        case Rejected(why):
            return {"kind": "sent home", "why": why}
        case _:
            return encode(message)


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
                return WorkerEvent(worker, _said(said))
            case {"kind": "ended", **values}:
                return _ended(values)
            case {"kind": "workers", "nproc": int(nproc), "workers": list(listed)}:
                return WorkerList(nproc, dict(_seat(item) for item in listed))
            case {"kind": "clear", "term": term}:
                return Quiesced(_term(term))
            case {"kind": "signalled", "signal": int(number)}:
                return SignalReceived(number)
            case {"kind": "book", "agents": list(agents)}:
                return AddressBook(tuple(_agent(item) for item in agents))
            case {"kind": "over", "code": int(code)}:
                return JobFinished(code)
            case {"kind": "seen off"}:
                return Removed()
            case {"kind": "sent home", "why": str(why)}:
                return Rejected(why)
            case _:
                return decode(document)
    except (ValueError, TypeError, ChannelError, VoteError) as error:
        raise MessageError(f"an agent's message cannot be read: {str(document)[:200]}") from error


def _order(term: Term, order: Any, arguments: Any) -> NodeCommand:
    match order, arguments:
        case "start", [int(worker), int(slot)]:
            return NodeCommand(term, "start", (worker, slot))
        case "send", [int(worker), document]:
            told = from_document(document)
            if isinstance(told, Order):
                return NodeCommand(term, "send", (worker, told))
        case "kill", [int(worker), str(why)]:
            return NodeCommand(term, "kill", (worker, why))
        case "stop", [int(number)]:
            return NodeCommand(term, "stop", (number,))
        case "kill_all", [str(why)]:
            return NodeCommand(term, "kill_all", (why,))
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
            "local_index": int(),
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


def _seat(item: Any) -> tuple[int, tuple[int, WorkerSlot]]:
    match item:
        case [int(worker), int(generation), int(slot), status] if status in get_args(Status):
            return worker, (generation, WorkerSlot(slot, status))
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
