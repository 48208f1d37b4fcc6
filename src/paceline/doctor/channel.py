"""The doctor's messages, over the agents' authenticated links, for programs that wait for one at a time."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.agent.link import Link, LinkError, connect

DEAD_AFTER_S = 20.0
"""Patience with a machine that does not answer: the way to it is loaded on purpose."""


class Channel:
    """A link, of which messages are taken one by one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[dict[str, Any]] = deque()

    def shake_hands(self) -> None:
        """Wait until both sides have shown that they hold the token.

        Raises:
            LinkError: it is not one of ours, or does not answer; the message says why.
        """
        while not self._link.is_open:
            self._wait(max(0.0, self._link.deadline - time.monotonic()))
            # The other side may say something with its last word of the handshake.
            self._waiting += self._link.receive()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send; what the kernel does not take at once is sent while the answer is waited for."""
        self._link.send(message)

    def next(self, within_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            LinkError: the link has ended, or none came in time.
        """
        deadline = time.monotonic() + within_s
        while not self._waiting:
            self._waiting += self._link.receive()
            left = deadline - time.monotonic()
            if left <= 0:
                raise LinkError(f"{self._link.peer} did not answer within {within_s:g} s.")
            if not self._waiting:
                self._wait(left)
        return self._waiting.popleft()

    def close(self) -> None:
        """End it; what the kernel has taken is still delivered."""
        self._link.close()

    def _wait(self, seconds: float) -> None:
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
        waiting.poll(seconds * 1e3)


def open_channel(host: str, port: int, token: bytes, hello: Mapping[str, Any], within_s: float) -> Channel:
    """Connect to machine 0.

    Raises:
        LinkError: nobody is there, or not one of ours; the message says why.
    """
    channel = Channel(connect(host, port, token, hello, within_s=within_s, dead_after_s=DEAD_AFTER_S))
    try:
        channel.shake_hands()
    except BaseException:
        channel.close()
        raise
    return channel
