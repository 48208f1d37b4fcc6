"""``--on inprocess`` and ``spawn``: processes on this node; and handles of jobs that a process of this node watches."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import runpy
import shlex
import signal
import socket
import sys
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from paceline.core.environment import JOB_ID, LISTEN_FD, Environment, parse_endpoint, patch_environ
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.files import write_atomically
from paceline.core.job import Command, LaunchSpec, Placement, WorkerConfig, split_python
from paceline.launch.job_logs import follow_files
from paceline.launch.launcher import (
    JobHandle,
    JobOptions,
    JobStatus,
    Launcher,
    RecordedJob,
    RenderedJob,
    RendezvousOptions,
    find_preflight,
    refuse_unsupported,
)
from paceline.launch.local_run import (
    bound_loopback_socket,
    free_master_port,
    prepare_local_run,
    processes_here,
    refuse_job_options,
)
from paceline.launch.rank_variables import (
    env_style_variables,
    expand_placeholders,
    find_framework,
    has_placeholders,
    interface_variables,
    names_port,
)
from paceline.launch.supervisor import SupervisedJob
from paceline.runs.failures import STOPPED

# --- The launchers of this node ---


class LocalLauncher(Launcher):
    """Starts the processes of one node: this one."""

    attached = True
    preallocated = True

    def start_task(
        self, worker_config: WorkerConfig, options: JobOptions, own: Mapping[str, Any], *, dry_run: bool, json: bool
    ) -> int:
        """Train the task with processes of this node; with ``json`` print its result."""
        refuse_job_options(worker_config.config.processes.on, options, own)
        run = prepare_local_run(self, worker_config, reserve=not dry_run)
        checks = run.preflight(worker_config.config.processes.nproc) if options.preflight else None
        if dry_run:
            print(run.description(checks, json=json), end="")
            return 0
        if checks is not None:
            code, interface = find_preflight().run_before(checks)
            if code:
                if worker_config.config.records.run_dir is None:
                    with suppress(OSError):  # a rank that was killed leaves its mark there
                        run.directory.path.rmdir()
                return code
            run = run.on_interface(interface)
        code = run.launch()
        if code == 0 and json:
            print(json_module.dumps(run.directory.read_result()), flush=True)
        return code

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: RendezvousOptions | None
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Return, for ``--nproc auto``, a process for each GPU of this node, else for each core."""
        return nodes, nproc or (processes_here(),)

    def render(self, spec: LaunchSpec, options: RendezvousOptions | None = None) -> RenderedJob:
        refuse_unsupported(spec, self.name, resources=True, walltime=True)
        spec = self._with_placement(spec, options)
        return RenderedJob(spec=spec, options=options, commands=self._commands(spec, options))

    def submit(self, rendered: RenderedJob) -> ForegroundJob:
        spec = rendered.spec
        return ForegroundJob(self._start(rendered), spec.directory if spec.is_recorded else None)

    def reopen(self, reference: Mapping[str, Any]) -> BackgroundJob:
        return BackgroundJob(reference)

    @abstractmethod
    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render the processes of a job whose place is known."""

    @abstractmethod
    def _start(self, rendered: RenderedJob) -> ProcessGroup:
        """Start the processes."""

    def _with_placement(self, spec: LaunchSpec, options: RendezvousOptions | None) -> LaunchSpec:
        """Return the job with this node's place in it."""
        least, most = spec.nodes
        placement: RendezvousOptions | Placement = options or spec.placement
        if most > least and self.name != "torchrun" and spec.recovery.recover == "none":
            raise ConfigError(
                f"--nodes {least}:{most}: the number of nodes is fixed here. Give one number, or use --on torchrun."
            )
        if most > 1 and placement.rdzv_endpoint is None and not spec.placement.joins:
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
        if len(spec.nproc) > 1 and placement.node_rank is None:
            raise ConfigError("--nproc with a list needs --node-rank, which says which node this is.")
        if options is not None:
            endpoint = options.rdzv_endpoint
            here = dataclasses.replace(
                spec.placement, node_rank=options.node_rank, rdzv_endpoint=endpoint, rdzv_id=options.rdzv_id
            )
            spec = dataclasses.replace(spec, placement=here)
            if endpoint is not None:
                parse_endpoint(endpoint, "--rdzv-endpoint")
        needs_port = spec.placement.rdzv_endpoint is None and spec.master_port is None and not spec.is_task
        if needs_port and names_port(spec.command):
            spec = dataclasses.replace(spec, master_port=free_master_port(spec.env_style, spec.local_world_size))
        return spec


