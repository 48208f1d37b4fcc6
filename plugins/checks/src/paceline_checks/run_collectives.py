"""The running of ``paceline bench comm``: processes and threads, the engines that they drive, and the measurement.

An engine carries the data: one of torch's process groups, MPI, or NCCL driven by one thread over several GPUs.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.core.plugins import install_command
from paceline.parallel.rendezvous import rendezvous
from paceline.torch_internals import (
    HashStore,
    PrefixStore,
    Store,
    all_gather_into,
    end_coalescing,
    gloo_group,
    nccl_group,
    reduce_scatter_into,
    start_coalescing,
)
from paceline_checks.collectives import (
    COLLECTIVES,
    ELEMENT_BYTES,
    Collective,
    CollectiveTiming,
    CommunicationPlan,
    Op,
    pattern,
)

_MEETING_TIMEOUT_S = 120.0
_STORE_TIMEOUT = timedelta(seconds=120)
_TURN_S = 0.5
_ROUND_BYTES = 64 * 2**20
"""As many repetitions follow each other without a pause as their buffers fit into this."""


Measured = tuple[str, int, list[CollectiveTiming]]
"""What carried the data, the number of ranks, and the results, which are the same on all of them."""


def run_plan(plan: CommunicationPlan, environment: Environment) -> Measured:
    """Measure, as one of the job's processes.

    Raises:
        ConfigError: there are not as many GPUs, or the backend cannot be used here.
    """
    require_gpus(plan, environment.local_world_size)
    if plan.mode == "one-process":
        return _drive(OneThreadEngine(plan.nproc), plan)
    if plan.backend == "mpi":
        return _drive(MpiEngine(), plan)
    with _store(environment, plan.interface) as store:
        if plan.mode == "threads-per-device":
            return _drive_threads(plan, environment, store)
        return _drive(_open_group(plan, store, environment.rank, environment, environment.local_rank), plan)


def _drive(engine: CollectiveEngine, plan: CommunicationPlan) -> Measured:
    try:
        results = measure(engine, plan.ops, plan.sizes, iterations=plan.iterations, warmup=plan.warmup)
        return engine.title, engine.ranks, list(results)
    finally:
        engine.close()


def _drive_threads(plan: CommunicationPlan, environment: Environment, store: Store) -> Measured:
    """Run a thread for each of this process's ranks; Ctrl-C ends the process."""
    measured: list[Measured] = []
    errors: list[BaseException] = []
    whole = replace(environment, world_size=environment.world_size * plan.nproc)

    def drive(number: int) -> None:
        try:
            rank = environment.rank * plan.nproc + number
            # A client waits for one thing at a time, and the threads wait for each other.
            client = store.clone()  # type: ignore[attr-defined]
            device = environment.local_rank * plan.nproc + number
            measured.append(_drive(_open_group(plan, client, rank, whole, device), plan))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(n,), name=f"rank-{n}") for n in range(plan.nproc)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # Python handles a signal that arrives right before a wait only after it
                thread.join(_TURN_S)
    except KeyboardInterrupt:
        os._exit(130)  # nothing else ends a thread that waits for its peers
    if errors:
        raise errors[0]
    return measured[0]


def _open_group(plan: CommunicationPlan, store: Store, rank: int, environment: Environment, gpu: int) -> GroupEngine:
    """Open an NCCL group, or a gloo group, on loopback if all ranks are on one machine."""
    ranks = environment.world_size
    if plan.backend == "nccl":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        return GroupEngine(nccl_group(store, rank, ranks, _TIMEOUT), rank, ranks, device, _nccl_title())
    hostname = "127.0.0.1" if environment.nodes == 1 else None
    group = gloo_group(store, rank, ranks, _TIMEOUT, hostname=hostname, interface=plan.interface)
    return GroupEngine(group, rank, ranks, torch.device("cpu"), "gloo")


@contextmanager
def _store(environment: Environment, interface: str | None) -> Iterator[Store]:
    """Return the store of the ranks' groups."""
    if environment.world_size == 1:
        store = HashStore()
        store.set_timeout(_STORE_TIMEOUT)
        yield store
        return
    with rendezvous(environment, {}, generation=0, interface=interface, timeout_s=_MEETING_TIMEOUT_S) as meeting:
        yield PrefixStore("comm", meeting.store)


