"""Tensors that travel together: one flat tensor on the CPU for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from paceline.distributed.world import World, lost_peers_reported


class Parcel:
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
        with lost_peers_reported():
            for flat in self._flats.values():
                dist.send(flat, group=world.group, tag=tag, group_dst=peer)

    def receive(self, world: World, peer: int, tag: int) -> None:
        """Wait for what the peer sends with this tag."""
        with lost_peers_reported():
            for flat in self._flats.values():
                dist.recv(flat, group=world.group, tag=tag, group_src=peer)

    def broadcast(self, world: World, source: int) -> None:
        """Give every rank what ``source`` has in here; all ranks call this together."""
        with lost_peers_reported():
            for flat in self._flats.values():
                dist.broadcast(flat, group=world.group, group_src=source)
