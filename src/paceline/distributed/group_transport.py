"""The transport over a process group (gloo or NCCL): several hosts, or GPUs.

Each rank that has shards owns one chunk of every bucket; the chunks are equal, whatever the shares, for
a slow processor need not have a slow network. While backward still runs, the others send it their
nodes' parts of that chunk; it adds them up in the order of the tree and sends the total back to
everybody. Where each rank's shards are one node, the volume is that of a ring all-reduce. A spare
only receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paceline.distributed.transport import Bucket, Slot
from paceline.distributed.tree import Combine, ReductionPlan
from paceline.distributed.world import World, lost_peers_reported


@dataclass
class _Sending:
    """One bucket on its way: receipts of the others' parts of this rank's chunk, by node number."""

    works: list[dist.Work]
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class GroupTransport:
    """Sums the slots of all ranks by point-to-point messages (``exact``) or all-reduce (``fast``).

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
        self._nodes = [(rank, slot) for rank, nodes in enumerate(plan.nodes) for slot in range(len(nodes))]
        self.slots: list[Slot] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=world.device) for dtype, numel in lanes.items()}
            for _ in range(plan.slots[world.rank])
        ]
        self._sent: dict[int, _Sending] = {}

    def launch(self, bucket: int) -> None:
        self._sent[bucket] = self._all_reduce(bucket) if self._plan.kind == "fast" else self._scatter(bucket)

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gathered_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        gathering: list[dist.Work] = []
        with lost_peers_reported():
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
        self.slots.clear()

    def _all_reduce(self, bucket: int) -> _Sending:
        with lost_peers_reported():
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
                    (part[self._chunk(bucket, owner)], owner, number)
                    for owner in self._plan.computing
                    if owner != rank
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
        everybody, owners = range(self._world.world_size), self._plan.computing
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
        with lost_peers_reported():
            return list(dist.batch_isend_irecv(operations)) if operations else []

    def _part(self, slot: int, bucket: int) -> torch.Tensor:
        where = self._buckets[bucket]
        return self.slots[slot][where.dtype][where.start : where.stop]

    def _chunk(self, bucket: int, rank: int) -> slice:
        """What ``rank`` adds up; nothing where it is a spare."""
        where, owners = self._buckets[bucket], self._plan.computing
        if rank not in owners:
            return slice(0, 0)
        numel, position = where.stop - where.start, owners.index(rank)
        return slice(position * numel // len(owners), (position + 1) * numel // len(owners))


def gathered_headers(world: World, header: Sequence[float]) -> list[Sequence[float]]:
    """Every rank's header, by rank; all ranks call this together.

    Raises:
        PeerLostError: a rank is gone.
    """
    mine = torch.tensor(header, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    with lost_peers_reported():
        dist.all_gather(rows, mine, group=world.group)
    return [row.tolist() for row in rows]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
