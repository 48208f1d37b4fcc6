"""The group of ranks that train together, and the mesh of its dimensions."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed.nn.functional
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import set_debug_level_from_env

from paceline.core.environment import Environment, patch_environ
from paceline.core.errors import ConfigError, PeerLostError
from paceline.core.parallel_config import DATA_AXES
from paceline.core.sockets import interface_address, loopback_interface
from paceline.parallel.progress import ProgressTracker
from paceline.parallel.rendezvous import rendezvous
from paceline.parallel.sharded_state import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# --- The processes of a run, joined: the process group, and small messages between all ranks ---


# Its functions have the default group as default arguments. Imported later (torch.optim does), while
# there is a group, it would keep that group and its threads alive for ever, and these can abort the
# interpreter's exit.


_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|pair closure|"
    r"timed out waiting|connect timeout|remote process exited|communicator was aborted|failed to (recv|send)",
    re.IGNORECASE,
)


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turn what torch.distributed raises when a peer is gone into a :class:`PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _LOST_PEER.search(str(error)):
            # Without the source file in front and the advice behind.
            cause = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).partition(". This is typically")[0]
            raise PeerLostError(f"another rank went away: {cause}") from error
        raise


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run and the group that joins them.

    Attributes:
        device: this rank's.
        backend: ``"gloo"`` or ``"nccl"``: what reduces tensors on ``device``.
        generation: rank 0's, the same everywhere.
        one_host: all ranks run under one kernel and share network, IPC and process numbers.
        abandoned: whether it is known from elsewhere that a rank is gone; may be asked at any time.
        computing: ranks 0 to ``computing`` - 1 share the work; the others are spares, which hold the
            same state at every step. None: all compute.
        subgroup: what finds the group where these ranks are only some of all; None: they are all.
        activity: what this rank is doing; every exchange between the ranks is entered there.
        ending: closed just before the group is destroyed, for what would keep a group otherwise.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    generation: int
    one_host: bool
    is_broken: Callable[[], bool] = lambda: False
    active: int | None = None
    subgroup: Callable[[], dist.ProcessGroup] | None = None
    progress_tracker: ProgressTracker = field(default_factory=ProgressTracker)
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def num_active(self) -> int:
        """How many ranks share the work."""
        return self.world_size if self.active is None else self.active

    @property
    def group(self) -> dist.ProcessGroup | None:
        """For tensors on the CPU and on ``device``; None in a world of one."""
        # Not kept: a group that outlives its destruction can abort the interpreter's exit.
        if self.world_size == 1:
            return None
        return dist.group.WORLD if self.subgroup is None else self.subgroup()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON types), by rank.

        Raises:
            PeerLostError: a rank is gone.
        """
        content = json.dumps(value).encode()
        if self.group is None:
            return [json.loads(content)]
        with self._exchange("all-gather"):
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self.group)
            longest = int(max(sizes))
            padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
            gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(gathered, padded, group=self.group)
        return [json.loads(bytes(g[: int(size)].numpy())) for g, size in zip(gathered, sizes, strict=True)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The ``value`` (JSON types) of rank ``source``; the other ranks' is ignored.

        Raises:
            PeerLostError: a rank is gone.
        """
        content = json.dumps(value).encode() if self.rank == source else b""
        if self.group is None:
            return json.loads(content)
        with self._exchange("broadcast"):
            size = torch.tensor([len(content)])
            dist.broadcast(size, group_src=source, group=self.group)
            message = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == source:
                message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(message, group_src=source, group=self.group)
        return json.loads(bytes(message.numpy()))

    def broadcast_module(self, module: nn.Module, source: int = 0) -> None:
        """Give every rank the parameters and buffers of rank ``source``; not those that are distributed.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is not None:
            with torch.no_grad(), self._exchange("broadcast"):
                for tensor in (*module.parameters(), *module.buffers()):
                    if is_distributed(tensor):
                        continue  # what it was laid out from was the same on all ranks
                    dist.broadcast(tensor, group_src=source, group=self.group)

    def barrier(self) -> None:
        """Return once every rank is here.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is not None:
            # Not dist.barrier(): that one synchronises the GPU.
            with self._exchange("barrier"):
                dist.all_reduce(torch.zeros(1), group=self.group)

    @contextmanager
    def _exchange(self, kind: str) -> Iterator[None]:
        self.progress_tracker.begin_collective(kind)
        with translate_peer_errors():
            yield
        self.progress_tracker.end_collective()


@contextmanager
def open_world(
    environment: Environment,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    interface: str | None = None,
    init_timeout_s: float = 300.0,
    collective_timeout_s: float = 1800.0,
    comm_debug: bool = False,
    generation: int = 0,
) -> Iterator[World]:
    """Join the ranks of a job, and part from them at exit. One process alone needs no group.

    Args:
        environment: who we are, from :func:`detect_environment`.
        device: ``auto`` is a GPU where there is one. Local rank n takes GPU n.
        backend: of the tensors on ``device``; ``auto`` is NCCL on a GPU. CPU tensors always use gloo.
        interface: network interface of gloo and NCCL; default: loopback where all ranks share a machine.
        init_timeout_s: how long to wait for all ranks to appear.
        collective_timeout_s: how long a collective may take before it is an error.
        comm_debug: verbose logs of NCCL and torch.distributed.
        generation: of rank 0 only; every rank's ``World.generation`` is that.

    Raises:
        ConfigError: the device, backend, interface or address cannot work.
        PeerLostError: some ranks did not appear; the message names them.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialised in this process. Let Paceline do it: remove init_process_group()."
        )
    chosen = _choose_device(environment, device)
    if backend == "nccl" and chosen.type != "cuda":
        raise ConfigError(f"--backend nccl needs GPUs, but the device is {chosen.type}. Use --backend gloo or auto.")
    device_backend = "nccl" if chosen.type == "cuda" and backend != "gloo" else "gloo"
    world = World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=chosen,
        backend=device_backend,
        generation=generation,
        one_host=True,
    )
    if environment.world_size == 1:
        yield world
        return
    if interface is not None:
        interface_address(interface)
    collect_at_exit()
    member = {"host": _host_identity(), "gpu": _gpu_identity(chosen)}
    with rendezvous(
        environment, member, generation=generation, interface=interface, timeout_s=init_timeout_s
    ) as meeting:
        if device_backend == "nccl":
            _check_one_gpu_a_rank(meeting.members)
        one_host = all(m["host"] == member["host"] for m in meeting.members)
        with _communication_variables(interface, one_host, comm_debug):
            try:
                with translate_peer_errors():
                    dist.init_process_group(
                        f"cpu:gloo,cuda:{device_backend}" if chosen.type == "cuda" else "gloo",
                        store=meeting.store,
                        rank=environment.rank,
                        world_size=environment.world_size,
                        timeout=timedelta(seconds=collective_timeout_s),
                    )
                yield replace(world, generation=meeting.generation, one_host=one_host)
            finally:
                # Also after an error, and at once: the neighbours' pending waits end with it.
                world.cleanup.close()
                if dist.is_initialized():
                    dist.destroy_process_group()


