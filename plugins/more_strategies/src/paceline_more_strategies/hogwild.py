"""Lock-free training in shared memory (``--strategy hogwild``).

All processes of one machine compute whole steps and update the same parameters in place, without a lock:
Recht et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", 2011. What one
reads may be half of another one's update. Each process has optimizer state of its own, moved by its own
gradients; the first one's is saved. Only the numbers of the steps are handed out under a lock, so that each
is computed once.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.errors import ConfigError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import DDP
from paceline.parallel.transports import map_shared
from paceline.parallel.world import World
from paceline.training.control import ControlFlags
from paceline.training.group_context import GroupContext, OpenStep
from paceline.training.run_context import RunContext
from paceline.training.state_manager import StateManager
from paceline.training.step import require_finite
from paceline_more_strategies.asynchronous import AsynchronousEngine, compute_step, gather_requests

_ALIGNMENT = 64
_TAKEN, _APPLIED = 0, 1


class Hogwild(DDP):
    """A rank computes whole steps by itself; the engine shares the model."""

    engine = "paceline_more_strategies.hogwild:HogwildEngine"


class SharedModel:
    """A model's trainable parameters, and two counters, in memory that all processes of a machine share.

    Args:
        module: its parameters are moved there, with rank 0's values.
        lock_at: a directory whose lock a process holds while it counts.

    Raises:
        ConfigError: the ranks cannot share memory, or there is too little.
    """

    def __init__(self, module: nn.Module, world: World, lock_at: str) -> None:
        if not world.one_host or world.device.type != "cpu":
            raise ConfigError(
                "--strategy hogwild shares memory between the processes of one machine, on its CPU. "
                "Use --strategy ps --ps-mode async, which sends messages, or --device cpu."
            )
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        starts, end = [], _ALIGNMENT
        for parameter in trainable:
            starts.append(end)
            end += -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
        try:
            memory = map_shared(world, end)
        except OSError as error:
            raise ConfigError(f"--strategy hogwild needs {error}.") from error
        self._counters = torch.frombuffer(memory, dtype=torch.int64, count=2)
        shared = []
        for parameter, start in zip(trainable, starts, strict=True):
            flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=start)
            shared.append(flat.as_strided(parameter.shape, torch.empty_like(parameter).stride()))
            if world.rank == 0:
                shared[-1].copy_(parameter.detach())
        world.barrier()
        for parameter, tensor in zip(trainable, shared, strict=True):
            parameter.data = tensor
        self._lock = os.open(lock_at, os.O_RDONLY)

    def begin(self, world: World) -> None:
        """Count from 0 again; all ranks call this together."""
        world.barrier()
        if world.rank == 0:
            self._counters.zero_()
        world.barrier()

    def take(self, limit: int) -> int | None:
        """Take the number of the next step; None if ``limit`` steps are taken."""
        with self._locked():
            taken = int(self._counters[_TAKEN])
            if taken == limit:
                return None
            self._counters[_TAKEN] = taken + 1
        return taken

    def applied(self) -> int:
        return int(self._counters[_APPLIED])

    def apply(self) -> int:
        """Count an update; return how many were made before it."""
        with self._locked():
            before = int(self._counters[_APPLIED])
            self._counters[_APPLIED] = before + 1
        return before

    def close(self) -> None:
        """Release the lock; the memory is freed with the parameters."""
        os.close(self._lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class HogwildEngine(AsynchronousEngine):
    """All processes update one model.

    A sync point comes at least every ``--log-every`` steps: no process sees what the others do before.
    """

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        super().__init__(run, states, world)
        self._model = SharedModel(states.state.module, world, str(run.directory.path))
        self._scheduled = states.state.progress.step
        self._worker_steps = [0] * world.world_size

    def close(self) -> None:
        self._model.close()

    def steps(self, group: GroupContext) -> Generator[OpenStep, None, ControlFlags]:
        """Take one step after another, until all up to the next sync point are taken; the caller computes none."""
        yield from ()
        state, world, tracker = self._states.state, self._world, self._world.progress_tracker
        progress = state.progress
        steps = min(self._sync_points.steps_to_next(progress), self._run.config.records.log_every)
        first, first_in_epoch = progress.step, progress.step_in_epoch
        before = [buffer.clone() for buffer in state.module.buffers()]
        self._model.begin(world)
        done: list[tuple[int, dict[str, Any], int, list[float]]] = []
        with self._states.mutating():
            while (number := self._model.take(steps)) is not None:
                applied = self._model.applied()
                sums = compute_step(group, self._states, first + number, first_in_epoch + number)
                require_finite(self._run, dataclasses.replace(progress, step_in_epoch=first_in_epoch + number), sums)
                self._move_schedules_to(first + number)
                self._states.update()
                self._scheduled += 1
                behind = self._model.apply() - applied
                done.append((number, {**dataclasses.asdict(sums), "rows": []}, behind, state.learning_rates()))
                group.monitor.timer.mark("optimizer")
                tracker.begin("step")
            progress.step = first
            tracker.begin("waiting")
            told = world.all_gather_object(done)
            tracker.begin("step")
            self._merge_buffers(before, len(done))
            for _, sums_of_step, behind, rates in sorted(entry for of_rank in told for entry in of_rank):
                group.commit(StepSums(**sums_of_step), learning_rates=rates)
                self._staleness.observe(behind)
            self._move_schedules_to(progress.step)
        for rank, of_rank in enumerate(told):
            self._worker_steps[rank] += len(of_rank)
        tracker.end()
        return gather_requests(group)

    def _move_schedules_to(self, step: int) -> None:
        """Set the learning rates to those of a step, whichever processes made the earlier ones."""
        with warnings.catch_warnings():
            # A process may get its first step late.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            while self._scheduled < step:
                for scheduler in self._states.state.schedulers.values():
                    if not isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step()
                self._scheduled += 1

    @torch.no_grad()
    def _merge_buffers(self, before: list[torch.Tensor], steps: int) -> None:
        """Take the mean of the processes' buffers, which differ between two sync points, and add up counters."""
        world = self._world
        if world.group is None:
            return
        total = torch.tensor([float(steps)])
        world.progress_tracker.begin_collective("all-reduce")
        with translate_peer_errors():
            dist.all_reduce(total, group=world.group)
            for buffer, old in zip(self._states.state.module.buffers(), before, strict=True):
                if buffer.is_floating_point():
                    summed = buffer.double() * steps
                    dist.all_reduce(summed, group=world.group)
                    buffer.copy_(summed / float(total))
                elif buffer.dtype != torch.bool:
                    change = buffer - old
                    dist.all_reduce(change, group=world.group)
                    buffer.copy_(old + change)
        world.progress_tracker.end_collective()
