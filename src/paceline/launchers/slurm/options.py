"""What ``--on slurm`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.launchers.names import option


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What sbatch is asked for, besides machines, processes, GPUs, CPUs and time."""

    partition: str | None = option("The partition, or several with commas.")
    account: str | None = option("Whom the job is charged to.")
    qos: str | None = option("The quality of service.")
    constraint: str | None = option("Features that the nodes must have, such as a100.")
    exclude: str | None = option("Nodes that must not be used, such as gpu[03-04].")
    exclusive: bool = option("Share the nodes with no other job, and have all of their CPUs.", False)
    mem: str | None = option("Memory of each node, such as 64G.")
    comment: str | None = option("A comment, which some sites want.")
    output: str | None = option(
        "The log, with sbatch's %j, %x, %A, %a and so on. Default: slurm-%j.log in the job's directory."
    )
    error: str | None = option("Another log for stderr.")
    module: tuple[str, ...] = option("An environment module to load; may be repeated.", ())
    conda: str | None = option("A conda environment to activate; its python is used.")
    venv: str | None = option("A virtual environment to activate; its python is used.")
    setup: tuple[str, ...] = option("A line of shell to run on the first node before; may be repeated.", ())
    signal_before: str | None = option(
        "How long before the time limit processes get SIGUSR1, such as 5min. Default: for tasks, a tenth of "
        "the walltime, at most 2min."
    )
    requeue: bool = option(
        "Back into the queue when preempted, out of time (exit code 75) or a node is lost. Default: for "
        "tasks.",
        False,
    )
    no_requeue: bool = option("Never back into the queue.", False)
    array: str | None = option(
        "Run the job for each of 0-9 or 1,3,7%2; {array_index} is replaced in the command and in --run."
    )
    slurm: tuple[str, ...] = option(
        "Any other directive of sbatch as KEY=VALUE, or KEY; may be repeated.", ()
    )

    def __post_init__(self) -> None:
        if self.requeue and self.no_requeue:
            raise ConfigError("--requeue and --no-requeue contradict each other. Give one of them.")
        if self.conda is not None and self.venv is not None:
            raise ConfigError("--conda and --venv: only one environment can be active. Give one of them.")
