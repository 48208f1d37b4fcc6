"""What mpirun and horovodrun have in common: they start every rank themselves, on a list of machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.distributed.sockets import job_port
from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec
from paceline.launchers.contracts import has_placeholders
from paceline.launchers.hosts import Host, machines_of, read_hosts
from paceline.launchers.node import interface_variables
from paceline.launchers.rank import rank_command


def sizes(
    hosts: str | None, nodes: tuple[int, int], nproc: tuple[int, ...] | None
) -> tuple[tuple[int, int], tuple[int, ...] | None]:
    """The machines and their processes, as ``--hosts`` says, where it is given.

    Raises:
        ConfigError: it contradicts ``--nodes`` or ``--nproc``, or names no machine.
    """
    return (nodes, nproc) if hosts is None else machines_of(read_hosts(hosts), nodes, nproc)


def placed(spec: JobSpec, hosts: tuple[Host, ...]) -> JobSpec:
    """The job with the machines and processes of a list of hosts.

    Raises:
        ConfigError: the list and ``--nodes`` or ``--nproc`` contradict each other, or several machines are
            wanted and there is no list.
    """
    if hosts:
        nodes, nproc = machines_of(hosts, spec.nodes, spec.nproc)
        spec = replace(spec, nodes=nodes, nproc=nproc or spec.nproc)
    least, most = spec.nodes
    if least != most:
        raise ConfigError(f"--nodes {least}:{most}: the number of machines is fixed here. Give one number.")
    if least > 1 and not hosts:
        raise ConfigError(f"--nodes {least} needs --hosts: the machines, such as node0:2,node1:2, or a file.")
    return spec


def command_of_a_rank(spec: JobSpec, hosts: tuple[Host, ...] = ()) -> tuple[str, ...]:
    """What is started for each rank: the command itself where the library tells it all that it asks.

    Args:
        spec: the job, with its machines.
        hosts: those machines; default: they are found at the start, or there is only this one.
    """
    if spec.contract in ("mpi", "horovod") and not has_placeholders(spec.command):
        return spec.command
    if spec.nodes[1] == 1:
        return rank_command(spec)
    # MPICH has no number for a job that all machines know.
    port = spec.master_port or job_port(str(spec.directory))
    return rank_command(replace(spec, master_port=port), hosts[0].reached_at if hosts else None)


def variables(spec: JobSpec) -> dict[str, str]:
    """What is added to the environment of every rank."""
    threads = {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
    return {**threads, **interface_variables(spec.interface), **spec.env}


def host_list(spec: JobSpec, hosts: Iterable[Host]) -> str:
    """``a:2,b:2``: the machines with the processes that each starts."""
    return ",".join(
        f"{host.reached_at}:{spec.processes_on(number)}"
        for number, host in enumerate(tuple(hosts)[: spec.nodes[1]])
    )
