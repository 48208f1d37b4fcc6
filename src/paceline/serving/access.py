"""Who may ask what: tokens, and what is for this machine alone."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.serving.batching import RequestFailure

_SHORTEST_TOKEN = 16
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


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
        if not hmac.compare_digest(given, self._expected):
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
        if not is_loopback(client) or name not in _LOCAL_HOSTS:
            raise RequestFailure(403, "without a token, only this machine may change what is served.")


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token in a file that only its owner may read.

    Raises:
        ConfigError: others may read it, or it holds no token.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(4096)
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error.strerror}.") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"--token-file {path} can be read by others. Say: chmod 600 {path}")
    token = content.decode("ascii", "replace").strip()
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token or "�" in token:
        raise ConfigError(
            f"--token-file {path} must hold one token of at least {_SHORTEST_TOKEN} letters and digits. "
            f"Make one: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token
