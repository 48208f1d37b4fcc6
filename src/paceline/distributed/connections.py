"""A process group's own connections, and how to cut them.

A collective that waits for a peer whose machine is unreachable, or whose process is stopped, waits until its
time-out: no abort ends it, as there is nothing to be read. But it ends at once when its sockets are shut down
on this side: to gloo, that is a peer that closed the connection. And after it nothing that the peer still
sends can reach a buffer.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress


class Connections:
    """The sockets that were opened to peers between construction and :meth:`opened`."""

    def __init__(self) -> None:
        self._before = set(_sockets().items())
        self._mine: dict[int, str] = {}
        self._cut = False
        self._lock = threading.Lock()

    def opened(self) -> None:
        """All of the group's connections are there now."""
        with self._lock:
            mine = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in self._before}
            self._mine = {fd: inode for fd, inode in mine.items() if _is_connected(fd)}
            if self._cut:
                self._shut_down()

    def cut(self) -> None:
        """End them, from any thread; whoever waits for a peer is freed with a lost connection."""
        with self._lock:
            self._cut = True
            self._shut_down()

    def closed(self) -> None:
        """The group has closed them itself; from now on :meth:`cut` does nothing."""
        with self._lock:
            self._mine.clear()

    def _shut_down(self) -> None:
        now = _sockets()
        for fd, inode in self._mine.items():
            # The number may be another socket's by now.
            if now.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._mine.clear()


def _sockets() -> dict[int, str]:
    """What each descriptor that is a socket refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _is_connected(fd: int) -> bool:
    """Whether it is a TCP connection."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()
    except OSError:
        return False
    return True
