"""Nodes of a job that an engine of actors carries, Ray or Monarch: their actors, and the controller of these."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import psutil

from paceline.core.environment import HOSTS, JOB_ID, NODE_RANK, NODES
from paceline.core.errors import LaunchError
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import STOP_SIGNALS, StopRequests, forwarded_signal, handle_signals
from paceline.core.sockets import bound_socket, job_port
from paceline.launch.supervisor import end_processes
from paceline.runs.failures import STOPPED

# --- The job, as a file ---


@dataclass(frozen=True, kw_only=True)
class ActorJob:
    """The job for an engine's nodes; a file has it as JSON.

    Attributes:
        env: variables for it.
        recovers: the rest of the job continues when a node is lost, and accepts a replacement.
        replacements: number of lost nodes to replace.
    """

    command: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    recovers: bool = False
    replacements: int = 0

    @property
    def text(self) -> str:
        """The job as JSON, a line for each attribute."""
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job that :attr:`text` has described."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values)


# --- One node's part of the job: an actor that runs one command
#
# The kernel kills the command when the actor's process ends.


_LINES_KEPT = 10_000
_LINES_AT_ONCE = 1_000


class ActorCommand:
    """Runs a command, and keeps what it prints until that is fetched; its methods run in any thread."""

    def __init__(self) -> None:
        # Bounded: a command that prints faster than the terminal shows waits, as at any pipe.
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_LINES_KEPT)
        self._popen: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def can_listen(self, address: str, port: int) -> bool:
        """Return whether no process of this node listens at this port."""
        try:
            bound_socket(address, port).close()
        except OSError:
            return False
        return True

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the command; ``env`` has all its variables."""
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(argv, env, cwd, started), daemon=True).start()
        started.result()

    def read(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return the output since the last call: (1 or 2, line) for stdout or stderr.

        Args:
            timeout_s: how long to wait for a line.

        Returns:
            The lines, and the exit code after the last of them; minus the signal's number where one killed
            the command.
        """
        lines = []
        with suppress(queue.Empty):
            line = self._lines.get(timeout=timeout_s)
            while line is not None:
                lines.append(line)
                if len(lines) == _LINES_AT_ONCE:
                    return lines, None
                line = self._lines.get_nowait()
            return lines, self._code
        return lines, None

    def send_signal(self, number: int) -> None:
        """Signal the command, and not its children."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def end(self) -> None:
        """Kill the command and all that it has started."""
        if self._popen is None:
            return
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._popen.pid).children(recursive=True)
            self._popen.kill()
            end_processes(tree)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, started: Future[None]) -> None:
        # This thread lives as long as the command: when the thread that started it ends, the kernel ends the
        # command too.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            popen = subprocess.Popen(
                kill_with_parent_command(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            started.set_exception(error)
            return
        self._popen = popen
        started.set_result(None)
        readers = [
            threading.Thread(target=self._keep, args=(number, pipe), daemon=True)
            for number, pipe in ((1, popen.stdout), (2, popen.stderr))
        ]
        for reader in readers:
            reader.start()
        # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
        self._code = popen.wait()
        self._lines.put(None)

    def _keep(self, number: int, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._lines.put((number, line))


# --- Starts a job's nodes through an engine, and follows them to their end ---


PATIENCE_S = 10.0
"""How long to wait for what an engine does at once if all is well."""

START_S = 60.0  # to start a process there, over a slow file system too
_READ_S = 10.0  # how long a call waits for a line
_TURN_S = 0.5  # how long a wait for the nodes may keep a signal waiting
_GRACE_S = 10.0


class ActorNode:
    """A node of the job, and the actor that it is now."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.host = ""
        self.address = ""
        self.actor: Any = None
        self.started = False
        self.replaced = False
        self.code: int | None = None

    @property
    def running(self) -> bool:
        """Whether its command was started, and has not ended."""
        return self.started and self.code is None


class ActorJobController(ABC):
    """Starts a job's nodes, and follows them to their end.

    Args:
        engine: what it is called in messages: "the Ray cluster".
    """

    errors: tuple[type[BaseException], ...] = (OSError,)
    """The exceptions of a call of an actor whose node is lost, or whose method fails."""

    transient_errors: tuple[type[BaseException], ...] = ()
    """The exceptions of a link that broke, whose node may be back."""

    def __init__(self, engine: str, job: ActorJob, machines: int) -> None:
        self._engine = engine
        self._job = job
        self._nodes = [ActorNode(rank) for rank in range(machines)]
        self._pending: dict[ActorNode, Future[Any]] = {}  # what was asked of each actor last: to start, then to read
        self._ended: list[ActorNode] = []
        self._variables: dict[str, str] = {}  # of each command
        self._lost = 0
        self._requests = StopRequests()
        self._asked: int | None = None
        self._told = False
        self._hurried = False
        self._begun = False
        self._deadline: float | None = None

    def run(self) -> int:
        """Follow the job to its end; nothing of it is left then."""
        with handle_signals(STOP_SIGNALS, self._on_signal):
            try:
                self._begin()
                while any(node.running for node in self._nodes) and not self._overdue():
                    self._pass_signals_on()
                    self._poll()
            finally:
                self._end_all()
        return self._conclude()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        match self._requests.hear(number):
            case "first":
                self._asked = number
                if not self._begun:
                    raise SystemExit(128 + number)
            case "end":
                self._hurried = True

    # The engine

    @abstractmethod
    def _make_actors(self) -> None:
        """Make each node's actor, and fill in its host and address."""

    @abstractmethod
    def _call(self, node: ActorNode, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of a node's actor, without waiting for it."""

    @abstractmethod
    def _restart(self, node: ActorNode) -> Future[Any]:
        """Start the command in a new actor, as soon as there is room for one, without waiting for it."""

    @abstractmethod
    def _release(self) -> None:
        """Give the nodes back."""

    # Begin

    def _begin(self) -> None:
        try:
            self._make_actors()
            job_id = self._job_id()
            self._begun = True
            hosts = ",".join(node.address for node in self._nodes)
            self._variables |= {NODES: str(len(self._nodes)), HOSTS: hosts, JOB_ID: job_id}
            for node in self._nodes:
                self._pending[node] = self._start(node)
            for node in self._nodes:
                self._pending[node].result(START_S)
                node.started = True
        except self.errors as error:
            raise LaunchError(
                f"a machine of {self._engine} could not start its part: {reason_of(error)}. Paceline must "
                f"be installed there as it is here, and {self._job.workdir} must exist."
            ) from error

    def _job_id(self) -> str:
        """Return a name from which all nodes derive the same port, which is free on the first one."""
        while True:
            job_id = f"job-{secrets.token_hex(4)}"
            first = self._nodes[0]
            if self._call(first, "can_listen", first.address, job_port(job_id)).result(START_S):
                return job_id

    def _start(self, node: ActorNode) -> Future[Any]:
        """Start a node's command; the agent of a replacement finds the active ones."""
        variables = {**self._job.env, NODE_RANK: str(node.rank), **self._variables}
        return self._call(node, "start", self._job.command, variables, self._job.workdir)

    # Follow

    def _pass_signals_on(self) -> None:
        if self._hurried:
            raise SystemExit(128 + (self._asked or signal.SIGINT))
        if self._asked is not None and not self._told:
            self._told = True
            self._send(forwarded_signal(self._asked))

    def _overdue(self) -> bool:
        """Return whether the processes that must end after a failure are over their time limit."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _poll(self) -> None:
        """Wait for the nodes for a while, and handle what they answer."""
        wait(self._pending.values(), _TURN_S, FIRST_COMPLETED)
        for node, answer in tuple(self._pending.items()):
            if answer.done():
                self._hear(node, answer)

    def _hear(self, node: ActorNode, answer: Future[Any]) -> None:
        try:
            said = answer.result()
        except self.transient_errors:
            said = [], None
        except Exception as error:  # whatever it is, the job must not wait for this node
            self._lose(node, reason_of(error))
            return
        if said is None:  # the answer to a start
            node.started = True
        lines, code = said or ([], None)
        if code is None:
            self._pending[node] = self._call(node, "read", _READ_S)
        self._take(node, lines, code)

    def _take(self, node: ActorNode, lines: Sequence[tuple[int, bytes]], code: int | None) -> None:
        """Show what a node has printed; its command has ended if there is an exit code."""
        self._show(node, lines)
        if code is None:
            return
        if code < 0 and self._job.recovers and not self._stopping:
            self._lose(node, f"its agent was killed by {signal.Signals(-code).name}")
        else:
            self._end(node, code)

    def _show(self, node: ActorNode, lines: Sequence[tuple[int, bytes]]) -> None:
        prefix = f"machine {node.rank} | ".encode() if len(self._nodes) > 1 else b""
        for number, line in lines:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.buffer.write(prefix + line)
        if lines:
            sys.stdout.flush()
            sys.stderr.flush()

    @property
    def _stopping(self) -> bool:
        return self._asked is not None or self._deadline is not None

    def _end(self, node: ActorNode, code: int) -> None:
        if code == 0 or code in STOPPED or self._stopping:
            self._has_ended(node, code)
            return
        if len(self._nodes) > 1:
            self._say(f"machine {node.rank} ({node.host}) ended with exit code {code}.")
        self._fail(node, code)

    def _fail(self, node: ActorNode, code: int) -> None:
        self._has_ended(node, code)
        if not self._job.recovers and not self._stopping:
            self._deadline = time.monotonic() + _GRACE_S
            self._send(signal.SIGTERM)

    def _has_ended(self, node: ActorNode, code: int) -> None:
        node.code = code
        self._ended.append(node)
        self._pending.pop(node, None)

    def _lose(self, node: ActorNode, why: str) -> None:
        """Replace a lost node, if the job can accept another one."""
        where = f"machine {node.rank} ({node.host or 'not placed yet'}) was lost: {why}."
        if self._job.recovers and any(other.code == 0 for other in self._ended):
            # the run had ended before
            node.replaced = True
            node.code = 0
            self._pending.pop(node, None)
            return
        why_not = self._why_not_replaced(node)
        if self._stopping or why_not:
            if not self._stopping:
                self._say(f"{where} {why_not}")
            self._fail(node, 1)
            return
        self._lost += 1
        alone = len(self._nodes) == 1
        then = "it continues from its last checkpoint" if alone else "another joins the others, which continue"
        self._say(f"{where} As soon as {self._engine} has room, {then}.")
        node.started = alone
        node.replaced = True
        self._pending[node] = self._restart(node)

    def _why_not_replaced(self, node: ActorNode) -> str:
        if not self._job.recovers:
            return "Only tasks under --rank-launcher agent recover from that; this job ends."
        if self._lost >= self._job.replacements:
            return f"No more than --machine-restarts {self._job.replacements} are replaced."
        others = any(other.running for other in self._nodes if other is not node)
        return "" if others or len(self._nodes) == 1 else "No other is left; continue with paceline resume."

    def _say(self, text: str) -> None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)

    def _send(self, number: int) -> None:
        for node in self._nodes:
            if node.running:
                self._call(node, "send_signal", int(number))

    # End

    def _end_all(self) -> None:
        """Kill what runs, and give the nodes back."""
        with suppress(*self.errors):
            wait([self._call(node, "end") for node in self._nodes if node.running], PATIENCE_S)
        self._release()

    def _conclude(self) -> int:
        """Return the first failure's exit code; for a job that outlives nodes, that of the last one to end."""
        codes = [node.code or 0 for node in self._ended]
        own = [node.code or 0 for node in self._ended if not node.replaced]
        if self._asked is not None and any(codes):
            stopped = [code for code in codes if code in STOPPED]
            return stopped[0] if stopped else 128 + self._asked
        code = (own or codes)[-1] if self._job.recovers else next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code


def reason_of(error: BaseException) -> str:
    """Return the first sentence of the last line: an engine continues with possible causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).partition(". ")[0].rstrip(".")
