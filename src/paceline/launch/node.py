"""The program that a launcher starts once on each node: ``python -m paceline.launch.node OPTIONS -- COMMAND``.

It determines the node's number, and starts the rank launcher, which starts the ranks: Paceline's agent for its own
tasks, torchrun, or plain processes. So launchers do not depend on how ranks start.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.core.built_in import FRAMEWORKS, PARTS
from paceline.core.environment import NodeEnvironment, detect_node
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.job import Placement, RecoveryPolicy
from paceline.core.options import parse_nodes, parse_nproc
from paceline.core.plugins import import_object
from paceline.core.sockets import job_port
from paceline.launch.launcher import LaunchSpec, find_preflight, get_launcher
from paceline.launch.local_run import free_master_port
from paceline.launch.rank_variables import expand_placeholders, names_port
from paceline.launch.stop_codes import STOP_CODES, leave_stop_code, stop_codes_command
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED

_NAMED_LATE = ("kubernetes", "kubeflow", "sagemaker", "vertex")
"""Where a machine may start before the name of the first one can be looked up, its own name too."""

_GROWS_LATER = ("kubernetes", "kubeflow")
"""Where a job of MIN:MAX machines begins with MIN of them, and each knows of MAX."""

_NAME_TIMEOUT_S = 300.0

_ENDED_BY_SIGNAL = (*STOPPED, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""The exit codes of ranks that were asked to stop; those that failed before have their own."""


def node_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command that a launcher starts on each node of a job."""
    if (reference := PARTS.get(f"--rank-launcher {spec.rank_launcher}")) is not None:
        command: tuple[str, ...] = import_object(reference)(spec)
        return command
    least, most = spec.nodes
    options: list[str] = ["--rank-launcher", spec.rank_launcher]
    if most > 1:
        options += ["--nodes", str(least) if least == most else f"{least}:{most}"]
    options += ["--nproc", ",".join(map(str, spec.nproc))]
    if spec.env_style != "torch":
        options += ["--env-style", spec.env_style]
    if spec.roles:
        options += ["--roles", ",".join(spec.roles)]
    for name in ("threads", "interface", "master_port"):
        value = getattr(spec, name)
        if value is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    if spec.recovery.max_restarts:
        options += ["--max-restarts", str(spec.recovery.max_restarts)]
    options += [f"--torchrun={text}" for text in spec.torchrun]
    if spec.preflight:
        options += ["--preflight", shlex.join(spec.preflight)]
    return (spec.python, "-P", "-m", "paceline.launch.node", *options, "--", *spec.command)


def main(argv: Sequence[str]) -> int:
    """Start this machine's ranks; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        return _run(options, detect_node())
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.node", description=__doc__)
    parser.add_argument("--rank-launcher", choices=("agent", "torchrun", "spawn"), required=True)
    parser.add_argument("--nodes", type=parse_nodes, default=(1, 1), help="N or MIN:MAX")
    parser.add_argument("--nproc", type=parse_nproc, default=(1,), help="processes, or a list by machine")
    parser.add_argument("--env-style", choices=("torch", *FRAMEWORKS, "none"), default="torch")
    parser.add_argument("--roles", default="", help="of all ranks, with commas")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--interface")
    parser.add_argument("--master-port", type=int, help="default: made from the job's number")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--torchrun", action="append", default=[], help="KEY=VALUE or KEY for torchrun")
    parser.add_argument("--preflight", type=shlex.split, default=(), help="the ranks that check the node first")
    parser.add_argument("command", nargs="+")
    return parser


