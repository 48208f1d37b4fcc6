"""Launchers: a launcher renders a job, submits it, and returns a handle to it. Their interface, names and options."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

from paceline.core.built_in import BUILT_IN, LAUNCHER_OPTIONS, PARTS
from paceline.core.errors import ConfigError
from paceline.core.job import Command as Command
from paceline.core.job import LaunchSpec as LaunchSpec
from paceline.core.option_groups import EnvStyle as EnvStyle
from paceline.core.option_groups import RankLauncher as RankLauncher
from paceline.core.options import flag, parse_gpus
from paceline.core.plugins import has_part, import_object, load
from paceline.launch.rank_variables import find_framework

if TYPE_CHECKING:
    from paceline.core.job import WorkerConfig

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
        files: texts by name, to be written into the job's directory.
        commands: to run here, one after another or all at once, as the launcher does.
        request: what else the launcher itself needs to submit the job, in its own form.
    """

    spec: LaunchSpec
    options: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()
    request: Any = None

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


class RecordedJob(JobHandle):
    """A job that is known by the reference that was recorded of it."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)

    @property
    def reference(self) -> dict[str, Any]:
        return self._reference


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
            table has those of ours.
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

    @abstractmethod
    def start_task(
        self, worker_config: WorkerConfig, options: JobOptions, own: Mapping[str, Any], *, dry_run: bool, json: bool
    ) -> int:
        """Train a task here, or submit its training as a job; return the exit code of the command.

        Args:
            own: the launcher's own options that the user gave, by name.
            json: print the result of a training here, or the record of a job, as JSON.

        Raises:
            UserError: an option, the task or the run directory cannot work.
            LaunchError: it could not be started.
        """


# --- Launchers by name ---


LAUNCHER_NAMES = tuple(BUILT_IN["paceline.launchers"])
"""What ``--on`` calls each launcher of ours."""

LOCAL_LAUNCHERS = ("inprocess", "spawn", "torchrun")
"""Launchers that start processes on this machine and do not start any on other machines."""


def get_launcher(name: str) -> Launcher:
    """Return the launcher of that name, ours or a plug-in's; imports its module, but not the system's own library.

    Raises:
        ConfigError: there is none, and the message lists those there are; or it is a plug-in that cannot be used.
    """
    return load_launcher(name)()


def load_launcher(name: str) -> type[Launcher]:
    """Import the class of a launcher, ours or a plug-in's.

    Raises:
        ConfigError: there is none of this name, or it is a plug-in that cannot be used; the message says why.
    """

    def is_launcher(found: object) -> bool:
        return (
            isinstance(found, type)
            and issubclass(found, Launcher)
            and getattr(found, "name", None) == name
            and (found.options_type is None or _are_options(found.options_type))
        )

    requirement = (
        f"a subclass of paceline.launch.launcher.Launcher whose `name` is {name!r}, and whose `options_type`, if any, "
        "is a dataclass of paceline.launch.launcher.option()"
    )
    launcher: type[Launcher] = load("paceline.launchers", name, requirement, is_launcher)
    return launcher


def _are_options(found: object) -> bool:
    return dataclasses.is_dataclass(found) and all("help" in field.metadata for field in dataclasses.fields(found))


def option(help: str, default: Any = None) -> Any:
    """Make a field of a launcher's options; its type may be str, int, float, bool or tuple[str, ...]."""
    return field(default=default, metadata={"help": help})


# --- Options that a launcher could only ignore ---


