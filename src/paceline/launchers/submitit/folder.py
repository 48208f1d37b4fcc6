"""The folder that holds submitit's pickles: its owner's alone, since loading one runs code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.errors import ConfigError


def make_private(folder: Path) -> Path:
    """Make the folder with mode 0700, or check the one that is there; return its absolute path.

    Raises:
        ConfigError: it cannot be made, or others could write into it or read it.
    """
    folder = folder.expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}.") from error
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder whose pickles somebody else may have written.

    Raises:
        ConfigError: it is a link, another user's, or open to others.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot look at the folder {folder}: {error.strerror}.") from error
    why = "submitit keeps pickles there, and whoever can write one can run code as you"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is no directory, but a link or a file; {why}. Choose another folder.")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid}, not to you; {why}. Choose another folder."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{folder} is open to other users (mode {mode:o}); {why}. Close it: chmod 700 {folder}"
        )
