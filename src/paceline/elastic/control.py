"""The agent's control socket: its server, and the client for `paceline scale` and other commands."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paceline.core.errors import ConfigError, PacelineError, RunDirectoryError
from paceline.core.files import parse_json, read_document, write_atomically
from paceline.core.job import LaunchSpec
from paceline.core.owned_names import make_directory
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline.elastic.leader import Controller, JobLeader
    from paceline.elastic.node import NodeWorkers

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
