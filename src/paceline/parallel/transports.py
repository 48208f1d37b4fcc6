"""How partial sums get from rank to rank: through shared memory, or by messages of a process group."""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.core.errors import PeerLostError
from paceline.parallel.reduction_tree import Combine, ReductionPlan
from paceline.parallel.world import World, translate_peer_errors

# --- How the ranks' partial sums meet: what every transport offers, and the one for a single process ---
#
# A transport owns the gradient buffers, because shared memory must be allocated by whoever shares
# it. There is one flat buffer, a *lane*, for each dtype; a *slot* is one set of lanes, and holds
# the sum of one node of the :class:`~paceline.parallel.reduction_tree.ReductionPlan`.


GradBuffer = dict[torch.dtype, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """A stretch of one lane that is sent as soon as all its gradients are there."""

    dtype: torch.dtype
    start: int
    stop: int


class Transport(Protocol):
    """Adds up the slots of all ranks, step after step."""

    grad_buffers: list[GradBuffer]
    """This rank's buffers; after :meth:`reduce` slot 0 holds the total."""
    overlaps: bool
    """Whether :meth:`launch` sends while backward still runs."""

    def launch(self, bucket: int) -> None:
        """Send one bucket; called in the same order on every rank, at most once a step."""

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        """Give every rank every rank's header (float64); also says that the slots are complete."""

    def reduce(self, combine: Combine) -> None:
        """Add up all nodes as ``combine`` says; the total is in every rank's slot 0."""

    def close(self) -> None:
        """Free the buffers."""


class LocalTransport:
    """One process holds all nodes; nothing is sent."""

    overlaps = False

    def __init__(self, slots: int, lanes: Mapping[torch.dtype, int], device: torch.device) -> None:
        self.grad_buffers: list[GradBuffer] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in lanes.items()}
            for _ in range(slots)
        ]

    def launch(self, bucket: int) -> None:
        raise AssertionError("a single process has nobody to send to")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return [header]

    def reduce(self, combine: Combine) -> None:
        for into, other in combine.additions:
            add_grad_buffer(self.grad_buffers[into], self.grad_buffers[other])
        if combine.root != 0:
            for dtype, lane in self.grad_buffers[0].items():
                lane.copy_(self.grad_buffers[combine.root][dtype])

    def close(self) -> None:
        self.grad_buffers.clear()


def add_grad_buffer(into: GradBuffer, other: GradBuffer) -> None:
    """Add every lane of ``other`` to ``into``."""
    for dtype, lane in into.items():
        lane.add_(other[dtype])


# --- The transport over a process group (gloo or NCCL): several hosts, or GPUs ---
#
# Each rank that has micro-batches owns one chunk of every bucket; the chunks are equal, whatever the shares, for
# a slow processor need not have a slow network. While backward still runs, the others send it their
# nodes' parts of that chunk; it adds them up in the order of the tree and sends the total back to
# everybody. Where each rank's micro-batches are one node, the volume is that of a ring all-reduce. A spare
# only receives.


