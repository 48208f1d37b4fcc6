"""Tokens that a user chose for HTTP, in files that only their owner can read. No torch."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from pathlib import Path

from paceline.core.access import read_checked
from paceline.core.errors import ConfigError
from paceline.core.files import user_directory

_SHORTEST_BEARER_TOKEN = 16
_MAX_TOKENS_BYTES = 2**20

log = logging.getLogger("paceline.access")


def is_same_token(given: str | bytes, expected: str | bytes) -> bool:
    """Compare what a client sent with the token; this takes the same time wherever they differ."""
    texts = (text if isinstance(text, bytes) else text.encode(errors="replace") for text in (given, expected))
    return hmac.compare_digest(*texts)


def read_bearer_token(path: Path) -> str:
    """Read the token of an HTTP client, of any letters, from a file that only its owner may read.

    Raises:
        ConfigError: others may read it, or it holds no token.
    """
    token = _read(path).strip()
    if not _is_bearer_token(token):
        raise _no_token(path, "one token")
    return token


_RELOAD_S = 1.0
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class BearerTokens:
    """The tokens that a server accepts, read again when their file changes.

    Each line of the file is a token, or a client's name and its token; empty lines and those that begin with ``#`` do
    not count. If the changed file is invalid, the last valid tokens stay, and a message says so.

    Raises:
        ConfigError: others may read it, or a line holds no token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens = _read_bearer_tokens(path)
        self._stamp = _stamp_of(path)
        self._next_look = time.monotonic() + _RELOAD_S

    def client_of(self, token: bytes) -> str | None:
        """Return the name of the client that has this token, "" if it has no name; None if no client has it."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _RELOAD_S
            self._reload()
        # Compare with all, so that the time does not tell which one is close.
        found = [name for known, name in self._tokens.items() if is_same_token(token, known)]
        return found[0] if found else None

    def _reload(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = _read_bearer_tokens(self._path)
        except ConfigError as error:
            log.warning("the tokens of before stay valid: %s", error)
        else:
            log.info("--token-file %s has changed: %d tokens are valid", self._path, len(self._tokens))


def admin_token_path(port: int) -> Path:
    """Return the file with the token to change the models of this user's server at a port of this machine."""
    return user_directory("state") / f"serve-{port}.token"


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _read_bearer_tokens(path: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        *name, token = words
        if not _is_bearer_token(token) or len(name) > 1 or (name and not _CLIENT_NAME.fullmatch(name[0])):
            raise ConfigError(
                f"--token-file {path}, line {number} must be a token of at least {_SHORTEST_BEARER_TOKEN} letters and "
                "digits, or a name and a token. Make a token: openssl rand -hex 32"
            )
        names[token] = name[0] if name else ""
    if not names:
        raise _no_token(path, "a token")
    return names


def _read(path: Path) -> str:
    try:
        return read_checked(path, _MAX_TOKENS_BYTES, _check_closed, os.O_NONBLOCK).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error.strerror}.") from error


def _no_token(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"--token-file {path} must hold {what} of at least {_SHORTEST_BEARER_TOKEN} letters and digits. "
        f"Make one: (umask 077; openssl rand -hex 32 > {path})"
    )


def _is_bearer_token(token: str) -> bool:
    return len(token) >= _SHORTEST_BEARER_TOKEN and token.isprintable() and " " not in token and "\ufffd" not in token


def _check_closed(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"--token-file {path} is not a regular file.")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"--token-file {path} can be read by others. Say: chmod 600 {path}")
