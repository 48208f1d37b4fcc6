"""A fork server: a process that has imported the modules of others, and forks them on request. No torch here.

Importing torch takes seconds, forking takes milliseconds. An agent forks workers (:mod:`paceline.training.worker`),
a search forks trials, and a model server forks replicas. Each has a program of its own, which calls
:func:`run_fork_server`, and starts it with :class:`ForkServer`.

Requests come over a socket pair, one JSON object with descriptors (``SCM_RIGHTS``) in each packet::

    {"fork": number, ...}                      and the child's arguments

and answers return in the same way::

    {"forked": number, "pid": pid}             with a pidfd of the new process
    {"failed": number, "error": text}          it could not be forked
    {"exited": pid, "code": code}              minus the signal's number if one killed it

The server ends when its client's end of the socket pair closes. Nothing in it may compute: threads, and a
GPU's context, do not survive a fork. A scheduler that stops a job signals all of its processes; the
server ignores those signals, because its children may still need it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.core.ownership import Owner, name_multiprocessing, remove_leftovers, remove_names_of
from paceline.core.signals import WORKER_STOP_SIGNALS

_LONGEST = 65536
_MOST_DESCRIPTORS = 2
_END_S = 5.0

# --- The client's side ---


@dataclass(frozen=True)
class Forked:
    """A process runs; ``pidfd`` is the receiver's."""

    number: int
    pid: int
    pidfd: int


@dataclass(frozen=True)
class NotForked:
    """A process could not be started."""

    number: int
    error: str


@dataclass(frozen=True)
class Exited:
    """A process has ended; minus the signal's number where one killed it."""

    pid: int
    code: int


Report = Forked | NotForked | Exited


class ForkServer:
    """A fork server, started as a subprocess.

    Args:
        command: its program, to which its socket's descriptor is added.
        inherited: descriptors that it and its children shall keep.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], inherited: Sequence[int] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(), *inherited),
            )

    @property
    def pid(self) -> int:
        """The server's own."""
        return self._popen.pid

    def fileno(self) -> int:
        """Return the descriptor of the reports, for a selector."""
        return self._socket.fileno()

    def fork(self, number: int, descriptors: Sequence[int], **arguments: Any) -> None:
        """Request a process.

        Args:
            number: names it in the report.
            descriptors: passed to it; two at most.
            arguments: passed to it as JSON.
        """
        # If the server has died, its end of file reports it, and the next server gets the request.
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps({"fork": number, **arguments}).encode()], list(descriptors))

    def report(self) -> Report | None:
        """Wait for the next report, and return it; None once the server has ended."""
        content: bytes = b""
        descriptors: list[int] = []
        with suppress(ConnectionError):
            content, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST, 1)
        if not content:
            return None
        document = json.loads(content)
        if "exited" in document:
            return Exited(document["exited"], document["code"])
        if "failed" in document:
            return NotForked(document["failed"], document["error"])
        return Forked(document["forked"], document["pid"], descriptors[0])

    def end(self) -> int:
        """Have the server end as soon as it can; return its exit code."""
        self._socket.close()
        try:
            return self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def kill(self) -> None:
        """Kill the server, be it in the middle of its imports; unlike :meth:`end`, it kills no child before."""
        self._popen.kill()
        self._popen.wait()
        self._socket.close()


# --- The server's side ---


Child = Callable[[], int]
"""What a forked process runs; returns its exit code."""

PrepareChild = Callable[[Mapping[str, Any], Sequence[int]], Child]
"""Prepares a forked process, from its request and its descriptors. Stop signals are ignored, and blocked meanwhile."""


class ForkServerProcess:
    """Serves one client, with one thread and no state but its children.

    Args:
        requests: its end of the socket pair.
        prepare: the first function that a child calls.
        kill_groups: whether the end of a child kills all processes that it has started, and the end of the client all
            children with theirs.
    """

    def __init__(self, requests: socket.socket, prepare: PrepareChild, *, kill_groups: bool = True) -> None:
        self._requests = requests
        self._prepare = prepare
        self._kill_groups = kill_groups
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # by pidfd

    def serve(self) -> Child | None:
        """Serve until the client has gone; in a forked child, return what it must run."""
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._requests.fileno():
                    self._reap(key.fd)
                    continue
                content, descriptors = self._receive()
                if not content:
                    self._end()
                    return None
                child = self._fork(json.loads(content), descriptors)
                if child is not None:
                    return child

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            content, descriptors, _, _ = socket.recv_fds(self._requests, _LONGEST, _MOST_DESCRIPTORS)
        except ConnectionError:
            return b"", []  # an end of file, after an answer that was never read
        return content, descriptors

    def _fork(self, request: Mapping[str, Any], descriptors: list[int]) -> Child | None:
        number = request["fork"]
        # What is left in a buffer would be printed by the child once more.
        sys.stdout.flush()
        sys.stderr.flush()
        # A child may be asked to stop before it handles signals: it would ignore that as this process does.
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            self._answer({"failed": number, "error": str(error)})
        else:
            if pid == 0:
                return self._become_child(request, descriptors)
            pidfd = os.pidfd_open(pid)  # only this process reaps it, so the number is still its own
            self._pids[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ)
            self._answer({"forked": number, "pid": pid}, pidfd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_STOP_SIGNALS)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _become_child(self, request: Mapping[str, Any], descriptors: list[int]) -> Child:
        """Keep nothing of the parent's but the request."""
        os.setsid()
        if self._kill_groups:
            name_multiprocessing()
        self._selector.close()
        self._requests.close()
        for pidfd in self._pids:
            os.close(pidfd)
        child = self._prepare(request, descriptors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_STOP_SIGNALS)
        return child

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        if self._kill_groups:
            # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
            _kill_group(pid)
            remove_names_of(Owner.of(pid))
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._answer({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, document: Mapping[str, object], *descriptors: int) -> None:
        # Where the client has gone, the next request is its end of file.
        with suppress(ConnectionError):
            socket.send_fds(self._requests, [json.dumps(document).encode()], list(descriptors))

    def _end(self) -> None:
        if self._kill_groups:
            for pid in self._pids.values():
                _kill_group(pid)
            for pid in self._pids.values():
                os.waitpid(pid, 0)
            remove_leftovers()


def _kill_group(pid: int) -> None:
    # A child that was forked just now may not be the leader of its group yet.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def restore_stop_signals() -> None:
    """Have a stop signal end this process, as long as it handles none and has nothing to save."""
    for number in WORKER_STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def redirect_output(descriptor: int) -> None:
    """Print to ``descriptor`` from now on, line by line; close it."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextmanager
def _end_with_client(descriptor: int) -> Iterator[None]:
    """End this process as soon as its client has gone: imports take seconds, in which it reads no request."""
    done, end = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        poll.register(done, 0)  # the closing of the other end is reported without being asked for
        if descriptor in (ready for ready, _ in poll.poll()):
            os._exit(1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()  # a thread does not survive a fork
        os.close(done)


def run_fork_server(
    descriptor: int, preload: Callable[[], None], prepare: PrepareChild, *, kill_groups: bool = True
) -> int:
    """Run a fork server, or in a forked child the requested function; return the exit code.

    Args:
        descriptor: this end of the socket pair.
        preload: imports what every child needs, and starts no thread.
        prepare: see :class:`ForkServerProcess`.
        kill_groups: see there.
    """
    for number in WORKER_STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it hands that on, and nothing could be reaped
    with _end_with_client(descriptor):
        preload()
    # What is here now stays; a child that collects garbage need not copy it.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        child = ForkServerProcess(requests, prepare, kill_groups=kill_groups).serve()
    return 0 if child is None else child()