# --- A job's processes on this node: described, rendered as text, started ---


def process_command(spec: LaunchSpec, local_rank: int | str | None) -> tuple[str, ...]:
    """Return the command of a process; a task has no placeholders.

    Args:
        spec: the job, with this node's placement.
        local_rank: of the process; or torchrun's own placeholder, or None, which leaves all of a rank's to be replaced.
    """
    if spec.is_task or not has_placeholders(spec.command):
        return spec.command
    endpoint = spec.placement.rdzv_endpoint
    host, port = parse_endpoint(endpoint, "--rdzv-endpoint") if endpoint else ("127.0.0.1", spec.master_port or 0)
    return expand_placeholders(
        spec.command,
        master_addr=host,
        master_port=port,
        node_rank=spec.placement.node_rank or 0,
        nnodes=spec.nodes[0],
        local_rank=local_rank,
        rank=spec.first_rank + local_rank if isinstance(local_rank, int) else None,
        world_size=spec.world_size if isinstance(local_rank, int) else None,
        keep_literals=local_rank is None,
    )


def process_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of each process; a task's worker reads ``--interface`` from its own configuration."""
    return {**({} if spec.is_task else interface_variables(spec.interface)), **spec.env}


# --- One process: this one ---


class InProcess(LocalLauncher):
    """Runs the command in this process."""

    name = "inprocess"
    rank_launchers = ("spawn",)
    env_styles = ("none",)

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        nproc, nodes = spec.local_world_size, spec.nodes[0]
        if nproc > 1 or nodes > 1:
            raise ConfigError(f"--on inprocess runs one process, but {nproc * nodes} were asked for. Use --on spawn.")
        command = process_command(spec, 0)
        python, arguments = split_python(command)
        if not python or arguments == ("-m",):
            raise ConfigError(
                f"--on inprocess runs a script or -m MODULE, not {shlex.join(command)!r}. Use --on spawn."
            )
        env = {**process_variables(spec), **spec.thread_variables()}
        return (Command(title="in this process", argv=command, env=env, rank=0),)

    def _start(self, rendered: RenderedJob) -> InProcessJob:
        """Return a job that runs when it is waited for."""
        return InProcessJob(rendered.commands[0])


