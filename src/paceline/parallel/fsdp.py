"""Fully sharded data parallelism with the exact reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.parallel.gradient_norm import clip_gradients
from paceline.parallel.microbatches import ExternalReduceStrategy
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.sharded_state import gather_full
from paceline.parallel.strategy import AMP_DTYPES, StrategyOptions
from paceline.parallel.world import ParallelDims, World, translate_peer_errors
from paceline.parallel.wrap_units import exclude_tied, wrap_units

# --- A reduce-scatter that sums along the tree of micro-batches, round by round ---


class _InPlainMemory(ReduceScatter):
    """A reduce-scatter that needs memory of no special kind."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for its input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class TreeReduceScatter(_InPlainMemory):
    """Sums what the ranks contribute in the rounds of a step, in the order of the tree over all micro-batches.

    In each round of a step every rank gives the gradient of one micro-batch. Each owner of a chunk receives the
    round's contributions to it, and adds them as soon as the tree allows; the last round gives the total, the
    others zeros, so that whoever adds up the rounds' results has the total. Between two rounds at most
    log2(S) partial sums are kept, and none between two steps.

    Where several ranks hold the same chunk, each of them sums a part of it, and they exchange the totals.

    Args:
        num_microbatches: S.
        data: all ranks that contribute, those that hold copies of the same chunk W / copies apart.
        copies: those that hold the same chunk as this one.
    """

    def __init__(self, num_microbatches: int, data: World, copies: World) -> None:
        self._data, self._copies = data, copies
        self._plan = ReductionPlan(num_microbatches, 1)
        self._grad_buffers: dict[int, torch.Tensor] = {}
        self._micro_steps: list[list[int | None]] = []
        self._waiting: dict[int, torch.Tensor] = {}

    def begin(self, rounds: Sequence[Sequence[int | None]]) -> None:
        """Start a step.

        Args:
            rounds: for each round the micro-batch of each rank, None where a rank's contribution weighs nothing.
        """
        present = sorted(microbatch for of_round in rounds for microbatch in of_round if microbatch is not None)
        self._micro_steps = [list(of_round) for of_round in reversed(rounds)]
        self._leaves = list(reversed(present))
        self._steps = list(reversed(self._plan.accumulation(0, present)))
        nodes = self._plan.subtrees[0]
        self._present = tuple(any(n.start <= microbatch < n.stop for microbatch in present) for n in nodes)
        self._waiting.clear()
        self._grad_buffers.clear()

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
        self._data.progress_tracker.begin_collective("reduce-scatter")
        with translate_peer_errors():
            dist.all_to_all_single(received, sent, group=self._data.group)
        self._data.progress_tracker.end_collective()
        for microbatch, contribution in zip(
            self._micro_steps.pop(), received.chunk(self._data.world_size), strict=True
        ):
            if microbatch is not None:
                self._waiting[microbatch] = contribution
        while self._leaves and self._leaves[-1] in self._waiting:
            self._add(self._waiting.pop(self._leaves.pop()))
        if self._micro_steps:
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
        with translate_peer_errors():
            dist.all_gather_into_tensor(chunk, total, group=self._copies.group)
        return chunk

    def _add(self, contribution: torch.Tensor) -> None:
        step = self._steps.pop()
        if not step.fresh:
            self._grad_buffers[step.slot].add_(contribution)
        elif self._micro_steps:
            # A copy: what is kept until the next round must not hold all that was received.
            self._grad_buffers[step.slot] = contribution.clone()
        else:
            self._grad_buffers[step.slot] = contribution
        for into, other in step.merges:
            self._grad_buffers[into].add_(self._grad_buffers.pop(other))

    def _total(self) -> torch.Tensor:
        combine = self._plan.combination(self._present)
        for into, other in combine.additions:
            self._grad_buffers[into].add_(self._grad_buffers[other])
        total = self._grad_buffers[combine.root]
        self._grad_buffers = {}
        return total


class ReduceScatterOverReplicas(_InPlainMemory):
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
        with translate_peer_errors():
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
            dist.all_reduce(output_tensor, group=self._copies.group)
        return None


# --- Fully sharded data parallelism by torch's ``fully_shard`` (FSDP2, ZeRO-3) ---
#
# Every rank keeps 1/W of each parameter, gradient and optimizer state. A block's parameters are gathered for
# its forward and again for its backward, and its gradients are scattered summed: Rajbhandari et al., "ZeRO:
# Memory Optimizations Toward Training Trillion Parameter Models", 2020.


AUTO_WRAP = "1M"
_CAST = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
"""The modules whose parameters autocast casts, all of them."""


