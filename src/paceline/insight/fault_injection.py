"""Faults, planned and injected."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from paceline.core.errors import ConfigError
from paceline.core.files import WriteFaults
from paceline.elastic.control import AgentConnection, AgentGone, RunStatus, WorkerStatus
from paceline.runs.directory import RunDirectory

# --- What can be done to the checkpoints of a run from outside ---


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that have their final names, the newest first."""
    return sorted(directory.glob("step-*-v*"), key=lambda path: path.name.rpartition("-v")[2], reverse=True)


def identity(checkpoint: Path) -> tuple[str, int]:
    """Tells a checkpoint from one that is written again under its name."""
    return checkpoint.name, checkpoint.stat().st_ino


def intact(directory: Path, damaged: Collection[tuple[str, int]]) -> list[Path]:
    """Those that nobody has damaged, the newest first."""
    found = []
    for path in checkpoints(directory):
        with suppress(FileNotFoundError):  # the run has just deleted it
            if identity(path) not in damaged:
                found.append(path)
    return found


def flip_bit(checkpoint: Path, choice: int) -> str:
    """Flip one bit of one file; say which."""
    path = _file(checkpoint, choice)
    position = (choice >> 8) % path.stat().st_size
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << choice % 8]))
    return f"bit {choice % 8} of byte {position:,} of {checkpoint.name}/{path.name}"


def truncate(checkpoint: Path, choice: int) -> str:
    """Cut one file short; say which and where."""
    path = _file(checkpoint, choice)
    length = (choice >> 8) % path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(length)
    return f"{checkpoint.name}/{path.name} after byte {length:,}"


def _file(checkpoint: Path, choice: int) -> Path:
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    return files[choice % len(files)]


# --- Which fault comes when: a pure function of the seed, so that a run under faults can be had again ---


Kind = Literal["kill", "stop", "slow", "leave", "join", "enospc", "eio", "bitflip", "truncate", "partition"]
KINDS: tuple[Kind, ...] = get_args(Kind)

IN_WORDS: dict[Kind, str] = {
    "kill": "a worker is killed (SIGKILL)",
    "stop": "a worker is stopped (SIGSTOP), and never goes on",
    "slow": "a worker gets a third of the time for a second, and must not be taken for dead",
    "leave": "workers are sent home (paceline scale)",
    "join": "workers are added (paceline scale)",
    "enospc": "the disk is full until a save has failed",
    "eio": "the disk fails until a save has failed",
    "bitflip": "a bit of the newest checkpoint flips, and all workers are killed",
    "truncate": "a file of the newest checkpoint is cut, and all workers are killed",
    "partition": "machines do not reach each other",
}

