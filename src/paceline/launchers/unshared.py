"""Clouds whose machines share no directory, or one that is a bucket: no locks, no links, and late."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

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


def copied_path(path: str, source: Path, called: str) -> str:
    """Where the machines find a file, relative to a directory that each of them is given a copy of.

    Args:
        path: of the file, from there; or an absolute one.
        source: the directory.
        called: what messages call it.

    Returns:
        The path; an absolute one as it is where it is a program that only the machines' image may have.

    Raises:
        ConfigError: the directory has no such file.
    """
    source = source.resolve()
    given = Path(os.path.normpath(source / Path(path).expanduser()))
    for file in (given, given.resolve()):
        if file.is_relative_to(source) and file.is_file():
            return file.relative_to(source).as_posix()
    if Path(path).is_absolute() and not path.endswith(".py"):
        return path
    here = Path(path).resolve()
    meant = here.is_file() and here.is_relative_to(source)
    advice = f"From there it is {here.relative_to(source)}." if meant else "Put it there."
    raise ConfigError(
        f"there is no file {path} in {called}, and the machines get a copy of that alone. {advice}"
    )


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
