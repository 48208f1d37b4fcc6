"""The interface of launchers: a launcher renders a job, submits it, and returns a handle to it."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.core.errors import ConfigError
from paceline.core.launch_spec import Command as Command
from paceline.core.launch_spec import LaunchSpec as LaunchSpec
from paceline.core.options import flag
from paceline.launch.options import TORCHRUN_EQUALS, TORCHRUN_OTHERS
from paceline.launch.registry import EnvStyle as EnvStyle
from paceline.launch.registry import RankLauncher as RankLauncher
from paceline.launch.registry import load_launcher
from paceline.launch.registry import option as option

# --- Lists of machines as people and MPI write them: ``a:2,b:2``, or a file ---


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: its name for ssh or mpirun: ``node0``, ``user@node0``, or a name of the ssh configuration.
        slots: processes to start there; None if the list does not give them.
        address: its address for other machines; "": the name without its user.
    """

    name: str
    slots: int | None = None
    address: str = ""

    @property
    def reached_at(self) -> str:
        """The name or address that other machines connect to."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(text: str, option: str = "--hosts") -> tuple[Host, ...]:
    """Read the machines of ``a:2,b:2``, or of the file of that name.

    A file has one machine per line: ``node0``, ``node0:2`` or ``node0 slots=2``, as Open MPI writes it, also with
    ``address=10.0.0.5`` if other machines cannot resolve ssh's name for it; ``#`` begins a comment.

    Raises:
        ConfigError: the text or the file names no machine, one twice, or has another form.
    """
    # Path.is_file() raises for a list that is longer than a file's name can be.
    if os.sep in text or os.path.isfile(text):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{option} {text}: the file cannot be read: {why}.") from error
        parts = [(f"{option} {text}, line {n}", line.partition("#")[0]) for n, line in enumerate(lines, 1)]
    else:
        parts = [(option, part) for part in text.split(",")]
    hosts = tuple(_host(part.strip(), where) for where, part in parts if part.strip())
    if not hosts:
        raise ConfigError(f"{option} {text!r} names no machine. Give such as node0:2,node1:2, or a file.")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{option} names {name} more than once. Say how many processes: {name}:2.")
    return hosts


def _host(text: str, where: str) -> Host:
    first, *fields = text.split()
    match = re.fullmatch(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[\w.@+-]+))(?::(?P<slots>\d+))?", first)
    # What begins with a dash would be taken for an option by ssh.
    if match is None or first.startswith("-"):
        raise ConfigError(f"{where}: {first!r} is not a host. Write NAME or NAME:PROCESSES, such as node0:2.")
    host = Host(match["ipv6"] or match["name"], int(match["slots"]) if match["slots"] else None)
    for word in fields:
        key, _, value = word.partition("=")
        if key == "slots" and value.isdigit() and host.slots is None:
            host = replace(host, slots=int(value))
        elif key == "address" and value:
            host = replace(host, address=value)
        elif key != "max_slots":  # Open MPI's; nothing is ever started beyond slots
            raise ConfigError(f"{where}: {word!r} is not known. Write slots=N or address=HOST.")
    if host.slots == 0:
        raise ConfigError(f"{where}: {host.name} has no slots. Leave it out.")
    return host


def nodes_of(
    hosts: tuple[Host, ...], nodes: tuple[int, int], nproc: tuple[int, ...] | None
) -> tuple[tuple[int, int], tuple[int, ...] | None]:
    """Combine a list of hosts with ``--nodes`` and ``--nproc``: the number of nodes, and the processes on each.

    ``--nodes 1``, the default, means all hosts; ``--nproc 1``, the default, the numbers of the list.

    Raises:
        ConfigError: they contradict each other.
    """
    least, most = nodes
    if nodes == (1, 1):
        least = most = len(hosts)
    if least > len(hosts):
        raise ConfigError(f"--nodes {least} needs as many hosts, but --hosts names {len(hosts)}.")
    used = hosts[:most]
    slots = tuple(host.slots for host in used)
    said = tuple(number for number in slots if number is not None)
    if not said:
        return (least, most), nproc
    if len(said) < len(slots):
        silent = next(host.name for host in used if host.slots is None)
        raise ConfigError(f"--hosts says the processes of some hosts, but not of {silent}.")
    counts = said[:1] if len(set(said)) == 1 else said
    if nproc not in (None, (1,), counts, said):
        assert nproc is not None
        given = ",".join(map(str, nproc))
        raise ConfigError(
            f"{flag('nproc')} {given} contradicts --hosts, which says {','.join(map(str, said))}: it counts the "
            "processes of a node. Leave it out."
        )
    if len(counts) > 1 and least < most:
        raise ConfigError(f"--nodes {least}:{most} needs the same number of processes on every host.")
    return (least, most), counts


# --- One interface to every launcher: describe a job, render it as text, submit it, follow it ---
#
# Rendering is pure: its text is what ``--dry-run`` prints, it needs neither the system that is rendered for
# nor its client libraries, and submitting does what the text says.
#
# A launcher only has to get one command started, once on each machine or once for each rank, in an
# environment that says which machine or rank it is. That command is :mod:`paceline.launch.node` or
# :mod:`paceline.launch.rank`; what happens on a machine from there on is the same under all launchers.


FileSharing = Literal["shared", "image", "uploaded"]
"""What a job's machines see of this one's files: all, only what an image has, or a copy of a directory."""

State = Literal["pending", "running", "succeeded", "failed", "cancelled", "unknown"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class RenderedJob:
    """The files and commands of a job that :meth:`Launcher.submit` writes and runs.

    Attributes:
        options: the launcher's own.
        files: texts by name, to be written into the job's directory.
        commands: to run here, one after another or all at once, as the launcher does.
    """

    spec: LaunchSpec
    options: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()

    @property
    def text(self) -> str:
        """All of it, as ``--dry-run`` prints it."""
        parts = [f"# {self.spec.directory / name}\n{text}" for name, text in self.files.items()]
        return "\n".join([*parts, *(command.text for command in self.commands)])


class RenderedOnlyError(ConfigError):
    """This launcher writes a job's files, and they stay; the message says what submits them."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        state: in one word, the same for all launchers.
        detail: in the system's own words: "PENDING (Resources)".
        exit_code: once it has ended, where the system tells.
        restarts: how often the system started it again.
    """

    state: State
    detail: str = ""
    exit_code: int | None = None
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ENDED


class JobHandle(ABC):
    """A job that was submitted, by this process or an earlier one."""

    @property
    @abstractmethod
    def reference(self) -> dict[str, Any]:
        """What :meth:`Launcher.reopen` needs to find the job again, as JSON."""

    @abstractmethod
    def status(self) -> JobStatus:
        """Ask the system where the job stands."""

    @abstractmethod
    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the output of its processes, line by line without line ends; with ``follow`` until the job ends."""

    @abstractmethod
    def cancel(self) -> None:
        """End the job and all its processes, unless it has ended already.

        A task gets time to save; if no system limits that time, a second call ends it.
        """

    @abstractmethod
    def wait(self) -> int:
        """Return the exit code once the job has ended: 0 only if it succeeded."""

    def scale(self, nodes: int) -> None:
        """Change the job's number of nodes through the system; the present ones stay.

        Raises:
            ConfigError: the system cannot do it, or the job cannot have that many.
            LaunchError: the system rejected it.
        """
        raise ConfigError("this job's system cannot change its machines. Paceline's agents can: paceline scale RUN.")


