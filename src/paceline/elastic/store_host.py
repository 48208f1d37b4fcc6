"""Serves the rendezvous stores, one per generation, in a process that worker faults do not affect.

Commands come over a socket pair, one JSON object per packet: ``{"open": generation}`` with a bound and listening
socket, and ``{"close": generation}``. The agent creates the socket, so it knows the port at once, and early clients
wait in the backlog. Closing a store resets its clients, which frees members that wait in it for a lost one. ``{"done":
command}`` answers each command; without an answer the agent considers this process hung, and ends it.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import timedelta

from paceline.torch_internals import TCPStore

_LONGEST = 4096


def serve(descriptor: int) -> int:
    """Serve until the agent has ended."""
    commands = socket.socket(fileno=descriptor)
    stores: dict[int, TCPStore] = {}
    while True:
        content, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # the agent was killed
            content, descriptors, _, _ = socket.recv_fds(commands, _LONGEST, 1)
        if not content:
            # Exit without waiting for any store's threads.
            os._exit(0)
        command = json.loads(content)
        if "open" in command:
            stores[command["open"]] = _store(descriptors[0])
        else:
            stores.pop(command["close"], None)
        with suppress(ConnectionError):
            commands.send(json.dumps({"done": command}).encode())


def _store(listener: int) -> TCPStore:
    """Create a store on a listening socket, which it then owns."""
    with socket.socket(fileno=os.dup(listener)) as known:
        address, port = known.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener,
    )
