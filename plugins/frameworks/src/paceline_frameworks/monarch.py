"""``--on monarch``: a job that PyTorch's actor engine starts and carries, here or on hosts that it is attached to."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.options import at_least
from paceline.core.plugins import install_command
from paceline.core.sockets import address_towards
from paceline.launch.launcher import (
    Command,
    LaunchSpec,
    RenderedJob,
    fixed_nodes,
    option,
    refuse_unsupported,
)
from paceline.launch.local_run import processes_here
from paceline.launch.node import node_command
from paceline.launch.submit import ForegroundLauncher
from paceline.launch.supervisor import RankStarter
from paceline_frameworks.monarch_hosts import MonarchHost, read_hosts
from paceline_ray.actor_nodes import PATIENCE_S, START_S, ActorJob, ActorJobController, ActorNode

# --- The library, imported on use ---


_SETTINGS = {
    # By default Monarch reports a killed process after up to 10 s, and a lost host after more than a minute. A limit
    # must span many polls: one as long as a poll makes it report nodes that are well.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "60s",
}
_GREETING = b"Monarch internal logs are being written to"
_GREET_S = 5.0
_POLL_S = 1.0

_SEE_ITS_LOG = "See the log of the job that starts their worker loops."
_START_A_LOOP = (
    "Start Monarch's worker loop on each: python -c \"from monarch.actor import run_worker_loop_forever as run; "
    "run(address='tcp://HOST:PORT', ca='trust_all_connections')\""
)


def import_monarch() -> Any:
    """Import ``monarch.actor``."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import monarch.actor
    except ImportError as error:
        raise LaunchError(f"Monarch is not installed ({error}). Run: {install_command('monarch')}") from error
    return monarch.actor


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Drop the line that Monarch prints about its log; pass on all else that is printed to stderr."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            printed.seek(0)
            os.write(2, b"".join(line for line in printed if _GREETING not in line))


# --- The job, as a file, and the process that follows it ---


@dataclass(frozen=True, kw_only=True)
class MonarchJob(ActorJob):
    """The job for Monarch's hosts; the content of ``monarch-job.json``.

    Attributes:
        hosts: the addresses of worker loops, the first ones for the job's nodes, others to replace lost ones; empty:
            one node, on this machine.
    """

    hosts: tuple[str, ...] = ()
    machines: int = 1


class MonarchJobController(ActorJobController):
    """Starts a job's nodes, and follows them to their end."""

    def __init__(self, monarch: Any, job: MonarchJob) -> None:
        super().__init__("--hosts" if job.hosts else "this machine", job, job.machines)
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

        self.errors = (SupervisionError, monarch.ActorError, TimeoutError, OSError)
        self._monarch = monarch
        hosts = [MonarchHost.parse(text) for text in job.hosts]
        self._hosts = dict(zip(self._nodes, hosts, strict=False))
        self._idle = hosts[job.machines :]
        self._lock = threading.Lock()
        self._meshes: dict[ActorNode, Any] = {}
        self._over = threading.Event()

    # Begin

    def _make_actors(self) -> None:
        # A pending call of a lost actor raises an error; by default this hook would end the process besides.
        self._monarch.unhandled_fault_hook = lambda failure: None
        if self._hosts:
            self._connect()
        with _without_greeting():
            self._monarch.context()
        for node in self._nodes:
            self._make_actor(node)
        for node in self._nodes:
            node.host = node.actor.name.call_one().get(timeout=START_S)
        threading.Thread(target=self._greet, daemon=True).start()

    def _connect(self) -> None:
        """Choose the address at which the hosts reach this process."""
        deadline = time.monotonic() + START_S
        while silent := {host: why for host in self._hosts.values() if (why := host.answers())}:
            is_starting = all(host.of_job for host in silent)
            if is_starting and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            reasons = "; ".join(f"{host.text}: {why}" for host, why in silent.items())
            advice = _SEE_ITS_LOG if is_starting else _START_A_LOOP
            raise LaunchError(f"{len(silent)} of {len(self._hosts)} hosts do not answer: {reasons}. {advice}")
        first = self._hosts[self._nodes[0]]
        if is_loopback(first.name):
            own = first.name
        elif first.scheme == "tls":
            own = socket.getfqdn()  # which certificates name
        else:
            own = address_towards(first.name, first.port)
        self._monarch.enable_transport(f"{first.scheme}://{own}:0")

    def _make_actor(self, node: ActorNode) -> None:
        """Make a node's actor. Nothing is waited for."""
        from paceline_frameworks.monarch_node import MonarchNode

        if self._hosts:
            host = self._hosts[node]
            node.address = host.name
            mesh = self._monarch.attach_to_workers(ca="trust_all_connections", workers=[host.text])
        else:
            node.address = "127.0.0.1"
            mesh = self._monarch.this_host()
        self._meshes[node] = mesh
        processes = mesh.spawn_procs(name=f"node{node.rank}")
        node.actor = processes.spawn("agent", MonarchNode)
        if self._hosts:  # a mesh of one host, not a single one
            node.actor = node.actor.slice(hosts=0)

    def _call(self, node: ActorNode, method: str, *arguments: Any) -> Future[Any]:
        endpoint = getattr(node.actor, method)
        return _in_thread(lambda: endpoint.call_one(*arguments).get())

    def _greet(self) -> None:
        """Keep the actors from ending themselves, also while nothing reads this process's output."""
        while not self._over.wait(_GREET_S):
            for node in self._nodes:
                with suppress(Exception):  # of an actor that is lost; the others need it
                    node.actor.greet.broadcast()

    # Follow

    def _restart(self, node: ActorNode) -> Future[Any]:
        def restart() -> None:
            self._find_host(node)
            self._make_actor(node)
            node.host = node.actor.name.call_one().get(timeout=START_S)
            self._start(node).result(START_S)

        return _in_thread(restart)

    def _find_host(self, node: ActorNode) -> None:
        """Wait for a host that answers: one that was not used yet, else the lost one, whose loop may run again."""
        if not self._hosts:
            return
        with self._lock:
            self._idle.append(self._hosts[node])
        while not self._over.is_set():
            for host in tuple(self._idle):
                if host.answers():
                    continue
                with self._lock:
                    if host in self._idle:  # no other node has taken it
                        self._idle.remove(host)
                        self._hosts[node] = host
                        return
            self._over.wait(_POLL_S)

    def _end_all(self) -> None:
        self._over.set()
        super()._end_all()

    def _release(self) -> None:
        """Give the hosts back; their worker loops take the next job."""
        deadline = time.monotonic() + PATIENCE_S
        for answer in [mesh.stop() for mesh in self._meshes.values()] if self._hosts else ():
            with suppress(Exception):  # of a node that is lost
                answer.get(timeout=max(0.1, deadline - time.monotonic()))


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Do it in a thread for which the end of this process does not wait."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def run_job(file: Path) -> int:
    """Run the job of a file, and return its exit code."""
    return MonarchJobController(import_monarch(), MonarchJob.read(file)).run()


