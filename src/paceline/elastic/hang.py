"""Which rank holds up the others: how it is found, recorded and told."""

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
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from paceline.core.errors import HangError, PeerLostError
from paceline.core.files import write_atomically
from paceline.core.stack_dump import describe_unresponsive, install_dump_handler, stacks_of
from paceline.elastic.coordinator import WorkerGroup
from paceline.elastic.worker_channel import StallSnapshot, take_stall_snapshot
from paceline.parallel.progress import ProgressTracker
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import exit_code_of, record_failure

# --- Who keeps the others waiting: from what each rank says of itself to one sentence. Pure ---
#
# All ranks of a world take part in the same exchanges in the same order, and count them. So a rank that is
# outside any, while others wait inside the next one, is the culprit, and they are its victims. A rank that
# does not answer is a culprit whatever it did last. Where all of them wait, but not in the same exchange,
# there is no one culprit: the program lets them disagree, and would do so again.


@dataclass(frozen=True)
class NoResponse:
    """A rank that does not answer.

    Attributes:
        rank: its rank.
        why: what is known of its process, as the end of a sentence; "" for nothing.
        stacks: of its threads, as far as they can be had.
    """

    rank: int
    why: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class ExitedRank:
    """A rank whose process has ended in good order.

    Attributes:
        rank: its rank.
    """

    rank: int


