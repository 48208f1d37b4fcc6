"""A series of faults on the nodes of a run, and on etcd's members: planned from a seed, injected, and waited for.

Every fault meets a run of all its nodes, and is over when all of them train again. The run trains meanwhile, a few
steps a second, so that it lasts as long as the faults do.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

import psutil
from tests.elastic.recovery_nodes.runs import OPTIONS, Run
from tests.lab.etcd import EtcdCluster
from tests.lab.machines import Node, NodeProcess
from tests.processes import children

from paceline.core.errors import PacelineError
from paceline.data.audit import audit

Kind = Literal["rank", "agent", "node", "freeze", "partition", "leave"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EtcdFault = Literal["", "member killed", "leader killed", "leader frozen", "two killed", "all restarted"]
NODES = 3
STEPS_PER_FAULT = 60
_LAST_STEPS = 60
_STEP_S = 0.1
_TWO_DOWN_S = 2.0


@dataclass(frozen=True)
class Fault:
    """A fault, and the return to all nodes.

    Attributes:
        kind: "rank", "agent" and "node" are killed; "freeze" stops all processes of a node; "partition" pulls its
            cable; "leave" has a node sent away.
        victim: the node's number; of "leave" it is the one that joined last.
        etcd: what happens to etcd just before. It is whole again after the return; after two members were killed,
            already two seconds later, since without most of its members no group can form.
        delay_s: time in which the run trains before it.
    """

    kind: Kind
    victim: int
    etcd: EtcdFault
    delay_s: float


def plan(seed: int, rounds: int) -> list[Fault]:
    """Return each kind of fault once a round, in a shuffled order; etcd is whole for every second one."""
    rng = random.Random(seed)
    faults = []
    for number in range(rounds):
        for index, kind in enumerate(rng.sample(KINDS, len(KINDS))):
            etcd: EtcdFault = ""
            if (index + number) % 2 == 0:
                etcd = "two killed" if kind == "rank" else rng.choice(_ANSWERING)
            faults.append(Fault(kind, rng.randrange(NODES), etcd, rng.uniform(0, 1)))
    return faults


_ANSWERING: tuple[EtcdFault, ...] = ("member killed", "leader killed", "leader frozen", "all restarted")


def steps_of(faults: Sequence[Fault]) -> int:
    return STEPS_PER_FAULT * len(faults) + _LAST_STEPS


@dataclass(frozen=True)
class Recovery:
    """How long a fault took.

    Attributes:
        reformed_s: from the fault until a group without what was lost trains.
        returned_s: from the return, such as the start of a node that joins, until all nodes train.
    """

    fault: Fault
    reformed_s: float
    returned_s: float


class Chaos:
    """The faults of one run.

    Args:
        run: with three nodes.
        faults: in their order.
    """

    def __init__(self, run: Run, faults: Sequence[Fault]) -> None:
        self._run = run
        self._faults = faults
        self._nodes = run.lab.nodes
        self._processes: dict[Node, NodeProcess] = {}
        self._gate = 0
        self._opened_at = 0.0
        self._done = 0

    def all(self) -> list[Recovery]:
        """Start the run, inject all faults, and wait for its end; the processes that are left end with 0."""
        self._begin()
        recoveries = []
        for fault in self._faults:
            recoveries.append(self._recover_from(fault))
            self._done += 1
        self._run.go_on()
        for process in self._processes.values():
            assert process.wait(600) == 0, process.text  # steps that no fault has used up are left
        report = audit(self._run.directory)
        assert report.clean, report.verdict
        assert report.steps == steps_of(self._faults)
        return recoveries

    def _begin(self) -> None:
        run, (first, *others) = self._run, self._nodes
        steps = ("--max-steps", str(steps_of(self._faults)))
        meet = ("--rdzv-endpoint", f"{first.address}:29500", "--nodes", f"1:{NODES}")
        coordinator = () if run.etcd is None else ("--coordinator", run.etcd.url)
        options = (*OPTIONS[2:], *steps, *meet, *coordinator, "--hang-timeout", "never", "--run-dir", "run")
        self._open()
        self._processes[first] = run.paceline(first, "train", "small.py:Small", *options)
        self._wait_until(run.directory.agents.exists, "the first node")
        for node in others:
            self._join(node)
        self._wait_until(lambda: self._is_whole(0.0), "all nodes")

    def _recover_from(self, fault: Fault) -> Recovery:
        pause_until = time.monotonic() + fault.delay_s
        self._wait_until(lambda: time.monotonic() > pause_until, "the time of the fault")
        etcd = self._run.etcd
        if etcd is None:
            fault = replace(fault, etcd="")
        heal_etcd = None if etcd is None else _disturb(etcd, fault.etcd)
        at = time.time()
        come_back = self._inject(fault)
        if fault.kind == "leave":
            at = max(event["time"] for event in self._run.directory.read_events() if event["event"] == "scale")
        # Who computes finds out in the next reduction.
        self._open()
        if heal_etcd is not None and fault.etcd == "two killed":
            down_until = time.monotonic() + _TWO_DOWN_S
            self._wait_until(lambda: time.monotonic() > down_until, "etcd's return")
            heal_etcd()
        self._wait_until(lambda: self._first_group_since(at, fault) is not None, f"a group after {fault}")
        reformed_at = self._first_group_since(at, fault)
        assert reformed_at is not None
        returned_at = time.time()
        come_back()
        self._wait_until(lambda: self._is_whole(at), f"all nodes after {fault}")
        if heal_etcd is not None and fault.etcd != "two killed":
            heal_etcd()
        whole_at = self._last_group()[2]
        return Recovery(fault, reformed_at - at, max(0.0, whole_at - returned_at))

    def _inject(self, fault: Fault) -> Callable[[], None]:
        """Cause a fault; return what brings the node back."""
        node = self._nodes[fault.victim]
        process = self._processes[node]
        match fault.kind:
            case "rank":
                (fork_server,) = children(process.tree()[0].pid)
                for worker in children(fork_server.pid):
                    worker.kill()
                return lambda: None
            case "agent":
                del self._processes[node]
                process.send_signal(signal.SIGKILL)
                return lambda: self._replace(node, process)
            case "node":
                del self._processes[node]
                node.kill()
                return lambda: self._reboot(node)
            case "freeze":
                frozen = process.tree()
                for each in frozen:
                    with suppress(psutil.NoSuchProcess):
                        each.suspend()
                return lambda: _thaw(process, frozen)
            case "partition":
                node.cut()
                return node.heal
            case "leave":
                return self._send_away()

    def _send_away(self) -> Callable[[], None]:
        """Have the leading node send away the one that joined last."""
        leader = self._leader()
        scale = self._run.paceline(leader, "scale", "run", "--nodes", str(NODES - 1))
        self._wait_until(lambda: self._ended() is not None, "a node to leave")
        left = self._ended()
        assert left is not None
        process = self._processes.pop(left)
        assert process.poll() == 0, process.text
        self._wait_until(lambda: scale.poll() is not None, "paceline scale")
        assert scale.poll() == 0, scale.text
        return lambda: self._join(left)

    def _ended(self) -> Node | None:
        return next((node for node, process in self._processes.items() if process.poll() is not None), None)

    def _leader(self) -> Node:
        """The node whose agent serves the run's socket, which is in the node's own /dev/shm."""
        for node in self._nodes:
            with suppress(PacelineError):
                self._run.status(node)
                return node
        raise AssertionError("no agent answers on the run's socket")

    def _replace(self, node: Node, killed: NodeProcess) -> None:
        self._wait_until(lambda: killed.poll() is not None, "the agent's end")
        self._join(node)

    def _reboot(self, node: Node) -> None:
        node.boot()
        self._join(node)

    def _join(self, node: Node) -> None:
        self._processes[node] = self._run.paceline(node, "join", "run")

    def _groups(self) -> Iterator[tuple[int, int, float]]:
        """Yield the nodes and processes of each group whose members all had the state, and when they had it."""
        directory = self._run.directory
        sizes: dict[int, tuple[int, int]] = {}
        for event in directory.read_events() if directory.events.exists() else ():
            if event["event"] == "group":
                sizes[event["generation"]] = event["nodes"], event["world_size"]
            elif event["event"] == "joined" and event["generation"] in sizes:
                yield *sizes[event["generation"]], event["time"]

    def _first_group_since(self, at: float, fault: Fault) -> float | None:
        """When the first group after a fault trained; of a fault of a whole node, the first one without it."""
        found = (when for nodes, _, when in self._groups() if when > at and (fault.kind == "rank" or nodes < NODES))
        return next(found, None)

    def _last_group(self) -> tuple[int, int, float]:
        return list(self._groups())[-1]

    def _is_whole(self, since: float) -> bool:
        groups = list(self._groups())
        return bool(groups) and groups[-1][:2] == (NODES, NODES) and groups[-1][2] > since

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def there() -> bool:
            for node, process in self._processes.items():
                assert process.poll() in (None, 0), f"{node.name} has ended:\n{process.text}"
            self._pace()
            return condition()

        self._run.wait_until(there, what)

    def _pace(self) -> None:
        """Let a step pass every so often; more slowly where few are left for the faults to come."""
        left = steps_of(self._faults) - _LAST_STEPS - self._gate
        planned = STEPS_PER_FAULT * (len(self._faults) - self._done)
        wait_s = _STEP_S if left > planned / 2 else 10 * _STEP_S
        is_reached = (self._run.path / f"held-{self._gate}").exists()
        if is_reached and time.monotonic() - self._opened_at > wait_s:
            self._open()

    def _open(self) -> None:
        """Let one more step pass."""
        self._gate += 1
        self._run.hold(self._gate)
        self._opened_at = time.monotonic()


def _thaw(process: NodeProcess, frozen: Sequence[psutil.Process]) -> None:
    for each in frozen:
        with suppress(psutil.NoSuchProcess):
            each.resume()
    process.unfreeze()


def _disturb(etcd: EtcdCluster, fault: EtcdFault) -> Callable[[], None]:
    """Cause a fault of etcd's; return what makes it whole again."""
    if not fault:
        return lambda: None
    leader = etcd.wait_for_leader()
    follower = (leader + 1) % len(etcd.machines)
    match fault:
        case "member killed":
            hit: tuple[int, ...] = (follower,)
        case "leader killed" | "leader frozen":
            hit = (leader,)
        case "two killed":
            hit = (leader, follower)
        case "all restarted":
            hit = tuple(range(len(etcd.machines)))
    if fault == "leader frozen":
        etcd.freeze(leader)
        return lambda: etcd.unfreeze(leader)
    etcd.kill(*hit)
    if fault == "all restarted":
        etcd.restart(*hit)
        return lambda: None
    return lambda: etcd.restart(*hit)


def table(recoveries: Sequence[Recovery]) -> str:
    """Return the medians of the kinds of faults with the least and the greatest, in Markdown."""
    lines = ["| fault | number | re-formed | all nodes again |", "|---|---:|---:|---:|"]
    for kind in KINDS:
        for is_whole in (True, False):
            found = [each for each in recoveries if each.fault.kind == kind and (each.fault.etcd == "") == is_whole]
            if found:
                etcd = "" if is_whole else ", etcd disturbed"
                times = (_spread([getattr(each, name) for each in found]) for name in ("reformed_s", "returned_s"))
                lines.append(f"| {kind}{etcd} | {len(found)} | {' | '.join(times)} |")
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
