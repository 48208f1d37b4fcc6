"""Launchers, strategies, trackers and tasks by name: ours in one table, others' as entry points.

Another installed distribution adds a name by an entry point in one of these groups. Our own names are looked up in the
table alone, so they cost no reading of metadata, and no distribution can take them over.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NewType

from paceline.core.built_in import BUILT_IN, PACKAGES, Group
from paceline.core.errors import ConfigError, PacelineError

LauncherPlugin = NewType("LauncherPlugin", str)
StrategyPlugin = NewType("StrategyPlugin", str)

_RESERVED = "auto"
"""A value of ``--on`` and ``--strategy`` that is not a name; no plug-in may use it."""


def names_type(group: Group, plugin: Any) -> Any:
    """Return the type of an option whose values are auto, our names of a group, and those of other distributions."""
    return Literal.__getitem__((_RESERVED, *BUILT_IN[group])) | plugin


GROUP_OF_TYPE: Mapping[Any, Group] = {
    LauncherPlugin: "paceline.launchers",
    StrategyPlugin: "paceline.strategies",
}
"""The group in which an option of this type finds names other than ours."""

_NOUNS: Mapping[Group, str] = {
    "paceline.launchers": "launcher",
    "paceline.strategies": "strategy",
    "paceline.trackers": "tracker",
    "paceline.tasks": "task",
}


@dataclass(frozen=True)
class Plugin:
    """An entry point of another distribution.

    Attributes:
        name: its name on the command line.
        reference: ``module:Class``.
        distribution: whose it is: its name and version.
    """

    group: Group
    name: str
    reference: str
    distribution: str

    @property
    def is_hidden(self) -> bool:
        """Whether the name is one of ours, which is then meant."""
        return self.name in BUILT_IN[self.group] or self.name == _RESERVED

    def __str__(self) -> str:
        return f"{_NOUNS[self.group]} {self.name!r} ({self.reference}) of {self.distribution}"


@functools.cache
def find_plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins of other distributions, in the order of their names, without importing them."""
    # Not at the top: the import takes 50 ms and the search 20, which no command with names of ours alone waits for.
    from importlib.metadata import entry_points

    found = []
    for group in BUILT_IN:
        for entry in entry_points(group=group):
            distribution = (
                "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
            )
            found.append(Plugin(group, entry.name, entry.value, distribution))
    return tuple(sorted(found, key=lambda plugin: (plugin.group, plugin.name, plugin.distribution)))


def plugin_names(group: Group) -> tuple[str, ...]:
    """Return the names that other distributions add to ours."""
    return tuple(dict.fromkeys(each.name for each in find_plugins() if each.group == group and not each.is_hidden))


def all_names(group: Group) -> tuple[str, ...]:
    """Ours, and those that other distributions add."""
    return (*BUILT_IN[group], *plugin_names(group))


def find_plugin(group: Group, name: str) -> Plugin | None:
    """Return the plug-in of this name; None if no distribution registers it, or it is one of ours.

    Raises:
        ConfigError: it is registered twice.
    """
    found = [each for each in find_plugins() if (each.group, each.name) == (group, name) and not each.is_hidden]
    if len(found) > 1:
        raise ConfigError(
            f"the {_NOUNS[group]} {name!r} is registered twice: by "
            f"{' and by '.join(f'{each.distribution} ({each.reference})' for each in found)}. Uninstall one of them."
        )
    return found[0] if found else None


def load(group: Group, name: str, requirement: str, is_met: Callable[[Any], bool]) -> Any:
    """Return the class of a name.

    Args:
        group: the group to search.
        name: its name on the command line.
        requirement: the kind of object that a plug-in must provide, for the message.

    Raises:
        ConfigError: there is none of this name, or the plug-in's cannot be imported, or is of another kind.
    """
    if name in BUILT_IN[group]:
        return import_object(BUILT_IN[group][name])
    plugin = find_plugin(group, name)
    if plugin is None:
        raise ConfigError(f"there is no {_NOUNS[group]} {name!r}. Choose one of: {', '.join(all_names(group))}.")
    try:
        found = import_object(plugin.reference)
    except Exception as error:  # another's module, which may fail in any way
        raise ConfigError(
            f"the {plugin} cannot be imported: {type(error).__name__}: {error}. Repair or uninstall it."
        ) from error
    if not is_met(found):
        raise ConfigError(f"the {plugin} must be {requirement}, and is not. Repair or uninstall it.")
    return found


def import_object(reference: str) -> Any:
    """Import the object of ``module:name``.

    Raises:
        ConfigError: it is in a part of Paceline that is not installed here.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name in PACKAGES:
            raise missing_part(error) from error
        raise


def has_part(reference: str) -> bool:
    """Return whether the package of ``module:name`` is installed: the core alone has no plug-ins."""
    return importlib.util.find_spec(reference.partition(".")[0]) is not None


def missing_part(error: ModuleNotFoundError) -> ConfigError:
    """Return what to do where a plug-in of ours is not installed."""
    return ConfigError(
        f"this needs {error.name}, a part of Paceline that is not installed here. Install all of it, in a checkout of "
        "Paceline: pip install ."
    )


def install_command(extra: str) -> str:
    """Return the command that installs the libraries of an extra of Paceline, in the versions that it supports.

    They are named one by one, because no package index has Paceline yet: pip would install what took its name there.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        parts = [line.partition(";") for line in requires("paceline") or []]
    except PackageNotFoundError:
        parts = []
    wanted = [f"'{library.strip()}'" for library, _, marker in parts if f"extra == '{extra}'" in marker]
    return " ".join(["pip install", *(wanted or [f"'.[{extra}]' in a checkout of Paceline"])])


def import_library(name: str, what: str, extra: str, error_type: type[PacelineError] = ConfigError) -> Any:
    """Import a module of another project.

    Args:
        what: needs it, for the message.
        extra: of Paceline, which has it; or the command that installs it.

    Raises:
        PacelineError: of ``error_type``; it cannot be imported. The message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing, why = error.name or name, " ".join(str(error).split())
        command = extra if extra.startswith("pip ") else install_command(extra)
        raise error_type(f"{what} needs {missing} ({why}). Install it: {command}") from error


# --- Which code is Paceline's own, in the core or in a plug-in, and not a task's or another library's ---


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Return the folders of Paceline's packages, each with a slash at its end."""
    return _folders(PACKAGES)


def is_own_file(file: str) -> bool:
    """Return whether a file is Paceline's, but not one of its tasks, which are as a user would write them."""
    return file.startswith(own_folders()) and not file.startswith(_task_folders())


@functools.cache
def _task_folders() -> tuple[str, ...]:
    return _folders({reference.partition(".")[0] for reference in BUILT_IN["paceline.tasks"].values()})


def _folders(packages: Iterable[str]) -> tuple[str, ...]:
    found = map(importlib.util.find_spec, packages)
    return tuple(f"{folder}/" for spec in found if spec is not None for folder in spec.submodule_search_locations or ())
