"""The options of a job on any launcher, and those that each launcher has of its own."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.built_in import BUILT_IN, LAUNCHER_OPTIONS
from paceline.core.errors import ConfigError
from paceline.core.option_groups import EnvStyle, RankLauncher
from paceline.core.options import flag, parse_gpus
from paceline.core.plugins import has_part, import_object
from paceline.launch.launcher import LAUNCHER_NAMES, Launcher, load_launcher, option
from paceline.launch.rank_variables import find_framework

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
