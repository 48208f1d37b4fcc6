"""A model cut into stages: each rank holds its own, and nothing of the others but names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.distributed.gradient_norm import norms_of_parts
from paceline.distributed.mesh import Mesh
from paceline.distributed.sharded_state import local_part
from paceline.errors import ConfigError
from paceline.strategies.pipeline import split
from paceline.strategies.pipeline.blocks import Blocks, absent_arguments, find_blocks
from paceline.strategies.pipeline.gathering import gathered
from paceline.strategies.pipeline.layers_in_parts import Splitting, closed
from paceline.strategies.pipeline.link import Link
from paceline.strategies.pipeline.schedule import CHUNKS, Name, most_kept, orders
from paceline.strategies.pipeline.staged import StagedForward, cut
from paceline.strategies.placement import Rehearsal

AXES = ("pp", "mp")
_ROOM = 0.9  # of a device's memory, for what is counted here


class Staged:
    """Lays a model out in stages along a mesh's axis ``pp`` (or ``mp``).

    Args:
        mesh: the ranks.
        name: the strategy's, for messages.
        schedule: says how many stages a rank has, and how many micro-batches they keep.
        how: "balanced", "equal" or a number of blocks for each stage.
        microbatches: that a copy of the model computes in a step.
        rehearsal: what may be tried of the task.
        splitting: splits the layers of each stage over the mesh's innermost axis, where it has one.
    """

    in_step = True

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        schedule: Name,
        how: str,
        microbatches: int,
        rehearsal: Rehearsal,
        splitting: Splitting | None = None,
    ) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                f"--strategy {name} cuts a model over processes, but there is one. Use --strategy single."
            )
        self._mesh = mesh
        self._part = mesh.part(AXES)
        self._name, self._schedule, self._how = name, schedule, how
        self._microbatches = microbatches
        self._rehearsal = rehearsal
        self._splitting = splitting
        ranks = self._part.world_size
        if name == "pp" and microbatches < ranks:
            raise ConfigError(
                f"--strategy pp: {microbatches} micro-batches for {ranks} stages leave some idle all the "
                f"time. Use --shards {ranks * mesh.data.world_size} or more, or fewer stages."
            )

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        # A model may be built with randomness that no seed of torch's reaches.
        self._mesh.world.broadcast_module(module)
        parts = self._rehearsal.parts(module)
        absent = absent_arguments(module, self._rehearsal.loss) if parts is None else frozenset()
        found = find_blocks(module, parts, absent)
        if self._splitting is not None:
            found = closed(found, self._splitting.decide(module))
        ranks = self._part.world_size
        count = ranks * CHUNKS[self._schedule]
        split.require_blocks(found, count)
        sizes = self._sizes(found, module, device, count)
        stages = cut(found, sizes)
        forward = StagedForward(found, stages, Link(self._part))
        held = {name for stage in forward.own for name in stage.holds}
        if self._part.rank == 0:  # and what no block uses
            held |= _names(module) - {name for stage in stages for name in stage.holds}
        _drop_others(module, held)
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
        if self._splitting is not None:
            self._splitting.split(module)
        object.__setattr__(module, "forward", forward)
        return module

    def take_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers  # their state follows the parameters

    def twin(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("a model in stages has no moving average")

    def whole(self, state: Any, *, keep: bool) -> Any:
        # The first copy of the model is enough, and of each stage the first rank.
        first = self._mesh.is_first_beside(AXES)
        if self._splitting is not None:
            state = self._splitting.whole(state, keep=keep or first)
        return gathered(state, self._part) if first else state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        """As one process would: the norm of the norms of all gradients, in the order of the parameters."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        own = [(n, p.grad) for n, p in enumerate(parameters) if p.grad is not None]
        norms = [0.0] * len(parameters)
        for (number, _), norm in zip(own, norms_of_parts([g for _, g in own]), strict=True):
            norms[number] = norm
        # Each norm is on one rank, and zero on the others: their sum is itself.
        rows = self._part.all_gather_json(norms)
        total = torch.linalg.vector_norm(torch.tensor(rows, dtype=torch.float32).sum(dim=0))
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, gradient in own:
            part = local_part(gradient)
            part.mul_(factor.to(part.device))

    def _sizes(self, found: Blocks, module: nn.Module, device: torch.device, count: int) -> tuple[int, ...]:
        if self._how != "balanced":
            return split.split_as_told(found, count, self._how)
        world, sizes, problem = self._mesh.world, None, None
        degree = 1 if self._splitting is None else self._splitting.degree
        if world.rank == 0:
            costs = split.measure(found, module, device, self._rehearsal.loss)
            kept = most_kept(orders(self._schedule, self._part.world_size, self._microbatches))
            try:
                sizes = split.balanced_split(
                    costs,
                    count,
                    in_flight=[kept[stage] for stage in range(count)],
                    limit_bytes=degree * _limit_bytes(device, world.local_world_size),
                )
            except ConfigError as error:
                problem = str(error)
        sizes, problem = world.broadcast_json([sizes, problem])
        if problem is not None:
            raise ConfigError(problem)
        return tuple(sizes)


def _limit_bytes(device: torch.device, processes: int) -> float:
    if device.type == "cuda":
        return _ROOM * torch.cuda.get_device_properties(device).total_memory
    return _ROOM * psutil.virtual_memory().total / max(1, processes)


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _drop_others(module: nn.Module, held: set[str]) -> None:
    """Leave names and shapes of what is not held: such tensors are on the ``meta`` device."""
    tensors: Mapping[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {id(tensor) for name, tensor in tensors.items() if name in held}
    dropped: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in own:
                    if id(tensor) not in dropped:
                        dropped[id(tensor)] = _shape_of(tensor)
                    table[name] = dropped[id(tensor)]  # type: ignore[assignment]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.detach().to("meta")
    if not isinstance(tensor, nn.Parameter):
        return shape
    parameter = nn.Parameter(shape, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # what the task may have noted there
    return parameter
