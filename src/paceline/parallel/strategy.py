"""What a strategy is: the steps that it takes part in, and how it lays parameters out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.gradient_norm import clip_gradients
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import Kind

# --- How a model lies on the ranks ---


class ExampleBatchProvider(Protocol):
    """What may be tried of a task before its model is laid out."""

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """What the task says of the parts of its model's forward."""

    def loss(self, module: nn.Module) -> Loss:
        """The loss of a micro-batch of the training data."""


class ParameterLayout(Protocol):
    """Lays a model out before anything is built from its parameters.

    Attributes:
        in_step: whether whoever calls the model needs the other ranks to call theirs.
    """

    is_collective: bool

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The model as this rank is to hold it, on its device; all ranks call this together.

        Args:
            module: as the task built it, on the CPU.
            device: this rank's.

        Raises:
            ConfigError: the model cannot be laid out so.
        """

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        """A second model, laid out as the first and equal to it, that is only evaluated; all ranks together.

        Args:
            build: builds the task's model once more, on the CPU.
            like: the first, as it was placed.
            device: this rank's.
        """

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        """What steps in place of the optimizers that were built for the model, by name.

        That is often they themselves. They have no state yet. All ranks call this together.

        Raises:
            ConfigError: they cannot work so.
        """

    def full(self, state: Any, *, keep: bool) -> Any:
        """A state, or a part of one, as one process would have it; all ranks call this together.

        Args:
            state: mappings, lists and tuples of tensors and other values.
            keep: whether this rank needs the result; else it takes part, and holds one tensor at a time.
        """

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        """Scale the gradients of the whole model down to a 2-norm; all ranks call this together."""


class ComposedLayout:
    """One layout after the other, inner ones last: layers are split before their parts are sharded.

    Args:
        layouts: what lays out, the one of the outermost axis of the mesh first.
    """

    is_collective = True

    def __init__(self, layouts: Sequence[ParameterLayout]) -> None:
        self._layouts = layouts

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        for layout in self._layouts:
            module = layout.place(module, device)
        return module

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("layers that are split have no moving average")

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        for layout in self._layouts:
            optimizers = layout.wrap_optimizers(optimizers)
        return optimizers

    def full(self, state: Any, *, keep: bool) -> Any:
        for layout in reversed(self._layouts):
            state = layout.full(state, keep=keep)
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        self._layouts[0].clip_gradients(module, max_norm)


class Replicated:
    """Every rank holds the whole model."""

    is_collective = False

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module.to(device)

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        return deepcopy(like)

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers

    def full(self, state: Any, *, keep: bool) -> Any:
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        clip_gradients(module.parameters(), max_norm)


# --- What a strategy answers: which micro-batches are mine, and how a step's contributions become one ---


AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of ``--precision``."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What every strategy is built with.

    Attributes:
        config: the run's options.
        work_split: the number of micro-batches of each rank that has data of its own; together S.
        kind: the order in which gradients are summed.
        row_length: numbers that a rank adds to a step's sums.
        timeout_s: how long a rank may keep the others waiting.
        compile: compile the model with ``torch.compile``.
        static_graph: the task uses the same parameters in every step.
        global_batch_size: of a step, in samples.
        directory: the run's; rank 0 may write to it.
    """

    config: RunConfig
    work_split: tuple[int, ...]
    kind: Kind
    row_length: int
    timeout_s: float
    compile: bool
    static_graph: bool
    global_batch_size: int
    directory: Path


class MicrobatchWork(Protocol):
    """What a micro-batch's forward and backward are; the trainer knows."""

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """The micro-batch's loss, with the randomness of this step and micro-batch.

        Args:
            model: what the task's ``loss`` is called with.
            microbatch: the micro-batch's.
            ahead: by how many steps the micro-batch's step comes after the one under way.

        Raises:
            TaskError: the loss is none, or nothing can be learned from it.
        """

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """The micro-batch's loss with whatever randomness there is; several threads may call this at once.

        Raises:
            TaskError: as :meth:`forward`.
        """

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward gets it."""

    def backward_done(self) -> None:
        """The micro-batch's backward has been run, or enqueued."""


class Strategy(Protocol):
    """Places a model's work on the ranks and sums a step over them.

    A step is :meth:`begin_step`, :meth:`run_microbatches` and :meth:`reduce`.

    Attributes:
        module: the model itself, whose state is saved.
        model: what the task's ``loss`` is called with (it may be wrapped or compiled).
        microbatches: the micro-batches that this rank computes.
        num_dummy_steps: how many more forwards and backwards, weighing nothing, this rank must run in the step
            after those of its micro-batches, because the others wait for it in theirs.
        overlaps_steps: the next step's first forwards may run before this step's end: see :meth:`go_on`.
        figures: what there is to tell of how the work went, for the run's result, by name.
    """

    module: nn.Module
    model: nn.Module
    microbatches: range

    overlaps_steps: bool

    @property
    def num_dummy_steps(self) -> int: ...

    @property
    def stats(self) -> Mapping[str, Any]: ...

    def begin_step(self, present: Sequence[int]) -> None:
        """Start a step in which this rank computes the micro-batches ``present``."""

    def overlap_next(self, following: Sequence[MicroBatch]) -> None:
        """In the step that was begun: another one follows at once; called where steps may overlap.

        Where this is not called, all ranks have done the step when they finish it, and nothing of another.

        Args:
            following: what this rank computes in the next step.
        """

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        """Forward and backward of this rank's micro-batches, and what they add to the step's sums."""

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        """Forward and backward of one of the rounds that weigh nothing.

        Args:
            loss: called with the model.
        """

    def reduce(self, row: Sequence[float]) -> StepSums:
        """Sum over all micro-batches; gradients and buffers then hold the step's means on every rank.

        In a step that another one overlaps with, the rows are those of the step before it, or none: all
        ranks see the same, and none waits for another.

        Args:
            row: this rank's numbers, which every rank gets to see.

        Raises:
            PeerLostError: a rank went away.
        """

    def rollback(self) -> None:
        """Undo what a step that cannot be finished has changed in the module."""

    def close(self) -> None:
        """Free what the strategy holds."""
