"""Learning rates that differ within a model: ``--lr-scale``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.config.fine_tuning import parse_lr_scale
from paceline.training.patterns import names, require_match

_KEY = "paceline_lr_scale"


def scale_rates(optimizers: Mapping[str, Optimizer], module: nn.Module, scales: Sequence[str]) -> None:
    """Divide the optimizers' parameter groups so that each has one factor, and note it in the group.

    The group's ``lr`` stays what the task and its schedulers make of it, since a schedule such as
    ``OneCycleLR`` sets it for all groups alike; the factor comes in with :func:`scaled`.

    Args:
        optimizers: as the task built them.
        module: the model.
        scales: the values of ``--lr-scale``; the last one that matches counts.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    factors: dict[int, float] = {}
    for text in scales:
        pattern, factor = parse_lr_scale(text)
        require_match("--lr-scale", pattern, module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if names(pattern, name):
                factors[id(parameter)] = factor
    for optimizer in optimizers.values():
        for group in list(optimizer.param_groups):
            _divide(optimizer, group, factors)


def _divide(optimizer: Optimizer, group: dict[str, Any], factors: Mapping[int, float]) -> None:
    members: dict[float, list[int]] = {}
    for index, parameter in enumerate(group["params"]):
        members.setdefault(factors.get(id(parameter), 1.0), []).append(index)
    lists: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
    shared = {key: value for key, value in group.items() if key not in lists}
    for number, (factor, indices) in enumerate(members.items()):
        part = {key: [values[index] for index in indices] for key, values in lists.items()}
        if number == 0:
            group.update({**part, _KEY: factor})
        elif "param_names" in part:
            named = list(zip(part["param_names"], part["params"], strict=True))
            optimizer.add_param_group({**shared, "params": named, _KEY: factor})
        else:
            optimizer.add_param_group({**shared, **part, _KEY: factor})


def rate(group: Mapping[str, Any]) -> Any:
    """The learning rate with which a group's parameters are updated."""
    return group["lr"] * group.get(_KEY, 1.0)


@contextmanager
def scaled(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Within, each group's ``lr`` is what updates its parameters; afterwards it is as before."""
    groups = [
        group
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        if group.get(_KEY, 1.0) != 1.0
    ]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = rate(group)
    try:
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
