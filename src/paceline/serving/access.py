"""Access control of a server: its token, and operations reserved for this machine."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from paceline.core.access import BearerTokens, is_loopback
from paceline.serving.batching import RequestFailure


class AccessPolicy:
    """The access rules of one server.

    Without a token, everything is open to every client, so the server must listen on loopback only, and answers only
    under a local name: otherwise a page in a browser could use it under a name of its own. Packages may then be
    replaced only by programs of this machine.
    """

    def __init__(self, tokens: BearerTokens | None) -> None:
        self._tokens = tokens

    def check_token(self, headers: Mapping[bytes, bytes]) -> str:
        """Check the token of a request, or the name by which it calls a server without one; return its client's name.

        Raises:
            RequestFailure: 401 or 403.
        """
        if self._tokens is None:
            if not _is_local_name(headers.get(b"host", b"localhost")):
                raise RequestFailure(
                    403,
                    "without a token, this server answers only under a local name such as localhost. Send this name "
                    "as Host, or start the server with --token-file.",
                )
            return ""
        scheme, _, actual = headers.get(b"authorization", b"").partition(b" ")
        client = self._tokens.client_of(actual.strip()) if scheme.lower() == b"bearer" else None
        if client is None:
            raise RequestFailure(
                401,
                "the token is missing or wrong. Send it as Authorization: Bearer TOKEN.",
                [(b"www-authenticate", b"Bearer")],
            )
        return client

    def check_admin(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that may not change the served models, after its token has been checked."""
        # A page of another site cannot send this content type without permission, nor use our host name.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise RequestFailure(415, "the Content-Type must be application/json.")
        if self._tokens is not None:
            return
        client = (scope.get("client") or ("",))[0]
        if not is_loopback(client) or not _is_local_name(headers.get(b"host", b"")):
            raise RequestFailure(403, "without a token, only programs of this machine may change the served models.")


def _is_local_name(host: bytes) -> bool:
    """Return whether a ``Host`` is a name of this machine for itself, with any port."""
    text = host.decode("latin-1").lower()
    name = text if text.endswith("]") else text.rpartition(":")[0] or text
    return is_loopback(name.removeprefix("[").removesuffix("]"))
