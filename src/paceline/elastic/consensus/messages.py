"""Messages between agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

import msgspec

from paceline.core.errors import PacelineError
from paceline.elastic.group_planner import WorkerState
from paceline.elastic.node import Ended, NodeCommands, Order, Said

# --- Node sets and quorums. No torch ---
#
# A *node set* is the ordered set of nodes of a job. Node sets are numbered by *config epoch*, and a quorum of each one
# decides the next. Any two quorums of a node set share a node: they are its strict majorities and, after a broken tie,
# the one half that won it for ever (:mod:`paceline.elastic.consensus.witness`).


class Term(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One node's leadership; higher terms depose lower ones.

    It contains its node, so no two nodes can lead in the same term (a *ballot* in Paxos).
    """

    number: int
    node: str


NO_TERM = Term(0, "")  # before the first term


class NodeSet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The nodes of a job.

    Attributes:
        config_epoch: rises by one with every node set. All agents agree on a committed epoch's node set.
        nodes: in the order of succession. A name stands for one agent process: a node that was removed, or restarted,
            comes back under another name.
    """

    config_epoch: int
    nodes: tuple[str, ...]


class Vote(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node set that a node has accepted, and the term of its proposal."""

    term: Term
    node_set: NodeSet


def is_quorum(node_set: NodeSet, nodes: Set[str], winners: Set[str] | None) -> bool:
    """Return whether these nodes may decide for the node set.

    Args:
        node_set: committed.
        nodes: the agreeing nodes; others than the node set's do not count.
        winners: the half that has won this node set's tie, or None.
    """
    voters = nodes & set(node_set.nodes)
    excess = 2 * len(voters) - len(node_set.nodes)
    return excess > 0 or (excess == 0 and voters == winners)


def meets_every_quorum(node_set: NodeSet, nodes: Set[str], ties: bool, winners: Set[str] | None) -> bool:
    """Return whether every quorum of the node set contains one of these nodes.

    Args:
        node_set: committed, or proposed.
        ties: whether half of a node set can win a tie at all.
        winners: as for :func:`is_quorum`.
    """
    other_nodes = set(node_set.nodes) - nodes
    excess = 2 * len(other_nodes) - len(node_set.nodes)
    return excess < 0 or (excess == 0 and (not ties or (winners is not None and winners != other_nodes)))


# --- Messages of the election, between the agents' :class:`~paceline.elastic.consensus.paxos.Leadership`. No torch
#
# Every message contains the last node set that its sender knows to be committed, so any message updates its receiver.
# They are sent as JSON objects over :class:`~paceline.elastic.consensus.transport.AuthenticatedConnection`.


class AgentMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """A message of an agent; the reader checks that all fields are there, of their types, and no other."""


class Prepare(AgentMessage, frozen=True, tag="claim"):
    """The sender wants to lead in this term; nodes with a reachable leader do not answer."""

    term: Term
    committed: NodeSet


class Promise(AgentMessage, frozen=True, tag="promise"):
    """The sender no longer follows lower terms.

    Attributes:
        accepted: its accepted successor of ``committed``, which may be committed without its knowledge.
    """

    term: Term
    committed: NodeSet
    accepted: Vote | None


class Nack(AgentMessage, frozen=True, tag="refuse"):
    """The sender rejects a request.

    Attributes:
        promised: the sender's own.
    """

    term: Term
    committed: NodeSet
    promised: Term


class Accept(AgentMessage, frozen=True, tag="propose"):
    """The sender proposes the successor of ``committed``."""

    term: Term
    committed: NodeSet
    node_set: NodeSet


class Accepted(AgentMessage, frozen=True, tag="accept"):
    """The sender has accepted the proposal of this term for this epoch."""

    term: Term
    committed: NodeSet
    generation: int


class LeaderHeartbeat(AgentMessage, frozen=True, tag="announce"):
    """The term's node leads, or has led if it is no longer in ``committed``."""

    term: Term
    committed: NodeSet


class StepDown(AgentMessage, frozen=True, tag="resign"):
    """The term's node no longer leads, because it cannot reach a quorum."""

    term: Term
    committed: NodeSet


ElectionMessage = Prepare | Promise | Nack | Accept | Accepted | LeaderHeartbeat | StepDown


