"""Sets of options, by what each says of itself; and the options of a run that is continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.options import Classification, flag

# --- Sets of options, by what each option says of itself ---


CLASSIFICATIONS: dict[str, Classification] = {
    field.name: field.metadata["classification"] for field in dataclasses.fields(RunConfig)
}
"""What each option says of itself, in the order of the fields."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(RunConfig)}
"""The value of each option where it is not given."""


def select(wanted: Callable[[Classification], bool]) -> tuple[str, ...]:
    """The names of the options of which this is true, in the order of the fields."""
    return tuple(name for name, its in CLASSIFICATIONS.items() if wanted(its))


# --- The options of a run that is continued: those of now, and those with which it was created ---


_LAYOUT = ("strategy", "mesh")


def merge_resumed_config(asked: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> dict[str, Any]:
    """All options of a run that is continued, each as its ``resume`` says.

    Args:
        asked: the options of now: all of them, or only those that a command line names.
        explicit: the names of those that were given, be it with their default value.
        recorded: the options with which the run was created.
    """
    merged: dict[str, Any] = {}
    for name, its in CLASSIFICATIONS.items():
        now = asked.get(name)
        if its.resume == "fresh" or (its.resume == "kept" and name in asked):
            merged[name] = asked.get(name, DEFAULTS[name])
        elif its.resume == "adjustable" and name in explicit and now is not None:
            merged[name] = now
        else:
            merged[name] = getattr(recorded, name)
    if inherited := set(select(lambda its: its.resume == "kept")) - asked.keys():
        merged |= {name: DEFAULTS[name] for name in _dropped(asked, recorded) & inherited}
    for name in select(lambda its: its.resume in ("kept", "adjustable")):
        requires = CLASSIFICATIONS[name].requires
        if requires is None or name in explicit:
            continue
        if not requires.is_met(merged[requires.option], DEFAULTS[requires.option]):
            merged[name] = DEFAULTS[name]
    return merged


def require_unchanged(asked: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> None:
    """Refuse another value of an option that is fixed when a run is created.

    Args:
        asked: the options of now, ``run_dir`` among them.
        explicit: the names of those that were given, be it with their default value.
        recorded: the options with which the run was created.

    Raises:
        ConfigError: names the options, with both values.
    """
    conflicts = [
        f"  {flag(name)}: {before} when the run was created, {asked[name]} now"
        for name in select(lambda its: its.resume == "fixed")
        if name in explicit and asked[name] not in (before := getattr(recorded, name), "auto")
    ]
    if conflicts:
        raise ConfigError(
            f"{asked['run_dir']} was created with other options, and a run's bits depend on them:\n"
            + "\n".join(conflicts)
            + "\nLeave them out to continue the run, or start a new one with another --run-dir DIR."
        )


def _dropped(asked: Mapping[str, Any], recorded: RunConfig) -> set[str]:
    """The options that belong to the recorded strategy, where another one is asked for."""
    if not asked.keys() & set(_LAYOUT) and recorded.strategy != "single":
        return set()
    now = RunConfig(**{name: asked[name] for name in _LAYOUT if name in asked})
    return {*_LAYOUT, *now.inapplicable}
