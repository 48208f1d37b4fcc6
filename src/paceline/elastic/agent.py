"""The agent: starts a job's workers on this node, and replaces those that die or restarts all of them. No torch.

One loop drives two parts: :class:`~paceline.elastic.node.NodeWorkers`, which owns the workers, and a
:class:`~paceline.elastic.leader.Controller`, which decides for them. On one node that is a
:class:`~paceline.elastic.leader.SingleNodeLeader`. Agents of several nodes first agree on the one that
decides: :mod:`paceline.elastic.consensus`, which is imported there only. Commands reach it by its control socket.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paceline.core.errors import ConfigError, LaunchError, PacelineError, RunDirectoryError
from paceline.core.files import parse_json, read_document, write_atomically
from paceline.core.job import Command, LaunchSpec
from paceline.core.ownership import make_directory, remove_leftovers
from paceline.core.signals import STOP_SIGNALS, handle_signals
from paceline.core.standard_streams import print_status
from paceline.elastic.leader import Controller, SingleNodeLeader
from paceline.elastic.node import FileWork, NodeWorkers, WorkerMessage
from paceline.runs.directory import RunDirectory, RunLock
from paceline.runs.file_system import probe

if TYPE_CHECKING:
    from paceline.elastic.consensus.discovery import DiscoveryInfo
    from paceline.elastic.leader import JobLeader

_LONGEST_S = 60.0
_RETRY_S = 0.5


def _report_lacks(directory: RunDirectory) -> None:
    """Tell what the nodes' file system lacks; in a thread, because a slow one takes seconds."""
    with suppress(OSError):
        for lack in probe(directory.path):
            print_status(f"{directory.path} {lack.found}. {lack.advice}.")


