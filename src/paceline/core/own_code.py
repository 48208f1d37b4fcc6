"""Which code is Paceline's own, in the core or in a plug-in, and not a task's or another library's."""

from __future__ import annotations

import functools
import importlib.util

from paceline.core.built_in import PACKAGES


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Return the folders of Paceline's packages, each with a slash at its end."""
    found = (importlib.util.find_spec(package) for package in PACKAGES)
    return tuple(f"{folder}/" for spec in found if spec is not None for folder in spec.submodule_search_locations or ())


def is_own_file(file: str) -> bool:
    """Return whether a file is Paceline's, but not one of its tasks, which are as a user would write them."""
    return file.startswith(own_folders()) and "/paceline/training/tasks/" not in file
