"""The synchronous parameter server: the partition of the parameters, the transport, and the strategy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.grad_buffers import FlatLayout
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.point_to_point import Message, start_messages
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import Combine, ReductionPlan
from paceline.parallel.strategy import DDP, MicrobatchStrategy, StrategyOptions
from paceline.parallel.transports import gather_headers, zero_grad_buffers
from paceline.parallel.world import ParallelDims, World
from paceline_more_strategies.messages import TensorBundle

# --- The partition: each server holds neighbouring parameters of about equal total size ---


def partition_parameters(sizes: Sequence[int], servers: int) -> tuple[range, ...]:
    """Split a list of parameters into one range per server, with at least one parameter in each.

    A parameter is never split, because an optimizer needs it as a whole.

    Args:
        sizes: the numbers of elements of the parameters.
    """
    if len(sizes) < servers:
        raise ConfigError(
            f"--ps-servers {servers}, but the model has {len(sizes)} trainable parameters, and each server "
            f"needs one. Use --ps-servers {len(sizes)} or fewer."
        )
    sums = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for server in range(1, servers):
        target = server * sums[-1] / servers
        possible = range(cuts[-1] + 1, len(sizes) - (servers - server) + 1)
        cuts.append(min(possible, key=lambda cut: abs(sums[cut] - target)))
    return tuple(itertools.starmap(range, itertools.pairwise([*cuts, len(sizes)])))


# --- The transport: workers push their sums, servers add them ---
#
# Each server receives its parameters' part of every worker's nodes and adds them in the order of the tree (Li et al.,
# "Scaling Distributed Machine Learning with the Parameter Server", 2014, with the tree in place of the order of
# arrival). The total of the gradients stays there: workers get parameters back, not gradients. The first server adds
# the module buffers, which no optimizer changes, and broadcasts them.


Slices = Mapping[torch.dtype, slice]
"""A slice of each dtype's flat buffer."""


class ServerTransport:
    """Sums the gradient buffers of all workers on the servers, each its own part.

    Args:
        world: the ranks; the first ones are servers.
        plan: the work split; servers compute nothing.
        numels: elements of each dtype's flat buffer, the same on every rank.

    Raises:
        PeerLostError: (from the methods) a connection broke.
    """

    overlaps = False

    def __init__(
        self,
        world: World,
        plan: ReductionPlan,
        numels: Mapping[torch.dtype, int],
        parts: Sequence[Slices],
        buffers: Slices,
    ) -> None:
        self._world = world
        self._parts = parts
        self._buffers = buffers
        self._nodes = [(rank, index) for rank, nodes in enumerate(plan.subtrees) for index in range(len(nodes))]
        self.grad_buffers = zero_grad_buffers(plan.num_grad_buffers[world.rank], numels, world.device)

    def launch(self, bucket: int) -> None:
        raise AssertionError("sums are pushed together")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gather_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        if self._world.rank < len(self._parts):
            self._add_up(combine)
        else:
            self._push()
        with translate_peer_errors():
            for dtype, part_slice in self._buffers.items():
                dist.broadcast(self.grad_buffers[0][dtype][part_slice], group=self._world.group, group_src=0)

    def close(self) -> None:
        self.grad_buffers.clear()

    def _push(self) -> None:
        pushes = [
            Message(self.grad_buffers[index][dtype][part_slice], server, number)
            for number, (holder, index) in enumerate(self._nodes)
            if holder == self._world.rank
            for server in range(len(self._parts))
            for dtype, part_slice in self._slices_for(server)
        ]
        start_messages(self._world, sends=pushes).wait()

    def _add_up(self, combine: Combine) -> None:
        mine = self._slices_for(self._world.rank)
        received = [[torch.empty_like(self.grad_buffers[0][dtype][s]) for dtype, s in mine] for _ in self._nodes]
        start_messages(
            self._world,
            receives=[
                Message(part, holder, number)
                for number, ((holder, _), parts) in enumerate(zip(self._nodes, received, strict=True))
                for part in parts
            ],
        ).wait()
        for into, other in combine.additions:
            for total, part in zip(received[into], received[other], strict=True):
                total.add_(part)
        for (dtype, part_slice), total in zip(mine, received[combine.root], strict=True):
            self.grad_buffers[0][dtype][part_slice] = total

    def _slices_for(self, server: int) -> list[tuple[torch.dtype, slice]]:
        """Return the slices for one server: its part of the gradients, and for the first one the buffers."""
        slices = list(self._parts[server].items())
        return slices + list(self._buffers.items()) if server == 0 else slices


# --- The strategy: workers compute the micro-batches, servers sum the gradients and update ---
#
# In each step, the workers push the sums of their micro-batches to the servers, each server adds its parameters' part
# along the tree, its optimizer updates them, and all ranks get the new parameters. The bits are those of ``ddp``
# with the same optimizer. The asynchronous modes are in :mod:`paceline_more_strategies.server_engines`.


class ServerParameters:
    """The trainable parameters, partitioned over the servers, which are the first ranks.

    Attributes:
        ranges: each server's, as numbers of the trainable parameters.
        parcels: a send buffer for each server's parameters or their gradients.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """

    def __init__(self, module: nn.Module, servers: int, device: torch.device) -> None:
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.ranges = partition_parameters([parameter.numel() for parameter in trainable], servers)
        self.parameters = [[trainable[number] for number in numbers] for numbers in self.ranges]
        self.parcels = [TensorBundle(held, device) for held in self.parameters]

    def keep_gradients_of(self, rank: int) -> None:
        """Free the gradients that other servers apply."""
        for server, held in enumerate(self.parameters):
            for parameter in held if server != rank else ():
                parameter.grad = None

    def publish(self, world: World) -> None:
        """Broadcast the servers' parameters to every rank; a collective."""
        world.progress_tracker.begin_collective("broadcast")
        for server, (parcel, held) in enumerate(zip(self.parcels, self.parameters, strict=True)):
            if world.rank == server:
                parcel.pack(held)
            parcel.broadcast(world, server)
            if world.rank != server:
                parcel.unpack(held)
        world.progress_tracker.end_collective()


class ParameterServer(MicrobatchStrategy):
    """Sums a step on the servers.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """

    engine = "paceline_more_strategies.server_engines:SyncServerEngine"

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.work_split), mesh.world.world_size, "exact", options.work_split)
        sizes = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
        self._ranges = partition_parameters(sizes, options.config.num_servers(mesh.world.world_size))
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
            for dtype, numel in layout.flat_buffers.items()
            if numel > layout.gradients.get(dtype, 0)
        }
        parts = [layout.slice_of(numbers) for numbers in self._ranges]
        return ServerTransport(world, plan, layout.flat_buffers, parts, buffers)

    def reduce(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        # Only servers have the total; a worker's gradients are the sums of its own micro-batches.
        is_server = self._mesh.world.rank < len(self._ranges)
        rows = self._mesh.gather_rows([float(sums.finite or not is_server)])
        return replace(sums, finite=all(of_rank[0] for of_rank in rows))


class AsyncParameterServer(DDP):
    """``--ps-mode async`` or ``ssp``: a rank computes whole steps by itself; the engine sends them."""

    engine = "paceline_more_strategies.server_engines:AsyncServerEngine"
