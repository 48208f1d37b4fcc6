"""Stages on NCCL: the real channel, on a model of gloo and NCCL without processes.

Each rank is a thread. What its CPU does, and what it enqueues on its GPU, becomes a graph of events that wait for each
other, in which a cycle is a deadlock.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import distributed as dist

from paceline.parallel.pipeline.channel import BACKWARD, EVALUATION, FORWARD, MessageAddress, StageChannel
from paceline.parallel.pipeline.nccl_channel import NcclStageChannel
from paceline.parallel.pipeline.schedules import Kind, ScheduleAction
from paceline.parallel.world import World

PATIENCE_S = 20.0
CPU, COMPUTATION = "CPU", "computation"
BOTH = ("higher", "lower")


class Event(NamedTuple):
    """The n-th event of a rank's CPU, or of a stream of its GPU."""

    rank: int
    stream: str
    number: int


@dataclass
class Group:
    """A group of all ranks, as one of them sees it."""

    name: str
    rank: int


@dataclass
class Side:
    """One rank's part of a transfer on NCCL."""

    begun: Event
    done: Event
    tensor: torch.Tensor
    is_source: bool


@dataclass
class Request:
    """The result of an asynchronous operation."""

    wait: Callable[[], Any]

    def is_completed(self) -> bool:
        return False


@dataclass
class Cluster:
    """Ranks with a CPU and a GPU each, whose messages go through gloo, by tags, and NCCL, in the order of posting.

    A CPU waits for its GPU after each action, which is the worst case.

    Attributes:
        waits: the events for which each one waits.
        posted: the sizes of the messages posted on NCCL, by sender, receiver and whether it is the sender's side.
        frames: the addresses of the messages sent through gloo, by rank.
    """

    waits: dict[Event, set[Event]] = field(default_factory=lambda: defaultdict(set))
    posted: dict[tuple[int, int, bool], list[int]] = field(default_factory=lambda: defaultdict(list))
    frames: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _last: dict[tuple[int, str], Event] = field(default_factory=dict)
    _sent: Any = field(default_factory=lambda: defaultdict(deque))
    _counts: Counter[Any] = field(default_factory=Counter)
    _transfers: dict[Any, list[Side]] = field(default_factory=lambda: defaultdict(list))

    def _enqueue(self, rank: int, stream: str, *after: Event | None) -> Event:
        before = self._last.get((rank, stream))
        event = Event(rank, stream, 0 if before is None else before.number + 1)
        self.waits[event].update(e for e in (before, self._last.get((rank, CPU)), *after) if e is not None)
        self._last[rank, stream] = event
        return event

    def compute(self, rank: int) -> None:
        with self._changed:
            self._enqueue(rank, CPU, self._enqueue(rank, COMPUTATION))

    # --- gloo: a sender that waits does so until the receiver has come

    def isend(self, tensor: torch.Tensor, *, group: Group, group_dst: int, tag: int = 0) -> Request:
        if group.name != "all":
            return self._on_nccl(tensor, group, group.rank, group_dst)
        self.frames[group.rank].add(tensor.data_ptr())
        with self._changed:
            is_taken = threading.Event()
            event = self._enqueue(group.rank, CPU)
            self._sent[group.rank, group_dst, tag].append((tensor, event, is_taken))
            self._changed.notify_all()
        return Request(partial(self._wait_until, is_taken.is_set))

    def irecv(self, tensor: torch.Tensor, *, group: Group, group_src: int, tag: int = 0) -> Request:
        if group.name != "all":
            return self._on_nccl(tensor, group, group_src, group.rank)
        sent = self._sent[group_src, group.rank, tag]

        def wait() -> None:
            self._wait_until(lambda: bool(sent))
            with self._changed:
                content, event, is_taken = sent.popleft()
                assert content.numel() == tensor.numel(), "the lengths differ on gloo"
                tensor.copy_(content)
                self._enqueue(group.rank, CPU, event)
                is_taken.set()
                self._changed.notify_all()

        return Request(wait)

    def recv(self, tensor: torch.Tensor, *, group: Group, group_src: int, tag: int = 0) -> None:
        self.irecv(tensor, group=group, group_src=group_src, tag=tag).wait()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_done, PATIENCE_S):
                raise TimeoutError("a CPU waits for a message for ever")

    # --- NCCL: a communicator, with one stream on each side, for each two ranks of a group

    def broadcast(self, tensor: torch.Tensor, *, group: Group, group_src: int, async_op: bool) -> Request:
        return self._transfer(tensor, group.rank, "all", ("all", group_src), is_source=group.rank == group_src)

    def _on_nccl(self, tensor: torch.Tensor, group: Group, source: int, target: int) -> Request:
        is_source = group.rank == source
        self.posted[source, target, is_source].append(tensor.numel())
        stream = f"{group.name} of {min(source, target)} and {max(source, target)}"
        return self._transfer(tensor, group.rank, stream, (group.name, source, target), is_source=is_source)

    def _transfer(self, tensor: torch.Tensor, rank: int, stream: str, route: Any, *, is_source: bool) -> Request:
        with self._changed:
            begun = self._enqueue(rank, stream, self._last.get((rank, COMPUTATION)))
            side = Side(begun, self._enqueue(rank, stream), tensor, is_source)
            number = self._counts[route, rank]
            self._counts[route, rank] += 1
            for other in self._transfers[route, number]:
                if side.is_source or other.is_source:
                    self.waits[side.done].add(other.begun)
                    self.waits[other.done].add(side.begun)
                    source, target = (side, other) if side.is_source else (other, side)
                    target.tensor[: source.tensor.numel()] = source.tensor[: target.tensor.numel()]
            self._transfers[route, number].append(side)
        return Request(partial(self._stream_waits, rank, side.done))

    def _stream_waits(self, rank: int, done: Event) -> None:
        with self._changed:
            self._enqueue(rank, COMPUTATION, done)

    # --- all ranks

    def run(self, ranks: int, work: Callable[[int], None]) -> None:
        """Run ``work`` on each rank; raises the first error."""
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    for name in ("isend", "irecv", "recv", "broadcast"):
        monkeypatch.setattr(dist, name, getattr(made, name))
    return made


