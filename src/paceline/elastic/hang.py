"""Hang detection: diagnosis, records, and the watchdog."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from paceline.core.errors import HangError, PeerLostError
from paceline.core.files import write_atomically
from paceline.core.signals import describe_unresponsive, install_dump_handler, stacks_of
from paceline.elastic.group_planner import WorkerGroup
from paceline.elastic.worker_channel import StallSnapshot, take_stall_snapshot
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import exit_code_of, record_failure
from paceline.runs.rank_progress import ProgressTracker, name_stage

# --- Diagnosis: from the ranks' snapshots to one sentence. Pure ---
#
# All ranks of a world enter the same exchanges in the same order, and count them. A rank that is outside of any while
# others wait inside the next one is a root cause, and they are blocked by it. A rank that does not answer is a root
# cause in any case. If all wait, but not in the same exchange, there is no single root cause: the program makes the
# ranks disagree, and would do so again.


_DISAGREE_S = 10.0  # so that no snapshot is of a moment before the others'


@dataclass(frozen=True)
class NoResponse:
    """A rank that does not answer.

    Attributes:
        why: a predicate about its process; "" if unknown.
        stacks: of its threads, if available.
    """

    rank: int
    why: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class ExitedRank:
    """A rank whose process has ended normally."""

    rank: int


@dataclass(frozen=True)
class HangVerdict:
    """The diagnosis of a hang.

    Attributes:
        reasons: the activity of each root-cause rank; empty for a deadlock.
        blocked: the ranks that wait for them.
        certain: False if a rank still progresses or is within its time limit; then it is only slow.
    """

    reasons: Mapping[int, str]
    blocked: tuple[int, ...]
    sentence: str
    certain: bool

    @property
    def root_causes(self) -> tuple[int, ...]:
        """The root-cause ranks."""
        return tuple(sorted(self.reasons))


Told = StallSnapshot | NoResponse | ExitedRank
"""The report on one rank."""


def diagnose(reports: Sequence[Told], nodes: Mapping[int, str] | None = None) -> HangVerdict:
    """Determine which ranks block which.

    Args:
        reports: one per rank.
        nodes: the node of each rank, named if there are several.

    Returns:
        The verdict. It is certain if each root-cause rank is silent, or is overdue and has not progressed for half of
        the time in its stage; and if ranks are in different exchanges of one number.
    """
    snapshots = sorted((r for r in reports if isinstance(r, StallSnapshot)), key=lambda s: s.rank)
    silences = sorted((r for r in reports if isinstance(r, NoResponse)), key=lambda s: s.rank)
    names = _Names(nodes or {})
    inside = [s for s in snapshots if s.collective_seq > s.left]
    # A rank in a collective of the user's own code waits too, perhaps unknown to the others.
    in_users = [s for s in snapshots if s.collective_seq == s.left and s.collective]
    computing = [s for s in snapshots if s.collective_seq == s.left and not s.collective]
    last = max((s.collective_seq for s in inside), default=0)
    behind = [s for s in computing if s.collective_seq < last or not inside]
    waiting = [*inside, *in_users]
    blocked = tuple(sorted(s.rank for s in waiting))
    if silences or behind:
        reasons = {s.rank: s.why or "does not answer" for s in silences}
        reasons |= {s.rank: _reason(s, inside) for s in behind}
        clauses = [f"{names((rank,))} {reason}" for rank, reason in reasons.items()]
        clauses += _describe_blocked(names, inside, in_users, exchange_is_named=bool(behind and inside))
        return HangVerdict(reasons, blocked, "; ".join(clauses), all(map(_is_stuck, behind)))
    ahead = [s for s in computing if s not in behind]
    finished = sorted(r.rank for r in reports if isinstance(r, ExitedRank))
    sentence = _describe_deadlock(names, inside, in_users, ahead, finished)
    certain = all(map(_is_stuck, snapshots)) or _disagree(inside)
    return HangVerdict({}, blocked, sentence, certain)


def _disagree(inside: Sequence[StallSnapshot]) -> bool:
    """Return whether ranks have waited in different exchanges of one number: no time limit could help them.

    Messages between the stages of a pipeline are counted by each stage for itself.
    """
    by_number: dict[int, set[str]] = {}
    for snapshot in inside:
        if snapshot.exchange != "pipeline" and snapshot.still_s >= _DISAGREE_S:
            by_number.setdefault(snapshot.collective_seq, set()).add(snapshot.exchange)
    return any(len(exchanges) > 1 for exchanges in by_number.values())


def _is_stuck(snapshot: StallSnapshot) -> bool:
    return snapshot.overdue and snapshot.still_s >= snapshot.stage_s / 2


def _reason(snapshot: StallSnapshot, inside: Sequence[StallSnapshot]) -> str:
    """Describe what a root-cause rank has not done, and its location."""
    awaited = next((s for s in inside if s.collective_seq == snapshot.collective_seq + 1), None)
    missing = (
        f"has not entered {_exchange(awaited)}"
        if awaited is not None
        else f"has been at {_stage(snapshot)} for {snapshot.stage_s:.0f} s"
    )
    return f"{missing}: {_location(snapshot)}"


def _location(snapshot: StallSnapshot) -> str:
    if snapshot.helper:
        return f"it waits for its {snapshot.helper}"
    text = f"it is in {snapshot.where}" if snapshot.where else f"it is at {snapshot.phase}"
    return text + (f", inside {snapshot.inside}" if snapshot.inside else "")


def _describe_blocked(
    names: _Names, inside: Sequence[StallSnapshot], in_users: Sequence[StallSnapshot], exchange_is_named: bool
) -> list[str]:
    """Describe the blocked ranks; ``exchange_is_named``: the sentence already names the exchange."""
    clauses = []
    groups = _by_exchange(inside)
    for exchange, ranks in groups.items():
        where = "" if exchange_is_named and len(groups) == 1 else f" in {exchange}"
        clauses.append(f"{names(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it{where}")
    clauses += [f"{names((s.rank,))} waits in {s.collective}, called by {s.where}" for s in in_users]
    return clauses


def _describe_deadlock(
    names: _Names,
    inside: Sequence[StallSnapshot],
    in_users: Sequence[StallSnapshot],
    ahead: Sequence[StallSnapshot],
    finished: Sequence[int],
) -> str:
    clauses = [
        f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} in {where}"
        for where, ranks in _by_exchange(inside).items()
    ]
    clauses += [f"{names((s.rank,))} is in {s.collective}, called by {s.where}" for s in in_users]
    clauses += [f"{names((s.rank,))} has left it, and: {_location(s)}" for s in ahead]
    clauses += [f"{names((rank,))} has finished" for rank in finished]
    if len(clauses) == 1:
        return f"{clauses[0]}, and none of them progresses: their messages do not arrive"
    return (
        f"the ranks wait for each other: {'; '.join(clauses)}. "
        "All of them must run the same exchanges in the same order, independent of rank and data"
    )


def _by_exchange(inside: Sequence[StallSnapshot]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for snapshot in inside:
        name = _exchange(snapshot)
        ranks[name] = (*ranks.get(name, ()), snapshot.rank)
    return ranks


def _exchange(snapshot: StallSnapshot) -> str:
    return f"{snapshot.exchange} {snapshot.collective_seq} of {_stage(snapshot)}"


def _stage(snapshot: StallSnapshot) -> str:
    return name_stage(snapshot.stage, snapshot.step)


class _Names:
    """Formats ranks: "rank 3 on node b", "ranks 0-2 and 5"."""

    def __init__(self, nodes: Mapping[int, str]) -> None:
        self._nodes = nodes if len(set(nodes.values())) > 1 else {}

    def __call__(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            node = self._nodes.get(ranks[0])
            return f"rank {ranks[0]}" + (f" on node {node}" if node else "")
        runs: list[list[int]] = []
        for rank in sorted(ranks):
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        words = [f"{r[0]}-{r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
        return "ranks " + (", ".join(words) if len(words) != 2 else " and ".join(words))


# --- The record of a hang in the run directory: an event, and each rank's stacks ---


_FOLDER = "%Y%m%d-%H%M%S"


def record_hang(directory: RunDirectory, folder: Path, verdict: HangVerdict, reports: Sequence[Told]) -> None:
    """Add an event, and write ``rank-N.txt`` in ``folder``, as far as the disk takes them."""
    step = max((r.step for r in reports if isinstance(r, StallSnapshot)), default=-1)
    # A full disk must not keep the ranks hanging.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for report in reports:
            (folder / f"rank-{report.rank}.txt").write_text(_page(report), encoding="utf-8")
    directory.append_event(
        "hang",
        step=step,
        root_causes=list(verdict.root_causes),
        blocked=list(verdict.blocked),
        sentence=verdict.sentence,
        stacks=str(folder.relative_to(directory.path)),
    )


def record_slow(directory: RunDirectory, verdict: HangVerdict) -> None:
    """Add an event about ranks that slow the others down, but still progress."""
    directory.append_event("slow", ranks=list(verdict.root_causes), sentence=verdict.sentence)


def _page(report: Told) -> str:
    if isinstance(report, ExitedRank):
        return f"rank {report.rank} has finished\n"
    if isinstance(report, NoResponse):
        return f"rank {report.rank} {report.why or 'does not answer'}\n\n{report.stacks}"
    position = "inside" if report.collective_seq > report.left else "after"
    return (
        f"rank {report.rank}: {report.step} steps done, at {report.stage} for {report.stage_s:.1f} s, "
        f"the last {report.still_s:.1f} s of it in {report.phase}; {position} exchange {report.collective_seq}"
        f"{f' ({report.exchange})' if report.exchange else ''}\n"
        f"where: {report.where}\ninside: {report.inside}\n\n{report.stacks}"
    )


# --- The agent's hang detector. No torch ---
#
# Each worker knows how long its steps take, and its heartbeats report one that is overdue. The agent then requests
# snapshots from all members of the group. If the blocking rank is stuck, it is a hang; if it progresses, or is within
# its time limit, it is only slow, and the agent asks again later.


_ANSWER_S = 5.0  # a worker that cannot answer usually sends no heartbeats either, and is killed earlier
_PAUSE_S = 2.0
_SLOW_EVERY_S = 60.0


@dataclass(frozen=True)
class Hang:
    """The group hangs.

    Attributes:
        sentence: the diagnosis, and the directory of the stacks.
        root_causes: the workers to kill, with reasons; empty for a deadlock, where killing does not help.
    """

    sentence: str
    root_causes: dict[int, str]


class HangDetector:
    """Watches the members of one group after another.

    Args:
        do: does work on its files, at once or later.
    """

    def __init__(self, directory: RunDirectory, do: Callable[[Callable[[], None]], object]) -> None:
        self._directory = directory
        self._do = do
        self._group: WorkerGroup | None = None
        self._nodes: dict[int, str] = {}  # by rank
        self._finished: set[int] = set()
        self._answers: dict[int, StallSnapshot] | None = None  # by worker, during a request
        self._due = math.inf
        self._asks_again_at = -math.inf
        self._next_slow = -math.inf

    @property
    def deadline(self) -> float:
        """When :meth:`poll` is due, by the monotonic clock."""
        return self._due

    def forms(self, group: WorkerGroup, nodes: Sequence[str]) -> None:
        """Watch this group from now on; ``nodes`` are its members'."""
        self.forget()
        self._group = group
        self._nodes = dict(enumerate(nodes))

    def forget(self) -> None:
        """Stop watching a broken group."""
        self._group = None
        self._answers = None
        self._due = math.inf
        self._finished.clear()

    def finishes(self, worker: int) -> None:
        """Record that a worker has ended normally."""
        self._finished.add(worker)

    def beats(self, worker: int, *, overdue: bool) -> None:
        """Record a heartbeat."""
        if overdue and self._answers is None and self._group is not None and worker in self._group.workers:
            self._due = min(self._due, max(time.monotonic(), self._asks_again_at))

    def answers(self, worker: int, snapshot: StallSnapshot) -> None:
        """Record a snapshot."""
        if self._answers is None or self._group is None or snapshot.generation != self._group.generation:
            return
        self._answers[worker] = snapshot
        if self._answers.keys() >= set(self._group.workers) - self._finished:
            self._due = time.monotonic()

    def poll(self) -> Hang | tuple[int, ...]:
        """Return a hang, or the workers from which snapshots are needed, once the deadline is reached."""
        now = time.monotonic()
        if self._group is None or now < self._due:
            return ()
        if self._answers is None:
            self._answers = {}
            self._due = now + _ANSWER_S
            return self._group.workers
        workers, answers = self._group.workers, self._answers
        self._answers = None
        self._due = math.inf
        self._asks_again_at = now + _PAUSE_S
        reports = [
            answers.get(worker) or (ExitedRank(rank) if worker in self._finished else NoResponse(rank))
            for rank, worker in enumerate(workers)
        ]
        verdict = diagnose(reports, self._nodes)
        if not verdict.certain:
            self._record_slow(verdict, now)
            return ()
        self._group = None
        folder = self._directory.hangs / time.strftime(_FOLDER)
        self._do(partial(record_hang, self._directory, folder, verdict, reports))
        return Hang(
            f"{verdict.sentence}. All stacks: {folder}",
            {workers[rank]: reason for rank, reason in verdict.reasons.items()},
        )

    def _record_slow(self, verdict: HangVerdict, now: float) -> None:
        if verdict.root_causes and now >= self._next_slow:
            self._next_slow = now + _SLOW_EVERY_S
            self._do(partial(record_slow, self._directory, verdict))