class Agent:
    """A job whose workers are replaced when they die; see :class:`~paceline.launch.local.ProcessGroup`.

    Args:
        spec: the job, with its ``job_file`` and ``log_directory``.
        forkserver: the command of the process that forks workers.
    """

    def __init__(self, spec: LaunchSpec, forkserver: Command) -> None:
        assert spec.placement.log_directory is not None
        assert spec.job_file is not None
        if shutil.which(forkserver.argv[0]) is None:
            raise LaunchError(f"{forkserver.argv[0]}: command not found or not executable.")
        directory = self._directory = spec.placement.log_directory
        self._signals: list[int] = []  # not handled yet
        self._control: ControlSocket | None = None  # while this agent leads
        self._retry_at = 0.0  # when to try again to take the leader's resources, by the monotonic clock
        self._has_reported_no_control = False  # whether the lack of a control socket was reported
        try:
            with ExitStack() as stack:
                stack.callback(remove_leftovers)  # of workers whose fork server was killed
                directory.create()
                remove_leftovers()
                self._selector = stack.enter_context(selectors.DefaultSelector())
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # for signals and other threads
                stack.callback(os.close, self._wake)
                self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
                self._files = FileWork(partial(os.eventfd_write, self._wake, 1))
                discovery = None if spec.is_single_node else self._discover(spec, stack)
                # Not before, because the search for the shared secret can be interrupted by default handlers.
                stack.enter_context(handle_signals(STOP_SIGNALS, self._on_signal))
                is_first = discovery is None or discovery.is_first
                self._lock = stack.enter_context(closing(RunLock(directory)))
                stack.callback(self._finish_files)
                if is_first:
                    self._take_run(discovery, spec.recovery.token_file)
                self._node = NodeWorkers(
                    forkserver,
                    spec.job_file,
                    directory,
                    self._selector,
                    self._files,
                    heartbeat_s=spec.recovery.heartbeat_s,
                    grace_s=spec.recovery.grace_s,
                    inherited=(self._lock.fileno(),),
                    interface="" if discovery is None else discovery.interface,
                )
                stack.callback(self._node.end)
                if is_first and discovery is not None:
                    lacks = threading.Thread(
                        target=_report_lacks, args=(directory,), name="paceline-probe", daemon=True
                    )
                    lacks.start()
                self._controller = self._build_controller(spec, discovery)
                stack.callback(self._controller.close)
                stack.callback(self._close_control)
                # Once more, now as the first: when the links close, other nodes may replace these workers.
                stack.callback(self._node.end)
                self._requests = ControlApi(spec, directory, self._controller, self._node)
                self._controller.begin()
                if is_first:
                    self._control = ControlSocket(directory, self._selector, self._requests)
                    self._control.publish()
                self._stack = stack.pop_all()
        except OSError as error:
            raise LaunchError(f"a process could not be started: {error}.") from error

    def _discover(self, spec: LaunchSpec, stack: ExitStack) -> DiscoveryInfo:
        """Listen for the agents of the other nodes, and determine the addresses to connect to."""
        from paceline.elastic.consensus.discovery import discover

        discovery = discover(spec, self._directory)
        stack.callback(discovery.listener.close)
        return discovery

    def _take_run(self, discovery: DiscoveryInfo | None, token_file: Path | None) -> None:
        """Lock the run, and remove what an earlier job recorded of its failure.

        Raises:
            RunInUseError: another job, here or on other nodes, has the run.
        """
        self._lock.take()
        self._refuse_second_run(discovery, token_file)
        for stale_record in self._directory.logs.glob("rank-*.error.json"):
            stale_record.unlink(missing_ok=True)

    def _refuse_second_run(self, discovery: DiscoveryInfo | None, token_file: Path | None) -> None:
        """Leave the run to agents on other nodes: they take its lock some time after their leader has died.

        Raises:
            RunInUseError: one answers.
        """
        if not self._directory.agents.exists():
            return
        from paceline.elastic.consensus.discovery import active_agents

        own = None if discovery is None else (discovery.listener.host, discovery.listener.port)
        if active_agents(self._directory, own, token_file):
            raise self._directory.in_use()

    def _build_controller(self, spec: LaunchSpec, discovery: DiscoveryInfo | None) -> Controller:
        """Return what decides for the workers: alone on one node, by consensus on several."""
        if discovery is None:
            return SingleNodeLeader(spec, self._directory, self._node)
        from paceline.elastic.consensus.agent_controller import AgentController

        return AgentController(spec, self._directory, self._node, discovery, self._selector)

    def wait(self) -> int:
        """Watch the job to its end; print one message if it failed; return its exit code.

        Raises:
            NodeRemovedError: the job continues on other nodes, without this one, which can join it again.
        """
        try:
            while not self._controller.over:
                self._turn()
            return self._controller.conclude()
        finally:
            self._stack.close()

    def cancel(self) -> None:
        """Request the workers to stop; thread-safe."""
        self._signals.append(0)
        os.eventfd_write(self._wake, 1)

    def _turn(self) -> None:
        """Handle one round of events, then timeouts."""
        now = time.monotonic()
        due = min(now + _LONGEST_S, self._node.deadline, self._controller.deadline)
        for key, _ in self._selector.select(max(0.0, due - now)):
            key.data()
            self._forward_reports()
        now = time.monotonic()
        self._node.expire(now)
        self._forward_reports()
        self._controller.expire(now)
        if self._directory.has_queued_events:
            self._files.do_again(self._directory.append_queued_events)
        self._take_leadership(now)

    def _forward_reports(self) -> None:
        """Tell the controller what has become of this node's workers."""
        for report in self._node.reports():
            match report:
                case WorkerMessage(worker, message):
                    self._controller.said(worker, message)
                case end:
                    self._controller.ended(end)

    def _take_leadership(self, now: float) -> None:
        """Take the run's lock and serve commands, as soon as possible, while this agent leads.

        The last processes of the previous leader's node may still hold the lock, and the disk may be full; the workers
        continue in both cases.
        """
        if self._controller.leader is None:
            self._close_control()
            return
        if now < self._retry_at:
            return
        # The other nodes' heartbeats wake the loop often enough, so no deadline is needed.
        self._retry_at = now + _RETRY_S
        if not self._lock.held:
            self._files.do_again(self._try_to_take_lock)
        if self._control is None:
            try:
                self._control = ControlSocket(self._directory, self._selector, self._requests)
                self._files.do(partial(self._try_to_publish, self._control), self._on_published)
            except (OSError, RunDirectoryError) as error:
                self._on_published(error)

    def _try_to_take_lock(self) -> None:
        with suppress(OSError):
            self._lock.try_to_take(succeeds=True)

    def _try_to_publish(self, control: ControlSocket) -> Exception | None:
        try:
            control.publish()
        except OSError as error:
            return error
        return None

    def _on_published(self, error: Exception | None) -> None:
        if error is None:
            return
        self._close_control()
        if not self._has_reported_no_control:
            print_status(f"other commands cannot reach this run yet: {error}")
        self._has_reported_no_control = True

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._files.do(self._control.withdraw)
            self._control = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._files.deliver()
        while self._signals:
            number = self._signals.pop(0)
            if number:
                self._controller.signalled(number)
            else:
                self._controller.cancel()

    def _finish_files(self) -> None:
        """Finish all work on files, while the run is still locked."""
        self._files.close()
        self._directory.append_queued_events()


