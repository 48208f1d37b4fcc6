"""Processes on one machine: this one, or those that spawn, torchrun or TensorFlow's launcher start."""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import secrets
import shlex
import socket
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from paceline.core.environment import JOB_ID, LISTEN_FD, Environment, parse_endpoint, patch_environ
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.process_group import ProcessGroup, ProcessGroupSpec, RenderedProcess, RenderedProcessGroup
from paceline.launch.launcher import EnvStyle, make_launcher
from paceline.launch.rank_env import env_style_variables
from paceline.launch.supervisor import RankStarter, SupervisedJob
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import read_failure

# --- A job's processes on this machine: described, rendered as text, started ---


class LocalLauncher(ABC):
    """Starts the processes of a job."""

    @abstractmethod
    def render(self, spec: ProcessGroupSpec) -> RenderedProcessGroup:
        """Say what would run; starts and writes nothing.

        Raises:
            ConfigError: this launcher cannot run the job.
        """

    @abstractmethod
    def submit(self, rendered: RenderedProcessGroup) -> ProcessGroup:
        """Start it.

        Raises:
            LaunchError: a process could not be started; none is left.
        """


_LAUNCHERS = {
    "inprocess": "paceline.launch.local_processes:InProcessLauncher",
    "spawn": "paceline.launch.local_processes:SpawnLauncher",
    "torchrun": "paceline.launch.local_processes:TorchrunLauncher",
}
LOCAL_LAUNCHERS = tuple(_LAUNCHERS)