def _run(options: argparse.Namespace, environment: NodeEnvironment) -> int:
    nodes: tuple[int, int] = options.nodes
    if environment.nodes == 1 and nodes[0] > 1:
        raise ConfigError(
            f"the job has {nodes[0]} machines, but nothing here says which of them this is. Start it through "
            f"paceline launch, or set PACELINE_NODE_RANK, PACELINE_NODES and PACELINE_HOSTS."
        )
    several = nodes[1] > 1
    host = environment.hosts[0] if several and environment.hosts else "127.0.0.1"
    if several and environment.source in _NAMED_LATE:
        _await_name(host)
    counts: tuple[int, ...] = options.nproc
    nproc = counts[environment.node_rank] if len(counts) > 1 else counts[0]
    port = options.master_port or (
        job_port(environment.job_id or "paceline") if several else free_master_port(options.env_style, nproc)
    )
    port_is_named = options.master_port is not None or names_port(options.command)
    expand = partial(
        expand_placeholders,
        master_addr=host,
        master_port=port,
        node_rank=environment.node_rank,
        nnodes=environment.nodes,
    )
    # torchrun's and spawn's launchers expand the rest.
    command = expand(options.command, keep_literals=options.rank_launcher != "agent")
    joins = several and options.rank_launcher == "agent" and _has_agents(command)
    begin = nodes[0] if environment.source in _GROWS_LATER else environment.nodes
    # Preflight is for the job's first nodes: a node that joins later would find no peer for it.
    endpoint = f"{host}:{port}" if several else None
    if options.preflight and not joins and environment.node_rank < begin:
        ranks = LaunchSpec(
            command=options.preflight,
            nodes=(begin, begin),
            nproc=counts,
            threads=options.threads,
            interface=options.interface,
            placement=Placement(
                node_rank=environment.node_rank if several else None,
                rdzv_endpoint=endpoint,
                rdzv_id=environment.job_id or "paceline",
            ),
        )
        code, interface = find_preflight().run_before(ranks)
        if code:
            return code
        options.interface = options.interface or interface
    if options.rank_launcher == "agent":
        agent = _agent_command(command, options, environment, endpoint, joins=joins)
        os.execvp(agent[0], agent)
    leaves_stop_codes = STOP_CODES in os.environ
    if leaves_stop_codes and options.rank_launcher == "spawn":  # torchrun's launcher wraps what torchrun starts
        command = stop_codes_command(sys.executable, command)
    spec = LaunchSpec(
        command=command,
        nodes=(environment.nodes, environment.nodes) if options.rank_launcher == "spawn" else nodes,
        nproc=counts,
        master_port=port if port_is_named and not several else None,
        threads=options.threads,
        interface=options.interface,
        torchrun=tuple(options.torchrun),
        rank_launcher=options.rank_launcher,
        env_style=options.env_style,
        roles=tuple(role for role in options.roles.split(",") if role),
        placement=Placement(
            node_rank=environment.node_rank if several else None,
            rdzv_endpoint=endpoint,
            rdzv_id=environment.job_id or "paceline",
            hosts=environment.hosts,
            leaves_stop_codes=leaves_stop_codes,
        ),
        recovery=RecoveryPolicy(max_restarts=options.max_restarts if options.rank_launcher == "torchrun" else 0),
    )
    launcher = get_launcher(options.rank_launcher)
    code = launcher.submit(launcher.render(spec)).wait()
    return leave_stop_code(code, asked=code in _ENDED_BY_SIGNAL) if leaves_stop_codes else code


def _run_of(command: Sequence[str]) -> str:
    """Return the run's directory from the command of a task."""
    return command[command.index("--run-dir") + 1]


def _has_agents(command: Sequence[str]) -> bool:
    """Return whether other nodes of the task are active already.

    A pod that replaces a lost one, or joins a growing job, gets the same command as all the others.
    """
    from paceline.elastic.consensus.discovery import active_agents

    return "--run-dir" in command and active_agents(RunDirectory(Path(_run_of(command))))


def _agent_command(
    command: tuple[str, ...],
    options: argparse.Namespace,
    environment: NodeEnvironment,
    endpoint: str | None,
    *,
    joins: bool,
) -> tuple[str, ...]:
    """``paceline train`` as the agent of this machine; where it joins others, ``paceline join``."""
    least, most = options.nodes
    if joins:
        counts: tuple[int, ...] = options.nproc
        nproc = counts[environment.node_rank] if len(counts) > 1 else counts[0]
        words = [command[0], "-m", "paceline", "join", _run_of(command), "--nproc", str(nproc)]
        return tuple(words if options.interface is None else [*words, "--interface", options.interface])
    words = [*command, "--on", "spawn", "--nproc", ",".join(map(str, options.nproc))]
    if endpoint is not None:
        nodes = str(least) if least == most else f"{least}:{most}"
        words += ["--nodes", nodes, "--node-rank", str(environment.node_rank), "--rdzv-endpoint", endpoint]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.interface is not None:
        words += ["--interface", options.interface]
    return tuple(words)


def _await_name(host: str) -> None:
    """Wait until a machine's name can be looked up."""
    deadline = time.monotonic() + _NAME_TIMEOUT_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the first node's name, {host}, cannot be resolved: {error.strerror}.") from error
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
