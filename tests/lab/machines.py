"""Machines for tests: each node is a set of Linux namespaces, joined to the others by a switch.

A node has its own network, host name, processes, mounts and shared memory (so ``/dev/shm`` and ``TMPDIR``
are its own); the rest of the file system is shared, as a cluster's is. The switch is a bridge in one more
network namespace: nothing of a lab is visible outside it, and any number of labs may use the same names and
addresses at the same time. Every namespace lives as long as a process that waits for the end of its input,
which this process holds: however this one ends, the kernel ends all the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.lab.warm_start import CHANGE_DIRECTORY, is_template

_SUBNET = "10.77.0"
_NOBODYS_MAC = "02:00:00:00:00:ff"
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
# SIGCHLD ignored: a node's first process inherits orphans, and the kernel is to reap them.
_FIRST_PROCESS = """
trap '' CHLD
mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && hostname "$2" || exit
echo ready
exec cat
"""
_SWITCH = "ip link set lo up && ip link add switch type bridge forward_delay 0 && ip link set switch up"
_READY = f"{_SWITCH} && echo ready && exec cat"


class NodeProcess:
    """A command that runs on a node; what it prints goes to ``log``."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen = popen
        self.log = log

    @property
    def text(self) -> str:
        """What it has printed so far, stdout and stderr together."""
        return self.log.read_text(errors="replace")

    @property
    def outer_pid(self) -> int:
        """The command, or the ``nsenter`` that waits for it, numbered as outside of the node."""
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float = 120) -> int:
        """The exit code; a process that takes longer fails the test with what it has printed."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self._popen.args} took over {timeout_s} s and printed:\n{self.text}")

    def tree(self) -> list[psutil.Process]:
        """The command itself, then all that it has started; numbered as outside of the node."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._popen.pid)
            found = [each for each in process.children(recursive=True) if not is_template(each)]
            return found if process.name() == "nsenter" else [process, *found]
        return []

    def send_signal(self, number: int) -> None:
        """Signal the command, and not its children."""
        with suppress(IndexError, psutil.NoSuchProcess):
            self.tree()[0].send_signal(number)
        if number == signal.SIGCONT:
            self.unfreeze()

    def unfreeze(self) -> None:
        """Have an ``nsenter`` go on: it stops with the command, and would never see its end."""
        self._popen.send_signal(signal.SIGCONT)


