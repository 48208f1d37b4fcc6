"""Planning and injection of faults."""

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
from paceline.core.files import WRITE_FAULTS, write_atomically
from paceline.elastic.agent import AgentConnection, AgentGone, RunStatus, WorkerStatus
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory

# --- Writes that fail, as on a full or broken disk ---


@dataclass(frozen=True)
class WriteFaults:
    """Switches write faults on and off for jobs whose environment names ``file``."""

    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variable to add to the job's environment."""
        return {WRITE_FAULTS: str(self.file.absolute())}

    def arm(self, kind: Literal["enospc", "eio"]) -> None:
        write_atomically(self.file, kind.encode())

    def disarm(self) -> None:
        self.file.unlink(missing_ok=True)


# --- Damage to a run's checkpoints ---


def identity(checkpoint: Path) -> tuple[str, int]:
    """Identify a checkpoint, as distinct from a later one with the same name."""
    return checkpoint.name, checkpoint.stat().st_ino


def intact(directory: Path, damaged: Collection[tuple[str, int]]) -> list[Path]:
    """Return the checkpoints that were not damaged, newest first."""
    found = []
    for path in scan(directory):
        with suppress(FileNotFoundError):  # the run may have just deleted it
            if identity(path) not in damaged:
                found.append(path)
    return found


def damage(checkpoint: Path, kind: Literal["bitflip", "truncate"], choice: int) -> str:
    """Flip one bit of one file, or truncate it, and return a description."""
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    path = files[choice % len(files)]
    position = (choice >> 8) % path.stat().st_size
    with path.open("r+b") as file:
        if kind == "truncate":
            file.truncate(position)
            return f"{checkpoint.name}/{path.name} after byte {position:,}"
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << choice % 8]))
        return f"bit {choice % 8} of byte {position:,} of {checkpoint.name}/{path.name}"


# --- Planning: a pure function of the seed, so that a run under faults can be repeated ---


Kind = Literal["kill", "stop", "slow", "leave", "join", "enospc", "eio", "bitflip", "truncate"]
KINDS: tuple[Kind, ...] = get_args(Kind)

IN_WORDS: dict[Kind, str] = {
    "kill": "a worker is killed (SIGKILL)",
    "stop": "a worker is stopped (SIGSTOP), and never continues",
    "slow": "a worker runs at a third of its speed for a second, and must not be killed",
    "leave": "workers are removed (paceline scale)",
    "join": "workers are added (paceline scale)",
    "enospc": "the disk is full until a save has failed",
    "eio": "the disk fails until a save has failed",
    "bitflip": "a bit of the newest checkpoint is flipped, and all workers are killed",
    "truncate": "a file of the newest checkpoint is truncated, and all workers are killed",
}

_FIRST, _LAST = 0.04, 0.85  # as shares of the steps; the rest is for the last recovery
MIN_STEPS_PER_FAULT = 4  # a fault, and the steps before the next


@dataclass(frozen=True)
class Fault:
    """A planned fault.

    Attributes:
        step: injected once this many steps are done.
        choice: a random number that selects the target among those that exist then.
        target: for leave and join, the new number of workers.
    """

    number: int
    kind: Kind
    step: int
    choice: int
    target: int | None = None


def plan_faults(kinds: Sequence[Kind], *, faults: int, seed: int, nproc: int, steps: int) -> tuple[Fault, ...]:
    """Spread faults evenly over a run's steps, and the kinds evenly over the faults.

    Every sequence of as many faults as kinds contains each kind once, in a shuffled order. Two rules apply:
    a join follows a leave, and a stop follows a join if there are both, because then the joining worker
    loses no step while the others wait.

    Args:
        seed: decides the order, the steps and the choices.
        nproc: initial and largest number of workers.
    """
    check_kinds(kinds, nproc)
    if steps < MIN_STEPS_PER_FAULT * faults:
        raise ConfigError(
            f"--faults {faults} is too many for {steps} steps: at most {steps // MIN_STEPS_PER_FAULT} fit. "
            f"Use fewer faults or a longer run: --max-steps {MIN_STEPS_PER_FAULT * faults}."
        )
    order = _order(kinds, faults, random.Random(f"{seed} kinds"))
    targets = _targets(order, nproc, random.Random(f"{seed} targets"))
    rng = random.Random(f"{seed} steps")
    width = (_LAST - _FIRST) * steps / faults
    return tuple(
        Fault(
            number=number,
            kind=kind,
            step=max(1, round(_FIRST * steps + (number + rng.random()) * width)),
            choice=rng.getrandbits(32),
            target=targets[number],
        )
        for number, kind in enumerate(order)
    )