_FIRST, _LAST = 0.04, 0.85  # of the steps; what is left at the end is for the last recovery
LEAST_STEPS = 4  # a fault, and what must be trained before the next


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: from 0, in the order in which they come.
        kind: what happens.
        step: it comes once so many steps are done.
        choice: a large number that picks who or what is hit, among what is there then.
        target: for leave and join, how many workers there are to be.
    """

    number: int
    kind: Kind
    step: int
    choice: int
    target: int | None = None


def plan_faults(kinds: Sequence[Kind], *, faults: int, seed: int, nproc: int, steps: int) -> tuple[Fault, ...]:
    """Spread faults evenly over a run's steps, and the kinds evenly over the faults.

    Each run of as many faults as there are kinds has each kind once, in a shuffled order. Two things are not
    left to chance: who joins has left before, and a stop comes right after a join, where there are both,
    because all others wait meanwhile and the one that joins loses no step.

    Args:
        kinds: what may happen.
        faults: how often.
        seed: decides the order, the steps and the choices.
        nproc: workers at the start, and at most.
        steps: of the whole run.

    Raises:
        ConfigError: such faults cannot be, or not so many.
    """
    check_kinds(kinds, nproc)
    if steps < LEAST_STEPS * faults:
        raise ConfigError(
            f"--faults {faults} do not fit into {steps} steps: at most {steps // LEAST_STEPS} do. "
            f"Ask for fewer, or for a longer run: --max-steps {LEAST_STEPS * faults}."
        )
    order = _order(kinds, faults, random.Random(f"{seed} kinds"))
    targets = _targets(order, nproc, random.Random(f"{seed} targets"))
    chance = random.Random(f"{seed} steps")
    width = (_LAST - _FIRST) * steps / faults
    return tuple(
        Fault(
            number=number,
            kind=kind,
            step=max(1, round(_FIRST * steps + (number + chance.random()) * width)),
            choice=chance.getrandbits(32),
            target=targets[number],
        )
        for number, kind in enumerate(order)
    )


def check_kinds(kinds: Sequence[Kind], nproc: int) -> None:
    """Refuse what cannot be done with so many processes on one machine.

    Raises:
        ConfigError: says why.
    """
    if not kinds:
        raise ConfigError(f"--kinds must name at least one of {', '.join(KINDS)}.")
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--kinds must name each kind once, but is {','.join(kinds)}.")
    if "partition" in kinds:
        raise ConfigError("--kinds partition needs several machines; these workers are all on one.")
    if ("leave" in kinds) != ("join" in kinds):
        raise ConfigError("--kinds leave and join belong together: who has left can join, and the other way round.")
    if "leave" in kinds and nproc < 2:
        raise ConfigError(f"--kinds leave needs somebody who stays: --nproc 2 or more, not {nproc}.")


def _order(kinds: Sequence[Kind], faults: int, chance: random.Random) -> list[Kind]:
    order: list[Kind] = []
    while len(order) < faults:
        block = list(kinds[: faults - len(order)])
        if "join" in block and "leave" not in block:
            block[block.index("join")] = "leave"
        chance.shuffle(block)
        if "join" in block:
            leave, join = sorted((block.index("leave"), block.index("join")))
            block[leave], block[join] = "leave", "join"
            if "stop" in block:
                block.remove("stop")
                block.insert(block.index("join") + 1, "stop")
        order += block
    return order


def _targets(order: Sequence[Kind], nproc: int, chance: random.Random) -> list[int | None]:
    """The number of workers that each leave and join brings about."""
    targets: list[int | None] = []
    now = nproc
    for kind, following in zip(order, (*order[1:], None), strict=True):
        if kind == "leave":
            # One worker alone has no survivor: it is left alone only until somebody joins.
            now = chance.randrange(1 if following == "join" else min(2, now - 1), now)
        elif kind == "join":
            now = chance.randrange(now + 1, nproc + 1)
        targets.append(now if kind in ("leave", "join") else None)
    return targets


# --- Injects the planned faults into a run at work, from outside, and sees whether it recovers from each ---
#
# It knows of the run what anybody can know: what the agent answers, and what is in the run's directory. A
# fault comes once its step is reached, the one before has been recovered from, and there is what it hits.


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
class FaultInjector:
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

    def _look(self, status: RunStatus) -> None:
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

    def _gather(self, status: RunStatus) -> None:
        """What is due needs more workers: they are waited for, else the run may end before they are there."""
        self._gathered = status.generation
        self.agent.gather()

    def _all_recovered(self) -> bool:
        return all(injection.recovered_at is not None for injection in self.injected)

    def _can_come(self, fault: Fault, status: RunStatus) -> bool:
        match fault.kind:
            case "kill" | "stop" | "slow":
                # Where others are to come back, somebody survives; alone, it is all or nothing.
                return len(status.members) > 1 or status.target == 1
            case "leave" | "join":
                return self._all_recovered()
            case "bitflip" | "truncate":
                return len(intact(self.directory.checkpoints, self._damaged)) > 1
        return True

    def _inject(self, fault: Fault, status: RunStatus) -> None:
        victim = status.members[fault.choice % len(status.members)]
        who = f"rank {victim.rank} (slot {victim.local_index})"
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
                newest = intact(self.directory.checkpoints, self._damaged)[0]
                self._damaged.add(identity(newest))
                harm = flip_bit if fault.kind == "bitflip" else truncate
                who, pids = harm(newest, fault.choice), _pids(status)
                for worker in status.workers:
                    _send(worker, signal.SIGKILL)
            case "enospc" | "eio":
                who, pids = "every write of a checkpoint", ()
                self.write_faults.arm(fault.kind)
        self.injected.append(Injection(fault, status.step, at, who, pids, status.generation))
        self.tell(f"step {status.step}: {fault.kind} {who}")

    def _settle(self, status: RunStatus | None) -> None:
        """Note which faults the run has recovered from; None: the job has ended."""
        for injection in self.injected:
            if injection.recovered_at is None:
                injection.recovered_at = self._recovered_at(injection, status)

    def _recovered_at(self, injection: Injection, status: RunStatus | None) -> float | None:
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


def _pids(status: RunStatus) -> tuple[int, ...]:
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
