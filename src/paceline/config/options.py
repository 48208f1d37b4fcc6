"""What an option of a run is: a field with a help text, and how its value is checked."""

from __future__ import annotations

import types
import typing
from dataclasses import field
from typing import Any, Literal

from paceline.errors import ConfigError


def option(default: Any, help: str, *, group: str, of: tuple[str, ...] = ()) -> Any:
    """A field of an options class.

    Args:
        default: its value where it is not given.
        help: what ``--help`` says of it.
        group: the heading that it stands under there.
        of: the strategies that it belongs to, where it has no meaning beside others.
    """
    return field(default=default, metadata={"help": help, "group": group, "of": of})


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def at_least(name: str, value: int, low: int) -> None:
    """Refuse a smaller value.

    Raises:
        ConfigError: it is smaller.
    """
    if value < low:
        raise ConfigError(f"{flag(name)} must be at least {low}, but is {value}.")


_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of the annotated type.

    Raises:
        ConfigError: says what it must be.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return
        elif typing.get_origin(option) is tuple:
            if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
                return
        elif isinstance(value, bool):
            if option is bool:
                return
        elif isinstance(value, int | float if option is float else option):
            return
    wanted: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            wanted += [str(choice) for choice in typing.get_args(option)]
        elif option is not type(None):
            wanted.append(_IN_WORDS.get(option, str(option)))
    choices = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if wanted[:-1] else wanted)
    raise ConfigError(f"{flag(name)} must be {choices}, but is {value!r}.")
