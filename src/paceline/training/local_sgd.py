"""The synchronization of ranks that train separately: the averaged values and the exchanged rows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.core.errors import ConfigError
from paceline.elastic.state_transfer import StateSource, transfer_state
from paceline.parallel.messages import ParameterAverager
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import ParallelDims
from paceline.training.control import ROW_LENGTH
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, TrainProgress
from paceline.training.step_hooks import StepHook

_TIMEOUT_S = 1800.0

RecordStep = Callable[[TrainProgress, int, int, StepSums], None]
"""Enters a step into the ledger: the progress after it, its epoch, its number there, its sums."""


@dataclass(frozen=True)
class StepRecord:
    """A step that the ledger does not have yet.

    Attributes:
        progress: after the step.
        epoch, step_in_epoch: the step's.
    """

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

    Args:
        work_split: the number of micro-batches of each rank.
    """

    def __init__(self, run: RunContext, mesh: ParallelDims, state: TrainingState, work_split: Sequence[int]) -> None:
        self._mesh, self._state = mesh, state
        self._sync_schedule, self._order = run.schedule.sync_schedule, run.data.order
        self._averager = ParameterAverager(mesh.world, work_split, ROW_LENGTH + self._sync_schedule.every, _TIMEOUT_S)
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
            sums: of this rank's micro-batches.
            row: this rank's numbers, which every rank gets to see.
            record: enters a step into the ledger.

        Returns:
            The sums: with every rank's row at the end of an interval, else with none.

        Raises:
            PeerLostError: a rank is gone.
        """
        progress = self._state.progress
        self._interval.append(StepRecord(dataclasses.replace(progress), epoch, step_in_epoch, sums))
        if not self._sync_schedule.is_sync_step(progress):
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
        return dataclasses.replace(sums, rows=[header[:ROW_LENGTH] for header in headers])

    def close(self) -> None:
        """Free the memory that the ranks share."""
        self._averager.close()


def share_states(mesh: ParallelDims, optimizers: Mapping[str, Optimizer]) -> None:
    """Give all ranks states of the same parameters, and the highest count of steps of each; a collective.

    An optimizer keeps nothing of a parameter before its first gradient, and a rank's micro-batches need not use it. A
    rank without a state of it takes over that of the lowest rank that has one.

    Raises:
        PeerLostError: a rank is gone.
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


def require_order(run: RunContext) -> None:
    """Refuse streams, whose end all ranks would have to agree on in every step.

    Raises:
        ConfigError: the training data are streams.
    """
    if run.data.order is None:
        raise ConfigError(
            "--local-sgd-steps needs a dataset with a length: the end of a stream is agreed on in every step. "
            "Leave --local-sgd-steps out, or return a map-style dataset."
        )
