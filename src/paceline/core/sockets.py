"""Sockets that listen on one address, and the network interfaces that have one."""

from __future__ import annotations

import errno
import hashlib
import os
import socket

import psutil

from paceline.core.errors import ConfigError

LOOPBACK = "127.0.0.1"

_FIRST_PORT, _PORTS = 20000, 12000  # below the range from which the kernel takes ephemeral ports


def job_port(job_id: str, attempt: int = 0) -> int:
    """A port that all machines of a job compute alike, and other jobs hardly do.

    Args:
        job_id: what the job's system calls it.
        attempt: how many such ports were taken by others.
    """
    digest = hashlib.sha256(job_id.encode()).digest()
    return _FIRST_PORT + (int.from_bytes(digest[:4], "big") + 997 * attempt) % _PORTS


def inherited_socket(descriptor: int) -> socket.socket:
    """The socket that the spawn launcher left under ``descriptor``, for our use alone.

    Raises:
        ConfigError: there is none.
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
    """A socket bound to ``host``; to all interfaces where ``host`` is not an address of this machine."""
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


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        ConfigError: there is no such interface, or it has none; the message lists those that do.
    """
    there = {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if name not in there:
        raise ConfigError(f"--interface {name!r} has no IPv4 address here. Those that have: {', '.join(there)}.")
    return there[name]


def meeting_address(host: str, interface: str | None) -> str:
    """Where machine 0 listens for the others: where they look for it, also where the data goes elsewhere.

    Args:
        host: what the others call it; "" where nothing was said.
        interface: the network interface to them, whose address is taken where ``host`` is none of this
            machine's, or leads back to it (127.0.1.1).

    Raises:
        ConfigError: there is no such interface.
    """
    if interface is None:
        return host
    address = interface_address(interface)
    reachable = host and is_ours(host) and not socket.gethostbyname(host).startswith("127.")
    return host if reachable else address


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address.

    Raises:
        ConfigError: none has it.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise ConfigError(f"no network interface of this machine has the address {address}; give --interface.")


def address_towards(host: str, port: int) -> str:
    """This machine's IPv4 address on the way to another one; nothing is sent.

    Raises:
        ConfigError: there is no such host, or no way to it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"there is no way from here to {host}: {error.strerror or error}.") from error
    return address


def is_ours(address: str) -> bool:
    """Whether a host name or address is this machine's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def loopback_interface() -> str:
    """The name of the loopback interface: ``lo`` on Linux."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == LOOPBACK for entry in entries):
            return name
    raise ConfigError(f"this machine has no loopback interface ({LOOPBACK}); give --interface.")
