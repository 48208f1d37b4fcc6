"""The mean of the ranks' tensors, summed along a fixed tree over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.distributed.reducer import make_transport
from paceline.distributed.transport import Bucket, Slot, Transport
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import World

_BUCKET_BYTES = 25 * 2**20


class Averager:
    """Averages tensors over the ranks, and has every rank see every rank's header.

    A mean is ``sum(weight * tensor) / sum(weights)``, in float32 at least, along the tree over the ranks that
    gradients are summed along over the shards. Whole numbers are averaged rounded down.

    Args:
        world: the ranks; all of them use it alike.
        shares: how many shards each has; what a rank weighs.
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
        slot = transport.slots[0]
        _pack(tensors, slot)
        if self._weight != 1:
            for lane in slot.values():
                lane.mul_(self._weight)
        self._world.activity.enter("all-reduce")
        if transport.overlaps:
            for bucket in range(len(self._buckets)):
                transport.launch(bucket)
        headers = transport.exchange([*header, *[0.0] * (self._header_length - len(header))])
        transport.reduce(self._plan.combination((True,) * self._world.world_size))
        self._world.activity.leave()
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


def _pack(tensors: Sequence[torch.Tensor], slot: Slot) -> None:
    start = dict.fromkeys(slot, 0)
    for tensor in tensors:
        dtype = _lane(tensor)
        stop = start[dtype] + tensor.numel()
        slot[dtype][start[dtype] : stop].copy_(tensor.detach().reshape(-1))
        start[dtype] = stop


def _unpack(slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
    start = dict.fromkeys(slot, 0)
    for tensor in tensors:
        dtype = _lane(tensor)
        stop = start[dtype] + tensor.numel()
        with torch.no_grad():
            tensor.copy_(slot[dtype][start[dtype] : stop].view(tensor.shape))
        start[dtype] = stop
