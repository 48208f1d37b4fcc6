"""Who may ask what: tokens, and what is for this machine alone."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from paceline.core.access import LOOPBACK_NAMES, is_loopback, is_same_token
from paceline.serving.batching import RequestFailure


class AccessPolicy:
    """The rule of one server.

    Without a token, everything is open to whoever reaches the server, which then listens on loopback only;
    and packages are exchanged only by programs of this machine, not by a page in somebody's browser.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def check_token(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request without the token, if there is one."""
        if self._expected is None:
            return
        given = headers.get(b"authorization", b"")
        if not is_same_token(given, self._expected):
            raise RequestFailure(
                401, "send the token: Authorization: Bearer TOKEN.", [(b"www-authenticate", b"Bearer")]
            )

    def check_admin(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that may not change what is served; the token was checked."""
        # A page of another site cannot send this type unasked, nor name a host of ours.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise RequestFailure(415, "the Content-Type must be application/json.")
        if self._expected is not None:
            return
        client = (scope.get("client") or ("",))[0]
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(client) or name not in LOOPBACK_NAMES:
            raise RequestFailure(403, "without a token, only this machine may change what is served.")
