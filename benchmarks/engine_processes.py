"""One round of ``python -m benchmarks engines``: ``python -m benchmarks.engine_processes ENGINE NUMBER REPORT``."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MESSAGES = 50
"""Messages to all processes, one after another; their median counts."""


class Engine(ABC):
    """Processes that answer messages, and what carries them.

    Attributes:
        pids: of the processes, once they have started.
    """

    pids: Sequence[int] = ()

    @abstractmethod
    def start(self, number: int) -> None:
        """Start processes; return when all have answered."""

    @abstractmethod
    def send_to_all(self) -> None:
        """Send a message to all processes; return when all have answered."""

    @abstractmethod
    def await_loss(self, pid: int) -> None:
        """Kill the last process; return when the engine has reported that."""

    @abstractmethod
    def end(self) -> None:
        """End all processes."""


class Agent(Engine):
    """Paceline's agent on one node: a fork server, and a channel to each process."""

    def start(self, number: int) -> None:
        from paceline.core.fork_server import Forked, ForkServer
        from paceline.elastic.worker_channel import channel_pair

        self._server = ForkServer([sys.executable, "-m", "benchmarks.engine_processes", "serve"], os.environ)
        self._channels = []
        pids = []
        for index in range(number):
            own, theirs = channel_pair()
            self._server.fork(index, [theirs.fileno()])
            theirs.close()
            self._channels.append(own)
            report = self._server.report()
            assert isinstance(report, Forked)
            os.close(report.pidfd)
            pids.append(report.pid)
        self.pids = pids
        self.send_to_all()

    def send_to_all(self) -> None:
        from paceline.elastic.worker_channel import ReportRequest

        for channel in self._channels:
            channel.send(ReportRequest())
        for channel in self._channels:
            assert channel.receive() is not None

    def await_loss(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        for descriptor in (self._server.fileno(), *(channel.fileno() for channel in self._channels)):
            poll.register(descriptor, select.POLLIN)
        poll.poll()

    def end(self) -> None:
        self._server.end()


def serve(descriptor: int) -> int:
    """Fork processes that answer on their channels."""
    from paceline.core.fork_server import Child, restore_stop_signals, run_fork_server
    from paceline.elastic.worker_channel import Joined, WorkerChannel

    def prepare(request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
        restore_stop_signals()

        def answer() -> int:
            channel = WorkerChannel.of(descriptors[0])
            while channel.receive() is not None:
                channel.send(Joined(0))
            return 0

        return answer

    return run_fork_server(descriptor, lambda: None, prepare)


class Ray(Engine):
    """A Ray cluster of this process's own, with an actor in each process."""

    def start(self, number: int) -> None:
        from paceline.launch.ray_cluster import own_cluster

        self._cluster = own_cluster("ray")
        self._ray = self._cluster.__enter__()

        class Process:
            def pid(self) -> int:
                return os.getpid()

            def wait(self) -> None:
                time.sleep(3600)

        actor = self._ray.remote(Process).options(num_cpus=0, max_concurrency=2)
        self._actors = [actor.remote() for _ in range(number)]
        self.pids = self._ray.get([each.pid.remote() for each in self._actors])

    def send_to_all(self) -> None:
        self._ray.get([each.pid.remote() for each in self._actors])

    def await_loss(self, pid: int) -> None:
        waiting = self._actors[-1].wait.remote()
        self._ray.get(self._actors[-1].pid.remote())
        os.kill(pid, signal.SIGKILL)
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(waiting)

    def end(self) -> None:
        self._cluster.__exit__(None, None, None)


class Monarch(Engine):
    """An actor in each process of a mesh on this machine, with Monarch's own settings."""

    def start(self, number: int) -> None:
        self._start(_import_plain_monarch(), number)

    def _start(self, monarch: Any, number: int) -> None:
        import asyncio

        class Process(monarch.Actor):  # type: ignore[misc] # the library is not typed
            @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
            async def pid(self) -> int:
                return os.getpid()

            @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
            async def wait(self) -> None:
                await asyncio.sleep(3600)

        monarch.unhandled_fault_hook = lambda failure: None
        processes = monarch.this_host().spawn_procs({"processes": number})
        self._actors = processes.spawn("process", Process)
        self.pids = [pid for _, pid in self._actors.pid.call().get().items()]

    def send_to_all(self) -> None:
        self._actors.pid.call().get()

    def await_loss(self, pid: int) -> None:
        last = self._actors.slice(processes=len(self.pids) - 1)
        waiting = last.wait.call_one()
        last.pid.call_one().get()
        os.kill(pid, signal.SIGKILL)
        with suppress(Exception):  # its own, of several modules
            waiting.get()

    def end(self) -> None:
        """Nothing: the processes end with this one."""


def _import_plain_monarch() -> Any:
    import monarch.actor

    return monarch.actor


class MonarchPolling(Monarch):
    """The same with the settings of ``--on monarch``."""

    def start(self, number: int) -> None:
        from paceline.launch.monarch import import_monarch

        self._start(import_monarch(), number)


ENGINES: dict[str, type[Engine]] = {"paceline": Agent, "ray": Ray, "monarch": Monarch, "monarch-1s": MonarchPolling}


def measure(engine: Engine, number: int) -> dict[str, float]:
    """Return what ``benchmarks.engines`` shows of an engine."""
    import psutil

    begin = time.monotonic()
    engine.start(number)
    report = {"start_s": time.monotonic() - begin}
    try:
        durations = []
        for _ in range(MESSAGES):
            begin = time.monotonic()
            engine.send_to_all()
            durations.append(time.monotonic() - begin)
        report["message_ms"] = 1000 * statistics.median(durations)
        report["memory_mib"] = (
            statistics.mean(psutil.Process(pid).memory_full_info().pss for pid in engine.pids) / 2**20
        )
        begin = time.monotonic()
        engine.await_loss(engine.pids[-1])
        report["known_ms"] = 1000 * (time.monotonic() - begin)
    finally:
        engine.end()
    return report


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(int(sys.argv[2])))
    name, count, path = sys.argv[1:]
    Path(path).write_text(json.dumps(measure(ENGINES[name](), int(count))))
