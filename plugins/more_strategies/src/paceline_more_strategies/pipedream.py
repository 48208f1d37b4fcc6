"""PipeDream: a pipeline that does not drain between steps, with weight stashing."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.func import functional_call

from paceline.core.task import Loss
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.pipeline.pipeline import Pipeline
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import MicrobatchWork, Strategy, StrategyOptions
from paceline.parallel.world import ParallelDims
from paceline.training.control import ControlFlags, Schedule
from paceline.training.group_context import GroupContext
from paceline.training.hooks import StepHook
from paceline.training.state import TrainingState, TrainProgress
from paceline.training.trainer import SyncEngine
from paceline_more_strategies.asynchronous import Staleness

# --- The order of a stage's actions, and the weights of each micro-batch: pure functions of counts ---
#
# The schedule is PipeDream's 1F1B without a flush: Narayanan et al., "PipeDream: Generalized Pipeline
# Parallelism for DNN Training", SOSP 2019. A stage runs as many forwards ahead of its backwards as there are
# stages behind it, across step boundaries too: the next step's first forwards precede this step's last backwards and
# its update. Their backwards use the weights of these forwards (weight stashing).
#
# With one micro-batch per step this is the paper's schedule, with an update after every micro-batch. With S
# micro-batches the gradients of a step are summed first, and weights are at most one update old if S is at least the
# number of stages.


@dataclass(frozen=True, slots=True)
class PipeDreamAction:
    """The forward or backward of one micro-batch.

    Attributes:
        position: index among the micro-batches of the current step, continued by those of the next.
    """

    kind: Literal["F", "B"]
    position: int


def forwards_ahead(stage: int, num_stages: int) -> int:
    """Return how many forwards a stage runs ahead of its backwards: the number of stages behind it."""
    return num_stages - 1 - stage


def step_actions(ahead: int, microbatches: int, begun: int, following: int) -> list[PipeDreamAction]:
    """Return a stage's actions in a step, up to the backward of its last micro-batch.

    Args:
        ahead: :func:`forwards_ahead` of the stage.
        begun: number of the step's forwards that ran within the previous step; see :func:`begins`.
        following: the next step's micro-batches; 0 if all ranks finish this step before the next one.
    """
    actions: list[PipeDreamAction] = []
    forwards = begun
    for backward in range(microbatches):
        while forwards <= backward + ahead and forwards < microbatches + following:
            actions.append(PipeDreamAction("F", forwards))
            forwards += 1
        actions.append(PipeDreamAction("B", backward))
    return actions


def begins(ahead: int, following: int) -> int:
    """Return how many of the next step's forwards a stage runs within this step, with older weights."""
    return min(ahead, following)


# --- Copies of the weights for micro-batches whose backward comes after an update: weight stashing ---


Version = dict[str, torch.Tensor]
"""A copy of a module's parameters, by name, as leaves with their own gradients."""


