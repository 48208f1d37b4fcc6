"""Tokens of 32 random bytes, in hexadecimal digits, in files that only their owner can read. No torch."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import ConfigError

TOKEN_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * TOKEN_BYTES))


def create_token(path: Path) -> bytes:
    """Create a token file with mode 0600, and return the token: 32 random bytes.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"the token file {path} already exists. Use it, or remove it first.") from None
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be created: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(token.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"the token file {path} cannot be written: {error.strerror}.") from error
    return token


def read_token(path: Path) -> bytes:
    """Return the token in a file, which only this user may be able to read.

    Raises:
        ConfigError: the file is missing, not regular, another user's, readable by others, or malformed.
    """
    try:
        # Opening and reading must not block, whatever kind of file it is.
        content = read_checked(path, 2 * TOKEN_BYTES + 2, _check_private, os.O_NONBLOCK).removesuffix(b"\n")
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read: {error.strerror}. "
            "Copy it from the node that started the run, with its mode 0600."
        ) from error
    if not _HEX.fullmatch(content):
        raise ConfigError(
            f"the token file {path} must contain {2 * TOKEN_BYTES} hexadecimal digits, but does not. "
            "Copy it again from the node that started the run."
        )
    return bytes.fromhex(content.decode())


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the token file {path} is not a regular file.")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the token file {path} belongs to user {status.st_uid}, but this is user {os.geteuid()}. Use a copy of "
            f"your own{', on a disk that lets root own files (no root squash)' if os.geteuid() == 0 else ''}."
        )
    if mode != 0o600:
        raise ConfigError(
            f"the token file {path} has mode {mode:04o}, but must have 0600, so that no other user can read "
            f"it. Run: chmod 600 {path}"
        )


def read_checked(path: Path, most: int, check: Callable[[Path, os.stat_result], None], flags: int = 0) -> bytes:
    """Return at most ``most`` bytes of a file, once ``check`` has taken what it is, as opened with further ``flags``.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        check(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)
