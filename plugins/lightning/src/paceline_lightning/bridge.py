"""Lightning's hooks, optimizers and trainer, as a LightningModule sees them."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from paceline.core.errors import TaskError
from paceline.core.task import BatchInfo, Callback, RankInfo, RunSchedule
from paceline.runs.rank_log import silence_loggers_and_warnings
from paceline.training.state import move_scheduler
from paceline_lightning.metrics import LoggedValue, MetricRecorder, StepLog, checked, named

_log = logging.getLogger(__name__)

# --- What of Lightning cannot be kept where a step is shared by any number of ranks, and what to use instead ---


_HOOKS = {
    "optimizer_step": "Paceline steps the optimizers once the gradients of all micro-batches are summed up",
    "optimizer_zero_grad": "Paceline keeps the gradients in buffers of its own",
    "backward": "Paceline computes and sums up the gradients. Change the loss in training_step",
    "on_before_backward": "a step has one backward for each micro-batch. Change the loss in training_step",
    "lr_scheduler_step": "schedulers are stepped as their interval says. Use one of torch's interface",
    "configure_gradient_clipping": "use --clip-norm",
    "transfer_batch_to_device": "Paceline moves the batches. Use on_after_batch_transfer to change them",
    "on_validation_batch_start": "blocks are shared by the ranks. Use validation_step",
    "on_validation_batch_end": "blocks are shared by the ranks. Use validation_step",
    "on_test_batch_start": "blocks are shared by the ranks. Use test_step",
    "on_test_batch_end": "blocks are shared by the ranks. Use test_step",
    "configure_sharded_model": "every rank holds the whole model. Use configure_model",
}

_CALLBACKS = (
    (
        callbacks.Checkpoint,
        "Paceline keeps checkpoints: --checkpoint-every, --keep-checkpoints, and --best-metric METRIC:min",
    ),
    (callbacks.StochasticWeightAveraging, "use --ema DECAY"),
    (callbacks.WeightAveraging, "use --ema DECAY"),
    (callbacks.GradientAccumulationScheduler, "the global batch is what a step sees, on any number of ranks"),
    (callbacks.Timer, "use --walltime"),
    (callbacks.ProgressBar, "Paceline shows the progress; --quiet hides it"),
    (
        callbacks.BaseFinetuning,
        "it changes the optimizer on the way. Freeze parameters in build_module",
    ),
    (callbacks.ModelPruning, "it changes the parameters on the way"),
    (callbacks.BatchSizeFinder, "use --global-batch-size"),
    (callbacks.LearningRateFinder, "try values with --set"),
)


def refuse_hooks(module: LightningModule) -> None:
    """Reject a module that overrides hooks without support."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{name}.automatic_optimization is False. A step's gradients are summed over all micro-batches before "
            "anything is made of them, so training_step cannot step optimizers. Let it return the loss; "
            "where it cannot, run the script as it is: paceline launch --on torchrun -- script.py"
        )
    for hook, instead in _HOOKS.items():
        if is_overridden(hook, module):
            raise TaskError(f"{name}.{hook} cannot be kept: {instead}.")
    for split in ("training", "validation", "test"):
        if hasattr(module, f"{split}_epoch_end"):
            raise TaskError(
                f"{name}.{split}_epoch_end is a hook of Lightning 1, which Lightning 2 does not call. Use "
                f"on_{split.replace('training', 'train')}_epoch_end, with what the steps have logged."
            )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TaskError(f"{name}.training_step takes a dataloader_iter, but Paceline reads the batches. Take a batch.")
    if not is_overridden("training_step", module):
        raise TaskError(f"{name} has no training_step; there is nothing to train.")


def refuse_callbacks(given: list[Any]) -> None:
    """Refuse callbacks that do what Paceline does, or what it cannot keep."""
    for callback in given:
        for kind, instead in _CALLBACKS:
            if isinstance(callback, kind):
                raise TaskError(f"the callback {type(callback).__name__} has no place here: {instead}.")


# --- What ``configure_optimizers`` returns: one optimizer, and schedulers with their interval and frequency