# --- The watchdog for jobs without an agent, through files in the run directory. No torch
#
# A thread in each rank polls once a second. An overdue rank requests snapshots by a file, and every rank writes its
# own. The lowest overdue rank makes the diagnosis and ends the job, which its launcher may restart.


_GLANCE_S = 1.0


@dataclass(frozen=True)
class _Note:
    """A rank's file: its process, and its last snapshot on request."""

    generation: int
    pid: int
    time: float
    snapshot: StallSnapshot | None


class Watchdog:
    """Watches this rank and, if it is the first one blocked, all ranks.

    Use it as a context manager: the thread and the files end with it.

    Args:
        directory: the run's.
        rank, world_size, generation: this rank's.
        one_host: whether the other ranks' processes are visible.
        tell: receives the verdict, unless a launcher reads it from the run directory.
    """

    def __init__(
        self,
        activity: ProgressTracker,
        directory: RunDirectory,
        *,
        rank: int,
        world_size: int,
        generation: int,
        one_host: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._activity = activity
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._one_host = one_host
        self._tell = tell
        self._request_file = directory.logs / f"hang-asked-{generation}"
        self._verdict_file = directory.logs / f"hang-judged-{generation}"
        self._over = threading.Event()
        self._next_slow = -1.0
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> Self:
        install_dump_handler()
        if self._rank == 0:
            for stale_file in self._directory.logs.glob("hang-*"):
                stale_file.unlink(missing_ok=True)
        self._note(None)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            for path in (self._file(self._rank), self._request_file):
                path.unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self._directory.logs / f"rank-{rank}.snapshot.json"

    def _note(self, snapshot: StallSnapshot | None) -> None:
        note = _Note(self._generation, os.getpid(), time.time(), snapshot)
        # On a full disk, other ranks can only inspect this rank's process.
        with suppress(OSError):
            write_atomically(self._file(self._rank), json.dumps(msgspec.to_builtins(note)).encode())

    def _watch(self) -> None:
        asked_at: float | None = None
        while not self._over.wait(_GLANCE_S):
            # Without a request the file does not count, because it may be older than this process.
            if asked_at is not None and self._verdict_file.exists():
                self._end(PeerLostError("the job was ended, because another rank blocked it"))
            overdue = self._activity.overdue
            if not self._request_file.exists():
                asked_at = None
                if not overdue:
                    continue
                with suppress(OSError):
                    self._request_file.touch()
            asked_at = asked_at or time.time()
            self._note(take_stall_snapshot(self._activity, self._generation, self._rank))
            if overdue:
                self._judge(asked_at)

    def _judge(self, asked_at: float) -> None:
        """Make the diagnosis, if this is the lowest overdue rank and all reachable ranks have answered."""
        notes = {rank: self._read(rank) for rank in range(self._world_size)}
        reports: list[StallSnapshot | NoResponse] = []
        unseen = []
        for rank, note in notes.items():
            if note is None:
                unseen.append(rank)
            elif note.snapshot is not None and note.time >= asked_at - _GLANCE_S:
                reports.append(note.snapshot)
            elif time.time() < asked_at + _ANSWER_S:
                return
            else:
                pid = note.pid if self._one_host else None
                reports.append(NoResponse(rank, describe_unresponsive(pid), stacks_of(pid) if pid else ""))
        if self._rank != min(r.rank for r in reports if isinstance(r, StallSnapshot) and r.overdue):
            return
        verdict = diagnose(reports)
        if not verdict.certain:
            if verdict.root_causes and time.monotonic() >= self._next_slow:
                self._next_slow = time.monotonic() + _SLOW_EVERY_S
                record_slow(self._directory, verdict)
            self._request_file.unlink(missing_ok=True)
            return
        folder = self._directory.hangs / time.strftime(_FOLDER)
        record_hang(self._directory, folder, verdict, reports)
        text = f"{verdict.sentence}. All stacks: {folder}"
        if unseen:
            text += f". Ranks {unseen} are unknown, because they do not share this directory"
        self._end(HangError(text))

    def _read(self, rank: int) -> _Note | None:
        try:
            note = msgspec.convert(json.loads(self._file(rank).read_bytes()), _Note)
        except (OSError, ValueError):
            return None
        return note if note.generation == self._generation else None

    def _end(self, error: HangError | PeerLostError) -> None:
        """End this process, wherever its main thread waits."""
        record_failure(self._directory, self._rank, error)
        if isinstance(error, HangError):
            self._tell(str(error))
            with suppress(OSError):
                self._verdict_file.touch()
                self._request_file.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code_of(error))
