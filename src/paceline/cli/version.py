"""``paceline version``."""

from __future__ import annotations

import json as json_module
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated

from cyclopts import Parameter

from paceline import __version__


def version(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the versions of Paceline and of what it builds on.

    Parameters
    ----------
    json
        Print them as one line of JSON.
    """
    versions = {"paceline": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors"):
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if json:
        print(json_module.dumps(versions))
    else:
        print("\n".join(f"{name} {number}" for name, number in versions.items()))
    return 0
