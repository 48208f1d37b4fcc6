"""Clouds whose machines share no directory, or one that is a bucket: no locks, no links, and late."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TF_CONFIG",
)
"""What a cloud tells the one process that it starts on each machine, as if it were a rank."""


def fixed_machines(spec: JobSpec, where: str) -> None:
    """Refuse machines that come and go.

    Raises:
        ConfigError: they were asked for.
    """
    if spec.nodes[0] != spec.nodes[1]:
        raise ConfigError(f"--nodes MIN:MAX does not work with --on {where}: a job keeps its machines.")


def without_shared_directory(spec: JobSpec, where: str) -> JobSpec:
    """A task's job on several machines, which cannot survive the loss of one: it is resumed.

    Raises:
        ConfigError: another recovery was asked for.
    """
    if not spec.is_task or spec.nodes[0] == 1:
        return spec
    if "--recover" not in spec.command:
        return replace(spec, command=(*spec.command, "--recover", "none"))
    asked = spec.command[spec.command.index("--recover") + 1]
    if asked != "none":
        raise ConfigError(
            f"--recover {asked} on several machines needs a directory that they share, with locks and links; "
            f"--on {where} has none. Leave it out: a run that was stopped goes on from its checkpoints."
        )
    return spec