def channel(rank: int, ranks: int, groups: tuple[str, ...]) -> StageChannel:
    group = cast(Any, Group("all", rank))
    world = World(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        device=torch.device("cpu"),
        backend="nccl",
        generation=0,
        one_host=True,
        subgroup=lambda: group,
    )
    if not groups:
        return StageChannel(world)
    higher, lower = (cast(Any, Group(name, rank)) for name in groups)
    return NcclStageChannel(world, higher, lower)


def payload(kind: str, stage: int, number: int) -> torch.Tensor:
    """A tensor whose size and content tell what it is."""
    size = 16 * (3 * (64 * number + stage) + "FBE".index(kind)) + 1
    return torch.full((size,), float(size))


class Ranks:
    """Ranks that exchange what a pipeline does, and compute nothing.

    Args:
        stages: of the model.
        groups: the names of the two groups for messages on NCCL; without them all go through gloo.
    """

    def __init__(
        self, cluster: Cluster, ranks: int, stages: int, groups: tuple[str, ...] = ("higher", "lower")
    ) -> None:
        self.cluster, self.stages, self.ranks = cluster, stages, ranks
        self.channels = [channel(rank, ranks, groups) for rank in range(ranks)]

    def act(self, rank: int, kind: Kind, stage: int, number: int) -> None:
        """Receive an action's input, compute, and send its output, as ``Pipeline`` does."""
        link, last = self.channels[rank], self.stages - 1
        if kind == "F":
            if stage > 0:
                self._receive(rank, "F", stage, stage - 1, MessageAddress(stage, FORWARD, number))
            self.cluster.compute(rank)
            if stage < last:
                output = payload("F", stage + 1, number)
                link.send([output, 0.5], self._rank_of(stage + 1), MessageAddress(stage + 1, FORWARD, number))
                output.zero_()  # the stage may change it
        elif kind in ("B", "I"):
            if stage < last:
                self._receive(rank, "B", stage, stage + 1, MessageAddress(stage, BACKWARD, number))
            self.cluster.compute(rank)
            if stage > 0:
                values = [payload("B", stage - 1, number), 0.5]
                link.send(values, self._rank_of(stage - 1), MessageAddress(stage - 1, BACKWARD, number))
        else:
            self.cluster.compute(rank)

    def step(self, rank: int, actions: tuple[ScheduleAction, ...]) -> None:
        """Run a schedule, with receives posted ahead."""
        link, last = self.channels[rank], self.stages - 1
        expected = []
        for kind, stage, number in actions:
            if kind == "F" and stage > 0:
                expected.append((self._rank_of(stage - 1), MessageAddress(stage, FORWARD, number)))
            elif kind in ("B", "I") and stage < last:
                expected.append((self._rank_of(stage + 1), MessageAddress(stage, BACKWARD, number)))
        link.post_recv(expected)
        for action in actions:
            self.act(rank, *action)
        link.wait()

    def evaluate(self, rank: int) -> None:
        """Pass a batch through all stages, and its result to all ranks."""
        link, last = self.channels[rank], self.stages - 1
        for stage in range(rank, self.stages, self.ranks):
            if stage > 0:
                self._receive(rank, "E", stage, stage - 1, MessageAddress(stage, EVALUATION))
            self.cluster.compute(rank)
            if stage < last:
                values = [payload("E", stage + 1, 0), 0.5]
                link.send(values, self._rank_of(stage + 1), MessageAddress(stage + 1, EVALUATION))
        for number in (1, 2):
            address = MessageAddress(last + 1, EVALUATION)
            if rank == self._rank_of(last):
                link.broadcast([payload("E", last + 1, number), 0.5], address)
            else:
                self._receive(rank, "E", last + 1, last, address, number)
        link.wait()

    def _rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def _receive(
        self, rank: int, kind: str, stage: int, source: int, address: MessageAddress, number: int | None = None
    ) -> None:
        content, half = self.channels[rank].receive(self._rank_of(source), address)
        expected = payload(kind, stage, address.number if number is None else number)
        assert torch.equal(content, expected), (rank, kind, stage, address)
        assert half == 0.5


def check(cluster: Cluster) -> None:
    """Both sides have posted the same messages in the same order, and no event waits for itself."""
    assert any(is_sender for *_, is_sender in cluster.posted)
    for source, target, _ in list(cluster.posted):
        assert cluster.posted[source, target, True] == cluster.posted[source, target, False]
    tuple(TopologicalSorter(cluster.waits).static_order())
