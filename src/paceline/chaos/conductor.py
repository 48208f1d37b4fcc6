"""Injects the planned faults into a run at work, from outside, and sees whether it recovers from each.

It knows of the run what anybody can know: what the agent answers, and what is in the run's directory. A
fault comes once its step is reached, the one before has been recovered from, and there is what it hits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.agent.control_socket import AgentConnection, AgentGone, Status, WorkerStatus
from paceline.chaos import damage
from paceline.chaos.plan import Fault
from paceline.checkpoint.write_faults import WriteFaults
from paceline.errors import ConfigError
from paceline.run_directory import RunDirectory

_LOOK_S = 0.01
_SLOW_S = 1.0  # how long a worker is slowed down
_SLOW_STOPPED, _SLOW_PERIOD = 4, 6  # of so many looks, stopped for so many
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Injection:
    """A fault that came.

    Attributes:
        fault: what was planned.
        step: how many steps were done, as far as was known.
        at: when, Unix time.
        what: who or what was hit, in words.
        pids: of the workers hit.
        generation: of the view that was hit.
        recovered_at: Unix time; None while the run has not recovered.
    """

    fault: Fault
    step: int
    at: float
    what: str
    pids: tuple[int, ...]
    generation: int
    recovered_at: float | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took to recover."""
        return None if self.recovered_at is None else self.recovered_at - self.at


@dataclass
class Conductor:
    """Takes a run through its faults.

    Args:
        directory: the run's.
        agent: of the run.
        plan: the faults, in order.
        steps: of the whole run; once they are done, no fault comes any more.
        write_faults: makes the workers' writes fail.
        tell: called with a sentence about each fault.

    Attributes:
        injected: those that came so far.
    """

    directory: RunDirectory
    agent: AgentConnection
    plan: Sequence[Fault]
    steps: int
    write_faults: WriteFaults
    tell: Callable[[str], None]
    injected: list[Injection] = field(default_factory=list)
    _gathered: int = -1  # the last view that was left in order to gather
    _damaged: set[tuple[str, int]] = field(default_factory=set)
    _throttled: Iterator[bool] | None = None

    def run(self) -> None:
        """Conduct until the job has ended."""
        try:
            with suppress(AgentGone):
                while True:
                    self._look(self.agent.status())
                    time.sleep(_LOOK_S)
        finally:
            self.write_faults.disarm()
            if self._throttled is not None:
                self._throttled.close()  # type: ignore[attr-defined]
            self._settle(None)

    def _look(self, status: Status) -> None:
        if self._throttled is not None and next(self._throttled, True):
            self._throttled = None
        self._settle(status)
        if status.stopping or not status.whole:
            return
        missing = len(status.members) < status.target
        if any(i.recovered_at is None and (i.fault.kind != "join" or not missing) for i in self.injected):
            return
        if len(self.injected) == len(self.plan):
            if missing and self._gathered < status.generation and not self._all_recovered():
                self._gather(status)
            return
        fault = self.plan[len(self.injected)]
        if not fault.step <= status.step < self.steps:
            return
        if self._can_come(fault, status):
            with suppress(ConfigError):  # the run is about to end, and takes no orders
                self._inject(fault, status)
        elif missing and self._gathered < status.generation:
            self._gather(status)

    def _gather(self, status: Status) -> None:
        """What is due needs more workers: they are waited for, else the run may end before they are there."""
        self._gathered = status.generation
        self.agent.gather()

    def _all_recovered(self) -> bool:
        return all(injection.recovered_at is not None for injection in self.injected)

    def _can_come(self, fault: Fault, status: Status) -> bool:
        match fault.kind:
            case "kill" | "stop" | "slow":
                # Where others are to come back, somebody survives; alone, it is all or nothing.
                return len(status.members) > 1 or status.target == 1
            case "leave" | "join":
                return self._all_recovered()
            case "bitflip" | "truncate":
                return len(damage.good_ones(self.directory.checkpoints, self._damaged)) > 1
        return True

    def _inject(self, fault: Fault, status: Status) -> None:
        victim = status.members[fault.choice % len(status.members)]
        who = f"rank {victim.rank} (slot {victim.slot})"
        pids: tuple[int, ...] = () if victim.pid is None else (victim.pid,)
        at = time.time()
        match fault.kind:
            case "kill" | "stop":
                _send(victim, _SIGNALS[fault.kind])
            case "slow":
                self._throttled = _throttle(victim)
            case "leave" | "join":
                assert fault.target is not None
                who, pids = f"{status.target} to {fault.target} workers", _pids(status)
                self.agent.scale(nproc=fault.target)
            case "bitflip" | "truncate":
                newest = damage.good_ones(self.directory.checkpoints, self._damaged)[0]
                self._damaged.add(damage.identity(newest))
                harm = damage.flip_bit if fault.kind == "bitflip" else damage.truncate
                who, pids = harm(newest, fault.choice), _pids(status)
                for worker in status.workers:
                    _send(worker, signal.SIGKILL)
            case "enospc" | "eio":
                who, pids = "every write of a checkpoint", ()
                self.write_faults.arm(fault.kind)
        self.injected.append(Injection(fault, status.step, at, who, pids, status.generation))
        self.tell(f"step {status.step}: {fault.kind} {who}")

    def _settle(self, status: Status | None) -> None:
        """Note which faults the run has recovered from; None: the job has ended."""
        for injection in self.injected:
            if injection.recovered_at is None:
                injection.recovered_at = self._recovered_at(injection, status)

    def _recovered_at(self, injection: Injection, status: Status | None) -> float | None:
        match injection.fault.kind:
            case "kill" | "stop" | "bitflip" | "truncate":
                return self._next_view(injection)
            case "enospc" | "eio":
                return self._saved_again(injection)
        if status is None or not status.whole:
            return None
        now, pids = time.time(), _pids(status)
        match injection.fault.kind:
            case "slow":
                is_over = self._throttled is None and status.step > injection.step
                return now if is_over and set(injection.pids) <= set(pids) else None
            case "leave":
                return now if len(status.members) <= status.target else None
            case _:
                joined = set(pids) - set(injection.pids)
                return now if joined and len(status.members) >= status.target else None

    def _next_view(self, injection: Injection) -> float | None:
        """When all members of the next view after the victims' end trained."""
        events = self.directory.read_events()
        ends = [n for n, e in enumerate(events) if e["event"] == "fault" and e.get("pid") in injection.pids]
        if not ends:
            return None
        return next((e["time"] for e in events[ends[-1] :] if e["event"] == "joined"), None)

    def _saved_again(self, injection: Injection) -> float | None:
        """When a checkpoint was saved again after one that could not be."""
        events = [e for e in self.directory.read_events() if e["time"] > injection.at]
        failed = next((n for n, e in enumerate(events) if e["event"] == "checkpoint failed"), None)
        if failed is None:
            return None
        self.write_faults.disarm()
        return next((e["time"] for e in events[failed:] if e["event"] == "checkpoint"), None)


def _pids(status: Status) -> tuple[int, ...]:
    return tuple(member.pid for member in status.members if member.pid is not None)


def _send(worker: WorkerStatus, number: int) -> None:
    if worker.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


def _throttle(worker: WorkerStatus) -> Iterator[bool]:
    """Stop and continue a worker in turns, one at each look; ends after a while, with the worker going on."""
    until = time.monotonic() + _SLOW_S
    look = 0
    try:
        while time.monotonic() < until:
            _send(worker, signal.SIGSTOP if look % _SLOW_PERIOD < _SLOW_STOPPED else signal.SIGCONT)
            look += 1
            yield False
    finally:
        _send(worker, signal.SIGCONT)
