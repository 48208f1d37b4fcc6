"""What a job asks of its cluster, in the names of submitit's ``AutoExecutor``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from paceline.errors import ConfigError
from paceline.launchers.names import option

Executor = Literal["slurm", "local"]

_DEFAULT_WALLTIME_S: dict[str, float] = {"slurm": 3600.0, "local": 30 * 86400.0}
"""submitit's own, 5 and 2 minutes, end most jobs too early."""

_SBATCH = ("partition", "account", "qos", "comment", "constraint", "exclude", "gres", "mem")


@dataclass(frozen=True, kw_only=True)
class SubmititOptions:
    """What only submitit and its Slurm are asked for."""

    executor: str = option("slurm, or local: processes of this machine.", "slurm")
    partition: str | None = option("Slurm's partition.")
    account: str | None = option("Slurm's account.")
    qos: str | None = option("Slurm's quality of service.")
    comment: str | None = option("A comment that Slurm keeps with the job.")
    constraint: str | None = option("Features that nodes must have.")
    exclude: str | None = option("Nodes to leave out.")
    gres: str | None = option("Generic resources of a node, such as gpu:4.")
    mem: str | None = option("Memory of a node, such as 64G.")
    setup: tuple[str, ...] = option(
        "A shell line to run before, such as 'module load cuda'; may be repeated.", ()
    )
    slurm: tuple[str, ...] = option("KEY=VALUE, any other option of sbatch; may be repeated.", ())
    max_requeues: int = option("How often a job may be started again after its time limit.", 100)

    def __post_init__(self) -> None:
        if self.executor not in get_args(Executor):
            raise ConfigError(f"--executor must be slurm or local, but is {self.executor!r}.")
        if self.max_requeues < 0:
            raise ConfigError(f"--max-requeues must be 0 or more, but is {self.max_requeues}.")
        for word in self.slurm:
            if not word.partition("=")[1]:
                raise ConfigError(f"--slurm must be KEY=VALUE, such as --slurm nice=100, but is {word!r}.")


def executor_arguments(options: SubmititOptions, python: str) -> dict[str, Any]:
    """Arguments of ``AutoExecutor``, beside the folder."""
    name = options.executor
    return {
        "cluster": name,
        f"{name}_max_num_timeout": options.max_requeues,
        f"{name}_python": python,
    }


def executor_parameters(
    options: SubmititOptions,
    *,
    name: str,
    nodes: int,
    tasks_per_node: int,
    cpus_per_task: int | None,
    gpus_per_node: int | None,
    walltime_s: float | None,
    signal_name: str,
) -> dict[str, Any]:
    """Arguments of ``AutoExecutor.update_parameters``.

    Args:
        options: the launcher's.
        name: the job's.
        nodes: machines.
        tasks_per_node: processes that submitit starts on each.
        cpus_per_task: of each of these.
        gpus_per_node: to ask for.
        walltime_s: how long the job may take.
        signal_name: what announces the end, such as "USR1".

    Raises:
        ConfigError: the local executor cannot do this.
    """
    limit_s = _DEFAULT_WALLTIME_S[options.executor] if walltime_s is None else walltime_s
    parameters: dict[str, Any] = {
        "name": name,
        "nodes": nodes,
        "tasks_per_node": tasks_per_node,
        "timeout_min": max(1, math.ceil(limit_s / 60)),
    }
    if gpus_per_node is not None:
        parameters["gpus_per_node"] = gpus_per_node
    if options.executor == "local":
        if nodes > 1:
            raise ConfigError(
                f"--executor local has one machine, but --nodes is {nodes}. Use --executor slurm."
            )
        given = [f.name for f in fields(options) if f.name in (*_SBATCH, "slurm", "setup")]
        for field in given:
            if getattr(options, field):
                raise ConfigError(f"--{field} is for Slurm, but --executor is local. Leave it out.")
        return parameters
    if cpus_per_task is not None:
        parameters["cpus_per_task"] = cpus_per_task
    others = dict(word.split("=", 1) for word in options.slurm)
    parameters |= {f"slurm_{key}": value for key in _SBATCH if (value := getattr(options, key)) is not None}
    if options.setup:
        parameters["slurm_setup"] = list(options.setup)
    parameters["slurm_additional_parameters"] = {"signal": f"{signal_name}@90", **_plain(others)}
    return parameters


def _plain(others: Mapping[str, str]) -> dict[str, str]:
    """Without the dashes that users may write before a name."""
    return {key.lstrip("-"): value for key, value in others.items()}