# --- All messages between agents, as JSON objects. No torch ---
#
# Reading is separate from handling: an unreadable message is the sender's fault, for which it is dropped; later errors
# are this agent's.


class MessageError(PacelineError):
    """A document from another agent is not a message; the agent has another version, or is broken."""


class NodeCommand(AgentMessage, frozen=True, tag="order"):
    """Leader to follower: an order for its node.

    Attributes:
        term: the leader's; an agent that has promised a higher one ignores the order.
        order: a method of :class:`~paceline.elastic.node.NodeCommands`.
    """

    term: Term
    order: Literal["start", "send", "kill", "stop", "kill_all"]
    arguments: tuple[Any, ...]

    def carry_out(self, node: NodeCommands) -> None:
        getattr(node, self.order)(*self.arguments)


class RemoteNode:
    """Sends :class:`~paceline.elastic.node.NodeCommands` to the agent that executes them.

    Args:
        send: sends over the connection to that agent.
        term: the leader's.
    """

    def __init__(self, send: Callable[[NodeCommand], None], term: Term) -> None:
        self._send = send
        self._term = term

    def start(self, number: int, local_index: int) -> None:
        self._send(NodeCommand(self._term, "start", (number, local_index)))

    def send(self, number: int, order: Order) -> None:
        self._send(NodeCommand(self._term, "send", (number, order)))

    def kill(self, number: int, why: str) -> None:
        self._send(NodeCommand(self._term, "kill", (number, why)))

    def stop(self, number: int) -> None:
        self._send(NodeCommand(self._term, "stop", (number,)))

    def kill_all(self, why: str) -> None:
        self._send(NodeCommand(self._term, "kill_all", (why,)))


class WorkerEvent(AgentMessage, frozen=True, tag="said"):
    """Follower to leader: a message of a worker on its node."""

    worker: int
    message: Said


class WorkerList(AgentMessage, frozen=True, tag="workers"):
    """Follower to leader: all its workers; a node outside of the node set requests its admission in this way.

    Attributes:
        nproc: number of active workers.
        workers: each worker's number, its last generation, -1 for none, and its local index and status.
    """

    nproc: int
    workers: tuple[tuple[int, int, WorkerState], ...]


class Quiesced(AgentMessage, frozen=True, tag="clear"):
    """To the node of the promised term: no worker here acts in an earlier group."""

    term: Term


class PeersReached(AgentMessage, frozen=True, tag="reaches"):
    """Follower to leader: all agents that its node is connected to, whenever that changes."""

    peers: tuple[str, ...]


class Excluded(AgentMessage, frozen=True, tag="excluded"):
    """Leader to follower: your node cannot reach these nodes, so your workers wait; empty: they continue."""

    unreachable: tuple[str, ...]


class SignalReceived(AgentMessage, frozen=True, tag="signalled"):
    """Follower to leader: its node received this stop signal."""

    signal: int


class AddressBook(AgentMessage, frozen=True, tag="book"):
    """Leader to followers: all agents' addresses, in the order of their arrival."""

    agents: tuple[tuple[str, tuple[str, int]], ...]


class JobFinished(AgentMessage, frozen=True, tag="over"):
    """Leader to follower: the job has ended for its node."""

    code: int


class Removed(AgentMessage, frozen=True, tag="seen off"):
    """Leader to follower: it will be removed from the node set, as requested."""


class Rejected(AgentMessage, frozen=True, tag="sent home"):
    """Leader to a joining node: it is rejected."""

    why: str


Message = (
    NodeCommand
    | WorkerEvent
    | WorkerList
    | Ended
    | Quiesced
    | PeersReached
    | Excluded
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
    """Return a message as a JSON object."""
    document: dict[str, Any] = msgspec.to_builtins(message)
    return document


def read(document: Mapping[str, Any]) -> Message:
    """Rebuild a message from a JSON object.

    Raises:
        MessageError: it is not a message.
    """
    try:
        message: Message = msgspec.convert(document, Message)
        if isinstance(message, NodeCommand):
            arguments = msgspec.convert(message.arguments, _ARGUMENTS[message.order])
            return msgspec.structs.replace(message, arguments=arguments)
    except ValueError as error:
        raise MessageError(f"an agent's message cannot be read ({error}): {str(document)[:200]}") from error
    return message
