"""The options that a launcher has of its own: which there are, and of which types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.config import flag
from paceline.errors import ConfigError
from paceline.launchers import names

if TYPE_CHECKING:
    from paceline.launchers.base import Launcher


def make_options(launcher: Launcher, given: Mapping[str, Any]) -> Any:
    """The launcher's options, of those that were given.

    Raises:
        ConfigError: one is not this launcher's; the message names those that are.
    """
    known = option_names(launcher.name)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"--on {launcher.name} knows no {flag(name)}. {whose(flag(name))}--on {launcher.name} takes: "
                f"{own_flags(launcher.name)}."
            )
    return launcher.options_type(**given) if launcher.options_type else None


def whose(text: str) -> str:
    """A sentence that says which launchers have a flag, with a space after it; empty where none has."""
    owners = [name for name in names.LAUNCHER_NAMES if text in map(flag, option_names(name))]
    return f"{text} is an option of --on {' and '.join(owners)}. " if owners else ""


def option_names(name: str) -> tuple[str, ...]:
    """The names of a launcher's own options."""
    options = names.options_type(name)
    return tuple(f.name for f in dataclasses.fields(options)) if options else ()


def own_flags(name: str) -> str:
    """A launcher's own options as they are written, with commas."""
    return ", ".join(map(flag, option_names(name))) or "no options of its own"


def option_types(options_type: type) -> dict[str, Any]:
    """The type of each option, without None."""
    hints = typing.get_type_hints(options_type)
    plain = {}
    for name, hint in hints.items():
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            [hint] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        plain[name] = hint
    return plain
