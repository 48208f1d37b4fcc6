"""The processes and threads of ``paceline bench comm``: who drives which ranks, and how the drivers meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.core.signals import join_all
from paceline.insight.bench.communication.engines import Engine, GroupEngine, MpiEngine, OneThreadEngine
from paceline.insight.bench.communication.measure import CollectiveTiming, measure
from paceline.insight.bench.communication.plan import CommunicationPlan
from paceline.parallel.rendezvous import rendezvous

_MEETING_TIMEOUT_S = 120.0
_STORE_TIMEOUT = timedelta(seconds=120)


def run_plan(
    plan: CommunicationPlan, place: Environment, report: Callable[[CollectiveTiming], None]
) -> tuple[str, int]:
    """Measure, as one of the job's processes; return who carried the data, and the number of ranks.

    Args:
        plan: the same in all processes.
        place: which of them this is.
        report: called with each result, in the process of rank 0 alone.

    Raises:
        ConfigError: there are not as many GPUs, or the backend cannot be used here.
    """
    require_gpus(plan, place.local_world_size)
    if plan.mode == "one-process":
        return _drive(OneThreadEngine(plan.nproc), plan, report)
    if plan.backend == "mpi":
        return _drive(MpiEngine.world(), plan, report)
    with _store(place, plan.interface) as store:
        if plan.mode == "threads-per-device":
            return _drive_threads(plan, place, store, report)
        return _drive(_group(plan, store, place.rank, place, place.local_rank), plan, report)


def _drive(engine: Engine, plan: CommunicationPlan, report: Callable[[CollectiveTiming], None]) -> tuple[str, int]:
    try:
        for measured in measure(engine, plan.ops, plan.sizes, iterations=plan.iterations, warmup=plan.warmup):
            if 0 in engine.local:
                report(measured)
        return engine.title, engine.ranks
    finally:
        engine.close()


def _drive_threads(
    plan: CommunicationPlan, place: Environment, store: Store, report: Callable[[CollectiveTiming], None]
) -> tuple[str, int]:
    """A thread for each of this process's ranks; Ctrl-C ends the process."""
    titles: list[tuple[str, int]] = []
    errors: list[BaseException] = []
    whole = replace(place, world_size=place.world_size * plan.nproc)

    def drive(number: int) -> None:
        try:
            rank = place.rank * plan.nproc + number
            # A client waits for one thing at a time, and the threads wait for each other.
            client = store.clone()  # type: ignore[attr-defined]
            device = place.local_rank * plan.nproc + number
            group = _group(plan, client, rank, whole, device)
            titles.append(_drive(group, plan, report))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(n,), name=f"rank-{n}") for n in range(plan.nproc)]
    try:
        for thread in threads:
            thread.start()
        join_all(threads)
    except KeyboardInterrupt:
        os._exit(130)  # nothing else ends a thread that waits for its peers
    if errors:
        raise errors[0]
    return titles[0]


def _group(plan: CommunicationPlan, store: Store, rank: int, place: Environment, device: int) -> GroupEngine:
    if plan.backend == "nccl":
        return GroupEngine.nccl(store, rank, place.world_size, torch.device("cuda", device))
    return GroupEngine.gloo(store, rank, place.world_size, one_machine=place.nodes == 1, interface=plan.interface)


@contextmanager
def _store(place: Environment, interface: str | None) -> Iterator[Store]:
    """Where the ranks' groups find each other."""
    if place.world_size == 1:
        store = HashStore()
        store.set_timeout(_STORE_TIMEOUT)
        yield store
        return
    with rendezvous(place, {}, generation=0, interface=interface, timeout_s=_MEETING_TIMEOUT_S) as meeting:
        yield PrefixStore("comm", meeting.store)


def require_gpus(plan: CommunicationPlan, local_world_size: int) -> None:
    """Refuse NCCL where a rank would have no GPU of its own.

    Args:
        plan: what is to be measured.
        local_world_size: processes of this machine.

    Raises:
        ConfigError: torch sees fewer.
    """
    if plan.backend != "nccl":
        return
    there = torch.cuda.device_count()
    of_each = {"process-per-device": 1, "one-process": plan.nproc, "threads-per-device": plan.nproc}
    wanted = local_world_size * of_each[plan.mode]
    if there < wanted:
        raise ConfigError(
            f"--backend nccl, --mode {plan.mode} needs {wanted} GPUs on this machine, one for each rank, but "
            f"torch sees {there}. On CPUs use --backend gloo, with --mode process-per-device or "
            "threads-per-device."
        )
