"""Reference simulations of asynchronous methods, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.environment import Environment
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.options import PipelineOptions
from paceline.parallel.pipeline.stage_split import manual_split
from paceline.parallel.pipeline.stages import Stage, absent_arguments, cut, find_blocks
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import equal_work_split
from paceline.parallel.strategy import (
    ExampleBatchProvider,
    MicrobatchWork,
    ParameterLayout,
    ReducerStrategy,
    Replicated,
    Strategy,
    StrategyOptions,
)
from paceline.parallel.world import ParallelDims, World, open_world
from paceline.torch_internals import foreach_mul_
from paceline.training.run_context import RunContext
from paceline.training.session import build_trainer, train_in_group
from paceline.training.state import TrainingState
from paceline.training.state_manager import ExampleBatch, StateManager
from paceline.training.step import microbatch_loss
from paceline_more_strategies.asynchronous import Staleness
from paceline_more_strategies.local_sgd import tensors_to_average
from paceline_more_strategies.options import CommunicationOptions
from paceline_more_strategies.pipedream import (
    WithWeights,
    assign_buffers,
    begins,
    buffers_of,
    forwards_ahead,
    share_gradients,
    stash_weights,
)

# --- PipeDream in one process: the same weights for the same micro-batches. Pipelines are compared with it bit
#     for bit


class PipeDreamReference(ReducerStrategy):
    """PipeDream in one process.

    Args:
        stages: of the model, from :func:`~paceline.parallel.pipeline.stages.cut`.
    """

    engine = "paceline_more_strategies.pipedream:PipeDreamEngine"
    overlaps_steps = True

    def __init__(
        self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions, stages: Sequence[Stage]
    ) -> None:
        super().__init__(module, mesh, options)
        self._stages = stages
        self._ahead = [forwards_ahead(stage.number, len(stages)) for stage in stages]
        self._names = frozenset(name for stage in stages for name in stage.holds)
        self._overlapped = [0] * len(stages)  # forwards of this step, by stage, that ran in the previous step
        self._num_next = 0
        self._old: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._staleness = Staleness()

    @property
    def stats(self) -> Mapping[str, Any]:
        return self._staleness.stats

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        self._base = buffers_of(self.module)
        self._num_next = 0

    def overlap_next(self, following: Sequence[MicroBatch]) -> None:
        self._num_next = len(following)

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        for num_overlapped in self._overlapped:
            self._staleness.observe(1, num_overlapped)
            self._staleness.observe(0, len(microbatches) - num_overlapped)
        for position, microbatch in enumerate(microbatches):
            self._begin_microbatch()
            stale = [
                name
                for stage, num_overlapped in zip(self._stages, self._overlapped, strict=True)
                if position < num_overlapped
                for name in stage.holds
            ]
            weights, old_buffers = ({n: stashed[n] for n in stale if n in stashed} for stashed in self._old)
            buffers = buffers_of(self.module) | {name: value.clone() for name, value in old_buffers.items()}
            with share_gradients(self.module, weights):
                loss = work.forward(WithWeights(self.module, weights | buffers), microbatch)
                self.backward(work.scale_loss(loss.sum))
            assign_buffers(self.module, buffers)
            self.reducer.end_microbatch(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            work.backward_done()

    def reduce(self, row: Sequence[float]) -> StepSums:
        # The next step's first forwards precede this step's update and the mean of its buffers.
        self._old = (stash_weights(self.module, self._names), self._base) if self._num_next else ({}, {})
        self._overlapped = [begins(ahead, self._num_next) for ahead in self._ahead]
        return super().reduce(row)


# --- Local SGD, DiLoCo and compressed gradients in one process. Several ranks must reach the same bits
#
# The simulation shares with the implementation the computation of a micro-batch, the optimizer's step and the
# list of averaged tensors; it sums by recursion instead of plans, transports and gradient buffers.


@dataclass(frozen=True)
class _SimulatedMicrobatch:
    """The results of one micro-batch's backward: gradients, buffers times samples, changes of counters.

    Attributes:
        used: whether each parameter has a gradient; it is zero otherwise.
    """

    gradients: list[torch.Tensor]
    used: list[bool]
    floats: list[torch.Tensor]
    counters: list[torch.Tensor]
    weight: float
    samples: int


def simulated_model(run: RunContext, world_size: int) -> dict[str, torch.Tensor]:
    """Return the model's state after the whole run, as ``world_size`` ranks that train separately would have it.

    Skips evaluations, so nothing may depend on them (plateau schedules, early stopping).

    Args:
        run: with ``--local-sgd-steps``, on data with a length.
    """
    order = run.data.order
    assert order is not None
    assert run.data.total_steps is not None
    shares = equal_work_split(run.num_microbatches, world_size)
    firsts = [sum(shares[:rank]) for rank in range(world_size)]
    microbatches = [range(first, first + share) for first, share in zip(firsts, shares, strict=True)]
    with closing(run.build_loader(workers=0)) as loader:
        states = [StateManager(run, loader).state for _ in range(world_size)]
        for state in states:
            state.module.train()
            if state.outer is not None:
                state.outer.begin()
        while states[0].progress.step < run.data.total_steps:
            _step(run, states, microbatches, loader)
            for state in states:
                _advance(state, order.steps_per_epoch)
            if run.schedule.sync_schedule.is_sync_step(states[0].progress):
                _sync_replicas(states, shares)
    for state in states:
        state.callback.close()
    return dict(states[0].module.state_dict())


def simulated_compression(run: RunContext, world_size: int) -> dict[str, torch.Tensor]:
    """Return the model's state after the whole run, as two ranks with ``--comm-hook fp16`` or ``bf16`` have it.

    With more ranks, the order of an all-reduce's additions is not defined. Skips evaluations.

    Args:
        world_size: 2.
    """
    assert world_size == 2
    assert run.data.order is not None
    assert run.data.total_steps is not None
    shares = equal_work_split(run.num_microbatches, world_size)
    microbatches = [range(shares[0]), range(shares[0], run.num_microbatches)]
    with closing(run.build_loader(workers=0)) as loader:
        state = StateManager(run, loader).state
        state.module.train()
        while state.progress.step < run.data.total_steps:
            _compressed_step(run, state, microbatches, loader)
            _advance(state, run.data.order.steps_per_epoch)
    state.callback.close()
    return dict(state.module.state_dict())


def _compressed_step(run: RunContext, state: TrainingState, ranges: Sequence[range], loader: Loader) -> None:
    parameters = _trained(state.module)
    ranks = len(ranges)
    scale = 0.5 ** (run.global_batch_size // ranks).bit_length()
    dtype = torch.float16 if run.config[CommunicationOptions].comm_hook == "fp16" else torch.bfloat16
    messages, results_of_ranks, changed = [], [], [False] * len(_buffers(state.module)[0])
    for own in ranges:
        microbatches = loader.fetch(state.progress.epoch, state.progress.step_in_epoch, own)
        computed, by_rank = _compute(run, state, microbatches, scale)
        changed = [was or now for was, now in zip(changed, by_rank, strict=True)]
        zeros = [torch.zeros_like(p) for p in parameters]
        gradients = _left_to_right([s.gradients for s in computed.values()] or [zeros])
        messages.append([gradient.to(dtype).div_(ranks) for gradient in gradients])
        results_of_ranks.append(list(computed.values()))
    present = [results for results in results_of_ranks if results]
    weight = sum(sum(microbatch.weight for microbatch in results) for results in present)
    gradients = [total.to(p.dtype) for total, p in zip(_left_to_right(messages), parameters, strict=True)]
    foreach_mul_(gradients, ranks / (weight * scale))
    results = [microbatch for of_rank in present for microbatch in of_rank]
    means = _left_to_right([_left_to_right([s.floats for s in of_rank]) for of_rank in present])
    _apply(state.module, results, gradients, means, _left_to_right([s.counters for s in results]), changed)
    clip_norm = run.config.training.clip_norm
    state.update(None if clip_norm is None else partial(_clip, parameters, clip_norm))


def _advance(state: TrainingState, steps_per_epoch: int) -> None:
    """Count a step, and the end of its epoch."""
    progress = state.progress
    progress.step += 1
    progress.step_in_epoch += 1
    if progress.step_in_epoch == steps_per_epoch:
        progress.epoch += 1
        progress.step_in_epoch = 0


def _apply(
    module: nn.Module,
    results: Sequence[_SimulatedMicrobatch],
    gradients: Sequence[torch.Tensor],
    floats: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    changed: Sequence[bool],
) -> None:
    """Set the gradients of parameters that were used, and the buffers to their state after the step.

    Args:
        floats: sums of the floating-point buffers times samples.
        counters: sums of the changes of counters.
        changed: which floating-point buffers any micro-batch changes.
    """
    used = zip(*(each.used for each in results), strict=True)
    for parameter, gradient, uses in zip(_trained(module), gradients, used, strict=True):
        parameter.grad = gradient if any(uses) else None
    own_floats, own_counters = _buffers(module)
    samples = sum(each.samples for each in results)
    for buffer, total, has_changed in zip(own_floats, floats, changed, strict=True):
        if has_changed:
            buffer.copy_(total / samples)
    for buffer, change in zip(own_counters, counters, strict=True):
        buffer.add_(change.div(len(results), rounding_mode="floor"))


def _left_to_right(terms: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    total = terms[0]
    for term in terms[1:]:
        total = [a + b for a, b in zip(total, term, strict=True)]
    return total


def _step(run: RunContext, states: Sequence[TrainingState], ranges: Sequence[range], loader: Loader) -> None:
    finite = True
    for state, own in zip(states, ranges, strict=True):
        microbatches = loader.fetch(state.progress.epoch, state.progress.step_in_epoch, own)
        _set_gradients(run, state, microbatches)
        finite &= all(bool(torch.isfinite(p.grad).all()) for p in _trained(state.module) if p.grad is not None)
    for state in states:
        clip_norm = run.config.training.clip_norm
        parameters = state.module.parameters()
        # A gradient scaler skips the step on all ranks or on none.
        clip = None if clip_norm is None else partial(_clip, parameters, clip_norm)
        state.update(clip, finite=finite)


def _compute(
    run: RunContext, state: TrainingState, microbatches: Sequence[MicroBatch], scale: float = 1.0
) -> tuple[dict[int, _SimulatedMicrobatch], list[bool]]:
    """Return each micro-batch's results, and which floating-point buffers changed; restore the buffers."""
    module, parameters = state.module, _trained(state.module)
    floats, counters = _buffers(module)
    base = [buffer.clone() for buffer in (*floats, *counters)]
    computed: dict[int, _SimulatedMicrobatch] = {}
    changed = [False] * len(floats)
    for microbatch in microbatches:
        module.zero_grad(set_to_none=True)
        loss = microbatch_loss(run, module, state.progress.step, microbatch)
        (state.scale_loss(loss.sum) * scale).backward()  # type: ignore[no-untyped-call]
        changed = [
            was or not torch.equal(now, before)
            for was, now, before in zip(changed, floats, base[: len(floats)], strict=True)
        ]
        computed[microbatch.index] = _SimulatedMicrobatch(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters],
            [p.grad is not None for p in parameters],
            [buffer * float(microbatch.num_samples) for buffer in floats],
            [now - before for now, before in zip(counters, base[len(floats) :], strict=True)],
            float(loss.weight),
            microbatch.num_samples,
        )
        for buffer, before in zip((*floats, *counters), base, strict=True):
            buffer.copy_(before)
    return computed, changed


