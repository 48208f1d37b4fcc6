"""The secret that the agents of one run share, in a file that only its owner can read. No torch."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from paceline.core.errors import ConfigError

TOKEN_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * TOKEN_BYTES))


def create_token(path: Path) -> bytes:
    """Make a new token file, of mode 0600, and return the token: 32 random bytes.

    Raises:
        ConfigError: there is such a file already, or it cannot be written.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"the token file {path} exists already. Use it, or remove it first.") from None
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be made: {error.strerror}.") from error
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
    """The token in a file, which must be ours and closed to all others.

    Raises:
        ConfigError: it is missing, not a plain file, not ours, open to others, or holds no token.
    """
    try:
        # Whatever it is, opening and reading it must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read: {error.strerror}. "
            "Copy it from the node that started the run, with its mode 0600."
        ) from error
    try:
        _check(path, os.fstat(descriptor))
        content = os.read(descriptor, 2 * TOKEN_BYTES + 2).removesuffix(b"\n")
    finally:
        os.close(descriptor)
    if not _HEX.fullmatch(content):
        raise ConfigError(
            f"the token file {path} must hold {2 * TOKEN_BYTES} hexadecimal digits, and does not. "
            "Copy it again from the node that started the run."
        )
    return bytes.fromhex(content.decode())


def _check(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the token file {path} is not a plain file.")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the token file {path} belongs to user {status.st_uid}, and this is user {os.geteuid()}. "
            "Use a copy of your own."
        )
    if mode != 0o600:
        raise ConfigError(
            f"the token file {path} has mode {mode:04o}, and must have 0600, so that nobody else can read "
            f"it. Run: chmod 600 {path}"
        )
