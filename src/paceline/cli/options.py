"""The options of a run as command-line flags, derived from the groups of options."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

from cyclopts import Group, Parameter

from paceline.core.config import all_options

ARGUMENTS, COMMON = "Arguments", "Common"
GROUPS = (
    *("Task", "Training", "Data", "Evaluation", "Run directory and checkpoints", "Output"),
    *("Processes", "Parallelism", "Recovery", "Memory", "Fine-tuning", "Job"),
    *("FSDP", "Tensor", "Pipeline", "Parameter server", "Local SGD and compression"),
    *("DataParallel", "DeepSpeed"),
    *("Requests", "Replicas", "Program", "Swap"),
)
"""The groups that ``--help`` omits, in the order of ``--help-all``: a run's, then a server's, then the launchers'."""

COMMON_OF_TRAIN = (
    *("set", "epochs", "max_steps", "global_batch_size", "precision", "seed"),
    *("nproc", "nodes", "on", "strategy", "device", "checkpoint_every"),
)
"""The most used options, in the order of ``paceline train --help``; the command adds three."""

_NOT_FLAGS = ("task", "run_dir")


@functools.cache
def group(name: str, index: int = 0) -> Group:
    """Return the group of options with that name, sorted by ``index`` among those that only one command has."""
    if name == ARGUMENTS:
        return Group.create_default_arguments(name)
    if name == COMMON:
        order = 0
    elif name in GROUPS:
        order = 2 + GROUPS.index(name)
    else:
        order = 2 + len(GROUPS) if name.startswith("--on ") else 1
    return Group(name, sort_key=(order, index))


@functools.cache
def run_options(*, without: tuple[str, ...] = (), common: tuple[str, ...] = ()) -> Any:
    """Return a dataclass with a flag for each option of a run; None means not given.

    Args:
        without: options to leave out.
        common: options that the command's ``--help`` shows, in this order.
    """
    order = {name: index for index, name in enumerate(common)}
    fields = []
    for name, its in sorted(all_options().items(), key=lambda item: order.get(item[0], len(order))):
        if name in (*_NOT_FLAGS, *without):
            continue
        help_text = its.help
        if its.default is not None and its.default is not False and its.default != ():
            shown = " ".join(its.default) if isinstance(its.default, tuple) else its.default
            help_text += f" [default: {shown}]"
        panel = group(COMMON if name in order else its.group)
        parameter = Parameter(help=help_text, group=panel, show_default=False, negative="")
        fields.append((name, Annotated[its.type | None, parameter], dataclasses.field(default=None)))
    return options_class("Options", fields)


def options_class(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """Make a dataclass of options, without the methods that it does not need: each takes time."""
    namespace = {"__module__": __name__, "__doc__": "Explicit options; None means not given."}
    return dataclasses.make_dataclass(name, fields, kw_only=True, repr=False, eq=False, namespace=namespace)


def explicit_options(options: Any) -> dict[str, Any]:
    """Return the options given on the command line that differ from their default."""
    if options is None:
        return {}
    values = {f.name: (getattr(options, f.name), f.default) for f in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}
