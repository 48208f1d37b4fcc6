"""Access control of a server: its token, and operations reserved for this machine."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from paceline.core.access import LOOPBACK_NAMES, is_loopback, is_same_token
from paceline.serving.batching import RequestFailure


class AccessPolicy:
    """The access rules of one server.

    Without a token, everything is open to every client, so the server must listen on loopback only. Packages
    may then be replaced only by programs of this machine, not by a page in a browser.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def check_token(self, headers: Mapping[bytes, bytes]) -> None:
        if self._expected is None:
            return
        actual = headers.get(b"authorization", b"")
        if not is_same_token(actual, self._expected):
            raise RequestFailure(
                401,
                "the token is missing or wrong. Send it as Authorization: Bearer TOKEN.",
                [(b"www-authenticate", b"Bearer")],
            )

    def check_admin(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that may not change the served models, after its token has been checked."""
        # A page of another site cannot send this content type without permission, nor use our host name.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise RequestFailure(415, "the Content-Type must be application/json.")
        if self._expected is not None:
            return
        client = (scope.get("client") or ("",))[0]
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(client) or name not in LOOPBACK_NAMES:
            raise RequestFailure(403, "without a token, only programs of this machine may change the served models.")
