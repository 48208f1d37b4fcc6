"""The objects of a rank in one group, from its joining to its leaving."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from paceline.core.task import RankInfo
from paceline.data.workers import data_workers
from paceline.elastic.worker_channel import AgentClient
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import equal_work_split
from paceline.parallel.strategy import ExternalReduceStrategy, Strategy
from paceline.parallel.world import ParallelDims, World
from paceline.runs.checkpointer import Checkpointer
from paceline.runs.monitor import PHASES
from paceline.training import control
from paceline.training.checkpoint_manager import CheckpointManager
from paceline.training.control import ControlFlags, StopCause
from paceline.training.hooks import StepHook
from paceline.training.optim import ordered_state
from paceline.training.run_context import RunContext
from paceline.training.state import TrainProgress
from paceline.training.state_manager import StateManager
from paceline.training.step import DummyMicrobatch, MicrobatchRunner

RecordStep = Callable[[TrainProgress, int, int, StepSums], None]
"""Enters a step into the ledger: the progress after it, its epoch, its number there, its sums."""


@dataclass
class Carryover:
    """Values, other than the state, that a process takes from one group into the next.

    Attributes:
        samples: samples of the steps in which this process took part.
        phases: seconds by phase, over the groups that it has left.
    """

    samples: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class OpenStep(Protocol):
    """A step that an engine has opened; it is committed when its caller asks for the next one."""

    def compute(self) -> None:
        """Compute it as the task says.

        Raises:
            NonFiniteLossError: a loss or gradient was NaN or infinite.
            PeerLostError: a rank is gone.
        """


class Engine:
    """Computes and applies the steps of a run in one group; the strategy names its own, if it has one.

    Args:
        world: the ranks; all of them construct it together, before the strategy is built.

    Raises:
        UserError: the engine cannot work with so many processes.
    """

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        self._run = run
        self._states = states
        self._world = world

    @staticmethod
    def validate(run: RunContext, states: StateManager) -> None:
        """Reject a run that the engine cannot train, before the run is created.

        Raises:
            UserError: gives the reason.
        """

    def step_hooks(self, group: GroupContext) -> list[StepHook]:
        """Return the engine's additions to each step; called once, with the group's strategy; a collective."""
        return []

    def record(
        self, record: RecordStep, epoch: int, step_in_epoch: int, sums: StepSums, row: Sequence[float]
    ) -> StepSums:
        """Enter an applied step into the ledger, now or, with others, at the end of the interval.

        Returns:
            The sums, with the rows of all ranks.
        """
        record(self._states.state.progress, epoch, step_in_epoch, sums)
        return sums

    def steps(self, group: GroupContext) -> Generator[OpenStep, None, ControlFlags]:
        """Yield steps for the caller to compute, until all ranks hold the same state again.

        All ranks go through it together. An engine that computes steps in an order of its own yields none.

        Returns:
            The requests of all ranks, merged; the same on all of them.

        Raises:
            NonFiniteLossError: a loss or gradient was NaN or infinite; that step was not applied.
            PeerLostError: a rank is gone.
        """
        raise NotImplementedError

    def end_interval(self, group: GroupContext) -> None:
        """Follow up on the interval, after the actions that were due (evaluation, save)."""

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the parts that only other ranks or the engine hold to rank 0's state; all ranks call this together."""
        return state

    @property
    def extra_results(self) -> dict[str, Any]:
        """The engine's own entries of ``result.json``; all ranks read this together."""
        return {}

    def close(self) -> None:
        """Free what the engine holds of the group."""


