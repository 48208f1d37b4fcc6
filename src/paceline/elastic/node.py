"""The workers of one node: started, watched and ended by its agent."""

from __future__ import annotations

import json
import math
import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec

from paceline.core.environment import with_hash_seed
from paceline.core.errors import LaunchError
from paceline.core.fork_server import Exited, Forked, ForkServer, NotForked
from paceline.core.job import Command
from paceline.core.signals import describe_unresponsive, is_computing
from paceline.elastic.group_planner import Status, WorkerState
from paceline.elastic.worker_channel import (
    Assignment,
    ChannelError,
    Ending,
    ExitRequest,
    Failed,
    GroupBroken,
    Joined,
    Message,
    Ready,
    ReformRequest,
    ReportRequest,
    StallSnapshot,
    WorkerHeartbeat,
    channel_pair,
)
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import FailureRecord, read_failure

# --- A leader's commands to nodes, and their reports. No torch ---


Order = Assignment | ReformRequest | GroupBroken | ReportRequest | ExitRequest
Said = WorkerHeartbeat | Ready | Joined | StallSnapshot


class WorkerMessage(NamedTuple):
    """What a worker of this node has said."""

    worker: int
    message: Said


class Ended(msgspec.Struct, frozen=True, tag="ended", tag_field="kind", forbid_unknown_fields=True):
    """The end of a worker's process.

    Attributes:
        code: its exit code; minus the signal's number if one killed it.
        killed: why this node killed it; "" if it did not.
        silent_s: seconds since its last message when it ended.
        retired: whether it got the order to end.
        failure: the error that it recorded.
        finished: whether it failed although the run has its result.
    """

    worker: int
    local_index: int
    pid: int | None
    code: int
    killed: str
    silent_s: float
    step: int
    retired: bool
    failure: FailureRecord | None
    finished: bool = False


class NodeCommands(Protocol):
    """A node as seen by its leader: this one, or another one behind a connection."""

    def start(self, number: int, local_index: int) -> None: ...

    def send(self, number: int, order: Order) -> None:
        """Send an order to a worker."""

    def kill(self, number: int, why: str) -> None:
        """Fence a worker."""

    def stop(self, number: int) -> None:
        """Signal all workers."""

    def kill_all(self, why: str) -> None: ...


# --- A worker from its agent's side: process, channel and deadlines ---


_REPORT_S = 1.0  # how long the fork server may take to report an end that its pidfd shows already
_LEAVE_S = 60.0  # how long a member may take to leave a broken group: at most a step's computation
_START_S = 60.0  # importing a task or building a dataset may hold the interpreter lock for long


