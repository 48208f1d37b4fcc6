"""How a process of a job ended, and what it records of that for the others. No torch."""

from __future__ import annotations

import json
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline import errors
from paceline.distributed.tether import die_with_parent as die_with_parent
from paceline.errors import DataError, HangError, PacelineError, PeerLostError, UserError
from paceline.files import write_atomically
from paceline.run_directory import RunDirectory


def describe_stop(event: Mapping[str, Any], directory: RunDirectory) -> str:
    """What a ``stopped`` event means to people: why, after which step, and how to go on."""
    cause = str(event.get("cause", "a signal"))
    why = "before --walltime was over" if cause == "walltime" else f"by {cause}"
    return (
        f"stopped after step {event.get('step', 0)}, {why}; everything is saved. "
        f"Continue with: paceline resume {directory.path}"
    )


@dataclass(frozen=True, kw_only=True)
class Failure:
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


_TYPES: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "time": (int, float),
    "type": str,
    "message": str,
    "traceback": str,
    "victim": bool,
    "user_error": bool,
    "exit_code": int,
}


_DELIBERATE = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PacelineError)
}


_LIBRARIES = (
    "/site-packages/",
    f'"{sysconfig.get_path("stdlib")}/',
    f'"{Path(paceline.__file__).parent}/',
    '"<frozen',
)


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describe the error that ended a rank, with the notes that were added to it (PEP 678)."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return Failure(
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


def read_failure(path: Path) -> Failure | None:
    """A recorded failure; None where there is none, or none that can be read."""
    try:
        return to_failure(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def to_failure(document: Any) -> Failure:
    """What :func:`dataclasses.asdict` gave, after its way through JSON.

    Raises:
        ValueError, TypeError: it is no failure.
    """
    failure = Failure(**document)
    if not all(isinstance(document[name], kind) for name, kind in _TYPES.items()):
        raise TypeError("no failure")
    return failure


def describe(failure: Failure, directory: RunDirectory | None) -> str:
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
        lines = [
            f"{who} had to end: {failure.message}. Why is said where that rank was started, and in its log."
        ]
    elif failure.type == errors.CorruptionError.__name__:
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