def _set_gradients(run: RunContext, state: TrainingState, microbatches: Sequence[MicroBatch]) -> None:
    """Set a rank's mean gradient in its parameters, and its buffers to their state after the step."""
    computed, changed = _compute(run, state, microbatches)
    if not computed:
        for parameter in _trained(state.module):
            parameter.grad = None
        return

    def total(part: Callable[[_SimulatedMicrobatch], list[torch.Tensor]]) -> list[torch.Tensor]:
        return _tree({number: part(each) for number, each in computed.items()}, run.num_microbatches)

    (weight,) = total(lambda each: [torch.tensor(each.weight, dtype=torch.float64)])
    gradients = [gradient / weight.item() for gradient in total(lambda each: each.gradients)]
    floats, counters = total(lambda each: each.floats), total(lambda each: each.counters)
    _apply(state.module, [*computed.values()], gradients, floats, counters, changed)


def _share_states(states: Sequence[TrainingState]) -> None:
    """Give all ranks' optimizers states of the same parameters, of equally many steps."""
    for name, parameters in states[0].parameters_of.items():
        for index in range(len(parameters)):
            keys = [state.parameters_of[name][index] for state in states]
            held = [state.optimizers[name].state.get(key, {}) for state, key in zip(states, keys, strict=True)]
            first = next((values for values in held if values), None)
            if first is None:
                continue
            steps = max(float(values.get("step", 0)) for values in held)
            for state, key, values in zip(states, keys, held, strict=True):
                taken = values or deepcopy(first)
                if "step" in taken:
                    taken["step"] = taken["step"] * 0 + steps
                state.optimizers[name].state[key] = taken