def collect_at_exit() -> None:
    """Have groups that only cycles hold (those of FSDP's modules) end before the interpreter does.

    Gloo's threads let go of the last tensors some time after an exchange, and abort a process that no longer
    runs Python then.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)


def _choose_device(environment: Environment, wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count == 0:
        raise ConfigError("--device cuda: torch sees no GPU here. Use --device cpu or auto.")
    if count == 0:
        return torch.device("cpu")
    # A launcher may show each rank only its own GPU (Slurm's --gpus-per-task): then that is number 0.
    index = 0 if count == 1 else environment.local_rank
    if index >= count:
        raise ConfigError(
            f"{environment.local_world_size} processes on this machine, but only {count} GPUs. "
            f"Use --nproc {count}, or --device cpu."
        )
    chosen = torch.device("cuda", index)
    torch.cuda.set_device(chosen)
    return chosen


def _check_one_gpu_a_rank(members: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two ranks on one GPU: NCCL cannot, and hangs or fails much later."""
    first: dict[str, int] = {}
    for rank, member in enumerate(members):
        gpu = member["gpu"]
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            raise ConfigError(
                f"ranks {first[gpu]} and {rank} would share one GPU ({gpu}): there are more processes than "
                "GPUs. Use fewer with --nproc, or --device cpu."
            )


def _gpu_identity(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _host_identity() -> list[str | int]:
    """Equal for two processes exactly if they share a kernel, its network and its shared memory."""
    identity: list[str | int] = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    identity += [os.readlink(f"/proc/self/ns/{namespace}") for namespace in ("net", "ipc", "pid")]
    return identity


@contextmanager
def _communication_variables(interface: str | None, one_host: bool, comm_debug: bool) -> Iterator[None]:
    """Set the variables that gloo and NCCL read, and put them back at exit."""
    values: dict[str, str] = {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None:
            values[name] = interface
        elif one_host and name not in os.environ:
            values[name] = loopback_interface()
    if comm_debug:
        values |= {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    try:
        with patch_environ(values):
            set_debug_level_from_env()
            yield
    finally:
        set_debug_level_from_env()


# --- The ranks as a grid: who of them share the data, and who of them make up one copy of the model ---


class ParallelDims:
    """The ranks of a world, laid out along named axes.

    Attributes:
        world: all ranks.
        data: this rank and those with the same place in their copies of the model, who share the micro-batches.
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

        with translate_peer_errors():
            self.device_mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=self._axes)
        # DTensor's caches keep every mesh for ever, and it the groups, though it finds them by their names.
        world.cleanup.callback(self.device_mesh._pg_registry.clear)
        if not set(axes) <= set(DATA_AXES):
            self.data = self.submesh(DATA_AXES)

    def submesh(self, names: Sequence[str]) -> World:
        """This rank and those that differ from it only along these axes, as a world of their own."""
        there = tuple(name for name in self._axes if name in names)
        if not there:
            return _part(self.world, 0, 1, None)
        assert self.device_mesh is not None
        mesh = self.device_mesh[there]
        if len(there) > 1:
            with translate_peer_errors():
                mesh = mesh._flatten("_".join(there))
        return _part(self.world, mesh.get_local_rank(), mesh.size(), mesh)

    @property
    def single_rank(self) -> ParallelDims:
        """This rank by itself."""
        return ParallelDims(_part(self.world, 0, 1, None), {})

    @property
    def is_flat(self) -> bool:
        """Whether all ranks only share the data."""
        return self.data is self.world

    @property
    def is_replica_leader(self) -> bool:
        """Whether this rank speaks for its copy of the model: one rank of each copy does."""
        return self.is_first_along(DATA_AXES)

    def is_first_along(self, names: Sequence[str]) -> bool:
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
        self.world.progress_tracker.begin_collective("all-gather")
        with translate_peer_errors():
            dist.all_gather(rows, mine, group=self.world.group)
        self.world.progress_tracker.end_collective()
        return [row.tolist() for row in rows]


def _part(world: World, rank: int, size: int, mesh: DeviceMesh | None) -> World:
    subgroup = None if mesh is None else partial(_group_of, mesh)
    return replace(world, rank=rank, world_size=size, active=None, subgroup=subgroup)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group()
