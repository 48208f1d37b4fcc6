"""How the machines of an examination find machine 0, also where the way that the job will take is closed.

Machine 0 makes a token in the shared directory, listens on the job's own rendezvous port and on another one,
and writes the other one's number into the directory. Who does not reach it on either, or does not see the
directory, says so there, or to machine 0, as far as that can be.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.agent.link import LinkError
from paceline.agent.listener import Listener
from paceline.agent.token import create_token, read_token
from paceline.doctor.channel import DEAD_AFTER_S, Channel, open_channel
from paceline.doctor.examination import Place
from paceline.doctor.examiner import Address
from paceline.errors import ConfigError, LaunchError
from paceline.run_directory import write_atomically

_TOKEN = "token"
_MEETING = "meeting.json"
_NO_TOKEN = bytes(32)  # shows machine 0 that this one is there, and does not see the token
_TRY_S = 2.0
_RETRY_S = 0.2


@dataclass
class Arrivals:
    """Who has come to machine 0.

    Attributes:
        channels: by the machine's number.
        hosts: their names, and those of machines that have left a problem.
        strangers: who came without the token, or with another version; sentences.
        problems: what machines that did not come have left in the directory, by number.
        port_problem: why machine 0 cannot listen on the rendezvous port.
    """

    channels: dict[int, Channel] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    port_problem: str | None = None


def make_token(directory: Path) -> bytes:
    """Machine 0's: a new one, since an earlier examination may have left its own.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_traces(directory)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}.") from error
    return create_token(directory / _TOKEN)


def remove_traces(directory: Path) -> None:
    """Remove what the machines met by."""
    for path in (directory / _TOKEN, directory / _MEETING, *directory.glob("machine-*.json")):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def await_machines(
    directory: Path, place: Place, address: Address, token: bytes, timeout_s: float
) -> Arrivals:
    """Machine 0: wait for the others, all of them or as many as come in time."""
    arrivals = Arrivals()
    listeners = []
    try:
        try:
            listeners.append(_listener(address.host, place.master_port, token))
        except ConfigError as error:
            arrivals.port_problem = (
                str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else ""
            )
        listeners.append(_listener(address.host, 0, token))
        where = json.dumps({"address": address.host, "port": listeners[-1].port})
        write_atomically(directory / _MEETING, where.encode())
        deadline = time.monotonic() + timeout_s
        while len(arrivals.channels) < place.nodes - 1 and time.monotonic() < deadline:
            _accept(listeners, arrivals, place)
    finally:
        for listener in listeners:
            listener.close()
    for node in range(1, place.nodes):
        if node not in arrivals.channels:
            with suppress(OSError, ValueError):
                host, problem = json.loads((directory / f"machine-{node}.json").read_bytes())
                arrivals.hosts[node], arrivals.problems[node] = str(host), str(problem)
    return arrivals


def _listener(host: str, port: int, token: bytes) -> Listener:
    hello = {"version": __version__, "host": socket.gethostname()}
    return Listener(host, port, token, hello, dead_after_s=DEAD_AFTER_S)


def _accept(listeners: list[Listener], arrivals: Arrivals, place: Place) -> None:
    select.select(listeners, [], [], _RETRY_S)
    for listener in listeners:
        links, refused = listener.accept()
        arrivals.strangers += [text for text in refused if text not in arrivals.strangers]
        for link in links:
            hello = link.hello or {}
            node = hello.get("node")
            if not isinstance(node, int) or not 0 < node < place.nodes or node in arrivals.channels:
                arrivals.strangers.append(f"{link.peer} says that it is machine {node}")
                link.close()
            elif hello.get("version") != __version__:
                arrivals.problems[node] = (
                    f"it has Paceline {hello.get('version')}, machine 0 has {__version__}"
                )
                arrivals.strangers.append(f"{link.peer}: {arrivals.problems[node]}")
                link.close()
            else:
                arrivals.channels[node] = Channel(link)
                arrivals.hosts[node] = str(hello.get("host"))


def find_machine_0(directory: Path, place: Place, timeout_s: float) -> tuple[Channel, bytes]:
    """Any other machine: link with machine 0, by whichever way there is; also the token.

    Raises:
        LaunchError: there is none; the message says what was tried.
    """
    hello = {"node": place.node_rank, "host": socket.gethostname(), "version": __version__}
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        token, unseen = _NO_TOKEN, ""
        try:
            token = read_token(directory / _TOKEN)
        except ConfigError as error:
            unseen = str(error)
        problems = []
        for host, port in _addresses(directory, place):
            try:
                return open_channel(host, port, token, hello, _TRY_S), token
            except LinkError as error:
                why = str(error).rpartition(": ")[2].removesuffix(".")
                problems.append(f"{host}:{port} ({why})")
        problem = f"it does not reach {' nor '.join(problems)}"
        if unseen and not (directory / _MEETING).exists():
            problem += f"; {unseen.partition('. ')[0]}: do the machines share that directory?"
        if problem != said:
            said = problem
            # A directory that is not there is not shared; then only this machine's own output tells.
            with suppress(OSError):
                content = json.dumps([socket.gethostname(), problem])
                write_atomically(directory / f"machine-{place.node_rank}.json", content.encode())
        if time.monotonic() > deadline:
            raise LaunchError(f"machine {place.node_rank} did not reach machine 0: {problem}")
        time.sleep(_RETRY_S)


def _addresses(directory: Path, place: Place) -> Iterator[tuple[str, int]]:
    yield place.master_addr, place.master_port
    with suppress(OSError, ValueError, KeyError, TypeError):
        meeting: dict[str, Any] = json.loads((directory / _MEETING).read_bytes())
        yield str(meeting["address"]), int(meeting["port"])
