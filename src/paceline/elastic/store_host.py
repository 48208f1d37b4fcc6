"""Serves the stores in which members meet, one a generation, in a process that no fault of a worker hits.

Commands come over a socket pair, one JSON object a packet: ``{"open": generation}`` with a bound and
listening socket beside it, and ``{"close": generation}``. As the agent has made the socket, it
knows the port at once, and who connects early waits in its backlog. Closing a store resets its
clients, which frees members that wait in it for one who never comes. ``{"done": command}`` answers
each command; where it does not come, this process hangs, and the agent ends it.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_LONGEST = 4096


def serve(descriptor: int) -> int:
    """Serve until the agent has gone."""
    commands = socket.socket(fileno=descriptor)
    stores: dict[int, TCPStore] = {}
    while True:
        content, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # an agent that was killed
            content, descriptors, _, _ = socket.recv_fds(commands, _LONGEST, 1)
        if not content:
            # Without waiting for any store's threads: nobody is left to be served.
            os._exit(0)
        command = json.loads(content)
        if "open" in command:
            stores[command["open"]] = _store(descriptors[0])
        else:
            stores.pop(command["close"], None)
        with suppress(ConnectionError):
            commands.send(json.dumps({"done": command}).encode())


def _store(listener: int) -> TCPStore:
    """A store on a listening socket, which it then owns."""
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
