"""Sets of options by their classification, a run's configuration, and the merged options of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline.core.config import RunConfig, all_options
from paceline.core.errors import ConfigError
from paceline.core.option_values import flag
from paceline.core.options import Option


def select(predicate: Callable[[Option], bool]) -> tuple[str, ...]:
    """Return the names of the options that satisfy ``predicate``, in the order of the fields."""
    return tuple(name for name, its in all_options().items() if predicate(its))


# --- What a run computes ---


NOT_COMPARED = select(lambda its: its.scope in ("place", "task"))
"""Options that say where a run was, and the task, which a configuration names separately."""


def configuration(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that decides what a run computes, by name: the task, its fields and all options.

    A field that has the name of an option is ``task.NAME``.

    Args:
        manifest: the content of ``run.toml``.
    """
    task, config = manifest.get("task", {}), manifest.get("config", {})
    options = {name: value for name, value in config.items() if name not in NOT_COMPARED}
    fields = {f"task.{name}" if name in config else name: value for name, value in task.get("fields", {}).items()}
    return {"task": task.get("spec", ""), **fields, **options}


# --- The options of a resumed run: the current ones and those with which it was created ---


_LAYOUT = ("strategy", "mesh")


def resumed_options(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> dict[str, Any]:
    """Return the options of a resumed run; the arguments are those of :func:`merge_resumed_options`.

    Raises:
        ConfigError: an option that decides the model's bits was given another value.
    """
    require_unchanged(current, explicit, recorded)
    return merge_resumed_options(current, explicit, recorded)


def merge_resumed_options(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> dict[str, Any]:
    """Return all options of a resumed run, each merged as its ``resume`` says.

    Args:
        current: the current options: all of them, or only those that a command line names.
        explicit: the names of the options that the user set, even to the default.
        recorded: the options with which the run was created.
    """
    options = all_options()
    merged: dict[str, Any] = {}
    for name, its in options.items():
        now = current.get(name)
        if its.resume == "fresh" or (its.resume == "kept" and name in current):
            merged[name] = current.get(name, its.default)
        elif its.resume == "adjustable" and name in explicit and now is not None:
            merged[name] = now
        else:
            merged[name] = recorded.values[name]
    if inherited := set(select(lambda its: its.resume == "kept")) - current.keys():
        merged |= {name: options[name].default for name in _dropped(current, recorded) & inherited}
    for name, its in options.items():
        if its.resume not in ("kept", "adjustable") or its.requires is None or name in explicit:
            continue
        if not its.requires.is_met(merged[its.requires.option], options[its.requires.option].default):
            merged[name] = its.default
    return merged


def require_unchanged(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> None:
    """Reject a changed value of an option that is fixed at a run's creation.

    Args:
        current: the current options, including ``run_dir``.
        explicit: the names of the options that the user set, even to the default.
        recorded: the options with which the run was created.

    Raises:
        ConfigError: lists the options with both values.
    """
    conflicts = [
        f"  {flag(name)}: {before} when the run was created, {current[name]} now"
        for name in select(lambda its: its.resume == "fixed")
        if name in explicit and current[name] not in (before := recorded.values[name], "auto")
    ]
    if conflicts:
        raise ConfigError(
            f"{current['run_dir']} was created with other options, and a run's bits depend on them:\n"
            + "\n".join(conflicts)
            + "\nLeave them out to continue the run, or start a new one with another --run-dir DIR."
        )


def _dropped(current: Mapping[str, Any], recorded: RunConfig) -> set[str]:
    """Return the options that belong to the recorded strategy and do not apply to the current one."""
    if not current.keys() & set(_LAYOUT) and recorded.parallel.strategy != "single":
        return set()
    now = RunConfig(**{name: current[name] for name in _LAYOUT if name in current})
    return {*_LAYOUT, *now.inapplicable}
