"""Parameters chosen by name, with ``*`` for any text: frozen ones, and those with a learning rate of their own."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import ConfigError, join_names
from paceline.torch_internals import NormBase
from paceline.training.optim import LR_FACTOR


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern names a parameter: by its own name, or by that of a layer around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def require_match(option: str, pattern: str, module: nn.Module, others: Iterable[str] = ()) -> None:
    """Refuse a pattern that names nothing in a model."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if any(matches(pattern, name) for name in (*parameters, *others)):
        return
    layers = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters())]
    near = difflib.get_close_matches(pattern.removesuffix(".*"), [*layers, *parameters], n=3, cutoff=0.5)
    hint = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"Its layers with parameters: {join_names(layers or parameters)}."
    )
    raise ConfigError(f"{option} {pattern}: nothing in the model has such a name. {hint}")


# --- ``--freeze`` ---


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters, and the statistics of batch norms whose parameters are all frozen.

    Such a batch norm stays in evaluation mode, as everywhere in the field: it normalises with the statistics
    that it has (https://keras.io/guides/transfer_learning).
    """
    for pattern in patterns:
        require_match("--freeze", pattern, module, others=module.state_dict())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if any(matches(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    for name, layer in module.named_modules():
        if isinstance(layer, NormBase) and _keeps_statistics(name, layer, patterns):
            # On the module itself: Module.train() of what holds it asks each part.
            object.__setattr__(layer, "train", types.MethodType(_stays_in_evaluation, layer))
            layer.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"--freeze {' --freeze '.join(patterns)} leaves nothing to train.")


def _keeps_statistics(name: str, layer: nn.Module, patterns: Sequence[str]) -> bool:
    """Return whether all parameters of a batch norm are frozen, or it has none and its statistics are named."""
    own = [entry for entry, _ in layer.named_parameters()] or list(layer.state_dict())
    return bool(own) and all(any(matches(p, f"{name}.{entry}") for p in patterns) for entry in own)


def _stays_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(layer, False)


# --- ``--lr-scale`` ---


def scale_lr(optimizers: Mapping[str, Optimizer], module: nn.Module, scales: Sequence[tuple[str, float]]) -> None:
    """Divide the optimizers' parameter groups so that each has one factor, and note it in the group.

    The group's ``lr`` stays what the task and its schedulers make of it, since a schedule such as
    ``OneCycleLR`` sets it for all groups alike; the factor comes in with :func:`scaled_lr`.

    Args:
        scales: the values of ``--lr-scale``, as pattern and factor; the last one that matches counts.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    factors: dict[int, float] = {}
    for pattern, factor in scales:
        require_match("--lr-scale", pattern, module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if matches(pattern, name):
                factors[id(parameter)] = factor
    for optimizer in optimizers.values():
        for group in list(optimizer.param_groups):
            _divide(optimizer, group, factors)


def _divide(optimizer: Optimizer, group: dict[str, Any], factors: Mapping[int, float]) -> None:
    indices_of: dict[float, list[int]] = {}
    for index, parameter in enumerate(group["params"]):
        indices_of.setdefault(factors.get(id(parameter), 1.0), []).append(index)
    lists: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
    shared = {key: value for key, value in group.items() if key not in lists}
    for number, (factor, indices) in enumerate(indices_of.items()):
        part = {key: [values[index] for index in indices] for key, values in lists.items()}
        if number == 0:
            group.update({**part, LR_FACTOR: factor})
        elif "param_names" in part:
            named = list(zip(part["param_names"], part["params"], strict=True))
            optimizer.add_param_group({**shared, "params": named, LR_FACTOR: factor})
        else:
            optimizer.add_param_group({**shared, **part, LR_FACTOR: factor})
