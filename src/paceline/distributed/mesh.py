"""The ranks as a grid: who of them share the data, and who of them make up one copy of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from paceline.config.parallelism import DATA_AXES
from paceline.distributed.world import World, lost_peers_reported

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """The ranks of a world, laid out along named axes.

    Attributes:
        world: all ranks.
        data: this rank and those with the same place in their copies of the model, who share the shards.
        device_mesh: of all axes; None where all ranks only share the data.

    Args:
        world: the ranks; all of them make the mesh together.
        axes: the size of each axis, outermost first, whose product is the number of ranks.
    """

    def __init__(self, world: World, axes: Mapping[str, int]) -> None:
        self.world = self.data = world
        self.device_mesh: DeviceMesh | None = None
        self._axes = tuple(axes)
        if set(axes) <= {"dp"} or world.world_size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh

        with lost_peers_reported():
            self.device_mesh = init_device_mesh(
                world.device.type, tuple(axes.values()), mesh_dim_names=self._axes
            )
        # DTensor's caches keep every mesh for ever, and it the groups, though it finds them by their names.
        world.ending.callback(self.device_mesh._pg_registry.clear)
        if not set(axes) <= set(DATA_AXES):
            self.data = self.part(DATA_AXES)

    def part(self, names: Sequence[str]) -> World:
        """This rank and those that differ from it only along these axes, as a world of their own."""
        there = tuple(name for name in self._axes if name in names)
        if not there:
            return _part(self.world, 0, 1, None)
        assert self.device_mesh is not None
        mesh = self.device_mesh[there]
        if len(there) > 1:
            with lost_peers_reported():
                mesh = mesh._flatten("_".join(there))
        return _part(self.world, mesh.get_local_rank(), mesh.size(), mesh)

    @property
    def alone(self) -> Mesh:
        """This rank by itself."""
        return Mesh(_part(self.world, 0, 1, None), {})

    @property
    def is_flat(self) -> bool:
        """Whether all ranks only share the data."""
        return self.data is self.world

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its copy of the model: one rank of each copy does."""
        return self.is_first_beside(DATA_AXES)

    def is_first_beside(self, names: Sequence[str]) -> bool:
        """Whether this rank is the first one along all axes but these."""
        if self.device_mesh is None:
            return set(self._axes) <= set(names) or self.world.rank == 0
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        return not any(place for name, place in zip(self._axes, coordinate, strict=True) if name not in names)

    def gather_rows(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Every rank's numbers, by rank; all ranks call this together.

        Raises:
            PeerLostError: a rank is gone.
        """
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        self.world.activity.enter("all-gather")
        with lost_peers_reported():
            dist.all_gather(rows, mine, group=self.world.group)
        self.world.activity.leave()
        return [row.tolist() for row in rows]


def _part(world: World, rank: int, size: int, mesh: DeviceMesh | None) -> World:
    subgroup = None if mesh is None else partial(_group_of, mesh)
    return replace(world, rank=rank, world_size=size, computing=None, subgroup=subgroup)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group()
