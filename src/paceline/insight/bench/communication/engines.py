"""Who carries the data: torch's process groups, MPI, or NCCL driven by one thread over several GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
)

from paceline.core.errors import ConfigError
from paceline.insight.bench.communication.collectives import Op

if TYPE_CHECKING:
    from mpi4py import MPI


_TIMEOUT = timedelta(minutes=5)
"""A rank that is gone is waited for no longer."""


class Engine(ABC):
    """Runs collectives for the ranks that one thread drives: one, or the GPUs of the process.

    Attributes:
        ranks: n, over all processes.
        local: the numbers of those driven here.
        devices: where each of these keeps its data.
        title: for people: "gloo", "NCCL 2.27".
    """

    ranks: int
    local: tuple[int, ...]
    devices: tuple[torch.device, ...]
    title: str

    @abstractmethod
    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run one collective, or enqueue it.

        Args:
            op: which.
            sources: what each local rank gives; not used in place.
            targets: where each receives; in place what it gives, too.
        """

    @abstractmethod
    def sums(self, values: Sequence[float]) -> list[float]:
        """Element by element over all drivers; waits for all of them."""

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Give connections back."""
        return None


class GroupEngine(Engine):
    """A process group of torch: gloo or NCCL, one rank for each process or thread.

    The group is made without ``init_process_group``, which knows one group of ranks for each process.
    """

    def __init__(self, group: Any, rank: int, ranks: int, device: torch.device, title: str) -> None:
        self._group = group
        self._rank = rank
        self.ranks = ranks
        self.local = (rank,)
        self.devices = (device,)
        self.title = title

    @classmethod
    def gloo(cls, store: Store, rank: int, ranks: int, *, one_machine: bool, interface: str | None) -> GroupEngine:
        """A gloo group, on loopback where all ranks are on one machine."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        if one_machine:
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        elif interface is not None:
            options._devices = [ProcessGroupGloo.create_device(interface=interface)]
        else:
            options._devices = [ProcessGroupGloo.create_default_device()]
        return cls(ProcessGroupGloo(store, rank, ranks, options), rank, ranks, torch.device("cpu"), "gloo")

    @classmethod
    def nccl(cls, store: Store, rank: int, ranks: int, device: torch.device) -> GroupEngine:
        """An NCCL group, whose rank works on ``device``."""
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return cls(ProcessGroupNCCL(store, rank, ranks, options), rank, ranks, device, _nccl_title())

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run it in the group; on a CPU it has ended then, on a GPU the stream waits for it."""
        group, [source], [target] = self._group, sources, targets
        match op:
            case "all_reduce":
                group.allreduce([target], AllreduceOptions()).wait()
            case "all_gather":
                group._allgather_base(target, source).wait()
            case "reduce_scatter":
                group._reduce_scatter_base(target, source).wait()
            case "broadcast":
                group.broadcast([target], BroadcastOptions()).wait()
            case "all_to_all":
                group.alltoall_base(target, source, [], []).wait()
            case "p2p":
                self._exchange(source, target)

    def _exchange(self, source: torch.Tensor, target: torch.Tensor) -> None:
        after, before = (self._rank + 1) % self.ranks, (self._rank - 1) % self.ranks
        if self.ranks == 1:
            target.copy_(source)
            return
        group = self._group
        together = source.device.type == "cuda"
        if together:
            group._start_coalescing(source.device)
        pending = [group.send([source], after, 0), group.recv([target], before, 0)]
        if together:
            group._end_coalescing(source.device).wait()
            return
        for work in pending:
            work.wait()

    def sums(self, values: Sequence[float]) -> list[float]:
        """One all-reduce of doubles."""
        summed = torch.tensor(values, dtype=torch.float64, device=self.devices[0])
        self._group.allreduce([summed], AllreduceOptions()).wait()
        return [float(value) for value in summed]

    def close(self) -> None:
        """Have the group end its threads and connections."""
        self._group.shutdown()


class MpiEngine(Engine):
    """MPI by mpi4py, one rank for each process, data on the CPU."""

    def __init__(self, comm: MPI.Comm, title: str) -> None:
        self._comm = comm
        self.ranks = comm.Get_size()
        self.local = (comm.Get_rank(),)
        self.devices = (torch.device("cpu"),)
        self.title = title

    @classmethod
    def world(cls) -> MpiEngine:
        """All processes of this ``mpirun``.

        Raises:
            ConfigError: mpi4py is missing, or finds no MPI.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"--backend mpi: mpi4py cannot be used ({error}). Install it: pip install 'paceline[mpi]'"
            ) from error
        name = MPI.Get_library_version().partition(",")[0].strip("\0 \n")
        return cls(MPI.COMM_WORLD, name)

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run it on the tensors' own memory."""
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
        """One all-reduce of doubles."""
        import numpy as np
        from mpi4py import MPI

        summed = np.array(values, dtype=np.float64)

        self._comm.Allreduce(MPI.IN_PLACE, summed)
        return [float(value) for value in summed]


class OneThreadEngine(Engine):
    """All GPUs of this process, driven by one thread: ``ncclCommInitAll`` and grouped calls."""

    def __init__(self, gpus: int) -> None:
        self.ranks = gpus
        self.local = tuple(range(gpus))
        self.devices = tuple(torch.device("cuda", index) for index in range(gpus))
        self.title = _nccl_title()

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueue it on each GPU's stream."""
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
        """There is no other driver."""
        return list(values)


def _nccl_title() -> str:
    nccl: Any = torch.cuda.nccl
    return f"NCCL {'.'.join(map(str, nccl.version()))}"
