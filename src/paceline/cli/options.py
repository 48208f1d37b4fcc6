"""The options of a run as command-line flags, made from :class:`~paceline.core.config.RunConfig`'s fields."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated, Any

from cyclopts import Group, Parameter

from paceline.core.config import RunConfig

ARGUMENTS, COMMON = "Arguments", "Common"
GROUPS = (
    *("Task", "Training", "Data", "Evaluation", "Run directory and checkpoints", "Output"),
    *("Processes", "Parallelism", "Recovery", "Memory", "Fine-tuning", "Job"),
    *("FSDP", "Tensor", "Pipeline", "Parameter server", "Local SGD and compression"),
    *("DataParallel", "DeepSpeed"),
    *("Requests", "Replicas", "Program", "Swap"),
)
"""The groups that ``--help`` leaves out: a run's and then a server's, in the order of ``--help-all``.

The launchers' own options come after them.
"""

COMMON_OF_TRAIN = (
    *("set", "epochs", "max_steps", "global_batch_size", "precision", "seed"),
    *("nproc", "nodes", "on", "strategy", "device", "checkpoint_every"),
)
"""What nearly everybody uses, in the order of ``paceline train --help``; the command adds three."""

_NOT_FLAGS = ("task", "run_dir")


@functools.cache
def group(name: str, index: int = 0) -> Group:
    """A group of options, which knows its place among the others.

    Args:
        name: its heading.
        index: its place among those that only one command has.
    """
    if name == ARGUMENTS:
        return Group.create_default_arguments(name)
    if name == COMMON:
        place = 0
    elif name in GROUPS:
        place = 2 + GROUPS.index(name)
    else:
        place = 2 + len(GROUPS) if name.startswith("--on ") else 1
    return Group(name, sort_key=(place, index))


@functools.cache
def run_options(*, without: tuple[str, ...] = (), common: tuple[str, ...] = ()) -> Any:
    """A dataclass with a flag for each option; None says that it was not given.

    Args:
        without: options that a command has no use for.
        common: options that its ``--help`` shows, in this order.
    """
    hints = typing.get_type_hints(RunConfig)
    place = {name: index for index, name in enumerate(common)}
    fields = []
    for f in sorted(dataclasses.fields(RunConfig), key=lambda f: place.get(f.name, len(place))):
        if f.name in (*_NOT_FLAGS, *without):
            continue
        help_text = f.metadata["help"]
        if f.default is not None and f.default is not False and f.default != ():
            shown = " ".join(f.default) if isinstance(f.default, tuple) else f.default
            help_text += f" [default: {shown}]"
        panel = group(COMMON if f.name in place else f.metadata["group"])
        parameter = Parameter(help=help_text, group=panel, show_default=False, negative="")
        fields.append((f.name, Annotated[hints[f.name] | None, parameter], dataclasses.field(default=None)))
    return options_class("Options", fields)


def options_class(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """A dataclass of the options that are given; no more of one than that, for each method takes time."""
    namespace = {"__module__": __name__, "__doc__": "The options that were given; None where one was not."}
    return dataclasses.make_dataclass(name, fields, kw_only=True, repr=False, eq=False, namespace=namespace)


def explicit_options(options: Any) -> dict[str, Any]:
    """The options that were given on the command line, as far as they differ from a default."""
    if options is None:
        return {}
    values = {f.name: (getattr(options, f.name), f.default) for f in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}