@dataclass(frozen=True)
class HangVerdict:
    """Who is to blame.

    Attributes:
        reasons: of each rank that keeps others waiting, what it does; none where all wait for each other.
        victims: ranks that wait.
        sentence: says so.
        certain: False where somebody still moves or may take its time: then they are only slow.
    """

    reasons: Mapping[int, str]
    victims: tuple[int, ...]
    sentence: str
    certain: bool

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that keep others waiting."""
        return tuple(sorted(self.reasons))

    @property
    def is_deadlock(self) -> bool:
        """Whether the ranks wait for each other, as they would again."""
        return not self.reasons


Told = StallSnapshot | NoResponse | ExitedRank
"""What is known of a rank."""


def diagnose(reports: Sequence[Told], nodes: Mapping[int, str] | None = None) -> HangVerdict:
    """Who keeps whom waiting.

    Args:
        reports: one a rank.
        nodes: the node of each rank; named where there are several.

    Returns:
        The verdict. It is certain where each culprit is silent, or is overdue and has not moved for half
        of the time that it has been at its stage.
    """
    standings = sorted((r for r in reports if isinstance(r, StallSnapshot)), key=lambda s: s.rank)
    silences = sorted((r for r in reports if isinstance(r, NoResponse)), key=lambda s: s.rank)
    names = _Names(nodes or {})
    inside = [s for s in standings if s.collective_seq > s.left]
    # Who waits in a collective of the user's own waits too, and nobody else may know of it.
    in_users = [s for s in standings if s.collective_seq == s.left and s.collective]
    at_work = [s for s in standings if s.collective_seq == s.left and not s.collective]
    last = max((s.collective_seq for s in inside), default=0)
    behind = [s for s in at_work if s.collective_seq < last or not inside]
    waiting = [*inside, *in_users]
    victims = tuple(sorted(s.rank for s in waiting))
    if silences or behind:
        reasons = {s.rank: s.why or "does not answer" for s in silences}
        reasons |= {s.rank: _reason(s, inside) for s in behind}
        clauses = [f"{names((rank,))} {reason}" for rank, reason in reasons.items()]
        clauses += _of_victims(names, inside, in_users, told=bool(behind and inside))
        return HangVerdict(reasons, victims, "; ".join(clauses), all(map(_is_stuck, behind)))
    ahead = [s for s in at_work if s not in behind]
    finished = sorted(r.rank for r in reports if isinstance(r, ExitedRank))
    sentence = _of_deadlock(names, inside, in_users, ahead, finished)
    return HangVerdict({}, victims, sentence, all(map(_is_stuck, standings)))


def _is_stuck(standing: StallSnapshot) -> bool:
    return standing.overdue and standing.still_s >= standing.stage_s / 2


def _reason(culprit: StallSnapshot, inside: Sequence[StallSnapshot]) -> str:
    """What it has not done, and where it is."""
    awaited = next((s for s in inside if s.collective_seq == culprit.collective_seq + 1), None)
    what = (
        f"has not entered {_exchange(awaited)}"
        if awaited is not None
        else f"has been at {_stage(culprit)} for {culprit.stage_s:.0f} s"
    )
    return f"{what}: {_place(culprit)}"


def _place(standing: StallSnapshot) -> str:
    if standing.helper:
        return f"it waits for its {standing.helper}"
    text = f"it is in {standing.where}" if standing.where else f"it is at {standing.phase}"
    return text + (f", inside {standing.inside}" if standing.inside else "")


def _of_victims(
    names: _Names, inside: Sequence[StallSnapshot], in_users: Sequence[StallSnapshot], told: bool
) -> list[str]:
    """Who waits; ``told``: the exchange was named already."""
    clauses = []
    groups = _by_exchange(inside)
    for exchange, ranks in groups.items():
        where = "" if told and len(groups) == 1 else f" in {exchange}"
        clauses.append(f"{names(ranks)} {_wait(ranks)}{where}")
    clauses += [f"{names((s.rank,))} waits in {s.collective}, called by {s.where}" for s in in_users]
    return clauses


def _of_deadlock(
    names: _Names,
    inside: Sequence[StallSnapshot],
    in_users: Sequence[StallSnapshot],
    ahead: Sequence[StallSnapshot],
    finished: Sequence[int],
) -> str:
    clauses = [f"{names(ranks)} {_are(ranks)} in {where}" for where, ranks in _by_exchange(inside).items()]
    clauses += [f"{names((s.rank,))} is in {s.collective}, called by {s.where}" for s in in_users]
    clauses += [f"{names((s.rank,))} has left it, and: {_place(s)}" for s in ahead]
    clauses += [f"{names((rank,))} has finished" for rank in finished]
    if len(clauses) == 1:
        return f"{clauses[0]}, and none of them gets any further: what they send each other does not arrive"
    return (
        f"the ranks wait for each other: {'; '.join(clauses)}. "
        "All of them must do the same exchanges in the same order, whatever their rank and data"
    )


def _by_exchange(inside: Sequence[StallSnapshot]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for standing in inside:
        name = _exchange(standing)
        ranks[name] = (*ranks.get(name, ()), standing.rank)
    return ranks


def _exchange(standing: StallSnapshot) -> str:
    return f"{standing.exchange} {standing.collective_seq} of {_stage(standing)}"


def _stage(standing: StallSnapshot) -> str:
    if standing.stage in ("step", "first step"):
        return f"step {standing.step + 1}"
    if standing.stage in ("evaluation", "checkpoint"):
        return f"the {standing.stage} after step {standing.step}"
    return standing.stage


def _wait(ranks: Sequence[int]) -> str:
    return "waits for it" if len(ranks) == 1 else "wait for it"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


class _Names:
    """Ranks in words: "rank 3 on node b", "ranks 0-2 and 5"."""

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


# --- What a run's directory keeps of a hang: an event, and where each rank was ---


def record_hang(directory: RunDirectory, verdict: HangVerdict, reports: Sequence[Told]) -> Path:
    """Add an event, and write ``hangs/TIME/rank-N.txt``; return that folder, whether or not that worked."""
    folder = directory.hangs / time.strftime("%Y%m%d-%H%M%S")
    step = max((r.step for r in reports if isinstance(r, StallSnapshot)), default=-1)
    # A full disk is no reason to let the ranks hang.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for report in reports:
            (folder / f"rank-{report.rank}.txt").write_text(_page(report), encoding="utf-8")
    with suppress(OSError):
        directory.append_event(
            "hang",
            step=step,
            culprits=list(verdict.culprits),
            victims=list(verdict.victims),
            sentence=verdict.sentence,
            stacks=str(folder.relative_to(directory.path)),
        )
    return folder


def record_slow(directory: RunDirectory, verdict: HangVerdict) -> None:
    """Add an event: these ranks hold the others up, but they do move."""
    with suppress(OSError):
        directory.append_event("slow", ranks=list(verdict.culprits), sentence=verdict.sentence)


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


# --- When an agent asks its workers where they stand, and when it has waited for long enough. No torch ---
#
# Each worker knows how long its steps take, and says with its beats when one takes too long. Then all
# members of the view are asked. If who holds them up is stuck, it is a hang; if it moves, or may take its
# time, it is only slow, and they are asked again later.


_ANSWER_S = 5.0  # who cannot even answer is usually silent altogether, and killed for that before
_PAUSE_S = 2.0
_SLOW_EVERY_S = 60.0


@dataclass(frozen=True)
class Ask:
    """Ask these workers for a :class:`~paceline.elastic.worker_channel.Standing`."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Hang:
    """The view hangs.

    Attributes:
        sentence: who keeps whom waiting, and where the stacks are.
        culprits: why each of these workers is to be killed; none where killing does not help, because they
            all wait for each other.
    """

    sentence: str
    culprits: dict[int, str]