# --- The protocol: a Unix socket that only its own user can reach
#
# ``RUN/agent.json`` has the path. One packet is one JSON object: a request such as ``{"status": {}}`` or
# ``{"scale": {"nproc": 2}}``, and one answer to each, ``{"error": text}`` on failure. A socket's path is limited to 107
# bytes, which run directories often exceed, so the socket is in a private directory. No torch.


_LONGEST = 131072  # bytes per packet; a member takes about a hundred
_MOST_CLIENTS = 16
_ANSWER_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_NAME = "agent"


@dataclass(frozen=True)
class WorkerStatus:
    """A worker's status, as known by its agent.

    Attributes:
        rank: in the group, or None.
        local_index: its index on its node, which names its log.
        pid: None before it runs, and on other nodes than the leader's.
        step: steps done at its last heartbeat; -1 before the first.
    """

    rank: int | None
    local_index: int
    node: str
    pid: int | None
    step: int
    phase: str


@dataclass(frozen=True)
class RunStatus:
    """A job's status, as known by its agent.

    Attributes:
        generation: of the group, -1 before the first.
        target: the wanted number of workers.
        whole: whether all members of the group hold its state and train.
        stopping: whether no more workers are started.
        recoveries: workers lost so far.
        step: the highest that a member of the group reported.
        workers: members by rank, then the others.
    """

    generation: int
    target: int
    whole: bool
    stopping: bool
    recoveries: int
    step: int
    workers: tuple[WorkerStatus, ...]

    @property
    def ranks(self) -> tuple[WorkerStatus, ...]:
        """The workers in the group, by rank."""
        return tuple(worker for worker in self.workers if worker.rank is not None)


