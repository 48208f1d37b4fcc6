"""Additions of options to a training: a preparation of the model, hooks of a run, and hooks of a group's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.plugins import import_object
from paceline.parallel.world import World
from paceline.runs.directory import RunDirectory
from paceline.training.control import StopCause

if TYPE_CHECKING:
    from paceline.data.samples import MicroBatch
    from paceline.parallel.reducer import StepSums
    from paceline.parallel.strategy import Strategy
    from paceline.training.control import ControlFlags
    from paceline.training.group_context import GroupContext
    from paceline.training.run_context import RunContext
    from paceline.training.state import TrainingState
    from paceline.training.state_manager import StateManager
    from paceline.training.trainer import Trainer


# --- The model that is trained, where options make another one of the task's: weights from elsewhere, added layers ---


class InitialWeights(Protocol):
    """Weights from elsewhere, with which a new run begins; the same on all ranks."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """By the names of the task's model, on the CPU or on this rank's device."""

    def save_copy(self, directory: RunDirectory) -> Mapping[str, Any]:
        """Copy them into the run, before it exists; rank 0 does.

        Returns:
            The table ``parent`` of ``run.toml``: their origin.

        Raises:
            RunDirectoryError: the directory cannot be written.
        """


class ModelPreparation:
    """Makes the trained model from the task's, and the task's from the trained one; this class changes nothing.

    A group of options names a subclass in :attr:`paceline.core.options.Changes.preparation`. What it does is a function
    of the options, so it is the same on all ranks and after each start.

    Attributes:
        has_initial_weights: whether a new run begins with weights from elsewhere, so that no rank can build its state
            before it has met the others.
    """

    has_initial_weights = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def read_weights(self, run: RunContext, world: World) -> InitialWeights | None:
        """Read the initial weights of a run without checkpoints; all ranks call this together.

        Raises:
            ConfigError: they are not there, or damaged; on all ranks.
            PeerLostError: a rank is gone.
        """
        return None

    def prepare(self, module: nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Change a model, as the task built it, into the one that is trained.

        Args:
            module: on the CPU, before it is laid out on the ranks.
            weights: the initial weights; None where the state that is trained comes later.

        Raises:
            ConfigError: the options or the weights do not fit the model.
        """

    def divide_groups(self, optimizers: Mapping[str, Optimizer], module: nn.Module) -> None:
        """Divide the optimizers' parameter groups, as the task built them; a group may get an ``LR_FACTOR``.

        Raises:
            ConfigError: the options do not fit the model.
        """

    def task_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights of the task's own model that computes what the trained one does.

        Args:
            weights: by the names of the trained model.

        Raises:
            CheckpointError: some are missing.
        """
        return dict(weights)

    def results(self, trainer: Trainer, group: GroupContext) -> Mapping[str, Any]:
        """Return entries of ``result.json`` about the evaluated model; all ranks call this together."""
        return {}


def build_preparation(config: RunConfig) -> ModelPreparation:
    """Build the preparation that the options name; without one, that which changes nothing."""
    reference = config.changes.preparation
    kind: type[ModelPreparation] = ModelPreparation if reference is None else import_object(reference)
    return kind(config)


class RunHook:
    """An option's addition to a run, one object in each process; each method does nothing unless it is overridden.

    A group of options names a subclass in :attr:`paceline.core.options.Changes.hooks`.

    Attributes:
        checks_samples: whether the loader reads some samples twice, for :attr:`paceline.data.samples.Loader.checked`.
    """

    checks_samples = False

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def validate(self) -> None:
        """Reject a run with which the option does not work, before the run is created.

        Raises:
            ConfigError: names the option to change.
        """

    def step_hook(self, group: GroupContext, states: StateManager) -> StepHook | None:
        """Return the addition to the steps of a group, if there is one; all ranks call this together."""
        return None

    def check_state(self, group: GroupContext, state: TrainingState) -> None:
        """Check the state before it is evaluated or saved; all ranks call this together."""

    def watch_evaluation(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for an evaluation of the model."""
        return nullcontext()

    def after_evaluation(self, trainer: Trainer, group: GroupContext) -> StopCause:
        """Follow up on an evaluation during training; return why to stop, the same on all ranks, or NONE."""
        return StopCause.NONE

    def results(self, world: World) -> Mapping[str, Any]:
        """Return entries of ``result.json``; all ranks call this together."""
        return {}

    def close(self) -> None:
        """Free what the hook holds, at the end of the training."""


class StepHook:
    """An addition to the synchronous steps of a group; each method does nothing unless it is overridden."""

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Run after the strategy's step has begun, before forward and backward."""

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Run after the last backward of this rank's micro-batches has run, or is enqueued."""

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Change this rank's control flags, before they travel with the step's sums."""
        return flags

    def after_reduce(self, sums: StepSums) -> StepSums:
        """Change the step's sums, before they are used."""
        return sums

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Select the flags that the ranks obey after the step, from the control flags of all."""
        return flags

    def on_step_end(self, step: int) -> None:
        """Run when so many steps of the run are done: after the commit, or what was due after it."""

    def close(self) -> None:
        """Free what the hook holds, when the rank leaves the group."""
