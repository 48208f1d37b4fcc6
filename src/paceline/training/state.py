"""The complete state of a run: the parts that a task builds, and the content of a numbered checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.built_in import ENGINE_PARTS
from paceline.core.config import ResolvedConfig
from paceline.core.errors import CheckpointError, TaskError, join_names
from paceline.core.plugins import import_object
from paceline.core.task import Callback, RunSchedule, Task
from paceline.parallel.sharded_state import explain_sharded_step, load_module, load_optimizer, local_shard, memory_of
from paceline.runs.checkpoint_state import bytes_of, flatten, scheduler_state
from paceline.torch_internals import buffer_table, non_persistent_buffers
from paceline.training.hooks import build_preparation
from paceline.training.optim import (
    EMA,
    ShardedGradScaler,
    current_lr,
    group_names,
    is_numbered,
    named_state,
    numbered_state,
    require_shapes,
    scaled_lr,
    sort_parameters,
    sparse_gradients,
)

# --- The model, callback, optimizers and schedulers that a task builds; those that cannot be trained are refused ---


@contextmanager
def explain_missing_base(manifest: Mapping[str, Any]) -> Iterator[None]:
    """Add to a task's error where the frozen parameters were that a run has left out of its checkpoints."""
    try:
        yield
    except TaskError as error:
        base = manifest.get("base")
        if base is None or Path(base["address"]).exists():
            raise
        raise TaskError(
            f"{error}\nThe run's checkpoints hold what was trained; the frozen parameters are those of "
            f"{base['address']}, SHA-256 {base['sha256']}. Restore it there."
        ) from error


def build_task_model(task: Task, manifest: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """Build the task's model.

    Raises:
        TaskError: it is not a module, or has no parameter to train.
    """
    with explain_missing_base(manifest):
        module = task.build_model()
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a {type(module).__name__}; it must return a torch.nn.Module."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model without a trainable parameter: "
            "there is nothing to train."
        )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                f"{name!r} has a hook by register_post_accumulate_grad_hook, which would see the gradient of one "
                "micro-batch alone. Change a step's gradients in a callback's on_before_optimizer_step, or between "
                "backward and update."
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(f"{name!r} has no shape yet. Call the model with one batch in build_model.")
        if memory_of(tensor).numel() < tensor.numel():
            raise TaskError(
                f"{name!r} has elements that share memory, as expand() and unfold() make them, so it can be neither "
                "loaded nor changed. Register a copy, by contiguous()."
            )
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            # Autograd adds a sparse gradient entry by entry to the sum so far, so the sum of a row that occurs twice in
            # a micro-batch would depend on the micro-batches before it, and so on the number of ranks.
            layer.sparse = False
        if isinstance(layer, nn.SyncBatchNorm):
            raise TaskError(
                "nn.SyncBatchNorm takes the statistics of what the ranks compute at the moment, which depends on their "
                "number. Leave out convert_sync_batchnorm: Paceline averages the statistics over the micro-batches."
            )
    return module


def build_task_callback(task: Task, module: nn.Module, schedule: RunSchedule) -> Callback:
    """Build the task's callback; one that does nothing if it has none.

    Raises:
        TaskError: it is not a callback.
    """
    callback = task.build_callback(module, schedule)
    if callback is not None and not isinstance(callback, Callback):
        raise TaskError(
            f"{type(task).__name__}.build_callback returned a {type(callback).__name__}; it must return one "
            "paceline.Callback, or None."
        )
    return Callback() if callback is None else callback