def configure_optimizer(module: pl.LightningModule) -> tuple[Optimizer, list[Any]]:
    """Return the module's optimizer, and the ``LRSchedulerConfig`` of each of its schedulers."""
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
    """An optimizer's schedulers, each stepped at its interval; the task's ``build_scheduler`` returns it.

    Attributes:
        batch_idx: the step's number in its epoch; set it before each. Frequencies count from the epoch's
            beginning, as in Lightning.
    """

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs
        self.batch_idx = 0

    def step(self) -> None:
        for config in self._configs:
            if config.interval == "step" and (self.batch_idx + 1) % config.frequency == 0:
                config.scheduler.step()

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Count an epoch."""
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
        return {"_schedulers": [config.scheduler.state_dict() for config in self._configs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for config, inner in zip(self._configs, state["_schedulers"], strict=True):
            config.scheduler.load_state_dict(inner)

    def move_to(self, saved: Mapping[str, Any] | None, steps: int) -> None:
        """Move schedulers that are as built to where those of another run have come.

        Args:
            saved: what :meth:`state_dict` gave there.
            steps: of that run.

        Raises:
            ValueError: it had another number of schedulers.
        """
        inner = [] if saved is None else saved["_schedulers"]
        if len(inner) != len(self._configs):
            raise ValueError(f"it holds {len(inner)} schedulers, and the module has {len(self._configs)}")
        for config, state in zip(self._configs, inner, strict=True):
            if config.reduce_on_plateau:  # which follows the evaluations, not the steps
                config.scheduler.load_state_dict(state)
            else:
                move_scheduler(config.scheduler, state, steps)


# --- The ``Trainer`` that a module and its callbacks see: it says where the run stands, and trains nothing


class TrainerProxy(pl.Trainer):  # type: ignore[misc]  # Any where Lightning is not installed
    """A real ``Trainer``, so that callbacks find its attributes; its numbers are those of the run."""

    def __init__(self, module: pl.LightningModule, datamodule: Any, given: list[pl.Callback]) -> None:
        with silence_loggers_and_warnings("lightning.pytorch.utilities.rank_zero"):
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
        self.state.fn = TrainerFn.FITTING
        self.state.status = TrainerStatus.RUNNING
        self.state.stage = RunningStage.TRAINING
        self.steps_done = 0
        self.epochs_done = 0
        self.run_schedule = RunSchedule(total_steps=None, steps_per_epoch=None)
        self._group: RankInfo | None = None
        self._metrics: dict[str, torch.Tensor] = {}
        self._logged: dict[str, torch.Tensor] = {}

    def plan(self, schedule: RunSchedule) -> None:
        self.run_schedule = schedule
        steps, epochs = schedule.eval_every.steps, schedule.eval_every.epochs
        if steps is not None:
            self.val_check_interval = steps
            self.check_val_every_n_epoch = None
        elif epochs is not None:
            self.check_val_every_n_epoch = epochs

    def enter_group(self, group: RankInfo) -> None:
        """Take over the rank in a group; loggers write on rank 0 only."""
        self._group = group
        self.strategy._root_device = group.device
        self.log_every_n_steps = group.log_every
        rank_zero_only.rank = group.rank

    def stand_at(self, *, step: int, epoch: int, batches: int = 0) -> None:
        """Set the numbers of finished steps and epochs, and of started batches of this epoch."""
        self.steps_done = step
        self.epochs_done = epoch
        loop = self.fit_loop.epoch_loop
        loop._batches_that_stepped = step
        loop.batch_progress.current.ready = batches

    @contextmanager
    def stage(self, split: str) -> Iterator[None]:
        """Set the trainer's state to evaluation within the context."""
        fn, stage = self.state.fn, self.state.stage
        if split == "test":
            self.state.fn = TrainerFn.TESTING
        self.state.stage = RunningStage.TESTING if split == "test" else RunningStage.VALIDATING
        try:
            yield
        finally:
            self.state.fn = fn
            self.state.stage = stage

    def note(self, metrics: Mapping[str, float], *, to_loggers: Mapping[str, float], step: int) -> None:
        """Show values to callbacks, and write them with the loggers."""
        self._metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        self._logged |= {name: torch.tensor(value) for name, value in to_loggers.items()}
        if to_loggers:
            for logger in self.loggers:
                logger.log_metrics({**to_loggers, "epoch": self.epochs_done}, step=step)
                logger.save()

    # Of the run, where Lightning would ask its loops, its strategy or its own records.
    current_epoch = property(attrgetter("epochs_done"))
    global_step = property(attrgetter("steps_done"))
    global_rank = property(lambda self: 0 if self._group is None else self._group.rank)
    local_rank = property(lambda self: 0 if self._group is None else self._group.local_rank)
    world_size = property(lambda self: 1 if self._group is None else self._group.world_size)
    is_global_zero = property(lambda self: self.global_rank == 0)
    num_training_batches = property(lambda self: self.run_schedule.steps_per_epoch or float("inf"))
    estimated_stepping_batches = property(lambda self: self.run_schedule.total_steps or float("inf"))
    max_epochs = property(lambda self: self.run_schedule.epochs or -1)
    max_steps = property(lambda self: self.run_schedule.total_steps or -1)
    callback_metrics = property(attrgetter("_metrics"))
    logged_metrics = property(attrgetter("_logged"))
    progress_bar_metrics = property(lambda self: {})

    def fit(self, *arguments: Any, **options: Any) -> NoReturn:
        raise TaskError("Paceline trains: trainer.fit(), validate(), test() and predict() cannot be called.")

    validate = test = predict = fit

    def save_checkpoint(self, *arguments: Any, **options: Any) -> NoReturn:
        raise TaskError("Paceline saves checkpoints (--checkpoint-every); trainer.save_checkpoint() cannot.")