# --- The launcher ---


JOB_FILE = "monarch-job.json"


@dataclass(frozen=True, kw_only=True)
class MonarchOptions:
    """Where Monarch runs a job."""

    hosts: str | None = option(
        "Addresses of Monarch's worker loops, such as tcp://node0:26600,tcp://node1:26600, or a file with one "
        "per line; slurm:JOB: the nodes of Monarch's SlurmJob (inside of it: slurm); kubernetes:NAMESPACE/MESH: the "
        "pods of its KubernetesJob. Those beyond --nodes replace lost ones. Default: this machine, without any."
    )
    machine_restarts: int = option("Number of lost nodes of a task to replace.", 3)


class Monarch(ForegroundLauncher):
    """Jobs whose nodes are Monarch's hosts."""

    name = "monarch"
    rank_launchers = ("torchrun", "spawn", "agent")
    preallocated = True
    extra = "monarch"
    starter = RankStarter(name="Monarch's controller", says_why=True)

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: MonarchOptions | None
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Return, for ``--nodes 1``, the default, all hosts; here ``--nproc auto`` is known, too."""
        if options is None or options.hosts is None:
            return nodes, nproc or (processes_here(),)
        if nodes == (1, 1):
            count = len(read_hosts(options.hosts))
            return (count, count), nproc
        return nodes, nproc

    def render(self, spec: LaunchSpec, options: MonarchOptions | None = None) -> RenderedJob:
        """Render one command, and the file that it reads."""
        options = options or MonarchOptions()
        refuse_unsupported(spec, self.name, resources=True, walltime=True)
        at_least("machine_restarts", options.machine_restarts, 0)
        nodes = fixed_nodes(spec, "--on monarch", "paceline join RUN adds others to a run.")
        hosts = read_hosts(options.hosts) if options.hosts is not None else ()
        if nodes > max(1, len(hosts)):
            raise ConfigError(
                f"--nodes {nodes} needs as many hosts, but --hosts names {len(hosts)}. Give such as "
                "--hosts tcp://node0:26600,tcp://node1:26600."
            )
        job = MonarchJob(
            command=node_command(spec),
            workdir=str(spec.workdir),
            env=spec.env,
            recovers=spec.rank_launcher == "agent",
            replacements=options.machine_restarts,
            hosts=tuple(host.text for host in hosts),
            machines=nodes,
        )
        command = Command(
            title=f"the job, on {nodes} of Monarch's hosts" if hosts else "the job, in a process of Monarch's here",
            argv=(spec.python, "-P", "-m", "paceline_ray.job", __name__, str(spec.directory / JOB_FILE)),
        )
        return RenderedJob(spec=spec, options=options, files={JOB_FILE: job.text}, commands=(command,))
