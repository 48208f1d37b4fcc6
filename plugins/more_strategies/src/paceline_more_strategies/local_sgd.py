"""Ranks that train separately and average their states (``--local-sgd-steps``), and DiLoCo's outer optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.core.config import ResolvedConfig
from paceline.core.errors import ConfigError
from paceline.elastic.group_formation import StateSource, transfer_state
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import MicrobatchStrategy, StrategyOptions
from paceline.parallel.world import ParallelDims, World
from paceline.torch_internals import foreach_copy_
from paceline.training.control import ROW_LENGTH
from paceline.training.group_context import GroupContext, RecordStep
from paceline.training.hooks import StepHook
from paceline.training.optim import is_numbered, named_state, numbered_state
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, TrainProgress
from paceline.training.state_manager import StateManager
from paceline.training.trainer import SyncEngine
from paceline_more_strategies.messages import ParameterAverager
from paceline_more_strategies.options import CommunicationOptions

_TIMEOUT_S = 1800.0

# --- Local SGD (``--local-sgd-steps``): each rank sums the gradients of its own micro-batches only ---


class LocalSGDStrategy(MicrobatchStrategy):
    """Steps this rank alone, on its own micro-batches.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019. The gradient is summed along the tree over all
    micro-batches, with those of other ranks absent. A rank without a micro-batch in a short batch has no gradient.
    """

    engine = "paceline_more_strategies.local_sgd:LocalSGDEngine"

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        num_microbatches = sum(options.work_split)
        plan = ReductionPlan(num_microbatches, 1)
        super().__init__(module, mesh.single_rank, plan, options, sums_gradients=True)
        self.microbatches = ReductionPlan(
            num_microbatches, mesh.data.world_size, work_split=options.work_split
        ).microbatches_of(mesh.data.rank)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._present = 0

    def begin_step(self, present: Sequence[int]) -> None:
        self._present = len(present)
        super().begin_step(present)

    def reduce(self, row: Sequence[float]) -> StepSums:
        """Return this rank's sums; other ranks' rows come with the synchronisation."""
        if self._present:
            return dataclasses.replace(self.reducer.finish(row), rows=[])
        self.reducer.rollback()
        for parameter in self._parameters:
            parameter.grad = None
        return StepSums(samples=0, weight=0.0, loss=0.0, checksum=0, rows=[], bad_microbatch=None, finite=True)


# --- The outer optimizer of DiLoCo, whose gradient is the average change by the ranks' separate steps ---
#
# Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.


class OuterOptimizer:
    """SGD with Nesterov momentum, whose gradient is where a round began minus where it ended on average.

    It keeps the weights at which the round began; at a synchronisation these are the model's own, so that a
    checkpoint holds the momentum only.
    """

    def __init__(self, module: nn.Module, config: ResolvedConfig) -> None:
        trained: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = [list(trained)]
        self._parameters = list(trained.values())
        self._base = [parameter.detach().clone() for parameter in self._parameters]
        options = config[CommunicationOptions]
        self._optimizer = SGD(self._base, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin an interval at the model's weights."""
        foreach_copy_(self._base, self._parameters)

    @torch.no_grad()
    def step(self) -> None:
        """End a round: the model's weights are the ranks' average; then the next one begins."""
        for base, parameter in zip(self._base, self._parameters, strict=True):
            base.grad = base - parameter
        self._optimizer.step()
        foreach_copy_(self._parameters, self._base)

    def state_dict(self) -> dict[str, Any]:
        return named_state(self._optimizer.state_dict(), self._names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the momentum; options stay what they are now."""
        if is_numbered(state):
            state = named_state(state, self._names)
        groups = self._optimizer.state_dict()["param_groups"]
        momentum = numbered_state("outer", state, self._names)["state"]
        self._optimizer.load_state_dict({"state": momentum, "param_groups": groups})


# --- The average of the state, and the rows and ledger entries of an interval ---


@dataclass(frozen=True)
class StepRecord:
    """A step that the ledger does not have yet."""

    progress: TrainProgress
    epoch: int
    step_in_epoch: int
    sums: StepSums


class LocalSGD(StepHook):
    """Averages the state of ranks that train independently, at the end of each sync interval.

    Parameters, buffers and what optimizers keep of each parameter become the mean over the ranks, weighted by
    their numbers of micro-batches (McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017; Yu et al., "On the Linear Speedup Analysis of Communication Efficient Momentum
    SGD", 2019, for momenta). So all ranks hold the same state then, and a checkpoint is anybody's. The rows
    and the ledger's checksums of the interval travel along, in the one exchange.
    """

    def __init__(self, run: RunContext, group: GroupContext, state: TrainingState) -> None:
        self._mesh = group.mesh
        self._state = state
        self._mark = group.monitor.timer.mark
        self._sync_schedule = run.schedule.sync_schedule
        self._order = run.data.order
        self._averager = ParameterAverager(
            group.world, group.work_split, ROW_LENGTH + self._sync_schedule.every, _TIMEOUT_S
        )
        self._interval: list[StepRecord] = []
        if state.outer is not None:
            state.outer.begin()

    def after_reduce(self, sums: StepSums) -> StepSums:
        """Return this rank's sums with the samples of all ranks, finite if all ranks can apply the step.

        With a gradient scaler all of them skip it, or none; that takes a number from each in every step.
        """
        assert self._order is not None
        start, stop = self._order.batch_range(self._state.progress.step_in_epoch)
        sums = dataclasses.replace(sums, samples=stop - start)
        if self._state.scaler is None or self._mesh.world.world_size == 1:
            return sums
        finite = all(told[0] for told in self._mesh.gather_rows([float(sums.finite)]))
        return dataclasses.replace(sums, finite=finite)

    def commit(
        self, epoch: int, step_in_epoch: int, sums: StepSums, row: Sequence[float], record: RecordStep
    ) -> StepSums:
        """Record a step; at the end of a sync interval, average the state and write the interval's steps to the ledger.

        Args:
            row: this rank's numbers, which every rank gets to see.

        Returns:
            The sums: with every rank's row at the end of an interval, else with none.
        """
        progress = self._state.progress
        self._mesh.world.progress_tracker.move("reduction")
        self._interval.append(StepRecord(dataclasses.replace(progress), epoch, step_in_epoch, sums))
        if not self._sync_schedule.is_sync_step(progress):
            self._mark("reduction")
            return dataclasses.replace(sums, rows=[])
        share_states(self._mesh, self._state.optimizers)
        checksums = [float(step.sums.checksum) for step in self._interval]
        headers = self._averager.average(tensors_to_average(self._state), [*row, *checksums])
        if self._state.outer is not None:
            self._state.outer.step()
        steps, self._interval = self._interval, []
        for number, step in enumerate(steps):
            # The ledger has the checksum of all micro-batches.
            checksum = int(sum(header[ROW_LENGTH + number] for header in headers))
            record(step.progress, step.epoch, step.step_in_epoch, dataclasses.replace(step.sums, checksum=checksum))
        self._mark("reduction")
        return dataclasses.replace(sums, rows=[header[:ROW_LENGTH] for header in headers])

    def close(self) -> None:
        self._averager.close()


def share_states(mesh: ParallelDims, optimizers: Mapping[str, Optimizer]) -> None:
    """Give all ranks states of the same parameters, and the highest count of steps of each; a collective.

    An optimizer keeps nothing of a parameter before its first gradient, and a rank's micro-batches need not use it. A
    rank without a state of it takes over that of the lowest rank that has one.
    """
    world = mesh.world
    if world.world_size == 1:
        return
    own = [_step_counts(optimizer) for optimizer in optimizers.values()]
    digest = float(int.from_bytes(hashlib.blake2b(repr(own).encode(), digest_size=6).digest()))
    if len({of_rank[0] for of_rank in mesh.gather_rows([digest])}) == 1:
        return
    counts_of_ranks = [[dict(pairs) for pairs in of_rank] for of_rank in world.all_gather_object(own)]
    for number, optimizer in enumerate(optimizers.values()):
        counts = [of_rank[number] for of_rank in counts_of_ranks]
        for source in range(world.world_size):
            missing = [index for index in counts[source] if all(index not in lower for lower in counts[:source])]
            behind = [rank for rank, held in enumerate(counts) if any(index not in held for index in missing)]
            states = {str(index): _state_of(optimizer, index) for index in missing if source == world.rank}
            received = transfer_state(world, StateSource(source, 0, tuple(behind)), states) or {}
            for index, values in received.items():
                if int(index) not in counts[world.rank]:
                    optimizer.state[_parameters(optimizer)[int(index)]] = values
        for index in {index for held in counts for index in held}:
            state = _state_of(optimizer, index)
            if "step" in state:
                steps = max(held[index] for held in counts if index in held)
                state["step"] = torch.full_like(s, steps) if torch.is_tensor(s := state["step"]) else type(s)(steps)


def _step_counts(optimizer: Optimizer) -> list[tuple[int, float]]:
    """Return the numbers of the parameters that an optimizer has a state of, each with its count of steps."""
    states = [(index, _state_of(optimizer, index)) for index in range(len(_parameters(optimizer)))]
    return [(index, float(state.get("step", 0))) for index, state in states if state]


def _state_of(optimizer: Optimizer, index: int) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state.get(_parameters(optimizer)[index], {})
    return state


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_to_average(state: TrainingState) -> list[torch.Tensor]:
    """Return the averaged tensors: parameters, buffers, and the tensors of optimizers.

    Whatever their shapes: Adafactor keeps a matrix's rows and columns, NAdam a number.
    """
    tensors: list[torch.Tensor] = [p for p in state.module.parameters() if p.requires_grad]
    tensors += state.module.buffers()
    for optimizer in state.optimizers.values():
        # In the order of the parameters: that of the states is the order of their first gradients.
        for parameter in _parameters(optimizer):
            tensors += [
                value
                for name, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor)
                and name != "step"
                and (value.shape == parameter.shape or value.is_floating_point())
            ]
    return tensors


# --- The engine: steps of this rank alone, and at the end of each interval the average ---


class LocalSGDEngine(SyncEngine):
    """The steps of synchronous training, of which those up to the next synchronization end together."""

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        super().__init__(run, states, world)
        self._local_sgd: LocalSGD | None = None

    @staticmethod
    def validate(run: RunContext, states: StateManager) -> None:
        """Reject streams, whose end all ranks would have to agree on in every step."""
        if run.data.order is None:
            raise ConfigError(
                "--local-sgd-steps needs a dataset with a length: the end of a stream is agreed on in every step. "
                "Leave --local-sgd-steps out, or return a map-style dataset."
            )

    def step_hooks(self, group: GroupContext) -> list[StepHook]:
        self._local_sgd = LocalSGD(self._run, group, self._states.state)
        return [self._local_sgd]

    def record(
        self, record: RecordStep, epoch: int, step_in_epoch: int, sums: StepSums, row: Sequence[float]
    ) -> StepSums:
        assert self._local_sgd is not None
        return self._local_sgd.commit(epoch, step_in_epoch, sums, row, record)

    def close(self) -> None:
        if self._local_sgd is not None:
            self._local_sgd.close()
