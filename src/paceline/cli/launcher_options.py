"""The launchers' own options as command-line flags, in a group for each launcher."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.config import RunConfig
from paceline.launchers.base import LAUNCHER_NAMES, get_launcher
from paceline.launchers.own_options import option_types

_COMMAND = ("paceline", "__main__.py")
_HERE = ("spawn", "torchrun")


def _make_options(*, without: frozenset[str] = frozenset()) -> Any:
    """A dataclass with a flag for each option of the launchers in question; None: it was not given."""
    helps: dict[str, tuple[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for name in in_question(sys.argv):
        options_type = get_launcher(name).options_type
        if options_type is None:
            continue
        types |= option_types(options_type)
        for f in dataclasses.fields(options_type):
            text, owners = helps.setdefault(f.name, (f.metadata["help"], []))
            owners.append(name)
    fields = []
    for name, (text, owners) in helps.items():
        if name in without:
            continue
        parameter = Parameter(help=text, group=f"--on {', '.join(owners)}", show_default=False, negative="")
        fields.append((name, Annotated[types[name] | None, parameter], dataclasses.field(default=None)))
    namespace = {"__module__": __name__, "__doc__": "The options that were given; None where one was not."}
    return dataclasses.make_dataclass(
        "LauncherOptions", fields, frozen=True, kw_only=True, namespace=namespace
    )


def in_question(argv: Sequence[str]) -> Sequence[str]:
    """The launchers whose options a command line may hold: importing all of them takes a command's time.

    Where it names its launcher, that one; else those that start processes on this machine.
    Whoever is no command line of ours, such as the documentation, sees all.
    """
    if Path(argv[0]).name not in _COMMAND or "--config" in argv:
        return LAUNCHER_NAMES
    words = [word for word in argv[1:] if word.startswith("--on=")]
    named = words[0].removeprefix("--on=") if words else dict(pairwise(argv)).get("--on")
    return (named,) if named in LAUNCHER_NAMES else _HERE


LauncherOptions = _make_options()

TaskLauncherOptions = _make_options(without=frozenset(RunConfig.__dataclass_fields__))
"""The same for tasks, whose own options have some of these names."""
