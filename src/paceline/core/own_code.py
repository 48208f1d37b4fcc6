"""Which code is Paceline's own, in the core or in a plug-in, and not a task's or another library's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

from paceline.core.built_in import BUILT_IN, PACKAGES


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Return the folders of Paceline's packages, each with a slash at its end."""
    return _folders(PACKAGES)


def is_own_file(file: str) -> bool:
    """Return whether a file is Paceline's, but not one of its tasks, which are as a user would write them."""
    return file.startswith(own_folders()) and not file.startswith(_task_folders())


@functools.cache
def _task_folders() -> tuple[str, ...]:
    return _folders({place.partition(".")[0] for place in BUILT_IN["paceline.tasks"].values()})


def _folders(packages: Iterable[str]) -> tuple[str, ...]:
    found = map(importlib.util.find_spec, packages)
    return tuple(f"{folder}/" for spec in found if spec is not None for folder in spec.submodule_search_locations or ())
