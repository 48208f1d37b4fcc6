"""Asynchronous parameter servers (``--strategy ps --ps-mode async`` and ``ssp``).

The unit of work is a step: a worker gets the next step's number with the parameters as they are, computes
the gradient of the whole global batch, and pushes it; the servers apply gradients as they arrive, with the
task's own optimizer and scheduler. The first server decides that order and tells it to the others: all
servers make the same updates, and the parameters that a worker gets are all from between the same two.
So a run is a function of its options and of the order of arrival (``order``), and of nothing else.

Dean et al., "Large Scale Distributed Deep Networks", 2012 (Downpour SGD); the bound of ``ssp`` is in
:mod:`paceline.training.async_trainer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import distributed as dist

from paceline.core.errors import NonFiniteLossError
from paceline.elastic.worker_channel import AgentClient
from paceline.parallel.messages import AnySourceReceiver, TensorBundle
from paceline.parallel.parameter_server import ServerParameters
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import ParallelDims, translate_peer_errors
from paceline.training.async_trainer import (
    AsyncTrainer,
    StalenessBound,
    drop_others_state,
    with_all_optimizers,
)
from paceline.training.run_context import RunContext
from paceline.training.state import TrainProgress
from paceline.training.step import describe_non_finite


class _Tag(IntEnum):
    COMMAND = 1001
    PARAMETERS = 1002
    HEADER = 1003
    GRADIENTS = 1004
    BUFFERS = 1005


class _Command(IntEnum):
    END = 0
    """The stretch is over."""
    COMPUTE = 1
    """To a worker: compute a step."""
    SEND = 2
    """To a server: send the parameters to a worker."""
    APPLY = 3
    """To a server: apply the gradients of a worker."""


@dataclasses.dataclass(frozen=True)
class _Push:
    """What a worker tells of a step, in float64 numbers, beside its gradients.

    Attributes:
        version: updates made in this stretch before it got its parameters.
        bad_microbatch: -1 for none.
        stop: what asks the worker for a stop, as in the control word.
    """

    step: float
    step_in_epoch: float
    version: float
    samples: float
    weight: float
    loss: float
    checksum: float
    bad_microbatch: float
    finite: float
    stop: float

    @property
    def sums(self) -> StepSums:
        """As the trainer takes them."""
        return StepSums(
            samples=int(self.samples),
            weight=self.weight,
            loss=self.loss,
            checksum=int(self.checksum),
            rows=[],
            bad_microbatch=None if self.bad_microbatch < 0 else int(self.bad_microbatch),
            finite=bool(self.finite),
        )


_PUSH_LENGTH = len(dataclasses.fields(_Push))


class AsyncParameterServerTrainer(AsyncTrainer):
    """Trains with servers that apply whole steps' gradients as they arrive.

    Attributes:
        order: which worker's gradient is applied next, numbered from 0, for a run that is to be repeated;
            None: whichever arrives.

    Raises:
        UserError: as :class:`AsyncTrainer` says.
    """

    order: Iterator[int] | None = None

    def __init__(self, run: RunContext, member: AgentClient | None = None) -> None:
        super().__init__(run, member)
        self._worker_steps: list[int] = []
        self._applied: dict[int, StepSums] = {}  # steps that wait for earlier ones, by number in the epoch

    def join_group(self, mesh: ParallelDims) -> None:
        module, world = self.state.module, mesh.world
        self._servers = self.run.config.num_servers(world.world_size)
        self._on_servers = ServerParameters(module, self._servers)
        drop_others_state(self.state, self._on_servers, world.rank)
        super().join_group(mesh)
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buffers = list(module.buffers())
        self._buffer_parcel = TensorBundle(self._buffers)
        self._changed_buffers = TensorBundle([*self._buffers, *self._buffers])  # after the step, and before
        if world.rank == 0:
            workers = range(self._servers, world.world_size)
            self._worker_steps = [0] * len(workers)
            self._inbox = AnySourceReceiver(world, workers, _PUSH_LENGTH, _Tag.HEADER)
            self._of_world.callback(self._inbox.close)

    @property
    def extra_results(self) -> dict[str, Any]:
        worker_steps = self.world.broadcast_object(self._worker_steps)
        return {**super().extra_results, "worker_steps": worker_steps}

    def _full_state_dict(self) -> dict[str, Any]:
        return with_all_optimizers(super()._full_state_dict(), self.world, self._servers)

    def _run_to_sync_point(self, steps: int) -> None:
        if self.world.rank == 0:
            with self.states.mutating():
                self._run_chief(steps)
            assert not self._applied
        elif self.world.rank < self._servers:
            self._serve()
        else:
            self._work()
        self._next_sync_point()

    def _next_sync_point(self) -> None:
        """Have every rank hold the parameters and buffers, and know where the run stands."""
        self.world.progress_tracker.begin("step")
        self._on_servers.publish(self.world)
        if self.world.rank == 0:
            self._buffer_parcel.pack(self._buffers)
        self._buffer_parcel.broadcast(self.world, 0)
        if self.world.rank != 0:
            self._buffer_parcel.unpack(self._buffers)
        progress = self.world.broadcast_object(dataclasses.asdict(self.state.progress))
        if self.world.rank != 0:
            self.state.progress = TrainProgress(**progress)

    # The first server.

    def _run_chief(self, steps: int) -> None:
        """Hand out steps, and apply their gradients as they arrive."""
        progress = self.state.progress
        first, first_in_epoch = progress.step, progress.step_in_epoch
        workers = range(self._servers, self.world.world_size)
        clocks = StalenessBound(len(workers), self.run.config.ps_staleness)
        idle, handed, applied = list(workers), 0, 0
        more = True
        while True:
            for worker in list(idle):
                if more and handed < steps and clocks.can_start(worker - self._servers):
                    self._dispatch(worker, first + handed, first_in_epoch + handed, applied)
                    idle.remove(worker)
                    handed += 1
            if len(idle) == len(workers):
                break
            # Nobody waits for this rank while it waits itself, however long a step takes.
            self.world.progress_tracker.begin("waiting")
            wanted = None if self.order is None else self._servers + next(self.order)
            worker, message = self._inbox.next(wanted)
            self.world.progress_tracker.begin("step")
            push = _Push(*message)
            self._apply_push(worker, push, behind=applied - int(push.version))
            applied += 1
            clocks.finished(worker - self._servers)
            idle.append(worker)
            if push.stop or self.stop_reason() or self.checkpoint_manager.is_due_by_clock():
                self.run.signals.received = self.run.signals.received or int(push.stop)
                more = False
        for rank in range(1, self.world.world_size):
            self._command(rank, _Command.END)

    def _dispatch(self, worker: int, step: int, step_in_epoch: int, version: int) -> None:
        for server in range(1, self._servers):
            self._command(server, _Command.SEND, worker)
        self._command(worker, _Command.COMPUTE, step, step_in_epoch, version)
        self._send_parameters(worker)
        self._buffer_parcel.pack(self._buffers)
        self._buffer_parcel.send(self.world, worker, _Tag.BUFFERS)
        self._inbox.expect(worker)

    def _apply_push(self, worker: int, push: _Push, *, behind: int) -> None:
        """Apply a worker's gradient, and make its step count."""
        sums = push.sums
        if not sums.finite:
            at = dataclasses.replace(self.state.progress, step=int(push.step), step_in_epoch=int(push.step_in_epoch))
            raise NonFiniteLossError(describe_non_finite(self.run.directory, at, self.run.data.order, sums))
        for server in range(1, self._servers):
            self._command(server, _Command.APPLY, worker)
        mark = self.monitor.timer.mark
        self._receive_gradients(worker)
        self._changed_buffers.receive(self.world, worker, _Tag.BUFFERS)
        mark("reduction")
        self._apply()
        self._take_buffers(behind)
        mark("optimizer")
        # They count in the order of their numbers, which is that of the data, once all before are applied: no
        # state between two cuts is ever saved, and at a cut it makes no difference.
        self._applied[int(push.step_in_epoch)] = sums
        while self.state.progress.step_in_epoch in self._applied:
            self._commit(self._applied.pop(self.state.progress.step_in_epoch), (), {})
        self.staleness.observe(behind)
        self._worker_steps[worker - self._servers] += 1

    @torch.no_grad()
    def _take_buffers(self, behind: int) -> None:
        """Have the buffers change as they did on the worker, whatever others did to them meanwhile."""
        number = len(self._buffers)
        after, before = self._changed_buffers.views[:number], self._changed_buffers.views[number:]
        for buffer, new, old in zip(self._buffers, after, before, strict=True):
            if behind == 0 or buffer.dtype == torch.bool:
                buffer.copy_(new)
            else:
                buffer.add_((new - old).to(buffer.device))

    # All servers.

    def _serve(self) -> None:
        """Do as the first server says."""
        while True:
            self.world.progress_tracker.begin("waiting")
            command, worker, *_ = self._next_command()
            if command == _Command.END:
                return
            self.world.progress_tracker.begin("step")
            if command == _Command.SEND:
                self._send_parameters(worker)
            else:
                self._receive_gradients(worker)
                self._apply()

    def _send_parameters(self, worker: int) -> None:
        rank = self.world.rank
        self._on_servers.parcels[rank].pack(self._on_servers.parameters[rank])
        self._on_servers.parcels[rank].send(self.world, worker, _Tag.PARAMETERS)

    def _receive_gradients(self, worker: int) -> None:
        parcel, held = self._on_servers.parcels[self.world.rank], self._on_servers.parameters[self.world.rank]
        parcel.receive(self.world, worker, _Tag.GRADIENTS)
        for parameter, gradient in zip(held, parcel.views, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def _apply(self) -> None:
        self._update()
        for parameter in self._on_servers.parameters[self.world.rank]:
            parameter.grad = None

    # A worker.

    def _work(self) -> None:
        """Compute the steps that the first server hands out."""
        world = self.world
        while True:
            world.progress_tracker.begin("waiting")
            command, step, step_in_epoch, version = self._next_command()
            if command == _Command.END:
                self.monitor.timer.mark("other")
                return
            for server, parcel in enumerate(self._on_servers.parcels):
                parcel.receive(world, server, _Tag.PARAMETERS)
                parcel.unpack(self._on_servers.parameters[server])
            self._buffer_parcel.receive(world, 0, _Tag.BUFFERS)
            self._buffer_parcel.unpack(self._buffers)
            self.monitor.timer.mark("other")
            world.progress_tracker.begin("step")
            sums = self._compute(step, step_in_epoch)
            self.samples += sums.samples
            self._push(sums, step, step_in_epoch, version)
            world.progress_tracker.end()

    def _push(self, sums: StepSums, step: int, step_in_epoch: int, version: int) -> None:
        push = _Push(
            step=step,
            step_in_epoch=step_in_epoch,
            version=version,
            samples=sums.samples,
            weight=sums.weight,
            loss=sums.loss,
            checksum=sums.checksum,
            bad_microbatch=-1 if sums.bad_microbatch is None else sums.bad_microbatch,
            finite=sums.finite,
            stop=self.stop_reason(),
        )
        self._send(0, _Tag.HEADER, torch.tensor(dataclasses.astuple(push), dtype=torch.float64))
        gradients = [_gradient(parameter) for parameter in self._trainable]
        self._changed_buffers.pack([*self._buffers, *self._buffer_parcel.views])
        for server, (parcel, numbers) in enumerate(zip(self._on_servers.parcels, self._on_servers.ranges, strict=True)):
            parcel.pack(gradients[numbers.start : numbers.stop])
            parcel.send(self.world, server, _Tag.GRADIENTS)
            if server == 0:
                self._changed_buffers.send(self.world, 0, _Tag.BUFFERS)

    # Commands: four int64 numbers.

    def _command(self, rank: int, command: _Command, *values: int) -> None:
        numbers: Sequence[int] = (command, *values, *[0] * (3 - len(values)))
        self._send(rank, _Tag.COMMAND, torch.tensor(numbers))

    def _next_command(self) -> list[int]:
        command = torch.empty(4, dtype=torch.int64)
        with translate_peer_errors():
            dist.recv(command, group=self.world.group, tag=_Tag.COMMAND, group_src=0)
        return command.tolist()

    def _send(self, rank: int, tag: _Tag, message: torch.Tensor) -> None:
        with translate_peer_errors():
            dist.send(message, group=self.world.group, tag=tag, group_dst=rank)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
