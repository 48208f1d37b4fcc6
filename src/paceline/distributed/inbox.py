"""Messages of several peers, in the order in which they come.

Gloo can receive from whoever sends first, but then does not notice that a peer is gone (measured: a server
waited for ever for workers that had all been killed). So a thread waits for each peer, whose end it notices.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

import torch
from torch import distributed as dist

from paceline.distributed.world import World, lost_peers_reported


class Inbox:
    """Receives one message at a time from each peer that one is expected from.

    Args:
        world: the ranks.
        peers: the ranks that send.
        length: float64 numbers in a message.
        tag: of the messages.
    """

    def __init__(self, world: World, peers: Iterable[int], length: int, tag: int) -> None:
        self._world, self._length, self._tag = world, length, tag
        self._arrived: queue.SimpleQueue[tuple[int, list[float] | Exception]] = queue.SimpleQueue()
        self._kept: dict[int, list[float]] = {}
        self._wanted: dict[int, queue.SimpleQueue[bool]] = {peer: queue.SimpleQueue() for peer in peers}
        for peer in self._wanted:
            # A daemon: on an error it waits until the group is destroyed, and nobody waits for it.
            threading.Thread(target=self._listen, args=(peer,), name=f"from-{peer}", daemon=True).start()

    def expect(self, peer: int) -> None:
        """The peer will send a message."""
        self._wanted[peer].put(True)

    def next(self, peer: int | None = None) -> tuple[int, list[float]]:
        """Wait for the next message that was expected.

        Args:
            peer: whose it has to be; those of others wait meanwhile. None: whoever's.

        Returns:
            The sender and the message.

        Raises:
            PeerLostError: a peer that was to send is gone.
        """
        while True:
            if peer is None and self._kept:
                sender = next(iter(self._kept))
                return sender, self._kept.pop(sender)
            if peer in self._kept:
                return peer, self._kept.pop(peer)
            sender, message = self._arrived.get()
            if isinstance(message, Exception):
                raise message
            self._kept[sender] = message

    def close(self) -> None:
        """Receive no more."""
        for wanted in self._wanted.values():
            wanted.put(False)

    def _listen(self, peer: int) -> None:
        while self._wanted[peer].get():
            message = torch.empty(self._length, dtype=torch.float64)
            try:
                with lost_peers_reported():
                    dist.recv(message, group=self._world.group, tag=self._tag, group_src=peer)
            except Exception as error:
                self._arrived.put((peer, error))
                return
            self._arrived.put((peer, message.tolist()))
