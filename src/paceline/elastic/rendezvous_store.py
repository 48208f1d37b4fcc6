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


class StoreHost:
    """A process that serves one store a generation; see :mod:`paceline.elastic.store_host`."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._pidfd: int | None = None
        self._owed = 0  # commands that were not answered yet
        self._patience_ends = math.inf
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fork_server.fork(STORE_HOST, [theirs.fileno()])

    def fileno(self) -> int:
        """Return the descriptor that reads an end of file when the host has ended, for a selector."""
        return self._socket.fileno()

    def open(self, generation: int, address: str) -> int:
        """Serve a store for this generation; return its port, to which members may connect at once."""
        with socket.create_server((address, 0), backlog=128) as listener:
            self._tell({"open": generation}, [listener.fileno()])
            port: int = listener.getsockname()[1]
        return port

    @property
    def deadline(self) -> float:
        """Deadline of the host's pending orders, by the monotonic clock."""
        return self._patience_ends if self._owed and self._pidfd is not None else math.inf

    def runs(self, pidfd: int) -> None:
        """Record that it was forked; takes over ``pidfd``."""
        self._pidfd = pidfd
        self._patience_ends = time.monotonic() + _SERVED_S

    def report(self) -> bool:
        """Take note of what it reports; False once it has ended."""
        content = b""
        with suppress(ConnectionError):
            content = self._socket.recv(_LONGEST)
        if content:
            self._owed -= 1
        return bool(content)

    def close(self, generation: int) -> None:
        """Stop to serve it, and reset its clients' connections."""
        self._tell({"close": generation}, [])

    def end(self) -> None:
        """End the host, even where it hangs; its clients are reset."""
        self._socket.close()
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def _tell(self, command: Mapping[str, int], descriptors: Sequence[int]) -> None:
        self._patience_ends = time.monotonic() + _SERVED_S
        self._owed += 1
        # Where the host has died, the members' connections are refused, and they ask again.
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(command).encode()], list(descriptors))


class RendezvousStores:
    """The rendezvous stores of one node.

    Args:
        selector: of the agent's loop; handlers are the registered data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._host: StoreHost | None = None

    def open(self, generation: int, address: str, fork_server: ForkServer) -> int:
        """Serve a store at this node's ``address``, in a host that ``fork_server`` forks if there is none.

        Returns:
            The port.
        """
        if self._host is None:
            self._host = StoreHost(fork_server)
            self._selector.register(self._host, selectors.EVENT_READ, partial(self._on_host, self._host))
        return self._host.open(generation, address)

    def close(self, generation: int) -> None:
        """Close the store of a generation, which frees members that wait in it."""
        if self._host is not None:
            self._host.close(generation)

    def forked(self, pidfd: int) -> None:
        """Register the forked host; takes over ``pidfd``."""
        if self._host is not None:
            self._host.runs(pidfd)
        else:
            os.close(pidfd)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return math.inf if self._host is None else self._host.deadline

    def expire(self, now: float) -> None:
        """Replace a host that did not answer in time."""
        if now >= self.deadline:
            self._replace()

    def end(self) -> None:
        if self._host is not None:
            self._host.end()

    def _on_host(self, host: StoreHost) -> None:
        if host is self._host and not host.report():
            self._replace()

    def _replace(self) -> None:
        """Replace the host; its clients lose it, request a new group, and meet in the next host's store."""
        assert self._host is not None
        self._selector.unregister(self._host)
        self._host.end()
        self._host = None
