"""Lists of machines as people and MPI write them: ``a:2,b:2``, or a file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.options import flag


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: its name for ssh or mpirun: ``node0``, ``user@node0``, or a name of the ssh configuration.
        slots: processes to start there; None if the list does not give them.
        address: its address for other machines; "": the name without its user.
    """

    name: str
    slots: int | None = None
    address: str = ""

    @property
    def reached_at(self) -> str:
        """The name or address that other machines connect to."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(text: str, option: str = "--hosts") -> tuple[Host, ...]:
    """Read the machines of ``a:2,b:2``, or of the file of that name.

    A file has one machine per line: ``node0``, ``node0:2`` or ``node0 slots=2``, as Open MPI writes it, also with
    ``address=10.0.0.5`` if other machines cannot resolve ssh's name for it; ``#`` begins a comment.
    """
    # Path.is_file() raises for a list that is longer than a file's name can be.
    if os.sep in text or os.path.isfile(text):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{option} {text}: the file cannot be read: {why}.") from error
        parts = [(f"{option} {text}, line {n}", line.partition("#")[0]) for n, line in enumerate(lines, 1)]
    else:
        parts = [(option, part) for part in text.split(",")]
    hosts = tuple(_host(part.strip(), where) for where, part in parts if part.strip())
    if not hosts:
        raise ConfigError(f"{option} {text!r} names no machine. Give such as node0:2,node1:2, or a file.")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{option} names {name} more than once. Say how many processes: {name}:2.")
    return hosts


def _host(text: str, where: str) -> Host:
    first, *fields = text.split()
    match = re.fullmatch(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[\w.@+-]+))(?::(?P<slots>\d+))?", first)
    # What begins with a dash would be taken for an option by ssh.
    if match is None or first.startswith("-"):
        raise ConfigError(f"{where}: {first!r} is not a host. Write NAME or NAME:PROCESSES, such as node0:2.")
    host = Host(match["ipv6"] or match["name"], int(match["slots"]) if match["slots"] else None)
    for word in fields:
        key, _, value = word.partition("=")
        if key == "slots" and value.isdigit() and host.slots is None:
            host = replace(host, slots=int(value))
        elif key == "address" and value:
            host = replace(host, address=value)
        elif key != "max_slots":  # Open MPI's; nothing is ever started beyond slots
            raise ConfigError(f"{where}: {word!r} is not known. Write slots=N or address=HOST.")
    if host.slots == 0:
        raise ConfigError(f"{where}: {host.name} has no slots. Leave it out.")
    return host


def nodes_of(
    hosts: tuple[Host, ...], nodes: tuple[int, int], nproc: tuple[int, ...] | None
) -> tuple[tuple[int, int], tuple[int, ...] | None]:
    """Combine a list of hosts with ``--nodes`` and ``--nproc``: the number of nodes, and the processes on each.

    ``--nodes 1``, the default, means all hosts; ``--nproc 1``, the default, the numbers of the list.
    """
    least, most = nodes
    if nodes == (1, 1):
        least = most = len(hosts)
    if least > len(hosts):
        raise ConfigError(f"--nodes {least} needs as many hosts, but --hosts names {len(hosts)}.")
    used = hosts[:most]
    slots = tuple(host.slots for host in used)
    said = tuple(number for number in slots if number is not None)
    if not said:
        return (least, most), nproc
    if len(said) < len(slots):
        silent = next(host.name for host in used if host.slots is None)
        raise ConfigError(f"--hosts says the processes of some hosts, but not of {silent}.")
    counts = said[:1] if len(set(said)) == 1 else said
    if nproc not in (None, (1,), counts, said):
        assert nproc is not None
        given = ",".join(map(str, nproc))
        raise ConfigError(
            f"{flag('nproc')} {given} contradicts --hosts, which says {','.join(map(str, said))}: it counts the "
            "processes of a node. Leave it out."
        )
    if len(counts) > 1 and least < most:
        raise ConfigError(f"--nodes {least}:{most} needs the same number of processes on every host.")
    return (least, most), counts