class ControlSocket:
    """The agent's side; its descriptors are in the agent's selector, with handlers as their data.

    Args:
        directory: the run's; contains ``agent.json`` from :meth:`publish` until :meth:`withdraw`.
        selector: the agent's.
        controlled: answers requests.
    """

    def __init__(self, directory: RunDirectory, selector: selectors.BaseSelector, controlled: ControlApi) -> None:
        self._selector = selector
        self._controlled = controlled
        self._clients: set[socket.socket] = set()
        self._address_file = directory.agent
        self._socket_directory = _private_directory()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path = self._socket_directory / _NAME
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(_MOST_CLIENTS)
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._on_client)
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Write where other commands find it.

        Raises:
            OSError: the disk does not take it.
        """
        note = {"pid": os.getpid(), "socket": str(self._socket_directory / _NAME)}
        write_atomically(self._address_file, json.dumps(note).encode())

    def close(self) -> None:
        """Close all connections."""
        for served in (*self._clients, self._listener):
            with suppress(KeyError, ValueError):
                self._selector.unregister(served)
            served.close()
        self._clients.clear()
        shutil.rmtree(self._socket_directory, ignore_errors=True)

    def withdraw(self) -> None:
        """Remove what :meth:`publish` wrote."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            # Another node's agent may lead by now, and have written its own file.
            if parse_json(read_document(self._address_file))["socket"] == str(self._socket_directory / _NAME):
                self._address_file.unlink()

    def _on_client(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            client, _ = self._listener.accept()
            if len(self._clients) >= _MOST_CLIENTS or _user_of(client) != os.geteuid():
                client.close()
                return
            client.setblocking(False)
            self._clients.add(client)
            self._selector.register(client, selectors.EVENT_READ, partial(self._on_request, client))

    def _on_request(self, client: socket.socket) -> None:
        try:
            content = client.recv(_LONGEST)
            if content:
                client.send(json.dumps(self._answer(content)).encode(), socket.MSG_NOSIGNAL)
                return
        except OSError:
            pass  # the client has gone or does not read, so drop it
        self._selector.unregister(client)
        self._clients.discard(client)
        client.close()

    def _answer(self, content: bytes) -> dict[str, Any]:
        try:
            request = json.loads(content)
        except ValueError:
            request = None
        try:
            match request:
                case {"status": {}}:
                    pass
                case {"scale": {"nproc": int(nproc)}} if not isinstance(nproc, bool):
                    self._controlled.scale(nproc)
                case {"gather": {}}:
                    self._controlled.gather()
                case {"scale": {"nodes": int(nodes)}} if not isinstance(nodes, bool):
                    self._controlled.scale_nodes(nodes)
                case _:
                    raise ConfigError(f"unknown request: {content[:200]!r}")
        except PacelineError as error:
            return {"error": str(error)}
        return asdict(self._controlled.status())


def _user_of(connection: socket.socket) -> int:
    """Return the user at the other end, from the kernel."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(content)[1]
    return user


def _private_directory() -> Path:
    """Create a directory that only this user can enter, with a path short enough for a socket."""
    try:
        return make_directory("agent", longest=len(f"/{_NAME}"), parents=(os.environ.get("XDG_RUNTIME_DIR"),))
    except OSError as error:
        raise RunDirectoryError(f"the agent's socket cannot be created: {error}.") from error


# --- A command's side ---


class AgentConnection:
    """A command's connection to the agent of an active run.

    Raises:
        RunDirectoryError: no agent is active on this run.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        try:
            path = parse_json(read_document(directory.agent))["socket"]
            self._socket.connect(path)
            if _user_of(self._socket) != os.geteuid():
                raise PermissionError("it is another user's")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._socket.close()
            raise RunDirectoryError(_describe_no_agent(directory, error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def status(self) -> RunStatus:
        """Return the job's status.

        Raises:
            AgentGone: the job has ended.
        """
        return self._ask({"status": {}})

    def scale(self, **wanted: int) -> RunStatus:
        """Request another ``nproc`` or number of ``nodes``; return at once, with the new target.

        Raises:
            ConfigError: the number is not possible.
            AgentGone: the job has ended.
        """
        return self._ask({"scale": wanted})

    def gather(self) -> RunStatus:
        """Make training wait, after the step, until all wanted workers take part.

        Raises:
            AgentGone: the job has ended.
        """
        return self._ask({"gather": {}})

    def _ask(self, request: Mapping[str, Any]) -> RunStatus:
        try:
            self._socket.send(json.dumps(request).encode(), socket.MSG_NOSIGNAL)
            content = self._socket.recv(_LONGEST)
        except TimeoutError:
            raise PacelineError(f"the run's agent did not answer within {_ANSWER_S:g} s.") from None
        except ConnectionError:
            content = b""
        if not content:
            raise AgentGone("the job ended.")
        answer = json.loads(content)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return msgspec.convert(answer, RunStatus)


class AgentGone(PacelineError):
    """The job, and its agent with it, has ended."""


def _describe_no_agent(directory: RunDirectory, error: Exception) -> str:
    if not directory.exists() and not directory.path.is_dir():
        return f"there is no run {directory.path}."
    if directory.is_running() and isinstance(error, FileNotFoundError):
        return f"{directory.path} is running, but without an agent. Only runs with --recover inplace have one."
    if directory.is_running():
        return f"the agent of {directory.path} cannot be reached: {error}."
    return f"{directory.path} is not running. Continue it with: paceline resume {directory.path}"


# --- The leading agent's answers. No torch ---


class ControlApi:
    """Answers control requests, where this agent leads.

    Args:
        controller: knows the leader.
    """

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, controller: Controller, node: NodeWorkers) -> None:
        self._spec = spec
        self._directory = directory
        self._controller = controller
        self._node = node

    def status(self) -> RunStatus:
        """Return the job's status.

        Raises:
            ConfigError: this agent does not lead.
        """
        leader = self._leader()
        planner, beats = leader.planner, leader.beats
        in_group = planner.group_workers()
        other_workers = [worker for worker in planner.workers if worker not in in_group]
        steps = {worker: beats[worker].step if worker in beats else -1 for worker in (*in_group, *other_workers)}
        return RunStatus(
            generation=-1 if planner.group is None else planner.generation,
            target=planner.target,
            whole=leader.recovery_log.is_whole(planner.group),
            stopping=leader.shutdown.is_final,
            recoveries=leader.failure_policy.recoveries,
            step=max((steps[worker] for worker in in_group), default=-1),
            workers=tuple(
                WorkerStatus(
                    rank=in_group.index(worker) if worker in in_group else None,
                    local_index=planner.local_index(worker),
                    node=planner.node(worker),
                    pid=self._node.pid_of(worker),
                    step=step,
                    phase=beats[worker].phase if worker in beats else "starting",
                )
                for worker, step in steps.items()
            ),
        )

    def scale(self, nproc: int) -> None:
        """Set the number of workers on each node; workers join or leave after a step.

        Raises:
            ConfigError: the number is not possible, the job is ending, or this agent does not lead.
        """
        leader = self._leader()
        leader.shutdown.refuse_changes()
        if nproc < 1:
            raise ConfigError(f"--nproc must be at least 1, but is {nproc}.")
        leader.learn_microbatches()
        planner = leader.planner
        num_nodes, most = len(planner.nodes), planner.max_workers
        if nproc * num_nodes > most:
            raise ConfigError(
                f"{nproc * num_nodes} processes cannot share {most} micro-batches: each needs at least one. "
                f"Use --nproc {most // num_nodes} or fewer. "
                "A run's number of micro-batches is fixed when it is created."
            )
        leader.resize(
            dict.fromkeys(planner.nodes, nproc),
            before=planner.target,
            target=nproc * num_nodes + planner.spares,
        )

    def scale_nodes(self, nodes: int) -> None:
        """Reduce the number of nodes; the last ones to join leave after a step.

        Raises:
            ConfigError: the number is not possible, the job is ending, or this agent does not lead.
        """
        leader = self._leader()
        current_nodes = [name for name in self._controller.nodes if name in leader.planner.nodes]
        if nodes > len(current_nodes):
            raise ConfigError(
                f"the run has {len(current_nodes)} node(s). To add one, up to --nodes MIN:MAX, run there: "
                f"paceline join {self._directory.path}"
            )
        if nodes < self._spec.least_nodes:
            raise ConfigError(
                f"--nodes must be at least {self._spec.least_nodes}, the minimum with which the run was started."
            )
        # The leading node stays, because it removes the others.
        leaving = [name for name in reversed(current_nodes) if name != self._controller.name][
            : len(current_nodes) - nodes
        ]
        leader.retire(leaving)

    def gather(self) -> None:
        """Make training wait until all wanted workers take part.

        Raises:
            ConfigError: this agent does not lead.
        """
        self._leader().gather()

    def _leader(self) -> JobLeader:
        if self._controller.leader is None:
            raise ConfigError("another node's agent leads the run now. Repeat the command there.")
        return self._controller.leader
