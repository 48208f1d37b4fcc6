"""The parts that a script has built, as a task: model, optimizers, data, and all else that is saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.core.errors import TaskError
from paceline.core.task import Task
from paceline.runs.checkpoint_state import scheduler_state
from paceline.training.state import move_scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScriptParts:
    """What a script gives to its run.

    Attributes:
        state: by name, what else lives from one step to the next.
        schedules: by name, the states as built of those that are learning-rate schedules.
        names: the names of the model's parameters as built, by identity.
        trained: the models that were given in training mode.
        hyperparameters: of each optimizer's groups as built, by the optimizer's name.
    """

    module: nn.Module
    optimizers: Mapping[str, Optimizer]
    dataset: Any
    state: Mapping[str, Any]
    schedules: Mapping[str, Any]
    collate: Callable[[list[Any]], Any] | None
    sample_weights: Any
    names: Mapping[int, str]
    trained: Sequence[nn.Module]
    hyperparameters: Mapping[str, list[dict[str, Any]]]


@dataclass
class OwnLoop(Task):
    """The task of a script that has a loop of its own."""

    script: str = ""
    parts: InitVar[ScriptParts | None] = None

    def __post_init__(self, parts: ScriptParts | None) -> None:
        self._given = parts
        self._in_eval_mode = frozenset(() if parts is None else _in_eval_mode(parts.module))
        self._before: dict[str, Any] | None = None  # what a body may change before its first pass, as it began
        self._hyperparameters = {} if parts is None else parts.hyperparameters
        if parts is not None and parts.collate is not None:
            self.__dict__["collate"] = parts.collate  # rows of tensors are read at once where it is torch's own

    @property
    def _parts(self) -> ScriptParts:
        if self._given is None:
            raise TaskError(
                f"this run is of the loop in {self.script}, which builds the model itself. To continue it, start that "
                "script again, as it was started first; its weights: paceline.load(RUN, model=...)."
            )
        return self._given

    def build_model(self) -> nn.Module:
        return self._parts.module

    def build_dataset(self, split: str) -> Any:
        return self._parts.dataset if split == "train" else None

    def sample_weights(self, dataset: Any) -> Any:
        return self._parts.sample_weights

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        parts, placed = self._parts, dict(model.named_parameters())
        for optimizer in parts.optimizers.values():
            for group in optimizer.param_groups:
                # Under fsdp the model has other parameters than those with which the optimizer was built.
                group["params"] = [placed[parts.names[id(parameter)]] for parameter in group["params"]]
        return parts.optimizers

    def train_step(self, step: object) -> float | None:
        raise TaskError("the script computes its steps itself.")

    def state_dict(self) -> dict[str, Any]:
        if self._before is not None:
            return self._before
        parts = self._parts
        state = {name: scheduler_state(part) for name, part in parts.state.items()}
        return {"state": state, "eval": _in_eval_mode(parts.module), "hyperparameters": self._hyperparameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_eval_mode = frozenset(state["eval"])
        for name, part in self._parts.state.items():
            if name not in state["state"]:
                raise ValueError(f"it has no state[{name!r}], with which the script did not begin the run")
            part.load_state_dict(state["state"][name])
        for name, groups in state.get("groups", {}).items():
            for group, values in zip(self._parts.optimizers[name].param_groups, groups, strict=True):
                group.update(values)
        self._hyperparameters = state.get("hyperparameters", self._hyperparameters)

    def begin_fork(self) -> None:
        """Take the hyperparameters and schedules that the script builds, these at the steps of the checkpoint."""
        parts = self._parts
        self._hyperparameters = parts.hyperparameters
        for label, as_built in parts.schedules.items():
            schedule = parts.state[label]
            if not isinstance(schedule, ReduceLROnPlateau):  # which follows a metric, not the steps
                saved = schedule.state_dict()
                schedule.load_state_dict(as_built)
                move_scheduler(schedule, saved, 0)

    def warn_of_other_hyperparameters(self) -> None:
        """Say what the script builds in another way now, since the run keeps what its checkpoint has."""
        changes = [
            f"{label}: {name} {before.get(name)} -> {value}"
            for label, groups in self._parts.hyperparameters.items()
            for before, now in zip(self._hyperparameters.get(label, ()), groups, strict=False)
            for name, value in now.items()
            if before.get(name, value) != value
        ]
        if changes:
            _log.warning(
                "the script builds an optimizer with other hyperparameters than when the run began (%s); the run keeps "
                "those of its checkpoint. To change them, set them in the loop: optimizer.param_groups[0]['lr'] = ...",
                ", ".join(changes),
            )

    def begin_body(self) -> None:
        """Keep what the script may change before the first pass, for the case that a rank is lost in that.

        The weights are not among it: they change after the pass.
        """
        groups = {
            label: [{name: value for name, value in group.items() if name != "params"} for group in built.param_groups]
            for label, built in self._parts.optimizers.items()
        }
        self._before = deepcopy({**self.state_dict(), "groups": groups})

    def end_body(self) -> None:
        self._before = None

    def note_modes(self) -> None:
        """Note the mode that the script has given to each module, before the next group."""
        self._in_eval_mode = frozenset(_in_eval_mode(self._parts.module))

    def restore_modes(self) -> None:
        """Give each module the mode that the script has given it: a frozen layer stays in evaluation mode."""
        for name, module in self._parts.module.named_modules():
            module.training = name not in self._in_eval_mode


def _in_eval_mode(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


def as_parts(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    dataset: Any,
    state: Mapping[str, Any],
    collate: Callable[[list[Any]], Any] | None,
    sample_weights: Any,
) -> ScriptParts:
    """Put the parts together.

    Raises:
        TaskError: an optimizer has stepped before, or has a parameter that the model has not; an object of ``state``
            cannot be saved.
    """
    if isinstance(dataset, DataLoader):
        raise TaskError(
            "the run reads the samples itself, in an order that continues exactly: give it the loader's dataset, and "
            "collate= and sample_weights= if the loader has a collate_fn or a WeightedRandomSampler."
        )
    if not isinstance(optimizer, Optimizer | Mapping):
        raise TaskError(f"optimizer is a {type(optimizer).__name__}; give one optimizer, or several by name in a dict.")
    module = model if isinstance(model, nn.Module) else nn.ModuleDict(dict(model))
    optimizers = {"main": optimizer} if isinstance(optimizer, Optimizer) else dict(optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for label, built in optimizers.items():
        if built.state:
            raise TaskError(
                f"the optimizer {label!r} has stepped before. Give the run one that is new: it loads what the run "
                "saved by itself."
            )
        if any(id(parameter) not in names for group in built.param_groups for parameter in group["params"]):
            raise TaskError(f"the optimizer {label!r} has a parameter that is not one of the run's model.")
    for label, part in state.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TaskError(
                f"state[{label!r}] is a {type(part).__name__}, which has no state_dict and load_state_dict: the run "
                "cannot save it."
            )
    trained = [each for each in ([model] if isinstance(model, nn.Module) else model.values()) if each.training]
    schedules = {label: deepcopy(part.state_dict()) for label, part in state.items() if isinstance(part, LRScheduler)}
    hyperparameters = {label: [_plain(group) for group in built.param_groups] for label, built in optimizers.items()}
    return ScriptParts(
        module, optimizers, dataset, dict(state), schedules, collate, sample_weights, names, trained, hyperparameters
    )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters that are numbers, or lists of them, as a checkpoint gives them back."""
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
    return {name: value for name, value in listed.items() if name != "params" and isinstance(value, int | float | list)}
