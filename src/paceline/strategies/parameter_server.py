"""A synchronous parameter server: workers compute the shards, servers add up the gradients and update.

Each step, the workers push the sums of their shards to the servers, each server adds up its parameters' part
along the tree, and its optimizer updates them; then everybody gets the new parameters. Same additions, same
optimizer: the bits of ``ddp``. The asynchronous modes are in :mod:`paceline.training.arrivals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from paceline.distributed.division import divide
from paceline.distributed.flat import FlatLayout
from paceline.distributed.mesh import Mesh
from paceline.distributed.parcel import Parcel
from paceline.distributed.reducer import StepSums
from paceline.distributed.server_transport import ServerTransport
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import World
from paceline.strategies.base import StrategyOptions
from paceline.strategies.shard_by_shard import ShardByShard


class OnServers:
    """The trainable parameters, divided among the servers, which are the first ranks.

    Attributes:
        servers: how many there are.
        parameters: each server's.
        parcels: a place for each server's parameters, or their gradients, on their way.

    Args:
        module: whose parameters they are.
        servers: how many servers.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """

    def __init__(self, module: nn.Module, servers: int) -> None:
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.servers = servers
        self.ranges = divide([parameter.numel() for parameter in trainable], servers)
        self.parameters = [[trainable[number] for number in numbers] for numbers in self.ranges]
        self.parcels = [Parcel(held) for held in self.parameters]

    def keep_gradients_of(self, rank: int) -> None:
        """Let go of the gradients that are other servers' to apply."""
        for server, held in enumerate(self.parameters):
            for parameter in held if server != rank else ():
                parameter.grad = None

    def publish(self, world: World) -> None:
        """Give every rank the servers' parameters; all ranks call this together.

        Raises:
            PeerLostError: a rank is gone.
        """
        world.activity.enter("broadcast")
        for server, (parcel, held) in enumerate(zip(self.parcels, self.parameters, strict=True)):
            if world.rank == server:
                parcel.pack(held)
            parcel.broadcast(world, server)
            if world.rank != server:
                parcel.unpack(held)
        world.activity.leave()


class ParameterServer(ShardByShard):
    """Sums a step on the servers.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, servers: int, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.shares), mesh.world.world_size, "exact", options.shares)
        self._ranges = OnServers(module, servers).ranges
        super().__init__(
            module,
            mesh,
            plan,
            options,
            sums_gradients=True,
            transport=partial(self._make_transport, mesh.world, plan),
        )

    def _make_transport(self, world: World, plan: ReductionPlan, layout: FlatLayout) -> ServerTransport:
        buffers = {
            dtype: slice(layout.gradients.get(dtype, 0), numel)
            for dtype, numel in layout.lanes.items()
            if numel > layout.gradients.get(dtype, 0)
        }
        parts = [layout.stretch(numbers) for numbers in self._ranges]
        return ServerTransport(world, plan, layout.lanes, parts, buffers)

    def finish_step(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        # Only servers have the total: a worker's gradients are the sums of its own shards.
        is_server = self._mesh.world.rank < len(self._ranges)
        told = self._mesh.gather_rows([float(sums.finite or not is_server)])
        return replace(sums, finite=all(of_rank[0] for of_rank in told))
