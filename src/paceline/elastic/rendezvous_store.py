"""The rendezvous stores of a node, one per generation; a host process that ends or hangs is replaced. No torch."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from paceline.core.fork_server import ForkServer

STORE_HOST = -1
"""The number of the store host among what a fork server forks; workers' are 0 and above."""

_LONGEST = 4096
_SERVED_S = 2.0  # how long the store host may take to open or close a store: milliseconds, unless it hangs


class RendezvousStores:
    """The rendezvous stores of one node, which a process of its own serves; see :mod:`paceline.elastic.store_host`.

    Args:
        selector: of the agent's loop; handlers are the registered data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._host: socket.socket | None = None  # it reads an end of file when the host has ended
        self._pidfd: int | None = None
        self._owed = 0  # commands that were not answered yet
        self._patience_ends = math.inf

    def open(self, generation: int, address: str, fork_server: ForkServer) -> int:
        """Serve a store at this node's ``address``, in a host that ``fork_server`` forks if there is none.

        Returns:
            The port, to which members may connect at once.
        """
        if self._host is None:
            self._host, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fork_server.fork(STORE_HOST, [theirs.fileno()])
            self._owed = 0
            self._selector.register(self._host, selectors.EVENT_READ, partial(self._on_host, self._host))
        with socket.create_server((address, 0), backlog=128) as listener:
            self._tell({"open": generation}, [listener.fileno()])
            port: int = listener.getsockname()[1]
        return port

    def close(self, generation: int) -> None:
        """Close the store of a generation, which frees members that wait in it: their connections are reset."""
        self._tell({"close": generation}, [])

    def forked(self, pidfd: int) -> None:
        """Register the forked host; takes over ``pidfd``."""
        if self._host is None:
            os.close(pidfd)
            return
        self._pidfd = pidfd
        self._patience_ends = time.monotonic() + _SERVED_S

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return self._patience_ends if self._owed and self._pidfd is not None else math.inf

    def expire(self, now: float) -> None:
        """Replace a host that did not answer in time."""
        if now >= self.deadline:
            self.end()

    def end(self) -> None:
        """End the host, even where it hangs.

        Its clients lose it, request a new group, and meet in the store of the next host.
        """
        if self._host is not None:
            self._selector.unregister(self._host)
            self._host.close()
            self._host = None
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_host(self, host: socket.socket) -> None:
        if host is not self._host:
            return
        content = b""
        with suppress(ConnectionError):
            content = host.recv(_LONGEST)
        if content:
            self._owed -= 1
        else:
            self.end()

    def _tell(self, command: Mapping[str, int], descriptors: Sequence[int]) -> None:
        if self._host is None:
            return
        self._patience_ends = time.monotonic() + _SERVED_S
        self._owed += 1
        # Where the host has died, the members' connections are refused, and they ask again.
        with suppress(ConnectionError):
            socket.send_fds(self._host, [json.dumps(command).encode()], list(descriptors))
