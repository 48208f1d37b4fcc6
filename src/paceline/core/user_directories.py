"""The folders that a user's commands keep for one another: in the home directory, where there is one."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paceline.core.errors import ConfigError

_log = logging.getLogger(__name__)
_PLACES = {
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "state": ("XDG_STATE_HOME", ".local/state"),
}


def user_directory(kind: Literal["cache", "config", "data", "state"]) -> Path:
    """Return the directory of the XDG specification, which may not exist yet.

    A container's user has often no entry in passwd, and no HOME or one that cannot be written: then the directory is a
    temporary one.

    Raises:
        ConfigError: the temporary one is not this user's alone.
    """
    variable, in_home = _PLACES[kind]
    # The XDG specification: a relative or empty path counts as not set.
    configured = Path(os.environ.get(variable, ""))
    if configured.is_absolute():
        return configured / "paceline"
    home = home_directory()
    if home is not None and _can_be_made(home / in_home / "paceline"):
        return home / in_home / "paceline"
    directory = private_directory()
    if kind in ("data", "state"):  # what is found again later; and a command's processes ask for the others
        _say(home, directory)
    return directory / kind


def home_directory() -> Path | None:
    """Return the home directory, if this user has one."""
    with suppress(RuntimeError):  # no HOME, and no entry in passwd
        return Path.home()
    return None


def private_directory() -> Path:
    """Make, if need be, and return the temporary directory that all of this user's commands know.

    Raises:
        ConfigError: other users can enter it, or it cannot be made.
    """
    directory = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}. Set TMPDIR.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory that only you can enter (mode 700), or other users could put their "
            "files in it. Remove it, or set TMPDIR."
        )
    return directory


def _can_be_made(directory: Path) -> bool:
    """Return whether a directory is there, or could be."""
    if os.path.exists(directory):  # Path.exists raises an error where a parent cannot be entered
        return True
    existing = next(parent for parent in directory.parents if os.path.exists(parent))
    return os.access(existing, os.W_OK | os.X_OK)


@functools.cache
def _say(home: Path | None, directory: Path) -> None:
    cause = "this user has no home directory" if home is None else f"the home directory {home} cannot be written"
    _log.warning(
        "%s: packages and records of jobs are kept in %s, which may go when this machine or container ends; set HOME "
        "to choose another place",
        cause,
        directory,
    )
