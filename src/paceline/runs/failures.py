"""How processes of a job ended: what each recorded, and what the job reports of them all."""

from __future__ import annotations

import json
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

import paceline
from paceline.core import errors
from paceline.core.errors import DataError, HangError, PacelineError, PeerLostError, UserError
from paceline.core.files import write_atomically
from paceline.core.parent_death import die_with_parent as die_with_parent
from paceline.runs.directory import RunDirectory

# --- How a process of a job ended, and what it records of that for the others. No torch ---


def describe_stop(event: Mapping[str, Any], directory: RunDirectory) -> str:
    """What a ``stopped`` event means to people: why, after which step, and how to go on."""
    cause = str(event.get("cause", "a signal"))
    why = "before --walltime was over" if cause == "walltime" else f"by {cause}"
    return (
        f"stopped after step {event.get('step', 0)}, {why}; everything is saved. "
        f"Continue with: paceline resume {directory.path}"
    )


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How a rank ended.

    Attributes:
        time: seconds since the epoch when it was noticed.
        type: the exception's class, or "Killed" or "Exited" where the process left no record.
        traceback: the exception's, as Python prints it; "" where there is none.
        victim: it only lost a peer; the cause is elsewhere.
        user_error: the message says what to change, and needs no traceback.
    """

    rank: int
    time: float
    type: str
    message: str
    traceback: str
    victim: bool
    user_error: bool
    exit_code: int


_DELIBERATE = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PacelineError)
}


_LIBRARIES = (
    "/site-packages/",
    f'"{sysconfig.get_path("stdlib")}/',
    f'"{Path(paceline.__file__).parent}/',
    '"<frozen',
)


def failure_of(rank: int, error: BaseException) -> FailureRecord:
    """Describe the error that ended a rank, with the notes that were added to it (PEP 678)."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return FailureRecord(
        rank=rank,
        time=time.time(),
        type=type(error).__name__,
        message=f"{str(error).rstrip('.')} ({notes})" if notes else str(error),
        traceback="".join(traceback.format_exception(error)),
        victim=isinstance(error, PeerLostError),
        user_error=isinstance(error, UserError),
        exit_code=exit_code_of(error),
    )


