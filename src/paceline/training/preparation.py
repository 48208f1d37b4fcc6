"""The model that is trained, where options make another one of the task's: weights from elsewhere, added layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.plugins import import_object
from paceline.parallel.world import World
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.training.group_context import GroupContext
    from paceline.training.run_context import RunContext
    from paceline.training.trainer import Trainer


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