class InProcessJob:
    """Runs in :meth:`wait`; signals reach the worker's own handlers."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._cancelled = False

    def wait(self) -> int:
        """Run the command to its end; return what it exits with."""
        if self._cancelled:
            return 130
        command = self._command.argv[1:]
        try:
            if command[0] in ("-m", "-P"):
                here = os.getcwd() if command[0] == "-m" else None
                command = command[command.index("-m") :]
                with self._started_with(command[1:], here), warnings.catch_warnings():
                    # A script that calls fit() has imported the worker; running it again is intended.
                    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
                    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                beside = os.path.dirname(os.path.realpath(command[0]))
                with self._started_with(command, beside):
                    # Absolute, as Python has it: processes that multiprocessing spawns read the file again.
                    runpy.run_path(os.path.abspath(command[0]), run_name="__main__")
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
    def _started_with(self, arguments: tuple[str, ...], imports_from: str | None) -> Iterator[None]:
        """Set the arguments and the first import path as Python does for a program."""
        before = sys.argv
        sys.argv = list(arguments)
        if imports_from is not None:
            sys.path.insert(0, imports_from)
        try:
            with patch_environ(self._command.env):
                yield
        finally:
            sys.argv = before
            if imports_from in sys.path:
                sys.path.remove(imports_from)


def _traceback_of_script(error: Exception) -> TracebackType | None:
    """Return the part of a traceback that Python shows where it runs the script: no frames of ours or of runpy."""
    traceback, own = error.__traceback__, (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


# --- Processes on this node, each a subprocess with torchrun's variables ---


class Spawn(LocalLauncher):
    """Starts ``nproc`` subprocesses here; on several nodes the user runs it on each."""

    name = "spawn"
    rank_launchers = ("spawn",)

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        """Render one command a rank. A free port is looked up where the spec names none.

        Where ranks that die are recovered, there is one command only: the agent's fork server, which forks them.
        """
        if spec.recovery.recover != "none":
            return (_forkserver(spec),)
        nproc, nodes = spec.local_world_size, spec.nodes[0]
        if nodes > 1:
            if spec.placement.node_rank is None:
                raise ConfigError(
                    f"--on spawn with --nodes {nodes} needs --node-rank: 0 on the node of "
                    f"--rdzv-endpoint, 1 to {nodes - 1} on the others."
                )
            assert spec.placement.rdzv_endpoint is not None
            host, port = parse_endpoint(spec.placement.rdzv_endpoint, "--rdzv-endpoint")
        else:
            host, port = "127.0.0.1", spec.master_port or free_master_port(spec.env_style, nproc)
        return tuple(_rank(spec, local_rank, host, port) for local_rank in range(nproc))

    def _start(self, rendered: RenderedJob) -> ProcessGroup:
        """Start the ranks. Where another process took the port since, the job gets a new one."""
        spec, commands = rendered.spec, rendered.commands
        if spec.recovery.recover != "none":
            from paceline.elastic.agent import Agent

            return Agent(spec, commands[0])
        if (framework := find_framework(spec.env_style)) is not None:
            return framework.start(rendered)
        if spec.nodes[0] > 1 or spec.env_style != "torch":
            return SupervisedJob(commands, directory=spec.placement.log_directory, grace_s=spec.recovery.grace_s)
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
                directory=spec.placement.log_directory,
                grace_s=spec.recovery.grace_s,
                rank_0_fds=rank_0_fds,
            )


def _rank(spec: LaunchSpec, local_rank: int, host: str, port: int) -> Command:
    rank = spec.first_rank + local_rank
    command = process_command(spec, local_rank)
    environment = Environment(
        source="variables",
        rank=rank,
        world_size=spec.world_size,
        local_rank=local_rank,
        local_world_size=spec.local_world_size,
        node_rank=spec.placement.node_rank or 0,
        nodes=spec.nodes[0],
        master_addr=host,
        master_port=port,
    )
    counts = spec.nproc if len(spec.nproc) > 1 else ()
    env = {
        **env_style_variables(spec.env_style, environment, hosts=spec.placement.hosts, counts=counts, roles=spec.roles),
        **({JOB_ID: spec.placement.rdzv_id} if spec.nodes[0] > 1 and spec.env_style == "torch" else {}),
        **spec.thread_variables(),
        **process_variables(spec),
    }
    log = spec.placement.log_directory.log_of(rank) if spec.placement.log_directory is not None and rank > 0 else None
    framework = find_framework(spec.env_style)
    serves = framework is not None and framework.serves(rank, spec.roles)
    return Command(title=f"rank {rank}", argv=command, env=env, rank=rank, log=log, serves=serves)


def _forkserver(spec: LaunchSpec) -> Command:
    return Command(
        title=f"forks {spec.local_world_size} workers of {spec.job_file}, and replaces those that die",
        argv=(spec.command[0], "-P", "-m", "paceline.training.worker"),
        env={**spec.thread_variables(), **spec.env},
    )


# --- Jobs that end with the command that started them: mpirun, ssh, processes here ---


EXIT_CODE = "exit-code"
"""A file in a job's directory: written when the job has ended."""

OUTPUT = "output.log"
"""A file in a job's directory: the output of a detached job."""

_ASKED = "asked-to-end"
"""A file in a job's directory: it was cancelled once."""

_POLL_S = 0.2


class ProcessGroup(Protocol):
    """The processes of a job that this process has started, and watches."""

    def wait(self) -> int:
        """Return the job's exit code: 0, that of the first failed rank, or 75 or 130 after a requested stop."""

    def cancel(self) -> None:
        """Request a stop, and kill remaining processes after the grace period; :meth:`wait` then returns."""


