"""An OpenSSH server on each machine of a lab, with keys of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lab.machines import Lab, Node, NodeProcess

# Its private directory is fixed when it is built; each machine gets a /run of its own for that.
_START = 'mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$@"'


class SshLab:
    """Machines that reach each other by ssh, as the user that the tests run as.

    Args:
        lab: the machines.
        wait_until: the fixture.
    """

    def __init__(self, lab: Lab, wait_until: Callable[..., None]) -> None:
        self.lab = lab
        self.nodes = lab.nodes
        self.path = lab.directory
        self._keys = lab.directory / "keys"
        self._keys.mkdir(mode=0o700)
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name)]
            subprocess.run(command, check=True)
        host_key = " ".join((self._keys / "host.pub").read_text().split()[:2])
        (self._keys / "known_hosts").write_text("".join(f"{n.name} {host_key}\n" for n in self.nodes))
        # Nothing of the caller's reaches a session, but what the tests are run from.
        inherited = {"TMPDIR": "/dev/shm", "OMP_NUM_THREADS": "1"}
        if "PYTHONPATH" in os.environ:
            inherited["PYTHONPATH"] = os.environ["PYTHONPATH"]
        (self._keys / "sshd_config").write_text(
            f"HostKey {self._keys}/host\n"
            f"AuthorizedKeysFile {self._keys}/user.pub\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin yes\nPidFile none\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in inherited.items())}\n"
        )
        self._wait_until = wait_until
        self.servers = [self._serve(node) for node in self.nodes]
        for server in self.servers:
            self._wait_for(server)

    def boot(self, node: Node) -> None:
        """Start a machine that was killed, with its ssh server."""
        node.boot()
        server = self.servers[self.nodes.index(node)] = self._serve(node)
        self._wait_for(server)

    def _wait_for(self, server: NodeProcess) -> None:
        self._wait_until(lambda: "Server listening" in server.text, "an ssh server")

    def _serve(self, node: Node) -> NodeProcess:
        server = [shutil.which("sshd", path="/usr/sbin:/sbin"), "-D", "-e", "-f", self._keys / "sshd_config"]
        return node.start(["sh", "-c", _START, "sh", *server])

    @property
    def options(self) -> tuple[str, ...]:
        """How a client gets in."""
        settings = {
            "IdentityFile": self._keys / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self._keys / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
        }
        return tuple(word for name, value in settings.items() for word in ("--ssh-option", f"{name}={value}"))

    def paceline(self, node: Node, *arguments: str | Path, env: Mapping[str, str] | None = None) -> NodeProcess:
        """``paceline ARGUMENTS`` there."""
        state = {"XDG_STATE_HOME": str(self.path / "state"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return node.start([sys.executable, "-m", "paceline", *arguments], env={**state, **(env or {})})

    def launch(
        self, node: Node, hosts: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> NodeProcess:
        """``paceline launch --on ssh --hosts HOSTS ARGUMENTS`` there."""
        return self.paceline(node, "launch", "--on", "ssh", "--hosts", hosts, *self.options, *arguments, env=env)


def why_not() -> str | None:
    """What this machine lacks for it; None where it lacks nothing."""
    if shutil.which("sshd", path="/usr/sbin:/sbin") is None or shutil.which("ssh") is None:
        return "an ssh server is missing (on Debian: apt-get install openssh-server openssh-client)"
    return None