class WorkerProcess:
    """One worker, from the request to fork it until its end was seen.

    Attributes:
        pid: None until it was forked.
        step: its last reported step, -1 for none.
        heard_at: time of its last message, by the monotonic clock.
        killed: why the agent killed it; "" if it did not.
        ending: whether its process has ended, with an exit code not known yet.
        beats: whether its channel is open.
        status: as known by the leader.
        generation: of its last group, -1 for none.
        retired: whether the agent ordered it to end.
        failure: its error, if it could not be recorded in the run's directory.
        announced_code: its exit code, as it announced it; that of SIGKILL before.
        is_prepared: whether it may be forked: its files are as they should be.
    """

    def __init__(self, number: int, local_index: int) -> None:
        self.number = number
        self.local_index = local_index
        self.pid: int | None = None
        self.pidfd: int | None = None
        self.step = -1
        self.heard_at = time.monotonic()
        self.killed = ""
        self.ending = False
        self.beats = True
        self.retired = False
        self.failure: FailureRecord | None = None
        self.announced_code = -int(signal.SIGKILL)
        self._expected = "start"
        self._limit_s = math.inf
        self._stage_limit_s = 0.0
        self._expected_by = math.inf
        self._leave_by = math.inf
        self.status: Status = "starting"
        self.generation = -1
        self._child_ends = ExitStack()
        self.channel, child_end = channel_pair()
        self.channel.setblocking(False)
        self._child_ends.callback(child_end.close)
        self.descriptors = [child_end.fileno()]
        self.is_prepared = False

    def prints_to(self, log: BinaryIO | None) -> None:
        """Take over its log, which is now open; without one it prints to the terminal."""
        self.is_prepared = True
        if log is not None:
            self.descriptors.append(self._child_ends.enter_context(log).fileno())

    def fileno(self) -> int:
        return self.channel.fileno()

    @property
    def deadline(self) -> float:
        """When the worker's time is up, by the monotonic clock."""
        return min(self._expected_by, self._leave_by)

    @property
    def failing(self) -> str:
        """What it has not done by its deadline."""
        if self._leave_by < self._expected_by:
            return "did not leave a broken group"
        return f"did not {self._expected} within {self._limit_s:g} s"

    def runs(self, pid: int, pidfd: int) -> None:
        """Record that it was forked; takes over ``pidfd``."""
        self.pid = pid
        self.pidfd = pidfd
        self._child_ends.close()
        self.expect("say anything", _START_S)

    def expect(self, what: str, limit_s: float) -> None:
        """Set the next deadline."""
        self._expected = what
        self._limit_s = limit_s
        self._expected_by = time.monotonic() + limit_s
        self._leave_by = math.inf

    def heard(self, message: Message, heartbeat_s: float) -> None:
        """Record a message."""
        self.heard_at = time.monotonic()
        self._extend_deadline(heartbeat_s)
        match message:
            case WorkerHeartbeat(step, phase=phase, limit_s=limit_s):
                self.step = step
                self._stage_limit_s = limit_s
                if phase == "script" and self._leave_by < math.inf:  # its code may take long, and leaves afterwards
                    self._leave_by = time.monotonic() + _LEAVE_S
            case Ready():
                # It may wait, or end without a further heartbeat.
                self.status = "waiting"
                self._leave_by = math.inf
                self._extend_deadline(_START_S)
            case Failed(failure):
                self.failure = failure
            case Ending(code):
                self.announced_code = code

    def closed_channel(self, grace_s: float) -> None:
        """Record that it is exiting, without further heartbeats."""
        self.beats = False
        self.expect("end", grace_s)

    def ended(self) -> None:
        """Record that its process has ended; the fork server reports the exit code, if it is alive."""
        self.ending = True
        self.expect("be reported", _REPORT_S)

    def is_busy(self, now: float, heartbeat_s: float) -> bool:
        """Return whether it is silent, but computes; extend its deadline, to the time limit of its stage at most.

        C code that holds the interpreter lets no heartbeat through. On a busy machine it may take seconds: torch's own
        operations with sharded tensors are such code.
        """
        until = self.heard_at + self._stage_limit_s
        if self._expected != "answer" or self.pid is None or now >= until or not is_computing(self.pid):
            return False
        self._limit_s = self._stage_limit_s
        self._expected_by = min(now + heartbeat_s, until)
        return self._leave_by > now

    def _extend_deadline(self, heartbeat_s: float) -> None:
        if self.beats and not self.ending and not self.killed:
            self._expected = "answer"
            self._limit_s = heartbeat_s if self.status == "in_group" else _START_S
            self._expected_by = time.monotonic() + self._limit_s

    def enter_group(self, generation: int, heartbeat_s: float) -> None:
        """Record that it is in a group, where others wait for it."""
        self.status = "in_group"
        self.generation = generation
        self._leave_by = math.inf
        self._extend_deadline(heartbeat_s)

    def group_is_broken(self, generation: int) -> None:
        """Set the deadline for leaving a broken group, and enter none of a lower number."""
        self.generation = max(self.generation, generation)
        self._leave_by = time.monotonic() + _LEAVE_S

    def kill(self, why: str) -> None:
        """Kill the process, if it runs."""
        self.killed = self.killed or why
        if self.pid is not None:
            self.signal(signal.SIGKILL)
            self.expect("end", _REPORT_S * 10)

    def signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def wait_gone(self, limit_s: float) -> None:
        """Wait until the process has ended."""
        if self.pidfd is not None:
            select.select([self.pidfd], [], [], limit_s)

    def close(self) -> None:
        self._child_ends.close()
        self.channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


