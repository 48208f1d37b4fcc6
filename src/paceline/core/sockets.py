"""Listening sockets and the addresses of network interfaces."""

from __future__ import annotations

import errno
import hashlib
import os
import socket

import psutil

from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError

LOOPBACK = "127.0.0.1"

_FIRST_PORT, _PORTS = 20000, 12000  # below the range from which the kernel takes ephemeral ports


def job_port(job_id: str, attempt: int = 0) -> int:
    """Return a port that all nodes of a job compute alike and other jobs are unlikely to use.

    Args:
        attempt: number of such ports that turned out to be taken.
    """
    digest = hashlib.sha256(job_id.encode()).digest()
    return _FIRST_PORT + (int.from_bytes(digest[:4], "big") + 997 * attempt) % _PORTS


def inherited_socket(descriptor: int) -> socket.socket:
    """Return the socket that the spawn launcher left under ``descriptor``, no longer inheritable.

    Raises:
        ConfigError: the descriptor is not an open socket.
    """
    try:
        listener = socket.socket(fileno=os.dup(descriptor))
        os.set_inheritable(descriptor, False)
        return listener
    except OSError as error:
        raise ConfigError(
            f"PACELINE_LISTEN_FD={descriptor} is not an open socket: {error.strerror}. "
            "Only the spawn launcher sets it; unset it."
        ) from error


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host``, or to all interfaces if ``host`` is not an address of this node."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
    except BaseException:
        listener.close()
        raise
    return listener


def free_loopback_port() -> int:
    """Return a port of this machine on which no process listens now; another may take it before its user does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _addresses() -> dict[str, str]:
    """Return the last IPv4 address of each network interface that has one."""
    return {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        ConfigError: the interface does not exist or has no IPv4 address; lists those that have one.
    """
    addresses = _addresses()
    if name not in addresses:
        raise ConfigError(
            f"--interface {name!r} has no IPv4 address on this node. Interfaces with one: {', '.join(addresses)}."
        )
    return addresses[name]


def has_interface(name: str) -> bool:
    """Return whether a network interface exists, with an address or without."""
    return any(name == interface for _, interface in socket.if_nameindex())


def meeting_address(host: str, interface: str | None) -> str:
    """Return the address on which node 0 listens for the other nodes.

    Args:
        host: the address that the other nodes use; "" if unknown.
        interface: the network interface to them. Its address is used if ``host`` is not an address of this node or is a
            loopback address (127.0.1.1).

    Raises:
        ConfigError: the interface does not exist.
    """
    if interface is None:
        return host
    address = interface_address(interface)
    reachable = host and is_ours(host) and not socket.gethostbyname(host).startswith("127.")
    return host if reachable else address


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this IPv4 address.

    Raises:
        ConfigError: no interface has it.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise ConfigError(f"no network interface of this node has the address {address}. Give --interface.")


def own_address(host: str) -> str:
    """Return the IPv4 address that other nodes have for this node's name.

    Many distributions map a host's own name to 127.0.1.1 in ``/etc/hosts``; the others cannot reach that.

    Raises:
        ConfigError: the name is a loopback address here, and this node has several other addresses, or none.
    """
    address = socket.gethostbyname(host)
    if not is_loopback(address) or is_loopback(host):
        return address
    others = {name: address for name, address in _addresses().items() if not is_loopback(address)}
    if len(others) != 1:
        raise ConfigError(
            f"{host} is {address} on this node (see /etc/hosts), where other nodes cannot reach it. Give --interface"
            f"{', one of ' + ', '.join(others) if others else ''}."
        )
    return next(iter(others.values()))


def address_beside(host: str, port: int) -> str:
    """Return this node's IPv4 address for the nodes that meet at a host, which may be this one.

    Raises:
        ConfigError: as :func:`own_address` and :func:`address_towards` say.
    """
    return own_address(host) if is_ours(host) else address_towards(host, port)


def address_towards(host: str, port: int) -> str:
    """Return this node's IPv4 address on the route to another host; nothing is sent.

    Raises:
        ConfigError: the host does not exist or has no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"there is no route to {host}: {error.strerror or error}.") from error
    return address


def require_loopback() -> None:
    """Make sure that processes of this node reach each other.

    Raises:
        ConfigError: the loopback interface is down, as in some sandboxes, or a firewall drops its connections.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            pass
    except OSError as error:
        remedy = (
            "A firewall of this node drops connections: allow those of the loopback interface"
            if getattr(psutil.net_if_stats().get("lo"), "isup", False)
            else "Bring the loopback interface up (ip link set lo up)"
        )
        raise ConfigError(
            f"processes of this node cannot reach each other over {LOOPBACK}: {error.strerror or error}. {remedy}, or "
            "use one process: --nproc 1."
        ) from error


def is_ours(address: str) -> bool:
    """Return whether a host name or address belongs to this node."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def loopback_interface() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == LOOPBACK for entry in entries):
            return name
    raise ConfigError(f"this node has no loopback interface ({LOOPBACK}). Give --interface.")