class Node:
    """One machine of a lab.

    Attributes:
        name: its host name; all nodes know each other's.
        address: its address on ``eth0``.
        lab: the lab that it belongs to.
        processes: what was started here, over all boots.
    """

    def __init__(self, lab: Lab, index: int) -> None:
        self.name = f"node{index}"
        self.address = f"{_SUBNET}.{index + 1}"
        self.lab = lab
        self._boots = 0
        self._first: _Holder | None = None
        self._port = ""
        self.processes: list[NodeProcess] = []

    def boot(self) -> None:
        """Start the machine, again after a :meth:`kill`, under the same name and address."""
        assert self._first is None, f"{self.name} runs"
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._first = _Holder([*unshare, "sh", "-c", _FIRST_PROCESS, "sh", str(self.lab.hosts), self.name])
        # The kernel takes a killed node's interface away a little later.
        self._port = f"{self.name}-{self._boots}"
        self._boots += 1
        pid = self._first.pid
        self.lab.switch.run(
            f"ip link add {self._port} type veth peer name eth0 netns {pid} && "
            f"ip link set {self._port} master switch up"
        )
        self._first.run(f"ip addr add {self.address}/24 dev eth0 && ip link set eth0 up")

    @property
    def pid(self) -> int:
        """The machine's first process, numbered as outside of it."""
        assert self._first is not None, f"{self.name} was killed; boot() starts it again"
        return self._first.pid

    @property
    def outer_pid(self) -> int | None:
        """The ``unshare`` that waits for that process; None where the machine was killed."""
        return None if self._first is None else self._first.outer_pid

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> NodeProcess:
        """Start a command here, in the lab's directory; ``env`` is added to this process's variables."""
        log = log or self.lab.directory / f"{self._port}-{len(self.processes)}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                self._entering(argv, cwd),
                env={**os.environ, "TMPDIR": "/dev/shm", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = NodeProcess(popen, log)
        self.processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end; its stdout and stderr are kept apart."""
        return subprocess.run(
            self._entering(argv, cwd),
            env={**os.environ, "TMPDIR": "/dev/shm", **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def _entering(self, argv: Sequence[str | Path], cwd: Path | None) -> list[str]:
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES]
        return [str(word) for word in (*enter, *CHANGE_DIRECTORY, cwd or self.lab.directory, *argv)]

    def kill(self) -> None:
        """``kill -9`` everything here at once; returns when all of it is gone.

        The kernel still closes the dead processes' connections, so peers learn of it. A machine without
        power says nothing: that is :meth:`cut`, then this.
        """
        first, self._first = self._first, None
        if first is not None:
            with suppress(ProcessLookupError):
                os.kill(first.pid, signal.SIGKILL)
        # The node's first process ends once none of the others is left, not even as a zombie of this one.
        for process in self.processes:
            process.unfreeze()
            process.wait()
        if first is not None:
            first.kill()

    def end_processes(self, but_for: Iterable[NodeProcess] = ()) -> None:
        """``kill -9`` what was started here, with all that those have started, and forget it."""
        kept = set(but_for)
        for process in self.processes:
            if process not in kept and process.poll() is None:
                for each in process.tree():
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                process.unfreeze()
                process.wait()
        self.processes = [process for process in self.processes if process in kept]

    def add_interface(self, name: str, address: str) -> None:
        """Give the machine an interface on a second network, which those of the same name share, until it is killed."""
        port = f"{self._port}-{name}"
        # On the first switch, either interface would answer for both addresses.
        self.lab.switch.run(
            f"ip link show {name} 2>/dev/null || ip link add {name} type bridge forward_delay 0 && "
            f"ip link set {name} up && ip link add {port} type veth peer name {name} netns {self.pid} && "
            f"ip link set {port} master {name} up"
        )
        self._command(f"ip addr add {address}/24 dev {name} && ip link set {name} up")

    def remove_interface(self, name: str) -> None:
        """Take away what :meth:`add_interface` gave."""
        self._command(f"ip link del {name}")

    def cut(self) -> None:
        """Pull this node's cable: packets are lost both ways, and nobody is told."""
        self.lab.switch.run(f"ip link set {self._port} down")

    def heal(self) -> None:
        """Put the cable back."""
        self.lab.switch.run(f"ip link set {self._port} up")

    def cut_from(self, *others: Node) -> None:
        """Lose all packets between this node and these others, both ways, as a cable that is cut does."""
        for one, other in ((one, other) for node in others for one, other in ((self, node), (node, self))):
            one._command(f"ip neigh replace {other.address} lladdr {_NOBODYS_MAC} nud permanent dev eth0")

    def heal_with(self, *others: Node) -> None:
        """End what :meth:`cut_from` began."""
        for one, other in ((one, other) for node in others for one, other in ((self, node), (node, self))):
            one._command(f"ip neigh del {other.address} dev eth0")

    def _command(self, script: str) -> None:
        assert self._first is not None, f"{self.name} was killed"
        self._first.run(script)

    def slow(self, mbit_per_s: float | None) -> None:
        """Let no more than this reach the node; None for no limit. (Not every kernel can delay packets.)"""
        change = f"replace dev {self._port} root tbf rate {mbit_per_s}mbit burst 32kb latency 1s"
        self.lab.switch.run(f"tc qdisc {change if mbit_per_s is not None else f'del dev {self._port} root'}")


class Lab:
    """Nodes on a switch of their own.

    Args:
        directory: for logs, and the commands' working directory.
        count: nodes to start.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.hosts = directory / "hosts"
        self.nodes = [Node(self, index) for index in range(count)]
        names = [f"{node.address} {node.name}" for node in self.nodes]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        self.switch = _Holder(["unshare", "--net", "sh", "-c", _READY])
        try:
            for node in self.nodes:
                node.boot()
        except BaseException:
            self.end()
            raise

    def pids(self) -> set[int]:
        """This process's children that the lab consists of."""
        held = [node.outer_pid for node in self.nodes]
        started = [process.outer_pid for node in self.nodes for process in node.processes]
        return {pid for pid in (*held, *started, self.switch.outer_pid) if pid is not None}

    def end(self) -> None:
        """Kill all nodes and the switch, and wait until nothing of them is left."""
        for node in self.nodes:
            node.kill()
        self.switch.kill()


class _Holder:
    """The process that a set of namespaces lives with. It ends with its input, thus with this process."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        try:
            if self._popen.stdout.readline() != "ready\n":
                raise RuntimeError(f"{argv} did not start: {self._popen.stderr.read()}")
            # unshare --fork waits for the first process of the new namespaces.
            below = psutil.Process(self._popen.pid).children(recursive=True)
            self.pid = below[-1].pid if below else self._popen.pid
        except BaseException:
            self._close(self._popen.pid)
            raise

    @property
    def outer_pid(self) -> int:
        return self._popen.pid

    def run(self, script: str) -> None:
        """Run a short shell script in its network."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "sh", "-c", script]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{script}: {done.stderr}"

    def kill(self) -> None:
        """Kill it, and with it all processes of its namespaces; wait for their end."""
        self._close(self.pid)

    def _close(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._popen.wait(30)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


def why_not() -> str | None:
    """What this machine lacks for a lab; None where it lacks nothing."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a lab of several machines needs {', '.join(missing)} (on Debian: apt-get install iproute2)"
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        return f"a lab of several machines needs root and namespaces: {tried.stderr.strip()}"
    return None


Machines = Callable[[int], list[Node]]
"""The ``machines`` fixture: a number of nodes -> the nodes, on a switch of their own."""
