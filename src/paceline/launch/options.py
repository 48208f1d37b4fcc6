"""Each launcher's own command-line options, in addition to those of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.launch.registry import option

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