def refuse_unsupported(spec: LaunchSpec, name: str, *, resources: bool = False, walltime: bool = False) -> None:
    """Reject restarts that nothing would make, and other requests that a launcher could only ignore.

    Args:
        resources: no system allocates the requested GPUs or CPUs.
        walltime: no process would enforce a script's time limit; a task enforces its own.
    """
    for option_name in ("gpus_per_node", "cpus_per_task") if resources else ():
        if getattr(spec, option_name) is not None:
            raise ConfigError(
                f"{flag(option_name)} asks a cluster, but --on {name} starts processes on machines that you "
                "have. Leave it out."
            )
    if walltime and spec.walltime_s is not None and not spec.is_task:
        raise ConfigError(
            f"--walltime does not work with --on {name}, which ends no job by itself. Leave it out; "
            f"to end it, begin with: timeout {spec.walltime_s:g} paceline"
        )
    if spec.recovery.max_restarts and spec.rank_launcher != "torchrun" and not spec.is_task:
        by = f"--on {name}" if name == spec.rank_launcher else f"--on {name} --rank-launcher {spec.rank_launcher}"
        raise ConfigError(
            f"--max-restarts does not work with {by}, which ends the job when a rank dies. Leave it out, and "
            "give the command again; or let torchrun start the ranks (--rank-launcher torchrun, here --on torchrun)."
        )


def fixed_nodes(spec: LaunchSpec, by: str, advice: str = "Give one.") -> int:
    """Return the number of nodes of a job; reject a variable one."""
    least, most = spec.nodes
    if least != most:
        raise ConfigError(f"--nodes {least}:{most}: {by} needs one number. {advice}")
    return least


# --- ``--preflight``: a plug-in checks a job's nodes before the job starts ---


class Preflight(Protocol):
    """A module of a plug-in."""

    def prepare(
        self,
        spec: LaunchSpec,
        own: Any = None,
        *,
        is_local: bool,
        run: Path | None,
        task: str,
        keep: int,
        timeout_s: float,
        agents: bool = False,
    ) -> tuple[LaunchSpec | None, LaunchSpec]:
        """Return the ranks to run on this node before the job, if any, and the job, which else checks its own nodes.

        Args:
            is_local: the launcher starts processes of this node alone.
            run: a directory that all nodes must share; None: there is none.
            task: what all nodes must be able to import; "" for nothing.
            keep: the number of checkpoints that must have space.
            timeout_s: how long the nodes wait for each other.
            agents: Paceline's agents start the ranks.

        Raises:
            ConfigError: the launcher starts each rank itself, or the place of one of several nodes is not given.
        """

    def run_before(self, spec: LaunchSpec) -> tuple[int, str | None]:
        """Check this node before a job; return the exit code, not 0 if the job must not start, and its interface.

        Args:
            spec: the ranks of :meth:`prepare`, or those of a job's preflight on this node.

        Raises:
            LaunchError: the ranks could not be started.
        """


def find_preflight() -> Preflight:
    """Return the plug-in's module."""
    return cast("Preflight", import_module(PARTS["--preflight"]))


# --- Options of a job on any launcher ---


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job on any launcher."""

    name: str | None = option("The job's name. Default: the script's or run's.")
    gpus_per_node: int | str | None = option(
        "GPUs to request on each node: 2; on Slurm also of a type, such as a100:2 or 1g.5gb:2."
    )
    cpus_per_task: int | None = option("CPUs to request for each process.")
    env: tuple[str, ...] = option("K=V, for every process; may be repeated.", ())
    rank_launcher: RankLauncher | None = option(
        "What starts the ranks. Default: agent for tasks, torchrun for scripts."
    )
    env_style: EnvStyle | None = option(
        "Environment variables that give a process its rank. Default: those of --rank-launcher."
    )
    roles: str | None = option("With --env-style tensorflow: such as chief=1,worker=2,ps=1,evaluator=1.")
    master_port: int | None = option("Port on which rank 0 listens.")
    torchrun: tuple[str, ...] = option(
        "KEY=VALUE or KEY for torchrun where it starts the ranks: tee=3; may be repeated.", ()
    )
    preflight: bool = option("Run paceline doctor's checks first; start nothing if one fails.", False)
    wait: bool = option("Wait for a submitted job: show its output and exit with its code.", False)
    detach: bool = option("Keep the job running after this command ends.", False)

    def spec_fields(self, world_size: int | None) -> dict[str, Any]:
        """Return the explicit options as fields of :class:`~paceline.launch.launcher.LaunchSpec`."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("name", "gpus_per_node", "cpus_per_task", "rank_launcher", "env_style", "master_port")
            if getattr(self, name) is not None
        }
        if self.gpus_per_node is not None:
            fields["gpu_type"], fields["gpus_per_node"] = parse_gpus(self.gpus_per_node)
        if self.env:
            fields["env"] = parse_env(self.env)
        if self.torchrun:
            fields["torchrun"] = self.torchrun
        if self.roles is not None and world_size is not None and (framework := find_framework("tensorflow")):
            fields["roles"] = framework.parse_roles(self.roles, world_size)
        return fields


