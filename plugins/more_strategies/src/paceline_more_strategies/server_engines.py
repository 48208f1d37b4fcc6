"""Training with parameter servers (``--strategy ps``): only the servers hold optimizer state and update.

With ``--ps-mode sync`` all workers compute each step together. With ``async`` and ``ssp`` the unit of work is a step:
a worker gets the next step's number with the parameters as they are, computes the gradient of the whole global batch,
and pushes it; the servers apply gradients as they arrive, with the task's own optimizer and scheduler. The first
server decides that order and tells it to the others: all servers make the same updates, and the parameters that a
worker gets are all from between the same two. So a run is a function of its options and of the order of arrival
(``order``), and of nothing else.

Dean et al., "Large Scale Distributed Deep Networks", 2012 (Downpour SGD); the bound of ``ssp`` is in
:mod:`paceline_more_strategies.asynchronous`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.elastic.group_formation import StateSource, transfer_state
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import World
from paceline.training.control import ControlFlags, StopCause
from paceline.training.group_context import GroupContext, OpenStep
from paceline.training.reproducibility import deterministic_kernels
from paceline.training.run_context import RunContext
from paceline.training.state import TrainProgress
from paceline.training.state_manager import StateManager
from paceline.training.step import require_finite
from paceline.training.trainer import SyncEngine
from paceline_more_strategies.asynchronous import (
    AsynchronousEngine,
    StalenessBound,
    compute_step,
    gather_requests,
    require_no_callback,
)
from paceline_more_strategies.messages import AnySourceReceiver, TensorBundle
from paceline_more_strategies.options import ServerOptions
from paceline_more_strategies.parameter_server import ServerParameters

# --- What the servers hold: each its range of the parameters, and their optimizer state ---


class OptimizerServers:
    """The first ranks, which alone update: each the parameters of its range.

    Args:
        states: this rank's copy of the state; the optimizer state of other ranks' parameters is freed.

    Raises:
        ConfigError: there are fewer parameters than servers.
    """

    def __init__(self, run: RunContext, states: StateManager, world: World, device: torch.device) -> None:
        self._states = states
        self._world = world
        self.number = run.config.num_servers(world.world_size)
        self.parameters = ServerParameters(states.state.module, self.number, device)
        mine = {id(parameter) for parameter in self.parameters.parameters[world.rank]} if self.is_server else set()
        for optimizer in states.state.optimizers.values():
            for parameter in [p for p in optimizer.state if id(p) not in mine]:
                del optimizer.state[parameter]

    @property
    def is_server(self) -> bool:
        return self._world.rank < self.number

    def update(self, finite: bool) -> None:
        """Apply each server's gradients there, and give every rank the parameters; all ranks call this together."""
        if self.is_server:
            self.parameters.keep_gradients_of(self._world.rank)
            self._states.update(finite)
        self.parameters.publish(self._world)

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the optimizer state that the other servers hold, on rank 0; all ranks call this together."""
        if self.number == 1:
            return state
        merged = {name: dict(optimizer["state"]) for name, optimizer in state["optimizers"].items()}
        for server in range(1, self.number):
            mine = merged if self._world.rank == server else None
            received = transfer_state(self._world, StateSource(server, 0, (0,)), mine)
            for name, entries in (received or {}).items():
                merged[name].update(entries)
        whole = {name: {**optimizer, "state": merged[name]} for name, optimizer in state["optimizers"].items()}
        return {**state, "optimizers": whole}


class SyncServerEngine(SyncEngine):
    """The steps are those of :class:`SyncEngine`, but only the servers update."""

    validate = staticmethod(require_no_callback)

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        self._servers = OptimizerServers(run, states, world, world.device)
        super().__init__(run, states, world, self._servers.update)

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._servers.gather_state(state)


# --- Asynchronous: the messages of workers and servers ---


class _Tag(IntEnum):
    COMMAND = 1001
    PARAMETERS = 1002
    HEADER = 1003
    GRADIENTS = 1004
    BUFFERS = 1005
    USED = 1006


class _Command(IntEnum):
    END = 0
    """The interval is over."""
    COMPUTE = 1
    """To a worker: compute a step."""
    SEND = 2
    """To a server: send the parameters to a worker."""
    APPLY = 3
    """To a server: apply the gradients of a worker."""


class _Push(NamedTuple):
    """A worker's message about a step, in float64 numbers, sent with its gradients.

    Attributes:
        version: updates made in this interval before it got its parameters.
        bad_microbatch: -1 for none.
        stop: the cause of a stop request to the worker, a :class:`StopCause`.
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
        return StepSums(
            samples=int(self.samples),
            weight=self.weight,
            loss=self.loss,
            checksum=int(self.checksum),
            rows=[],
            bad_microbatch=None if self.bad_microbatch < 0 else int(self.bad_microbatch),
            finite=bool(self.finite),
        )


