"""TensorFlow's processes on this node: they need consecutive ports, and the launcher must end those that only serve.

Under its parameter server strategy, workers and servers run ``server.join()``, which never returns: when the chief
ends, the launcher must end the others, on its own node and on all others.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.launcher import RenderedJob
from paceline.launch.supervisor import SupervisedJob

_FIRST_PORT, _LAST_PORT = 20000, 32000  # below the range from which the kernel takes ephemeral ports
_LOOK_S = 0.25
_REFUSALS = 3
_LOST_S = 60.0
_ROLES = ("chief", "worker", "ps", "evaluator")


def variables(
    environment: Environment, hosts: Sequence[str], counts: Sequence[int], roles: Sequence[str]
) -> dict[str, str]:
    """Return TF_CONFIG: ``{"cluster": {role: [host:port, ...]}, "task": {"type": role, "index": i}}``.

    Every process listens on a port of its own: the master's, plus its number on its node. An evaluator is
    not in the cluster, as TensorFlow requires.
    """
    if environment.master_addr is None or environment.master_port is None:
        raise ConfigError("--env-style tensorflow needs the address of the first node.")
    machines = list(hosts) or [environment.master_addr]
    each = list(counts) or [environment.local_world_size] * environment.nodes
    if len(machines) != len(each):
        raise ConfigError(
            f"--env-style tensorflow needs the addresses of all {len(each)} machines, but only "
            f"{len(machines)} is known: {', '.join(machines)}."
        )
    addresses = [
        f"{machine}:{environment.master_port + local}"
        for machine, count in zip(machines, each, strict=True)
        for local in range(count)
    ]
    kinds = list(roles) or ["worker"] * environment.world_size
    if len(kinds) != environment.world_size:
        raise ConfigError(f"--roles names {len(kinds)} processes, but there are {environment.world_size}.")
    cluster: dict[str, list[str]] = {}
    for kind, address in zip(kinds, addresses, strict=True):
        if kind != "evaluator":
            cluster.setdefault(kind, []).append(address)
    role = kinds[environment.rank]
    task = {"type": role, "index": kinds[: environment.rank].count(role)}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def parse_roles(text: str, world_size: int) -> tuple[str, ...]:
    """Parse ``chief=1,worker=2,ps=1`` into the role of each rank, in that order."""
    roles: list[str] = []
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in _ROLES or not (number or "1").isdigit():
            raise ConfigError(
                f"--roles must be such as chief=1,worker=2,ps=1 with the roles {', '.join(_ROLES)}, but is {text!r}."
            )
        roles += [name] * int(number or 1)
    if len(roles) != world_size:
        raise ConfigError(f"--roles {text} names {len(roles)} processes, but {world_size} are started.")
    if Counter(roles)["chief"] > 1:
        raise ConfigError("--roles: there can be only one chief.")
    return tuple(roles)


def serves(rank: int, roles: Sequence[str]) -> bool:
    """Return whether a rank only serves others, and never ends by itself."""
    return bool(roles) and (roles[rank] == "ps" or (roles[rank] == "worker" and {"ps", "chief"} <= set(roles)))


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    for _ in range(200):
        first = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT - count)
        if not any(_is_taken(first + i) for i in range(count)):
            return first
    raise LaunchError(f"there are no {count} free ports in a row from {_FIRST_PORT} to {_LAST_PORT}.")


def start(rendered: RenderedJob) -> SupervisedJob:
    """Start processes that have TF_CONFIG."""
    configs = [json.loads(command.env["TF_CONFIG"]) for command in rendered.commands]
    for config in configs:
        kind, index = config["task"]["type"], config["task"]["index"]
        if kind == "evaluator":
            continue
        port = int(config["cluster"][kind][index].rpartition(":")[2])
        if _is_taken(port):
            raise ConfigError(
                f"port {port} of {socket.gethostname()}, on which {kind} {index} would listen, is taken. "
                "Give the first of some free ones with --master-port."
            )
    cluster = configs[0]["cluster"]
    chief = "chief" if "chief" in cluster else "worker"
    chief_is_here = {"type": chief, "index": 0} in [config["task"] for config in configs]
    serves_elsewhere = not chief_is_here and any(command.serves for command in rendered.commands)
    job = SupervisedJob(
        rendered.commands,
        directory=rendered.spec.placement.log_directory,
        grace_s=rendered.spec.recovery.grace_s,
        ignores_sigterm=True,
        serves_elsewhere=serves_elsewhere,
    )
    if serves_elsewhere:
        [host, _, port] = cluster[chief][0].rpartition(":")
        threading.Thread(target=_wait_for_end, args=(host, int(port), job), daemon=True).start()
    return job


def _wait_for_end(host: str, port: int, job: SupervisedJob) -> None:
    """Look whether the chief, on another machine, listens; once it does no more, the job is done."""
    seen_at, refusals = math.inf, 0
    pause = threading.Event()
    while refusals < _REFUSALS and time.monotonic() - seen_at < _LOST_S:
        pause.wait(_LOOK_S)
        try:
            socket.create_connection((host, port), timeout=_LOST_S).close()
            seen_at, refusals = time.monotonic(), 0
        except ConnectionRefusedError:
            refusals += seen_at < math.inf
        except OSError:
            pass  # a machine that does not answer may be back soon
    with suppress(OSError):  # the job has ended by itself
        job.stop_servers()


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
