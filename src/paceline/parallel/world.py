"""The group of ranks that train together: its devices, its mesh, and the process group that it forms."""

from __future__ import annotations

import atexit
import gc
import json
import os
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

from paceline.core.environment import Environment, patch_environ, visible_gpus
from paceline.core.errors import ConfigError
from paceline.core.option_groups import DATA_AXES
from paceline.core.sockets import interface_address, loopback_interface
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.rendezvous import rendezvous
from paceline.parallel.sharded_state import is_distributed, memory_of
from paceline.runs.rank_progress import ProgressTracker
from paceline.torch_internals import (
    Store,
    abort_groups,
    flatten_mesh,
    forget_groups,
    set_debug_level_from_env,
    set_group_timeout,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# --- The device of this process, for every way in which a process that computes can start ---


DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LocalDevice:
    """The device of this process, and how its tensors travel.

    Attributes:
        device: for its tensors; the current device of this process.
        backend: ``"gloo"`` or ``"nccl"``, for messages of tensors on ``device``; CPU tensors always use gloo.
    """

    device: torch.device
    backend: Literal["gloo", "nccl"]


def choose_device(
    wanted: DeviceName = "auto",
    backend: BackendName = "auto",
    *,
    local_rank: int = 0,
    expected: Literal["cpu", "cuda"] | None = None,
) -> LocalDevice:
    """Choose the device of this process, and make it the current one.

    Call it once, after the last fork and before anything is seeded: CUDA does not survive a fork, and torch seeds the
    current GPU alone.

    Args:
        wanted: ``auto`` is a GPU if torch sees one.
        backend: ``auto`` is NCCL on a GPU, else gloo. Under gloo, several processes may share a GPU.
        local_rank: of this process on its node. It takes the GPU of this number among those that it sees, which are all
            of the node's, one of its own (Slurm's ``--gpus-per-task=1``), or several of its own: forming a group finds
            processes that share one.
        expected: the device that the launcher on this node has found.

    Raises:
        ConfigError: there is no such device, or it is not the launcher's.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if gpus == 0 and "cuda" in (wanted, expected):
        cause = "" if wanted == "cuda" else f", but the launcher has counted {visible_gpus()} on this node"
        raise ConfigError(
            f"--device {wanted}: torch {torch.__version__} sees no GPU on this node{_why_no_gpu()}{cause}. "
            "Install a torch for CUDA that fits the driver (docs/gpus.md), or use --device cpu."
        )
    if gpus and wanted == "auto" and expected == "cpu":
        raise ConfigError(
            f"--device auto: torch sees {gpus} GPUs that the launcher has not found on this node. "
            "Say which you want: --device cuda or --device cpu."
        )
    if gpus == 0:
        if backend == "nccl":
            raise ConfigError("--backend nccl needs GPUs, but the device is cpu. Use --backend gloo or auto.")
        return LocalDevice(device=torch.device("cpu"), backend="gloo")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return LocalDevice(device=device, backend="gloo" if backend == "gloo" else "nccl")


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return " (it is built without CUDA)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def gpu_identity(device: torch.device) -> str | None:
    """Return the identity of a GPU, unique over all nodes; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """Return the name of a device for people: ``NVIDIA H100 80GB HBM3``, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def why_idle(device: torch.device, processes: int) -> str | None:
    """Return why GPUs that this node's processes see are not used; None if all are.

    Args:
        processes: of the run, on this node.
    """
    visible = visible_gpus()
    if device.type == "cuda":
        idle = visible - processes
        return f"{_gpus(idle)} idle: --nproc auto uses all" if idle > 0 else None
    if not visible:
        return None
    built = "" if torch.version.cuda is not None else f": torch {torch.__version__} is built without CUDA"
    return f"{_gpus(visible)} idle{built}"


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


# --- The ranks and their process group ---


COLLECTIVE_TIMEOUT_S = 1800.0
"""The time limit of a collective: ranks may train or evaluate at different speeds for long."""


# --- The ranks, and small messages between all of them ---


# Its functions have the default group as default arguments. A later import (torch.optim does one) while
# there is a group would keep that group and its threads alive, which can abort the interpreter's exit.


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run and their process group.

    Attributes:
        device: this rank's.
        backend: ``"gloo"`` or ``"nccl"``, for tensors on ``device``.
        generation: rank 0's, equal on all ranks.
        one_host: whether all ranks share a kernel, its network, IPC and process ids.
        is_broken: whether another source knows that a rank is gone; may be called at any time.
        active: ranks 0 to ``active`` - 1 share the work; the others are spares, with the same state at every step.
            None: all.
        subgroup: returns the group if these ranks are a subset; None: they are all.
        progress_tracker: this rank's progress; every collective is reported there.
        cleanup: closed just before the group is destroyed, to drop references to it.
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
        """The number of ranks that share the work."""
        return self.world_size if self.active is None else self.active

    @property
    def description(self) -> str:
        """The ranks for people: ``2 x NVIDIA H100 80GB HBM3, NCCL``."""
        backend = f", {'NCCL' if self.backend == 'nccl' else 'gloo'}" if self.world_size > 1 else ""
        return f"{self.world_size} x {device_name(self.device)}{backend}"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group for tensors on the CPU and on ``device``; None in a world of one."""
        # Not stored, because a group that outlives its destruction can abort the interpreter's exit.
        if self.world_size == 1:
            return None
        return dist.group.WORLD if self.subgroup is None else self.subgroup()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (JSON types), by rank.

        Raises:
            PeerLostError: a rank is gone.
        """
        content = json.dumps(value).encode()
        if self.group is None:
            return [json.loads(content)]
        with self._exchange("all-gather"):
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self.group)
        contents = self.all_gather_rows(torch.frombuffer(bytearray(content), dtype=torch.uint8), [*map(int, sizes)])
        return [json.loads(bytes(content.numpy())) for content in contents]

    def all_gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's rows, by rank.

        Args:
            rows: this rank's, (R, ...).
            counts: R of each rank.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is None:
            return [rows]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        with self._exchange("all-gather"):
            dist.all_gather(gathered, padded, group=self.group)
        return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the ``value`` (JSON types) of rank ``source``; other ranks' values are ignored.

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

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of rank ``source``.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is not None:
            with self._exchange("broadcast"):
                dist.broadcast(memory_of(tensor), group_src=source, group=self.group)

    def broadcast_module(self, module: nn.Module, source: int = 0) -> None:
        """Broadcast the parameters and buffers of rank ``source``, without distributed ones and those without values.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is not None:
            with torch.no_grad(), self._exchange("broadcast"):
                for tensor in (*module.parameters(), *module.buffers()):
                    if is_distributed(tensor) or tensor.is_meta:
                        continue  # it was distributed from equal values on all ranks, or is later
                    dist.broadcast(memory_of(tensor), group_src=source, group=self.group)

    def barrier(self) -> None:
        """Wait for every rank.

        Raises:
            PeerLostError: a rank is gone.
        """
        if self.group is not None:
            # Not dist.barrier(), which synchronises the GPU.
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
    device: DeviceName = "auto",
    backend: BackendName = "auto",
    expected: Literal["cpu", "cuda"] | None = None,
    interface: str | None = None,
    init_timeout_s: float = 300.0,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    comm_debug: bool = False,
    generation: int = 0,
) -> Iterator[World]:
    """Join the ranks of a job, and leave them on exit. A single process needs no group.

    Args:
        environment: this process's rank, from :func:`detect_environment`.
        device: as for :func:`~paceline.parallel.world.choose_device`.
        backend: as for that.
        expected: as for that.
        interface: network interface of gloo and NCCL; default: loopback if all ranks share a node.
        init_timeout_s: how long to wait for all ranks.
        collective_timeout_s: time limit of a collective.
        comm_debug: verbose logs of NCCL and torch.distributed.
        generation: on rank 0 only; it becomes every rank's ``World.generation``.

    Raises:
        ConfigError: the device, backend, interface or address cannot work.
        PeerLostError: some ranks did not appear; names them.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialised in this process. Remove init_process_group(); Paceline calls it."
        )
    local = choose_device(device, backend, local_rank=environment.local_rank, expected=expected)
    world = World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=local.device,
        backend=local.backend,
        generation=generation,
        one_host=True,
    )
    if environment.world_size == 1:
        yield world
        return
    if interface is not None:
        interface_address(interface)
    host = _host_identity()
    with rendezvous(
        environment, {"host": host}, generation=generation, interface=interface, timeout_s=init_timeout_s
    ) as meeting:
        world = replace(
            world, generation=meeting.generation, one_host=all(rank["host"] == host for rank in meeting.ranks)
        )
        with ExitStack() as stack:
            with translate_peer_errors():
                stack.enter_context(
                    form_group(
                        world,
                        meeting.store,
                        interface=interface,
                        init_timeout_s=collective_timeout_s,
                        collective_timeout_s=collective_timeout_s,
                        comm_debug=comm_debug,
                    )
                )
            yield world


def _host_identity() -> list[str | int]:
    """Return an identity that two processes share exactly if they share a kernel, its network and shared memory."""
    identity: list[str | int] = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    identity += [os.readlink(f"/proc/self/ns/{namespace}") for namespace in ("net", "ipc", "pid")]
    return identity


# --- The mesh: ranks that share the data, and ranks that form a model replica ---


class ParallelDims:
    """The ranks of a world along named axes.

    Attributes:
        data: this rank and those at the same place in their model replicas, which share the micro-batches.
        device_mesh: of all axes; None if all ranks only share the data.

    Args:
        axes: the size of each axis, outermost first, with the world size as product.
    """

    def __init__(self, world: World, axes: Mapping[str, int]) -> None:
        self.world = world
        self.data = world
        self.device_mesh: DeviceMesh | None = None
        self._axes = tuple(axes)
        if set(axes) <= {"dp"} or world.world_size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh

        with translate_peer_errors():
            self.device_mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=self._axes)
            for name in self._axes:
                warm_up(self.submesh([name]))
        # DTensor's caches keep every mesh for ever, and a mesh keeps its groups, which it could find by name.
        world.cleanup.callback(partial(forget_groups, self.device_mesh))
        if not set(axes) <= set(DATA_AXES):
            self.data = self.submesh(DATA_AXES)

    def submesh(self, names: Sequence[str]) -> World:
        """Return this rank and those that differ from it only along these axes, as a world."""
        selected = tuple(name for name in self._axes if name in names)
        if not selected:
            return _part(self.world, 0, 1, None)
        assert self.device_mesh is not None
        mesh = self.device_mesh[selected]
        if len(selected) > 1:
            with translate_peer_errors():
                mesh = flatten_mesh(mesh, "_".join(selected))
        return _part(self.world, mesh.get_local_rank(), mesh.size(), mesh)

    @property
    def single_rank(self) -> ParallelDims:
        """This rank alone."""
        return ParallelDims(_part(self.world, 0, 1, None), {})

    @property
    def is_flat(self) -> bool:
        """Whether all ranks only share the data."""
        return self.data is self.world

    @property
    def is_replica_leader(self) -> bool:
        """Whether this rank represents its model replica."""
        return self.is_first_along(DATA_AXES)

    def is_first_along(self, names: Sequence[str]) -> bool:
        """Return whether this rank is the first along all axes but these."""
        if self.device_mesh is None:
            return set(self._axes) <= set(names) or self.world.rank == 0
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        return not any(
            coordinate_value for name, coordinate_value in zip(self._axes, coordinate, strict=True) if name not in names
        )

    def gather_rows(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Return every rank's values, by rank; a collective.

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


# --- The process group: every path forms it, and leaves it, by the one function here ---


@contextmanager
def form_group(
    world: World,
    store: Store,
    *,
    interface: str | None = None,
    init_timeout_s: float,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    comm_debug: bool = False,
    formed: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Form the default process group of ``world``, and leave it on exit; a collective.

    CPU tensors use gloo, tensors on a GPU ``world.backend``. No ``device_id`` is given: the groups of a mesh would then
    be split from the communicator of all ranks, which is created lazily without it.

    Args:
        world: the ranks, at least two.
        store: where they meet, for this group alone.
        interface: network interface of gloo and NCCL; default: loopback if all ranks share a node.
        init_timeout_s: how long to wait for all ranks.
        collective_timeout_s: time limit of a collective afterwards.
        comm_debug: verbose logs of NCCL and torch.distributed.
        formed: called once all connections of gloo exist.

    Raises:
        ConfigError: ranks cannot work together.
        RuntimeError: a rank did not come or was lost, as torch.distributed says it.
    """
    collect_at_exit()
    on_gpu = world.device.type == "cuda"
    with _set_communication_variables(world, interface, comm_debug):
        is_broken = True
        try:
            dist.init_process_group(
                f"cpu:gloo,cuda:{world.backend}" if on_gpu else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=init_timeout_s),
            )
            formed()
            set_group_timeout(timedelta(seconds=collective_timeout_s), dist.group.WORLD)
            if world.backend == "nccl":
                _check_one_gpu_a_rank(world)
                warm_up(world)
            yield
            is_broken = world.is_broken()
        finally:
            # Also after an error, and at once, because it ends the neighbours' pending waits.
            world.cleanup.close()
            if dist.is_initialized():
                _leave_group(abort=is_broken and world.backend == "nccl")


