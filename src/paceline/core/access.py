"""Access to a server: loopback addresses, and tokens in files that only their owner can read. No torch."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""What a browser on this node may call a server, in the header ``Host``."""

_SHORTEST_BEARER_TOKEN = 16
_MAX_TOKENS_BYTES = 2**20

log = logging.getLogger("paceline.access")


def is_loopback(host: str) -> bool:
    """Return whether an address is this node's own; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_cross_site(host: str, origin: str | None, fetch_site: str | None) -> bool:
    """Return whether a browser sent a request for a page of another site.

    ``Sec-Fetch-Site`` decides where the browser sends it, since a proxy may change the host's name; otherwise
    ``Origin`` must name the requested host. Programs other than browsers send neither. The rule is that of Go's
    ``http.CrossOriginProtection``: https://words.filippo.io/csrf/

    Args:
        host: the header ``Host``.
        origin: the header ``Origin``, if any.
        fetch_site: the header ``Sec-Fetch-Site``, if any.
    """
    if fetch_site is not None:
        return fetch_site not in ("same-origin", "none")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:  # no browser sends this
        return True


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
            f"the token file {path} belongs to user {status.st_uid}, but this is user {os.geteuid()}. Use a copy of "
            f"your own{', on a disk that lets root own files (no root squash)' if os.geteuid() == 0 else ''}."
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
    if not _is_bearer_token(token):
        raise ConfigError(
            f"--token-file {path} must hold one token of at least {_SHORTEST_BEARER_TOKEN} letters and digits. "
            f"Make one: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


_RELOAD_S = 1.0
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class BearerTokens:
    """The tokens that a server accepts, read again when their file changes.

    Each line of the file is a token, or a client's name and its token; empty lines and those that begin with ``#`` do
    not count. If the changed file is invalid, the last valid tokens stay, and a message says so.

    Args:
        path: the file, which only its owner may read.

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


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _read_bearer_tokens(path: Path) -> dict[str, str]:
    """Return the name of each token."""
    try:
        text = _read(path, _MAX_TOKENS_BYTES, _check_closed, os.O_NONBLOCK).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error.strerror}.") from error
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
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
        raise ConfigError(
            f"--token-file {path} must hold a token of at least {_SHORTEST_BEARER_TOKEN} letters and digits. "
            f"Make one: (umask 077; openssl rand -hex 32 > {path})"
        )
    return names


def _is_bearer_token(token: str) -> bool:
    return len(token) >= _SHORTEST_BEARER_TOKEN and token.isprintable() and " " not in token and "\ufffd" not in token


def _check_closed(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"--token-file {path} is not a regular file.")
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