def check_kinds(kinds: Sequence[Kind], nproc: int) -> None:
    """Refuse faults that are not possible with so many processes on one node."""
    if not kinds:
        raise ConfigError(f"--kinds must name at least one of {', '.join(KINDS)}.")
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--kinds must name each kind once, but is {','.join(kinds)}.")
    if ("leave" in kinds) != ("join" in kinds):
        raise ConfigError("--kinds leave and join need each other: name both, or neither.")
    if "leave" in kinds and nproc < 2:
        raise ConfigError(f"--kinds leave needs a worker that stays: --nproc must be at least 2, but is {nproc}.")


def _order(kinds: Sequence[Kind], faults: int, rng: random.Random) -> list[Kind]:
    order: list[Kind] = []
    while len(order) < faults:
        block = list(kinds[: faults - len(order)])
        if "join" in block and "leave" not in block:
            block[block.index("join")] = "leave"
        rng.shuffle(block)
        if "join" in block:
            leave, join = sorted((block.index("leave"), block.index("join")))
            block[leave], block[join] = "leave", "join"
            if "stop" in block:
                block.remove("stop")
                block.insert(block.index("join") + 1, "stop")
        order += block
    return order


def _targets(order: Sequence[Kind], nproc: int, rng: random.Random) -> list[int | None]:
    """Choose the number of workers after each leave and join."""
    targets: list[int | None] = []
    count = nproc
    for kind, following in zip(order, (*order[1:], None), strict=True):
        if kind == "leave":
            # A single worker has no survivor, so it is left alone only until the next join.
            count = rng.randrange(1 if following == "join" else min(2, count - 1), count)
        elif kind == "join":
            count = rng.randrange(count + 1, nproc + 1)
        targets.append(count if kind in ("leave", "join") else None)
    return targets


# --- Injection of the planned faults into an active run, from outside, and observation of its recoveries ---
#
# The injector uses only the agent's answers and the run's directory. It injects a fault once its step is
# reached, the previous fault has been recovered from, and a target exists.


_POLL_S = 0.01
_SLOW_S = 1.0  # how long a worker is slowed down
_STOPPED_POLLS, _PERIOD_POLLS = 4, 6  # stopped for 4 of every 6 polls
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Injection:
    """An injected fault: at a Unix time, when so many steps were known to be finished."""

    fault: Fault
    step: int
    at: float
    pids: tuple[int, ...]
    recovered_at: float | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.recovered_at is None else self.recovered_at - self.at