def exit_code_of(error: BaseException) -> int:
    """What a process that ends with ``error`` exits with."""
    if isinstance(error, PacelineError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def record_failure(directory: RunDirectory, rank: int, error: BaseException) -> int:
    """Leave a rank's error where its launcher finds it; return the code to exit with."""
    failure = failure_of(rank, error)
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        write_atomically(directory.error_of(rank), json.dumps(asdict(failure), indent=2).encode())
    except OSError as problem:
        # A full disk may be the very error; it must not hide behind this one.
        print(f"the error of rank {rank} could not be recorded: {problem}", file=sys.stderr)
    return failure.exit_code


def read_failure(path: Path) -> FailureRecord | None:
    """A recorded failure; None where there is none, or none that can be read."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), FailureRecord)
    except (OSError, ValueError):
        return None


def describe(failure: FailureRecord, directory: RunDirectory | None) -> str:
    """The one message about a failed job: the rank that failed first, its error and its log."""
    if failure.user_error:
        # Every rank fails alike on a wrong option: whose message it is says nothing.
        if failure.type == DataError.__name__ and directory is not None:
            return f"{failure.message}\n  log: {directory.log_of(failure.rank)}"
        return failure.message
    who = f"rank {failure.rank}"
    if failure.type in ("Killed", "Exited"):
        # What has ranks below it and is none says itself what it is.
        lines = [f"{who} {failure.message}." if failure.rank >= 0 else f"{failure.message}."]
    elif failure.victim:
        lines = [f"{who} had to end: {failure.message}. Why is said where that rank was started, and in its log."]
    elif failure.type == errors.SilentDataCorruptionError.__name__:
        lines = [failure.message]  # names the rank itself
    elif failure.type == HangError.__name__:
        # It names the rank to blame, which need not be the one that says so.
        return failure.message
    elif failure.type in _DELIBERATE:
        lines = [f"{who} failed first: {failure.message}"]
    else:
        lines = [f"{who} failed first: {failure.type}: {failure.message}"]
        where = [line.strip() for line in failure.traceback.splitlines() if line.startswith("  File ")]
        # Where the user's own code was, not what it called in a library.
        mine = [line for line in where if not any(path in line for path in _LIBRARIES)]
        lines += [f"  {(mine or where)[-1]}"] if where else []
    if directory is not None and failure.rank >= 0:
        lines.append(f"  log: {directory.log_of(failure.rank)}")
    return "\n".join(lines)


# --- Which rank failed first, and what to tell the user about it: one message, not one a rank. No torch ---


STOPPED = (75, 130)
"""Exit codes of a worker that saved its state because a signal asked it to stop."""


@dataclass(frozen=True)
class ProcessExit:
    """A process that ended.

    Attributes:
        rank: None for an agent that has ranks below it.
        code: its exit code; minus the signal's number where one killed it.
        time: seconds since the epoch.
        stopped: it ended after its launcher told it to.
        starter: its name where it is no rank, but has started some.
    """

    rank: int | None
    code: int
    time: float
    stopped: bool = False
    starter: str = ""


def report_job_failure(
    directory: RunDirectory | None,
    exits: Sequence[ProcessExit],
    asked: int | None,
    verdict: str = "",
    *,
    said_why: bool = False,
) -> int:
    """Print one message if a job failed; return its exit code.

    Args:
        directory: the run's.
        exits: of the job's processes.
        asked: the signal that asked the launcher to stop, if one did.
        verdict: what else to say about a failure, or why the launcher itself ended the job.
        said_why: a process that ended by itself has told of the ranks that it had started.
    """
    failure = first_failure(directory, exits)
    if failure is not None and failure.type == "Exited" and said_why:
        return failure.exit_code
    # While the ranks still join, a signal ends one at once, and the others lose it.
    if failure is not None and not (failure.victim and asked is not None):
        print(f"paceline: {describe(failure, directory)}", file=sys.stderr)
        if verdict:
            print(f"  {verdict}", file=sys.stderr)
        return failure.exit_code
    if verdict and asked is None:
        print(f"paceline: {verdict}", file=sys.stderr)
        return 1
    codes = {end.code for end in exits}
    if codes == {0}:
        return 0
    for code in STOPPED:
        if code in codes:
            return code
    # Stopped as asked, by processes that know no better than to die of the signal.
    return 128 + (asked or signal.SIGTERM)


def first_failure(directory: RunDirectory | None, exits: Sequence[ProcessExit]) -> FailureRecord | None:
    """The failure that brought the job down, or None where there was none.

    A recorded error is believed, unless it only says that a peer was lost. A process killed by a
    signal that its launcher did not send is a culprit. Among culprits the earliest wins; victims
    only count where there are no culprits.
    """
    failures = []
    for end in exits:
        if end.code == 0 or end.code in STOPPED:
            continue
        recorded = None
        if directory is not None and end.rank is not None:
            recorded = read_failure(directory.error_of(end.rank))
        if recorded is not None:
            if recorded.exit_code not in STOPPED:  # else it was done, and was killed on its way out
                failures.append(recorded)
        elif not end.stopped:
            failures.append(_unrecorded(directory, end))
    return min(failures, key=lambda failure: (failure.victim, failure.time, failure.rank), default=None)


def expand(end: ProcessExit, directory: RunDirectory | None) -> list[ProcessExit]:
    """The exits of the ranks below an agent, as they recorded them; its own code, always 1, says nothing."""
    if end.rank is not None or end.code == 0 or directory is None:
        return [end]
    recorded = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    ranks = [ProcessExit(f.rank, f.exit_code, f.time, end.stopped) for f in recorded if f is not None]
    # A worker that was killed records nothing: then the agent's own exit stands for it.
    return ranks if any(f is not None and not f.victim for f in recorded) else [*ranks, end]


def _unrecorded(directory: RunDirectory | None, end: ProcessExit) -> FailureRecord:
    if end.rank is None and end.code > 0:
        message = f"{end.starter} ended with exit code {end.code}; what is printed above says why"
        kind = "Exited"
    elif end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in signal.valid_signals() else f"signal {-end.code}"
        hint = " (out of memory?)" if end.code == -signal.SIGKILL else ""
        kind, message = "Killed", f"was killed by {name}{hint}"
        if end.rank is None:
            message = f"{end.starter} {message}"
    else:
        kind, message = "Exited", f"exited with status {end.code}"
        # What rank 0 said is on the terminal; its log may be an earlier run's.
        last = _last_line(directory, end.rank) if end.rank else ""
        message += f": {last.rstrip('.')}" if last else ""
    return FailureRecord(
        rank=-1 if end.rank is None else end.rank,
        time=end.time,
        type=kind,
        message=message,
        traceback="",
        victim=False,
        user_error=False,
        exit_code=end.code if end.code > 0 else 1,
    )


def _last_line(directory: RunDirectory | None, rank: int | None) -> str:
    """The last line that a rank printed: of an uncaught exception, its message."""
    if directory is None or rank is None:
        return ""
    try:
        with directory.log_of(rank).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1] if lines else ""
