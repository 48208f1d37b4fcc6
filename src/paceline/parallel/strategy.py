"""The interfaces of a strategy and of a parameter layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import ResolvedConfig
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionOrder
from paceline.parallel.sharded_state import clip_gradients

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
