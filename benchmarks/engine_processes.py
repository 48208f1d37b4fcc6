"""One round of ``python -m benchmarks engines``.

``python -m benchmarks.engine_processes ENGINE NUMBER REPORT SECONDS``: the engine's name, how many processes it starts,
the file for the report, and how long the processes are left to themselves, for the processor time of that.
"""

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
from functools import partial
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

    def idle(self, seconds: float) -> None:
        """Let all processes do what they do by themselves."""
        time.sleep(seconds)

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
            if "ports" in request:
                return run_mesh_agent(channel, request["ports"])
            while channel.receive() is not None:
                channel.send(Joined(0))
            return 0

        return answer

    return run_fork_server(descriptor, lambda: None, prepare)


class MeshAgent:
    """The links of one agent to those of all other nodes, over loopback, and nothing else of an agent.

    Args:
        ports: those of the agents that have started before this one, to which it connects.
    """

    _TOKEN = bytes(32)
    _SILENCE_S = 60.0  # processes of one machine that start together do not get a core at once

    def __init__(self, ports: Sequence[int]) -> None:
        import selectors

        from paceline.elastic.consensus.transport import Listener, PeerNetwork

        self.answered: set[str] = set()
        self.lost_peers: set[str] = set()
        self._selector = selectors.DefaultSelector()
        hello = {"name": str(os.getpid())}
        listener = Listener("127.0.0.1", 0, self._TOKEN, hello, most=1024)
        self.port = listener.port
        self.network = PeerNetwork(self._selector, listener, self._TOKEN, hello, self, self._SILENCE_S)
        self.network.call([("127.0.0.1", port) for port in ports])

    def turn(self) -> None:
        """Wait for an event, and handle it."""
        for key, _ in self._selector.select(max(0.0, self.network.deadline - time.monotonic())):
            key.data()
        self.network.expire(time.monotonic())

    def watch(self, channel: Any, do: Any) -> None:
        """Handle what comes on a channel, too."""
        self._selector.register(channel, 1, do)

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """Nothing to do: the network counts its links."""

    def lost(self, peer: str, why: str, *, closed: bool = False) -> None:
        """Note the end of a link."""
        self.lost_peers.add(peer)

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """Answer, or note an answer."""
        if message.get("kind") == "ask":
            self.network.send(peer, {"kind": "answer"})
        elif message.get("kind") == "answer":
            self.answered.add(peer)

    def refused(self, why: str) -> None:
        """Nothing to do: a peer that did not get a core in time for its handshake tries again."""


class Mesh(Agent):
    """Agents of as many nodes, each linked to each other; this process is one of them."""

    def start(self, number: int) -> None:
        from paceline.core.fork_server import Forked, ForkServer
        from paceline.elastic.worker_channel import Joined, ReportRequest, channel_pair

        self._server = ForkServer([sys.executable, "-m", "benchmarks.engine_processes", "serve"], os.environ)
        self._agent = MeshAgent([])
        ports, pids, self._channels = [self._agent.port], [], []
        for index in range(number):
            own, theirs = channel_pair()
            self._server.fork(index, [theirs.fileno()], ports=ports)
            theirs.close()
            report, port = self._server.report(), own.receive()
            assert isinstance(report, Forked)
            assert isinstance(port, Joined)
            os.close(report.pidfd)
            ports.append(port.generation)
            pids.append(report.pid)
            self._channels.append(own)
        self.pids = pids
        while len(self._agent.network.connected) < number:
            self._agent.turn()
        for channel in self._channels:  # each answers once all that it has connected to have answered
            channel.send(ReportRequest())
        waiting = set(self._channels)
        for channel in self._channels:
            self._agent.watch(channel, partial(_note_answer, channel, waiting))
        while waiting:
            self._agent.turn()
        self.send_to_all()

    def send_to_all(self) -> None:
        self._agent.answered.clear()
        for peer in self._agent.network.connected:
            self._agent.network.send(peer, {"kind": "ask"})
        while len(self._agent.answered) < len(self.pids):
            self._agent.turn()

    def await_loss(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while str(pid) not in self._agent.lost_peers:
            self._agent.turn()

    def idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._agent.turn()


def _note_answer(channel: Any, waiting: set[Any]) -> None:
    channel.receive()
    waiting.discard(channel)


def run_mesh_agent(channel: Any, ports: Sequence[int]) -> int:
    """Be an agent of a mesh until the channel closes."""
    from paceline.elastic.worker_channel import Joined

    agent = MeshAgent(ports)
    channel.send(Joined(agent.port))
    ended = []
    agent.watch(channel, lambda: ended.append(channel.receive()))
    asked = False
    while None not in ended:
        agent.turn()
        if ended and not asked and len(agent.network.connected) >= len(ports):
            asked = True
            channel.send(Joined(0))
    return 0


class Ray(Engine):
    """A Ray cluster of this process's own, with an actor in each process."""

    def start(self, number: int) -> None:
        from paceline_ray.cluster import own_cluster

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
        from paceline_frameworks.monarch import import_monarch

        self._start(import_monarch(), number)


ENGINES: dict[str, type[Engine]] = {
    "paceline": Agent,
    "mesh": Mesh,
    "ray": Ray,
    "monarch": Monarch,
    "monarch-1s": MonarchPolling,
}


def measure(engine: Engine, number: int, idle_s: float) -> dict[str, float]:
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
        before_s = _processor_s(engine.pids)
        begin = time.monotonic()
        engine.idle(idle_s)
        elapsed_s = time.monotonic() - begin
        report["idle_percent"] = 100 * (_processor_s(engine.pids) - before_s) / len(engine.pids) / elapsed_s
        begin = time.monotonic()
        engine.await_loss(engine.pids[-1])
        report["known_ms"] = 1000 * (time.monotonic() - begin)
    finally:
        engine.end()
    return report


def _processor_s(pids: Sequence[int]) -> float:
    """Return the processor time of these processes so far."""
    import psutil

    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(int(sys.argv[2])))
    name, count, path, seconds = sys.argv[1:]
    Path(path).write_text(json.dumps(measure(ENGINES[name](), int(count), float(seconds))))
