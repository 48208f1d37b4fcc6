"""What ``configure_optimizers`` returns: one optimizer, and schedulers with their interval and frequency."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from paceline.errors import TaskError


def configured_optimizer(module: pl.LightningModule) -> tuple[Optimizer, list[Any]]:
    """The module's optimizer, and the ``LRSchedulerConfig`` of each of its schedulers.

    Raises:
        TaskError: there is no optimizer, or there are several, or something is misconfigured.
    """
    where = f"{type(module).__name__}.configure_optimizers"
    returned = module.configure_optimizers()
    if returned is None:
        raise TaskError(f"{where} returned None: there would be nothing that trains.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # what Lightning would ignore is refused here
            optimizers, schedulers, monitor = _configure_optimizers(returned)
            configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        _validate_optimizers_attached(optimizers, configs)
        _validate_scheduler_api(configs, module)
    except (MisconfigurationException, TypeError, RuntimeWarning) as error:
        raise TaskError(f"{where}: {error}") from error
    if len(optimizers) != 1:
        raise TaskError(
            f"{where} returned {len(optimizers)} optimizers. With automatic optimization there is one, and "
            "manual optimization cannot be kept. Where one loss trains all parts, give one optimizer several "
            "parameter groups; or write a paceline.Task, whose build_optimizer may return several."
        )
    for config in configs:
        if config.reduce_on_plateau and config.interval != "epoch":
            raise TaskError(f"{where}: a scheduler that monitors a metric needs the interval 'epoch'.")
    return optimizers[0], configs


class Schedulers:
    """An optimizer's schedulers, each stepped at its interval: what the task's ``build_scheduler`` returns.

    Args:
        configs: Lightning's.

    Attributes:
        batch_idx: the step's number in its epoch; set it before each. Frequencies count from the epoch's
            beginning, as in Lightning.
    """

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs
        self.batch_idx = 0

    def step(self) -> None:
        """An optimizer step is done."""
        for config in self._configs:
            if config.interval == "step" and (self.batch_idx + 1) % config.frequency == 0:
                config.scheduler.step()

    def epoch_ends(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """An epoch is over.

        Raises:
            TaskError: a scheduler waits for a metric that was not logged.
        """
        for config in self._configs:
            if config.interval != "epoch" or (epoch + 1) % config.frequency:
                continue
            if not config.reduce_on_plateau:
                config.scheduler.step()
            elif config.monitor in metrics:
                config.scheduler.step(metrics[config.monitor])
            elif config.strict:
                raise TaskError(
                    f"a scheduler monitors {config.monitor!r}, which is not logged. There is: "
                    f"{', '.join(metrics) or 'nothing'}. Where not every epoch is evaluated, give the "
                    "scheduler's frequency the epochs between two evaluations."
                )

    def state_dict(self) -> dict[str, Any]:
        """The states of all."""
        return {"_schedulers": [config.scheduler.state_dict() for config in self._configs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        for config, inner in zip(self._configs, state["_schedulers"], strict=True):
            config.scheduler.load_state_dict(inner)