@dataclass
class _Sending:
    """One bucket on its way: receipts of the others' parts of this rank's chunk, by node number."""

    works: list[dist.Work]
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class GroupTransport:
    """Sums the slots of all ranks by point-to-point messages (``exact``) or all-reduce (``allreduce``).

    Args:
        world: the ranks; all of them construct the transport together.
        plan: who sums what.
        lanes: elements of each dtype's lane, the same on every rank.
        buckets: stretches of the lanes, which together cover them.

    Raises:
        PeerLostError: (from the methods) a connection broke.
    """

    overlaps = True

    def __init__(
        self, world: World, plan: ReductionPlan, lanes: Mapping[torch.dtype, int], buckets: Sequence[Bucket]
    ) -> None:
        self._world = world
        self._plan = plan
        self._buckets = buckets
        self._nodes = [(rank, slot) for rank, nodes in enumerate(plan.subtrees) for slot in range(len(nodes))]
        self.grad_buffers: list[GradBuffer] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=world.device) for dtype, numel in lanes.items()}
            for _ in range(plan.grad_buffers[world.rank])
        ]
        self._sent: dict[int, _Sending] = {}

    def launch(self, bucket: int) -> None:
        self._sent[bucket] = self._all_reduce(bucket) if self._plan.kind == "allreduce" else self._scatter(bucket)

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gather_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        gathering: list[dist.Work] = []
        with translate_peer_errors():
            for bucket, sending in sorted(self._sent.items()):
                _wait(sending.works)
                if self._plan.kind == "exact":
                    for into, other in combine.additions:
                        sending.parts[into].add_(sending.parts[other])
                    gathering += self._gather(bucket, sending.parts[combine.root])
            _wait(gathering)
        self._sent.clear()

    def close(self) -> None:
        self._sent.clear()
        self.grad_buffers.clear()

    def _all_reduce(self, bucket: int) -> _Sending:
        with translate_peer_errors():
            work = dist.all_reduce(self._part(0, bucket), group=self._world.group, async_op=True)
        assert work is not None
        return _Sending([work])

    def _scatter(self, bucket: int) -> _Sending:
        """Send each owner this rank's parts of its chunk, and receive the others' parts of ours."""
        rank = self._world.rank
        own = self._chunk(bucket, rank)
        sends, receives, parts = [], [], {}
        for number, (holder, slot) in enumerate(self._nodes):
            if holder == rank:
                part = self._part(slot, bucket)
                parts[number] = part[own]
                sends += [
                    (part[self._chunk(bucket, owner)], owner, number) for owner in self._plan.active if owner != rank
                ]
            else:
                parts[number] = torch.empty_like(self._part(0, bucket)[own])
                receives.append((parts[number], holder, number))
        return _Sending(self._send_and_receive(sends, receives), parts)

    def _gather(self, bucket: int, total: torch.Tensor) -> list[dist.Work]:
        """Send this rank's finished chunk to everybody, and receive theirs into slot 0."""
        rank, number = self._world.rank, len(self._nodes)
        result = self._part(0, bucket)
        own = result[self._chunk(bucket, rank)]
        if own.data_ptr() != total.data_ptr():
            own.copy_(total)
        everybody, owners = range(self._world.world_size), self._plan.active
        return self._send_and_receive(
            [(own, peer, number) for peer in everybody if peer != rank],
            [(result[self._chunk(bucket, peer)], peer, number) for peer in owners if peer != rank],
        )

    def _send_and_receive(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> list[dist.Work]:
        group = self._world.group
        # Both ends skip empty chunks alike. The tag (a node's number) tells a peer's messages apart.
        operations = [
            dist.P2POp(operation, tensor, group=group, tag=tag, group_peer=peer)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer, tag in messages
            if tensor.numel()
        ]
        with translate_peer_errors():
            return list(dist.batch_isend_irecv(operations)) if operations else []

    def _part(self, slot: int, bucket: int) -> torch.Tensor:
        where = self._buckets[bucket]
        return self.grad_buffers[slot][where.dtype][where.start : where.stop]

    def _chunk(self, bucket: int, rank: int) -> slice:
        """What ``rank`` adds up; nothing where it is a spare."""
        where, owners = self._buckets[bucket], self._plan.active
        if rank not in owners:
            return slice(0, 0)
        numel, position = where.stop - where.start, owners.index(rank)
        return slice(position * numel // len(owners), (position + 1) * numel // len(owners))


def gather_headers(world: World, header: Sequence[float]) -> list[Sequence[float]]:
    """Every rank's header, by rank; all ranks call this together.

    Raises:
        PeerLostError: a rank is gone.
    """
    mine = torch.tensor(header, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    with translate_peer_errors():
        dist.all_gather(rows, mine, group=world.group)
    return [row.tolist() for row in rows]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


# --- The transport between CPU ranks of one host: every rank's slots lie in one shared mapping ---
#
# Autograd accumulates straight into the mapping, so nothing is copied to send it. A step takes two
# barriers. Between them rank r alone touches chunk r of every slot of every rank: it adds the nodes
# up, in the order of the tree, and writes the total into chunk r of each rank's slot 0. Chunks are as
# large as the ranks' shares.
#
# Nobody waits for a spare, which has no chunk: it arrives at both barriers at once, and reads what the
# others made while they are busy with the next step. So headers are kept for two steps.
#
# The barriers spin on counters, and yield. That needs stores to become visible in program order
# (x86-64's total store order); elsewhere the group transport is used.


_CACHE_LINE = 64
_SPINS_BEFORE_YIELD = 100
_YIELDS_BEFORE_SLEEP = 20_000
_YIELDS_BETWEEN_CHECKS = 512
_SLEEPS_BETWEEN_CHECKS = 64
_SLEEP_S = 100e-6


def supported(world: World) -> bool:
    """Whether the ranks of ``world`` can share memory through this transport."""
    return world.one_host and world.device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")


class SharedMemoryTransport:
    """Sums the slots of all ranks of one host in place.

    Args:
        world: the ranks; all of them construct the transport together.
        plan: who sums what.
        lanes: elements of each dtype's lane, the same on every rank.
        header_length: float64 numbers in a header.
        timeout_s: how long a rank may keep the others waiting.

    Raises:
        OSError: there is too little shared memory; raised on every rank.
        PeerLostError: (from the methods) a rank died, or kept the others waiting for too long.
    """

    overlaps = False

    def __init__(
        self,
        world: World,
        plan: ReductionPlan,
        lanes: Mapping[torch.dtype, int],
        header_length: int,
        timeout_s: float,
    ) -> None:
        self._rank = world.rank
        lane_bytes = {dtype: _round_up(numel * dtype.itemsize) for dtype, numel in lanes.items()}
        slot_bytes = sum(lane_bytes.values())
        header_bytes = _round_up(header_length * 8)
        headers_at = world.world_size * _CACHE_LINE
        slots_at = headers_at + 2 * world.world_size * header_bytes
        memory = map_shared(world, slots_at + sum(plan.grad_buffers) * slot_bytes)

        words = memoryview(memory)
        arrivals = words[:headers_at].cast("q")[:: _CACHE_LINE // 8]
        headers = [
            words[headers_at + r * header_bytes :][: header_length * 8].cast("d") for r in range(2 * world.world_size)
        ]
        self._headers, self._next_headers = headers[: world.world_size], headers[world.world_size :]
        all_slots: list[list[GradBuffer]] = []
        offset = slots_at
        for slots_of_rank in plan.grad_buffers:
            all_slots.append([])
            for _ in range(slots_of_rank):
                slot: GradBuffer = {}
                for dtype, numel in lanes.items():
                    slot[dtype] = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
                    offset += lane_bytes[dtype]
                all_slots[-1].append(slot)
        self.grad_buffers = all_slots[self._rank]

        first = plan.first_microbatches[self._rank]
        microbatches = range(first, first + plan.work_split[self._rank])
        self._is_spare = not microbatches
        chunks = {dtype: _chunk(numel, microbatches, plan.num_microbatches) for dtype, numel in lanes.items()}
        mine = {dtype: chunk for dtype, chunk in chunks.items() if chunk.stop > chunk.start}
        self._node_chunks = [
            [slots[position][dtype][chunk] for dtype, chunk in mine.items()]
            for slots, nodes in zip(all_slots, plan.subtrees, strict=True)
            for position in range(len(nodes))
        ]
        self._result_chunks = [[slots[0][dtype][chunk] for dtype, chunk in mine.items()] for slots in all_slots]
        self._barrier = _SpinBarrier(
            arrivals,
            self._rank,
            world.all_gather_object(os.getpid()),
            timeout_s,
            world.is_broken,
            at_leisure=self._is_spare,
        )

    def launch(self, bucket: int) -> None:
        raise AssertionError("shared memory needs no sending")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        headers = self._headers
        self._headers, self._next_headers = self._next_headers, headers
        mine = headers[self._rank]
        for index, value in enumerate(header):
            mine[index] = value
        self._barrier.wait(also_next=self._is_spare)
        return [view.tolist() for view in headers]

    def reduce(self, combine: Combine) -> None:
        for into, other in combine.additions:
            for total, part in zip(self._node_chunks[into], self._node_chunks[other], strict=True):
                total.add_(part)
        root = self._node_chunks[combine.root]
        for result in self._result_chunks:
            for copy, total in zip(result, root, strict=True):
                if copy.data_ptr() != total.data_ptr():
                    copy.copy_(total)
        self._barrier.wait()

    def close(self) -> None:
        # Tensors may still view the mapping (as gradients); it is unmapped when the last one goes.
        self._barrier.close()
        for views in (
            self.grad_buffers,
            self._node_chunks,
            self._result_chunks,
            self._headers,
            self._next_headers,
        ):
            views.clear()


class _SpinBarrier:
    """All ranks of one host meet; counters only ever rise, so a barrier needs no reset."""

    def __init__(
        self,
        arrivals: memoryview,
        rank: int,
        pids: Sequence[int],
        timeout_s: float,
        abandoned: Callable[[], bool],
        *,
        at_leisure: bool,
    ) -> None:
        self._arrivals = arrivals
        self._rank = rank
        self._abandoned = abandoned
        self._peers = [peer for peer in range(len(pids)) if peer != rank]
        self._timeout_s = timeout_s
        # Whom nobody waits for leaves the processor to the others at once.
        self._spins, self._yields = (0, 0) if at_leisure else (_SPINS_BEFORE_YIELD, _YIELDS_BEFORE_SLEEP)
        self._count = 0
        self._exits = select.poll()
        self._rank_of_descriptor: dict[int, int] = {}
        for peer in self._peers:
            # Readable once the process has ended. Where a sandbox forbids it, only the time-out
            # notices a death.
            try:
                descriptor = os.pidfd_open(pids[peer])
            except ProcessLookupError:
                raise PeerLostError(f"rank {peer} ended while the ranks joined", peer) from None
            except OSError:
                continue
            self._rank_of_descriptor[descriptor] = peer
            self._exits.register(descriptor, select.POLLIN)

    def wait(self, *, also_next: bool = False) -> None:
        """Wait for all.

        Args:
            also_next: arrive at the next barrier, too, so that nobody waits for this rank there.
        """
        self._count = count = self._count + 1
        arrivals = self._arrivals
        arrivals[self._rank] = count + also_next
        for peer in self._peers:
            spins = 0
            while arrivals[peer] < count:
                spins += 1
                if spins > self._spins:
                    self._wait_slowly(peer, count)
                    break

    def _wait_slowly(self, peer: int, count: int) -> None:
        arrivals = self._arrivals
        deadline = time.monotonic() + self._timeout_s
        yields = 0
        while arrivals[peer] < count:
            yields += 1
            if yields < self._yields:
                os.sched_yield()
                between_checks = _YIELDS_BETWEEN_CHECKS
            else:
                time.sleep(_SLEEP_S)
                between_checks = _SLEEPS_BETWEEN_CHECKS
            if yields % between_checks == 0:
                self._check(peer, count, deadline)

    def _check(self, peer: int, count: int, deadline: float) -> None:
        for descriptor, _ in self._exits.poll(0):
            lost = self._rank_of_descriptor[descriptor]
            # A peer that arrived here before it ended has done its part.
            if self._arrivals[lost] < count:
                raise PeerLostError(f"rank {lost} ended while rank {self._rank} waited for it", lost)
        if self._abandoned():
            raise PeerLostError(f"a rank was lost while rank {self._rank} waited for rank {peer}")
        if time.monotonic() > deadline:
            raise PeerLostError(f"rank {peer} kept rank {self._rank} waiting for more than {self._timeout_s:g} s", peer)

    def close(self) -> None:
        self._arrivals.release()
        for descriptor in self._rank_of_descriptor:
            os.close(descriptor)
        self._rank_of_descriptor.clear()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE


def _chunk(numel: int, microbatches: range, num_microbatches: int) -> slice:
    """A rank's part of a lane, cut at multiples of 16 elements so that no cache line has two writers."""
    blocks = -(-numel // 16)
    start, stop = (
        microbatches.start * blocks // num_microbatches * 16,
        microbatches.stop * blocks // num_microbatches * 16,
    )
    return slice(min(start, numel), min(stop, numel))


def map_shared(world: World, nbytes: int) -> mmap.mmap:
    """Map the same fresh memory, all zeros, in every rank; all ranks call this together.

    The file has no name, so that nothing stays behind whenever a rank is killed, and lies in no file
    system, whose limit (64 MiB in many containers' /dev/shm) would be ours.

    Raises:
        OSError: there is too little; raised on every rank.
    """
    memory: mmap.mmap | None = None
    descriptor, place, failure = -1, "", ""
    try:
        if world.rank == 0:
            try:
                descriptor = os.memfd_create("paceline")
                # Reserve the pages now: touching one that cannot be had kills with SIGBUS.
                os.posix_fallocate(descriptor, 0, nbytes)
                memory = mmap.mmap(descriptor, nbytes)
                place = f"/proc/{os.getpid()}/fd/{descriptor}"
            except OSError as error:
                failure = _too_little(nbytes, error)
        place, failure = world.broadcast_object([place, failure])
        if not failure and world.rank != 0:
            try:
                descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                memory = mmap.mmap(descriptor, nbytes)
            except OSError as error:
                failure = _too_little(nbytes, error)
        # Also says that everybody has opened it.
        failures = [text for text in world.all_gather_object(failure) if text]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or failures:
        raise OSError(failures[0])
    return memory


def _too_little(nbytes: int, error: OSError) -> str:
    return f"{nbytes / 2**20:.0f} MiB of shared memory: {error.strerror}"
