"""A task class in one line, whose fields are the arguments of the module and the datamodule."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from paceline.adapters.lightning.task import LightningTask
from paceline.errors import TaskError
from paceline.task import Defaults

_PLAIN = (bool, int, float, str, list, tuple)


def task(
    module: type[pl.LightningModule],
    datamodule: type[pl.LightningDataModule] | None = None,
    *,
    name: str,
    callbacks: Callable[[], Sequence[pl.Callback]] | None = None,
    loggers: Callable[[Path], Sequence[Any]] | None = None,
    defaults: Defaults | None = None,
) -> type[LightningTask]:
    """Return the task class of a LightningModule class; assign it to ``name`` at the top level of a file.

    Its fields are the arguments of both ``__init__`` that have a number, text or list as their default or
    annotation; one that both have is one field.

    Args:
        module: the LightningModule's class.
        datamodule: the class that has the loaders, if that is not the module itself.
        name: what it is assigned to, and so what comes after ``file.py:``.
        callbacks: returns the callbacks.
        loggers: returns the loggers, of the run's directory.
        defaults: what it recommends for its runs.

    Raises:
        TaskError: an argument without a default has no type that ``--set`` could give it.
    """
    kinds = [kind for kind in (module, datamodule) if kind is not None]
    arguments = {kind: _arguments(kind) for kind in kinds}
    fields: dict[str, Any] = {}
    for kind in kinds:
        for field_name, (hint, default) in arguments[kind].items():
            known = fields.setdefault(field_name, (hint, default))
            if known != (hint, default):
                raise TaskError(
                    f"{module.__name__} and {kind.__name__} both have {field_name!r}, with other types or "
                    "defaults. Write a LightningTask, which can tell them apart."
                )

    def build(kind: type[Any]) -> Callable[[LightningTask], Any]:
        return lambda self: kind(**{each: getattr(self, each) for each in arguments[kind]})

    namespace: dict[str, Any] = {"build_module": build(module), "__doc__": module.__doc__}
    if defaults is not None:
        namespace["defaults"] = defaults
    if datamodule is not None:
        namespace["build_datamodule"] = build(datamodule)
    if callbacks is not None:
        namespace["build_callbacks"] = lambda self: list(callbacks())
    if loggers is not None:
        namespace["build_loggers"] = lambda self, directory: list(loggers(directory))
    required = [(n, hint) for n, (hint, default) in fields.items() if default is inspect.Parameter.empty]
    optional = [
        (n, hint, dataclasses.field(default_factory=partial(copy.copy, default)))
        for n, (hint, default) in fields.items()
        if default is not inspect.Parameter.empty
    ]
    every: list[Any] = [*required, *optional]
    made = dataclasses.make_dataclass(name, every, bases=(LightningTask,), namespace=namespace)
    made.__module__ = sys._getframe(1).f_globals["__name__"]
    return made


def _arguments(kind: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Those arguments of ``__init__`` that a field can hold: name -> type and default."""
    found = {}
    for parameter in inspect.signature(kind, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        hint, default = parameter.annotation, parameter.default
        required = default is parameter.empty
        if not required and default is not None and not isinstance(default, _PLAIN):
            continue  # it keeps its default
        if hint is parameter.empty:
            if required or default is None:
                raise TaskError(
                    f"{kind.__name__}.__init__: {parameter.name!r} has neither a type nor a default that "
                    "tells it. Annotate it, or write a LightningTask."
                )
            hint = type(default)
        if hasattr(LightningTask, parameter.name):
            raise TaskError(
                f"{kind.__name__}.__init__: {parameter.name!r} is also something that every task has. "
                "Rename the argument, or write a LightningTask with a field of another name."
            )
        found[parameter.name] = (hint, default)
    return found