class Launcher(ABC):
    """Starts a job's command on its nodes.

    Attributes:
        name: its name for ``--on``.
        rank_launchers: the programs that may start the ranks, the default for scripts first; "agent" is for tasks.
        env_styles: the sets of rank variables for its processes, the default first.
        attached: a job ends with the command that started it, as under ``mpirun``; the others are
            submitted to a system that keeps them.
        files: whether its nodes share this one's files. If not, a run's directory is a path there, and the rendered
            files stay here, with the job's record.
        default_run: a task's run directory there, if the system has a place for it.
        preallocated: the nodes are the user's own, so no system allocates GPUs or CPUs.
        extra: the extra of Paceline that submitting needs, such as "ray".
        options_type: of a plug-in, a frozen dataclass of :func:`option` with the launcher's own options; the
            registry has those of ours.
    """

    name: ClassVar[str]
    rank_launchers: ClassVar[tuple[RankLauncher, ...]]
    env_styles: ClassVar[tuple[EnvStyle, ...]] = ("torch", "tensorflow", "none")
    attached: bool = False
    files: ClassVar[FileSharing] = "shared"
    default_run: ClassVar[str | None] = None
    preallocated: ClassVar[bool] = False
    extra: ClassVar[str | None] = None
    options_type: ClassVar[type | None] = None

    @abstractmethod
    def render(self, spec: LaunchSpec, options: Any = None) -> RenderedJob:
        """Say what would run; starts, writes and contacts nothing.

        Args:
            options: the launcher's own, or None where there are none or all are left out.

        Raises:
            ConfigError: this launcher cannot run the job; the message says which option is in the way.
        """

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: Any
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Return the numbers of nodes, and of processes on each, also from the launcher's own options.

        Raises:
            ConfigError: they say something else than ``--nodes`` and ``--nproc``.
        """
        return nodes, nproc

    def remote_path(self, path: str, options: Any) -> str:
        """Return the path of a script, a program or a task's file on the nodes, from the job's working directory.

        Args:
            path: as the user gives it: from this directory, or from the one that the machines get a copy of.
            options: the launcher's own.

        Raises:
            ConfigError: there is no such file, or the machines do not get it.
        """
        if self.files == "shared" and not Path(path).is_file():
            raise ConfigError(f"there is no file {path} in {Path.cwd()}.")
        return path

    @abstractmethod
    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Start it.

        Raises:
            LaunchError: the system is not installed, not reachable, or refused the job; nothing is left.
        """

    @abstractmethod
    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find a job again by its handle's ``reference``."""


