"""Runs the micro-batches of a step through the stages, in the order of a schedule."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.microbatch import MicroBatch
from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import GradientReducer, StepSums
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import lost_peers_reported
from paceline.errors import TaskError
from paceline.strategies.base import ShardWork, StrategyOptions
from paceline.strategies.mixed_tensors import mixing_explained
from paceline.strategies.pipeline import trace
from paceline.strategies.pipeline.link import BACKWARD, FORWARD, Address
from paceline.strategies.pipeline.schedule import Action, Name, Timed, orders
from paceline.strategies.pipeline.split_backward import Groups, backward_of_inputs, backward_of_weights
from paceline.strategies.pipeline.staged import Stage, StageDone, Turn, staged
from paceline.strategies.shard_by_shard import agreed
from paceline.task import Loss

_log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """What a stage keeps of a micro-batch between its forward and the end of its backward.

    Attributes:
        turn: what came in and went out.
        loss: the last stage's.
        buffers: what the forward has left in the stage's buffers.
        weight, loss_sum: of the loss, once they are known.
        roots, gradients: where backward begins.
        groups: what :func:`backward_of_inputs` left for the weights; None where they are still to be
            computed by a whole backward.
    """

    turn: Turn
    loss: Loss | None
    buffers: list[torch.Tensor]
    weight: float = 0.0
    loss_sum: float = 0.0
    roots: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    groups: Groups | None = None


class Pipeline:
    """A micro-batch is a shard, and its gradients are summed like any other's: the bits are one process's.

    Attributes:
        module, model: the model, laid out in stages.
        plan: who computes which shard.
        shards: of this rank's copy of the model.
        timed: what this rank did in its last step, and when, by ``time.time()``.

    Args:
        module: laid out by :class:`~paceline.strategies.pipeline.placement.Staged`.
        mesh: the ranks.
        schedule: the order of the work.
        options: the strategy's.
    """

    spare_rounds = 0
    overlaps_steps = False

    def __init__(self, module: nn.Module, mesh: Mesh, schedule: Name, options: StrategyOptions) -> None:
        self.plan = ReductionPlan(sum(options.shares), mesh.data.world_size, options.kind, options.shares)
        self.module = self.model = module
        self.shards = self.plan.shards_of(mesh.data.rank)
        self.timed: list[Timed] = []
        self._mesh = mesh
        self._schedule = schedule
        self._forward = staged(module)
        self._link = self._forward.link
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        in_stages = {name for stage in self._forward.stages for name in stage.holds}
        self._reducers: dict[int, GradientReducer] = {}
        self._weights: dict[int, list[nn.Parameter]] = {}
        for number, stage in enumerate(self._forward.own):
            unused = {name for name, t in tensors.items() if name not in in_stages and not t.is_meta}
            names = stage.holds | (unused if number == 0 else set())
            own = {id(tensors[name]) for name in names}
            self._reducers[stage.number] = GradientReducer(
                module,
                self.plan,
                mesh.data,
                row_length=options.row_length if number == 0 else 0,
                timeout_s=options.timeout_s,
                holds=partial(_is_one_of, own),
            )
            self._weights[stage.number] = [
                tensor
                for name in sorted(stage.holds)
                if isinstance(tensor := tensors[name], nn.Parameter) and tensor.requires_grad
            ]
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._began = 0.0
        self._steps = 0
        self._trace = options.directory / trace.FILE

    @property
    def figures(self) -> Mapping[str, Any]:
        return {}

    def go_on(self, following: Sequence[MicroBatch]) -> None:
        raise AssertionError("steps do not overlap here")

    def begin_step(self, present: Sequence[int]) -> None:
        # A copy without shards sends here what others send in backward: their last stage's gradients first.
        for _, reducer in sorted(self._reducers.items(), reverse=True):
            reducer.begin(present)

    def compute(self, microbatches: Sequence[MicroBatch], work: ShardWork) -> None:
        world = self._link.world
        actions: dict[str, Callable[[Stage, int, MicroBatch, ShardWork], None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_input_backward,
            "W": self._run_weight_backward,
        }
        self.timed = []
        order = orders(self._schedule, world.world_size, len(microbatches))[world.rank]
        # A stage whose layers are split waits for the ranks that hold the other parts, too.
        with lost_peers_reported(), mixing_explained():
            self._link.expect([message for action in order for message in self._awaited(action)])
            for action in order:
                kind, number, k = action
                self._began = time.time()
                actions[kind](self._forward.stages[number], k, microbatches[k], work)
                self.timed.append(Timed(action, self._began, time.time()))
        self._link.finish()

    def spare_round(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        raise AssertionError("no rank waits for another one's backward here")

    def finish_step(self, row: Sequence[float]) -> StepSums:
        self._record()
        first, *others = self._reducers.values()
        sums = first.finish(row)
        finite = all([sums.finite, *(reducer.finish(()).finite for reducer in others)])
        return agreed(replace(sums, finite=finite), row, self._mesh)

    def _record(self) -> None:
        """Keep what was done in the 2nd, 4th, 8th, ... step for ``paceline runs pipeline``."""
        self._steps += 1
        if self._steps == 1 or self._steps & (self._steps - 1):
            return
        rows = [[*t.action, t.begin, t.end] for t in self.timed]
        ranks = self._link.world.all_gather_json(rows)
        if self._mesh.world.rank == 0:
            try:
                trace.write(self._trace, self._schedule, self._steps, ranks)
            except OSError as error:  # a picture is no reason to stop
                _log.warning("%s cannot be written: %s", self._trace, error.strerror)

    def abandon(self) -> None:
        self._flights.clear()
        for reducer in self._reducers.values():
            reducer.abandon()

    def close(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()

    def _awaited(self, action: Action) -> list[tuple[int, Address]]:
        """From whom, and as what, comes what the action begins with, if it does not come from here."""
        kind, stage, k = action
        if kind == "F" and stage > 0:
            return [(self._forward.rank_of(stage - 1), Address(stage, FORWARD, k))]
        if kind in ("B", "I") and stage < len(self._forward.stages) - 1:
            return [(self._forward.rank_of(stage + 1), Address(stage, BACKWARD, k))]
        return []

    def _run_forward(self, stage: Stage, k: int, microbatch: MicroBatch, work: ShardWork) -> None:
        entered = self._receive(stage.number - 1, Address(stage.number, FORWARD, k)) if stage.number else []
        buffers = self._reducers[stage.number].buffers
        turn = Turn(stage, entered)
        loss: Loss | None = None
        self._forward.turn = turn
        buffers.lend()
        try:
            loss = work.forward(self.model, microbatch)
        except StageDone:
            pass
        finally:
            self._forward.turn = None
            left_in_buffers = buffers.take_back()
        if not turn.called:
            raise TaskError("the loss does not call the model, so a pipeline has nothing to run.")
        self._flights[stage.number, k] = _Flight(turn, loss, left_in_buffers)
        if not self._forward.is_last(stage):
            self._send(turn.left, Address(stage.number + 1, FORWARD, k))

    def _run_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: ShardWork) -> None:
        flight = self._flights[stage.number, k]
        self._begin_backward(stage, k, flight, work)
        reducer = self._reducers[stage.number]
        reducer.begin_shard()
        if flight.roots:
            torch.autograd.backward(flight.roots, flight.gradients)
        self._send_back(stage, k, flight)
        self._end(stage, k, flight, microbatch, work)

    def _run_input_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: ShardWork) -> None:
        flight = self._flights[stage.number, k]
        self._begin_backward(stage, k, flight, work)
        inputs = [tensor for tensor in _tensors(flight.turn.entered) if _wants_gradient(tensor)]
        if inputs and flight.roots:
            weights = self._weights[stage.number]
            # One step shows how the stage is built.
            flight.groups = backward_of_inputs(
                flight.roots, flight.gradients, inputs, weights, check=not self._steps
            )
        self._send_back(stage, k, flight)

    def _run_weight_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: ShardWork) -> None:
        flight = self._flights[stage.number, k]
        self._reducers[stage.number].begin_shard()
        if flight.groups is not None:
            backward_of_weights(self._weights[stage.number], flight.groups)
        elif flight.roots:
            torch.autograd.backward(flight.roots, flight.gradients)
        self._end(stage, k, flight, microbatch, work)

    def _begin_backward(self, stage: Stage, k: int, flight: _Flight, work: ShardWork) -> None:
        """Know the loss, and where backward begins with which gradients."""
        if flight.loss is not None:
            root = work.scaled(flight.loss.sum)
            flight.weight, flight.loss_sum = float(flight.loss.weight), flight.loss.sum.item()
            flight.roots, flight.gradients = [root], [torch.ones_like(root)]
            flight.loss = None
            return
        answer = self._receive(stage.number + 1, Address(stage.number, BACKWARD, k))
        flight.weight, flight.loss_sum, *gradients = answer
        given = [tensor for tensor in _tensors(flight.turn.left) if tensor.requires_grad]
        pairs = [(t, g) for t, g in zip(given, gradients, strict=True) if g is not None]
        flight.roots, flight.gradients = [t for t, _ in pairs], [g for _, g in pairs]
        flight.turn.left = []

    def _send_back(self, stage: Stage, k: int, flight: _Flight) -> None:
        if stage.number == 0:
            return
        entered = [tensor for tensor in _tensors(flight.turn.entered) if _wants_gradient(tensor)]
        values = [flight.weight, flight.loss_sum, *(tensor.grad for tensor in entered)]
        self._send(values, Address(stage.number - 1, BACKWARD, k))

    def _end(self, stage: Stage, k: int, flight: _Flight, microbatch: MicroBatch, work: ShardWork) -> None:
        reducer = self._reducers[stage.number]
        reducer.buffers.give_back(flight.buffers)
        loss_sum = torch.tensor(flight.loss_sum, dtype=torch.float64)
        reducer.end_shard(microbatch.num_samples, flight.weight, loss_sum, microbatch.checksum)
        del self._flights[stage.number, k]
        work.done()

    def _send(self, values: Sequence[Any], address: Address) -> None:
        self._link.send(values, self._forward.rank_of(address.stage), address)

    def _receive(self, stage: int, address: Address) -> list[Any]:
        received = self._link.receive(self._forward.rank_of(stage), address)
        self._began = time.time()  # waiting is no work
        return received


def _is_one_of(ids: set[int], tensor: torch.Tensor) -> bool:
    return id(tensor) in ids


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += _tensors(value)
    return found