# --- The rendezvous stores of a node, one per generation; a host process that ends or hangs is replaced ---


STORE_HOST = -1
"""The number of the store host among what a fork server forks; workers' are 0 and above."""

_LONGEST_ANSWER = 4096
_SERVED_S = 2.0  # how long the store host may take to open or close a store: milliseconds, unless it hangs


class RendezvousStores:
    """The rendezvous stores of one node, which a process of its own serves, by ``serve_stores``.

    Args:
        selector: of the agent's loop; handlers are the registered data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._host: socket.socket | None = None  # it reads an end of file when the host has ended
        self._pidfd: int | None = None
        self._owed = 0  # commands that were not answered yet
        self._answer_due = math.inf

    def open(self, generation: int, address: str, fork_server: ForkServer) -> int:
        """Serve a store at this node's ``address``, in a host that ``fork_server`` forks if there is none.

        Returns:
            The port, to which members may connect at once.
        """
        if self._host is None:
            self._host, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fork_server.fork(STORE_HOST, [theirs.fileno()])
            self._owed = 0
            self._selector.register(self._host, selectors.EVENT_READ, partial(self._on_host, self._host))
        with socket.create_server((address, 0), backlog=128) as listener:
            self._tell({"open": generation}, [listener.fileno()])
            port: int = listener.getsockname()[1]
        return port

    def close(self, generation: int) -> None:
        """Close the store of a generation, which frees members that wait in it: their connections are reset."""
        self._tell({"close": generation}, [])

    def forked(self, pidfd: int) -> None:
        """Register the forked host; takes over ``pidfd``."""
        if self._host is None:
            os.close(pidfd)
            return
        self._pidfd = pidfd
        self._answer_due = time.monotonic() + _SERVED_S

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return self._answer_due if self._owed and self._pidfd is not None else math.inf

    def expire(self, now: float) -> None:
        """Replace a host that did not answer in time."""
        if now >= self.deadline:
            self.end()

    def end(self) -> None:
        """End the host, even where it hangs.

        Its clients lose it, request a new group, and meet in the store of the next host.
        """
        if self._host is not None:
            self._selector.unregister(self._host)
            self._host.close()
            self._host = None
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_host(self, host: socket.socket) -> None:
        if host is not self._host:
            return
        content = b""
        with suppress(ConnectionError):
            content = host.recv(_LONGEST_ANSWER)
        if content:
            self._owed -= 1
        else:
            self.end()

    def _tell(self, command: Mapping[str, int], descriptors: Sequence[int]) -> None:
        if self._host is None:
            return
        self._answer_due = time.monotonic() + _SERVED_S
        self._owed += 1
        # Where the host has died, the members' connections are refused, and they ask again.
        with suppress(ConnectionError):
            socket.send_fds(self._host, [json.dumps(command).encode()], list(descriptors))


# --- A node's work on the run's files, in a thread of its own ---


T = TypeVar("T")


class FileWork:
    """Works on files in the order in which that is asked for, while the agent's loop continues.

    A network file system may take seconds for what a disk does at once. An agent that is silent for as long is lost to
    the others, and its workers are lost to it.

    Args:
        wake: wakes the loop, which then calls :meth:`deliver`; thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-files")
        self._done: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._last: dict[Callable[[], object], Future[Any]] = {}  # of :meth:`do_again`

    def do(self, work: Callable[[], T], then: Callable[[T], object] | None = None) -> Future[T]:
        """Have ``work`` done, and ``then`` called in the loop with its result; an exception is raised there."""
        future = self._thread.submit(work)
        if then is not None:
            future.add_done_callback(partial(self._on_done, then))
        return future

    def do_again(self, work: Callable[[], T], then: Callable[[T], object] | None = None) -> None:
        """Have work done that is asked for again and again, unless it still waits for the disk."""
        if work not in self._last or self._last[work].done():
            self._last[work] = self.do(work, then)

    def deliver(self) -> None:
        """Call the follow-ups of all work that is done."""
        while not self._done.empty():  # no other thread takes any
            self._done.get()()

    def close(self) -> None:
        """Finish the work; nothing follows it any more."""
        self._thread.shutdown()

    def _on_done(self, then: Callable[[T], object], future: Future[T]) -> None:
        self._done.put(lambda: then(future.result()))
        self._wake()


