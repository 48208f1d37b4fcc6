"""The program that forks replicas: ``python -m paceline.serving.fork_server FD KIND``.

It has imported what they need: that takes seconds, forking takes milliseconds. A request over the socket
pair ``FD`` is one byte, with the replica's end of its channel beside it (``SCM_RIGHTS``); the answer is the
new process's number, with a pidfd, or why it could not be forked. The process ends when the server has gone;
the replicas see that for themselves.

Nothing here may compute: threads, and a GPU's context, do not survive a fork.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress

from paceline.serving import replica


def main(descriptor: int, kind: str) -> int:
    """Serve the process at the other end of ``descriptor``; in a forked child, be a replica."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Whoever asked for a process holds its pidfd; nobody wants its exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        _rehearse(kind)
    except Exception:
        # The replicas will say what is wrong, each to whom it concerns.
        traceback.print_exc()
    # What is here now stays; a child that collects garbage need not copy it.
    gc.collect()
    gc.freeze()
    channel = _serve(descriptor)
    return 0 if channel is None else replica.main(channel)


def _rehearse(kind: str) -> None:
    """Import what loading a model will, much of which torch imports only when it is used."""
    if kind == "task":
        import paceline.serving.formats

        return
    import torch
    from torch.export.passes import move_to_device_pass  # noqa: F401

    import paceline.serving.replica  # noqa: F401

    program = torch.export.export(torch.nn.Identity(), (torch.zeros(1),))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    torch.export.load(stream).module()


def _serve(descriptor: int) -> int | None:
    """Fork until the server has gone; in a child, return its channel."""
    # The server may go before it has read an answer.
    with socket.socket(fileno=descriptor) as requests, suppress(ConnectionError):
        while True:
            content, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            if not content:
                break
            [channel] = descriptors
            if _fork(requests):
                return channel
            os.close(channel)
    return None


def _fork(requests: socket.socket) -> bool:
    """Whether this is the child."""
    # What is left in a buffer would be printed by the child once more.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return True
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        requests.send(str(error).encode() or b"?")
        return False
    socket.send_fds(requests, [str(pid).encode()], [pidfd])
    os.close(pidfd)
    return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
