"""A LightningModule in training: its hooks, callbacks and loggers, called at the points of Paceline's run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torchmetrics import Metric

from paceline.adapters.lightning.logged import Entry, StepLog, checked
from paceline.adapters.lightning.metrics import MetricTaps, named
from paceline.adapters.lightning.optimizers import Schedulers, configured_optimizer
from paceline.adapters.lightning.refusals import refuse_callbacks, refuse_hooks
from paceline.adapters.lightning.trainer import RunTrainer
from paceline.callback import BatchPlace, Callback, Group, Horizon
from paceline.errors import TaskError

_NOWHERE = BatchPlace(split="train", step=0, number=0, samples=0)
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}
_PREFIXES = {"val": "on_validation", "test": "on_test"}


class Session(Callback):
    """One state's module, from its building on.

    Args:
        module: what is trained.
        datamodule: where the data come from, or None.
        given: the callbacks.
        build_loggers: makes the loggers, of the run's directory.

    Attributes:
        module: what is trained.
        taps: its metrics.
        place: where the next batch stands.

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
        self.module, self._datamodule = module, datamodule
        self._build_loggers = build_loggers
        configured = module.configure_callbacks()
        own = list(configured) if isinstance(configured, list | tuple) else [configured]
        # As in Lightning: one of the module takes the place of one of its kind.
        given = [callback for callback in given if type(callback) not in {type(each) for each in own}]
        refuse_callbacks([*given, *own])
        self.trainer = RunTrainer(module, datamodule, [*given, *own])
        if datamodule is not None:
            datamodule.trainer = self.trainer
        self.place = _NOWHERE
        self.schedulers = Schedulers([])
        self._log = StepLog()
        self._group: Group | None = None
        self._where: str | None = None
        self._logged: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}
        self._step_values: dict[str, float] = {}
        self._to_loggers: dict[str, float] = {}
        self._of_hooks: dict[str, float] = {}
        self._closed = False
        self._rank_before = rank_zero_only.rank
        self._adopt(module)
        # At setup they decide after what they look at the metric, of a trainer that has no plan yet.
        self._undecided = [
            callback
            for callback in self.trainer.callbacks
            if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None
        ]
        self._hook("setup", "fit")
        module.configure_model()
        self.taps = MetricTaps(module)

    def __deepcopy__(self, memo: Any) -> Session:
        return self  # a module's copy logs here too

    # --- the parts

    def optimizer(self) -> torch.optim.Optimizer:
        """What ``configure_optimizers`` returns, its schedulers apart."""
        optimizer, configs = configured_optimizer(self.module)
        self.schedulers = Schedulers(configs)
        strategy = self.trainer.strategy
        strategy.optimizers, strategy.lr_scheduler_configs = [optimizer], configs
        return optimizer

    def plan(self, horizon: Horizon) -> None:
        """The run goes on so long, and is evaluated so often."""
        self.trainer.plan(horizon)
        for callback in self._undecided:
            callback._check_on_train_epoch_end = self.trainer.validates_each_epoch

    # --- batches

    def run_step(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, Entry], dict[str, Any]]:
        """Run the step that belongs to the batch's place: what it returns, logs, and gives to metrics.

        Args:
            model: the module, also wrapped, or a copy of it.
            batch: on its device.
        """
        module = _inside(model)
        name = _STEPS[self.place.split]
        self._logged = {}
        self.taps.begin_batch()
        # Hooks of the datamodule come first, as in Lightning.
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            owner = self._datamodule if _overrides(hook, self._datamodule) else module
            batch = getattr(owner, hook)(batch, 0)
        step = getattr(module, name)
        number = (
            self.trainer.fit_loop.epoch_loop.batch_idx if self.place.split == "train" else self.place.number
        )
        arguments = (batch, number)[: 1 if len(inspect.signature(step).parameters) == 1 else 2]
        with self._in(name):
            try:
                output = _called(model, module, step, arguments)
            finally:
                calls = self.taps.end_batch()
        return output, self._logged, calls

    def train_batch(self, model: nn.Module, batch: Any) -> Any:
        """``training_step``'s output; what it logs is kept until the step is reduced."""
        output, logged, _ = self.run_step(model, batch)
        if self.place.samples:
            for name, entry in logged.items():
                self._log.add(name, self.place.number, entry)
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
        """``LightningModule.log``; the others of its arguments say how ranks are to agree, which they do."""
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
                raise TaskError(f"self.log({name!r}): the metric is no attribute of the module.")
            if self._where in ("validation_step", "test_step"):
                self._aliases[name] = path
                return
            value = self.taps.batch_value(path) if in_step else value.compute()
        weight = float(batch_size or self.place.samples or 1)
        entry = Entry(checked(name, value), weight, on_step, on_epoch, to_logger=logger is not False)
        self._logged[name] = entry
        if self._where not in _STEPS.values():
            # In a hook: callbacks may look at it at once.
            self.trainer.note({name: float(entry.value)}, to_loggers={}, step=0)

    # --- points of the run

    def attach(self, group: Group, *, step: int, epoch: int) -> None:
        first = self._group is None
        self._group = group
        self.trainer.take_place(group)
        self.trainer.stand_at(step=step, epoch=epoch)
        if not first:
            return
        self.trainer.loggers = list(self._build_loggers(group.directory))
        for logger in self.trainer.loggers:
            if self.module.hparams:
                logger.log_hyperparams(self.module.hparams)
        self._hook("on_fit_start")
        self._hook("on_train_start")

    def epoch_begins(self, epoch: int) -> None:
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch)
        self._hook("on_train_epoch_start")

    def step_begins(self, step: int, step_in_epoch: int) -> None:
        self.trainer.stand_at(step=step, epoch=self.trainer.epochs_done, batches=step_in_epoch + 1)
        self.schedulers.batch_idx = step_in_epoch
        self._of_hooks = self._hook("on_before_zero_grad", *self.trainer.optimizers)
        self._of_hooks |= self._hook("on_train_batch_start", None, step_in_epoch)

    def step_reduced(self, *, due: bool) -> Mapping[str, float]:
        assert self._group is not None
        first = self.trainer.steps_done == 0
        self._step_values, self._to_loggers = self._log.reduce(self._group.gather, due=due, first=first)
        if not due:
            self._step_values, self._to_loggers = {}, {}
        return self._step_values

    def gradients_ready(self) -> None:
        self._of_hooks |= self._hook("on_after_backward")
        self._of_hooks |= self._hook("on_before_optimizer_step", *self.trainer.optimizers)

    def step_done(self, step: int, loss: float) -> None:
        outputs = {"loss": torch.tensor(loss)}
        number = self.trainer.fit_loop.epoch_loop.batch_idx
        self._of_hooks |= self._hook("on_train_batch_end", outputs, None, number)
        due = bool(self._step_values) or step % self.trainer.log_every_n_steps == 0
        to_loggers = {**self._to_loggers, **self._of_hooks} if due else {}
        self.trainer.note(self._step_values, to_loggers=to_loggers, step=step - 1)
        self.trainer.stand_at(step=step, epoch=self.trainer.epochs_done, batches=number + 1)

    def epoch_ends(self, epoch: int) -> None:
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch)
        means, to_loggers = self._log.end_epoch()
        step = self.trainer.steps_done - 1
        self.trainer.note(means, to_loggers=to_loggers, step=step)
        logged = self._agreed(self._hook("on_train_epoch_end"), "on_train_epoch_end")
        self.trainer.note({}, to_loggers=logged, step=step)
        self.schedulers.epoch_ends(epoch, self.trainer.callback_metrics)
        self.trainer.stand_at(step=self.trainer.steps_done, epoch=epoch + 1)

    def evaluation_begins(self, split: str, module: nn.Module) -> None:
        copied = _inside(module)
        if copied is not self.module:
            self._adopt(copied)
            self.taps.share(copied)
        self._aliases = {}
        with self.trainer.stage(split):
            self._hook(f"{_PREFIXES[split]}_start")
            self._hook(f"{_PREFIXES[split]}_epoch_start")

    def evaluated(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        assert self._group is not None
        # A rank without a block has not seen what is logged.
        aliases = {
            name: path for of_rank in self._group.gather(self._aliases) for name, path in of_rank.items()
        }
        final = named(metrics, aliases)
        self.trainer.note(final, to_loggers=final, step=self.trainer.steps_done)
        with self.trainer.stage(split):
            hook = f"{_PREFIXES[split]}_epoch_end"
            logged = self._agreed(self._hook(hook), hook)
            self.trainer.note({}, to_loggers=logged, step=self.trainer.steps_done)
            self._agreed(self._hook(f"{_PREFIXES[split]}_end"), f"{_PREFIXES[split]}_end")
        return final | logged

    def fit_ends(self) -> None:
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
        self.module.on_save_checkpoint(checkpoint)
        for callback in self.trainer.callbacks:
            callback.on_save_checkpoint(self.trainer, self.module, checkpoint)
        return {
            "log": self._log.state_dict(),
            "metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "checkpoint": {key: value for key, value in checkpoint.items() if key not in kept_anyway},
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

    def _checkpoint(self) -> dict[str, Any]:
        """What hooks expect to find; changing it changes nothing, for Paceline saves the model."""
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
        """Call a hook of the callbacks and of the module; return what loggers are to write.

        At an epoch's end, callbacks that monitor a metric come last: the module's hook may log it.
        """
        self._logged = {}
        last = name.endswith("_epoch_end")
        waiting = [each for each in self.trainer.callbacks if last and getattr(each, "monitor", None)]
        with self._in(name):
            for callback in self.trainer.callbacks:
                if callback not in waiting:
                    getattr(callback, name)(self.trainer, self.module, *arguments)
            getattr(self.module, name)(*arguments)
            for callback in waiting:
                getattr(callback, name)(self.trainer, self.module, *arguments)
        return {name: float(entry.value) for name, entry in self._logged.items() if entry.to_logger}

    def _agreed(self, logged: dict[str, float], hook: str) -> dict[str, float]:
        """What a hook logged, if all ranks did alike; and whether a callback on any rank wants to stop.

        Raises:
            TaskError: they did not: the hook used what each rank has seen by itself.
        """
        assert self._group is not None
        answers = self._group.gather(
            [{n: repr(v) for n, v in logged.items()}, bool(self.trainer.should_stop)]
        )
        self.should_stop = self.trainer.should_stop = any(stop for _, stop in answers)
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


def _overrides(hook: str, owner: Any) -> bool:
    return owner is not None and bool(is_overridden(hook, owner))


def _inside(model: nn.Module) -> pl.LightningModule:
    """The LightningModule in what wraps it (``DistributedDataParallel``, ``torch.compile``)."""
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
