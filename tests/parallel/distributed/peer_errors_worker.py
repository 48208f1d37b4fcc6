"""Provokes the errors of torch's gloo and stores; prints ``[name, type, message, translated]`` a line.

It exits with 1 where one was taken for what it is not. ``torch_messages.json`` has what releases of torch said here:
``python peer_errors_worker.py --record`` adds the installed one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.core.errors import PeerLostError
from paceline.parallel.peer_errors import translate_peer_errors

_LARGE = 2**24  # floats that do not fit into a socket's buffer
_SOON = timedelta(milliseconds=300)
_LATER = timedelta(seconds=30)
RECORDED = Path(__file__).with_name("torch_messages.json")

found: dict[str, list[str]] = {}
mistaken: list[str] = []


def report(name: str, provoke: Callable[[], Any], *, lost: bool = True) -> None:
    try:
        with translate_peer_errors():
            provoke()
    except Exception as error:
        raw = error.__cause__ or error
        found[name] = [type(raw).__name__, general(str(raw))]
        line = [name, type(raw).__name__, str(raw), f"{type(error).__name__}: {error}"]
        print(json.dumps(line), flush=True)
        if lost != isinstance(error, PeerLostError):
            mistaken.append(name)


def general(message: str) -> str:
    """Return a message without ports, lines of source files and the frames of C++."""
    return re.sub(r"\d{2,}", "NN", message.partition("\nException raised from")[0])


def join_through(path: str, rank: int) -> dist.ProcessGroupGloo:
    """Join a group of two processes."""
    return dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, _LATER)


def killed_peer() -> dist.ProcessGroupGloo:
    """Return a group of two processes of which the other has been killed."""
    with tempfile.TemporaryDirectory() as folder:
        peer = os.fork()  # before this process has any thread
        if peer == 0:
            joined = join_through(f"{folder}/store", 1)
            joined.send([torch.zeros(4)], 0, 0).wait()
            signal.pause()
        group = join_through(f"{folder}/store", 0)
        receive(group)
    os.kill(peer, signal.SIGKILL)
    os.waitpid(peer, 0)
    return group


def pair(timeout: timedelta) -> list[dist.ProcessGroupGloo]:
    """Two ranks of one group, in this process."""
    store, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def receive(group: dist.ProcessGroupGloo) -> None:
    group.recv([torch.zeros(4)], 1, 0).wait()


def send(group: dist.ProcessGroupGloo) -> None:
    group.send([torch.zeros(_LARGE)], 1, 0).wait()


def main() -> int:
    group = killed_peer()
    report("the peer was killed", partial(receive, group))
    report("sent to the killed peer", partial(send, group))
    del group
    groups = pair(_LATER)
    del groups[1]
    report("the peer closed", partial(receive, groups[0]))
    report("sent to the closed peer", partial(send, groups[0]))
    groups = pair(_SOON)
    report("the peer is late", partial(receive, groups[0]))
    report("sent to the late peer", partial(send, groups[0]))
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    report("no such interface", partial(dist.ProcessGroupGloo, dist.HashStore(), 0, 2, _SOON), lost=False)

    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=_SOON)
    connect = partial(dist.TCPStore, "127.0.0.1", world_size=2, wait_for_workers=False, timeout=_SOON)
    report("no such key", partial(server.get, "nowhere"))
    report("the port is taken", partial(connect, port=server.port, is_master=True), lost=False)
    client = connect(port=server.port, is_master=False, timeout=_LATER)
    del server
    gc.collect()  # the errors above hold it
    report("the server closed", partial(client.get, "nowhere"))
    report("no server", partial(connect, port=1, is_master=False))
    if sys.argv[1:] == ["--record"]:
        recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        recorded[torch.__version__.partition("+")[0]] = found
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    if mistaken:
        print(f"torch {torch.__version__}: not recognised: {', '.join(mistaken)}", file=sys.stderr)
    return 1 if mistaken else 0


if __name__ == "__main__":
    sys.exit(main())