# --- This node's workers: started, watched and fenced by orders of the leader ---
#
# One thread and one selector, shared with the owner of the node: workers' channels and pidfds, the fork server and the
# store host. The node reports events of workers; the leader orders the response.


_FORKSERVERS = 1  # consecutive fork servers that may end while a worker waits to be forked
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before another fork server is started that no worker waits for


class NodeWorkers:
    """The workers of one node; :meth:`reports` tells what has become of them.

    Args:
        fork_server: the command of the process that forks them.
        job_file: the workers' configuration.
        directory: for logs and error records.
        selector: of the agent's loop; handlers are the registered data.
        heartbeat_s: a member that is silent for this long is killed.
        grace_s: how long a worker may take to end after it has closed its channel.
        inherited: descriptors that all processes here keep.
        interface: the network interface to members on other nodes.
    """

    def __init__(
        self,
        fork_server: Command,
        job_file: Path,
        directory: RunDirectory,
        selector: selectors.BaseSelector,
        files: FileWork,
        *,
        heartbeat_s: float,
        grace_s: float,
        inherited: tuple[int, ...] = (),
        interface: str = "",
    ) -> None:
        self._fork_server = fork_server
        self._job_file = job_file
        self._directory = directory
        self._selector = selector
        self._heartbeat_s = heartbeat_s
        self._grace_s = grace_s
        self._inherited = inherited
        self._interface = interface
        self.files = files
        self._workers: dict[int, WorkerProcess] = {}
        self._reports: deque[WorkerMessage | Ended] = deque()
        self._stop = 0  # the signal sent to all workers, including later ones
        self._stores = RendezvousStores(selector)
        self._failed_forkservers = 0  # fork servers that ended while a worker waited, since the last fork
        self._ended_forkservers = 0  # fork servers that ended, since the last fork
        self._forkserver_due = math.inf  # by the monotonic clock
        self._forkserver: ForkServer | None = None
        self._running_forkserver()

    def reports(self) -> Iterator[WorkerMessage | Ended]:
        """Return the workers' messages and ends since the last call; the agent's loop asks after each of its events."""
        while self._reports:
            yield self._reports.popleft()

    @property
    def workers(self) -> dict[int, tuple[int, WorkerState]]:
        """All workers by number, with their last generation and current status."""
        return {w.number: (w.generation, WorkerState(w.local_index, w.status)) for w in self._workers.values()}

    def pid_of(self, number: int) -> int | None:
        """Return a worker's process id, or None if it is not on this node or not forked yet."""
        return self._workers[number].pid if number in self._workers else None

    # Orders.

    def start(self, number: int, local_index: int) -> None:
        worker = self._workers[number] = WorkerProcess(number, local_index)
        self._watch(worker, partial(self._on_message, worker))
        self.files.do(partial(self._prepare_files, local_index), partial(self._on_prepared, worker))

    def _prepare_files(self, local_index: int) -> BinaryIO | None:
        """Remove the error of the worker's predecessor, and return its log; None if it prints to the terminal."""
        with suppress(OSError):  # the disk may fail meanwhile
            self._directory.error_of(local_index).unlink(missing_ok=True)
        with suppress(OSError):
            return self._directory.log_of(local_index).open("ab") if local_index > 0 else None
        return None

    def _on_prepared(self, worker: WorkerProcess, log: BinaryIO | None) -> None:
        if worker.number in self._workers:
            worker.prints_to(log)
            self._fork(worker)
        elif log is not None:
            log.close()

    def send(self, number: int, order: Order) -> None:
        """Send an order to a worker, unless it has ended."""
        worker = self._workers.get(number)
        if worker is None:
            return
        match order:
            case Assignment(generation, world_size=world_size, local_world_size=local_world_size):
                worker.enter_group(generation, self._heartbeat_s)
                if world_size > local_world_size:
                    order = msgspec.structs.replace(order, interface=self._interface)
            case GroupBroken(generation):
                worker.group_is_broken(generation)
            case ExitRequest():
                worker.retired = True
        worker.channel.send(order)

    def kill(self, number: int, why: str) -> None:
        """Fence a worker; nothing of it acts any more once its end is reported."""
        if number in self._workers:
            self._kill(self._workers[number], why)

    def stop(self, number: int) -> None:
        """Signal all workers; one that was not forked yet has nothing to save, and ends at once."""
        self._stop = number
        for worker in list(self._workers.values()):
            if worker.pid is None:
                self._ended(worker, -number)
            else:
                worker.signal(number)

    def kill_all(self, why: str) -> None:
        for worker in list(self._workers.values()):
            self._kill(worker, why)

    def open_store(self, generation: int, address: str) -> int:
        """Serve a store for a generation at this node's address; return its port."""
        return self._stores.open(generation, address, self._running_forkserver())

    def close_store(self, generation: int) -> None:
        """Close a generation's store, which frees members that wait in it."""
        self._stores.close(generation)

    # Timeouts.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        workers = (worker.deadline for worker in self._workers.values())
        return min([self._stores.deadline, self._forkserver_due, *workers])

    def expire(self, now: float) -> None:
        """Kill overdue workers, and replace an overdue store host."""
        for worker in [w for w in self._workers.values() if w.deadline <= now]:
            if worker.ending:
                self._ended(worker, worker.announced_code)  # the fork server does not say how
            elif not worker.is_busy(now, self._heartbeat_s):
                silent = not worker.killed and now - worker.heard_at >= self._heartbeat_s
                why = describe_unresponsive(worker.pid) if silent else ""
                self._kill(worker, f"{worker.failing}: it {why}" if why else worker.failing)
        self._stores.expire(now)
        if self._forkserver_due <= now:
            self._running_forkserver()

    def end(self) -> None:
        """Release everything, after any error."""
        for worker in list(self._workers.values()):
            worker.signal(signal.SIGKILL)
        self._stores.end()
        if self._forkserver is not None:
            self._forkserver.end()
        for worker in list(self._workers.values()):
            worker.wait_gone(_REPORT_S * 5)
            worker.close()
        self._workers.clear()

    def _watch(self, file: int | ForkServer | WorkerProcess, handler: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, handler)

    def _kill(self, worker: WorkerProcess, why: str) -> None:
        worker.kill(why)
        if worker.pid is None:
            self._ended(worker, -signal.SIGKILL)

    # The fork server.

    def _running_forkserver(self) -> ForkServer:
        """Return the fork server; start it if there is none."""
        if self._forkserver is not None:
            return self._forkserver
        self._forkserver_due = math.inf
        env = with_hash_seed({**os.environ, **self._fork_server.env})
        self._forkserver = ForkServer(self._fork_server.argv, env, self._inherited)
        self._watch(self._forkserver, partial(self._on_report, self._forkserver))
        return self._forkserver

    def _fork(self, worker: WorkerProcess) -> None:
        self._running_forkserver().fork(
            worker.number, worker.descriptors, local_index=worker.local_index, job_file=str(self._job_file)
        )

    def _on_report(self, fork_server: ForkServer) -> None:
        match fork_server.report():
            case None:
                self._forkserver_ended(fork_server)
            case Forked(number, pid, pidfd):
                self._failed_forkservers = 0
                self._ended_forkservers = 0
                if number != STORE_HOST:
                    self._forked(number, pid, pidfd)
                else:
                    self._stores.forked(pidfd)
            case NotForked(number, error):
                self.kill(number, f"could not be started: {error}")
            case Exited(pid, code):
                for worker in [w for w in self._workers.values() if w.pid == pid]:
                    self._ended(worker, code)

    def _forkserver_ended(self, fork_server: ForkServer) -> None:
        self._selector.unregister(fork_server)
        code = fork_server.end()
        self._forkserver = None
        if any(worker.pid is None for worker in self._workers.values()):
            self._failed_forkservers += 1
            if self._failed_forkservers > _FORKSERVERS:
                raise LaunchError(
                    f"the process that forks workers ended with status {code}, twice; see its output above. "
                    "Use --recover none to start workers without it."
                )
        # The workers do without it until one of them must be replaced; it may be killed again and again.
        pause = min(_PAUSE_S * (2**self._ended_forkservers - 1), _LONGEST_PAUSE_S)
        self._ended_forkservers += 1
        self._forkserver_due = time.monotonic() + pause
        for worker in list(self._workers.values()):
            if worker.pid is None:
                if worker.is_prepared:
                    self._fork(worker)
            elif worker.ending:
                if worker.beats:
                    self._on_message(worker)  # what it has announced
                self._ended(worker, worker.announced_code)

    # Workers: forked, heard, ended.

    def _forked(self, number: int, pid: int, pidfd: int) -> None:
        if number not in self._workers:
            # The worker was killed before it was forked.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        worker = self._workers[number]
        worker.runs(pid, pidfd)
        self._watch(pidfd, partial(self._on_end, worker))
        if self._stop:
            worker.signal(self._stop)

    def _on_end(self, worker: WorkerProcess) -> None:
        """Handle a pidfd whose process has ended."""
        if worker.number not in self._workers:
            return
        assert worker.pidfd is not None
        self._selector.unregister(worker.pidfd)
        worker.ended()

    def _on_message(self, worker: WorkerProcess) -> None:
        while worker.number in self._workers:
            try:
                message = worker.channel.receive()
            except BlockingIOError:
                return
            except ChannelError as error:
                self._kill(worker, str(error))
                return
            if message is None:
                self._selector.unregister(worker)
                worker.closed_channel(self._grace_s)
                return
            worker.heard(message, self._heartbeat_s)
            if isinstance(message, Said):
                self._reports.append(WorkerMessage(worker.number, message))
            elif not isinstance(message, Failed | Ending):
                self._kill(worker, f"sent a message that is the agent's: {message}")
                return

    def _ended(self, worker: WorkerProcess, code: int) -> None:
        del self._workers[worker.number]
        for file in (worker.channel.fileno(), worker.pidfd):
            if file is not None:
                with suppress(KeyError):
                    self._selector.unregister(file)
        worker.close()
        end = Ended(
            worker=worker.number,
            local_index=worker.local_index,
            pid=worker.pid,
            code=code,
            killed=worker.killed,
            silent_s=round(time.monotonic() - worker.heard_at, 4),
            step=worker.step,
            retired=worker.retired,
            failure=worker.failure,
        )
        self.files.do(partial(self._complete, end), self._reports.append)

    def _complete(self, end: Ended) -> Ended:
        """Add what the run's files tell."""
        failure = read_failure(self._directory.error_of(end.local_index)) or end.failure
        return msgspec.structs.replace(end, failure=failure, finished=end.code != 0 and self._directory.has_result())