def parse_env(words: tuple[str, ...]) -> dict[str, str]:
    """Parse variables K=V; a lone K takes this process's value."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and name.isascii()) or (not equals and name not in os.environ):
            raise ConfigError(f"--env must be NAME=VALUE, or the NAME of a variable that is set, but is {word!r}.")
        variables[name] = value if equals else os.environ[name]
    return variables


# --- The options that a launcher has of its own: which there are, and of which types ---


def options_type(name: str) -> type | None:
    """Return the class of a launcher's own options, a frozen dataclass made of :func:`option`; None if it has none.

    Raises:
        ConfigError: it is neither one of our launchers nor a plug-in, or the plug-in cannot be used.
    """
    if name in LAUNCHER_OPTIONS:
        options: type = import_object(LAUNCHER_OPTIONS[name])
        return options
    return None if name in LAUNCHER_NAMES else load_launcher(name).options_type


def make_options(launcher: Launcher, given: Mapping[str, Any]) -> Any:
    """Build the launcher's options from the given ones."""
    known = option_names(launcher.name)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{flag(name)} is not supported by --on {launcher.name}. {owners_of(flag(name))}"
                f"--on {launcher.name} takes: {own_flags(launcher.name)}."
            )
    options = options_type(launcher.name)
    return options(**given) if options is not None else None


def installed_launchers() -> list[str]:
    """Return the names of our launchers, without those whose plug-in is not installed."""
    launchers = BUILT_IN["paceline.launchers"]
    return [name for name, reference in launchers.items() if has_part(reference)]


def owners_of(text: str) -> str:
    """Return a sentence that names the launchers with a flag, with a space after it; empty if none has it."""
    owners = [name for name in installed_launchers() if text in map(flag, option_names(name))]
    return f"{text} is an option of --on {' and '.join(owners)}. " if owners else ""


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of a launcher's own options."""
    options = options_type(name)
    return tuple(f.name for f in dataclasses.fields(options)) if options else ()


def own_flags(name: str) -> str:
    """Return the flags of a launcher's own options, joined with commas."""
    return ", ".join(map(flag, option_names(name))) or "no options of its own"


def option_types(options_type: type) -> dict[str, Any]:
    """Return the type of each option, without None."""
    plain = {}
    for name, hint in typing.get_type_hints(options_type).items():
        choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        plain[name] = functools.reduce(operator.or_, (choice for choice in choices if choice is not type(None)))
    return plain


# --- ``--on spawn`` and ``--on torchrun`` ---


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """The rendezvous of several nodes, on each of which the same command is run."""

    node_rank: int | None = option("This node's number, 0 to nodes - 1.")
    rdzv_endpoint: str | None = option("HOST:PORT of node 0, for the rendezvous of several nodes.")
    rdzv_id: str = option("A name that all nodes of one job share.", "paceline")


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(RendezvousOptions):
    """Further options of torchrun."""

    rdzv_backend: str = option("Rendezvous of the agents on several nodes: c10d, or static with fixed ranks.", "c10d")


