"""The process group: every path forms it, and leaves it, by the one function here."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from paceline.core.environment import patch_environ
from paceline.core.errors import ConfigError
from paceline.core.sockets import loopback_interface
from paceline.parallel.device import gpu_identity
from paceline.torch_internals import Store, abort_groups, set_debug_level_from_env, set_group_timeout

if TYPE_CHECKING:
    from paceline.parallel.world import World

COLLECTIVE_TIMEOUT_S = 1800.0
"""The time limit of a collective: ranks may train or evaluate at different speeds for long."""


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
