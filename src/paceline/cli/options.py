"""The options of a run as command-line flags, made from :class:`~paceline.config.RunConfig`'s fields."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.config import RunConfig

_NOT_FLAGS = ("task", "run")


@functools.cache
def run_options(*, without: tuple[str, ...] = ()) -> Any:
    """A dataclass with a flag for each option; None says that it was not given.

    Args:
        without: options that a command has no use for.
    """
    hints = typing.get_type_hints(RunConfig)
    fields = []
    for f in dataclasses.fields(RunConfig):
        if f.name in (*_NOT_FLAGS, *without):
            continue
        help_text = f.metadata["help"]
        if f.default is not None and f.default is not False and f.default != ():
            shown = " ".join(f.default) if isinstance(f.default, tuple) else f.default
            help_text += f" [default: {shown}]"
        parameter = Parameter(help=help_text, group=f.metadata["group"], show_default=False, negative="")
        fields.append((f.name, Annotated[hints[f.name] | None, parameter], dataclasses.field(default=None)))
    return options_class("Options", fields)


def options_class(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """A dataclass of the options that are given; no more of one than that, for each method takes time."""
    namespace = {"__module__": __name__, "__doc__": "The options that were given; None where one was not."}
    return dataclasses.make_dataclass(name, fields, kw_only=True, repr=False, eq=False, namespace=namespace)


def given(options: Any) -> dict[str, Any]:
    """The options that were given on the command line, as far as they differ from a default."""
    if options is None:
        return {}
    values = {f.name: (getattr(options, f.name), f.default) for f in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}
