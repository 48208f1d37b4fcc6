"""Transports of partial sums between ranks: shared memory, or messages of a process group."""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.core.errors import PeerLostError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.point_to_point import Message, PendingMessages, start_messages
from paceline.parallel.reduction_tree import Combine, ReductionPlan
from paceline.parallel.world import World

# --- The interface, and the transport of a single process ---
#
# A transport owns the gradient buffers, because it must allocate shared memory. A gradient buffer has one flat buffer
# for each dtype, and holds the sum of one subtree of the :class:`~paceline.parallel.reduction_tree.ReductionPlan`.


GradBuffer = dict[torch.dtype, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """A slice of one flat buffer, sent as soon as all its gradients are ready."""

    dtype: torch.dtype
    start: int
    stop: int


class Transport(Protocol):
    """Adds the gradient buffers of all ranks, step after step."""

    grad_buffers: list[GradBuffer]
    """This rank's buffers; after :meth:`reduce` buffer 0 holds the total."""
    overlaps: bool
    """Whether :meth:`launch` may send while backward runs."""

    def launch(self, bucket: int) -> None:
        """Send one bucket, with zeros for a subtree without micro-batches; once a step, in the buckets' order."""

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        """Return every rank's header (float64); called when the gradient buffers are complete."""

    def reduce(self, combine: Combine) -> None:
        """Add all subtrees as ``combine`` says; the total is in every rank's buffer 0."""

    def close(self) -> None:
        """Free the buffers."""
        ...


def zero_grad_buffers(count: int, numels: Mapping[torch.dtype, int], device: torch.device) -> list[GradBuffer]:
    """Return ``count`` buffers of zeros, each with a flat buffer of that many elements for each dtype."""
    return [{dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in numels.items()} for _ in range(count)]


class LocalTransport:
    """The transport of a single process, without communication."""

    overlaps = False

    def __init__(self, num_buffers: int, flat_buffers: Mapping[torch.dtype, int], device: torch.device) -> None:
        self.grad_buffers = zero_grad_buffers(num_buffers, flat_buffers, device)

    def launch(self, bucket: int) -> None:
        raise AssertionError("a single process sends nothing")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return [header]

    def reduce(self, combine: Combine) -> None:
        for into, other in combine.additions:
            add_grad_buffer(self.grad_buffers[into], self.grad_buffers[other])
        if combine.root != 0:
            for dtype, flat_buffer in self.grad_buffers[0].items():
                flat_buffer.copy_(self.grad_buffers[combine.root][dtype])

    def close(self) -> None:
        self.grad_buffers.clear()


def add_grad_buffer(into: GradBuffer, other: GradBuffer) -> None:
    """Add every flat buffer of ``other`` to ``into``."""
    for dtype, flat_buffer in into.items():
        flat_buffer.add_(other[dtype])


# --- The transport over a process group (gloo or NCCL): several hosts, or GPUs ---
#
# Each rank with micro-batches owns one chunk of every bucket; the chunks are equal, whatever the work split, because a
# slow processor need not have a slow network. While backward runs, the other ranks send their subtrees' parts of the
# chunk to its owner, which adds them in the order of the tree and sends the total to all ranks. If each rank's
# micro-batches are one subtree, the volume is that of a ring all-reduce. A spare only receives.
#
# All subtrees are added, whichever have micro-batches in this step: a sum that began with +0 keeps its bits if zeros
# are added to it. So messages and additions depend on the plan alone, and on a GPU each bucket is added and gathered
# during backward, on a stream of its own. NCCL executes the messages of a rank one call after the other; all ranks make
# the calls in the order of the buckets: scatter 0, gather 0, scatter 1, gather 1.


class GroupTransport:
    """Sums the gradient buffers of all ranks by point-to-point messages (``exact``) or all-reduce (``allreduce``).

    Args:
        world: the ranks; the construction is a collective.
        plan: the work split and the tree.
        numels: elements of each dtype's flat buffer, the same on every rank.
        buckets: slices that together cover the flat buffers.

    Raises:
        PeerLostError: (from the methods) a connection broke.
    """

    overlaps = True

    def __init__(
        self, world: World, plan: ReductionPlan, numels: Mapping[torch.dtype, int], buckets: Sequence[Bucket]
    ) -> None:
        self._world = world
        self._plan = plan
        self._buckets = buckets
        self._subtrees = [
            (rank, index) for rank, subtrees in enumerate(plan.subtrees) for index in range(len(subtrees))
        ]
        self._combine = plan.combination((True,) * len(self._subtrees))
        self.grad_buffers = zero_grad_buffers(plan.num_grad_buffers[world.rank], numels, world.device)
        self._all_reduces: list[dist.Work] = []
        self._scattered: list[tuple[int, PendingMessages, dict[int, torch.Tensor]]] = []
        self._stream: torch.cuda.Stream | None = None
        if world.backend == "nccl":
            # Of high priority, because the other ranks wait for its short kernels, and only this one for backward's.
            self._stream = torch.cuda.Stream(world.device, priority=-1)  # type: ignore[no-untyped-call]

    def launch(self, bucket: int) -> None:
        if self._plan.kind == "allreduce":
            self._all_reduces.append(self._all_reduce(bucket))
        elif self._stream is None:
            self._scattered.append((bucket, *self._scatter(bucket)))
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._world.device))
            with torch.cuda.stream(self._stream):
                self._add_and_gather(bucket, *self._scatter(bucket)).wait()

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gather_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        gathering = [self._add_and_gather(*scattered) for scattered in self._scattered]
        self._scattered.clear()
        for messages in gathering:
            messages.wait()
        with translate_peer_errors():
            for work in self._all_reduces:
                work.wait()
        self._all_reduces.clear()
        self._join()

    def close(self) -> None:
        self._scattered.clear()
        self._all_reduces.clear()
        # The messages of an unfinished step may still write into the buffers, whose memory the current stream reuses.
        self._join()
        self.grad_buffers.clear()

    def _join(self) -> None:
        """Have the current stream wait for what :meth:`launch` has enqueued."""
        if self._stream is not None:
            torch.cuda.current_stream(self._world.device).wait_stream(self._stream)

    def _all_reduce(self, bucket: int) -> dist.Work:
        with translate_peer_errors():
            work: dist.Work | None = dist.all_reduce(self._part(0, bucket), group=self._world.group, async_op=True)
        assert work is not None
        return work

    def _scatter(self, bucket: int) -> tuple[PendingMessages, dict[int, torch.Tensor]]:
        """Send each owner this rank's parts of its chunk, and receive the other ranks' parts of this rank's.

        Returns:
            The messages, and all subtrees' parts of this rank's chunk, by subtree number.
        """
        rank = self._world.rank
        own = self._chunk(bucket, rank)
        sends, receives, parts = [], [], {}
        for number, (holder, index) in enumerate(self._subtrees):
            if holder == rank:
                part = self._part(index, bucket)
                parts[number] = part[own]
                sends += [
                    Message(part[self._chunk(bucket, owner)], owner, number)
                    for owner in self._plan.active
                    if owner != rank
                ]
            else:
                parts[number] = torch.empty_like(self._part(0, bucket)[own])
                receives.append(Message(parts[number], holder, number))
        return start_messages(self._world, sends, receives), parts

    def _add_and_gather(
        self, bucket: int, scattering: PendingMessages, parts: Mapping[int, torch.Tensor]
    ) -> PendingMessages:
        """Finish this rank's chunk and send it to all ranks, and receive theirs into buffer 0."""
        scattering.wait()
        for into, other in self._combine.additions:
            parts[into].add_(parts[other])
        total = parts[self._combine.root]
        rank, tag = self._world.rank, len(self._subtrees)
        result = self._part(0, bucket)
        own = result[self._chunk(bucket, rank)]
        if own.data_ptr() != total.data_ptr():
            own.copy_(total)
        all_ranks, owners = range(self._world.world_size), self._plan.active
        return start_messages(
            self._world,
            [Message(own, peer, tag) for peer in all_ranks if peer != rank],
            [Message(result[self._chunk(bucket, peer)], peer, tag) for peer in owners if peer != rank],
        )

    def _part(self, index: int, bucket: int) -> torch.Tensor:
        span = self._buckets[bucket]
        return self.grad_buffers[index][span.dtype][span.start : span.stop]

    def _chunk(self, bucket: int, rank: int) -> slice:
        """Return the slice that ``rank`` adds; empty for a spare."""
        span, owners = self._buckets[bucket], self._plan.active
        if rank not in owners:
            return slice(0, 0)
        numel, position = span.stop - span.start, owners.index(rank)
        return slice(position * numel // len(owners), (position + 1) * numel // len(owners))


def gather_headers(world: World, header: Sequence[float]) -> list[Sequence[float]]:
    """Return every rank's header, by rank; a collective.

    Raises:
        PeerLostError: a rank is gone.
    """
    mine = torch.tensor(header, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    with translate_peer_errors():
        dist.all_gather(rows, mine, group=world.group)
    return [row.tolist() for row in rows]


# --- The transport between CPU ranks of one host: all gradient buffers are in one shared mapping ---
#
# Autograd accumulates directly into the mapping, so no copy is needed. A step takes two barriers. Between them only
# rank r touches chunk r of every gradient buffer of every rank: it adds the subtrees in the order of the tree, and
# writes the total into chunk r of each rank's buffer 0. Chunk sizes follow the work split.
#
# A spare has no chunk, so no rank waits for it: it arrives at both barriers at once, and reads the results while the
# other ranks run the next step. Headers are therefore kept for two steps.
#
# The barriers spin on counters, and yield. That requires stores to become visible in program order (x86-64's total
# store order); other architectures use the group transport.


_CACHE_LINE = 64
_SPINS_BEFORE_YIELD = 100
_YIELDS_BEFORE_SLEEP = 20_000
_YIELDS_BETWEEN_CHECKS = 512
_SLEEPS_BETWEEN_CHECKS = 64
_SLEEP_S = 100e-6


def supported(world: World) -> bool:
    """Return whether the ranks of ``world`` can share memory through this transport."""
    return world.one_host and world.device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")


class SharedMemoryTransport:
    """Sums the gradient buffers of all ranks of one host in place.

    Args:
        world: the ranks; the construction is a collective.
        plan: the work split and the tree.
        numels: elements of each dtype's flat buffer, the same on every rank.
        header_length: number of float64 values of a header.
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
        numels: Mapping[torch.dtype, int],
        header_length: int,
        timeout_s: float,
    ) -> None:
        self._rank = world.rank
        flat_buffer_bytes = {dtype: _round_up(numel * dtype.itemsize) for dtype, numel in numels.items()}
        grad_buffer_bytes = sum(flat_buffer_bytes.values())
        header_bytes = _round_up(header_length * 8)
        headers_at = world.world_size * _CACHE_LINE
        buffers_at = headers_at + 2 * world.world_size * header_bytes
        memory = map_shared(world, buffers_at + sum(plan.num_grad_buffers) * grad_buffer_bytes)

        words = memoryview(memory)
        arrivals = words[:headers_at].cast("q")[:: _CACHE_LINE // 8]
        headers = [
            words[headers_at + r * header_bytes :][: header_length * 8].cast("d") for r in range(2 * world.world_size)
        ]
        self._headers = headers[: world.world_size]
        self._next_headers = headers[world.world_size :]
        all_buffers: list[list[GradBuffer]] = []
        offset = buffers_at
        for num_buffers in plan.num_grad_buffers:
            all_buffers.append([])
            for _ in range(num_buffers):
                grad_buffer: GradBuffer = {}
                for dtype, numel in numels.items():
                    grad_buffer[dtype] = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
                    offset += flat_buffer_bytes[dtype]
                all_buffers[-1].append(grad_buffer)
        self.grad_buffers = all_buffers[self._rank]

        first = plan.first_microbatches[self._rank]
        microbatches = range(first, first + plan.work_split[self._rank])
        self._is_spare = not microbatches
        chunks = {dtype: _chunk(numel, microbatches, plan.num_microbatches) for dtype, numel in numels.items()}
        own_chunks = {dtype: chunk for dtype, chunk in chunks.items() if chunk.stop > chunk.start}
        self._subtree_chunks = [
            [buffers[position][dtype][chunk] for dtype, chunk in own_chunks.items()]
            for buffers, subtrees in zip(all_buffers, plan.subtrees, strict=True)
            for position in range(len(subtrees))
        ]
        self._result_chunks = [
            [buffers[0][dtype][chunk] for dtype, chunk in own_chunks.items()] for buffers in all_buffers
        ]
        self._barrier = _SpinBarrier(
            arrivals,
            self._rank,
            world.all_gather_object(os.getpid()),
            timeout_s,
            world.is_broken,
            yields_at_once=self._is_spare,
        )

    def launch(self, bucket: int) -> None:
        raise AssertionError("shared memory needs no sending")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        headers = self._headers
        self._headers = self._next_headers
        self._next_headers = headers
        mine = headers[self._rank]
        for index, value in enumerate(header):
            mine[index] = value
        self._barrier.wait(also_next=self._is_spare)
        return [view.tolist() for view in headers]

    def reduce(self, combine: Combine) -> None:
        for into, other in combine.additions:
            for total, part in zip(self._subtree_chunks[into], self._subtree_chunks[other], strict=True):
                total.add_(part)
        root = self._subtree_chunks[combine.root]
        for result in self._result_chunks:
            for copy, total in zip(result, root, strict=True):
                if copy.data_ptr() != total.data_ptr():
                    copy.copy_(total)
        self._barrier.wait()

    def close(self) -> None:
        # Tensors may still view the mapping (as gradients); it is unmapped with the last one.
        self._barrier.close()
        for views in (
            self.grad_buffers,
            self._subtree_chunks,
            self._result_chunks,
            self._headers,
            self._next_headers,
        ):
            views.clear()


class _SpinBarrier:
    """A barrier of all ranks of one host; counters only rise, so it needs no reset."""

    def __init__(
        self,
        arrivals: memoryview,
        rank: int,
        pids: Sequence[int],
        timeout_s: float,
        is_broken: Callable[[], bool],
        *,
        yields_at_once: bool,
    ) -> None:
        self._arrivals = arrivals
        self._rank = rank
        self._is_broken = is_broken
        self._peers = [peer for peer in range(len(pids)) if peer != rank]
        self._timeout_s = timeout_s
        # A spare, for which no rank waits, yields the processor at once.
        self._spins, self._yields = (0, 0) if yields_at_once else (_SPINS_BEFORE_YIELD, _YIELDS_BEFORE_SLEEP)
        self._count = 0
        self._exits = select.poll()
        self._rank_of_descriptor: dict[int, int] = {}
        for peer in self._peers:
            # Readable once the process has ended. If a sandbox forbids it, only the timeout
            # detects a death.
            try:
                descriptor = os.pidfd_open(pids[peer])
            except ProcessLookupError:
                raise PeerLostError(f"rank {peer} ended while the ranks joined", peer) from None
            except OSError:
                continue
            self._rank_of_descriptor[descriptor] = peer
            self._exits.register(descriptor, select.POLLIN)

    def wait(self, *, also_next: bool = False) -> None:
        """Wait for all ranks.

        Args:
            also_next: arrive at the next barrier too, so that no rank waits for this one there.
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
            # A peer that arrived before it ended has done its part.
            if self._arrivals[lost] < count:
                raise PeerLostError(f"rank {lost} ended while rank {self._rank} waited for it", lost)
        if self._is_broken():
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
    """Return a rank's part of a flat buffer, at multiples of 16 elements so that no cache line has two writers."""
    blocks = -(-numel // 16)
    start, stop = (
        microbatches.start * blocks // num_microbatches * 16,
        microbatches.stop * blocks // num_microbatches * 16,
    )
    return slice(min(start, numel), min(stop, numel))


def map_shared(world: World, nbytes: int) -> mmap.mmap:
    """Map the same zeroed memory in every rank; a collective.

    The file has no name, so that nothing remains when a rank is killed, and is in no file system, whose limit (64 MiB
    in many containers' /dev/shm) would apply.

    Raises:
        OSError: there is too little memory; raised on every rank.
    """
    memory: mmap.mmap | None = None
    descriptor, path, failure = -1, "", ""
    try:
        if world.rank == 0:
            try:
                descriptor = os.memfd_create("paceline")
                # Reserve the pages now, because touching an unavailable one kills with SIGBUS.
                os.posix_fallocate(descriptor, 0, nbytes)
                memory = mmap.mmap(descriptor, nbytes)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            except OSError as error:
                failure = _too_little(nbytes, error)
        path, failure = world.broadcast_object([path, failure])
        if not failure and world.rank != 0:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                memory = mmap.mmap(descriptor, nbytes)
            except OSError as error:
                failure = _too_little(nbytes, error)
        # Also waits until all ranks have opened it.
        failures = [text for text in world.all_gather_object(failure) if text]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or failures:
        raise OSError(failures[0])
    return memory


def _too_little(nbytes: int, error: OSError) -> str:
    return f"{nbytes / 2**20:.0f} MiB of shared memory: {error.strerror}"
