"""What agents say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from paceline.core.errors import PacelineError
from paceline.elastic.coordinator import Status, WorkerSlot
from paceline.elastic.node import Ended, NodeCommands, Order, Said

# --- Rosters: which nodes there are, and which of them decide. No torch ---
#
# A *roster* is the ordered set of nodes of a job; rosters follow each other by number (*generation*), and
# the next one is decided by a quorum of the one before. Any two quorums of a roster have a node in common:
# they are its strict majorities and, where a tie was broken, the one half that won it for ever
# (:mod:`paceline.elastic.consensus.witness`).


class Term(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One node's leadership; higher ones depose lower ones.

    It names its node, so no two nodes can ever lead in the same term (a *ballot* in Paxos).
    """

    number: int
    node: str


NO_TERM = Term(0, "")  # before the first


class NodeSet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The nodes of a job.

    Attributes:
        generation: rises by one with every roster. All agree on what a generation's roster is, once it
            is committed.
        nodes: in the listed order, which is the order of succession. A name stands for one agent
            process: one that was left out, or started again, comes back under another name.
    """

    config_epoch: int
    nodes: tuple[str, ...]


class Vote(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


class AgentMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """What is read as one has all its fields, each of its type, and no other."""


class Prepare(AgentMessage, frozen=True, tag="claim"):
    """The sender asks to lead in this term; there is no answer from who has a leader that it can reach."""

    term: Term
    committed: NodeSet


class Promise(AgentMessage, frozen=True, tag="promise"):
    """The sender follows nobody of a lower term any more.

    Attributes:
        accepted: what it has accepted to follow ``committed``; it may be committed without its knowing.
    """

    term: Term
    committed: NodeSet
    accepted: Vote | None


class Nack(AgentMessage, frozen=True, tag="refuse"):
    """The sender does not do what was asked of it.

    Attributes:
        term: of what was asked.
        promised: the sender's own.
    """

    term: Term
    committed: NodeSet
    promised: Term


class Accept(AgentMessage, frozen=True, tag="propose"):
    """The sender proposes the roster that is to follow ``committed``."""

    term: Term
    committed: NodeSet
    node_set: NodeSet


class Accepted(AgentMessage, frozen=True, tag="accept"):
    """The sender has accepted the proposal of this term for this generation."""

    term: Term
    committed: NodeSet
    generation: int


class LeaderHeartbeat(AgentMessage, frozen=True, tag="announce"):
    """The term's node leads, or has led if it is in ``committed`` no more."""

    term: Term
    committed: NodeSet


class StepDown(AgentMessage, frozen=True, tag="resign"):
    """The term's node leads no more: too few of the roster can be reached from it."""

    term: Term
    committed: NodeSet


ElectionMessage = Prepare | Promise | Nack | Accept | Accepted | LeaderHeartbeat | StepDown


# --- What agents tell each other, as JSON objects over links. No torch ---
#
# Reading is apart from acting on it: what cannot be read is the sender's fault, and it is dropped for that;
# what goes wrong afterwards is ours.


class MessageError(PacelineError):
    """What came from another agent can be no message: it is another version, or out of its mind."""


class NodeCommand(AgentMessage, frozen=True, tag="order"):
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


class WorkerEvent(AgentMessage, frozen=True, tag="said"):
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


class Quiesced(AgentMessage, frozen=True, tag="clear"):
    """To the node of the term that was promised: no worker here acts in a view that was formed before."""

    term: Term


class SignalReceived(AgentMessage, frozen=True, tag="signalled"):
    """Follower to leader: this signal asks its machine to stop."""

    signal: int


class AddressBook(AgentMessage, frozen=True, tag="book"):
    """Leader to followers: where all agents listen, in the order in which they came."""

    agents: tuple[tuple[str, tuple[str, int]], ...]


class JobFinished(AgentMessage, frozen=True, tag="over"):
    """Leader to follower: the job has ended, as far as that machine has a part in it."""

    code: int


class Removed(AgentMessage, frozen=True, tag="seen off"):
    """Leader to follower: it will be taken out of the roster, as it was asked to leave."""


class Rejected(AgentMessage, frozen=True, tag="sent home"):
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


class _WorkerRows(AgentMessage, frozen=True, tag="workers"):
    """How a :class:`WorkerList` travels: in JSON no key is a number."""

    nproc: int
    workers: tuple[tuple[int, int, int, Status], ...]


_Sent = (
    NodeCommand
    | WorkerEvent
    | Ended
    | _WorkerRows
    | Quiesced
    | SignalReceived
    | AddressBook
    | JobFinished
    | Removed
    | Rejected
    | ElectionMessage
)

_ARGUMENTS: dict[str, Any] = {
    "start": tuple[int, int],
    "send": tuple[int, Order],
    "kill": tuple[int, str],
    "stop": tuple[int],
    "kill_all": tuple[str],
}


def write(message: Message) -> dict[str, Any]:
    """A message as a JSON object."""
    sent: _Sent
    if isinstance(message, WorkerList):
        rows = ((worker, group, slot.local_index, slot.status) for worker, (group, slot) in message.seats.items())
        sent = _WorkerRows(message.nproc, tuple(rows))
    else:
        sent = message
    document: dict[str, Any] = msgspec.to_builtins(sent)
    return document


def read(document: Mapping[str, Any]) -> Message:
    """The message of a JSON object.

    Raises:
        MessageError: it is none.
    """
    try:
        message: _Sent = msgspec.convert(document, _Sent)
        if isinstance(message, NodeCommand):
            arguments = msgspec.convert(message.arguments, _ARGUMENTS[message.order])
            return msgspec.structs.replace(message, arguments=arguments)
    except ValueError as error:
        raise MessageError(f"an agent's message cannot be read ({error}): {str(document)[:200]}") from error
    if isinstance(message, _WorkerRows):
        seats = {worker: (group, WorkerSlot(index, status)) for worker, group, index, status in message.workers}
        return WorkerList(message.nproc, seats)
    return message