TORCHRUN_EQUALS = {
    "nproc-per-node": "--nproc",
    "nnodes": "--nodes",
    "master-addr": "--rdzv-endpoint HOST:PORT",
    "master-port": "--rdzv-endpoint HOST:PORT, or on one node --master-port",
    "standalone": "no option: on one node each job has a rendezvous of its own",
    "use-env": "no option: LOCAL_RANK is always set",
    "no-python": "no option: the command may be any program",
    "module": "-m MODULE after --",
    "signals-to-handle": "no option: the agent handles all that ask a job to stop",
    **{name: f"--{name}" for name in ("node-rank", "rdzv-endpoint", "rdzv-id", "rdzv-backend", "max-restarts")},
}
"""torchrun's options that have an equal, and what to give instead."""


TORCHRUN_OTHERS = (
    *("tee", "redirects", "log-dir", "role", "rdzv-conf", "local-ranks-filter", "monitor-interval", "start-method"),
    *("event-log-handler", "logs-specs", "local-addr", "numa-binding", "shutdown-timeout", "virtual-local-rank"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters"),
)
"""torchrun's options that ``--torchrun`` passes on."""


def torchrun_equal(text: str) -> str | None:
    """Return a sentence on an option of torchrun's, such as ``--nproc_per_node``; None for any other."""
    text = text.partition("=")[0]
    name = text.lstrip("-").replace("_", "-")
    if name in TORCHRUN_OTHERS:
        return f"{text} is torchrun's. Give it as --torchrun {name}=VALUE."
    equal = TORCHRUN_EQUALS.get(name)
    return None if equal is None or text == equal else f"{text} is torchrun's. Use {equal}."


# --- ``--on slurm`` ---


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of sbatch, in addition to nodes, processes, GPUs, CPUs and time."""

    partition: str | None = option("Partition, or several, comma-separated.")
    account: str | None = option("Account to charge.")
    qos: str | None = option("Quality of service.")
    constraint: str | None = option("Required features of the nodes, such as a100.")
    exclude: str | None = option("Nodes to exclude, such as gpu[03-04].")
    exclusive: bool = option("Use the nodes exclusively, with all their CPUs.", False)
    mem: str | None = option("Memory of each node, such as 64G.")
    comment: str | None = option("A comment, which some sites require.")
    output: str | None = option(
        "Log file, with sbatch's %j, %x, %A, %a and so on. Default: slurm-%j.log in the job's directory."
    )
    error: str | None = option("Separate log file of stderr.")
    module: tuple[str, ...] = option("Environment module to load; may be repeated.", ())
    conda: str | None = option("Conda environment to activate; its python is used.")
    venv: str | None = option("Virtual environment to activate; its python is used.")
    container: str | None = option(
        "Image in which each node's processes run, docker://NAME:TAG or a file; by pyxis, or else by apptainer."
    )
    container_mount: tuple[str, ...] = option(
        "PATH or SOURCE:TARGET that the container sees, besides the working and the run's directory; may be repeated.",
        (),
    )
    setup: tuple[str, ...] = option(
        "Shell line to run on node 0 after --module, --conda and --venv, or before if it is module purge or use; "
        "may be repeated.",
        (),
    )
    signal_before: str | None = option(
        "Send SIGUSR1 this long before the time limit. Default: for tasks, a tenth of the walltime, at most 2min."
    )
    requeue: bool = option(
        "Requeue after preemption, a timeout (exit code 75) or a lost node. Default: for tasks.",
        False,
    )
    no_requeue: bool = option("Never requeue.", False)
    array: str | None = option(
        "Run the job for each of 0-9 or 1,3,7%2; {array_index} is replaced in the command and in --run-dir."
    )
    slurm: tuple[str, ...] = option("KEY=VALUE or KEY for sbatch; may be repeated.", ())

    def __post_init__(self) -> None:
        if self.requeue and self.no_requeue:
            raise ConfigError("--requeue and --no-requeue contradict each other. Give one of them.")
        if self.conda is not None and self.venv is not None:
            raise ConfigError("--conda and --venv: only one environment can be active. Give one of them.")
        if self.container is not None and (self.conda is not None or self.venv is not None):
            raise ConfigError("--container has a python of its own. Leave out --conda and --venv.")
        if self.container is None and self.container_mount:
            raise ConfigError("--container-mount needs --container IMAGE.")
