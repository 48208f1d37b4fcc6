"""The ``Trainer`` that a module and its callbacks see: it says where the run stands, and trains nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from paceline.callback import Group, Horizon
from paceline.errors import TaskError
from paceline.monitoring.hushed import hushed


class RunTrainer(pl.Trainer):  # type: ignore[misc]  # Any where Lightning is not installed
    """A real ``Trainer``, so that callbacks find what they look for; its numbers are those of the run.

    Args:
        module: what is trained.
        datamodule: where the data come from, or None.
        given: the callbacks.
    """

    def __init__(self, module: pl.LightningModule, datamodule: Any, given: list[pl.Callback]) -> None:
        with hushed("lightning.pytorch.utilities.rank_zero"):
            super().__init__(
                accelerator="cpu",
                devices=1,
                plugins=[LightningEnvironment()],
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
        self.callbacks = given
        self.datamodule = datamodule
        self.strategy._lightning_module = module
        self.strategy.model = module
        self.state.fn, self.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        self.state.stage = RunningStage.TRAINING
        self.steps_done = self.epochs_done = 0
        self.horizon = Horizon(total_steps=None, steps_per_epoch=None)
        self._group: Group | None = None
        self._metrics: dict[str, torch.Tensor] = {}
        self._logged: dict[str, torch.Tensor] = {}

    def plan(self, horizon: Horizon) -> None:
        """The run goes on so long, and is evaluated so often."""
        self.horizon = horizon
        steps, epochs = horizon.eval_every.steps, horizon.eval_every.epochs
        if steps is not None:
            self.val_check_interval, self.check_val_every_n_epoch = steps, None
        elif epochs is not None:
            self.check_val_every_n_epoch = epochs

    @property
    def validates_each_epoch(self) -> bool:
        """Whether each epoch has one evaluation, at its end."""
        return bool(self.val_check_interval == 1.0 and self.check_val_every_n_epoch == 1)

    def take_place(self, group: Group) -> None:
        """Be a rank of a group; loggers write on rank 0 only."""
        self._group = group
        self.strategy._root_device = group.device
        self.log_every_n_steps = group.log_every
        rank_zero_only.rank = group.rank

    def stand_at(self, *, step: int, epoch: int, batches: int = 0) -> None:
        """So many steps and epochs are done, and so many of this epoch's batches begun."""
        self.steps_done, self.epochs_done = step, epoch
        loop = self.fit_loop.epoch_loop
        loop._batches_that_stepped = step
        loop.batch_progress.current.ready = batches

    @contextmanager
    def stage(self, split: str) -> Iterator[None]:
        """Be evaluating in here."""
        fn, stage = self.state.fn, self.state.stage
        if split == "test":
            self.state.fn = TrainerFn.TESTING
        self.state.stage = RunningStage.TESTING if split == "test" else RunningStage.VALIDATING
        try:
            yield
        finally:
            self.state.fn, self.state.stage = fn, stage

    def note(self, metrics: Mapping[str, float], *, to_loggers: Mapping[str, float], step: int) -> None:
        """Have callbacks see numbers, and loggers write them.

        Args:
            metrics: for callbacks, by name.
            to_loggers: for loggers.
            step: the number that loggers write beside.
        """
        self._metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        self._logged |= {name: torch.tensor(value) for name, value in to_loggers.items()}
        if to_loggers:
            for logger in self.loggers:
                logger.log_metrics({**to_loggers, "epoch": self.epochs_done}, step=step)
                logger.save()

    @property
    def current_epoch(self) -> int:
        """Epochs done."""
        return self.epochs_done

    @property
    def global_step(self) -> int:
        """Steps done."""
        return self.steps_done

    @property
    def global_rank(self) -> int:
        """Of the group as it is now."""
        return 0 if self._group is None else self._group.rank

    @property
    def local_rank(self) -> int:
        """Among the ranks of this machine."""
        return 0 if self._group is None else self._group.local_rank

    @property
    def world_size(self) -> int:
        """Of the group as it is now."""
        return 1 if self._group is None else self._group.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def num_training_batches(self) -> int | float:
        """Steps an epoch."""
        return self.horizon.steps_per_epoch or float("inf")

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps of the whole run."""
        return self.horizon.total_steps or float("inf")

    @property
    def max_epochs(self) -> int | None:
        """Epochs of the whole run, the last of which may be cut short."""
        steps, each = self.horizon.total_steps, self.horizon.steps_per_epoch
        return -(-steps // each) if steps and each else -1

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.horizon.total_steps or -1

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """What was logged last, by name."""
        return self._metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What the loggers were told last, by name."""
        return self._logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Nothing: the progress is Paceline's."""
        return {}

    def fit(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError("Paceline trains: trainer.fit(), validate(), test() and predict() cannot be called.")

    validate = test = predict = fit

    def save_checkpoint(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError("Paceline saves checkpoints (--checkpoint-every); trainer.save_checkpoint() cannot.")
