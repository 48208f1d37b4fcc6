"""Forks workers, and the host of their stores: ``python -m paceline.elastic.forkserver FD``.

A worker that died is replaced in milliseconds, by a fork of this process; see
:mod:`paceline.core.fork_server`. A request for a worker is ``{"fork": number, "local_index": i, "job_file": path}``,
with the worker's end of its channel and, above index 0, its log; one for the store host has the number ``STORE_HOST``
and the host's end of its socket pair.

This process lives as long as its agent: when the agent's end closes, it kills what it has forked. Until the
workers have saved they need the store host, so only workers are stopped by signals.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.fork_server import Child, redirect_output, restore_stop_signals, run_fork_server
from paceline.elastic.node import STORE_HOST

if TYPE_CHECKING:
    from paceline.torch_internals import TCPStore

_WORKER = "paceline.training.worker"
"""What the forked processes run: a layer above this one, so it is imported by its name."""


def prepare_child(request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
    """Make a forked process a worker, or the store host."""
    if request["fork"] == STORE_HOST:
        return lambda: _serve_stores(descriptors[0])
    restore_stop_signals()
    channel, *log = descriptors
    # A worker that rises to rank 0 later prints to the terminal, wherever it prints now.
    terminal = (os.dup(1), os.dup(2))
    if log:
        redirect_output(log[0])
    return lambda: _run_worker(request["job_file"], channel, request["local_index"], terminal)


def _run_worker(job_file: str, channel: int, local_index: int, terminal: tuple[int, int]) -> int:
    sys.argv = [_WORKER, job_file]
    code: int = importlib.import_module(_WORKER).main_under_agent(Path(job_file), channel, local_index, terminal)
    return code


def _preload() -> None:
    import paceline.torch_internals  # noqa: F401

    importlib.import_module(_WORKER).preload()


# --- The host of the rendezvous stores, one per generation: a process that worker faults do not affect ---
#
# Commands come over a socket pair, one JSON object per packet: ``{"open": generation}`` with a bound and listening
# socket, and ``{"close": generation}``. The agent creates the socket, so it knows the port at once, and early clients
# wait in the backlog. Closing a store resets its clients, which frees members that wait in it for a lost one.
# ``{"done": command}`` answers each command; without an answer the agent considers this process hung, and ends it.


_LONGEST_COMMAND = 4096


def _serve_stores(descriptor: int) -> int:
    """Serve until the agent has ended."""
    commands = socket.socket(fileno=descriptor)
    stores: dict[int, TCPStore] = {}
    while True:
        content, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # the agent was killed
            content, descriptors, _, _ = socket.recv_fds(commands, _LONGEST_COMMAND, 1)
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
    from paceline.torch_internals import TCPStore

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


if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1]), _preload, prepare_child))
