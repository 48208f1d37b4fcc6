"""What a launcher starts once for each rank: ``python -m paceline.launch.rank OPTIONS -- COMMAND``.

Under ``srun`` and ``mpirun`` a process is told its place in their own variables. This one says the same in
those that the script reads, and becomes the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import get_args

from paceline.core.access import is_loopback
from paceline.core.environment import (
    Environment,
    default_threads,
    detect_environment,
    detect_node,
)
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.options import parse_nproc
from paceline.core.parent_death import die_with_parent
from paceline.core.sockets import job_port
from paceline.launch.launcher import EnvStyle, LaunchSpec
from paceline.launch.node import interface_variables
from paceline.launch.rank_env import env_style_variables, expand_placeholders

_FROM_OUTSIDE = ("RANK", "WORLD_SIZE", "MASTER_PORT")
"""What no launcher of ranks sets: a shell's profile, a pod or an image does, the same for all ranks.

MASTER_ADDR is set by the script of a Slurm job, in which mpirun finds its machines by itself.
"""


def rank_command(spec: LaunchSpec, master_addr: str | None = None) -> tuple[str, ...]:
    """The command that a launcher starts for each rank of a job.

    Args:
        spec: the job.
        master_addr: the machine of rank 0, where the launcher does not tell its processes.

    Raises:
        ConfigError: nobody would end its parameter servers.
    """
    if "ps" in spec.roles:
        raise ConfigError(
            f"--roles with ps does not work with --rank-launcher {spec.rank_launcher}: parameter servers never end by "
            "themselves, and it ends none. Use --rank-launcher spawn."
        )
    options: list[str] = ["--env-style", spec.env_style]
    if len(spec.nproc) > 1:
        options += ["--nproc", ",".join(map(str, spec.nproc))]
    if spec.roles:
        options += ["--roles", ",".join(spec.roles)]
    if master_addr is not None:
        options += ["--master-addr", master_addr]
    for name in ("threads", "interface", "master_port"):
        value = getattr(spec, name)
        if value is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    return (spec.python, "-m", "paceline.launch.rank", *options, "--", *spec.command)


def main(argv: Sequence[str]) -> int:
    """Become the command; return an exit code only where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.rank", description=__doc__)
    parser.add_argument("--env-style", choices=get_args(EnvStyle), required=True)
    parser.add_argument("--nproc", type=parse_nproc, default=(), help="by machine, where they differ")
    parser.add_argument("--roles", default="", help="of all ranks, with commas")
    parser.add_argument("--master-addr", help="default: what the launcher says")
    parser.add_argument("--master-port", type=int, help="default: made from the job's number")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--interface")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    try:
        command, variables = _place(options, os.environ)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    # Open MPI's ranks outlive an mpirun that is killed; no process is to be left behind.
    die_with_parent()
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        print(f"paceline: {command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
        return 127


def _place(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    who = detect_environment({name: value for name, value in environ.items() if name not in _FROM_OUTSIDE})
    if options.nproc:
        who = _on_machines(who, options.nproc)
    machine = detect_node(environ)
    host = options.master_addr or who.first_host or who.master_addr or (machine.hosts[0] if machine.hosts else None)
    if host is None and who.is_single_node:
        host = "127.0.0.1"
    if host is None:
        raise ConfigError("nothing says which machine rank 0 is on. Give --master-addr HOST.")
    if who.is_single_node and who.nodes == 1 and not is_loopback(host):
        host = "127.0.0.1"
    port = options.master_port or job_port(who.job_id or f"parent-{os.getppid()}")
    variables = {
        "OMP_NUM_THREADS": str(default_threads(who, options.threads)),
        **interface_variables(options.interface),
    }
    if options.env_style in ("torch", "tensorflow"):
        placed = replace(who, master_addr=host, master_port=port)
        roles = [role for role in options.roles.split(",") if role]
        variables |= env_style_variables(
            options.env_style, placed, hosts=machine.hosts, counts=options.nproc, roles=roles
        )
    command = expand_placeholders(
        options.command, master_addr=host, master_port=port, node_rank=who.node_rank, nodes=who.nodes
    )
    return command, variables


def _on_machines(who: Environment, counts: Sequence[int]) -> Environment:
    """The place with the machine's number, which nobody says where machines have different numbers of ranks.

    Raises:
        ConfigError: so many ranks were not started.
    """
    if who.world_size != sum(counts):
        raise ConfigError(
            f"{sum(counts)} ranks are wanted, {','.join(map(str, counts))} by machine, but the launcher says "
            f"that there are {who.world_size}."
        )
    node_rank = next(number for number, end in enumerate(accumulate(counts)) if who.rank < end)
    return replace(who, node_rank=node_rank, nodes=len(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