class GroupContext:
    """A rank's part in one group. All ranks construct it together; afterwards it is complete, and is closed once.

    Attributes:
        work_split: each rank's number of micro-batches; 0 for servers and spares.
        strategy: computes and sums a step's micro-batches.
        hooks: additions of the engine and of options to a step.
        fetch: returns this rank's micro-batches of a step: (epoch, step in epoch, numbers).
        runner: runs forward and backward of a micro-batch.

    Args:
        carryover: values from earlier groups; kept up to date.
        agent: the client of the agent; None if the group is fixed.

    Raises:
        UserError: the strategy cannot work with so many processes, or the run directory is not writable.
        PeerLostError: a rank is gone.
    """

    def __init__(
        self,
        run: RunContext,
        states: StateManager,
        mesh: ParallelDims,
        engine: type[Engine],
        *,
        checkpointer: Checkpointer,
        carryover: Carryover,
        agent: AgentClient | None,
    ) -> None:
        self._run = run
        self._states = states
        self._agent = agent
        self._carryover = carryover
        self.mesh = mesh
        self.world = mesh.world
        world, progress = mesh.world, states.state.progress
        world.progress_tracker.helpers = data_workers
        with ExitStack() as stack:
            # Before the strategy: it may move the model, as into memory that the ranks share.
            self.engine = stack.enter_context(closing(engine(run, states, world)))
            # In asynchronous training each rank computes whole steps by itself.
            self._strategy_mesh = ParallelDims(alone(world), {"dp": 1}) if run.config.asynchronous else mesh
            self.work_split = self._equal_split()
            self.strategy = self._build_strategy()
            stack.callback(lambda: self.strategy.close())
            stack.callback(lambda: self.strategy.rollback())
            states.gather_positions(world)
            self.monitor = stack.enter_context(run.build_monitor(world, progress.step))
            stack.callback(self._keep_phases)
            copies = agent is not None and not states.is_collective
            self.checkpoint_manager = CheckpointManager(
                run, world, progress, states.recent, checkpointer, copies=copies, writer=self._shard_writer()
            )
            stack.callback(self.checkpoint_manager.close)
            self.runner = MicrobatchRunner(run, states.state, world.progress_tracker, self.monitor.timer)
            self.strategy.module.train()
            self.monitor.timer.mark("other")
            self.fetch = states.loader.fetch
            self.hooks = self._build_hooks(stack)
            states.state.callback.attach(self._rank_info(), step=progress.step, epoch=progress.epoch)
            self._report_progress()
            self._resources = stack.pop_all()

    def _shard_writer(self) -> tuple[int, int] | None:
        """Return this rank's number among those that save a shard, and how many these are."""
        if not self._states.saves_shards:
            return None
        shards = self.mesh.submesh(("fsdp",))
        return (shards.rank if self.mesh.is_first_along(("fsdp",)) else -1, shards.world_size)

    def _equal_split(self) -> tuple[int, ...]:
        config, world = self._run.config, self._strategy_mesh.data
        servers = 0 if config.asynchronous else config.num_servers(self.world.world_size)
        equal = equal_work_split(self._run.num_microbatches, world.num_active - servers)
        return (*(0,) * servers, *equal, *(0,) * (world.world_size - world.num_active))

    def _build_strategy(self) -> Strategy:
        state = self._states.state
        with state.all_trainable():
            return self._run.build_strategy(state.module, self._strategy_mesh, self.work_split)

    def _build_hooks(self, stack: ExitStack) -> list[StepHook]:
        """Return the hooks of the engine and of options, in the order in which a step calls them."""
        run, state, hooks = self._run, self._states.state, self.engine.step_hooks(self)
        state.engine_parts.clear()
        hooks += filter(None, [hook.step_hook(self, self._states) for hook in run.hooks])
        if isinstance(self.strategy, ExternalReduceStrategy):
            hooks.append(DummyMicrobatch(run, state))
        for hook in hooks:
            stack.callback(hook.close)
        return hooks

    def _rank_info(self) -> RankInfo:
        run, world = self._run, self.world
        return RankInfo(
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            device=run.device,
            directory=run.directory.path,
            log_every=run.config.records.log_every,
            gather=world.all_gather_object,
        )

    def close(self) -> None:
        """Leave the group; roll back an unfinished step."""
        self._resources.close()

    def _keep_phases(self) -> None:
        self._carryover.phases = self.phases()

    def phases(self) -> dict[str, float]:
        """Return the seconds by phase, over this group and earlier ones."""
        now = self.monitor.timer.seconds
        return {phase: seconds + now[phase] for phase, seconds in self._carryover.phases.items()}

    @property
    def can_lose_ranks(self) -> bool:
        """Whether the others continue from memory if a rank is lost."""
        return self._agent is not None and self.world.world_size > 1 and not self._run.config.parallel.shards_state

    @property
    def should_reform(self) -> bool:
        """Whether the agent asks the ranks to leave this group, after a step, for another one."""
        return self._agent is not None and self._agent.should_reform(self.world.generation)

    def stop_reason(self, *, evaluates: bool = False) -> StopCause:
        """Return the cause of a stop request to this rank.

        Args:
            evaluates: an evaluation precedes the next call.
        """
        due = self.world.rank == 0 and self._run.deadline.is_due(
            save_s=self.checkpoint_manager.save_s, evaluates=evaluates and self._run.data.has_validation
        )
        return self._run.signals.received or (StopCause.WALLTIME if due else StopCause.NONE)

    def commit(
        self,
        sums: StepSums,
        row: Sequence[float] = (),
        logged: Mapping[str, float] = MappingProxyType({}),
        learning_rates: Sequence[float] | None = None,
    ) -> StepSums:
        """Make a step count: one transition of the state, one ledger entry, one report.

        Args:
            row: this rank's row, which travelled with them.
            logged: additional values that the task logs.
            learning_rates: with which the step was taken; None: those of this process's last step.

        Returns:
            The sums, with the rows of all ranks.
        """
        state, monitor = self._states.state, self.monitor
        progress = state.progress
        epoch, step_in_epoch = progress.epoch, progress.step_in_epoch
        progress.version += 1
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples += sums.samples
        self.count_samples(sums)
        self._report_progress()
        record = partial(self.checkpoint_manager.record_step, work_split=self.work_split)
        sums = self.engine.record(record, epoch, step_in_epoch, sums, row)
        rows = partial(control.statuses, sums.rows)
        rates = state.learning_rates if learning_rates is None else partial(tuple, learning_rates)
        monitor.on_step_end(progress.step, epoch, sums.samples, sums.loss, rates, rows, logged)
        state.callback.on_step_end(progress.step, sums.loss)
        monitor.timer.mark("other")
        self.world.progress_tracker.end()
        return sums

    def on_step_end(self) -> None:
        """End a step for the hooks, once nothing else that was due after it is left."""
        for hook in self.hooks:
            hook.on_step_end(self._states.state.progress.step)

    def count_samples(self, sums: StepSums) -> None:
        """Count a step in which this process took part, also if another rank commits it."""
        self._carryover.samples += sums.samples

    def _report_progress(self) -> None:
        """Report step and version to the agent and to the hang diagnosis."""
        progress = self._states.state.progress
        self.world.progress_tracker.step = progress.step
        if self._agent is not None:
            self._agent.pulse.step = progress.step
            self._agent.pulse.version = progress.version

    def check_state(self) -> None:
        """Let the hooks check the state, before it is evaluated or saved; all ranks call this together."""
        for hook in self._run.hooks:
            hook.check_state(self, self._states.state)

    def split_work(self, work_split: tuple[int, ...]) -> None:
        """Divide the micro-batches among the ranks in another way, between steps; all ranks do so together."""
        self._states.gather_positions(self.world, self.strategy.microbatches)
        self.work_split = work_split
        self.strategy.close()
        self.strategy = self._build_strategy()

    def full_state_dict(self) -> dict[str, Any]:
        """Gather the state to save, on rank 0; all ranks call this together."""
        state = self.engine.gather_state(self._states.full_state_dict(self.world))
        # Equal states have equal files, whichever rank held what.
        state["optimizers"] = {name: ordered_state(optimizer) for name, optimizer in state["optimizers"].items()}
        return state


def alone(world: World) -> World:
    """Make a world of this rank alone."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1, active=None, subgroup=None)
