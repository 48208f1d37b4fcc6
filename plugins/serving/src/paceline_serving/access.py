"""Access control of a server: its token, and operations reserved for this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError
from paceline_serving.batching import RequestFailure
from paceline_serving.bearer_tokens import BearerTokens, is_same_token

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
            if not _is_local_name(headers.get(b"host", b"localhost")):
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
        if not is_loopback(client) or not _is_local_name(headers.get(b"host", b"")) or _is_cross_site(headers):
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


def _is_local_name(host: bytes) -> bool:
    """Return whether a ``Host`` is a name of this machine for itself, with any port."""
    text = host.decode("latin-1").lower()
    name = text if text.endswith("]") else text.rpartition(":")[0] or text
    return is_loopback(name.removeprefix("[").removesuffix("]"))
