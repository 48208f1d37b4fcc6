"""The agent: starts a job's workers on this node, and replaces those that die or restarts all of them. No torch.

One loop drives two parts: :class:`~paceline.elastic.node.NodeWorkers`, which owns the workers, and a
:class:`~paceline.elastic.leader.Controller`, which decides for them. On one node that is a
:class:`~paceline.elastic.leader.SingleNodeLeader`. Agents of several nodes first agree on the one that
decides: :mod:`paceline.elastic.consensus`, which is imported there only.
"""

from __future__ import annotations

import os
import selectors
import shutil
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.core.errors import LaunchError, RunDirectoryError
from paceline.core.job import Command, LaunchSpec
from paceline.core.owned_names import remove_leftovers
from paceline.core.signals import STOP_SIGNALS, handle_signals
from paceline.core.standard_streams import print_status
from paceline.elastic.control import ControlApi, ControlSocket
from paceline.elastic.leader import Controller, SingleNodeLeader
from paceline.elastic.node import FileWork, NodeWorkers, WorkerMessage
from paceline.runs.directory import RunDirectory, RunLock
from paceline.runs.file_system import probe

if TYPE_CHECKING:
    from paceline.elastic.consensus.discovery import DiscoveryInfo

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

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the active workers."""
        return self._node.pids

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
