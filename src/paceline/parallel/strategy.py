"""Strategies and parameter layouts: their interfaces, base classes, one process, and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import ResolvedConfig, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.grad_buffers import FlatLayout
from paceline.parallel.reducer import GradientReducer, StepSums, are_finite
from paceline.parallel.reduction_tree import ReductionOrder, ReductionPlan
from paceline.parallel.sharded_state import clip_gradients, local_shard
from paceline.parallel.transports import Transport
from paceline.parallel.world import ParallelDims
from paceline.parallel.wrap_units import model_blocks
from paceline.torch_internals import call_after_backward, foreach_div_

# --- Parameter layouts ---


class ExampleBatchProvider(Protocol):
    """Runs example batches of a task before its model is placed."""

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """Return the task's list of the parts of its model's forward."""

    def loss(self, module: nn.Module) -> Loss:
        """Return the loss of a micro-batch of the training data."""


class ParameterLayout(Protocol):
    """Places a model on the ranks before anything is built from its parameters.

    Attributes:
        is_collective: whether calling the model needs all ranks to call theirs.
        saves_shards: whether the ranks along the axis ``fsdp`` each save their own part of the state.
    """

    is_collective: bool
    saves_shards: bool

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """Return this rank's part of the model, on its device; a collective.

        Args:
            build: builds the task's model, on the CPU; with equal values each time.

        Raises:
            ConfigError: the model cannot be placed so.
        """

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        """Return an equal second model, placed as the first, for evaluation only; a collective.

        Args:
            build: builds the task's model again, on the CPU.
            like: the first, as placed.
        """

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        """Return the optimizers to step in place of those built for the model, by name; a collective.

        These are often the same objects. They have no state yet.

        Raises:
            ConfigError: an optimizer does not work with the layout.
        """

    def full(self, state: Any, *, keep: bool) -> Any:
        """Return a full state, or a part of one, as one process would have it; a collective.

        Args:
            state: mappings, lists and tuples of tensors and other values.
            keep: whether this rank needs the result; others hold one tensor at a time.
        """

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the 2-norm of the whole model's gradients, and return it as it was; a collective."""


class ComposedLayout:
    """Several layouts in sequence: layers are split before their parts are sharded.

    Args:
        layouts: the layout of the outermost mesh axis first.
    """

    is_collective = True
    saves_shards = False

    def __init__(self, layouts: Sequence[ParameterLayout]) -> None:
        self._layouts = layouts

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        for layout in self._layouts:
            build = partial(layout.place, build, device)
        return build()

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("split layers do not support a moving average")

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        for layout in self._layouts:
            optimizers = layout.wrap_optimizers(optimizers)
        return optimizers

    def full(self, state: Any, *, keep: bool) -> Any:
        for layout in reversed(self._layouts):
            state = layout.full(state, keep=keep)
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        return self._layouts[0].clip_gradients(module, max_norm)


class Replicated:
    """The layout in which every rank holds the full model."""

    is_collective = False
    saves_shards = False

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        return build().to(device)

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        return deepcopy(like)

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers

    def full(self, state: Any, *, keep: bool) -> Any:
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        return clip_gradients(module.parameters(), max_norm)


# --- Strategies ---


AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of ``--precision``."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The common arguments of all strategies.

    Attributes:
        work_split: number of micro-batches of each data rank; together S.
        row_length: number of values that a rank adds to a step's sums.
        static_graph: the task uses the same parameters in every step.
        directory: the run directory; rank 0 may write to it.
    """

    config: ResolvedConfig
    work_split: tuple[int, ...]
    row_length: int
    static_graph: bool
    directory: Path

    @property
    def reduction_order(self) -> ReductionOrder:
        """The order in which gradients are summed."""
        return "exact" if self.config.reducer == "exact" else "allreduce"


class MicrobatchWork(Protocol):
    """The forward and backward of a micro-batch, implemented by the trainer."""

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """Return the micro-batch's loss, with the randomness of this step and micro-batch.

        Args:
            model: the argument of the task's ``loss``.
            ahead: number of steps between the current one and the micro-batch's.

        Raises:
            TaskError: ``loss`` returned no tensor, or a tensor without a gradient.
        """

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """Return the micro-batch's loss without seeding; thread-safe.

        Raises:
            TaskError: as :meth:`forward`.
        """

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss scaled for backward."""

    def backward_done(self) -> None:
        """Called after the micro-batch's backward has run or been enqueued."""


