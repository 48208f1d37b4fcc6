"""The launchers' own options as command-line flags, in one group per launcher."""

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
from paceline.core.config import all_options
from paceline.core.plugins import plugin_names
from paceline.launch import registry
from paceline.launch.registry import option_types

_COMMAND = ("paceline", "__main__.py")
_LOCAL_LAUNCHERS = ("spawn", "torchrun")


@functools.cache
def launchers_options(*, for_tasks: bool = False) -> Any:
    """Return a dataclass with a flag for each option of the relevant launchers; None means not given.

    Args:
        for_tasks: leave out options that every task has too.
    """
    helps: dict[str, tuple[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for name in relevant_launchers(sys.argv):
        options_type = registry.options_type(name)
        if options_type is None:
            continue
        types |= option_types(options_type)
        for f in dataclasses.fields(options_type):
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
    command line, such as in the documentation, they are all of Paceline's own launchers.
    """
    if Path(argv[0]).name not in _COMMAND:
        return registry.LAUNCHER_NAMES
    words = [word for word in argv[1:] if word.startswith("--on=")]
    named = words[0].removeprefix("--on=") if words else dict(pairwise(argv)).get("--on")
    ours = tuple(name for name in registry.LAUNCHER_NAMES if name == named or "--config" in argv)  # which may name any
    is_named = named is not None and named not in registry.LAUNCHER_NAMES
    plugins = tuple(name for name in plugin_names("paceline.launchers") if name == named) if is_named else ()
    return (*ours, *plugins) or _LOCAL_LAUNCHERS
