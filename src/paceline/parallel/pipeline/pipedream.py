"""PipeDream: a pipeline that does not drain between steps, with a version of the weights for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.func import functional_call

from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.pipeline.pipeline import Pipeline
from paceline.parallel.pipeline.schedules import ScheduleAction, TimedAction
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import MicrobatchWork, StrategyOptions
from paceline.parallel.world import ParallelDims, translate_peer_errors

# --- The order in which a stage works, and which weights each micro-batch meets: pure functions of counts ---
#
# The schedule is PipeDream's 1F1B without a flush: Narayanan et al., "PipeDream: Generalized Pipeline
# Parallelism for DNN Training", SOSP 2019. A stage runs as many forwards ahead of its backwards as there are
# stages behind it, also over the end of a step: the next step's first forwards come before this step's last
# backwards, and so before its update. Their backwards use the weights of these forwards (weight stashing).
#
# With one micro-batch a step this is the paper's schedule, with an update after every micro-batch. With S micro-batches
# the gradients of a step are added up first, and weights are at most one update old where S is at least the
# number of stages.


@dataclass(frozen=True, slots=True)
class PipeDreamAction:
    """Forward or backward of one micro-batch.

    Attributes:
        kind: "F" or "B".
        position: among the micro-batches of the step under way; from their number on, among those of the next.
    """

    kind: Literal["F", "B"]
    position: int


def forwards_ahead(stage: int, num_stages: int) -> int:
    """How many forwards a stage runs ahead of its backwards: as many as there are stages behind it."""
    return num_stages - 1 - stage


def step_actions(ahead: int, microbatches: int, begun: int, following: int) -> list[PipeDreamAction]:
    """What a stage does in a step, up to the backward of its last micro-batch.

    Args:
        ahead: :func:`forwards_ahead` of the stage.
        microbatches: the step's.
        begun: how many of the step's forwards were run within the step before; see :func:`begins`.
        following: the next step's micro-batches; 0 where all ranks finish this step before the next one.
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
    """How many of the next step's forwards a stage runs within the step before: with older weights."""
    return min(ahead, following)


@dataclass
class PipeDreamStaleness:
    """How many updates old the weights of forwards were when their gradients were applied.

    Attributes:
        total: over all forwards.
        forwards: how many there were, each stage's counted.
        largest: of one forward.
    """

    total: int = 0
    forwards: int = 0
    largest: int = 0

    def count(self, microbatches: int, stale: int) -> None:
        """Take in a stage's step, of whose ``microbatches`` forwards ``stale`` met weights one update old."""
        self.total += stale
        self.forwards += microbatches
        self.largest = max(self.largest, int(stale > 0))

    def add(self, other: Sequence[int]) -> None:
        """Take in what another stage counted: ``total``, ``forwards``, ``largest``."""
        self.total += other[0]
        self.forwards += other[1]
        self.largest = max(self.largest, other[2])

    @property
    def stats(self) -> dict[str, float]:
        """For the run's result."""
        mean = self.total / self.forwards if self.forwards else 0.0
        return {"staleness_mean": round(mean, 4), "staleness_max": self.largest}


# --- Copies of the weights for micro-batches whose backward comes after an update: weight stashing ---


Version = dict[str, torch.Tensor]
"""A module's parameters as they were, by name: leaves that take gradients of their own."""