# --- Asynchronous: the parts of workers and servers in an interval ---


class AsyncServerEngine(AsynchronousEngine):
    """The servers apply whole steps' gradients as they arrive.

    Attributes:
        order: the worker whose gradient is applied next, numbered from 0, to repeat a run;
            None: whichever arrives.
    """

    order: Iterator[int] | None = None

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        super().__init__(run, states, world)
        module = states.state.module
        # Steps that wait for earlier ones, and their learning rates, by number in the epoch.
        self._applied: dict[int, tuple[StepSums, list[float]]] = {}
        # Messages go to whichever worker is ready, in an order that NCCL cannot follow.
        cpu = torch.device("cpu")
        self._servers = OptimizerServers(run, states, world, cpu)
        self._parameters = self._servers.parameters
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buffers = list(module.buffers())
        self._buffer_bundle = TensorBundle(self._buffers, cpu)
        self._changed_buffers = TensorBundle([*self._buffers, *self._buffers], cpu)  # after the step, and before
        self._workers = range(self._servers.number, world.world_size)
        self._inbox: AnySourceReceiver | None = None
        if world.rank == 0:
            self._worker_steps = [0] * len(self._workers)
            self._inbox = AnySourceReceiver(world, self._workers, len(_Push._fields), _Tag.HEADER)

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._servers.gather_state(state)

    def steps(self, group: GroupContext) -> Generator[OpenStep, None, ControlFlags]:
        """Train up to the next sync point, each rank in its part: chief, server or worker; the caller computes none."""
        yield from ()
        if self._world.rank == 0:
            with self._states.mutating():
                self._run_chief(group, self._sync_points.steps_to_next(self._states.state.progress))
            assert not self._applied
        elif self._servers.is_server:
            self._serve()
        else:
            self._work(group)
        self._synchronize()
        self._world.progress_tracker.end()
        return gather_requests(group)

    def _synchronize(self) -> None:
        """Have every rank hold the parameters and buffers, and know where the run stands."""
        self._world.progress_tracker.begin("step")
        self._parameters.publish(self._world)
        if self._world.rank == 0:
            self._buffer_bundle.pack(self._buffers)
        self._buffer_bundle.broadcast(self._world, 0)
        if self._world.rank != 0:
            self._buffer_bundle.unpack(self._buffers)
        progress = self._world.broadcast_object(dataclasses.asdict(self._states.state.progress))
        if self._world.rank != 0:
            self._states.state.progress = TrainProgress(**progress)

    # The first server, the chief.

    def _run_chief(self, group: GroupContext, steps: int) -> None:
        """Hand out steps, and apply their gradients as they arrive."""
        progress, inbox, workers = self._states.state.progress, self._inbox, self._workers
        assert inbox is not None
        first, first_in_epoch = progress.step, progress.step_in_epoch
        clocks = StalenessBound(len(workers), self._run.config[ServerOptions].ps_staleness)
        idle, handed, applied = list(workers), 0, 0
        more = True
        while True:
            for worker in list(idle):
                if more and handed < steps and clocks.can_start(worker - workers.start):
                    self._dispatch(worker, first + handed, first_in_epoch + handed, applied)
                    inbox.expect(worker)
                    idle.remove(worker)
                    handed += 1
            if len(idle) == len(workers):
                break
            # No rank waits for this rank while it waits itself, however long a step takes.
            self._world.progress_tracker.begin("waiting")
            wanted = None if self.order is None else workers.start + next(self.order)
            worker, message = inbox.next(wanted)
            self._world.progress_tracker.begin("step")
            push = _Push(*message)
            self._apply_push(group, worker, push, behind=applied - int(push.version))
            applied += 1
            clocks.finished(worker - workers.start)
            idle.append(worker)
            if push.stop or group.stop_reason() or group.checkpoint_manager.is_due_by_clock():
                self._run.signals.received = self._run.signals.received or StopCause(int(push.stop))
                more = False
        for rank in range(1, self._world.world_size):
            self._command(rank, _Command.END)

    def _dispatch(self, worker: int, step: int, step_in_epoch: int, version: int) -> None:
        for server in range(1, self._servers.number):
            self._command(server, _Command.SEND, worker)
        self._command(worker, _Command.COMPUTE, step, step_in_epoch, version)
        self._send_parameters(worker)
        self._buffer_bundle.pack(self._buffers)
        self._buffer_bundle.send(self._world, worker, _Tag.BUFFERS)

    def _apply_push(self, group: GroupContext, worker: int, push: _Push, *, behind: int) -> None:
        """Apply a worker's gradient, and make its step count."""
        sums, state = push.sums, self._states.state
        at = dataclasses.replace(state.progress, step=int(push.step), step_in_epoch=int(push.step_in_epoch))
        require_finite(self._run, at, sums)
        for server in range(1, self._servers.number):
            self._command(server, _Command.APPLY, worker)
        mark = group.monitor.timer.mark
        self._receive_gradients(worker)
        self._changed_buffers.receive(self._world, worker, _Tag.BUFFERS)
        mark("reduction")
        self._apply()
        self._take_buffers(behind)
        mark("optimizer")
        # They count in the order of their numbers, which is that of the data, once all before are applied: no
        # state between two cuts is ever saved, and at a cut it makes no difference.
        self._applied[int(push.step_in_epoch)] = sums, state.learning_rates()
        while state.progress.step_in_epoch in self._applied:
            earliest, rates = self._applied.pop(state.progress.step_in_epoch)
            group.commit(earliest, learning_rates=rates)
        self._staleness.observe(behind)
        self._worker_steps[worker - self._workers.start] += 1

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
            self._world.progress_tracker.begin("waiting")
            command, worker, *_ = self._next_command()
            if command == _Command.END:
                return
            self._world.progress_tracker.begin("step")
            if command == _Command.SEND:
                self._send_parameters(worker)
            else:
                self._receive_gradients(worker)
                self._apply()

    def _send_parameters(self, worker: int) -> None:
        rank = self._world.rank
        self._parameters.parcels[rank].pack(self._parameters.parameters[rank])
        self._parameters.parcels[rank].send(self._world, worker, _Tag.PARAMETERS)

    def _receive_gradients(self, worker: int) -> None:
        parcel, held = self._parameters.parcels[self._world.rank], self._parameters.parameters[self._world.rank]
        used = torch.empty(len(held), dtype=torch.uint8)
        with translate_peer_errors():
            dist.recv(used, group=self._world.group, tag=_Tag.USED, group_src=worker)
        parcel.receive(self._world, worker, _Tag.GRADIENTS)
        gradients = [torch.empty_like(parameter) for parameter in held]
        parcel.unpack(gradients)
        for parameter, gradient, is_used in zip(held, gradients, used.tolist(), strict=True):
            parameter.grad = gradient if is_used else None

    def _apply(self) -> None:
        self._states.update()
        for parameter in self._parameters.parameters[self._world.rank]:
            parameter.grad = None

    # A worker.

    def _work(self, group: GroupContext) -> None:
        """Compute the steps that the first server hands out."""
        world, mark = self._world, group.monitor.timer.mark
        while True:
            world.progress_tracker.begin("waiting")
            command, step, step_in_epoch, version = self._next_command()
            if command == _Command.END:
                mark("other")
                return
            for server, parcel in enumerate(self._parameters.parcels):
                parcel.receive(world, server, _Tag.PARAMETERS)
                parcel.unpack(self._parameters.parameters[server])
            self._buffer_bundle.receive(world, 0, _Tag.BUFFERS)
            self._buffer_bundle.unpack(self._buffers)
            mark("other")
            world.progress_tracker.begin("step")
            with deterministic_kernels(self._run.config, self._run.device):
                sums = compute_step(group, self._states, step, step_in_epoch)
            group.count_samples(sums)
            self._push(sums, step, step_in_epoch, version, stop=group.stop_reason())
            world.progress_tracker.end()

    def _push(self, sums: StepSums, step: int, step_in_epoch: int, version: int, *, stop: StopCause) -> None:
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
            stop=stop,
        )
        self._send(0, _Tag.HEADER, torch.tensor(push, dtype=torch.float64))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trainable]
        used = torch.tensor([parameter.grad is not None for parameter in self._trainable], dtype=torch.uint8)
        self._changed_buffers.pack([*self._buffers, *self._buffer_bundle.views])
        for server, (parcel, numbers) in enumerate(zip(self._parameters.parcels, self._parameters.ranges, strict=True)):
            self._send(server, _Tag.USED, used[numbers.start : numbers.stop])
            parcel.pack(gradients[numbers.start : numbers.stop])
            parcel.send(self._world, server, _Tag.GRADIENTS)
            if server == 0:
                self._changed_buffers.send(self._world, 0, _Tag.BUFFERS)

    # Commands: four int64 numbers.

    def _command(self, rank: int, command: _Command, *values: int) -> None:
        numbers: Sequence[int] = (command, *values, *[0] * (3 - len(values)))
        self._send(rank, _Tag.COMMAND, torch.tensor(numbers))

    def _next_command(self) -> list[int]:
        command = torch.empty(4, dtype=torch.int64)
        with translate_peer_errors():
            dist.recv(command, group=self._world.group, tag=_Tag.COMMAND, group_src=0)
        return command.tolist()

    def _send(self, rank: int, tag: _Tag, message: torch.Tensor) -> None:
        with translate_peer_errors():
            dist.send(message, group=self._world.group, tag=tag, group_dst=rank)
