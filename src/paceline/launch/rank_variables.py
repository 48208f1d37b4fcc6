"""The variables and arguments that tell a process its place in a job, as each framework reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from paceline.core.built_in import FRAMEWORKS
from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.core.option_groups import EnvStyle

if TYPE_CHECKING:
    from paceline.launch.launcher import RenderedJob
    from paceline.launch.supervisor import SupervisedJob


class Framework(Protocol):
    """The module of a plug-in for a framework with rank variables of its own."""

    def variables(
        self, environment: Environment, hosts: Sequence[str], counts: Sequence[int], roles: Sequence[str]
    ) -> dict[str, str]:
        """Return the variables of one process; see :func:`env_style_variables`."""

    def parse_roles(self, text: str, world_size: int) -> tuple[str, ...]:
        """Parse ``--roles`` into the role of each rank."""

    def serves(self, rank: int, roles: Sequence[str]) -> bool:
        """Return whether a rank only serves others, and never ends by itself."""

    def free_ports(self, count: int) -> int:
        """Return the first of the free ports that so many processes listen on."""

    def start(self, rendered: RenderedJob) -> SupervisedJob:
        """Start the processes."""


def find_framework(env_style: EnvStyle) -> Framework | None:
    """Return the framework whose variables those of the env style are; None if a plug-in has none."""
    module = FRAMEWORKS.get(env_style)
    return None if module is None else cast("Framework", import_module(module))


def env_style_variables(
    env_style: EnvStyle,
    environment: Environment,
    *,
    hosts: Sequence[str] = (),
    counts: Sequence[int] = (),
    roles: Sequence[str] = (),
) -> dict[str, str]:
    """Return the variables of one process.

    Args:
        environment: the ranks of the process, with ``master_addr`` and ``master_port``.
        hosts: all nodes, in the order of their ranks; default: the master alone.
        counts: processes of each node; default: as many everywhere.
        roles: of all ranks, for tensorflow; default: workers.
    """
    if env_style == "none":
        return {}
    if env_style == "torch":
        return {
            "RANK": str(environment.rank),
            "WORLD_SIZE": str(environment.world_size),
            "LOCAL_RANK": str(environment.local_rank),
            "LOCAL_WORLD_SIZE": str(environment.local_world_size),
            "GROUP_RANK": str(environment.node_rank),
            "GROUP_WORLD_SIZE": str(environment.nodes),
            "MASTER_ADDR": str(environment.master_addr),
            "MASTER_PORT": str(environment.master_port),
        }
    if (framework := find_framework(env_style)) is not None:
        return framework.variables(environment, hosts, counts, roles)
    raise ConfigError(
        f"--env-style {env_style} is kept by {env_style}run alone. "
        f"Use --rank-launcher {env_style}, or --on {env_style}."
    )


_NAMES = "master_addr|master_port|node_rank|nnodes|local_rank|rank|world_size"
# After a dollar sign it is a variable of the shell: sh -c 'rank=0; echo ${rank}'.
_PLACEHOLDER = re.compile(rf"\{{\{{(?P<literal>{_NAMES})\}}\}}|(?<!\$)\{{(?P<name>{_NAMES})\}}")


def has_placeholders(command: Sequence[str]) -> bool:
    """Return whether :func:`expand_placeholders` would change the command."""
    return any(_PLACEHOLDER.search(word) for word in command)


def names_port(command: Sequence[str]) -> bool:
    """Return whether the command gets the port of rank 0 as an argument."""
    return "master_port" in _named(command)


def names_rank(command: Sequence[str]) -> bool:
    """Return whether the command gets its rank among all, or their number, as an argument."""
    return not {"rank", "world_size"}.isdisjoint(_named(command))


def _named(command: Sequence[str]) -> set[str | None]:
    return {match["name"] for word in command for match in _PLACEHOLDER.finditer(word)}


def expand_placeholders(
    command: Sequence[str], *, keep_literals: bool = False, **values: int | str | None
) -> tuple[str, ...]:
    """Return the command with the placeholders replaced: ``{master_addr}``, ``{local_rank}`` and so on.

    Doubled braces, ``{{node_rank}}``, become single ones. Others stay as they are, so that JSON can be an argument, and
    so do variables of the shell, ``${rank}``.

    Args:
        keep_literals: leave doubled braces to a later call.
        values: by the names of the placeholders; those without a value stay.
    """

    def expanded(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0] if keep_literals else match[0][1:-1]
        value = values.get(match["name"])
        return match[0] if value is None else str(value)

    return tuple(_PLACEHOLDER.sub(expanded, word) for word in command)


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that select the network interface of gloo, NCCL and UCX."""
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "UCX_NET_DEVICES": interface}