class FullyShard:
    """Shards a model's parameters over the ranks of the mesh's ``fsdp`` axis, block by block.

    Along its ``dp`` axis every rank holds the same part (hybrid sharding: Zhao et al., "PyTorch FSDP", 2023).

    Args:
        mesh: the ranks.
        config: which modules are gathered as one block, and how; "auto" is :data:`AUTO_WRAP`.
    """

    is_collective = True

    def __init__(self, mesh: ParallelDims, config: RunConfig) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError("--strategy fsdp shards a model over processes, but there is one. Use --strategy single.")
        self._mesh = mesh
        self._config = config
        self._wrap = AUTO_WRAP if config.fsdp_wrap == "auto" else config.fsdp_wrap

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        module.to(device)
        # A model may be built with randomness that no seed of torch's reaches.
        self._mesh.world.broadcast_module(module)
        assert self._mesh.device_mesh is not None
        config = self._config
        reshard = {"auto": None, "always": True, "never": False}[config.fsdp_reshard]
        options: dict[str, Any] = {
            "mesh": self._mesh.device_mesh["fsdp"],
            "reshard_after_forward": reshard,
        }
        if config.fsdp_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for unit in [*self._units(module), module]:
            # What autocast computes in float32 is gathered in float32.
            lowered = config.fsdp_mixed_precision and _is_cast(unit)
            fully_shard(unit, mp_policy=self._precision() if lowered else MixedPrecisionPolicy(), **options)
        return module

    def _units(self, module: nn.Module) -> list[nn.Module]:
        """What is gathered by itself, inner ones first; the rest is gathered with the model."""
        chosen = {id(block) for block in wrap_units(module, self._wrap)}
        if self._config.fsdp_mixed_precision:
            chosen |= {
                id(child) for child in module.modules() if not isinstance(child, _CAST) and _holds_parameters(child)
            }
        below = [child for child in module.modules() if child is not module and id(child) in chosen]
        return exclude_tied(module, reversed(below))

    def _precision(self) -> MixedPrecisionPolicy:
        # Inputs are left alone: autocast casts them where it should, and integers must stay.
        return MixedPrecisionPolicy(
            param_dtype=AMP_DTYPES[self._config.precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers  # their state follows the parameters

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        twin = self.place(build(), device)
        twin.load_state_dict(like.state_dict())
        for unit in twin.modules():
            if isinstance(unit, FSDPModule):
                # No backward frees what it gathers, and the average changes only what is not gathered.
                unit.set_reshard_after_forward(True, recurse=False)
        return twin

    def full(self, state: Any, *, keep: bool) -> Any:
        return gather_full(state, keep=keep)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        clip_gradients(module.parameters(), max_norm)


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


class FSDP(ExternalReduceStrategy):
    """Sums a step over ranks that hold a part of the model each.

    With ``exact``, every micro-batch's gradient is scattered in a round of its own and added along the tree over
    all micro-batches, so that the bits are those of every other number of ranks; with ``allreduce``, a rank adds up its
    micro-batches' gradients and scatters once.

    Args:
        module: as :class:`FullyShard` placed it.
        mesh: the ranks.
        options: the strategy's.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        num_microbatches = sum(options.work_split)
        plan = ReductionPlan(num_microbatches, mesh.data.world_size, interleaved=True)
        super().__init__(module, mesh, plan, options)
        self._world = mesh.data
        self._num_microbatches = num_microbatches
        self._exact = options.kind == "exact"
        # Gathered parameters are kept from the first forward of a step to its last backward.
        self._keeps = options.config.fsdp_reshard == "never"
        copies = mesh.submesh(("dp",))
        self._micro_steps: list[list[int | None]] = []
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._sums: list[TreeReduceScatter] = []
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            # What a micro-batch does not use weighs nothing; all ranks scatter the same in every round.
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            if not any(parameter.requires_grad for parameter in _own_parameters(unit)):
                continue
            if self._exact:
                self._sums.append(TreeReduceScatter(num_microbatches, mesh.data, copies))
                unit.set_custom_reduce_scatter(self._sums[-1])
            elif copies.world_size > 1:
                unit.set_custom_reduce_scatter(ReduceScatterOverReplicas(copies))

    def begin_step(self, present: Sequence[int]) -> None:
        self._micro_steps = self._agree_on_micro_steps(present)
        for sums in self._sums:
            sums.begin(self._micro_steps)
        super().begin_step(present)

    def _count_micro_steps(self, present: Sequence[int]) -> int:
        return len(self._micro_steps)

    def _agree_on_micro_steps(self, present: Sequence[int]) -> list[list[int | None]]:
        """Each rank's present micro-batch, round by round: a short batch, or a stream, lacks some."""
        there = torch.zeros(self._num_microbatches, dtype=torch.uint8)
        there[list(present)] = 1
        with translate_peer_errors():
            dist.all_reduce(there, group=self._world.group)
        size = self._world.world_size
        of_ranks = [[k for k in range(r, self._num_microbatches, size) if there[k]] for r in range(size)]
        longest = max(len(microbatches) for microbatches in of_ranks)
        return [[s[i] if i < len(s) else None for s in of_ranks] for i in range(longest)]

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        is_last = self._micro_steps_left == 0
        for unit in self._units:
            if not self._exact:
                unit.set_requires_gradient_sync(is_last, recurse=False)
            if self._keeps:
                unit.set_reshard_after_backward(is_last, recurse=False)

    def backward(self, loss: torch.Tensor) -> None:
        # The exact sum enters each of its exchanges itself.
        if not self._exact:
            self._world.progress_tracker.begin_collective("reduce-scatter")
        with translate_peer_errors():
            super().backward(loss)
        if not self._exact:
            self._world.progress_tracker.end_collective()

    def close(self) -> None:
        super().close()
        for parameter in self._parameters:
            parameter.grad = None


def _is_cast(unit: nn.Module) -> bool:
    """Whether autocast casts all parameters that are to be gathered with ``unit``."""
    own = {id(parameter) for parameter in _own_parameters(unit)}
    return all(
        isinstance(owner, _CAST)
        for owner in unit.modules()
        if any(id(parameter) in own for parameter in owner.parameters(recurse=False))
    )


def _own_parameters(unit: nn.Module) -> Sequence[nn.Parameter]:
    """The parameters that are gathered with ``unit``: not those of blocks inside of it."""
    inner = {
        id(parameter)
        for child in unit.modules()
        if isinstance(child, FSDPModule) and child is not unit
        for parameter in child.parameters()
    }
    return [parameter for parameter in unit.parameters() if id(parameter) not in inner]
