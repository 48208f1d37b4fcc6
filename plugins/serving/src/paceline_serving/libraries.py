"""The libraries of the extra ``serve``, which a command names if they are missing."""

from __future__ import annotations

import importlib

from paceline.core.errors import ConfigError
from paceline.core.plugins import install_command


def require_libraries(command: str, *modules: str) -> None:
    """Import what a command needs.

    Raises:
        ConfigError: one is missing; the message says how to install it.
    """
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"paceline {command}: {error}. Install it: {install_command('serve')}") from error
