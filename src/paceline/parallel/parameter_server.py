"""A parameter server: parameters split over servers, and the transport between them and workers."""

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
from paceline.parallel.messages import TensorBundle
from paceline.parallel.microbatches import MicrobatchStrategy
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import Combine, ReductionPlan
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.transports import GradBuffer, gather_headers
from paceline.parallel.world import ParallelDims, World, translate_peer_errors

# --- Which parameter server holds which parameters: neighbouring ones, about equally many numbers each ---


def partition_parameters(sizes: Sequence[int], servers: int) -> tuple[range, ...]:
    """Cut a list of parameters into one range a server, at least one parameter in each.

    A parameter is never cut: an optimizer looks at one as a whole.

    Args:
        sizes: the numbers in each parameter.
        servers: how many servers.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """
    if len(sizes) < servers:
        raise ConfigError(
            f"--ps-servers {servers}, but the model has {len(sizes)} trainable parameters, and each server "
            f"needs one. Use --ps-servers {len(sizes)} or fewer."
        )
    sums = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for server in range(1, servers):
        wanted = server * sums[-1] / servers
        possible = range(cuts[-1] + 1, len(sizes) - (servers - server) + 1)
        cuts.append(min(possible, key=lambda cut: abs(sums[cut] - wanted)))
    return tuple(itertools.starmap(range, itertools.pairwise([*cuts, len(sizes)])))


# --- The transport of a synchronous parameter server: workers push their sums, servers add them up ---
#
# Each server receives its parameters' part of every worker's nodes, and adds them up in the order of the tree
# (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014, with the tree in place
# of the order of arrival). The total of the gradients stays there: workers get parameters back, and no
# gradients. Buffers, which no optimizer changes, are added up by the first server, and everybody gets them.


Slices = Mapping[torch.dtype, slice]
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
        parts: Sequence[Slices],
        buffers: Slices,
    ) -> None:
        self._world = world
        self._parts = parts
        self._buffers = buffers
        self._nodes = [(rank, slot) for rank, nodes in enumerate(plan.subtrees) for slot in range(len(nodes))]
        self.grad_buffers: list[GradBuffer] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=world.device) for dtype, numel in lanes.items()}
            for _ in range(plan.grad_buffers[world.rank])
        ]

    def launch(self, bucket: int) -> None:
        raise AssertionError("sums are pushed when all of them are there")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return gather_headers(self._world, header)

    def reduce(self, combine: Combine) -> None:
        if self._world.rank < len(self._parts):
            self._add_up(combine)
        else:
            self._push()
        with translate_peer_errors():
            for dtype, stretch in self._buffers.items():
                dist.broadcast(self.grad_buffers[0][dtype][stretch], group=self._world.group, group_src=0)

    def close(self) -> None:
        self.grad_buffers.clear()

    def _push(self) -> None:
        works = []
        with translate_peer_errors():
            for number, (holder, slot) in enumerate(self._nodes):
                if holder != self._world.rank:
                    continue
                for server in range(len(self._parts)):
                    for dtype, stretch in self._of(server):
                        part = self.grad_buffers[slot][dtype][stretch]
                        works.append(dist.isend(part, group=self._world.group, tag=number, group_dst=server))
            for work in works:
                assert work is not None
                work.wait()

    def _add_up(self, combine: Combine) -> None:
        mine = self._of(self._world.rank)
        works, received = [], []
        with translate_peer_errors():
            for number, (holder, _) in enumerate(self._nodes):
                received.append([torch.empty_like(self.grad_buffers[0][dtype][s]) for dtype, s in mine])
                for part in received[-1]:
                    works.append(dist.irecv(part, group=self._world.group, tag=number, group_src=holder))
            for work in works:
                assert work is not None
                work.wait()
        for into, other in combine.additions:
            for total, part in zip(received[into], received[other], strict=True):
                total.add_(part)
        for (dtype, stretch), total in zip(mine, received[combine.root], strict=True):
            self.grad_buffers[0][dtype][stretch] = total

    def _of(self, server: int) -> list[tuple[torch.dtype, slice]]:
        """What goes to one server: its part of the gradients, and to the first one the buffers."""
        found = list(self._parts[server].items())
        return found + list(self._buffers.items()) if server == 0 else found


# --- A synchronous parameter server: workers compute the micro-batches, servers add up the gradients and update ---
#
# Each step, the workers push the sums of their micro-batches to the servers, each server adds up its parameters'
# part along the tree, and its optimizer updates them; then everybody gets the new parameters. Same additions,
# same optimizer: the bits of ``ddp``. The asynchronous modes are in :mod:`paceline.training.parameter_server`.


class ServerParameters:
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
        self.ranges = partition_parameters([parameter.numel() for parameter in trainable], servers)
        self.parameters = [[trainable[number] for number in numbers] for numbers in self.ranges]
        self.parcels = [TensorBundle(held) for held in self.parameters]

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

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.work_split), mesh.world.world_size, "exact", options.work_split)
        self._ranges = ServerParameters(module, options.config.num_servers(mesh.world.world_size)).ranges
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
        # Only servers have the total: a worker's gradients are the sums of its own micro-batches.
        is_server = self._mesh.world.rank < len(self._ranges)
        told = self._mesh.gather_rows([float(sums.finite or not is_server)])
        return replace(sums, finite=all(of_rank[0] for of_rank in told))
