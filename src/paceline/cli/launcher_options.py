"""The launchers' own options as command-line flags, in a group for each launcher."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import group, options_class
from paceline.core.config import RunConfig
from paceline.core.plugins import plugin_names
from paceline.launch import registry
from paceline.launch.registry import option_types

_COMMAND = ("paceline", "__main__.py")
_HERE = ("spawn", "torchrun")


@functools.cache
def launchers_options(*, for_tasks: bool = False) -> Any:
    """A dataclass with a flag for each option of the launchers in question; None: it was not given.

    Args:
        for_tasks: leave out those that are a task's options too.
    """
    helps: dict[str, tuple[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for name in in_question(sys.argv):
        options_type = registry.options_type(name)
        if options_type is None:
            continue
        types |= option_types(options_type)
        for f in dataclasses.fields(options_type):
            text, owners = helps.setdefault(f.name, (f.metadata["help"], []))
            owners.append(name)
    fields = []
    for name, (text, owners) in helps.items():
        if for_tasks and name in RunConfig.__dataclass_fields__:
            continue
        parameter = Parameter(help=text, group=group(f"--on {', '.join(owners)}"), show_default=False, negative="")
        fields.append((name, Annotated[types[name] | None, parameter], dataclasses.field(default=None)))
    return options_class("LauncherOptions", fields)


def in_question(argv: Sequence[str]) -> Sequence[str]:
    """The launchers whose options a command line may hold: importing all of them takes a command's time.

    Where it names its launcher, that one; else those that start processes on this machine.
    What is no command line of ours, such as the documentation, sees all of ours.
    """
    if Path(argv[0]).name not in _COMMAND:
        return registry.LAUNCHER_NAMES
    words = [word for word in argv[1:] if word.startswith("--on=")]
    named = words[0].removeprefix("--on=") if words else dict(pairwise(argv)).get("--on")
    ours = tuple(name for name in registry.LAUNCHER_NAMES if name == named or "--config" in argv)  # which may name any
    is_named = named is not None and named not in registry.LAUNCHER_NAMES
    plugins = tuple(name for name in plugin_names("paceline.launchers") if name == named) if is_named else ()
    return (*ours, *plugins) or _HERE
