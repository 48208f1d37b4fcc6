"""A group's sockets are cut, and no others; who waits for a peer that does not answer is freed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.elastic.group_formation import GroupSockets

PEER = """
import os, sys, torch
from datetime import timedelta
from torch import distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
dist.all_reduce(torch.zeros(1))
print("met", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    one = stack.enter_context(socket.create_connection(listener.getsockname()))
    other, _ = listener.accept()
    return one, stack.enter_context(other)


def test_only_what_was_opened_in_between_is_cut(stack: ExitStack) -> None:
    before = connected(stack)
    connections = GroupSockets()
    during = connected(stack)
    pair = socket.socketpair()
    for end in pair:
        stack.enter_context(end)
    connections.opened()
    after = connected(stack)
    connections.shutdown()
    assert during[0].recv(1) == b""
    for one, other in (before, after, pair):
        one.send(b"x")
        assert other.recv(1) == b"x"


def test_what_is_opened_after_the_cut_is_cut_too(stack: ExitStack) -> None:
    connections = GroupSockets()
    connections.shutdown()
    during = connected(stack)
    connections.opened()
    assert during[0].recv(1) == b""


def test_a_number_that_another_socket_has_by_now_is_left_alone(stack: ExitStack) -> None:
    connections = GroupSockets()
    one, other = connected(stack)
    connections.opened()
    later = connected(stack)
    number = one.fileno()
    other.close()
    os.dup2(later[0].fileno(), number)
    connections.shutdown()
    later[0].send(b"x")
    assert later[1].recv(1) == b"x"


def test_after_the_group_has_closed_nothing_is_cut(stack: ExitStack) -> None:
    connections = GroupSockets()
    one, other = connected(stack)
    connections.opened()
    connections.closed()
    connections.shutdown()
    one.send(b"x")
    assert other.recv(1) == b"x"


@pytest.mark.integration
def test_a_collective_that_waits_for_a_stopped_peer_is_freed(stack: ExitStack, tmp_path: Path) -> None:
    """In a process of its own: a group belongs to a whole process."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(script), PEER], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "freed" in done.stdout


WAITS = """
import os, signal, socket, subprocess, sys, threading, torch
from datetime import timedelta
from torch import distributed as dist
from paceline.elastic.group_formation import GroupSockets

listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False,
                      timeout=timedelta(seconds=60), master_listen_fd=os.dup(listener.fileno()))
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(port)],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
try:
    connections = GroupSockets()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    connections.opened()
    dist.all_reduce(torch.zeros(1))
    assert peer.stdout.readline() == "met\\n"
    os.kill(peer.pid, signal.SIGSTOP)
    threading.Timer(0.1, connections.shutdown).start()
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        print("freed:", str(error).splitlines()[0])
    dist.destroy_process_group()
finally:
    peer.kill()
    peer.wait()
"""
