"""Where other agents link to this one. No torch."""

from __future__ import annotations

import errno
import math
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from paceline.agent.link import Link, LinkError
from paceline.errors import ConfigError

_MOST_REPORTED = 64  # addresses


class Listener:
    """Listens on one address; whoever does not hold the token never gets beyond it.

    For a selector it is one descriptor, ready for reading when :meth:`accept` has something to do. Of
    handshakes there are at most ``most`` at once: a further one takes the place of the oldest, so that peers
    who say nothing keep nobody out.

    Attributes:
        host: the address on which it listens.
        port: the port, also where any was asked for.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        hello: Mapping[str, Any],
        *,
        within_s: float = 5.0,
        dead_after_s: float = 4.0,
        most: int = 32,
    ) -> None:
        """Listen.

        Args:
            host: an address of this machine, such as 127.0.0.1; never all of them by accident.
            port: 0 for any.
            token: the run's.
            hello: what the other sides learn of this one with the handshake.
            within_s: how long a handshake may take.
            dead_after_s: as for :func:`~paceline.agent.link.connect`.
            most: handshakes at once.

        Raises:
            ConfigError: it cannot listen there.
        """
        self._token, self._hello = token, hello
        self._within_s, self._dead_after_s, self._most = within_s, dead_after_s, most
        self._shaking: dict[Link, str] = {}  # the oldest first; and the peer's host
        self._reported: set[str] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on {host}:{port} for other nodes: {error.strerror}. "
                "Choose an address of this machine and a free port."
            ) from error
        self.host, self.port = self._socket.getsockname()[:2]
        self._ready = selectors.EpollSelector()
        self._ready.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The descriptor, for a selector: of an epoll that watches the socket and all handshakes."""
        return self._ready.fileno()

    @property
    def deadline(self) -> float:
        """When to call :meth:`accept` at the latest, on the monotonic clock."""
        return min((link.deadline for link in self._shaking), default=math.inf)

    def accept(self) -> tuple[list[Link], list[str]]:
        """Go on with the handshakes; return the links that are open now, and who was refused.

        The refusals are sentences for people; every address is reported once.
        """
        opened: list[Link] = []
        refused: list[str] = []
        ready = {key.fileobj for key, _ in self._ready.select(0)}
        if self._socket in ready:
            ready |= set(self._welcome(refused))
        now = time.monotonic()
        for link in [link for link in self._shaking if link in ready or link.deadline <= now]:
            try:
                link.receive()
            except LinkError as error:
                self._report(self._drop(link), str(error), refused)
                continue
            if link.is_open:
                self._ready.unregister(link)
                del self._shaking[link]
                opened.append(link)
        return opened, refused

    def close(self) -> None:
        """Listen no more, and end the handshakes; links that were returned stay."""
        for link in list(self._shaking):
            self._drop(link)
        self._ready.close()
        self._socket.close()

    def _welcome(self, refused: list[str]) -> list[Link]:
        links = []
        for _ in range(self._most):
            try:
                end, address = self._socket.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if self._shaking:
                    # No descriptor is left: rather lose a handshake than be deaf.
                    self._drop(next(iter(self._shaking)))
                    continue
                self._report("", f"another node cannot be let in: {error.strerror}.", refused)
                break
            end.setblocking(False)
            host, port = address[:2]
            try:
                link = Link(
                    end,
                    "listener",
                    f"{host}:{port}",
                    self._token,
                    self._hello,
                    time.monotonic() + self._within_s,
                    self._dead_after_s,
                )
            except OSError:
                end.close()  # it is gone already
                continue
            while len(self._shaking) >= self._most:
                oldest = next(iter(self._shaking))
                self._report(self._drop(oldest), f"{oldest.peer} was slow to say who it is.", refused)
            self._shaking[link] = host
            self._ready.register(link, selectors.EVENT_READ)
            links.append(link)
        return links

    def _drop(self, link: Link) -> str:
        self._ready.unregister(link)
        link.close()
        return self._shaking.pop(link)

    def _report(self, host: str, why: str, refused: list[str]) -> None:
        if host not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(host)
            refused.append(why)
