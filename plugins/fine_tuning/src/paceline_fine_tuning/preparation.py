"""The options of fine-tuning, applied to a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.errors import CheckpointError
from paceline.parallel.world import World
from paceline.training.hooks import ModelPreparation
from paceline.training.run_context import RunContext
from paceline_fine_tuning.adapters import merge_adapters
from paceline_fine_tuning.initialization import initialise
from paceline_fine_tuning.options import FineTuningOptions
from paceline_fine_tuning.parameters import scale_lr
from paceline_fine_tuning.pretrained import PretrainedWeights

if TYPE_CHECKING:
    from paceline.training.group_context import GroupContext
    from paceline.training.trainer import Trainer

_log = logging.getLogger(__name__)


class FineTuning(ModelPreparation):
    """Initial weights from another run, adapters, frozen parameters, learning rates of layers."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._options = config[FineTuningOptions]
        self.has_initial_weights = self._options.init_from is not None

    def read_weights(self, run: RunContext, world: World) -> PretrainedWeights | None:
        source = self._options.init_from
        return None if source is None else PretrainedWeights.read(run, source, world)

    def prepare(self, module: nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        initialise(module, self.config, weights)

    def divide_groups(self, optimizers: Mapping[str, Optimizer], module: nn.Module) -> None:
        if self._options.lr_scale:
            scale_lr(optimizers, module, self._options.lr_scale)

    def task_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        lora = self._options.lora
        return dict(weights) if lora is None else merge_adapters(weights, lora)

    def results(self, trainer: Trainer, group: GroupContext) -> Mapping[str, Any]:
        run, world = trainer.run, group.world
        if self._options.init_from is None:
            return {}
        weights = trainer.states.full_evaluated_weights(world)
        drift: dict[str, Any] = {}
        if world.rank == 0:
            group.monitor.set_status("comparing with the parent")
            try:
                drift = PretrainedWeights.load_copy(run.directory).drift(run, weights)
            except CheckpointError as error:
                drift = {"problem": str(error)}  # the training is done, and its result stands
                _log.warning("no drift: %s", error)
        return {"drift": world.broadcast_object(drift)}