def get_local_launcher(name: str) -> LocalLauncher:
    """The launcher of that name; its module is imported now.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    launcher = make_launcher(name, _LAUNCHERS)
    assert isinstance(launcher, LocalLauncher)
    return launcher


def bound_loopback_socket(port: int = 0) -> socket.socket:
    """A TCP socket bound to ``port`` on loopback (0: a free one), not listening yet."""
    bound = socket.socket()
    # With this, a script's own TCPStore can still listen on the port that the socket reserves for it.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


# --- One process: this one ---


class InProcessLauncher(LocalLauncher):
    """Runs the worker in this process."""

    def render(self, spec: ProcessGroupSpec) -> RenderedProcessGroup:
        """Render the plain command."""
        if spec.nproc > 1 or spec.nodes > 1:
            raise ConfigError(
                f"--on inprocess runs one process, but {spec.nproc * spec.nodes} were asked for. Use --on spawn."
            )
        if not spec.python or spec.command == ("-m",):
            raise ConfigError(
                f"--on inprocess runs a script or -m MODULE, not {shlex.join(spec.argv)!r}. Use --on spawn."
            )
        process = RenderedProcess(
            title="in this process",
            argv=spec.argv,
            env={**spec.env, **spec.thread_variables()},
            rank=0,
        )
        return RenderedProcessGroup(spec=spec, processes=(process,))

    def submit(self, rendered: RenderedProcessGroup) -> InProcessJob:
        """Return a job that runs when it is waited for."""
        return InProcessJob(rendered)


class InProcessJob:
    """Runs in :meth:`wait`; signals reach the worker's own handlers."""

    def __init__(self, rendered: RenderedProcessGroup) -> None:
        self._process = rendered.processes[0]
        self._cancelled = False

    @property
    def pids(self) -> tuple[int, ...]:
        """None but this process itself, which is not the job's to end."""
        return ()

    def wait(self) -> int:
        """Run the command to its end; return what it exits with."""
        if self._cancelled:
            return 130
        command = self._process.argv[1:]
        try:
            if command[0] == "-m":
                here = os.getcwd()
                with self._started_with(command[1:], here), warnings.catch_warnings():
                    # A script that calls fit() has imported the worker; to run it once more is meant.
                    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
                    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                beside = os.path.dirname(os.path.realpath(command[0]))
                with self._started_with(command, beside):
                    runpy.run_path(command[0], run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
                return 1
            return error.code or 0
        return 0

    def cancel(self) -> None:
        """Keep :meth:`wait` from starting it."""
        self._cancelled = True

    @contextmanager
    def _started_with(self, arguments: tuple[str, ...], imports_from: str) -> Iterator[None]:
        """What Python gives to what it is started with: arguments, and where it imports from first."""
        before = sys.argv
        sys.argv = list(arguments)
        sys.path.insert(0, imports_from)
        try:
            with patch_environ(self._process.env):
                yield
        finally:
            sys.argv = before
            with suppress(ValueError):
                sys.path.remove(imports_from)


# --- Processes under torchrun's agent: ``python -m torch.distributed.run`` ---


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class TorchrunLauncher(LocalLauncher):
    """Starts torchrun's agent here; on several machines it is run on each.

    The agent serves its store on every interface, as torchrun always does; the workers' own sockets
    are on loopback where they share a machine.
    """

    def render(self, spec: ProcessGroupSpec) -> RenderedProcessGroup:
        """Render torchrun's command."""
        module = "torch.distributed.launch" if spec.local_rank_argument else "torch.distributed.run"
        restarts = [f"--max-restarts={spec.max_restarts}"] if spec.recover == "restart" else []
        # A store that agents share with their workers is made once: its address is not told to an agent that
        # comes later, in place of a dead one, and it would wait for ever (torch 2.13).
        several = spec.recover == "restart" and spec.nodes > 1
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if several else {}
        process = RenderedProcess(
            title=f"torchrun, {spec.nproc} processes",
            argv=(
                *(spec.python or sys.executable, "-m", module),
                *(*_meeting(spec), f"--nproc-per-node={spec.nproc}"),
                # Its default lacks Slurm's warning, of which it would die, and its workers with it.
                f"--signals-to-handle={_SIGNALS}",
                *(*restarts, *([] if spec.python else ["--no-python"]), *spec.command),
            ),
            env={**spec.thread_variables(), **own_store, **spec.env},
        )
        return RenderedProcessGroup(spec=spec, processes=(process,))

    def submit(self, rendered: RenderedProcessGroup) -> SupervisedJob:
        """Start the agent."""
        directory = rendered.spec.directory
        verdict = None if directory is None else partial(_verdict, directory, time.time())
        return SupervisedJob(rendered, starter=RankStarter(name="torchrun", verdict=verdict))


def _meeting(spec: ProcessGroupSpec) -> list[str]:
    """How the agents of the machines find each other."""
    most = spec.most_nodes or spec.nodes
    if most == 1:
        if spec.master_port is None:
            return ["--standalone"]
        return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={spec.master_port}"]
    if spec.rdzv_backend == "static":
        assert spec.rdzv_endpoint is not None
        host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        return [
            f"--nnodes={spec.nodes}",
            f"--node-rank={spec.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    is_host, local_addr = [], []
    if spec.node_rank is not None:
        is_host = [f"--rdzv-conf=is_host={int(spec.node_rank == 0)}"]
        # Workers meet at the address of one of the agents, which by itself says its own name for its machine.
        local_addr = [f"--local-addr={host}" for host in spec.hosts[spec.node_rank : spec.node_rank + 1]]
    return [
        f"--nnodes={spec.nodes}:{most}" if most > spec.nodes else f"--nnodes={spec.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={spec.rdzv_endpoint}",
        f"--rdzv-id={spec.rdzv_id}",
        *(*is_host, *local_addr),
    ]


def _verdict(directory: RunDirectory, began: float) -> str:
    """Where the workers stood when the last of torchrun's restarts failed; "" where there was none."""
    events = directory.read_events()
    starts = [event["step"] for event in events if event["event"] == "started" and event["time"] >= began]
    if len(starts) < 2:
        return ""
    step = starts[-1]
    same = len(list(itertools.takewhile(lambda start: start == step, reversed(starts))))
    lines = []
    if same > 1:
        lines.append(
            f"torchrun started the workers {len(starts)} times; the last {same} times they went on after "
            f"step {step}, and none came to the next checkpoint."
        )
    failures = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    victims = [failure for failure in failures if failure is not None and failure.victim]
    lines += [f"rank {failure.rank}: {failure.message}" for failure in victims[:1]]
    return "\n  ".join(lines)


# --- What TensorFlow's processes need of who starts them: ports in a row, and an end to those that only
#     serve
#
# Under its parameter server strategy workers and servers run ``server.join()``, which never returns: the
# chief goes, and whoever has started the others is to end them, on its own machine and on all others.


_FIRST_PORT, _LAST_PORT = 20000, 32000  # below the range from which the kernel takes ephemeral ports
_LOOK_S = 0.25
_REFUSALS = 3
_LOST_S = 60.0


def role_serves(rank: int, roles: Sequence[str]) -> bool:
    """Whether a rank only serves others, and never ends by itself."""
    return bool(roles) and (roles[rank] == "ps" or (roles[rank] == "worker" and {"ps", "chief"} <= set(roles)))


def free_ports(count: int) -> int:
    """The first of so many free ports in a row.

    Raises:
        LaunchError: there are none.
    """
    for _ in range(200):
        first = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT - count)
        if not any(_is_taken(first + i) for i in range(count)):
            return first
    raise LaunchError(f"there are no {count} free ports in a row from {_FIRST_PORT} to {_LAST_PORT}.")


def start_tensorflow(rendered: RenderedProcessGroup) -> SupervisedJob:
    """Start processes that have TF_CONFIG.

    Raises:
        ConfigError: one of their ports is taken: TensorFlow would say so only after minutes.
    """
    configs = [json.loads(process.env["TF_CONFIG"]) for process in rendered.processes]
    for config in configs:
        kind, index = config["task"]["type"], config["task"]["index"]
        if kind == "evaluator":
            continue
        port = int(config["cluster"][kind][index].rpartition(":")[2])
        if _is_taken(port):
            raise ConfigError(
                f"port {port} of {socket.gethostname()}, on which {kind} {index} would listen, is taken. "
                "Give the first of some free ones with --master-port."
            )
    cluster = configs[0]["cluster"]
    chief = "chief" if "chief" in cluster else "worker"
    chief_is_here = {"type": chief, "index": 0} in [config["task"] for config in configs]
    serves_elsewhere = not chief_is_here and any(process.serves for process in rendered.processes)
    job = SupervisedJob(rendered, serves_elsewhere=serves_elsewhere)
    if serves_elsewhere:
        [host, _, port] = cluster[chief][0].rpartition(":")
        threading.Thread(target=_wait_for_end, args=(host, int(port), job), daemon=True).start()
    return job


def _wait_for_end(host: str, port: int, job: SupervisedJob) -> None:
    """Look whether the chief, on another machine, listens; once it does no more, the job is done."""
    seen_at, refusals = math.inf, 0
    pause = threading.Event()
    while refusals < _REFUSALS and time.monotonic() - seen_at < _LOST_S:
        pause.wait(_LOOK_S)
        try:
            socket.create_connection((host, port), timeout=_LOST_S).close()
            seen_at, refusals = time.monotonic(), 0
        except ConnectionRefusedError:
            refusals += seen_at < math.inf
        except OSError:
            pass  # a machine that does not answer may be back soon
    with suppress(OSError):  # the job has ended by itself
        job.stop_servers()


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


# --- Processes on this machine, each a subprocess with torchrun's variables ---


class SpawnLauncher(LocalLauncher):
    """Starts ``nproc`` subprocesses here; on several machines it is run on each."""

    def render(self, spec: ProcessGroupSpec) -> RenderedProcessGroup:
        """Render one command a rank. A free port is looked up where the spec names none.

        Where ranks that die are recovered, there is one command only: the agent's zygote, which forks them.
        """
        if spec.recover != "none":
            return RenderedProcessGroup(spec=spec, processes=(_render_forkserver(spec),))
        if spec.nodes > 1:
            if spec.node_rank is None:
                raise ConfigError(
                    f"--on spawn with --nodes {spec.nodes} needs --node-rank: 0 on the machine of "
                    f"--rdzv-endpoint, 1 to {spec.nodes - 1} on the others."
                )
            assert spec.rdzv_endpoint is not None
            host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        else:
            host, port = "127.0.0.1", spec.master_port or free_master_port(spec.env_style, spec.nproc)
        return RenderedProcessGroup(
            spec=spec,
            processes=tuple(_render_rank(spec, i, host, port) for i in range(spec.nproc)),
        )

    def submit(self, rendered: RenderedProcessGroup) -> ProcessGroup:
        """Start the ranks. Where another process took the port since, the job gets a new one."""
        spec = rendered.spec
        if spec.recover != "none":
            from paceline.elastic.agent import Agent

            return Agent(rendered)
        if spec.env_style == "tensorflow":
            return start_tensorflow(rendered)
        if spec.nodes > 1 or spec.env_style != "torch":
            return SupervisedJob(rendered)
        port = int(rendered.processes[0].env["MASTER_PORT"])
        try:
            listener = bound_loopback_socket(port)
        except OSError as error:
            if spec.master_port is not None:
                raise ConfigError(
                    f"port {port} is taken ({error.strerror}). Give another, or none for a free one."
                ) from error
            listener = bound_loopback_socket()
            port = listener.getsockname()[1]
        with listener:
            processes = tuple(
                replace(process, env={**process.env, "MASTER_PORT": str(port)}) for process in rendered.processes
            )
            # Rank 0 inherits the bound socket: nobody can take the port in between.
            inherited = {LISTEN_FD: str(listener.fileno())}
            processes = (replace(processes[0], env={**processes[0].env, **inherited}), *processes[1:])
            return SupervisedJob(replace(rendered, processes=processes), rank_0_fds=(listener.fileno(),))


def _render_rank(spec: ProcessGroupSpec, local_rank: int, host: str, port: int) -> RenderedProcess:
    rank = spec.first_rank + local_rank
    place = Environment(
        source="variables",
        rank=rank,
        world_size=spec.world_size,
        local_rank=local_rank,
        local_world_size=spec.nproc,
        node_rank=spec.node_rank or 0,
        nodes=spec.nodes,
        master_addr=host,
        master_port=port,
    )
    env = {
        **env_style_variables(spec.env_style, place, hosts=spec.hosts, counts=spec.counts, roles=spec.roles),
        **({JOB_ID: spec.rdzv_id} if spec.nodes > 1 and spec.env_style == "torch" else {}),
        **spec.thread_variables(),
        **spec.env,
    }
    log = spec.directory.log_of(rank) if spec.directory is not None and rank > 0 else None
    serves = spec.env_style == "tensorflow" and role_serves(rank, spec.roles)
    return RenderedProcess(title=f"rank {rank}", argv=spec.argv, env=env, rank=rank, log=log, serves=serves)


def _render_forkserver(spec: ProcessGroupSpec) -> RenderedProcess:
    return RenderedProcess(
        title=f"forks {spec.nproc} workers of {spec.command[-1]}, and replaces those that die",
        argv=(spec.python, "-m", "paceline.elastic.forkserver"),
        env={**spec.thread_variables(), **spec.env},
    )


def free_master_port(env_style: EnvStyle, nproc: int) -> int:
    """A free port here, or the first of ``nproc`` in a row: TensorFlow's processes each listen on one."""
    if env_style == "tensorflow":
        return free_ports(nproc)
    with bound_loopback_socket() as bound:
        port: int = bound.getsockname()[1]
    return port