def get_launcher(name: str) -> Launcher:
    """Return the launcher of that name; imports its module, but not the system's own library.

    Raises:
        ConfigError: there is none, and the message lists those there are; or it is a plug-in that cannot be used.
    """
    return load_launcher(name)()


def job_name(text: str) -> str:
    """``text`` as every system takes it for a name: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "job"


# --- Options that a launcher could only ignore: rejected, with an alternative ---


def refuse_what_is_for_clusters(spec: LaunchSpec, name: str) -> None:
    """Reject requests for resources that no system allocates.

    Raises:
        ConfigError: the spec requests GPUs or CPUs.
    """
    for option_name in ("gpus_per_node", "cpus_per_task"):
        if getattr(spec, option_name) is not None:
            raise ConfigError(
                f"{flag(option_name)} asks a cluster, but --on {name} starts processes on machines that you "
                "have. Leave it out."
            )


def refuse_gpu_type(spec: LaunchSpec, name: str) -> None:
    """Reject a type of GPUs that the system has no such word for.

    Raises:
        ConfigError: the spec names one.
    """
    if spec.gpu_type is not None and name != "slurm":
        raise ConfigError(
            f"--gpus-per-node {spec.gpu_type}:{spec.gpus_per_node}: only --on slurm takes a type of GPUs. Give "
            f"--gpus-per-node {spec.gpus_per_node}, and name the type in the way of --on {name}."
        )


def refuse_torchrun_options(spec: LaunchSpec) -> None:
    """Reject options that torchrun does not have or Paceline sets, and all where another program starts the ranks.

    Raises:
        ConfigError: the spec has one.
    """
    for text in spec.torchrun:
        name = text.removeprefix("--").partition("=")[0].replace("_", "-")
        if spec.rank_launcher != "torchrun":
            raise ConfigError(
                f"--torchrun {text}: the ranks are started by {spec.rank_launcher}. Use --rank-launcher torchrun, here "
                "--on torchrun, or leave it out."
            )
        if name in TORCHRUN_EQUALS:
            raise ConfigError(f"--torchrun {text} is not allowed. Use {TORCHRUN_EQUALS[name]}.")
        if name not in TORCHRUN_OTHERS:
            raise ConfigError(f"--torchrun {text}: torchrun has {', '.join(TORCHRUN_OTHERS)}.")


def refuse_walltime(spec: LaunchSpec, name: str) -> None:
    """Reject a time limit that no process would enforce; a task enforces its own.

    Raises:
        ConfigError: a script has one.
    """
    if spec.walltime_s is not None and not spec.is_task:
        raise ConfigError(
            f"--walltime does not work with --on {name}, which ends no job by itself. Leave it out; "
            f"to end it, begin with: timeout {spec.walltime_s:g} paceline"
        )


def refuse_restarts(spec: LaunchSpec, name: str) -> None:
    """Refuse restarts where nothing starts a script's ranks again.

    Raises:
        ConfigError: they are asked for.
    """
    if spec.recovery.max_restarts and spec.rank_launcher != "torchrun" and not spec.is_task:
        by = f"--on {name}" if name == spec.rank_launcher else f"--on {name} --rank-launcher {spec.rank_launcher}"
        raise ConfigError(
            f"--max-restarts does not work with {by}, which ends the job when a rank dies. Leave it out, and "
            "give the command again; or let torchrun start the ranks (--rank-launcher torchrun, here --on torchrun)."
        )
