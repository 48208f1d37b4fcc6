"""Options of a job for ``paceline launch`` and ``paceline train --on CLUSTER``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import explicit_options, group
from paceline.core.errors import ConfigError
from paceline.core.options import flag, parse_gpus
from paceline.launch.registry import LAUNCHER_NAMES, EnvStyle, RankLauncher

LOCAL_LAUNCHERS = ("inprocess", "spawn", "torchrun")
"""Launchers that start processes on this machine and do not start any on other machines."""


def _flag(help: str) -> Parameter:
    return Parameter(help=help, group=group("Job"), show_default=False, negative="")


@dataclass(kw_only=True, repr=False, eq=False)
class JobOptions:
    """Options of a job on any launcher."""

    name: Annotated[str | None, _flag("The job's name. Default: the script's or run's.")] = None
    gpus_per_node: Annotated[
        int | str | None, _flag("GPUs to request on each node: 2; on Slurm also of a type, such as a100:2 or 1g.5gb:2.")
    ] = None
    cpus_per_task: Annotated[int | None, _flag("CPUs to request for each process.")] = None
    env: Annotated[tuple[str, ...], _flag("K=V, for every process; may be repeated.")] = ()
    rank_launcher: Annotated[
        RankLauncher | None, _flag("What starts the ranks. Default: agent for tasks, torchrun for scripts.")
    ] = None
    env_style: Annotated[
        EnvStyle | None, _flag("Environment variables that give a process its rank. Default: those of --rank-launcher.")
    ] = None
    roles: Annotated[str | None, _flag("With --env-style tensorflow: such as chief=1,worker=2,ps=1,evaluator=1.")] = (
        None
    )
    master_port: Annotated[int | None, _flag("Port on which rank 0 listens.")] = None
    torchrun: Annotated[
        tuple[str, ...], _flag("KEY=VALUE or KEY for torchrun where it starts the ranks: tee=3; may be repeated.")
    ] = ()
    preflight: Annotated[bool, _flag("Run paceline doctor's checks first; start nothing if one fails.")] = False
    wait: Annotated[bool, _flag("Wait for a submitted job: show its output and exit with its code.")] = False
    detach: Annotated[bool, _flag("Keep the job running after this command ends.")] = False

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
        if self.roles is not None and world_size is not None:
            from paceline.launch.rank import find_framework

            if (framework := find_framework("tensorflow")) is not None:
                fields["roles"] = framework.parse_roles(self.roles, world_size)
        return fields


def refuse_job_options(on: str, job_options: JobOptions | None, own: Mapping[str, Any]) -> None:
    """Refuse all cluster options of a task that runs on this machine.

    Raises:
        ConfigError: always; the message names the explicit options.
    """
    words = [flag(name) for name in (*explicit_options(job_options), *own)]
    raise ConfigError(
        f"{', '.join(words)}: only for jobs on a cluster, but --on is {on}. Choose a cluster: --on "
        f"{', '.join(name for name in LAUNCHER_NAMES if name not in LOCAL_LAUNCHERS)}."
    )


def parse_env(words: tuple[str, ...]) -> dict[str, str]:
    """Parse variables K=V; a lone K takes this process's value.

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
