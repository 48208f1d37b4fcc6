"""``--on inprocess``, ``spawn`` and ``torchrun``: processes on this node; the same command runs on each other node."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import runpy
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from paceline.core.environment import JOB_ID, LISTEN_FD, Environment, parse_endpoint, patch_environ
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.launch_spec import Command, LaunchSpec, split_python
from paceline.launch.launcher import (
    EnvStyle,
    RenderedJob,
    refuse_restarts,
    refuse_walltime,
    refuse_what_is_for_clusters,
)
from paceline.launch.options import TORCHRUN_EQUALS, TORCHRUN_OTHERS, RendezvousOptions, TorchrunOptions
from paceline.launch.rank import (
    env_style_variables,
    expand_placeholders,
    has_placeholders,
    interface_variables,
)
from paceline.launch.stop_codes import signal_ranks, stop_codes_command
from paceline.launch.supervisor import (
    ForegroundJob,
    ForegroundLauncher,
    ProcessGroup,
    RankStarter,
    SupervisedJob,
    check_program,
)
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import read_failure

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

# --- A job's processes on this machine: described, rendered as text, started ---


class LocalLauncher(ForegroundLauncher):
    """Starts the processes of one node: this one."""

    preallocated = True

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: RendezvousOptions | None
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Return, for ``--nproc auto``, a process for each GPU of this node, else for each core."""
        return nodes, nproc or (visible_gpus() or len(os.sched_getaffinity(0)),)

    def render(self, spec: LaunchSpec, options: RendezvousOptions | None = None) -> RenderedJob:
        """Render this node's processes."""
        refuse_what_is_for_clusters(spec, self.name)
        refuse_walltime(spec, self.name)
        refuse_restarts(spec, self.name)
        spec = self._place(spec, options)
        return RenderedJob(spec=spec, options=options, commands=self._commands(spec, options))

    def submit(self, rendered: RenderedJob) -> ForegroundJob:
        """Start them."""
        spec = rendered.spec
        return ForegroundJob(self._start(rendered), spec.directory if spec.is_recorded else None)

    @abstractmethod
    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render the processes of a job whose place is known."""

    @abstractmethod
    def _start(self, rendered: RenderedJob) -> ProcessGroup:
        """Start the processes.

        Raises:
            LaunchError: one could not be started; none is left.
        """

    def _place(self, spec: LaunchSpec, options: RendezvousOptions | None) -> LaunchSpec:
        """Return the job with this node's place in it."""
        least, most = spec.nodes
        place: RendezvousOptions | LaunchSpec = options or spec
        if most > least and self.name != "torchrun" and spec.recover == "none":
            raise ConfigError(
                f"--nodes {least}:{most}: the number of nodes is fixed here. Give one number, or use --on torchrun."
            )
        if most > 1 and place.rdzv_endpoint is None and not spec.joins:
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
        if len(spec.nproc) > 1 and place.node_rank is None:
            raise ConfigError("--nproc with a list needs --node-rank, which says which node this is.")
        if options is not None:
            spec = replace(
                spec, node_rank=options.node_rank, rdzv_endpoint=options.rdzv_endpoint, rdzv_id=options.rdzv_id
            )
            if spec.rdzv_endpoint is not None:
                parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        needs_port = spec.rdzv_endpoint is None and spec.master_port is None and not spec.is_task
        if needs_port and has_placeholders(spec.command):
            spec = replace(spec, master_port=free_master_port(spec.env_style, spec.local_world_size))
        return spec


def visible_gpus() -> int:
    """Count the NVIDIA GPUs of this node, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0


def _command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of each process; a task has no placeholders."""
    if spec.is_task or not has_placeholders(spec.command):
        return spec.command
    endpoint = spec.rdzv_endpoint
    host, port = parse_endpoint(endpoint, "--rdzv-endpoint") if endpoint else ("127.0.0.1", spec.master_port or 0)
    return expand_placeholders(
        spec.command, master_addr=host, master_port=port, node_rank=spec.node_rank or 0, nodes=spec.nodes[0]
    )


