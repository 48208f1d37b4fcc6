"""The stores in which members meet, one a generation; a host that ends or hangs is replaced. No torch."""

from __future__ import annotations

import math
import os
import selectors
from functools import partial

from paceline.elastic.forking import ForkServer, StoreHost


class RendezvousStores:
    """Of one machine.

    Args:
        selector: of the loop; its handlers are the registered data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._host: StoreHost | None = None

    def open(self, generation: int, address: str, zygote: ForkServer) -> int:
        """Serve a store at this address of ours, by a host that ``zygote`` forks if there is none.

        Returns:
            The port.
        """
        if self._host is None:
            self._host = StoreHost(zygote)
            self._selector.register(self._host, selectors.EVENT_READ, partial(self._on_host, self._host))
        return self._host.open(generation, address)

    def close(self, generation: int) -> None:
        """Serve it no longer: who waits in it for one who is gone is freed."""
        if self._host is not None:
            self._host.close(generation)

    def forked(self, pidfd: int) -> None:
        """The host runs; ``pidfd`` is ours now."""
        if self._host is not None:
            self._host.runs(pidfd)
        else:
            os.close(pidfd)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return math.inf if self._host is None else self._host.deadline

    def expire(self, now: float) -> None:
        """Lose patience with the host."""
        if now >= self.deadline:
            self._replace()

    def end(self) -> None:
        """End the host."""
        if self._host is not None:
            self._host.end()

    def _on_host(self, host: StoreHost) -> None:
        if host is self._host and not host.report():
            self._replace()

    def _replace(self) -> None:
        """Its clients lose it, ask for another view, and meet in a store of the next host."""
        assert self._host is not None
        self._selector.unregister(self._host)
        self._host.end()
        self._host = None
