"""Forks workers from a process that has imported torch already: ``python -m paceline.elastic.forkserver FD``.

Importing torch takes seconds, forking takes milliseconds: a worker that died is replaced at once.
Requests come over the socket pair ``FD``, one JSON object a packet with descriptors beside it
(``SCM_RIGHTS``)::

    {"fork": worker, "slot": s, "job": path}   the worker's end of its channel, and its log where s > 0
    {"host": 0}                                the store host's end of its socket pair

and answers go back the same way::

    {"forked": worker, "pid": pid}             with a pidfd of the new process
    {"failed": worker, "error": text}          it could not be forked
    {"exited": pid, "code": code}              minus the signal's number where one killed it

This process lives as long as its agent: when the agent's end closes, it kills what it has forked. A
scheduler that stops a job signals every process of it; until the workers have saved they need this one
and the store host, so only the workers heed that.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.core.signals import WORKER_STOP_SIGNALS

_WORKER = "paceline.training.worker"
"""What the forked processes run: a layer above this one, so it is imported by its name."""

_LONGEST = 65536

Child = Callable[[], int]


class ForkServerProcess:
    """Serves one agent, with one thread and no state but its children."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # by pidfd

    def serve(self) -> Child | None:
        """Serve until the agent has gone; in a forked child, return what it is to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._requests.fileno():
                    self._reap(key.fd)
                    continue
                content, descriptors = self._request()
                if not content:
                    self._end_all()
                    return None
                child = self._fork(json.loads(content), descriptors)
                if child is not None:
                    return child

    def _request(self) -> tuple[bytes, list[int]]:
        try:
            content, descriptors, _, _ = socket.recv_fds(self._requests, _LONGEST, 2)
        except ConnectionError:
            return b"", []  # an end of file, after an answer that nobody has read
        return content, descriptors

    def _fork(self, request: dict[str, object], descriptors: list[int]) -> Child | None:
        worker = request.get("fork", -1)
        # What is left in a buffer would be printed by the child once more.
        sys.stdout.flush()
        sys.stderr.flush()
        # A worker may be asked to stop before it heeds signals: it would ignore that as this process does.
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            self._answer({"failed": worker, "error": str(error)})
        else:
            if pid == 0:
                return self._become(request, descriptors)
            pidfd = os.pidfd_open(pid)  # nobody else reaps it, so the number is still its own
            self._pids[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ)
            self._answer({"forked": worker, "pid": pid}, pidfd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_STOP_SIGNALS)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _become(self, request: dict[str, object], descriptors: list[int]) -> Child:
        """In the child: keep nothing of the parent's but the request."""
        os.setsid()
        self._selector.close()
        self._requests.close()
        for pidfd in self._pids:
            os.close(pidfd)
        if "fork" in request:
            for number in WORKER_STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)  # until it handles them, there is nothing to save
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_STOP_SIGNALS)
        if "fork" not in request:
            return lambda: _serve_stores(descriptors[0])
        channel, *log = descriptors
        # A worker that rises to rank 0 later prints to the terminal, wherever it prints now.
        terminal = (os.dup(1), os.dup(2))
        if log:
            os.dup2(log[0], 1)
            os.dup2(log[0], 2)
            os.close(log[0])
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        job, slot = str(request["job"]), int(str(request["slot"]))
        return lambda: _run_worker(job, channel, slot, terminal)

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._answer({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, document: dict[str, object], *descriptors: int) -> None:
        # Where the agent has gone, the next request is its end of file.
        with suppress(ConnectionError):
            socket.send_fds(self._requests, [json.dumps(document).encode()], list(descriptors))

    def _end_all(self) -> None:
        for pid in self._pids.values():
            _kill_group(pid)
        for pid in self._pids.values():
            os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    # A child that was forked just now may not be the leader of its group yet.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run_worker(job: str, channel: int, slot: int, terminal: tuple[int, int]) -> int:
    sys.argv = [_WORKER, job]
    code: int = importlib.import_module(_WORKER).main_member(Path(job), channel, slot, terminal)
    return code


def _serve_stores(commands: int) -> int:
    from paceline.elastic.store_host import serve

    return serve(commands)


def main(descriptor: int) -> int:
    """Import what every worker needs, then serve."""
    import paceline.elastic.store_host  # noqa: F401

    preload = importlib.import_module(_WORKER).preload
    for number in WORKER_STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    preload()
    # What is here now stays; a child that collects garbage need not copy it.
    gc.collect()
    gc.freeze()
    child = ForkServerProcess(socket.socket(fileno=descriptor)).serve()
    return 0 if child is None else child()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