def _variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of each process; a task's worker reads ``--interface`` from its own configuration."""
    return {**({} if spec.is_task else interface_variables(spec.interface)), **spec.env}


def bound_loopback_socket(port: int = 0) -> socket.socket:
    """Return a TCP socket bound to ``port`` on loopback (0: a free one), not listening yet."""
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


class InProcess(LocalLauncher):
    """Runs the command in this process."""

    name = "inprocess"
    rank_launchers = ("spawn",)
    env_styles = ("none",)

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render the plain command."""
        nproc, nodes = spec.local_world_size, spec.nodes[0]
        if nproc > 1 or nodes > 1:
            raise ConfigError(f"--on inprocess runs one process, but {nproc * nodes} were asked for. Use --on spawn.")
        command = _command(spec)
        python, arguments = split_python(command)
        if not python or arguments == ("-m",):
            raise ConfigError(
                f"--on inprocess runs a script or -m MODULE, not {shlex.join(command)!r}. Use --on spawn."
            )
        env = {**_variables(spec), **spec.thread_variables()}
        return (Command(title="in this process", argv=command, env=env, rank=0),)

    def _start(self, rendered: RenderedJob) -> InProcessJob:
        """Return a job that runs when it is waited for."""
        return InProcessJob(rendered.commands[0])


class InProcessJob:
    """Runs in :meth:`wait`; signals reach the worker's own handlers."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._cancelled = False

    @property
    def pids(self) -> tuple[int, ...]:
        """None but this process itself, which is not the job's to end."""
        return ()

    def wait(self) -> int:
        """Run the command to its end; return what it exits with."""
        if self._cancelled:
            return 130
        command = self._command.argv[1:]
        try:
            if command[0] == "-m":
                here = os.getcwd()
                with self._started_with(command[1:], here), warnings.catch_warnings():
                    # A script that calls fit() has imported the worker; running it again is intended.
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
        except PacelineError:
            raise
        except Exception as error:
            traceback = _traceback_of_script(error)
            sys.excepthook(type(error), error.with_traceback(traceback), traceback)
            return 1
        return 0

    def cancel(self) -> None:
        """Keep :meth:`wait` from starting it."""
        self._cancelled = True

    @contextmanager
    def _started_with(self, arguments: tuple[str, ...], imports_from: str) -> Iterator[None]:
        """Set the arguments and the first import path as Python does for a program."""
        before = sys.argv
        sys.argv = list(arguments)
        sys.path.insert(0, imports_from)
        try:
            with patch_environ(self._command.env):
                yield
        finally:
            sys.argv = before
            with suppress(ValueError):
                sys.path.remove(imports_from)


