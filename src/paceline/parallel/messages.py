"""Tensors of several kinds in one message, received from any rank, and averaged."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist

from paceline.parallel.reducer import make_transport
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import Bucket, GradBuffer, Transport
from paceline.parallel.world import World, translate_peer_errors

# --- Tensors that travel together: one flat tensor on the CPU for each dtype ---


class TensorBundle:
    """A place for copies of some tensors, that is sent and received as a whole.

    It lies on the CPU, and so goes through gloo whatever the device: who is awaited, and in which order, is
    up to the peers, which NCCL does not allow for.

    Attributes:
        views: the copies, one a tensor, with its shape.

    Args:
        like: tensors of these shapes and dtypes.

    Raises:
        PeerLostError: (from the methods that send and receive) the peer is gone.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes: dict[torch.dtype, int] = {}
        places = []
        for tensor in like:
            start = sizes.get(tensor.dtype, 0)
            sizes[tensor.dtype] = start + tensor.numel()
            places.append((tensor.dtype, start, tensor.shape))
        self._flats = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items() if size}
        self.views = [
            self._flats[dtype][start : start + shape.numel()].view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
            for dtype, start, shape in places
        ]

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors in."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what is in here into the tensors."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)

    def send(self, world: World, peer: int, tag: int) -> None:
        """Send it; return once it may be changed."""
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.send(flat, group=world.group, tag=tag, group_dst=peer)

    def receive(self, world: World, peer: int, tag: int) -> None:
        """Wait for what the peer sends with this tag."""
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.recv(flat, group=world.group, tag=tag, group_src=peer)

    def broadcast(self, world: World, source: int) -> None:
        """Give every rank what ``source`` has in here; all ranks call this together."""
        with translate_peer_errors():
            for flat in self._flats.values():
                dist.broadcast(flat, group=world.group, group_src=source)


# --- Messages of several peers, in the order in which they come ---
#
# Gloo can receive from whoever sends first, but then does not notice that a peer is gone (measured: a server
# waited for ever for workers that had all been killed). So a thread waits for each peer, whose end it
# notices.


class AnySourceReceiver:
    """Receives one message at a time from each peer that one is expected from.

    Args:
        world: the ranks.
        peers: the ranks that send.
        length: float64 numbers in a message.
        tag: of the messages.
    """

    def __init__(self, world: World, peers: Iterable[int], length: int, tag: int) -> None:
        self._world, self._length, self._tag = world, length, tag
        self._arrived: queue.SimpleQueue[tuple[int, list[float] | Exception]] = queue.SimpleQueue()
        self._kept: dict[int, list[float]] = {}
        self._wanted: dict[int, queue.SimpleQueue[bool]] = {peer: queue.SimpleQueue() for peer in peers}
        for peer in self._wanted:
            # A daemon: on an error it waits until the group is destroyed, and nobody waits for it.
            threading.Thread(target=self._listen, args=(peer,), name=f"from-{peer}", daemon=True).start()

    def expect(self, peer: int) -> None:
        """The peer will send a message."""
        self._wanted[peer].put(True)

    def next(self, peer: int | None = None) -> tuple[int, list[float]]:
        """Wait for the next message that was expected.

        Args:
            peer: whose it has to be; those of others wait meanwhile. None: whoever's.

        Returns:
            The sender and the message.

        Raises:
            PeerLostError: a peer that was to send is gone.
        """
        while True:
            if peer is None and self._kept:
                sender = next(iter(self._kept))
                return sender, self._kept.pop(sender)
            if peer in self._kept:
                return peer, self._kept.pop(peer)
            sender, message = self._arrived.get()
            if isinstance(message, Exception):
                raise message
            self._kept[sender] = message

    def close(self) -> None:
        """Receive no more."""
        for wanted in self._wanted.values():
            wanted.put(False)

    def _listen(self, peer: int) -> None:
        while self._wanted[peer].get():
            message = torch.empty(self._length, dtype=torch.float64)
            try:
                with translate_peer_errors():
                    dist.recv(message, group=self._world.group, tag=self._tag, group_src=peer)
            except Exception as error:
                self._arrived.put((peer, error))
                return
            self._arrived.put((peer, message.tolist()))


# --- The mean of the ranks' tensors, summed along a fixed tree over the ranks ---


_BUCKET_BYTES = 25 * 2**20


class ParameterAverager:
    """Averages tensors over the ranks, and has every rank see every rank's header.

    A mean is ``sum(weight * tensor) / sum(weights)``, in float32 at least, along the tree over the ranks that
    gradients are summed along over the micro-batches. Whole numbers are averaged rounded down.

    Args:
        world: the ranks; all of them use it alike.
        shares: how many micro-batches each has; what a rank weighs.
        header_length: float64 numbers in a header.
        timeout_s: how long a rank may keep the others waiting.
    """

    def __init__(self, world: World, shares: Sequence[int], header_length: int, timeout_s: float) -> None:
        self._world = world
        # With equal shares nobody is multiplied, and a rank alone keeps its bits.
        common = math.gcd(*shares)
        self._weight, self._total = shares[world.rank] // common, sum(shares) // common
        self._plan = ReductionPlan(world.world_size, world.world_size)
        self._header_length = header_length
        self._timeout_s = timeout_s
        self._sizes: dict[torch.dtype, int] = {}
        self._buckets: list[Bucket] = []
        self._transport: Transport | None = None

    def average(self, tensors: Sequence[torch.Tensor], header: Sequence[float]) -> list[Sequence[float]]:
        """Set each tensor to its mean over the ranks; all of them give equally many of the same shapes.

        Returns:
            Every rank's header, by rank.

        Raises:
            PeerLostError: a rank went away; the tensors are undefined.
        """
        transport = self._transport_for(tensors)
        slot = transport.grad_buffers[0]
        _pack(tensors, slot)
        if self._weight != 1:
            for lane in slot.values():
                lane.mul_(self._weight)
        self._world.progress_tracker.begin_collective("all-reduce")
        if transport.overlaps:
            for bucket in range(len(self._buckets)):
                transport.launch(bucket)
        headers = transport.exchange([*header, *[0.0] * (self._header_length - len(header))])
        transport.reduce(self._plan.combination((True,) * self._world.world_size))
        self._world.progress_tracker.end_collective()
        for dtype, lane in slot.items():
            lane.div_(self._total, rounding_mode=None if dtype.is_floating_point else "floor")
        _unpack(slot, tensors)
        return headers

    def close(self) -> None:
        """Free the memory that the ranks share."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _transport_for(self, tensors: Sequence[torch.Tensor]) -> Transport:
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            lane = _lane(tensor)
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


def _lane(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor is summed in: half-precision sums would lose digits."""
    if tensor.dtype.is_floating_point:
        return torch.promote_types(tensor.dtype, torch.float32)
    return torch.int64


def _pack(tensors: Sequence[torch.Tensor], slot: GradBuffer) -> None:
    start = dict.fromkeys(slot, 0)
    for tensor in tensors:
        dtype = _lane(tensor)
        stop = start[dtype] + tensor.numel()
        slot[dtype][start[dtype] : stop].copy_(tensor.detach().reshape(-1))
        start[dtype] = stop


def _unpack(slot: GradBuffer, tensors: Sequence[torch.Tensor]) -> None:
    start = dict.fromkeys(slot, 0)
    for tensor in tensors:
        dtype = _lane(tensor)
        stop = start[dtype] + tensor.numel()
        with torch.no_grad():
            tensor.copy_(slot[dtype][start[dtype] : stop].view(tensor.shape))
        start[dtype] = stop
