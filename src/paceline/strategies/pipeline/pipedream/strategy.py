"""PipeDream on this rank's stage: forwards and backwards in the schedule's order, over the end of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from paceline.data.microbatch import MicroBatch
from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import StepSums
from paceline.distributed.world import lost_peers_reported
from paceline.strategies.base import ShardWork, StrategyOptions
from paceline.strategies.pipeline.pipedream.schedule import (
    Staleness,
    begins,
    forwards_ahead,
    step_actions,
)
from paceline.strategies.pipeline.pipedream.weights import At, Version, gradients_shared, stashed
from paceline.strategies.pipeline.schedule import Action, Timed
from paceline.strategies.pipeline.strategy import Pipeline
from paceline.task import Loss

_NUMBERS = 1024  # messages of so many units on their way are told apart, far more than there can be


@dataclass(frozen=True)
class _Unit:
    """A shard whose forward is done on this stage, and its backward is not.

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
        module: laid out by :class:`~paceline.strategies.pipeline.placement.Staged`, one stage a rank.
        mesh: the ranks.
        options: the strategy's.
    """

    overlaps_steps = True

    def __init__(self, module: nn.Module, mesh: Mesh, options: StrategyOptions) -> None:
        super().__init__(module, mesh, "1f1b", options)
        (self._stage,) = self._forward.own
        (self._reducer,) = self._reducers.values()
        stages = len(self._forward.stages)
        self._ahead = [forwards_ahead(stage, stages) for stage in range(stages)]
        self._in_flight: deque[_Unit] = deque()
        self._forwards = 0
        self._begun = 0  # of the step's shards, those that the step before could begin
        self._following: Sequence[MicroBatch] | None = None  # it may be none: another copy has them all
        self._staleness = Staleness()
        self._told: tuple[dist.Work, list[torch.Tensor]] | None = None

    @property
    def figures(self) -> Mapping[str, Any]:
        return self._staleness.figures

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        self._following = None

    def go_on(self, following: Sequence[MicroBatch]) -> None:
        self._following = following

    def compute(self, microbatches: Sequence[MicroBatch], work: ShardWork) -> None:
        shards, upcoming = len(microbatches), self._following or ()
        following = len(upcoming)
        for ahead in self._ahead:  # of all stages: it follows from the counts
            self._staleness.count(shards, begins(ahead, self._begun))
        own = self._ahead[self._stage.number]
        old: Version = {}
        self.timed = []
        for action in step_actions(own, shards, begins(own, self._begun), following):
            kind, position = action.kind, action.position
            self._began = time.time()
            if kind == "B":
                self._one_backward(work)
            elif position < shards:
                self._one_forward(microbatches[position], {}, work)
            else:
                # Its backward comes after this step's update, which it must not see.
                old = old or stashed(self.module, self._stage.holds)
                microbatch = upcoming[position - shards]
                self._one_forward(microbatch, old, _NextStep(work, self.module, old))
            self.timed.append(Timed(Action(kind, self._stage.number, position), self._began, time.time()))
        self._begun = following
        if self._following is None:
            self._link.finish()

    def finish_step(self, row: Sequence[float]) -> StepSums:
        rows = self._heard()
        if self._following is None:
            return super().finish_step(row)
        sums = self._reducer.finish(row)
        self._tell(row)
        return replace(sums, rows=rows)

    def _record(self) -> None:
        # A step has no begin and no end here that all ranks share, and so no picture.
        pass

    def abandon(self) -> None:
        super().abandon()
        self._in_flight.clear()
        self._told = None

    def _one_forward(self, microbatch: MicroBatch, weights: Version, work: ShardWork) -> None:
        number = self._forwards % _NUMBERS
        self._run_forward(self._stage, number, microbatch, work)
        self._in_flight.append(_Unit(number, microbatch, weights))
        self._forwards += 1

    def _one_backward(self, work: ShardWork) -> None:
        unit = self._in_flight.popleft()
        stage, flight = self._stage, self._flights[self._stage.number, unit.number]
        self._begin_backward(stage, unit.number, flight, work)
        self._reducer.begin_shard()
        with gradients_shared(self.module, unit.weights):
            if flight.roots:
                torch.autograd.backward(flight.roots, flight.gradients)
        self._send_back(stage, unit.number, flight)
        self._end(stage, unit.number, flight, unit.microbatch, work)

    def _tell(self, row: Sequence[float]) -> None:
        """Send this rank's row to all, without waiting for theirs."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._mesh.world.world_size)]
        with lost_peers_reported():
            work = dist.all_gather(rows, mine, group=self._mesh.world.group, async_op=True)
        assert work is not None
        self._told = work, rows

    def _heard(self) -> list[Sequence[float]]:
        """Every rank's row of the step before, which all of them have done by now, or nearly so."""
        told, self._told = self._told, None
        if told is None:
            return []
        work, rows = told
        self._mesh.world.activity.enter("all-gather")
        with lost_peers_reported():
            work.wait()
        self._mesh.world.activity.leave()
        return [row.tolist() for row in rows]


class _NextStep:
    """A shard's work in the step after the one under way, with weights of which the stage keeps a copy."""

    def __init__(self, work: ShardWork, module: nn.Module, weights: Version) -> None:
        self._work, self._model = work, At(module, weights)

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 1) -> Loss:
        return self._work.forward(self._model, microbatch, ahead=ahead)

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        raise AssertionError("a stage computes one shard at a time")

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self._work.scaled(loss)

    def done(self) -> None:
        self._work.done()