def _sync_replicas(states: Sequence[TrainingState], shares: Sequence[int]) -> None:
    """Replace every rank's tensors by their mean, weighted by micro-batches."""
    factors = [share // math.gcd(*shares) for share in shares]
    _share_states(states)
    tensors_of_ranks = [tensors_to_average(state) for state in states]
    terms = {rank: [tensor * factors[rank] for tensor in own] for rank, own in enumerate(tensors_of_ranks)}
    means = _tree(terms, len(states))
    with torch.no_grad():
        for tensors in tensors_of_ranks:
            for tensor, total in zip(tensors, means, strict=True):
                mode = None if tensor.is_floating_point() else "floor"
                tensor.copy_(torch.div(total, sum(factors), rounding_mode=mode))
    for state in states:
        if state.outer is not None:
            state.outer.step()


def _tree(terms: Mapping[int, list[torch.Tensor]], stop: int, start: int = 0) -> list[torch.Tensor]:
    """Sum along the tree over the numbers from ``start`` to ``stop`` - 1, of which some are in ``terms``."""
    if stop - start == 1:
        return terms[start]
    half = start + (1 << (stop - start - 1).bit_length()) // 2
    sides = ((start, half), (half, stop))
    sums = [_tree(terms, last, first) for first, last in sides if any(first <= number < last for number in terms)]
    return sums[0] if len(sums) == 1 else [a + b for a, b in zip(*sums, strict=True)]


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, max_norm)