class ForegroundJob(JobHandle):
    """A job that this process supervises.

    Args:
        directory: keeps the exit code for other commands; None: no other command knows of the job.
    """

    def __init__(self, processes: ProcessGroup, directory: Path | None) -> None:
        self._processes = processes
        self._directory = directory
        self._code: int | None = None
        if directory is not None:
            for name in (EXIT_CODE, _ASKED):
                with suppress(OSError):  # of the run's last job, which other nodes would read as this one's
                    (directory / name).unlink(missing_ok=True)

    @property
    def reference(self) -> dict[str, Any]:
        """This process, which the job ends with."""
        pid = os.getpid()
        return {"id": str(pid), **process_reference(pid), "directory": str(self._directory)}

    def status(self) -> JobStatus:
        """Running, until :meth:`wait` has returned."""
        return ended_status(self._code) if self._code is not None else JobStatus(state="running")

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Nothing: the job prints where this process does."""
        return iter(())

    def cancel(self) -> None:
        self._processes.cancel()

    def wait(self) -> int:
        try:
            code = self._processes.wait()
        except BaseException as error:  # of a script in this process, whose end it is
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            self.ended_with(error.exit_code if isinstance(error, PacelineError) else code)
            raise
        return self.ended_with(code)

    def ended_with(self, code: int) -> int:
        """Keep the exit code for other commands."""
        self._code = code
        if self._directory is not None:
            with suppress(OSError):
                write_atomically(self._directory / EXIT_CODE, f"{self._code}\n".encode())
        return self._code


class BackgroundJob(RecordedJob):
    """A job that another process supervises."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        super().__init__(reference)
        self._directory = Path(reference["directory"])

    def status(self) -> JobStatus:
        """Running while its process does; then what it has left."""
        status = process_status(self._reference)
        if status.state != "running":
            with suppress(OSError, ValueError):
                return ended_status(int((self._directory / EXIT_CODE).read_text()))
        return status

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        ended = (lambda: self.status().ended) if follow else None
        yield from follow_files(lambda: [self._directory / OUTPUT], ended=ended)

    def cancel(self) -> None:
        """Ask its process to end all that it has started; a second call has it kill what does not end.

        Raises:
            LaunchError: it is not one of this machine's.
        """
        process = process_to_end(self._reference, self.status())
        asked = self._directory / _ASKED
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT if asked.exists() else signal.SIGTERM)
            with suppress(OSError):
                asked.touch()

    def wait(self) -> int:
        """Wait for the process to end."""
        while not (status := self.status()).ended:
            if status.state == "unknown":
                raise LaunchError(f"{status.detail}. Wait for it there.")
            time.sleep(_POLL_S)
        return 1 if status.exit_code is None else status.exit_code


def process_reference(pid: int) -> dict[str, Any]:
    """Return the identification of a process of this machine, also for times when its number means another or none.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    created = psutil.Process(pid).create_time()
    return {"pid": pid, "created": created, "host": socket.gethostname(), **_process_table()}


def _process_table() -> dict[str, str]:
    """Return the scope of a process's number: one kernel, and one container."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def process_status(reference: Mapping[str, Any]) -> JobStatus:
    """Return the status of a process from the process table; unknown if that is another machine's."""
    if recorded_process(reference) is not None:
        return JobStatus(state="running", detail=f"process {reference['pid']}")
    here, host = _process_table(), reference.get("host")
    if host is None:  # recorded before machines were
        detail = f"there is no process {reference['pid']} here, but there may be on another machine"
        return JobStatus(state="unknown", detail=detail)
    if all(reference[name] == value for name, value in here.items()):
        return JobStatus(state="failed", detail="its process is gone, and left no exit code")
    if host != socket.gethostname():
        return JobStatus(state="unknown", detail=f"it runs on {host}")
    if reference["pid_namespace"] == here["pid_namespace"]:
        return JobStatus(state="failed", detail=f"{host} was restarted, and it left no exit code")
    return JobStatus(state="unknown", detail=f"it runs in another container of {host}")


def recorded_process(reference: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process of a reference, unless its number is another's: it has ended, or is elsewhere."""
    if any(reference.get(name, value) != value for name, value in _process_table().items()):
        return None
    try:
        process = psutil.Process(int(reference["pid"]))
        same = abs(process.create_time() - float(reference["created"])) < 0.02
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def process_to_end(reference: Mapping[str, Any], status: JobStatus) -> psutil.Process | None:
    """Return the process of a job to cancel; None if it has ended."""
    if status.state == "unknown":
        raise LaunchError(f"{status.detail}. Cancel it there.")
    return recorded_process(reference)


def ended_status(code: int, restarts: int = 0) -> JobStatus:
    """Return the status of a job that has ended with an exit code: stopped ones were cancelled."""
    if code == 0:
        return JobStatus(state="succeeded", exit_code=0, restarts=restarts)
    stopped = code in (*STOPPED, 128 + signal.SIGTERM)
    return JobStatus(
        state="cancelled" if stopped else "failed",
        detail=f"exit code {code}",
        exit_code=code,
        restarts=restarts,
    )
