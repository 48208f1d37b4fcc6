"""A network like NCCL's, for sums: messages have no tags, and each call blocks until its peers have made theirs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from paceline.parallel.point_to_point import Message, PendingMessages
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import Bucket, Transport

LANES = {torch.float32: 13, torch.int64: 3}
BUCKETS = [
    Bucket(torch.float32, 0, 9),
    Bucket(torch.float32, 9, 11),  # fewer elements than most groups have ranks
    Bucket(torch.int64, 0, 3),
    Bucket(torch.float32, 11, 13),
]


class Network:
    """Delivers the n-th message of a rank to another one into the n-th tensor with which that one waits for it."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int], deque[tuple[torch.Tensor, list[bool]]]] = {}
        self._awaited: dict[tuple[int, int], deque[tuple[torch.Tensor, list[bool]]]] = {}
        self._calls: dict[int, list[list[bool]]] = {rank: [] for rank in range(ranks)}  # of the ranks that still run
        self._problem = ""

    def start_messages(
        self, world: Any, sends: Sequence[Message] = (), receives: Sequence[Message] = ()
    ) -> PendingMessages:
        with self._changed:
            call = self._calls[world.rank] = []
            for message in sends:
                self._post(self._sent, (world.rank, message.peer), message.tensor, call)
            for message in receives:
                self._post(self._awaited, (message.peer, world.rank), message.tensor, call)
            self._deliver()
            self._changed.wait_for(lambda: self._problem or all(done for (done,) in call))
            assert not self._problem, self._problem
        return PendingMessages([])

    def end(self, rank: int) -> None:
        """Expect no more of a rank."""
        with self._changed:
            del self._calls[rank]
            self._deliver()

    def left(self) -> list[tuple[int, int]]:
        return [pair for queues in (self._sent, self._awaited) for pair, queue in queues.items() if queue]

    def _post(self, queues: Any, pair: tuple[int, int], tensor: torch.Tensor, call: list[list[bool]]) -> None:
        if tensor.numel():
            call.append([False])
            queues.setdefault(pair, deque()).append((tensor, call[-1]))

    def _deliver(self) -> None:
        for pair, sent in self._sent.items():
            awaited = self._awaited.get(pair, deque())
            while sent and awaited:
                (value, sent_done), (tensor, awaited_done) = sent.popleft(), awaited.popleft()
                if (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
                    tensor.copy_(value)
                else:
                    self._problem = f"{pair}: {value.shape} {value.dtype} sent for {tensor.shape} {tensor.dtype}"
                sent_done[0] = awaited_done[0] = True
        if self._calls and all(any(not done for (done,) in call) for call in self._calls.values()):
            self._problem = self._problem or "every rank waits for another one"
        self._changed.notify_all()


@dataclass(frozen=True)
class Case:
    """A plan, the micro-batches of a step, and the random seed of the gradients."""

    work_split: tuple[int, ...]
    present: frozenset[int]
    seed: int


@st.composite
def cases(draw: st.DrawFn, first_ranks_idle: int = 0) -> Case:
    ranks = draw(st.integers(2, 6))
    shares = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(any))
    number = sum(shares)
    present = draw(st.one_of(st.just(range(number)), st.sets(st.integers(0, number - 1), min_size=1)))
    return Case((0,) * first_ranks_idle + tuple(shares), frozenset(present), draw(st.integers(0, 2**32 - 1)))


def run(case: Case, network: Network, build: Callable[[Any, ReductionPlan], Transport]) -> list[Transport]:
    """Sum one step on every rank, each in a thread; return the transports."""
    ranks = len(case.work_split)
    plan = ReductionPlan(sum(case.work_split), ranks, "exact", case.work_split)
    nodes = [(rank, index) for rank, of_rank in enumerate(plan.subtrees) for index in range(len(of_rank))]
    values = node_sums(case, plan)
    combine = plan.combination(tuple(value is not None for value in values))
    transports: list[Transport] = []
    errors: list[BaseException] = []

    def step(rank: int) -> None:
        try:
            transport = transports[rank]
            if transport.overlaps:
                for bucket in range(len(BUCKETS)):
                    transport.launch(bucket)
            transport.reduce(combine)
        except BaseException as error:
            errors.append(error)
        finally:
            network.end(rank)

    for rank in range(ranks):
        world = SimpleNamespace(rank=rank, world_size=ranks, device=torch.device("cpu"), backend="gloo", group=None)
        transports.append(build(world, plan))
        for (holder, index), value in zip(nodes, values, strict=True):
            if holder == rank:
                for dtype, flat_buffer in transports[-1].grad_buffers[index].items():
                    flat_buffer.copy_(value[dtype] if value is not None else torch.zeros_like(flat_buffer))
    threads = [threading.Thread(target=step, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert network.left() == []
    return transports


def node_sums(case: Case, plan: ReductionPlan) -> list[dict[torch.dtype, torch.Tensor] | None]:
    """Return the sum of each node, None without one; the order of addition shows, and zeros of both signs are added."""
    generator = torch.Generator().manual_seed(case.seed)
    found: list[dict[torch.dtype, torch.Tensor] | None] = []
    for node in (node for nodes in plan.subtrees for node in nodes):
        numbers = torch.randn(LANES[torch.float32], generator=generator)
        numbers[::3] = -0.0
        whole = torch.randint(-9, 9, (LANES[torch.int64],), generator=generator)
        present = any(node.start <= microbatch < node.stop for microbatch in case.present)
        # As in the reducer, whose buffers begin with +0.
        found.append({torch.float32: torch.zeros_like(numbers) + numbers, torch.int64: whole} if present else None)
    return found


def total(case: Case) -> dict[torch.dtype, torch.Tensor]:
    """Return the sum of the nodes that have one, in the order of the tree."""
    plan = ReductionPlan(sum(case.work_split), len(case.work_split), "exact", case.work_split)
    values = node_sums(case, plan)
    combine = plan.combination(tuple(value is not None for value in values))
    for into, other in combine.additions:
        for dtype, flat_buffer in values[into].items():  # type: ignore[union-attr]
            flat_buffer.add_(values[other][dtype])  # type: ignore[index]
    return values[combine.root]  # type: ignore[return-value]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