def _traceback_of_script(error: Exception) -> TracebackType | None:
    """Return the part of a traceback that Python shows where it runs the script: no frames of ours or of runpy."""
    traceback, own = error.__traceback__, (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


# --- Processes under torchrun's agent: ``python -m torch.distributed.run`` ---


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_REACHING_RANKS = ("TERM", "USR1")


class Torchrun(LocalLauncher):
    """Starts torchrun's agent here; on several nodes the user runs it on each.

    The agent serves its store on every interface, as torchrun always does; the workers' own sockets
    are on loopback if all are on one node.
    """

    name = "torchrun"
    rank_launchers = ("torchrun",)
    env_styles = ("torch",)

    def _place(self, spec: LaunchSpec, options: RendezvousOptions | None) -> LaunchSpec:
        """Return the job with this node's place; a script's ``--max-restarts`` are torchrun's."""
        spec = super()._place(spec, options)
        if isinstance(options, TorchrunOptions):
            if options.rdzv_backend not in ("c10d", "static"):
                raise ConfigError(f"--rdzv-backend must be c10d or static, but is {options.rdzv_backend!r}.")
            if options.rdzv_backend == "static" and options.node_rank is None:
                raise ConfigError("--rdzv-backend static needs --node-rank: this node's number is fixed.")
            for text in options.torchrun:
                name = text.removeprefix("--").partition("=")[0].replace("_", "-")
                if name in TORCHRUN_EQUALS:
                    raise ConfigError(f"--torchrun {text} is not allowed. Use {TORCHRUN_EQUALS[name]}.")
                if name not in TORCHRUN_OTHERS:
                    raise ConfigError(f"--torchrun {text}: torchrun has {', '.join(TORCHRUN_OTHERS)}.")
        return replace(spec, recover="restart") if spec.max_restarts and not spec.is_task else spec

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render torchrun's command."""
        own = options if isinstance(options, TorchrunOptions) else TorchrunOptions()
        python, arguments = split_python(_command(spec))
        signals, shell = _SIGNALS, []
        if spec.leaves_stop_codes:
            # torchrun would kill ranks that save for longer than 30 s: it ignores Slurm's signals.
            shell = ["sh", "-c", f"trap '' {' '.join(_REACHING_RANKS)}; exec \"$@\"", "sh"]
            signals = ",".join(name for name in _SIGNALS.split(",") if name.removeprefix("SIG") not in _REACHING_RANKS)
            python, arguments = split_python(stop_codes_command(sys.executable, _command(spec)))
        # torchrun's parser drops a -- that is the script's first argument.
        script = 2 if arguments[:1] == ("-m",) else 1
        if arguments[script : script + 1] == ("--",):
            arguments = (*arguments[:script], "--", *arguments[script:])
        module = "torch.distributed.launch" if own.local_rank_argument else "torch.distributed.run"
        nproc, restarts_workers = spec.local_world_size, spec.recover == "restart"
        restarts = [f"--max-restarts={spec.max_restarts}"] if restarts_workers else []
        # A store that agents share with their workers is made once: an agent that joins later, or replaces a dead one,
        # does not get its address, and would wait forever (torch 2.13). A variable number of nodes changes without
        # --max-restarts too.
        least, most = spec.nodes
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if most > (1 if restarts_workers else least) else {}
        command = Command(
            title=f"torchrun, {nproc} processes",
            argv=(
                *(*shell, python or sys.executable, "-m", module),
                *(*_meeting(spec, own), f"--nproc-per-node={nproc}"),
                # Its default omits SIGUSR1, Slurm's warning, which would kill it and its workers.
                f"--signals-to-handle={signals}",
                *(*restarts, *([] if python else ["--no-python"]), *arguments),
            ),
            env={**spec.thread_variables(), **own_store, **_variables(spec)},
        )
        return (command,)

    def _start(self, rendered: RenderedJob) -> SupervisedJob:
        """Start the agent."""
        spec = rendered.spec
        check_program(spec.command[0])
        verdict = None if spec.log_directory is None else partial(_verdict, spec.log_directory, time.time())
        starter = RankStarter(name="torchrun", verdict=verdict)
        if spec.leaves_stop_codes:
            starter = replace(starter, death_signal=signal.SIGINT, signal_ranks=signal_ranks)
        return SupervisedJob(
            rendered.commands,
            starter=starter,
            directory=spec.log_directory,
            grace_s=spec.grace_s,
        )


def _meeting(spec: LaunchSpec, own: TorchrunOptions) -> list[str]:
    """Return torchrun's options for the rendezvous of the agents, and the user's own."""
    words = [f"--{text.removeprefix('--')}" for text in own.torchrun]
    # Of several --rdzv-conf torchrun takes the last one.
    is_conf = [re.match("--rdzv[-_]conf=", word) is not None for word in words]
    conf = ",".join(word.partition("=")[2] for word, is_one in zip(words, is_conf, strict=True) if is_one)
    others = [word for word, is_one in zip(words, is_conf, strict=True) if not is_one]
    meeting = _rendezvous(spec, own.rdzv_backend)
    if conf:
        ours = [word for word in meeting if word.startswith("--rdzv-conf=")]
        meeting = [word for word in meeting if word not in ours]
        meeting.append(",".join([*(ours or ["--rdzv-conf="]), conf]).replace("=,", "=", 1))
    return [*meeting, *others]


def _rendezvous(spec: LaunchSpec, backend: str) -> list[str]:
    least, most = spec.nodes
    if most == 1:
        if spec.master_port is None:
            return ["--standalone"]
        return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={spec.master_port}"]
    if backend == "static":
        assert spec.rdzv_endpoint is not None
        host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        return [
            f"--nnodes={least}",
            f"--node-rank={spec.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    is_host, local_addr = [], []
    if spec.node_rank is not None:
        is_host = [f"--rdzv-conf=is_host={int(spec.node_rank == 0)}"]
        # Workers meet at the address of one of the agents, which by default reports its hostname.
        local_addr = [f"--local-addr={host}" for host in spec.hosts[spec.node_rank : spec.node_rank + 1]]
    return [
        f"--nnodes={least}:{most}" if most > least else f"--nnodes={least}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={spec.rdzv_endpoint}",
        f"--rdzv-id={spec.rdzv_id}",
        *(*is_host, *local_addr),
    ]


def _verdict(directory: RunDirectory, began: float) -> str:
    """Describe the workers' progress when the last of torchrun's restarts failed; "" without a restart."""
    events = directory.read_events()
    starts = [event["step"] for event in events if event["event"] == "started" and event["time"] >= began]
    if len(starts) < 2:
        return ""
    step = starts[-1]
    same = len(list(itertools.takewhile(lambda start: start == step, reversed(starts))))
    lines = []
    if same > 1:
        lines.append(
            f"torchrun started the workers {len(starts)} times; the last {same} times they continued after "
            f"step {step}, and none came to the next checkpoint."
        )
    failures = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    victims = [failure for failure in failures if failure is not None and failure.victim]
    lines += [f"rank {failure.rank}: {failure.message}" for failure in victims[:1]]
    return "\n  ".join(lines)


# --- TensorFlow's processes: they need consecutive ports, and the launcher must end those that only serve
#
# Under its parameter server strategy, workers and servers run ``server.join()``, which never returns: when the chief
# ends, the launcher must end the others, on its own node and on all others.


_FIRST_PORT, _LAST_PORT = 20000, 32000  # below the range from which the kernel takes ephemeral ports
_LOOK_S = 0.25
_REFUSALS = 3
_LOST_S = 60.0


def role_serves(rank: int, roles: Sequence[str]) -> bool:
    """Return whether a rank only serves others, and never ends by itself."""
    return bool(roles) and (roles[rank] == "ps" or (roles[rank] == "worker" and {"ps", "chief"} <= set(roles)))


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports.

    Raises:
        LaunchError: there are none.
    """
    for _ in range(200):
        first = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT - count)
        if not any(_is_taken(first + i) for i in range(count)):
            return first
    raise LaunchError(f"there are no {count} free ports in a row from {_FIRST_PORT} to {_LAST_PORT}.")


def start_tensorflow(rendered: RenderedJob) -> SupervisedJob:
    """Start processes that have TF_CONFIG.

    Raises:
        ConfigError: one of their ports is taken: TensorFlow would say so only after minutes.
    """
    configs = [json.loads(command.env["TF_CONFIG"]) for command in rendered.commands]
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
    serves_elsewhere = not chief_is_here and any(command.serves for command in rendered.commands)
    job = SupervisedJob(
        rendered.commands,
        directory=rendered.spec.log_directory,
        grace_s=rendered.spec.grace_s,
        ignores_sigterm=True,
        serves_elsewhere=serves_elsewhere,
    )
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


class Spawn(LocalLauncher):
    """Starts ``nproc`` subprocesses here; on several nodes the user runs it on each."""

    name = "spawn"
    rank_launchers = ("spawn",)

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render one command a rank. A free port is looked up where the spec names none.

        Where ranks that die are recovered, there is one command only: the agent's fork server, which forks them.
        """
        if spec.recover != "none":
            return (_forkserver(spec),)
        nproc, nodes = spec.local_world_size, spec.nodes[0]
        if nodes > 1:
            if spec.node_rank is None:
                raise ConfigError(
                    f"--on spawn with --nodes {nodes} needs --node-rank: 0 on the node of "
                    f"--rdzv-endpoint, 1 to {nodes - 1} on the others."
                )
            assert spec.rdzv_endpoint is not None
            host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        else:
            host, port = "127.0.0.1", spec.master_port or free_master_port(spec.env_style, nproc)
        command = _command(spec)
        if spec.leaves_stop_codes:
            command = stop_codes_command(sys.executable, command)
        return tuple(_rank(spec, command, local_rank, host, port) for local_rank in range(nproc))

    def _start(self, rendered: RenderedJob) -> ProcessGroup:
        """Start the ranks. Where another process took the port since, the job gets a new one."""
        spec, commands = rendered.spec, rendered.commands
        if spec.recover != "none":
            from paceline.elastic.agent import Agent

            return Agent(spec, commands[0])
        if spec.env_style == "tensorflow":
            return start_tensorflow(rendered)
        if spec.nodes[0] > 1 or spec.env_style != "torch":
            return SupervisedJob(commands, directory=spec.log_directory, grace_s=spec.grace_s)
        port = int(commands[0].env["MASTER_PORT"])
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
            commands = tuple(replace(each, env={**each.env, "MASTER_PORT": str(port)}) for each in commands)
            # Rank 0 inherits the bound socket, so no other process can take the port in between.
            inherited = {LISTEN_FD: str(listener.fileno())}
            commands = (replace(commands[0], env={**commands[0].env, **inherited}), *commands[1:])
            rank_0_fds = (listener.fileno(),)
            return SupervisedJob(
                commands,
                directory=spec.log_directory,
                grace_s=spec.grace_s,
                rank_0_fds=rank_0_fds,
            )


def _rank(spec: LaunchSpec, command: tuple[str, ...], local_rank: int, host: str, port: int) -> Command:
    rank = spec.first_rank + local_rank
    place = Environment(
        source="variables",
        rank=rank,
        world_size=spec.world_size,
        local_rank=local_rank,
        local_world_size=spec.local_world_size,
        node_rank=spec.node_rank or 0,
        nodes=spec.nodes[0],
        master_addr=host,
        master_port=port,
    )
    counts = spec.nproc if len(spec.nproc) > 1 else ()
    env = {
        **env_style_variables(spec.env_style, place, hosts=spec.hosts, counts=counts, roles=spec.roles),
        **({JOB_ID: spec.rdzv_id} if spec.nodes[0] > 1 and spec.env_style == "torch" else {}),
        **spec.thread_variables(),
        **_variables(spec),
    }
    log = spec.log_directory.log_of(rank) if spec.log_directory is not None and rank > 0 else None
    serves = spec.env_style == "tensorflow" and role_serves(rank, spec.roles)
    return Command(title=f"rank {rank}", argv=command, env=env, rank=rank, log=log, serves=serves)


def _forkserver(spec: LaunchSpec) -> Command:
    return Command(
        title=f"forks {spec.local_world_size} workers of {spec.job_file}, and replaces those that die",
        argv=(spec.command[0], "-m", "paceline.elastic.forkserver"),
        env={**spec.thread_variables(), **spec.env},
    )


def free_master_port(env_style: EnvStyle, nproc: int) -> int:
    """Return a free port, or the first of ``nproc`` consecutive ones: TensorFlow's processes each listen on one."""
    if env_style == "tensorflow":
        return free_ports(nproc)
    with bound_loopback_socket() as bound:
        port: int = bound.getsockname()[1]
    return port