def stash_weights(module: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Copy the parameters with these names."""
    return {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if name in names
    }


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the module's buffers, for a forward to change."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assign_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Write the buffers that a forward changed back into the module."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


class WithWeights(nn.Module):
    """A module called with other parameters and buffers.

    Args:
        tensors: by name; the module's own are used for the rest.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        # Not registered: the module is not this one's child.
        self.__dict__["at"] = (module, tensors)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, tensors = self.__dict__["at"]
        return functional_call(module, tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["at"][0], name)


@contextmanager
def share_gradients(module: nn.Module, version: Version) -> Iterator[None]:
    """Add the copies' gradients to those of the module's own parameters within the block."""
    own = dict(module.named_parameters())
    for name, tensor in version.items():
        tensor.grad = own[name].grad
    yield
    for tensor in version.values():
        tensor.grad = None


# --- PipeDream on this rank's stage: forwards and backwards in the schedule's order, across step boundaries


_NUMBERS = 1024  # distinct message numbers, far more than units in flight


@dataclass(frozen=True)
class _Unit:
    """A micro-batch between its forward and its backward on this stage.

    Attributes:
        number: counted from the first step on, modulo :data:`_NUMBERS`.
        weights: the old parameters of its forward; empty if it used the stage's current ones.
    """

    number: int
    microbatch: MicroBatch
    weights: Version


class PipeDream(Pipeline):
    """Asynchronous pipeline parallelism with weight stashing.

    A rank applies its stage's updates independently. The ranks' rows arrive one step later, except in a step without
    overlap.

    Args:
        module: placed by :class:`~paceline.parallel.pipeline.pipeline.PipelineLayout`, one stage per rank.
    """

    engine = "paceline_more_strategies.pipedream:PipeDreamEngine"
    overlaps_steps = True

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        super().__init__(module, mesh, options)
        (self._stage,) = self._forward.own
        (self._reducer,) = self._reducers.values()
        stages = len(self._forward.stages)
        self._ahead = [forwards_ahead(stage, stages) for stage in range(stages)]
        self._in_flight: deque[_Unit] = deque()
        self._forwards = 0
        self._begun = 0  # micro-batches of the step that the previous step could begin
        self._following: Sequence[MicroBatch] | None = None  # it may be empty, if another replica has them all
        self._staleness = Staleness()
        self._pending_rows: tuple[dist.Work, list[torch.Tensor]] | None = None

    @property
    def stats(self) -> Mapping[str, Any]:
        return self._staleness.stats

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        self._following = None

    def overlap_next(self, following: Sequence[MicroBatch]) -> None:
        """Announce, within a step, that another one follows at once, with these micro-batches of this rank.

        Without this call, a step ends when all ranks have done it, and nothing of the next.
        """
        self._following = following

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        present, upcoming = len(microbatches), self._following or ()
        following = len(upcoming)
        for ahead in self._ahead:  # of all stages, because it follows from the counts
            stale = begins(ahead, self._begun)
            self._staleness.observe(1, stale)
            self._staleness.observe(0, present - stale)
        own = self._ahead[self._stage.number]
        old: Version = {}
        for action in step_actions(own, present, begins(own, self._begun), following):
            kind, position = action.kind, action.position
            if kind == "B":
                self._backward_microbatch(work)
            elif position < present:
                self._forward_microbatch(microbatches[position], {}, work)
            else:
                # Its backward follows this step's update, which it must not use.
                old = old or stash_weights(self.module, self._stage.holds)
                microbatch = upcoming[position - present]
                self._forward_microbatch(microbatch, old, _NextStep(work, self.module, old))
        self._begun = following
        if self._following is None:
            self._link.wait()

    def reduce(self, row: Sequence[float]) -> StepSums:
        rows = self._collect_rows()
        if self._following is None:
            return super().reduce(row)
        sums = self._reducer.finish(row)
        self._send_row(row)
        return dataclasses.replace(sums, rows=rows)

    def _record(self) -> None:
        # Without common step boundaries there is no trace.
        pass

    def rollback(self) -> None:
        super().rollback()
        self._in_flight.clear()
        self._pending_rows = None

    def _forward_microbatch(self, microbatch: MicroBatch, weights: Version, work: MicrobatchWork) -> None:
        number = self._forwards % _NUMBERS
        self._run_forward(self._stage, number, microbatch, work)
        self._in_flight.append(_Unit(number, microbatch, weights))
        self._forwards += 1

    def _backward_microbatch(self, work: MicrobatchWork) -> None:
        unit = self._in_flight.popleft()
        stage, flight = self._stage, self._flights[self._stage.number, unit.number]
        self._begin_backward(stage, unit.number, flight, work)
        self._reducer.begin_microbatch()
        with share_gradients(self.module, unit.weights):
            if flight.roots:
                torch.autograd.backward(flight.roots, flight.gradients)
        self._send_back(stage, unit.number, flight)
        self._end(stage, unit.number, flight, unit.microbatch, work)

    def _send_row(self, row: Sequence[float]) -> None:
        """Send this rank's row to all, without waiting for theirs."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._mesh.world.world_size)]
        with translate_peer_errors():
            work = dist.all_gather(rows, mine, group=self._mesh.world.group, async_op=True)
        assert work is not None
        self._pending_rows = work, rows

    def _collect_rows(self) -> list[Sequence[float]]:
        """Return every rank's row of the previous step, which has usually arrived by now."""
        pending, self._pending_rows = self._pending_rows, None
        if pending is None:
            return []
        work, rows = pending
        self._mesh.world.progress_tracker.begin_collective("all-gather")
        with translate_peer_errors():
            work.wait()
        self._mesh.world.progress_tracker.end_collective()
        return [row.tolist() for row in rows]


class _NextStep:
    """A micro-batch's work of the next step, with stashed weights."""

    def __init__(self, work: MicrobatchWork, module: nn.Module, weights: Version) -> None:
        self._work = work
        self._model = WithWeights(module, weights)

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 1) -> Loss:
        return self._work.forward(self._model, microbatch, ahead=ahead)

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        raise AssertionError("a stage computes one micro-batch at a time")

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._work.scale_loss(loss)

    def backward_done(self) -> None:
        self._work.backward_done()


# --- The engine: it decides where steps may overlap ---


class StepOverlap(StepHook):
    """Reads one step ahead, and lets the strategy begin the next step within the current one.

    It decides where the ranks must finish a step before the next one begins: before an epoch's end, an evaluation, a
    save and the run's end, which follow from the progress alone, and in the step after one in which a rank set a
    control flag. So all ranks make the same decision.

    Args:
        save_is_due: returns whether a save is due at some progress.
    """

    def __init__(
        self, schedule: Schedule, loader: Loader, state: TrainingState, save_is_due: Callable[[TrainProgress], bool]
    ) -> None:
        self._schedule = schedule
        self._loader = loader
        self._state = state
        self._save_is_due = save_is_due
        self._read: tuple[tuple[int, int], list[MicroBatch]] | None = None
        self._asked = False
        self._overlapping = False

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """Fetch as :meth:`Loader.fetch`, or return the micro-batches that were read ahead."""
        read, self._read = self._read, None
        if read is not None and read[0] == (epoch, step):
            return read[1]
        return self._loader.fetch(epoch, step, microbatches)

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Let the step overlap with the next one, unless an action is due between them."""
        progress, schedule = self._state.progress, self._schedule
        after = dataclasses.replace(
            progress,
            version=progress.version + 1,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
        )
        self._overlapping = not (
            self._asked
            or schedule.finished(after)
            or schedule.epoch_ends(after)
            or schedule.evaluation_is_due(after)
            or self._save_is_due(after)
        )
        if self._overlapping:
            following = self._loader.fetch(after.epoch, after.step_in_epoch, strategy.microbatches)
            self._read = ((after.epoch, after.step_in_epoch), following)
            cast(Any, strategy).overlap_next(following)

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Return no flag while steps overlap: the next step then waits for all ranks, and returns them."""
        if not self._overlapping:
            self._asked = False
            return flags
        self._asked = bool(flags.stop or flags.save or flags.reform)
        return ControlFlags()


class PipeDreamEngine(SyncEngine):
    """Synchronous training, in which the ranks need not wait for each other between steps."""

    def step_hooks(self, group: GroupContext) -> list[StepHook]:
        loader, is_due = self._states.loader, group.checkpoint_manager.is_due
        overlap = StepOverlap(self._run.schedule, loader, self._states.state, is_due)
        group.fetch = overlap.fetch
        return [overlap]
