"""``--on inprocess`` and ``spawn``: processes on this node; the same command runs on each other node."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from paceline.core.environment import JOB_ID, LISTEN_FD, Environment, parse_endpoint, patch_environ
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.job import Command, LaunchSpec, split_python
from paceline.launch.launcher import RenderedJob
from paceline.launch.local_run import LocalLauncher, bound_loopback_socket, free_master_port
from paceline.launch.options import RendezvousOptions
from paceline.launch.rank_variables import (
    env_style_variables,
    expand_placeholders,
    find_framework,
    has_placeholders,
    interface_variables,
)
from paceline.launch.supervisor import ProcessGroup, SupervisedJob

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
