"""The variables that tell a process its place in a job, as each framework reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.launch.registry import EnvStyle

TENSORFLOW_ROLES = ("chief", "worker", "ps", "evaluator")


def env_style_variables(
    env_style: EnvStyle,
    place: Environment,
    *,
    hosts: Sequence[str] = (),
    counts: Sequence[int] = (),
    roles: Sequence[str] = (),
) -> dict[str, str]:
    """The variables of one process.

    Args:
        env_style: which framework reads them.
        place: who the process is; ``master_addr`` and ``master_port`` are set.
        hosts: all machines, in the order of their ranks; default: the master alone.
        counts: processes of each machine; default: as many everywhere.
        roles: of all ranks, for tensorflow; default: workers.

    Raises:
        ConfigError: the roles do not fit the ranks, or only the env style's own launcher can keep it.
    """
    if env_style == "none":
        return {}
    if env_style == "torch":
        return {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(place.node_rank),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "MASTER_ADDR": str(place.master_addr),
            "MASTER_PORT": str(place.master_port),
        }
    if env_style == "tensorflow":
        return {"TF_CONFIG": _tf_config(place, hosts, counts, roles)}
    raise ConfigError(
        f"--env-style {env_style} is kept by {'mpirun' if env_style == 'mpi' else 'horovodrun'} alone. "
        f"Use --rank-launcher {env_style}, or --on {env_style}."
    )


def _tf_config(place: Environment, hosts: Sequence[str], counts: Sequence[int], roles: Sequence[str]) -> str:
    """``{"cluster": {role: [host:port, ...]}, "task": {"type": role, "index": i}}``.

    Every process listens on a port of its own: the master's, plus its number on its machine. An evaluator is
    no member of the cluster, as TensorFlow wants it.
    """
    if place.master_addr is None or place.master_port is None:
        raise ConfigError("--env-style tensorflow needs the address of the first machine.")
    machines = list(hosts) or [place.master_addr]
    each = list(counts) or [place.local_world_size] * place.nodes
    if len(machines) != len(each):
        raise ConfigError(
            f"--env-style tensorflow needs the addresses of all {len(each)} machines, but only "
            f"{len(machines)} is known: {', '.join(machines)}."
        )
    addresses = [
        f"{machine}:{place.master_port + local}"
        for machine, count in zip(machines, each, strict=True)
        for local in range(count)
    ]
    kinds = list(roles) or ["worker"] * place.world_size
    if len(kinds) != place.world_size:
        raise ConfigError(f"--roles names {len(kinds)} processes, but there are {place.world_size}.")
    cluster: dict[str, list[str]] = {}
    for kind, address in zip(kinds, addresses, strict=True):
        if kind != "evaluator":
            cluster.setdefault(kind, []).append(address)
    role = kinds[place.rank]
    task = {"type": role, "index": kinds[: place.rank].count(role)}
    return json.dumps({"cluster": cluster, "task": task})


def parse_roles(text: str, world_size: int) -> tuple[str, ...]:
    """What each rank is, of ``chief=1,worker=2,ps=1``: in that order.

    Raises:
        ConfigError: a role is unknown, or their numbers do not add up.
    """
    roles: list[str] = []
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in TENSORFLOW_ROLES or not (number or "1").isdigit():
            raise ConfigError(
                f"--roles must be such as chief=1,worker=2,ps=1 with the roles "
                f"{', '.join(TENSORFLOW_ROLES)}, but is {text!r}."
            )
        roles += [name] * int(number or 1)
    if len(roles) != world_size:
        raise ConfigError(f"--roles {text} names {len(roles)} processes, but {world_size} are started.")
    if Counter(roles)["chief"] > 1:
        raise ConfigError("--roles: there can be only one chief.")
    return tuple(roles)


_PLACEHOLDERS = ("{master_addr}", "{master_port}", "{node_rank}", "{nnodes}")


def has_placeholders(command: Sequence[str]) -> bool:
    """Whether :func:`expand_placeholders` would change the command."""
    return any(placeholder in word for word in command for placeholder in _PLACEHOLDERS)


def expand_placeholders(
    command: Sequence[str], *, master_addr: str, master_port: int, node_rank: int, nodes: int
) -> tuple[str, ...]:
    """The command with ``{master_addr}``, ``{master_port}``, ``{node_rank}`` and ``{nnodes}`` replaced.

    Other braces stay as they are, so that JSON can be an argument.
    """
    values = (master_addr, str(master_port), str(node_rank), str(nodes))
    expanded = []
    for word in command:
        for placeholder, value in zip(_PLACEHOLDERS, values, strict=True):
            word = word.replace(placeholder, value)
        expanded.append(word)
    return tuple(expanded)