# --- A LightningModule in training: its hooks, callbacks and loggers, called at the points of Paceline's run ---


_NOWHERE = BatchInfo(split="train", step=0, number=0, samples=0)
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}
_PREFIXES = {"val": "on_validation", "test": "on_test"}


class LightningBridge(Callback):
    """Connects the module of one training state with Lightning's trainer.

    Raises:
        TaskError: the module or a callback does what cannot be kept.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        datamodule: Any,
        given: list[Any],
        build_loggers: Callable[[Path], list[Any]],
    ) -> None:
        refuse_hooks(module)
        self.module = module
        self._datamodule = datamodule
        self._build_loggers = build_loggers
        configured = module.configure_callbacks()
        own = list(configured) if isinstance(configured, list | tuple) else [configured]
        # As in Lightning: one of the module takes the place of one of its kind.
        given = [callback for callback in given if type(callback) not in {type(each) for each in own}]
        refuse_callbacks([*given, *own])
        self.trainer = TrainerProxy(module, datamodule, [*given, *own])
        if datamodule is not None:
            datamodule.trainer = self.trainer
        self.batch_info = _NOWHERE
        self.schedulers = Schedulers([])
        self._log = StepLog()
        self._group: RankInfo | None = None
        self._where: str | None = None
        self._logged: dict[str, LoggedValue] = {}
        self._aliases: dict[str, str] = {}
        self._step_values: dict[str, float] = {}
        self._to_loggers: dict[str, float] = {}
        self._of_hooks: dict[str, float] = {}
        self._closed = False
        self._has_warned = False
        self._rank_before = rank_zero_only.rank
        self._adopt(module)
        # At setup they choose the hook in which they read the metric, but the trainer has no plan yet.
        self._undecided = [
            callback
            for callback in self.trainer.callbacks
            if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None
        ]
        self._hook("setup", "fit")
        module.configure_model()
        self.taps = MetricRecorder(module)

    def __deepcopy__(self, memo: Any) -> LightningBridge:
        return self  # a module's copy logs here too

    # --- the parts

    def optimizer(self) -> torch.optim.Optimizer:
        optimizer, configs = configure_optimizer(self.module)
        self.schedulers = Schedulers(configs)
        strategy = self.trainer.strategy
        strategy.optimizers = [optimizer]
        strategy.lr_scheduler_configs = configs
        return optimizer

    def plan(self, schedule: RunSchedule) -> None:
        self.trainer.plan(schedule)
        validates = (self.trainer.val_check_interval, self.trainer.check_val_every_n_epoch)
        for callback in self._undecided:
            callback._check_on_train_epoch_end = validates == (1.0, 1)  # at the end of each epoch

    # --- batches

    def run_step(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, LoggedValue], dict[str, Any]]:
        """Run the step for the batch's place; return its output, its logged values, and its calls of metrics.

        Args:
            model: the module, also wrapped, or a copy of it.
        """
        module = _inside(model)
        name = _STEPS[self.batch_info.split]
        self._logged = {}
        self.taps.on_batch_begin()
        # Hooks of the datamodule come first, as in Lightning.
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            overrides = self._datamodule is not None and is_overridden(hook, self._datamodule)
            owner = self._datamodule if overrides else module
            batch = getattr(owner, hook)(batch, 0)
        step = getattr(module, name)
        number = (
            self.trainer.fit_loop.epoch_loop.batch_idx if self.batch_info.split == "train" else self.batch_info.number
        )
        arguments = (batch, number)[: 1 if len(inspect.signature(step).parameters) == 1 else 2]
        with self._in(name):
            try:
                output = _called(model, module, step, arguments)
            finally:
                calls = self.taps.end_batch()
        return output, self._logged, calls

    def train_batch(self, model: nn.Module, batch: Any) -> Any:
        """Return ``training_step``'s output; its logged values wait until the step is reduced."""
        output, logged, _ = self.run_step(model, batch)
        if self.batch_info.samples:
            for name, entry in logged.items():
                self._log.add(name, self.batch_info.number, entry)
        return output

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *,
        batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """``LightningModule.log``; ``others`` configure how ranks reduce, which Paceline always does."""
        if self._where is None:
            raise TaskError(f"self.log({name!r}) was called outside the hooks of the training.")
        if reduce_fx not in ("mean", torch.mean):
            raise TaskError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): Paceline logs means over samples, which are "
                "the same for any number of processes. Log a mean, or a torchmetrics object."
            )
        in_step = self._where == "training_step"
        on_step = in_step if on_step is None else on_step
        on_epoch = not in_step if on_epoch is None else on_epoch
        if isinstance(value, Metric):
            path = self.taps.path_of(value)
            if path is None:
                raise TaskError(f"self.log({name!r}): the metric is not an attribute of the module.")
            if self._where in ("validation_step", "test_step"):
                self._aliases[name] = path
                return
            value = self.taps.recorded[path].scratch.compute() if in_step else value.compute()
        weight = float(batch_size or self.batch_info.samples or 1)
        entry = LoggedValue(checked(name, value), weight, on_step, on_epoch, to_logger=logger is not False)
        self._logged[name] = entry
        if self._where not in _STEPS.values():
            # In a hook: callbacks may read it immediately.
            self.trainer.note({name: float(entry.value)}, to_loggers={}, step=0)

    # --- points of the run

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        first = self._group is None
        self._group = group
        self.trainer.enter_group(group)
        self.trainer.stand_at(step=step, epoch=epoch)
        if not first:
            return
        # A tracker would show a run for each time that a trained model is loaded; hooks may call their logger, though.
        self.trainer.loggers = list(self._build_loggers(group.directory)) if group.trains else [DummyLogger()]
        for logger in self.trainer.loggers:
            if self.module.hparams:
                logger.log_hyperparams(self.module.hparams)
        self._hook("on_fit_start")
        self._hook("on_train_start")

    def on_epoch_begin(self, epoch: int) -> None:
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch)
        self._hook("on_train_epoch_start")

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        self.trainer.stand_at(step=step, epoch=self.trainer.epochs_done, batches=step_in_epoch + 1)
        self.schedulers.batch_idx = step_in_epoch
        self._of_hooks = self._hook("on_before_zero_grad", *self.trainer.optimizers)
        self._of_hooks |= self._hook("on_train_batch_start", None, step_in_epoch)

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        assert self._group is not None
        first = self.trainer.steps_done == 0
        self._step_values, self._to_loggers = self._log.reduce(self._group.gather, due=due, first=first)
        if not due:
            self._step_values = {}
            self._to_loggers = {}
        return self._step_values

    def on_before_optimizer_step(self) -> None:
        self._of_hooks |= self._hook("on_after_backward")
        self._of_hooks |= self._hook("on_before_optimizer_step", *self.trainer.optimizers)

    def on_step_end(self, step: int, loss: float) -> None:
        outputs = {"loss": torch.tensor(loss)}
        number = self.trainer.fit_loop.epoch_loop.batch_idx
        self._of_hooks |= self._hook("on_train_batch_end", outputs, None, number)
        due = bool(self._step_values) or step % self.trainer.log_every_n_steps == 0
        to_loggers = {**self._to_loggers, **self._of_hooks} if due else {}
        self.trainer.note(self._step_values, to_loggers=to_loggers, step=step - 1)
        self.trainer.stand_at(step=step, epoch=self.trainer.epochs_done, batches=number + 1)

    def on_epoch_end(self, epoch: int) -> None:
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch)
        means, to_loggers = self._log.end_epoch()
        step = self.trainer.steps_done - 1
        self.trainer.note(means, to_loggers=to_loggers, step=step)
        logged = self._agreed(self._hook("on_train_epoch_end"), "on_train_epoch_end")
        self.trainer.note({}, to_loggers=logged, step=step)
        self.schedulers.on_epoch_end(epoch, self.trainer.callback_metrics)
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch + 1)

    def on_eval_begin(self, split: str, module: nn.Module) -> None:
        copied = _inside(module)
        if copied is not self.module:
            self._adopt(copied)
            self.taps.share(copied)
        self._aliases = {}
        with self.trainer.stage(split):
            self._hook(f"{_PREFIXES[split]}_start")
            self._hook(f"{_PREFIXES[split]}_epoch_start")

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        assert self._group is not None
        # A rank without a block has not seen what is logged.
        aliases = {name: path for of_rank in self._group.gather(self._aliases) for name, path in of_rank.items()}
        final = named(metrics, aliases)
        self.trainer.note(final, to_loggers=final, step=self.trainer.steps_done)
        with self.trainer.stage(split):
            hook = f"{_PREFIXES[split]}_epoch_end"
            logged = self._agreed(self._hook(hook), hook)
            self.trainer.note({}, to_loggers=logged, step=self.trainer.steps_done)
            self._agreed(self._hook(f"{_PREFIXES[split]}_end"), f"{_PREFIXES[split]}_end")
        return final | logged

    def on_fit_end(self) -> None:
        self._hook("on_train_end")
        self._hook("on_fit_end")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._group is not None:
                self._hook("teardown", "fit")
                if self._datamodule is not None:
                    self._datamodule.teardown("fit")
        finally:
            for logger in self.trainer.loggers:
                logger.finalize("success")
            rank_zero_only.rank = self._rank_before

    # --- state

    def state_dict(self) -> dict[str, Any]:
        callbacks = {each.state_key: each.state_dict() for each in self.trainer.callbacks}
        kept_anyway = self._checkpoint()
        checkpoint = dict(kept_anyway)
        self._warn_of_unsaved()
        self.module.on_save_checkpoint(checkpoint)
        for callback in self.trainer.callbacks:
            callback.on_save_checkpoint(self.trainer, self.module, checkpoint)
        return {
            "log": self._log.state_dict(),
            "metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "checkpoint": {key: value for key, value in checkpoint.items() if key not in kept_anyway},
            "datamodule": {} if self._datamodule is None else self._datamodule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checkpoint = {**self._checkpoint(), **state["checkpoint"]}
        self._log.load_state_dict(state["log"])
        self.trainer.note(state["metrics"], to_loggers={}, step=0)
        for callback in self.trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
            callback.on_load_checkpoint(self.trainer, self.module, checkpoint)
        self.module.on_load_checkpoint(checkpoint)
        # Runs of earlier versions have none, and an evaluation may be without one.
        if self._datamodule is not None and state.get("datamodule"):
            self._datamodule.load_state_dict(state["datamodule"])

    def _warn_of_unsaved(self) -> None:
        """Say once which callbacks keep copies of weights that no checkpoint would have."""
        if self._has_warned or not self.trainer.is_global_zero:
            return
        self._has_warned = True
        own = set(self.module.modules())
        for callback in self.trainer.callbacks:
            kind = type(callback)
            if (
                kind.state_dict is not pl.Callback.state_dict
                or kind.on_save_checkpoint is not pl.Callback.on_save_checkpoint
            ):
                continue
            if names := [name for name, value in vars(callback).items() if _is_weights(value, own)]:
                _log.warning(
                    "the callback %s keeps weights (%s) and has no state_dict, so after a stop or a fault it begins "
                    "again, and its evaluations differ. Give it state_dict and load_state_dict; a moving average of "
                    "the model is --ema DECAY.",
                    kind.__name__,
                    ", ".join(names),
                )

    def _checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint for hooks; changes to it have no effect, because Paceline saves the model."""
        return {
            "state_dict": self.module.state_dict(),
            "epoch": self.trainer.epochs_done,
            "global_step": self.trainer.steps_done,
        }

    # --- hooks

    def _adopt(self, module: pl.LightningModule) -> None:
        module.trainer = self.trainer
        module.log = self.log
        module.all_gather = partial(_no_gather, type(module).__name__)

    def _hook(self, name: str, *arguments: Any) -> dict[str, float]:
        """Call a hook of the callbacks and of the module; return the values for the loggers.

        At an epoch's end, callbacks that monitor a metric come last: the module's hook may log it.
        """
        self._logged = {}
        last = name.endswith("_epoch_end")
        waiting = [each for each in self.trainer.callbacks if last and getattr(each, "monitor", None)]
        with self._in(name):
            for callback in self.trainer.callbacks:
                if callback not in waiting:
                    self._call(callback, name, *arguments)
            getattr(self.module, name)(*arguments)
            for callback in waiting:
                self._call(callback, name, *arguments)
        return {name: float(entry.value) for name, entry in self._logged.items() if entry.to_logger}

    def _call(self, callback: pl.Callback, name: str, *arguments: Any) -> None:
        try:
            getattr(callback, name)(self.trainer, self.module, *arguments)
        except MisconfigurationException as error:
            remedy = "" if self.trainer.loggers else " The task's build_loggers returns the loggers."
            raise TaskError(f"the callback {type(callback).__name__}: {error}{remedy}") from error
        except RuntimeError as error:
            if not isinstance(callback, EarlyStopping) or callback.monitor in self.trainer.callback_metrics:
                raise
            raise TaskError(
                f"{error}. A value of training_step is there if it is logged with on_epoch=True."
            ) from error

    def _agreed(self, logged: dict[str, float], hook: str) -> dict[str, float]:
        """Return a hook's logged values, which must be equal on all ranks; note if any rank's callback stops."""
        assert self._group is not None
        answers = self._group.gather([{n: repr(v) for n, v in logged.items()}, bool(self.trainer.should_stop)])
        self.should_stop = any(stop for _, stop in answers)
        self.trainer.should_stop = self.should_stop
        for rank, (other, _) in enumerate(answers):
            different = sorted(n for n in {*logged, *other} if other.get(n) != answers[0][0].get(n))
            if different:
                raise TaskError(
                    f"{type(self.module).__name__}.{hook} logged another {different[0]!r} on rank {rank} "
                    "than on rank 0: it uses what each rank has seen by itself. Log in the step instead, or "
                    "use a torchmetrics object, which sees all."
                )
        return logged

    @contextmanager
    def _in(self, name: str) -> Iterator[None]:
        before, self._where = self._where, name
        try:
            yield
        finally:
            self._where = before


def _is_weights(value: Any, own: Collection[nn.Module]) -> bool:
    """Return whether a value is a module with parameters that is not one of the trained, or tensors by name."""
    if isinstance(value, nn.Module):
        return value not in own and any(True for _ in value.parameters())
    return isinstance(value, Mapping) and any(isinstance(each, torch.Tensor) for each in value.values())


def _inside(model: nn.Module) -> pl.LightningModule:
    """Return the LightningModule inside its wrappers (``DistributedDataParallel``, ``torch.compile``)."""
    return next(part for part in model.modules() if isinstance(part, pl.LightningModule))


def _called(model: nn.Module, module: pl.LightningModule, step: Any, arguments: tuple[Any, ...]) -> Any:
    """Call a step through what wraps the module, which must see each forward."""
    if model is module:
        return step(*arguments)

    def redirected(*given: Any) -> Any:
        del module.forward  # the step itself calls the module
        return step(*given)

    module.forward = redirected
    try:
        return model(*arguments)
    finally:
        module.__dict__.pop("forward", None)


def _no_gather(name: str, *arguments: Any, **options: Any) -> None:
    raise TaskError(
        f"{name}.all_gather: ranks may have different numbers of batches. Log a mean, or use a torchmetrics "
        "object, which sees all."
    )
