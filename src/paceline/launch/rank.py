"""The program that a launcher starts once for each rank: ``python -m paceline.launch.rank OPTIONS -- COMMAND``.

Under ``srun`` and ``mpirun`` a process gets its place in their own variables. This program translates them into those
that the script reads, and becomes the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import get_args

from paceline.core.built_in import FRAMEWORKS
from paceline.core.environment import (
    Environment,
    default_threads,
    detect_environment,
    detect_node,
    is_loopback,
)
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.job import LaunchSpec
from paceline.core.option_groups import EnvStyle
from paceline.core.options import parse_nproc
from paceline.core.parent_death import die_with_parent
from paceline.core.sockets import job_port
from paceline.launch.rank_output import pass_own_lines_on
from paceline.launch.rank_variables import env_style_variables, expand_placeholders, interface_variables
from paceline.launch.stop_codes import STOP_CODES, run_rank

_FROM_OUTSIDE = ("RANK", "WORLD_SIZE", "MASTER_PORT")
"""What no launcher of ranks sets: a shell's profile, a pod or an image does, the same for all ranks.

MASTER_ADDR is set by the script of a Slurm job, in which mpirun finds its machines by itself.
"""


def rank_command(spec: LaunchSpec, master_addr: str | None = None) -> tuple[str, ...]:
    """Return the command that a launcher starts for each rank of a job.

    Args:
        master_addr: the machine of rank 0, where the launcher does not tell its processes.
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
    return (spec.python, "-P", "-m", "paceline.launch.rank", *options, "--", *spec.command)


def main(argv: Sequence[str]) -> int:
    """Become the command; return an exit code only where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.rank", description=__doc__)
    parser.add_argument("--env-style", choices=get_args(EnvStyle), help="default: torchrun has set the variables")
    parser.add_argument("--nproc", type=parse_nproc, default=(), help="by machine, where they differ")
    parser.add_argument("--roles", default="", help="of all ranks, with commas")
    parser.add_argument("--master-addr", help="default: the launcher's")
    parser.add_argument("--master-port", type=int, help="default: made from the job's number")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--interface")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    variables: dict[str, str] = {}
    try:
        if options.env_style is None:
            command = _expand(options.command, detect_environment())
        else:
            command, variables = _translate(options, os.environ)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    if options.env_style is not None:
        # Open MPI's ranks outlive a killed mpirun; no process may remain.
        die_with_parent()
        if detect_environment(_given(os.environ)).source == "mpi":
            pass_own_lines_on()  # mpirun passes on pieces of lines
        if STOP_CODES in os.environ:
            os.environ.update(variables)
            return run_rank(command)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        print(f"paceline: {command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
        return 127


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that no launcher of ranks sets."""
    return {name: value for name, value in environ.items() if name not in _FROM_OUTSIDE}


def _translate(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    who = detect_environment(_given(environ))
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
    placed = replace(who, master_addr=host, master_port=port)
    if options.env_style in ("torch", *FRAMEWORKS):
        roles = [role for role in options.roles.split(",") if role]
        variables |= env_style_variables(
            options.env_style, placed, hosts=machine.hosts, counts=options.nproc, roles=roles
        )
    return _expand(options.command, placed), variables


def _expand(command: Sequence[str], environment: Environment) -> tuple[str, ...]:
    return expand_placeholders(
        command,
        master_addr=str(environment.master_addr),
        master_port=environment.master_port or 0,
        node_rank=environment.node_rank,
        nnodes=environment.nodes,
        local_rank=environment.local_rank,
        rank=environment.rank,
        world_size=environment.world_size,
    )


def _on_machines(who: Environment, counts: Sequence[int]) -> Environment:
    """Add the node's number, which launchers do not give if nodes have different numbers of ranks."""
    if who.world_size != sum(counts):
        raise ConfigError(
            f"{sum(counts)} ranks are wanted, {','.join(map(str, counts))} by machine, but the launcher says "
            f"that there are {who.world_size}."
        )
    node_rank = next(number for number, end in enumerate(accumulate(counts)) if who.rank < end)
    return replace(who, node_rank=node_rank, nodes=len(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
