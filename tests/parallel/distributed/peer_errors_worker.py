"""Provokes the errors of torch's gloo and stores; prints ``[name, type, message, translated]`` a line."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from paceline.parallel.peer_errors import translate_peer_errors

_LARGE = 2**24  # floats that do not fit into a socket's buffer
_SOON = timedelta(milliseconds=300)


def report(name: str, provoke: Callable[[], Any]) -> None:
    try:
        with translate_peer_errors():
            provoke()
    except Exception as error:
        raw = error.__cause__ or error
        line = [name, type(raw).__name__, str(raw), f"{type(error).__name__}: {error}"]
        print(json.dumps(line), flush=True)


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


def main() -> None:
    groups = pair(timedelta(seconds=30))
    del groups[1]
    report("the peer closed", partial(receive, groups[0]))
    report("sent to the closed peer", partial(send, groups[0]))
    groups = pair(_SOON)
    report("the peer is late", partial(receive, groups[0]))
    report("sent to the late peer", partial(send, groups[0]))
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    report("no such interface", partial(dist.ProcessGroupGloo, dist.HashStore(), 0, 2, _SOON))

    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=_SOON)
    connect = partial(dist.TCPStore, "127.0.0.1", world_size=2, wait_for_workers=False, timeout=_SOON)
    report("no such key", partial(server.get, "nowhere"))
    report("the port is taken", partial(connect, port=server.port, is_master=True))
    client = connect(port=server.port, is_master=False, timeout=timedelta(seconds=30))
    del server
    gc.collect()  # the errors above hold it
    report("the server closed", partial(client.get, "nowhere"))
    report("no server", partial(connect, port=1, is_master=False))


if __name__ == "__main__":
    main()
