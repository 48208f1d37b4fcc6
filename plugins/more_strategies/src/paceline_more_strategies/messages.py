"""Bundles of tensors in one message, receivers for any source, and parameter averaging."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import distributed as dist

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reducer import make_transport
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import Bucket, GradBuffer, Transport
from paceline.parallel.world import World

# --- Tensor bundles: one flat tensor for each dtype ---


class TensorBundle:
    """A buffer for copies of some tensors, sent and received as a whole.

    Attributes:
        views: the copies, one per tensor, with its shape.

    Args:
        device: of the bundle. On the CPU it goes through gloo, also between GPUs; choose that where peers send in any
            order, which NCCL does not support.

    Raises:
        PeerLostError: (from the methods that send and receive) the peer is gone.
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        sizes: dict[torch.dtype, int] = {}
        headers = []
        for tensor in like:
            start = sizes.get(tensor.dtype, 0)
            sizes[tensor.dtype] = start + tensor.numel()
            headers.append((tensor.dtype, start, tensor.shape))
        self._crosses = device.type == "cpu" and any(tensor.is_cuda for tensor in like)
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype, device=device, pin_memory=self._crosses)
            for dtype, size in sizes.items()
            if size
        }
        self.views = [
            self._flats[dtype][start : start + shape.numel()].view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype, device=device)
            for dtype, start, shape in headers
        ]

    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copy(self.views, tensors)

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copy(tensors, self.views)

    def send(self, world: World, peer: int, tag: int) -> None:
        """Send the bundle; return once it may be changed."""
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.send(flat, group=world.group, tag=tag, group_dst=peer)

    def receive(self, world: World, peer: int, tag: int) -> None:
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.recv(flat, group=world.group, tag=tag, group_src=peer)

    def broadcast(self, world: World, source: int) -> None:
        """Broadcast the bundle of ``source``; a collective."""
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.broadcast(flat, group=world.group, group_src=source)

    @torch.no_grad()
    def _copy(self, into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(into, values, strict=True):
            tensor.copy_(value, non_blocking=True)
        if self._crosses:
            # Gloo reads the bundle next, or overwrites it.
            torch.cuda.current_stream().synchronize()


# --- Messages of several peers, in the order of their arrival ---
#
# Gloo can receive from any source, but then does not detect a lost peer (measured: a server waited for ever for workers
# that had all been killed). Therefore one thread per peer waits for its messages.


class AnySourceReceiver:
    """Receives one message at a time from each expected peer.

    Args:
        length: number of float64 values of a message.
    """

    def __init__(self, world: World, peers: Iterable[int], length: int, tag: int) -> None:
        self._world = world
        self._length = length
        self._tag = tag
        self._arrived: queue.SimpleQueue[tuple[int, list[float] | Exception]] = queue.SimpleQueue()
        self._pending: dict[int, list[float]] = {}
        self._expected: dict[int, queue.SimpleQueue[bool]] = {peer: queue.SimpleQueue() for peer in peers}
        for peer in self._expected:
            # A daemon, because after an error it blocks until the group is destroyed.
            threading.Thread(target=self._listen, args=(peer,), name=f"from-{peer}", daemon=True).start()

    def expect(self, peer: int) -> None:
        self._expected[peer].put(True)

    def next(self, peer: int | None = None) -> tuple[int, list[float]]:
        """Wait for the next expected message.

        Args:
            peer: the required sender, while others' messages are queued; None: any.

        Returns:
            The sender and the message.

        Raises:
            PeerLostError: an expected peer is gone.
        """
        while True:
            if peer is None and self._pending:
                sender = next(iter(self._pending))
                return sender, self._pending.pop(sender)
            if peer in self._pending:
                return peer, self._pending.pop(peer)
            sender, message = self._arrived.get()
            if isinstance(message, Exception):
                raise message
            self._pending[sender] = message

    def close(self) -> None:
        for expected in self._expected.values():
            expected.put(False)

    def _listen(self, peer: int) -> None:
        while self._expected[peer].get():
            message = torch.empty(self._length, dtype=torch.float64)
            try:
                with translate_peer_errors():
                    dist.recv(message, group=self._world.group, tag=self._tag, group_src=peer)
            except Exception as error:
                self._arrived.put((peer, error))
                return
            self._arrived.put((peer, message.tolist()))


# --- Parameter averaging: the ranks' mean, summed along a fixed tree over the ranks ---


_BUCKET_BYTES = 25 * 2**20


class ParameterAverager:
    """Averages tensors over the ranks, and gathers every rank's header.

    A mean is ``sum(weight * tensor) / sum(weights)``, in float32 at least, along the reduction tree over the ranks.
    Integers are rounded down.

    Args:
        work_split: its numbers of micro-batches are the weights.
        header_length: number of float64 values of a header.
        timeout_s: how long a rank may keep the others waiting.
    """

    def __init__(self, world: World, work_split: Sequence[int], header_length: int, timeout_s: float) -> None:
        self._world = world
        # With an equal split no tensor is multiplied, so a single rank keeps its bits.
        common = math.gcd(*work_split)
        self._weight = work_split[world.rank] // common
        self._total = sum(work_split) // common
        self._plan = ReductionPlan(world.world_size, world.world_size)
        self._header_length = header_length
        self._timeout_s = timeout_s
        self._sizes: dict[torch.dtype, int] = {}
        self._buckets: list[Bucket] = []
        self._transport: Transport | None = None

    def average(self, tensors: Sequence[torch.Tensor], header: Sequence[float]) -> list[Sequence[float]]:
        """Set each tensor to its mean over the ranks, which all have the same shapes.

        Returns:
            Every rank's header, by rank.

        Raises:
            PeerLostError: a rank is gone; the tensors are undefined.
        """
        transport = self._transport_for(tensors)
        grad_buffer = transport.grad_buffers[0]
        parts = list(_parts(grad_buffer, tensors))
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach())
        if self._weight != 1:
            for flat_buffer in grad_buffer.values():
                flat_buffer.mul_(self._weight)
        self._world.progress_tracker.begin_collective("all-reduce")
        if transport.overlaps:
            for bucket in range(len(self._buckets)):
                transport.launch(bucket)
        headers = transport.exchange([*header, *[0.0] * (self._header_length - len(header))])
        transport.reduce(self._plan.combination((True,) * self._world.world_size))
        self._world.progress_tracker.end_collective()
        for dtype, flat_buffer in grad_buffer.items():
            flat_buffer.div_(self._total, rounding_mode=None if dtype.is_floating_point else "floor")
        with torch.no_grad():
            for part, tensor in zip(parts, tensors, strict=True):
                tensor.copy_(part)
        return headers

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _transport_for(self, tensors: Sequence[torch.Tensor]) -> Transport:
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            lane = _sum_dtype(tensor)
            sizes[lane] = sizes.get(lane, 0) + tensor.numel()
        # An optimizer has no state before its first step.
        if self._transport is None or sizes != self._sizes:
            self.close()
            self._sizes = sizes
            self._buckets = [
                Bucket(dtype, start, min(numel, start + _BUCKET_BYTES // dtype.itemsize))
                for dtype, numel in sizes.items()
                for start in range(0, numel, _BUCKET_BYTES // dtype.itemsize)
            ]
            self._transport = make_transport(
                self._world, self._plan, sizes, self._buckets, self._header_length, self._timeout_s
            )
        return self._transport


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed; half-precision sums would lose digits."""
    if tensor.dtype.is_floating_point:
        return torch.promote_types(tensor.dtype, torch.float32)
    return torch.int64


def _parts(grad_buffer: GradBuffer, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each tensor's part of the flat buffer of its dtype, in the tensor's shape."""
    start = dict.fromkeys(grad_buffer, 0)
    for tensor in tensors:
        dtype = _sum_dtype(tensor)
        stop = start[dtype] + tensor.numel()
        yield grad_buffer[dtype][start[dtype] : stop].view(tensor.shape)
        start[dtype] = stop
