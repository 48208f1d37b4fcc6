"""A reduce-scatter that sums along the tree of shards, round by round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import World, lost_peers_reported


class _InPlainMemory(ReduceScatter):
    """A reduce-scatter that needs memory of no special kind."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for its input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class TreeReduceScatter(_InPlainMemory):
    """Sums what the ranks contribute in the rounds of a step, in the order of the tree over all shards.

    In each round of a step every rank gives the gradient of one shard. Each owner of a chunk receives the
    round's contributions to it, and adds them as soon as the tree allows; the last round gives the total, the
    others zeros, so that whoever adds up the rounds' results has the total. Between two rounds at most
    log2(S) partial sums are kept, and none between two steps.

    Where several ranks hold the same chunk, each of them sums a part of it, and they exchange the totals.

    Args:
        num_shards: S.
        data: all ranks that contribute, those that hold copies of the same chunk W / copies apart.
        copies: those that hold the same chunk as this one.
    """

    def __init__(self, num_shards: int, data: World, copies: World) -> None:
        self._data, self._copies = data, copies
        self._plan = ReductionPlan(num_shards, 1)
        self._slots: dict[int, torch.Tensor] = {}
        self._rounds: list[list[int | None]] = []
        self._waiting: dict[int, torch.Tensor] = {}

    def begin(self, rounds: Sequence[Sequence[int | None]]) -> None:
        """Start a step.

        Args:
            rounds: for each round the shard of each rank, None where a rank's contribution weighs nothing.
        """
        present = sorted(shard for of_round in rounds for shard in of_round if shard is not None)
        self._rounds = [list(of_round) for of_round in reversed(rounds)]
        self._leaves = list(reversed(present))
        self._steps = list(reversed(self._plan.accumulation(0, present)))
        nodes = self._plan.nodes[0]
        self._present = tuple(any(n.start <= shard < n.stop for shard in present) for n in nodes)
        self._waiting.clear()
        self._slots.clear()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        sent = self._by_owner(input_tensor, group.size())
        received = torch.empty_like(sent)
        self._data.activity.enter("reduce-scatter")
        with lost_peers_reported():
            dist.all_to_all_single(received, sent, group=self._data.group)
        self._data.activity.leave()
        for shard, contribution in zip(
            self._rounds.pop(), received.chunk(self._data.world_size), strict=True
        ):
            if shard is not None:
                self._waiting[shard] = contribution
        while self._leaves and self._leaves[-1] in self._waiting:
            self._add(self._waiting.pop(self._leaves.pop()))
        if self._rounds:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._of_all_copies(self._total())[: output_tensor.numel()])
        return None

    def _by_owner(self, contribution: torch.Tensor, chunks: int) -> torch.Tensor:
        """What each rank is to sum, by rank: chunk after chunk, or the first part of all chunks first."""
        copies = self._copies.world_size
        if copies == 1:
            return contribution
        of_chunk = contribution.view(chunks, -1)
        part = -(-of_chunk.shape[1] // copies)
        padded = contribution.new_zeros(chunks, copies * part)
        padded[:, : of_chunk.shape[1]] = of_chunk
        return padded.view(chunks, copies, part).transpose(0, 1).reshape(-1)

    def _of_all_copies(self, total: torch.Tensor) -> torch.Tensor:
        if self._copies.world_size == 1:
            return total
        chunk = total.new_empty(self._copies.world_size * total.numel())
        with lost_peers_reported():
            dist.all_gather_into_tensor(chunk, total, group=self._copies.group)
        return chunk

    def _add(self, contribution: torch.Tensor) -> None:
        step = self._steps.pop()
        if not step.fresh:
            self._slots[step.slot].add_(contribution)
        elif self._rounds:
            # A copy: what is kept until the next round must not hold all that was received.
            self._slots[step.slot] = contribution.clone()
        else:
            self._slots[step.slot] = contribution
        for into, other in step.merges:
            self._slots[into].add_(self._slots.pop(other))

    def _total(self) -> torch.Tensor:
        combine = self._plan.combination(self._present)
        for into, other in combine.additions:
            self._slots[into].add_(self._slots[other])
        total = self._slots[combine.root]
        self._slots = {}
        return total


class ReduceScatterOverCopies(_InPlainMemory):
    """torch's own reduce-scatter, and then the sum over the ranks that hold the same chunk.

    Args:
        copies: these ranks.
    """

    def __init__(self, copies: World) -> None:
        self._copies = copies

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        with lost_peers_reported():
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
            dist.all_reduce(output_tensor, group=self._copies.group)
        return None
