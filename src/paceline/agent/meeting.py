"""How the agents of a job find each other: by an address, a shared directory and a secret in it. No torch.

The run's directory is the same one on all machines. The first agent writes ``agents.json`` there, which tells
where it listens and which leases are this job's, and ``agents.token``, the secret that links need.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from paceline import __version__
from paceline.agent.listener import Listener
from paceline.agent.token import TOKEN_BYTES, create_token, read_token
from paceline.distributed.environment import parse_endpoint
from paceline.distributed.sockets import (
    address_towards,
    interface_address,
    interface_of,
    is_ours,
    meeting_address,
)
from paceline.errors import ConfigError
from paceline.launchers.local.base import LocalSpec
from paceline.membership.lease import LeaseDirectory
from paceline.run_directory import RunDirectory, write_atomically

_LOOK_EVERY_S = 0.2
_ANSWERS_S = 2.0  # a machine that is gone does not refuse: it says nothing
_DISTRIBUTIONS = ("torch", "numpy")

Agent = tuple[str, tuple[str, int]]
"""An agent's name, and where it listens."""


@dataclass(frozen=True)
class Meeting:
    """What an agent needs to meet the others.

    Attributes:
        name: this agent's; no other one, before or after it, has the same.
        founds: whether it is the first.
        address: of this machine, on the way to the others.
        interface: the network interface with that address.
        endpoints: where to call first.
        token: the job's secret.
        hello: what others learn of this agent with the handshake.
    """

    name: str
    founds: bool
    address: str
    interface: str
    endpoints: tuple[tuple[str, int], ...]
    token: bytes
    listener: Listener
    hello: dict[str, Any]


def meet(spec: LocalSpec, directory: RunDirectory) -> tuple[Meeting, LeaseDirectory | None]:
    """Listen, and find out whom to call.

    Args:
        spec: the job's.
        directory: the run's.

    Returns:
        The meeting, and the leases where this agent founds the job: others learn of them by a hello.

    Raises:
        ConfigError: an address or the token file cannot work, or the job to join cannot be found.
        RunDirectoryError: the directory cannot be written.
    """
    if spec.rdzv_endpoint is not None:
        endpoints = [parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")]
    else:
        endpoints = [address for _, address in recorded_agents(directory)[0]]
    host, port = endpoints[0]
    if spec.interface is not None:
        address = interface_address(spec.interface)
    elif is_ours(host):
        address = socket.gethostbyname(host)
    else:
        address = address_towards(host, port)
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    versions = {**_versions(), "task": spec.task_code}
    hello: dict[str, Any] = {"name": name, "versions": versions}
    may_found = not spec.joins and (spec.node_rank == 0 or (spec.node_rank is None and is_ours(host)))
    token = _token(spec, directory, creates=may_found)
    listener = None
    if may_found:
        try:
            listener = Listener(_where_looked_for(host, address, spec.interface), port, token, hello)
        except ConfigError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if spec.node_rank == 0 or not taken:
                raise
    founds = listener is not None
    if listener is None:
        listener = Listener(address, 0, token, hello)
    hello |= {"host": listener.host, "port": listener.port}
    lease = None
    if founds:
        lease = LeaseDirectory.found(directory.path / "agents")
        hello["lease"] = lease.key
        record_agents(directory, [(name, (listener.host, listener.port))], spec.command[-1])
    meeting = Meeting(
        name=name,
        founds=founds,
        address=address,
        interface=interface_of(address),
        endpoints=tuple(endpoints),
        token=token,
        listener=listener,
        hello=hello,
    )
    return meeting, lease


def _where_looked_for(host: str, address: str, interface: str | None) -> str:
    """The address for the other agents, which is another one than the workers' where the networks differ."""
    return address if interface is None else socket.gethostbyname(meeting_address(host, interface))


def record_agents(directory: RunDirectory, agents: Sequence[Agent], job: str) -> None:
    """Write where the agents listen, and the job that they do, for those that join by the directory alone."""
    content = {"job": Path(job).name, "agents": [[name, *address] for name, address in agents]}
    write_atomically(directory.agents, (json.dumps(content) + "\n").encode())


def recorded_agents(directory: RunDirectory) -> tuple[list[Agent], Path]:
    """Where the agents listen, and the file of the job that they do.

    Raises:
        ConfigError: the directory does not say.
    """
    try:
        content = json.loads(directory.agents.read_bytes())
        agents = [(str(name), (str(host), int(port))) for name, host, port in content["agents"]]
        if agents:
            return agents, directory.path / content["job"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{directory.path} does not say where its agents are: either the run was started on one machine "
        "alone, or this is not the directory that its machines share. "
        "Start a run that others can join with --nodes MIN:MAX and --rdzv-endpoint HOST:PORT."
    )


def others_at_work(directory: RunDirectory) -> bool:
    """Whether an agent answers where the directory says: a machine that comes now has to join it."""
    try:
        agents, _ = recorded_agents(directory)
    except ConfigError:
        return False
    for _, address in agents:
        with suppress(OSError), socket.create_connection(address, timeout=_ANSWERS_S):
            return True
    return False


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """In words, what another agent runs that this one does not."""
    mine, other = ours["versions"], theirs.get("versions")
    if not isinstance(other, dict):
        other = {}
    return [
        f"{name} is {other.get(name, 'missing')} there and {mine.get(name, 'missing')} here"
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name)
    ]


def _token(spec: LocalSpec, directory: RunDirectory, creates: bool) -> bytes:
    path = spec.token_file or directory.path / "agents.token"
    if creates and spec.token_file is None and not path.exists():
        with suppress(ConfigError):  # another agent on this machine was faster
            return create_token(path)
    deadline = time.monotonic() + spec.init_timeout_s
    while True:
        # Asked before the read: the first agent may be writing it right now.
        was_whole = _is_whole(path)
        try:
            return read_token(path)
        except ConfigError:
            # The first agent may not have written it yet, and a shared file system may be late.
            if spec.token_file is not None or time.monotonic() > deadline or was_whole:
                raise
            time.sleep(_LOOK_EVERY_S)


def _is_whole(path: Path) -> bool:
    """Whether all of a token file is there, so that waiting does not mend it."""
    try:
        return path.stat().st_size > 2 * TOKEN_BYTES
    except OSError:
        return False


def _versions() -> dict[str, str]:
    found = {"paceline": __version__, "python": ".".join(python_version().split(".")[:2])}
    for distribution in _DISTRIBUTIONS:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "missing"
    return found