class HangDetector:
    """Watches over the members of one view after another.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._view: WorkerGroup | None = None
        self._nodes: dict[int, str] = {}  # by rank
        self._finished: set[int] = set()
        self._answers: dict[int, StallSnapshot] | None = None  # by worker, while they are asked
        self._due = math.inf
        self._patient_until = -math.inf
        self._next_slow = -math.inf

    @property
    def deadline(self) -> float:
        """When :meth:`turn` is due, by the monotonic clock."""
        return self._due

    def forms(self, view: WorkerGroup, nodes: Sequence[str]) -> None:
        """From now on this is the view; ``nodes`` are its members'."""
        self.forget()
        self._view, self._nodes = view, dict(enumerate(nodes))

    def forget(self) -> None:
        """The view is broken: its members are about to leave it."""
        self._view, self._answers, self._due = None, None, math.inf
        self._finished.clear()

    def finishes(self, worker: int) -> None:
        """A worker has ended in good order; the others should be about to."""
        self._finished.add(worker)

    def beats(self, worker: int, *, overdue: bool) -> None:
        """A worker has told whether what it does takes too long."""
        if overdue and self._answers is None and self._view is not None and worker in self._view.members:
            self._due = min(self._due, max(time.monotonic(), self._patient_until))

    def answers(self, worker: int, standing: StallSnapshot) -> None:
        """A worker has told where it stands."""
        if self._answers is None or self._view is None or standing.generation != self._view.generation:
            return
        self._answers[worker] = standing
        if self._answers.keys() >= set(self._view.members) - self._finished:
            self._due = time.monotonic()

    def poll(self) -> Ask | Hang | None:
        """What is to be done, once the deadline is reached."""
        now = time.monotonic()
        if self._view is None or now < self._due:
            return None
        if self._answers is None:
            self._answers, self._due = {}, now + _ANSWER_S
            return Ask(self._view.members)
        members, answers = self._view.members, self._answers
        self._answers, self._due, self._patient_until = None, math.inf, now + _PAUSE_S
        reports = [
            answers.get(worker) or (ExitedRank(rank) if worker in self._finished else NoResponse(rank))
            for rank, worker in enumerate(members)
        ]
        found = diagnose(reports, self._nodes)
        if not found.certain:
            self._is_slow(found, now)
            return None
        self._view = None
        folder = record_hang(self._directory, found, reports)
        return Hang(
            f"{found.sentence}. All stacks: {folder}",
            {members[rank]: reason for rank, reason in found.reasons.items()},
        )

    def _is_slow(self, found: HangVerdict, now: float) -> None:
        if found.culprits and now >= self._next_slow:
            self._next_slow = now + _SLOW_EVERY_S
            record_slow(self._directory, found)


# --- Notices a hang where no agent watches: the ranks tell each other through the run's directory. No torch
#
# A thread in each rank looks once a second. Who is overdue asks, by a file, and then every rank writes where
# it stands. The lowest that is overdue judges, and ends the job: its launcher may start it again.


