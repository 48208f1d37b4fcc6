"""Launchers by name: their classes, and the options that each has of its own; none of ours is imported for these."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from paceline.core.built_in import BUILT_IN, LAUNCHER_OPTIONS
from paceline.core.errors import ConfigError
from paceline.core.options import flag
from paceline.core.plugins import import_object, load
from paceline.core.process_config import EnvStyle as EnvStyle
from paceline.core.process_config import RankLauncher as RankLauncher

if TYPE_CHECKING:
    from paceline.launch.launcher import Launcher


# --- The launchers' names, and where their classes and options are: ``--help`` needs these and no launcher


LAUNCHER_NAMES = tuple(BUILT_IN["paceline.launchers"])
"""What ``--on`` calls each launcher of ours."""


def load_launcher(name: str) -> type[Launcher]:
    """Import the class of a launcher, ours or a plug-in's.

    Raises:
        ConfigError: there is none of this name, or it is a plug-in that cannot be used; the message says why.
    """
    from paceline.launch.launcher import Launcher

    def is_launcher(found: object) -> bool:
        return (
            isinstance(found, type)
            and issubclass(found, Launcher)
            and getattr(found, "name", None) == name
            and (found.options_type is None or _are_options(found.options_type))
        )

    requirement = (
        f"a subclass of paceline.launch.launcher.Launcher whose `name` is {name!r}, and whose `options_type`, if any, "
        "is a dataclass of paceline.launch.launcher.option()"
    )
    launcher: type[Launcher] = load("paceline.launchers", name, requirement, is_launcher)
    return launcher


def _are_options(found: object) -> bool:
    return dataclasses.is_dataclass(found) and all("help" in field.metadata for field in dataclasses.fields(found))


def options_type(name: str) -> type | None:
    """Return the class of a launcher's own options, a frozen dataclass made of :func:`option`; None if it has none.

    Raises:
        ConfigError: it is neither one of our launchers nor a plug-in, or the plug-in cannot be used.
    """
    if name in LAUNCHER_OPTIONS:
        options: type = import_object(LAUNCHER_OPTIONS[name])
        return options
    return None if name in LAUNCHER_NAMES else load_launcher(name).options_type


def option(help: str, default: Any = None) -> Any:
    """Make a field of a launcher's options; its type may be str, int, float, bool or tuple[str, ...]."""
    return field(default=default, metadata={"help": help})


# --- The options that a launcher has of its own: which there are, and of which types ---


def make_options(launcher: Launcher, given: Mapping[str, Any]) -> Any:
    """Build the launcher's options from the given ones.

    Raises:
        ConfigError: one is not this launcher's; the message names those that are.
    """
    known = option_names(launcher.name)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{flag(name)} is not supported by --on {launcher.name}. {owners_of(flag(name))}"
                f"--on {launcher.name} takes: {own_flags(launcher.name)}."
            )
    options = options_type(launcher.name)
    return options(**given) if options is not None else None


def owners_of(text: str) -> str:
    """Return a sentence that names the launchers with a flag, with a space after it; empty if none has it."""
    owners = [name for name in LAUNCHER_NAMES if text in map(flag, option_names(name))]
    return f"{text} is an option of --on {' and '.join(owners)}. " if owners else ""


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of a launcher's own options."""
    options = options_type(name)
    return tuple(f.name for f in dataclasses.fields(options)) if options else ()


def own_flags(name: str) -> str:
    """Return the flags of a launcher's own options, joined with commas."""
    return ", ".join(map(flag, option_names(name))) or "no options of its own"


def option_types(options_type: type) -> dict[str, Any]:
    """Return the type of each option, without None."""
    hints = typing.get_type_hints(options_type)
    plain = {}
    for name, hint in hints.items():
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            [hint] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        plain[name] = hint
    return plain