def stash_weights(module: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """A copy of the parameters of these names as they are now."""
    return {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if name in names
    }


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the module's buffers, for a forward to change."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assign_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Write what a forward made of its copies into the module's own buffers."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


class WithWeights(nn.Module):
    """A module, called with other parameters and buffers than its own.

    Args:
        module: the model, or a part of it.
        tensors: by name; whatever is missing is the module's own.
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
    """Within, the copies' gradients are added to where the module's own parameters have theirs."""
    own = dict(module.named_parameters())
    for name, tensor in version.items():
        tensor.grad = own[name].grad
    yield
    for tensor in version.values():
        tensor.grad = None


# --- PipeDream on this rank's stage: forwards and backwards in the schedule's order, over the end of a step


_NUMBERS = 1024  # messages of so many units on their way are told apart, far more than there can be


@dataclass(frozen=True)
class _Unit:
    """A micro-batch whose forward is done on this stage, and its backward is not.

    Attributes:
        number: counted from the first step on, modulo :data:`_NUMBERS`.
        weights: the old parameters that its forward used; empty where these are the stage's own.
    """

    number: int
    microbatch: MicroBatch
    weights: Version


class PipeDream(Pipeline):
    """Asynchronous pipeline parallelism with weight stashing; ``schedule.py`` says what runs when.

    A rank applies its stage's updates by itself. What ranks are to know of each other arrives a step later,
    except in a step that nothing overlaps with.

    Args:
        module: laid out by :class:`~paceline.parallel.pipeline.pipeline.Staged`, one stage a rank.
        mesh: the ranks.
        options: the strategy's.
    """

    overlaps_steps = True

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        super().__init__(module, mesh, options)
        (self._stage,) = self._forward.own
        (self._reducer,) = self._reducers.values()
        stages = len(self._forward.stages)
        self._ahead = [forwards_ahead(stage, stages) for stage in range(stages)]
        self._in_flight: deque[_Unit] = deque()
        self._forwards = 0
        self._begun = 0  # of the step's micro-batches, those that the step before could begin
        self._following: Sequence[MicroBatch] | None = None  # it may be none: another copy has them all
        self._staleness = PipeDreamStaleness()
        self._told: tuple[dist.Work, list[torch.Tensor]] | None = None

    @property
    def stats(self) -> Mapping[str, Any]:
        return self._staleness.stats

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        self._following = None

    def overlap_next(self, following: Sequence[MicroBatch]) -> None:
        self._following = following

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        present, upcoming = len(microbatches), self._following or ()
        following = len(upcoming)
        for ahead in self._ahead:  # of all stages: it follows from the counts
            self._staleness.count(present, begins(ahead, self._begun))
        own = self._ahead[self._stage.number]
        old: Version = {}
        self.timed = []
        for action in step_actions(own, present, begins(own, self._begun), following):
            kind, position = action.kind, action.position
            self._began = time.time()
            if kind == "B":
                self._one_backward(work)
            elif position < present:
                self._one_forward(microbatches[position], {}, work)
            else:
                # Its backward comes after this step's update, which it must not see.
                old = old or stash_weights(self.module, self._stage.holds)
                microbatch = upcoming[position - present]
                self._one_forward(microbatch, old, _NextStep(work, self.module, old))
            self.timed.append(TimedAction(ScheduleAction(kind, self._stage.number, position), self._began, time.time()))
        self._begun = following
        if self._following is None:
            self._link.wait()

    def reduce(self, row: Sequence[float]) -> StepSums:
        rows = self._heard()
        if self._following is None:
            return super().reduce(row)
        sums = self._reducer.finish(row)
        self._tell(row)
        return replace(sums, rows=rows)

    def _record(self) -> None:
        # A step has no begin and no end here that all ranks share, and so no picture.
        pass

    def rollback(self) -> None:
        super().rollback()
        self._in_flight.clear()
        self._told = None

    def _one_forward(self, microbatch: MicroBatch, weights: Version, work: MicrobatchWork) -> None:
        number = self._forwards % _NUMBERS
        self._run_forward(self._stage, number, microbatch, work)
        self._in_flight.append(_Unit(number, microbatch, weights))
        self._forwards += 1

    def _one_backward(self, work: MicrobatchWork) -> None:
        unit = self._in_flight.popleft()
        stage, flight = self._stage, self._flights[self._stage.number, unit.number]
        self._begin_backward(stage, unit.number, flight, work)
        self._reducer.begin_microbatch()
        with share_gradients(self.module, unit.weights):
            if flight.roots:
                torch.autograd.backward(flight.roots, flight.gradients)
        self._send_back(stage, unit.number, flight)
        self._end(stage, unit.number, flight, unit.microbatch, work)

    def _tell(self, row: Sequence[float]) -> None:
        """Send this rank's row to all, without waiting for theirs."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._mesh.world.world_size)]
        with translate_peer_errors():
            work = dist.all_gather(rows, mine, group=self._mesh.world.group, async_op=True)
        assert work is not None
        self._told = work, rows

    def _heard(self) -> list[Sequence[float]]:
        """Every rank's row of the step before, which all of them have done by now, or nearly so."""
        told, self._told = self._told, None
        if told is None:
            return []
        work, rows = told
        self._mesh.world.progress_tracker.begin_collective("all-gather")
        with translate_peer_errors():
            work.wait()
        self._mesh.world.progress_tracker.end_collective()
        return [row.tolist() for row in rows]


class _NextStep:
    """A micro-batch's work in the step after the one under way, with weights of which the stage keeps a copy."""

    def __init__(self, work: MicrobatchWork, module: nn.Module, weights: Version) -> None:
        self._work, self._model = work, WithWeights(module, weights)

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 1) -> Loss:
        return self._work.forward(self._model, microbatch, ahead=ahead)

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        raise AssertionError("a stage computes one micro-batch at a time")

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._work.scale_loss(loss)

    def backward_done(self) -> None:
        self._work.backward_done()