class Strategy(Protocol):
    """Places a model's work on the ranks and sums a step over them.

    A step is :meth:`begin_step`, :meth:`run_microbatches` and :meth:`reduce`.

    Attributes:
        module: the model itself, whose state is saved.
        model: the argument of the task's ``loss`` (it may be wrapped or compiled).
        microbatches: this rank's micro-batches.
        num_dummy_steps: number of further forwards and backwards of weight 0 in the step, for ranks with more
            micro-batches.
        moves_parameters: whether they are elsewhere between a step's first forward and its end.
        overlaps_steps: whether the next step's first forwards may run before this step's end.
        stats: statistics for the run's result, by name.
    """

    module: nn.Module
    model: nn.Module
    microbatches: range

    moves_parameters: bool
    overlaps_steps: bool

    @property
    def num_dummy_steps(self) -> int: ...

    @property
    def stats(self) -> Mapping[str, Any]: ...

    def begin_step(self, present: Sequence[int]) -> None:
        """Begin a step in which this rank computes the micro-batches ``present``."""

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        """Run forward and backward of this rank's micro-batches, and add their contributions."""

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        """Run one dummy micro-step: forward and backward of weight 0.

        Args:
            loss: called with the model.
        """

    def reduce(self, row: Sequence[float]) -> StepSums:
        """Sum over all micro-batches; gradients and buffers then hold the step's means on every rank.

        In a step that overlaps with the next, the rows are those of the previous step, or none; they are equal on all
        ranks, and no rank waits.

        Args:
            row: this rank's values, for every rank.

        Raises:
            PeerLostError: a rank is gone.
        """

    def rollback(self) -> None:
        """Undo the changes of an unfinished step to the module."""

    def close(self) -> None:
        """Free resources."""


# --- Strategies that compute one micro-batch after the other: base classes, one process, and DDP ---


class MicrobatchStrategy:
    """Computes this rank's micro-batches one by one; its :class:`GradientReducer` sums buffers, losses and rows.

    Attributes:
        engine: ``module:Class`` of the :class:`~paceline.training.group_context.Engine` that takes the steps; None:
            the one of synchronous training, :class:`~paceline.training.trainer.SyncEngine`.
        plan: the assignment of micro-batches to the ranks of ``mesh.data``.
        reducer: sums the contributions of the micro-batches.

    Args:
        module: the model, as placed on this rank.
        plan: the rank of ``mesh.data`` that computes each micro-batch.
        sums_gradients: whether the reducer also sums the gradients.
        transport: see :class:`GradientReducer`.
    """

    engine: str | None = None
    num_dummy_steps = 0
    moves_parameters = False
    overlaps_steps = False

    @classmethod
    def build_layout(cls, mesh: ParallelDims, config: RunConfig) -> ParameterLayout:
        """Return the layout of the model: complete on each rank, unless the strategy overrides it.

        Raises:
            ConfigError: the model cannot be laid out on this number of ranks.
        """
        return Replicated()

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelDims,
        plan: ReductionPlan,
        options: StrategyOptions,
        *,
        sums_gradients: bool,
        transport: Callable[[FlatLayout], Transport] | None = None,
    ) -> None:
        self.plan = plan
        self.module = module
        self.model: nn.Module = compile_model(module) if options.config.training.compile else module
        self.microbatches = plan.microbatches_of(mesh.data.rank)
        self.reducer = GradientReducer(
            module,
            plan,
            mesh.data,
            row_length=options.row_length,
            with_gradients=sums_gradients,
            transport=transport,
        )
        self._mesh = mesh

    @property
    def stats(self) -> Mapping[str, Any]:
        return {}

    def begin_step(self, present: Sequence[int]) -> None:
        self.reducer.begin(present)

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        for microbatch in microbatches:
            self._begin_microbatch()
            loss = work.forward(self.model, microbatch)
            self.reducer.require_gradients()
            self.backward(work.scale_loss(loss.sum))
            self.reducer.end_microbatch(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            work.backward_done()

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        raise AssertionError("this strategy has no dummy micro-steps")

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's gradient of ``loss``, a sum over its samples."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self, row: Sequence[float]) -> StepSums:
        return require_agreement(self.reducer.finish(row), row, self._mesh)

    def rollback(self) -> None:
        self.reducer.rollback()

    def close(self) -> None:
        self.reducer.close()

    def _begin_microbatch(self) -> None:
        self.reducer.begin_microbatch()


class ReducerStrategy(MicrobatchStrategy):
    """The reducer sums the gradients too (``--reduction exact`` or ``allreduce``)."""

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.work_split), mesh.data.world_size, options.reduction_order, options.work_split)
        super().__init__(module, mesh, plan, options, sums_gradients=True)