def build_task_optimizers(task: Task, module: nn.Module) -> dict[str, Optimizer]:
    """Build the task's optimizers, by name; a single one is "main".

    Raises:
        TaskError: they are not optimizers, or train nothing.
    """
    built = task.build_optimizer(module)
    named = dict(built) if isinstance(built, Mapping) else {"main": built}
    for name, optimizer in named.items():
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"{type(task).__name__}.build_optimizer returned a {type(optimizer).__name__} for {name!r}; "
                "it must return a torch.optim.Optimizer, or a dict of them."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if (closure and closure.default is closure.empty) and type(task).train_step is Task.train_step:
            raise TaskError(
                f"{type(optimizer).__name__} computes the loss itself, within its step. Define train_step, with "
                "step.update(closure=lambda: step.backward(self.loss)), or use another optimizer."
            )
    if not named or not any(_trainable(optimizer) for optimizer in named.values()):
        raise TaskError(f"{type(task).__name__}.build_optimizer returned no optimizer with a trainable parameter.")
    return named


def _trainable(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def build_task_scheduler(task: Task, optimizer: Optimizer, total_steps: int | None) -> Any:
    """Build the task's scheduler of an optimizer; None if it has none.

    Raises:
        TaskError: it is not a scheduler, or needs the number of steps, which a stream does not have.
    """
    if total_steps is not None:
        scheduler = task.build_scheduler(optimizer, total_steps)
        missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
        if scheduler is not None and missing:
            raise TaskError(
                f"{type(task).__name__}.build_scheduler returned a {type(scheduler).__name__} without "
                f"{join_names(missing)}. Use a scheduler of torch.optim.lr_scheduler, such as LambdaLR, or add them."
            )
        return scheduler
    # Only what follows evaluations can do without the number of steps.
    needs = "a scheduler needs the number of steps, and a stream has no length. Give --max-steps."
    try:
        scheduler = task.build_scheduler(optimizer, 0)
    except (ValueError, ZeroDivisionError) as error:
        raise TaskError(f"{needs} (With 0 steps, build_scheduler fails: {error})") from error
    if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError(needs)
    return scheduler


# --- The state ---


PREFIXES = {"model": "", "ema": "module."}
"""The parts of a state that hold a model, with the texts before its names there."""


@dataclass
class TrainProgress:
    """Where a run stands; every change of it is a transition, and raises ``version`` by one.

    Attributes:
        version: the state's version; as a run is a pure function, it determines the state's bits.
        samples: samples seen, over all epochs.
        epoch_ended: a stream has no more data in this epoch.
        epochs_concluded: epochs for which the task's ``on_epoch_end`` was called.
        evaluated_step: the last step after which the model was evaluated.
        measured: what a script's own loop has measured of the model after the last step, until it is applied.
        best: the best validation value so far.
        best_step, best_version: step and state version of the best value.
        best_metrics: all validation metrics of that version.
        early_best, bad_evaluations: the early-stop metric's best, and evaluations since.
        stopped_early: early stopping has ended the run.
        data_fingerprint: a hash of some training samples, as the run's first step read them; 0 if unknown.
    """

    version: int = 0
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    epoch_ended: bool = False
    epochs_concluded: int = 0
    evaluated_step: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_version: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    early_best: float | None = None
    bad_evaluations: int = 0
    stopped_early: bool = False
    data_fingerprint: int = 0


class ChangedBuffers:
    """The non-persistent buffers that training changes: a part of the state, though not of ``state_dict``.

    Constant ones, such as masks, are built again instead.

    Args:
        module: the model as built, before training.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._built = {name: _digest(buffer) for name, buffer in _non_persistent_buffers(module)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return those that no longer have the values with which they were built, by name."""
        return {
            name: buffer
            for name, buffer in _non_persistent_buffers(self._module)
            if _digest(buffer) != self._built.get(name)
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what :meth:`state_dict` returned."""
        load_changed_buffers(self._module, state)


def load_changed_buffers(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a model's non-persistent buffers their saved values.

    Raises:
        KeyError, RuntimeError: the model has no such buffers.
    """
    buffers = dict(_non_persistent_buffers(module))
    for name, value in state.items():
        if not buffers[name].is_meta:  # another rank holds it
            buffers[name].copy_(value)


def _non_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        for name in sorted(non_persistent_buffers(owner)):
            if (buffer := buffer_table(owner).get(name)) is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _digest(buffer: torch.Tensor) -> bytes | None:
    return None if buffer.is_meta else hashlib.sha256(bytes_of(buffer)).digest()


def _copy(module: nn.Module) -> nn.Module:
    try:
        return deepcopy(module)
    except RuntimeError as error:
        if "deepcopy protocol" not in str(error):
            raise
        raise TaskError(
            "--ema needs a copy of the model, which cannot be copied: a module keeps a tensor that it computes from "
            "its weights, as torch.nn.utils.weight_norm does. Use torch.nn.utils.parametrizations.weight_norm instead."
        ) from error


class TrainingState:
    """The model and all that changes while it is trained.

    Args:
        task: builds optimizers and schedulers.
        module: the model, on its device.
        schedule: the run's length, for the schedulers.
        ema_model: a second model equal to ``module``, for the moving average; by default a copy.

    Attributes:
        parameters_of: the parameters that each optimizer updates, by the name of the optimizer.
        parameter_names: the names of the parameters of each of an optimizer's groups, by the name of the optimizer.
        changed_buffers: the changed buffers of the model, and those of its moving average.
        outer: steps when the ranks synchronise, where options ask for it; saved and loaded here.
        engine_parts: parts of a checkpoint that an engine has added, until the group's engine takes them over.
        base: the task's ``frozen_base``, without which checkpoints would hold the frozen parameters as well.

    Raises:
        TaskError: the task's optimizers or schedulers have a wrong type.
    """

    def __init__(
        self,
        task: Task,
        config: ResolvedConfig,
        module: nn.Module,
        device: torch.device,
        schedule: RunSchedule,
        ema_model: nn.Module | None = None,
    ) -> None:
        self._task = task
        self.module = module
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.frozen = frozen_parameters(module)
        self.base: Mapping[str, str] | None = None
        self.changed_buffers = {"buffers": ChangedBuffers(module)}
        self.callback = build_task_callback(task, module, schedule)
        self.optimizers = build_task_optimizers(task, module)
        self._as_built = {
            name: [{"params": list(group["params"])} for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }
        for name, optimizer in self.optimizers.items():
            sort_parameters(name, optimizer, module)
        self._preparation = build_preparation(config)
        self._preparation.divide_groups(self.optimizers, module)
        self.parameters_of = {
            name: [p for group in optimizer.param_groups for p in group["params"]]
            for name, optimizer in self.optimizers.items()
        }
        self.parameter_names = {name: group_names(optimizer, module) for name, optimizer in self.optimizers.items()}
        self.schedulers = {
            name: scheduler
            for name, optimizer in self.optimizers.items()
            if (scheduler := build_task_scheduler(task, optimizer, schedule.total_steps)) is not None
        }
        self.scaler = _gradient_scaler(config, device) if config.training.precision == "fp16" else None
        if self.scaler is not None:
            # It creates its tensors on the first scale(), and a rank may have no micro-batch in its first step.
            self.scaler.scale(torch.zeros((), device=device))
        self.ema: EMA | None = None
        if config.training.ema is not None:
            self.ema = EMA(_copy(module) if ema_model is None else ema_model, config.training.ema)
            self.changed_buffers["ema_buffers"] = ChangedBuffers(self.ema.module)
        self.outer: Any = None
        if (reference := config.changes.outer_optimizer) is not None:
            self.outer = import_object(reference)(module, config)
        self.engine_parts: dict[str, Any] = {}
        self.progress = TrainProgress()
        self._step_rates: list[Any] = []  # of the last step in this process

    @contextmanager
    def all_trainable(self) -> Iterator[None]:
        """Inside the context, set ``requires_grad`` on all initially trainable parameters, also those frozen since."""
        flags = [(parameter, parameter.requires_grad) for _, parameter in self._trained]
        for parameter, _ in flags:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _require_same_groups(self) -> None:
        for name, optimizer in self.optimizers.items():
            if len(optimizer.param_groups) != len(self.parameter_names[name]):
                raise TaskError(
                    f"the optimizer {name!r} got a parameter group during training (add_param_group), with which no "
                    "checkpoint could be loaded. Give it all groups in build_optimizer, first with lr=0."
                )

    @property
    def evaluated_module(self) -> nn.Module:
        """The weights that are evaluated: the moving average where there is one."""
        return self.module if self.ema is None else self.ema.module

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group, over all optimizers, as the last step took it."""
        return [float(rate) for rate in self._step_rates or self._current_rates()]

    def _current_rates(self) -> list[Any]:
        return [current_lr(group) for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss for backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self, clip: Callable[[], object] | None, *, finite: bool = True) -> None:
        """Apply the gradients: unscale, clip, step, and move schedules and average along.

        Args:
            clip: clips the gradients; None: nothing does.
            finite: whether the gradients of all ranks are; a scaler sees only this rank's part of them.
        """
        applied = True
        if self.scaler is not None:
            applied = self.scaler.unscale_all(self.optimizers.values(), finite=finite)
        self.apply_gradients(tuple(self.optimizers), clip)
        if self.scaler is not None:
            self.scaler.update()
        if applied:
            self.advance()

    def apply_gradients(
        self, names: Sequence[str], clip: Callable[[], object] | None, closure: Callable[[], float] | None = None
    ) -> None:
        """Clip the gradients, and step optimizers.

        Args:
            clip: clips the gradients; None: nothing does.
            closure: computes the loss and the gradients again, for optimizers that need it.
        """
        self._require_same_groups()
        self.callback.on_before_optimizer_step()
        if clip is not None:
            clip()
        self._step_rates = self._current_rates()
        optimizers = [self.optimizers[name] for name in names]
        with scaled_lr(self.optimizers), sparse_gradients(optimizers):
            for optimizer in optimizers:
                with explain_sharded_step(optimizer):
                    if self.scaler is not None:
                        self.scaler.step(optimizer)
                    elif closure is not None:
                        optimizer.step(closure)
                    else:
                        optimizer.step()

    def advance(self) -> None:
        """Move schedules and average along, at the end of a step."""
        for scheduler in self.schedulers.values():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.module)

    def step_plateaus(self, value: float) -> None:
        """Give an evaluation's result to the schedulers that wait for it."""
        for scheduler in self.schedulers.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything, by part; tensors are not copied.

        Raises:
            TaskError: it could not be loaded.
        """
        self._require_same_groups()
        state: dict[str, Any] = {
            "model": self.module.state_dict(),
            "optimizers": {
                name: named_state(optimizer.state_dict(), self.parameter_names[name])
                for name, optimizer in self.optimizers.items()
            },
            "schedulers": {name: scheduler_state(scheduler) for name, scheduler in self.schedulers.items()},
            "progress": dataclasses.asdict(self.progress),
            "callback": self.callback.state_dict(),
        }
        if untrained := [name for name, parameter in self._trained if not parameter.requires_grad]:
            state["untrained"] = untrained
        if task_state := self._task.state_dict():
            state["task"] = task_state
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        if self.outer is not None:
            state["outer"] = self.outer.state_dict()
        if self.base is not None:
            state["base"] = dict(self.base)
        return state | {name: buffers.state_dict() for name, buffers in self.changed_buffers.items()}

    def state_to_save(self) -> dict[str, Any]:
        """Return :meth:`state_dict` without what the base decides."""
        state = self.state_dict()
        if self.base is not None:
            for part in PREFIXES.keys() & state.keys():
                state[part] = {name: v for name, v in state[part].items() if name not in self.frozen[part]}
        return state

    def load_weights(self, part: str, state: Mapping[str, Any]) -> None:
        """Load the model (``model``) or its moving average (``ema``) from a state with or without frozen parameters."""
        module = (self.ema if part == "ema" else None) or self.module
        load_module(module, complete(state, part, module.state_dict(), self.frozen[part]))

    def describe_precision(self) -> list[str]:
        """Return a line about trained weights in half precision, which optimizers and sums follow."""
        dtypes = {str(p.dtype).removeprefix("torch.") for _, p in self._trained if p.dtype.itemsize < 4}
        if not dtypes:
            return []
        return [
            f"the model has trained weights in {' and '.join(sorted(dtypes))}: they, the optimizer's moments and the "
            "sums of gradients are in that precision, whatever --precision says. "
            "model.float() in build_model trains in fp32."
        ]

    def _require_loadable(self) -> None:
        """Reject a model that cannot load its own state, such as one with 4-bit weights of bitsandbytes."""
        state = self.module.state_dict()
        named = itertools.chain(
            self.module.named_parameters(remove_duplicate=False), self.module.named_buffers(remove_duplicate=False)
        )
        own = {name for name, _ in named}
        more = [name for name in state if name not in own and not name.endswith("_extra_state")]
        if not more:
            return
        try:
            self.module.load_state_dict(state)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise TaskError(
                f"the state_dict of the model has {more[0]!r}, which is not a parameter or buffer, and the model "
                f"cannot load it: {str(error).splitlines()[-1].strip()} No checkpoint could be resumed. Quantised "
                "weights have such states: train the model in bf16, or give its modules a load_state_dict that takes "
                "them."
            ) from error

    def require_storable(self) -> None:
        """Reject values of the task, its callback or its model that no checkpoint can hold, or none give back.

        Raises:
            TaskError: names the place.
        """
        self._require_loadable()
        for part, value in self.state_dict().items():
            if part in ("model", "ema"):
                # A pipeline's rank holds the other stages without values.
                there = {name: each for name, each in value.items() if not getattr(each, "is_meta", False)}
                value = {name: local_shard(each) for name, each in there.items()}
            elif part == "optimizers":
                value = {name: {"param_groups": of_one.get("param_groups")} for name, of_one in value.items()}
            try:
                flatten(value)
            except CheckpointError as error:
                raise TaskError(f"{part}: {error}") from error

    def load_state_dict(self, state: Mapping[str, Any], *, own_hyperparameters: bool = False) -> None:
        """Take over a state that :meth:`state_dict` gave.

        Args:
            own_hyperparameters: keep what the task has built, before any step: the hyperparameters of the optimizers
                (learning rate, weight decay, ...), and the schedulers, moved to the same step.

        Raises:
            CheckpointError: it is of another model, or of other optimizers.
        """
        try:
            state = {**state, "optimizers": self._numbered(state)}
            if own_hyperparameters:
                state = self._with_own_hyperparameters(state)
            self.load_weights("model", state)
            for optimizer, saved in _matched(self.optimizers, state["optimizers"]):
                load_optimizer(optimizer, saved)
            for scheduler, saved in _matched(self.schedulers, state["schedulers"]):
                scheduler.load_state_dict(saved)
            if self.scaler is not None:
                self.scaler.load_state_dict(state["scaler"])
            if self.ema is not None:
                self.load_weights("ema", state)
            if self.outer is not None and "outer" in state:
                self.outer.load_state_dict(state["outer"])
            untrained = set(state.get("untrained", ()))
            for name, parameter in self._trained:
                parameter.requires_grad_(name not in untrained)
            for name, buffers in self.changed_buffers.items():
                buffers.load_state_dict(state.get(name, {}))
            self.base = state.get("base")
            self.engine_parts = {name: state[name] for name in ENGINE_PARTS if name in state}
            self.progress = TrainProgress(**state["progress"])
            if own_hyperparameters:  # which another length may give more time to improve
                self.progress.stopped_early = False
                self.progress.bad_evaluations = 0
            self.callback.load_state_dict(state.get("callback", {}))
            if "task" in state:
                self._task.load_state_dict(state["task"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit the task as it is now: {error}\n"
                "If the task's code has changed since the run was created, "
                "start a new run with another --run-dir DIR."
            ) from error

    def _numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the optimizers as these take them."""
        _matched(self.optimizers, state["optimizers"])
        numbered = {}
        for name, saved in state["optimizers"].items():
            if is_numbered(saved):
                saved = named_state(saved, self._names_of_format_1(name))
                require_shapes(saved, state["model"])
            numbered[name] = numbered_state(name, saved, self.parameter_names[name])
        return numbered

    def _names_of_format_1(self, name: str) -> list[list[str]]:
        """Return the names of an optimizer's parameters in the order in which checkpoints of format 1 number them."""
        unsorted = SGD(self._as_built[name], lr=1.0)
        self._preparation.divide_groups({name: unsorted}, self.module)
        return group_names(unsorted, self.module)

    def _with_own_hyperparameters(self, state: Mapping[str, Any]) -> dict[str, Any]:
        optimizers, schedulers = dict(state["optimizers"]), {}
        for name, scheduler in self.schedulers.items():
            saved = state["schedulers"].get(name)  # other hyperparameters may add or remove a scheduler
            if isinstance(scheduler, ReduceLROnPlateau):  # which follows the evaluations, not the steps
                schedulers[name] = saved or scheduler_state(scheduler)
            else:
                move_scheduler(scheduler, saved, state["progress"]["step"])
                schedulers[name] = scheduler_state(scheduler)
        for name, optimizer in self.optimizers.items():
            groups = [
                {**saved, **{key: value for key, value in built.items() if key != "params"}}
                for saved, built in zip(optimizers[name]["param_groups"], optimizer.param_groups, strict=True)
            ]
            optimizers[name] = {**optimizers[name], "param_groups": groups}
        return {**state, "optimizers": optimizers, "schedulers": schedulers}


def require_base(base: Mapping[str, str] | None, recorded: Mapping[str, str]) -> None:
    """Require that a task's base is the recorded one.

    Raises:
        TaskError: it is another one.
    """
    now, then = ({"address": "nothing", "sha256": "", **(which or {})} for which in (base, recorded))
    if now["sha256"] != then["sha256"]:
        raise TaskError(
            f"the frozen parameters are not those of the run: it began with {then['address']}, SHA-256 "
            f"{then['sha256']}, and {now['address']} has {now['sha256']}. Restore the files, or start a new run."
        )


def frozen_parameters(module: nn.Module) -> dict[str, set[str]]:
    """Return the names of the parameters that are not trained, of tied ones all, by part of a state."""
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    return {part: {prefix + name for name in names} for part, prefix in PREFIXES.items()}


def complete(state: Mapping[str, Any], part: str, built: Mapping[str, Any], frozen: set[str]) -> dict[str, Any]:
    """Return a part of a state, with the parameters that a checkpoint leaves out.

    Args:
        built: this part of the state of the model as built.
        frozen: the names of the parameters that are not trained.
    """
    left_out = frozen & built.keys() if "base" in state else set()
    return {**{name: built[name] for name in left_out}, **state[part]}


def move_scheduler(scheduler: Any, saved: Mapping[str, Any] | None, steps: int) -> None:
    """Move a schedule that is as built to where another has come; one with ``move_to`` does so itself.

    Args:
        saved: the other's state; None: there was none.
        steps: of the run, for schedules that do not count their own.
    """
    if hasattr(scheduler, "move_to"):
        scheduler.move_to(saved, steps)
        return
    while saved and "last_epoch" not in saved and saved.get("_schedulers"):  # ChainedScheduler
        saved = saved["_schedulers"][0]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Detected call of `lr_scheduler.step", UserWarning
        )  # no optimizer has stepped
        for _ in range((saved or {}).get("last_epoch", steps)):
            scheduler.step()


def _matched(parts: Mapping[str, Any], states: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    if parts.keys() != states.keys():
        raise ValueError(f"it holds {', '.join(states) or 'none'}, the task builds {', '.join(parts) or 'none'}")
    return [(part, states[name]) for name, part in parts.items()]


def _gradient_scaler(config: ResolvedConfig, device: torch.device) -> ShardedGradScaler:
    # Losses are summed over a micro-batch, not averaged: start lower by its size, a power of two.
    microbatch_bits = (-(-config.global_batch_size // config.microbatches)).bit_length()
    return ShardedGradScaler(device.type, init_scale=2.0 ** (16 - microbatch_bits))
