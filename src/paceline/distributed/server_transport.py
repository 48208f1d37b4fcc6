"""The transport of a synchronous parameter server: workers push their sums, servers add them up.

Each server receives its parameters' part of every worker's nodes, and adds them up in the order of the tree
(Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014, with the tree in place of
the order of arrival). The total of the gradients stays there: workers get parameters back, and no gradients.
Buffers, which no optimizer changes, are added up by the first server, and everybody gets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist

from paceline.distributed.group_transport import gathered_headers
from paceline.distributed.transport import Slot
from paceline.distributed.tree import Combine, ReductionPlan
from paceline.distributed.world import World, lost_peers_reported

Stretches = Mapping[torch.dtype, slice]
"""A part of each lane."""


class ServerTransport:
    """Sums the slots of all workers on the servers, each its own part.

    Args:
        world: the ranks; the first ones are servers.
        plan: who computes what; servers compute nothing.
        lanes: elements of each dtype's lane, the same on every rank.
        parts: each server's part of the gradients.
        buffers: the part of the lanes that holds buffers.

    Raises:
        PeerLostError: (from the methods) a connection broke.
    """

    overlaps = False

    def __init__(
        self,
        world: World,
        plan: ReductionPlan,
        lanes: Mapping[torch.dtype, int],
        parts: Sequence[Stretches],
        buffers: Stretches,
    ) -> None:
        self._world = world
        self._parts = parts
        self._buffers = buffers
        self._nodes = [(rank, slot) for rank, nodes in enumerate(plan.nodes) for slot in range(len(nodes))]
        self.slots: list[Slot] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=world.device) for dtype, numel in lanes.items()}
            for _ in range(plan.slots[world.rank])
        ]

    def launch(self, bucket: int) -> None:
        raise AssertionError("sums are pushed when all of them are there")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gathered_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        if self._world.rank < len(self._parts):
            self._add_up(combine)
        else:
            self._push()
        with lost_peers_reported():
            for dtype, stretch in self._buffers.items():
                dist.broadcast(self.slots[0][dtype][stretch], group=self._world.group, group_src=0)

    def close(self) -> None:
        self.slots.clear()

    def _push(self) -> None:
        works = []
        with lost_peers_reported():
            for number, (holder, slot) in enumerate(self._nodes):
                if holder != self._world.rank:
                    continue
                for server in range(len(self._parts)):
                    for dtype, stretch in self._of(server):
                        part = self.slots[slot][dtype][stretch]
                        works.append(dist.isend(part, group=self._world.group, tag=number, group_dst=server))
            for work in works:
                assert work is not None
                work.wait()

    def _add_up(self, combine: Combine) -> None:
        mine = self._of(self._world.rank)
        works, received = [], []
        with lost_peers_reported():
            for number, (holder, _) in enumerate(self._nodes):
                received.append([torch.empty_like(self.slots[0][dtype][s]) for dtype, s in mine])
                for part in received[-1]:
                    works.append(dist.irecv(part, group=self._world.group, tag=number, group_src=holder))
            for work in works:
                assert work is not None
                work.wait()
        for into, other in combine.additions:
            for total, part in zip(received[into], received[other], strict=True):
                total.add_(part)
        for (dtype, stretch), total in zip(mine, received[combine.root], strict=True):
            self.slots[0][dtype][stretch] = total

    def _of(self, server: int) -> list[tuple[torch.dtype, slice]]:
        """What goes to one server: its part of the gradients, and to the first one the buffers."""
        found = list(self._parts[server].items())
        return found + list(self._buffers.items()) if server == 0 else found
