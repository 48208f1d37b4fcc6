"""What ``paceline launch`` and ``paceline train --on SYSTEM`` ask about a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import explicit_options, group
from paceline.core.errors import ConfigError
from paceline.core.options import flag
from paceline.launch.registry import LAUNCHER_NAMES, EnvStyle, RankLauncher

HERE = ("inprocess", "spawn", "torchrun")
"""Launchers that start processes on this machine, and know of other machines only what they are told."""


def _flag(help: str) -> Parameter:
    return Parameter(help=help, group=group("Job"), show_default=False, negative="")


@dataclass(kw_only=True, repr=False, eq=False)
class JobOptions:
    """Options of a job on any launcher."""

    name: Annotated[str | None, _flag("The job's name. Default: the script's or run's.")] = None
    gpus_per_node: Annotated[int | None, _flag("GPUs to request on each machine.")] = None
    cpus_per_task: Annotated[int | None, _flag("CPUs to request for each process.")] = None
    env: Annotated[tuple[str, ...], _flag("K=V, for every process; may be repeated.")] = ()
    rank_launcher: Annotated[
        RankLauncher | None, _flag("What starts the ranks. Default: agent for tasks, torchrun for scripts.")
    ] = None
    env_style: Annotated[
        EnvStyle | None, _flag("Which variables tell a process its rank. Default: those of --rank-launcher.")
    ] = None
    roles: Annotated[str | None, _flag("With --env-style tensorflow: such as chief=1,worker=2,ps=1,evaluator=1.")] = (
        None
    )
    master_port: Annotated[int | None, _flag("Port on which rank 0 listens.")] = None
    preflight: Annotated[bool, _flag("Run paceline doctor's checks first; start nothing if one fails.")] = False
    wait: Annotated[bool, _flag("Wait for a submitted job: show its output, and exit with its code.")] = False
    detach: Annotated[bool, _flag("Leave a job running that would otherwise end with this command.")] = False

    def spec_fields(self, world_size: int | None) -> dict[str, Any]:
        """Those that were given, as fields of :class:`~paceline.launch.launcher.LaunchSpec`."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("name", "gpus_per_node", "cpus_per_task", "rank_launcher", "env_style", "master_port")
            if getattr(self, name) is not None
        }
        if self.env:
            fields["env"] = parse_env(self.env)
        if self.roles is not None and world_size is not None:
            from paceline.launch.rank import parse_roles

            fields["roles"] = parse_roles(self.roles, world_size)
        return fields


def refuse_job_options(on: str, job_options: JobOptions | None, own: Mapping[str, Any]) -> None:
    """Refuse all of them: a task's processes here have nobody to ask.

    Raises:
        ConfigError: always; the message names those that were given.
    """
    words = [flag(name) for name in (*explicit_options(job_options), *own)]
    raise ConfigError(
        f"{', '.join(words)}: these are for jobs on a cluster, and --on is {on}. Say where: --on "
        f"{', '.join(name for name in LAUNCHER_NAMES if name not in HERE)}."
    )


def parse_env(words: tuple[str, ...]) -> dict[str, str]:
    """Variables of K=V; of a lone K, this process's own value.

    Raises:
        ConfigError: a word has another form.
    """
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and name.isascii()) or (not equals and name not in os.environ):
            raise ConfigError(f"--env must be NAME=VALUE, or the NAME of a variable that is set, but is {word!r}.")
        variables[name] = value if equals else os.environ[name]
    return variables