@dataclass
class FaultInjector:
    """A driver that injects planned faults into an active run."""

    directory: RunDirectory
    agent: AgentConnection
    plan: Sequence[Fault]
    steps: int
    write_faults: WriteFaults
    tell: Callable[[str], None]
    injected: list[Injection] = field(default_factory=list)
    _gathered: int = -1  # the last generation that was left in order to gather
    _damaged: set[tuple[str, int]] = field(default_factory=set)
    _throttled: Iterator[bool] | None = None

    def run(self) -> None:
        """Inject faults until the job has ended."""
        try:
            with suppress(AgentGone):
                while True:
                    self._poll(self.agent.status())
                    time.sleep(_POLL_S)
        finally:
            self.write_faults.disarm()
            if self._throttled is not None:
                self._throttled.close()  # type: ignore[attr-defined]
            self._note_recoveries(None)

    def _poll(self, status: RunStatus) -> None:
        if self._throttled is not None and next(self._throttled, True):
            self._throttled = None
        self._note_recoveries(status)
        if status.stopping or not status.whole:
            return
        missing = len(status.ranks) < status.target
        if any(i.recovered_at is None and (i.fault.kind != "join" or not missing) for i in self.injected):
            return
        if len(self.injected) == len(self.plan):
            if missing and not self._all_recovered():
                self._gather(status)
            return
        fault = self.plan[len(self.injected)]
        if not fault.step <= status.step < self.steps:
            return
        if self._can_inject(fault, status):
            with suppress(ConfigError):  # the run is about to end, and refuses commands
                self._inject(fault, status)
        elif missing:
            self._gather(status)

    def _gather(self, status: RunStatus) -> None:
        """Have the agent wait for the workers that the next fault needs, since the run may end before they join."""
        if self._gathered < status.generation:
            self._gathered = status.generation
            self.agent.gather()

    def _all_recovered(self) -> bool:
        return all(injection.recovered_at is not None for injection in self.injected)

    def _can_inject(self, fault: Fault, status: RunStatus) -> bool:
        match fault.kind:
            case "kill" | "stop" | "slow":
                # If killed workers will come back, one must survive; a single worker cannot.
                return len(status.ranks) > 1 or status.target == 1
            case "leave" | "join":
                return self._all_recovered()
            case "bitflip" | "truncate":
                return len(intact(self.directory.checkpoints, self._damaged)) > 1
        return True

    def _inject(self, fault: Fault, status: RunStatus) -> None:
        victim = status.ranks[fault.choice % len(status.ranks)]
        target = f"rank {victim.rank} (worker {victim.local_index})"
        pids: tuple[int, ...] = () if victim.pid is None else (victim.pid,)
        at = time.time()
        match fault.kind:
            case "kill" | "stop":
                _send(victim, _SIGNALS[fault.kind])
            case "slow":
                self._throttled = _throttle(victim)
            case "leave" | "join":
                assert fault.target is not None
                target, pids = f"{status.target} to {fault.target} workers", _pids(status)
                self.agent.scale(nproc=fault.target)
            case "bitflip" | "truncate":
                newest = intact(self.directory.checkpoints, self._damaged)[0]
                self._damaged.add(identity(newest))
                target, pids = damage(newest, fault.kind, fault.choice), _pids(status)
                for worker in status.workers:
                    _send(worker, signal.SIGKILL)
            case "enospc" | "eio":
                target, pids = "every write of a checkpoint", ()
                self.write_faults.arm(fault.kind)
        self.injected.append(Injection(fault, status.step, at, pids))
        self.tell(f"step {status.step}: {fault.kind} {target}")

    def _note_recoveries(self, status: RunStatus | None) -> None:
        """Note which faults the run has recovered from; with None, the job has ended."""
        for injection in self.injected:
            if injection.recovered_at is None:
                injection.recovered_at = self._recovered_at(injection, status)

    def _recovered_at(self, injection: Injection, status: RunStatus | None) -> float | None:
        match injection.fault.kind:
            case "kill" | "stop" | "bitflip" | "truncate":
                return self._rejoined_at(injection)
            case "enospc" | "eio":
                return self._saved_at(injection)
        if status is None or not status.whole:
            return None
        now, pids = time.time(), _pids(status)
        match injection.fault.kind:
            case "slow":
                has_ended = self._throttled is None and status.step > injection.step
                return now if has_ended and set(injection.pids) <= set(pids) else None
            case "leave":
                return now if len(status.ranks) <= status.target else None
            case _:
                joined = set(pids) - set(injection.pids)
                return now if joined and len(status.ranks) >= status.target else None

    def _rejoined_at(self, injection: Injection) -> float | None:
        """Return when all members trained in the first group after the end of the targets."""
        events = self.directory.read_events()
        ends = [n for n, e in enumerate(events) if e["event"] == "fault" and e.get("pid") in injection.pids]
        if not ends:
            return None
        return next((e["time"] for e in events[ends[-1] :] if e["event"] == "joined"), None)

    def _saved_at(self, injection: Injection) -> float | None:
        """Return when a checkpoint was saved after one that could not be saved."""
        events = [e for e in self.directory.read_events() if e["time"] > injection.at]
        failed = next((n for n, e in enumerate(events) if e["event"] == "checkpoint failed"), None)
        if failed is None:
            return None
        self.write_faults.disarm()
        return next((e["time"] for e in events[failed:] if e["event"] == "checkpoint"), None)


def _pids(status: RunStatus) -> tuple[int, ...]:
    return tuple(worker.pid for worker in status.ranks if worker.pid is not None)


def _send(worker: WorkerStatus, number: int) -> None:
    if worker.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


def _throttle(worker: WorkerStatus) -> Iterator[bool]:
    """Stop and continue a worker in turns, one per poll, for a while; finally continue it."""
    until = time.monotonic() + _SLOW_S
    poll = 0
    try:
        while time.monotonic() < until:
            _send(worker, signal.SIGSTOP if poll % _PERIOD_POLLS < _STOPPED_POLLS else signal.SIGCONT)
            poll += 1
            yield False
    finally:
        _send(worker, signal.SIGCONT)