def warm_up(world: World) -> None:
    """Reduce one element on the device: NCCL connects its ranks in a group's first collective, and fails there."""
    if world.backend == "nccl" and world.world_size > 1:
        element = torch.ones(1, device=world.device)
        dist.all_reduce(element, group=world.group)
        assert element.item() == world.world_size, "NCCL has summed wrongly"


def collect_at_exit() -> None:
    """Collect groups in reference cycles (those of FSDP's modules) before the interpreter exits.

    Gloo's threads free the last tensors some time after an exchange, and abort a process whose interpreter has ended by
    then.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)


def _leave_group(*, abort: bool) -> None:
    if abort:
        # To destroy NCCL's communicators would flush them, and so wait for the lost peer. All are aborted together:
        # one after another, they can wait for each other.
        abort_groups()
    else:
        dist.destroy_process_group()


def _check_one_gpu_a_rank(world: World) -> None:
    """Reject two ranks on one GPU, with which NCCL hangs or fails much later."""
    first: dict[str, int] = {}
    for rank, other in enumerate(world.all_gather_object(gpu_identity(world.device))):
        if first.setdefault(other, rank) != rank:
            raise ConfigError(
                f"ranks {first[other]} and {rank} would share one GPU ({other}), which NCCL cannot: there are more "
                "processes than GPUs. Use fewer with --nproc, or --backend gloo, or --device cpu."
            )


@contextmanager
def _set_communication_variables(world: World, interface: str | None, comm_debug: bool) -> Iterator[None]:
    """Set the variables of gloo and NCCL, and restore them on exit."""
    name = interface or (loopback_interface() if world.one_host else None)
    values: dict[str, str] = {}
    for variable, value in {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name and f"={name}"}.items():
        if value is not None and (interface is not None or variable not in os.environ):
            values[variable] = value
    if world.backend == "nccl":
        # Its watchdog would kill the survivors of a lost rank; Paceline aborts their communicators.
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if comm_debug:
        values |= {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    try:
        with patch_environ(values):
            set_debug_level_from_env()
            yield
    finally:
        set_debug_level_from_env()
