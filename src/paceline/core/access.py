"""Access to a server: loopback addresses, and tokens in files that only their owner can read. No torch."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""What a browser on this node may call a server, in the header ``Host``."""

_SHORTEST_BEARER_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Return whether an address is this node's own; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_same_token(given: str | bytes, expected: str | bytes) -> bool:
    """Compare what a client sent with the token; this takes the same time wherever they differ."""
    texts = (text if isinstance(text, bytes) else text.encode(errors="replace") for text in (given, expected))
    return hmac.compare_digest(*texts)


# --- A token that a node makes: 32 random bytes, in hexadecimal digits ---


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
        content = _read(path, 2 * TOKEN_BYTES + 2, _check_private, os.O_NONBLOCK).removesuffix(b"\n")
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
            f"the token file {path} belongs to user {status.st_uid}, but this is user {os.geteuid()}. "
            "Use a copy of your own."
        )
    if mode != 0o600:
        raise ConfigError(
            f"the token file {path} has mode {mode:04o}, but must have 0600, so that no other user can read "
            f"it. Run: chmod 600 {path}"
        )


# --- A token that a user chose, for HTTP ---


def read_bearer_token(path: Path) -> str:
    """Read the token of an HTTP client, of any letters, from a file that only its owner may read.

    Raises:
        ConfigError: others may read it, or it holds no token.
    """
    try:
        content = _read(path, 4096, _check_closed)
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error.strerror}.") from error
    token = content.decode("ascii", "replace").strip()
    if len(token) < _SHORTEST_BEARER_TOKEN or not token.isprintable() or " " in token or "�" in token:
        raise ConfigError(
            f"--token-file {path} must hold one token of at least {_SHORTEST_BEARER_TOKEN} letters and digits. "
            f"Make one: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


def _check_closed(path: Path, status: os.stat_result) -> None:
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"--token-file {path} can be read by others. Say: chmod 600 {path}")


def _read(path: Path, most: int, check: Callable[[Path, os.stat_result], None], flags: int = 0) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        check(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)
