"""A job's processes on this machine: described, rendered as text, started."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

from paceline.launchers.base import made_launcher
from paceline.launchers.local.process_group import LocalJob, LocalSpec, RenderedProcesses


class LocalLauncher(ABC):
    """Starts the processes of a job."""

    @abstractmethod
    def render(self, spec: LocalSpec) -> RenderedProcesses:
        """Say what would run; starts and writes nothing.

        Raises:
            ConfigError: this launcher cannot run the job.
        """

    @abstractmethod
    def submit(self, rendered: RenderedProcesses) -> LocalJob:
        """Start it.

        Raises:
            LaunchError: a process could not be started; none is left.
        """


_LAUNCHERS = {
    "inprocess": "paceline.launchers.local.inprocess:InProcessLauncher",
    "spawn": "paceline.launchers.local.spawn:SpawnLauncher",
    "torchrun": "paceline.launchers.local.torchrun:TorchrunLauncher",
}
LOCAL_LAUNCHERS = tuple(_LAUNCHERS)


def get_local_launcher(name: str) -> LocalLauncher:
    """The launcher of that name; its module is imported now.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    launcher = made_launcher(name, _LAUNCHERS)
    assert isinstance(launcher, LocalLauncher)
    return launcher


def bound_loopback_socket(port: int = 0) -> socket.socket:
    """A TCP socket bound to ``port`` on loopback (0: a free one), not listening yet."""
    bound = socket.socket()
    # With this, a script's own TCPStore can still listen on the port that the socket reserves for it.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound
