"""Who may look: on loopback everybody on this machine, elsewhere only who knows the token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie

from paceline.errors import ConfigError

COOKIE = "paceline-dashboard"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """Decides about requests.

    Args:
        host: what the server listens on.
        port: likewise.
        token: the secret; None: nobody is asked for one.

    Raises:
        ConfigError: others could reach the host, and there is no token.
    """

    def __init__(self, host: str, port: int, token: bytes | None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"--host {host} lets other machines in, so it needs --token-file FILE (made for you where "
                "there is none). Or leave --host out, and come through ssh -L."
            )
        self._names = {f"{name}:{port}" for name in _LOOPBACK_NAMES}
        if is_loopback(host):
            self._names.add(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._token = token

    @property
    def needs_token(self) -> bool:
        """Whether a visitor is asked for one."""
        return self._token is not None

    def is_our_name(self, host_header: str) -> bool:
        """Whether the browser meant this server: a foreign name that leads to loopback is an attack.

        With a token any name will do, since a page of another name does not have its cookie.
        """
        return self._token is not None or host_header.lower() in self._names

    def admits(self, authorization: str, cookies: str) -> bool:
        """Whether a request carries the token: these are its headers ``Authorization`` and ``Cookie``."""
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.knows(given):
            return True
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self._cookie())

    def knows(self, token: str) -> bool:
        """Whether this is the token, in hexadecimal digits; takes the same time wherever it differs."""
        return self._token is not None and _equal(token.strip(), self._token.hex())

    def set_cookie(self) -> str:
        """The header by which a browser is remembered: what follows from the token, and not the token."""
        return f"{COOKIE}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"

    def _cookie(self) -> str:
        assert self._token is not None
        return hmac.new(self._token, b"paceline dashboard", hashlib.sha256).hexdigest()


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
