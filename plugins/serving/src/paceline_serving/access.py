"""Access control of a server: its clients' tokens, and operations reserved for this machine."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from paceline.core.access import read_checked
from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError
from paceline.core.files import user_directory
from paceline_serving.batching import RequestFailure

log = logging.getLogger("paceline.access")

_ORIGIN = re.compile(r"https?://[a-z0-9._-]+(:\d{1,5})?|https?://\[[0-9a-f:.]+\](:\d{1,5})?")
_ALLOWED_HEADERS = b"Authorization, Content-Type, Inference-Header-Content-Length, Request-Timeout-Ms"
_READABLE_HEADERS = b"Inference-Header-Content-Length, Retry-After"
_PREFLIGHT_S = b"600"  # how long a browser may keep the answer


def is_cross_site(host: str, origin: str | None, fetch_site: str | None) -> bool:
    """Return whether a browser sent a request for a page of another site.

    ``Sec-Fetch-Site`` decides where the browser sends it, since a proxy may change the host's name; otherwise
    ``Origin`` must name the requested host. Programs other than browsers send neither. The rule is that of Go's
    ``http.CrossOriginProtection``: https://words.filippo.io/csrf/
    """
    if fetch_site is not None:
        return fetch_site not in ("same-origin", "none")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:  # no browser sends this
        return True


def check_cors_origins(origins: Sequence[str]) -> None:
    """Check the origins of ``--cors-origin``."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin must be scheme, host and port as a browser sends them, such as https://example.org or "
                f"http://localhost:3000, without a path and in lower case, but is {origin!r:.200}."
            )


class AccessPolicy:
    """The access rules of one server.

    Without a token, everything is open to every client, so the server must listen on loopback only, and answers only
    under a local name: otherwise a page in a browser could use it under a name of its own. Packages may then be
    replaced only by programs of this machine that have the administrator's token.

    Args:
        tokens: of the clients; None: the server requires no token.
        cors_origins: whose pages in a browser may use the server, in addition to its own page.
        admin_token: with which packages may be replaced if clients have no tokens; None: they stay.
    """

    def __init__(
        self, tokens: BearerTokens | None, cors_origins: Sequence[str] = (), admin_token: str | None = None
    ) -> None:
        self._tokens = tokens
        self._admin_token = admin_token
        self._cors_origins = frozenset(origin.encode() for origin in cors_origins)

    def check_token(self, headers: Mapping[bytes, bytes]) -> str:
        """Check a request's token, or without one the name by which it calls the server; return its client's name."""
        if self._tokens is None:
            if not is_local_name(headers.get(b"host", b"localhost")):
                raise RequestFailure(
                    403,
                    "without a token, this server answers only under a local name such as localhost. Send this name "
                    "as Host, or start the server with --token-file.",
                )
            return ""
        given = _bearer_token(headers)
        client = None if given is None else self._tokens.client_of(given)
        if client is None:
            raise RequestFailure(
                401,
                "the token is missing or wrong. Send it as Authorization: Bearer TOKEN.",
                [(b"www-authenticate", b"Bearer")],
            )
        return client

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that changes or computes something for a page of another site."""
        if _is_cross_site(headers) and headers.get(b"origin") not in self._cors_origins:
            origin = headers.get(b"origin", b"unknown").decode("latin-1")
            raise RequestFailure(
                403,
                f"a page of another site, {origin!r:.200}, sent this request. Name it with --cors-origin when you "
                "start the server, if its page may use the models.",
            )

    def cors_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return what lets the page of an allowed origin read the answer to a request with these headers."""
        if not self._cors_origins:
            return []
        origin = headers.get(b"origin")
        if origin not in self._cors_origins or origin is None:
            return [(b"vary", b"Origin")]
        allowed = (b"access-control-allow-origin", origin)
        return [(b"vary", b"Origin"), allowed, (b"access-control-expose-headers", _READABLE_HEADERS)]

    def preflight(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """Return the headers of the answer to a browser's question before a request; None if it must not send it."""
        if b"access-control-request-method" not in headers or headers.get(b"origin") not in self._cors_origins:
            return None
        return [
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]

    def check_admin(self, client: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a client's request that may not change the served models, after its token has been checked."""
        # A page of another site cannot send this content type without permission, nor use our host name.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise RequestFailure(415, "the Content-Type must be application/json.")
        if self._tokens is not None:
            return
        # A page that may use the models may not exchange them.
        if not is_loopback(client) or not is_local_name(headers.get(b"host", b"")) or _is_cross_site(headers):
            raise RequestFailure(403, "without a token, only programs of this machine may change the served models.")
        given = _bearer_token(headers)
        if given is None or self._admin_token is None or not is_same_token(given, self._admin_token):
            raise RequestFailure(
                401,
                "changing the served models needs the token in the file that the server has named at its start, which "
                "paceline deploy of the same user finds. Send it as Authorization: Bearer TOKEN.",
                [(b"www-authenticate", b"Bearer")],
            )


def _bearer_token(headers: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _is_cross_site(headers: Mapping[bytes, bytes]) -> bool:
    host, origin, site = (headers.get(name) for name in (b"host", b"origin", b"sec-fetch-site"))
    texts = (None if value is None else value.decode("latin-1") for value in (origin, site))
    return is_cross_site((host or b"").decode("latin-1"), *texts)


def is_local_name(host: bytes) -> bool:
    """Return whether a ``Host`` is a name of this machine for itself, with any port."""
    text = host.decode("latin-1").lower()
    name = text if text.endswith("]") else text.rpartition(":")[0] or text
    return is_loopback(name.removeprefix("[").removesuffix("]"))


# --- Tokens that a user chose, in files that only their owner can read ---


_SHORTEST_BEARER_TOKEN = 16
_MAX_TOKENS_BYTES = 2**20


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
