"""Options as command-line flags: those of a run, of a job, and of launchers, derived from where they are defined."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from paceline.core.config import all_options
from paceline.core.plugins import plugin_names
from paceline.launch.launcher import LAUNCHER_NAMES
from paceline.launch.options import JobOptions, installed_launchers, option_types, options_type

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


# --- Options of a job, and of launchers, in one group for each launcher ---


@functools.cache
def job_options() -> Any:
    """Return a dataclass with a flag for each option of a job; None means not given."""
    types, fields = option_types(JobOptions), []
    for f in dataclasses.fields(JobOptions):
        parameter = Parameter(help=f.metadata["help"], group=group("Job"), show_default=False, negative="")
        fields.append((f.name, Annotated[types[f.name] | None, parameter], dataclasses.field(default=None)))
    return options_class("JobFlags", fields)


@functools.cache
def launchers_options(*, for_tasks: bool = False) -> Any:
    """Return a dataclass with a flag for each option of the relevant launchers; None means not given.

    Args:
        for_tasks: leave out options that every task has too.
    """
    helps: dict[str, tuple[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for name in relevant_launchers(sys.argv):
        its = options_type(name)
        if its is None:
            continue
        types |= option_types(its)
        for f in dataclasses.fields(its):
            text, owners = helps.setdefault(f.name, (f.metadata["help"], []))
            owners.append(name)
    fields = []
    for name, (text, owners) in helps.items():
        if for_tasks and name in all_options():
            continue
        parameter = Parameter(help=text, group=group(f"--on {', '.join(owners)}"), show_default=False, negative="")
        fields.append((name, Annotated[types[name] | None, parameter], dataclasses.field(default=None)))
    return options_class("LauncherOptions", fields)


def relevant_launchers(argv: Sequence[str]) -> Sequence[str]:
    """Return the launchers whose options a command line may contain, since importing all of them is slow.

    These are the launcher of ``--on``, or else those that start processes on this machine. Outside of the
    command line, such as in the documentation, they are all of Paceline's own launchers that are installed.
    """
    if Path(argv[0]).name not in ("paceline", "__main__.py"):
        return installed_launchers()
    words = [word for word in argv[1:] if word.startswith("--on=")]
    named = words[0].removeprefix("--on=") if words else dict(pairwise(argv)).get("--on")
    which = installed_launchers() if "--config" in argv else ()  # a file may name any
    ours = tuple(name for name in LAUNCHER_NAMES if name == named or name in which)
    is_named = named is not None and named not in LAUNCHER_NAMES
    plugins = tuple(name for name in plugin_names("paceline.launchers") if name == named) if is_named else ()
    return (*ours, *plugins) or ("spawn", "torchrun")