def _buffers(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the floating-point buffers and the counters."""
    buffers = list(module.buffers())
    return [b for b in buffers if b.is_floating_point()], [b for b in buffers if not b.is_floating_point()]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


# --- PipeDream: a simulated run. A pipeline's ranks must reach the same bits ---


def simulated_pipedream(run: RunContext, world_size: int) -> dict[str, torch.Tensor]:
    """Return the model's state after the whole run, as a pipeline of ``world_size`` stages would have it.

    Args:
        run: with ``--pp-schedule pipedream``, and stages that are not measured (``--pp-split equal``).
    """
    single = _SingleRankRun(**{f.name: getattr(run, f.name) for f in fields(run)}, stages=world_size)
    run.directory.create()
    with open_world(Environment(), device="cpu") as world, build_trainer(single, world_size) as trainer:
        train_in_group(trainer, [], time.perf_counter(), replace(world, device=run.device))
        return dict(trainer.state.module.state_dict())


@dataclass(frozen=True, kw_only=True)
class _SingleRankRun(RunContext):
    """A run in which one rank computes all stages."""

    stages: int

    def build_mesh(self, world: World) -> ParallelDims:
        return ParallelDims(world, {"dp": 1})

    def build_layout(self, mesh: ParallelDims, example_batch: ExampleBatchProvider) -> ParameterLayout:
        return Replicated()

    def build_strategy(self, module: nn.Module, mesh: ParallelDims, work_split: tuple[int, ...]) -> Strategy:
        example_batch = ExampleBatch(self)
        parts = example_batch.parts(module)
        absent = absent_arguments(module, example_batch.loss) if parts is None else frozenset()
        blocks = find_blocks(module, parts, absent)
        sizes = manual_split(blocks, self.stages, self.config[PipelineOptions].pp_split)
        return PipeDreamReference(module, mesh, self.strategy_options(work_split), cut(blocks, sizes))
