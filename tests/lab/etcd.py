"""A cluster of real etcd members, each on a machine of its own in a lab."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.lab.machines import Lab, Node, NodeProcess

_FIRST = 100  # the machines' numbers, so that none is one of the lab's own
_CLIENTS, _PEERS = 2379, 2380
_POST = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], sys.argv[2].encode(), 2).read().decode())"


class EtcdCluster:
    """Three members that keep what they know on a disk, and can be killed, frozen and restarted.

    Args:
        lab: its switch joins the members' machines to the lab's own.
        wait_until: the fixture.
        size: number of members.
    """

    def __init__(self, lab: Lab, wait_until: Callable[..., None], size: int = 3) -> None:
        self._wait_until = wait_until
        self._directory = lab.directory / "etcd"
        self._directory.mkdir()
        self.machines: list[Node] = []
        self._processes: list[NodeProcess] = []
        try:
            for index in range(size):
                self.machines.append(Node(lab, _FIRST + index))
                self.machines[-1].boot()
            self._processes = [self._start(index) for index in range(size)]
            self.wait_for_leader()
        except BaseException:
            self.end()
            raise

    @property
    def url(self) -> str:
        """What ``--coordinator`` is given."""
        return "etcd://" + ",".join(f"{machine.address}:{_CLIENTS}" for machine in self.machines)

    def _start(self, index: int) -> NodeProcess:
        machine = self.machines[index]
        members = ",".join(f"{each.name}=http://{each.address}:{_PEERS}" for each in self.machines)
        clients, peers = (f"http://{machine.address}:{port}" for port in (_CLIENTS, _PEERS))
        return machine.start(
            [
                *("etcd", "--name", machine.name, "--data-dir", self._directory / machine.name),
                *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", members, "--log-level", "warn"),
            ],
            log=self._directory / f"{machine.name}.log",
        )

    def leader(self) -> int | None:
        """The number of the member that leads the others; None while there is none."""
        for index, process in enumerate(self._processes):
            if process.poll() is None:
                status = self.post(index, "/v3/maintenance/status", {})
                if status.get("leader", "0") == status.get("header", {}).get("member_id"):
                    return index
        return None

    def post(self, member: int, path: str, body: dict[str, object]) -> dict[str, Any]:
        """What this member answers; nothing where it does not."""
        machine = self.machines[member]
        url = f"http://{machine.address}:{_CLIENTS}{path}"
        answer = machine.run([sys.executable, "-S", "-c", _POST, url, json.dumps(body)]).stdout
        document: dict[str, Any] = json.loads(answer) if answer else {}
        return document

    def wait_for_leader(self) -> int:
        self._wait_until(lambda: self.leader() is not None, "etcd's own leader", timeout_s=60)
        leader = self.leader()
        assert leader is not None
        return leader

    def kill(self, *members: int) -> None:
        """``kill -9`` these members; their data stay."""
        for index in members:
            self._processes[index].send_signal(signal.SIGKILL)
            self._processes[index].wait(30)

    def restart(self, *members: int) -> None:
        """Start members that were killed; they find their data."""
        for index in members:
            self._processes[index] = self._start(index)

    def freeze(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGSTOP)

    def unfreeze(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGCONT)

    def keys(self) -> list[str]:
        """The keys of all runs."""
        prefix, after = (base64.b64encode(text).decode() for text in (b"/paceline/", b"/paceline0"))
        answer = self.post(self.wait_for_leader(), "/v3/kv/range", {"key": prefix, "range_end": after})
        return [base64.b64decode(pair["key"]).decode() for pair in answer.get("kvs", ())]

    def end(self) -> None:
        """Kill all members, and their machines."""
        for machine in self.machines:
            machine.kill()


def why_not() -> str | None:
    """What this machine lacks for it; None where it lacks nothing."""
    if shutil.which("etcd") is None:
        return "etcd is missing (on Debian: apt-get install etcd-server)"
    return None