def require_gpus(plan: CommunicationPlan, local_world_size: int) -> None:
    """Refuse NCCL where a rank would have no GPU of its own."""
    there = torch.cuda.device_count()
    wanted = local_world_size * (1 if plan.mode == "process-per-device" else plan.nproc)
    if plan.backend == "nccl" and there < wanted:
        raise ConfigError(
            f"--backend nccl, --mode {plan.mode} needs {wanted} GPUs on this machine, one for each rank, but "
            f"torch sees {there}. On CPUs use --backend gloo, with --mode process-per-device or "
            "threads-per-device."
        )


# --- the measurement ---


def measure(
    engine: CollectiveEngine, ops: Sequence[Op], sizes: Sequence[int], *, iterations: int, warmup: int
) -> Iterator[CollectiveTiming]:
    """Measure all operations at all sizes, in bytes; every driver calls it alike and gets the same.

    Args:
        iterations: timed repetitions of each; all are checked.
    """
    for op in ops:
        collective = COLLECTIVES[op]
        # Small sizes of many ranks can come out as the same number of elements.
        counts = dict.fromkeys(collective.elements(size, engine.ranks) for size in sizes)
        for elements in counts:
            yield _measure_one(engine, collective, elements, iterations, warmup)


def _measure_one(
    engine: CollectiveEngine, collective: Collective, elements: int, iterations: int, warmup: int
) -> CollectiveTiming:
    size = elements * ELEMENT_BYTES
    in_a_row = max(1, min(iterations, _ROUND_BYTES // (2 * size)))
    rounds = -(-iterations // in_a_row)
    slots = [_BufferSlot(engine, collective, elements) for _ in range(in_a_row)]
    for repetition in range(warmup):
        slots[0].fill(repetition)
        slots[0].run()
    engine.synchronize()
    seconds, wrong = 0.0, 0
    for round_ in range(rounds):
        for number, slot in enumerate(slots):
            slot.fill(round_ * in_a_row + number)
        engine.synchronize()
        engine.sums([0.0])  # begin together
        started = time.perf_counter()
        for slot in slots:
            slot.run()
        engine.synchronize()
        seconds += time.perf_counter() - started
        wrong += sum(slot.wrong() for slot in slots)
    calls = rounds * in_a_row
    drivers = engine.ranks // len(engine.local)
    total_s, total_wrong = engine.sums([seconds / calls, float(wrong)])
    mean_s = total_s / drivers
    algbw = size / mean_s / 1e9
    return CollectiveTiming(
        op=collective.op,
        size=size,
        time_us=mean_s * 1e6,
        algbw_gbps=algbw,
        busbw_gbps=algbw * collective.bus_factor(engine.ranks),
        wrong=round(total_wrong),
        checked=calls * engine.ranks * collective.target_elements(elements, engine.ranks),
    )


class _BufferSlot:
    """The buffers of one repetition, for the ranks of one driver."""

    def __init__(self, engine: CollectiveEngine, collective: Collective, elements: int) -> None:
        self._engine = engine
        self._collective = collective
        given = collective.source_elements(elements, engine.ranks)
        received = collective.target_elements(elements, engine.ranks)
        self._targets = [torch.empty(received, device=device) for device in engine.devices]
        self._sources = self._targets
        if not collective.in_place:
            self._sources = [torch.empty(given, device=device) for device in engine.devices]
        self._repetition = 0

    def fill(self, repetition: int) -> None:
        """Write what each rank gives, and nothing that could be taken for a result."""
        self._repetition = repetition
        for rank, source, target in zip(self._engine.local, self._sources, self._targets, strict=True):
            target.fill_(torch.nan)
            source.copy_(self._collective.given(self._base(source), rank))

    def run(self) -> None:
        self._engine.run(self._collective.op, self._sources, self._targets)

    def wrong(self) -> int:
        return sum(
            int((target != self._collective.expected(self._base(source), rank, self._engine.ranks)).sum())
            for rank, source, target in zip(self._engine.local, self._sources, self._targets, strict=True)
        )

    def _base(self, source: torch.Tensor) -> torch.Tensor:
        return pattern(source.numel(), self._repetition, source.device)


# --- the engines ---

_TIMEOUT = timedelta(minutes=5)
"""A rank that is gone is waited for no longer."""


class CollectiveEngine(ABC):
    """Runs collectives for the ranks that one thread drives: one, or the GPUs of the process.

    Attributes:
        ranks: n, over all processes.
        local: the numbers of those driven here, each of which keeps its data on its one of ``devices``.
        title: for people: "gloo", "NCCL 2.27".
    """

    ranks: int
    local: tuple[int, ...]
    devices: tuple[torch.device, ...]
    title: str

    @abstractmethod
    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run one collective, or enqueue it; each local rank receives in its target, in place what it gives, too."""

    @abstractmethod
    def sums(self, values: Sequence[float]) -> list[float]:
        """Element by element over all drivers; waits for all of them."""

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give connections back."""


class GroupEngine(CollectiveEngine):
    """A process group of torch: gloo or NCCL, one rank for each process or thread.

    The group is made without ``init_process_group``, which knows one group of ranks for each process.
    """

    def __init__(self, group: Any, rank: int, ranks: int, device: torch.device, title: str) -> None:
        self._group = group
        self.ranks = ranks
        self.title = title
        self.local = (rank,)
        self.devices = (device,)

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        group, [source], [target] = self._group, sources, targets
        match op:
            case "all_reduce":
                group.allreduce([target], AllreduceOptions()).wait()
            case "all_gather":
                all_gather_into(group, target, source).wait()
            case "reduce_scatter":
                reduce_scatter_into(group, target, source).wait()
            case "broadcast":
                group.broadcast([target], BroadcastOptions()).wait()
            case "all_to_all":
                group.alltoall_base(target, source, [], []).wait()
            case "p2p":
                self._exchange(source, target)

    def _exchange(self, source: torch.Tensor, target: torch.Tensor) -> None:
        [rank] = self.local
        after, before = (rank + 1) % self.ranks, (rank - 1) % self.ranks
        if self.ranks == 1:
            target.copy_(source)
            return
        group = self._group
        together = source.device.type == "cuda"
        if together:
            start_coalescing(group)
        pending = [group.send([source], after, 0), group.recv([target], before, 0)]
        if together:
            end_coalescing(group).wait()
            return
        for work in pending:
            work.wait()

    def sums(self, values: Sequence[float]) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64, device=self.devices[0])
        self._group.allreduce([summed], AllreduceOptions()).wait()
        return [float(value) for value in summed]

    def close(self) -> None:
        self._group.shutdown()


class MpiEngine(CollectiveEngine):
    """MPI by mpi4py, one rank for each process of this ``mpirun``, data on the CPU."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"--backend mpi: mpi4py cannot be used ({error}). Install it: {install_command('mpi')}"
            ) from error
        self._comm = MPI.COMM_WORLD
        self.ranks = self._comm.Get_size()
        self.title = MPI.Get_library_version().partition(",")[0].strip("\0 \n")
        self.local = (self._comm.Get_rank(),)
        self.devices = (torch.device("cpu"),)

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        from mpi4py import MPI

        comm, [source], [target] = self._comm, [t.numpy() for t in sources], [t.numpy() for t in targets]
        match op:
            case "all_reduce":
                comm.Allreduce(MPI.IN_PLACE, target)
            case "all_gather":
                comm.Allgather(source, target)
            case "reduce_scatter":
                comm.Reduce_scatter_block(source, target)
            case "broadcast":
                comm.Bcast(target)
            case "all_to_all":
                comm.Alltoall(source, target)
            case "p2p":
                [rank] = self.local
                comm.Sendrecv(source, (rank + 1) % self.ranks, recvbuf=target, source=(rank - 1) % self.ranks)

    def sums(self, values: Sequence[float]) -> list[float]:
        import numpy as np
        from mpi4py import MPI

        summed = np.array(values, dtype=np.float64)
        self._comm.Allreduce(MPI.IN_PLACE, summed)
        return [float(value) for value in summed]


class OneThreadEngine(CollectiveEngine):
    """All GPUs of this process, driven by one thread: ``ncclCommInitAll`` and grouped calls."""

    def __init__(self, gpus: int) -> None:
        self.ranks = gpus
        self.local = tuple(range(gpus))
        self.devices = tuple(torch.device("cuda", index) for index in range(gpus))
        self.title = _nccl_title()

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        nccl: Any = torch.cuda.nccl
        match op:
            case "all_reduce":
                nccl.all_reduce(targets, targets)
            case "all_gather":
                nccl.all_gather(sources, targets)
            case "reduce_scatter":
                nccl.reduce_scatter(sources, targets)
            case "broadcast":
                nccl.broadcast(targets)
            case _:
                raise ConfigError(
                    f"--mode one-process cannot do {op}: torch.cuda.nccl has no such call. "
                    "Use --mode process-per-device or threads-per-device."
                )

    def sums(self, values: Sequence[float]) -> list[float]:
        return list(values)


def _nccl_title() -> str:
    nccl: Any = torch.cuda.nccl
    return f"NCCL {'.'.join(map(str, nccl.version()))}"