_GLANCE_S = 1.0


@dataclass(frozen=True)
class _Note:
    """What a rank leaves in the run's directory: its process, and where it stood when it was last asked."""

    generation: int
    pid: int
    time: float
    standing: StallSnapshot | None


class Watchdog:
    """Watches over this rank and, where it is the first to be held up, over all.

    Use it as a context manager: the thread and the files end with it.

    Args:
        activity: this rank's.
        directory: the run's.
        rank, world_size, generation: this rank's place.
        one_host: whether the other ranks' processes can be looked at.
        tell: where the verdict goes, unless a launcher reads it from the run's directory.
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
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._one_host = one_host
        self._tell = tell
        self._asked = directory.logs / f"hang-asked-{generation}"
        self._judged = directory.logs / f"hang-judged-{generation}"
        self._over = threading.Event()
        self._next_slow = -1.0
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> Self:
        install_dump_handler()
        if self._rank == 0:
            for old in self._directory.logs.glob("hang-*"):
                old.unlink(missing_ok=True)
        self._note(None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for path in (self._file(self._rank), self._asked):
            path.unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self._directory.logs / f"rank-{rank}.standing.json"

    def _note(self, standing: StallSnapshot | None) -> None:
        note = _Note(self._generation, os.getpid(), time.time(), standing)
        # Where the disk is full, this rank is told by its process alone.
        with suppress(OSError):
            write_atomically(self._file(self._rank), json.dumps(msgspec.to_builtins(note)).encode())

    def _watch(self) -> None:
        asked_at: float | None = None
        while not self._over.wait(_GLANCE_S):
            # Who was not asked is not meant: the file may be older than this process.
            if asked_at is not None and self._judged.exists():
                self._end(PeerLostError("the job was ended, because another rank held it up"))
            overdue = self._activity.overdue
            if not self._asked.exists():
                asked_at = None
                if not overdue:
                    continue
                with suppress(OSError):
                    self._asked.touch()
            asked_at = asked_at or time.time()
            self._note(take_stall_snapshot(self._activity, self._generation, self._rank))
            if overdue:
                self._judge(asked_at)

    def _judge(self, asked_at: float) -> None:
        """Judge, if it is this rank's turn and all have answered that will."""
        notes = {rank: self._read(rank) for rank in range(self._world_size)}
        reports: list[StallSnapshot | NoResponse] = []
        unseen = []
        for rank, note in notes.items():
            if note is None:
                unseen.append(rank)
            elif note.standing is not None and note.time >= asked_at - _GLANCE_S:
                reports.append(note.standing)
            elif time.time() < asked_at + _ANSWER_S:
                return
            else:
                pid = note.pid if self._one_host else None
                reports.append(NoResponse(rank, describe_unresponsive(pid), stacks_of(pid) if pid else ""))
        if self._rank != min(r.rank for r in reports if isinstance(r, StallSnapshot) and r.overdue):
            return
        found = diagnose(reports)
        if not found.certain:
            if found.culprits and time.monotonic() >= self._next_slow:
                self._next_slow = time.monotonic() + _SLOW_EVERY_S
                record_slow(self._directory, found)
            self._asked.unlink(missing_ok=True)
            return
        folder = record_hang(self._directory, found, reports)
        text = f"{found.sentence}. All stacks: {folder}"
        if unseen:
            text += f". Nothing is known of ranks {unseen}, which do not share this directory"
        self._end(HangError(text))

    def _read(self, rank: int) -> _Note | None:
        try:
            note = msgspec.convert(json.loads(self._file(rank).read_bytes()), _Note)
        except (OSError, ValueError):
            return None
        return note if note.generation == self._generation else None

    def _end(self, error: HangError | PeerLostError) -> None:
        """End this process, whatever its main thread waits in."""
        record_failure(self._directory, self._rank, error)
        if isinstance(error, HangError):
            self._tell(str(error))
            with suppress(OSError):
                self._judged.touch()
                self._asked.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code_of(error))
