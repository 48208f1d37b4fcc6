"""PipeDream in one process: what the ranks of a pipeline that does not wait must come to, bit for bit."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import nn

from paceline.distributed.mesh import Mesh
from paceline.distributed.world import World
from paceline.strategies.base import Strategy
from paceline.strategies.pipeline.blocks import absent_arguments, find_blocks
from paceline.strategies.pipeline.pipedream.reference import Reference
from paceline.strategies.pipeline.split import split_as_told
from paceline.strategies.pipeline.staged import cut
from paceline.strategies.placement import Placement, Rehearsal, Whole
from paceline.training.rehearsal import FirstBatch
from paceline.training.run import Run
from paceline.training.session import Session
from paceline.training.trainer import Trainer


def simulated_pipedream(run: Run, world_size: int) -> dict[str, torch.Tensor]:
    """The model's state after the whole run, as a pipeline of ``world_size`` stages would have it.

    Args:
        run: with ``--pp-schedule pipedream``, and stages that are not measured (``--pp-split equal``).
        world_size: how many stages, a rank each.
    """
    alone = _Alone(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)}, stages=world_size)
    run.directory.create()
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        device=run.device,
        backend="gloo",
        generation=0,
        one_host=True,
    )
    with Trainer(alone) as trainer:
        Session(trainer, [], time.perf_counter()).take_part(world)
        return dict(trainer.state.module.state_dict())


@dataclass(frozen=True, kw_only=True)
class _Alone(Run):
    """The run, with one rank that computes all stages."""

    stages: int

    def build_mesh(self, world: World) -> Mesh:
        return Mesh(world, {"dp": 1})

    def build_placement(self, mesh: Mesh, rehearsal: Rehearsal) -> Placement:
        return Whole()

    def build_strategy(self, module: nn.Module, mesh: Mesh, shares: tuple[int, ...]) -> Strategy:
        rehearsal = FirstBatch(self)
        parts = rehearsal.parts(module)
        absent = absent_arguments(module, rehearsal.loss) if parts is None else frozenset()
        found = find_blocks(module, parts, absent)
        sizes = split_as_told(found, self.stages, self.config.pp_split)
        return Reference(module, mesh, self.strategy_options(shares), cut(found, sizes))
