"""``paceline version``: print the versions of Paceline and its dependencies."""

from __future__ import annotations

import dataclasses
import json as json_module
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated

from cyclopts import Parameter

from paceline import __version__
from paceline.core.plugins import find_plugins


def version(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the versions of Paceline and its dependencies, and the installed plug-ins.

    Args:
        json: Print the versions as one line of JSON.
    """
    versions = {"paceline": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors"):
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    plugins = find_plugins()
    if json:
        print(json_module.dumps({**versions, "plugins": [dataclasses.asdict(plugin) for plugin in plugins]}))
        return 0
    print("\n".join(f"{name} {number}" for name, number in versions.items()))
    for plugin in plugins:
        print(f"plug-in: {plugin}" + (", not used: Paceline's own has the name" if plugin.is_hidden else ""))
    return 0