class ExternalReduceStrategy(MicrobatchStrategy):
    """Another library sums the gradients, in micro-steps that all ranks run together.

    A dummy micro-step gives gradients to the parameters that it uses, but does not count as a use of them.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, plan: ReductionPlan, options: StrategyOptions) -> None:
        super().__init__(module, mesh, plan, options, sums_gradients=False)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._micro_steps_left = 0
        self._microbatches_left = 0
        self._is_dummy = False

    def begin_step(self, present: Sequence[int]) -> None:
        self._micro_steps_left = self._count_micro_steps(present)
        self._microbatches_left = len(present)
        self.num_dummy_steps = self._micro_steps_left - len(present)
        for parameter in self._parameters:
            parameter.grad = None
        super().begin_step(present)

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self._begin_microbatch()
        self.backward(loss(self.model) * 0.0)

    def backward(self, loss: torch.Tensor) -> None:
        if not self._is_dummy:
            # Before the library adds what other ranks have used.
            loss.register_hook(lambda _: call_after_backward(self._mark_used))  # type: ignore[no-untyped-call]
        super().backward(loss)

    def _mark_used(self) -> None:
        """Tell the reducer which parameters this rank's micro-batches have used so far."""
        self.reducer.mark_used(parameter for parameter in self._parameters if parameter.grad is not None)

    def reduce(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        if sums.weight > 0:
            gradients = local_gradients(self._parameters)
            self._take_mean(gradients, sums.weight)
            finite = sums.finite and are_finite(gradients)
            sums = replace(sums, finite=finite)
        return require_agreement(sums, row, self._mesh)

    def _count_micro_steps(self, present: Sequence[int]) -> int:
        """Return the number of forwards and backwards that all ranks run in this step."""
        return max(1, len(present))

    def _take_mean(self, gradients: list[torch.Tensor], weight: float) -> None:
        foreach_div_(gradients, weight)

    def _begin_microbatch(self) -> None:
        self._micro_steps_left -= 1
        self._is_dummy = self._microbatches_left == 0
        if not self._is_dummy:
            self._microbatches_left -= 1
            super()._begin_microbatch()


def require_agreement(sums: StepSums, row: Sequence[float], mesh: ParallelDims) -> StepSums:
    """Return the sums with every rank's row; finite only if every rank's gradients are."""
    if mesh.device_mesh is None:
        return sums
    rows = mesh.gather_rows([*row, float(sums.finite)])
    finite = all(of_rank[-1] for of_rank in rows)
    return replace(sums, rows=[of_rank[:-1] for of_rank in rows], finite=finite)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


def compile_model(module: nn.Module) -> nn.Module:
    """Return the module, each of whose blocks, or which itself if it has none, is compiled on its first call.

    One graph serves all sizes. By default torch compiles the first size that it sees for that size alone, and all later
    ones with symbolic sizes, so that results depend on the micro-batches that a rank happened to get first.
    """
    blocks = model_blocks(module)
    for block in blocks:
        # Without its hooks, which gather the parameters under fsdp; bound, so that a deep copy uses its own parameters.
        block.__dict__["forward"] = MethodType(torch.compile(type(block).forward, dynamic=True), block)
    wrapped = module if blocks else torch.compile(module, dynamic=True)
    assert isinstance(wrapped, nn.Module)
    return wrapped


# --- One process computes all micro-batches ---


class Single(ReducerStrategy):
    """The strategy of a world of one.

    Raises:
        ConfigError: there are several processes.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(f"--strategy single needs one process, but there are {processes}. Use ddp.")
        super().__init__(module, mesh, options)


# --- Distributed data parallel: every rank holds the model and computes a part of the micro-batches ---


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``allreduce``)."""
