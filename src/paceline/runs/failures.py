"""Exit records of a job's processes, and the one error report made from them."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.core import errors
from paceline.core.errors import (
    RESTART_EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    HangError,
    NonFiniteLossError,
    PacelineError,
    PeerLostError,
    RunDirectoryError,
    StopRequested,
    UserError,
)
from paceline.core.files import DISK_ERRORS, FULL, open_regular, parse_json, read_document, write_atomically
from paceline.core.ownership import SHARED_MEMORY
from paceline.core.plugins import own_folders
from paceline.runs.directory import RunDirectory

# --- The failure record of one process. No torch ---


def describe_stop(event: Mapping[str, Any], directory: RunDirectory) -> str:
    """Describe a ``stopped`` event: the cause, the step, and how to continue."""
    cause = str(event.get("cause", "a signal"))
    reason = "before --walltime was over" if cause == "walltime" else f"by {cause}"
    return (
        f"stopped after step {event.get('step', 0)}, {reason}; everything is saved. "
        f"Continue with: {directory.continuation()}"
    )


class SupersededError(CheckpointError):
    """A save that comes too late: a later group continued from an earlier state."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The failure of a rank.

    Attributes:
        time: Unix time at which it was noticed.
        type: the exception's class, or "Killed" or "Exited" for a process without a record.
        traceback: the exception's, as Python prints it; "" without one.
        victim: a secondary failure: the rank only lost a peer.
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
    '"<frozen',
)


_ADVICE = (
    (
        # Of torch's allocator, of the CUDA runtime, and of its libraries.
        re.compile(r"CUDA (error: )?out of memory|\w+_STATUS_ALLOC_FAILED|NCCL ran out of GPU memory"),
        "To need less memory on the GPU: more --microbatches (each is smaller), --checkpoint-activations block, or on "
        "several GPUs --strategy zero1 or fsdp.",
    ),
    (
        # Of Python's threads and forks, of C++.
        re.compile(r"can't start new thread|Resource temporarily unavailable"),
        "Your user or this container may have no more processes and threads: raise the limit (ulimit -u, pids.max), or "
        "use fewer: --nproc, --threads, --num-workers.",
    ),
    (
        re.compile(r"\[Errno 24\]"),
        "A process may have no more open files: raise the limit (ulimit -n 65536).",
    ),
)
"""What to do about errors of libraries, by their messages."""


def advise(message: str) -> list[str]:
    """Return what to do about an error of this machine's limits, by its message; nothing for other errors."""
    return [advice for reason, advice in _ADVICE if reason.search(message)]


def failure_of(rank: int, error: BaseException) -> FailureRecord:
    """Describe the error that ended a rank, with its notes (PEP 678)."""
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


class NodeRemovedError(PacelineError):
    """The job's other nodes could not reach this one, and continue without it. It joins them again."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, PacelineError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def record_failure(
    directory: RunDirectory,
    rank: int,
    error: BaseException,
    report: Callable[[FailureRecord], None] | None = None,
) -> int:
    """Record a rank's error for its launcher; return the exit code.

    Args:
        report: called if the disk takes no record; default: print the error.
    """
    failure = failure_of(rank, error)
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        write_atomically(directory.error_of(rank), json.dumps(asdict(failure), indent=2).encode())
    except OSError as problem:
        # A full disk may be the root cause, so its error must not replace the recorded one.
        if report is not None:
            report(failure)
        else:
            print(f"{describe(failure, None)}\nThis could not be recorded: {problem}", file=sys.stderr)
    return failure.exit_code


def record_worker_failure(
    directory: RunDirectory,
    rank: int,
    error: Exception,
    *,
    existed: bool,
    tell_agent: Callable[[FailureRecord], None] | None = None,
) -> int:
    """Record the error that ends a worker, and an event if the run ends with it; return the exit code.

    Args:
        rank: the worker's; with an agent, its index on the node.
        existed: whether the run existed before the worker began: a refused start leaves it as it was, such as finished.
        tell_agent: called if the disk takes no record; None if no agent can recover the run.
    """
    code = record_failure(directory, rank, error, tell_agent)
    with suppress(OSError):
        if directory.exists() and _ends_run(error, existed=existed, recovers=tell_agent is not None):
            process = {"rank": rank} if tell_agent is None else {"local_index": rank}
            directory.append_event("failed", **process, error=str(error).partition("\n")[0])
    return code


def _ends_run(error: Exception, *, existed: bool, recovers: bool) -> bool:
    """Return whether a run has failed with this error of one worker."""
    is_refusal = isinstance(error, ConfigError) or type(error) is RunDirectoryError
    if isinstance(error, StopRequested | PeerLostError | SupersededError) or (is_refusal and existed):
        return False
    return not recovers or isinstance(error, UserError | NonFiniteLossError | CheckpointError)


def explain_disk_error(error: Exception, directory: RunDirectory | None) -> Exception:
    """Return the same error, or one that names the disk that failed, and the remedy."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return error
    is_of_disk = error.errno in (*FULL, errno.EROFS, errno.EIO, errno.ESTALE)
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    is_ours = path is not None and directory is not None and path.absolute().is_relative_to(directory.path.absolute())
    if not is_of_disk and not is_ours:
        return error  # such as a file of the task that another user may read
    if path is None and error.errno == errno.ENOSPC:
        path = _full_disk(directory)
    remedy = FULL.get(error.errno or 0, "Make it writable")
    if path is not None and path.is_relative_to(SHARED_MEMORY):
        remedy = "Give more shared memory (docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory)"
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    where = path or (f"a file (in {raised[0].filename}, line {raised[0].lineno})" if raised else "a file")
    explained = RunDirectoryError(
        f"cannot write {where}: {error.strerror}. Everything that was saved before is untouched. {remedy}, then give "
        "the same command again."
    )
    explained.__cause__ = error
    return explained


_FULL_BYTES = 2**20


def _full_disk(directory: RunDirectory | None) -> Path | None:
    """Return the place that is full, of those that every run writes to; an error of the kernel names no file."""
    paths = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    if directory is not None:
        paths.insert(0, directory.path)
    for path in paths:
        with suppress(OSError):
            disk = os.statvfs(path)
            if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
                return path
    return None


def read_failure(path: Path) -> FailureRecord | None:
    """Read a recorded failure; None if it is missing or unreadable."""
    try:
        return msgspec.convert(parse_json(read_document(path)), FailureRecord)
    except (OSError, ValueError):
        return None


def describe(failure: FailureRecord, directory: RunDirectory | None) -> str:
    """Format the error report of a failed job: the rank that failed first, its error and its log."""
    if failure.user_error:
        # Every rank fails alike on a wrong option, so the rank does not matter.
        if failure.type == DataError.__name__ and directory is not None:
            return f"{failure.message}\n  log: {directory.log_of(failure.rank)}"
        return failure.message
    rank_name = f"rank {failure.rank}"
    if failure.type in ("Killed", "Exited"):
        # The message of a launcher process, which has no rank, names it.
        lines = [f"{rank_name} {failure.message}." if failure.rank >= 0 else f"{failure.message}."]
    elif failure.victim:
        lines = [f"{rank_name} had to end: {failure.message}. See the output and the log of that rank for the cause."]
    elif failure.type == errors.SilentDataCorruptionError.__name__:
        lines = [failure.message]  # names the rank itself
    elif failure.type in (HangError.__name__, CheckpointError.__name__):
        # It names the rank that hangs, which need not be the one that reports it; a disk's fault is not a rank's.
        return failure.message
    elif failure.type in _DELIBERATE:
        lines = [f"{rank_name} failed first: {failure.message}"]
    else:
        lines = [f"{rank_name} failed first: {failure.type}: {failure.message}"]
        locations = [line.strip() for line in failure.traceback.splitlines() if line.startswith("  File ")]
        # The user's own code, not a library that it called.
        libraries = (*_LIBRARIES, *(f'"{folder}' for folder in own_folders()))
        user_locations = [line for line in locations if not any(path in line for path in libraries)]
        lines += [f"  {(user_locations or locations)[-1]}"] if locations else []
        lines += [f"  {advice}" for advice in advise(failure.message)]
    if directory is not None and failure.rank >= 0:
        lines.append(f"  log: {directory.log_of(failure.rank)}")
    return "\n".join(lines)


# --- The error report of a rank whose launcher makes none ---

_SETTLE_S = 1.0


def print_failure(error: Exception, rank: int, world_size: int, directory: RunDirectory | None) -> None:
    """Print the error, unless this rank only lost a peer or rank 0 prints the same error."""
    failure = failure_of(rank, error)
    if isinstance(error, StopRequested):
        if rank == 0:
            print(f"paceline: {error}", file=sys.stderr)
        return
    if failure.victim and world_size > 1:
        print(f"paceline: rank {rank} also ends: {error}", file=sys.stderr)
        return
    if isinstance(error, UserError) and rank != 0 and _rank_0_says_so(error, directory):
        return
    print(f"paceline: {describe(failure, directory)}", file=sys.stderr)


def _rank_0_says_so(error: Exception, directory: RunDirectory | None) -> bool:
    """Return whether rank 0 failed with the same message; a wrong option fails everywhere at about the same time."""
    deadline = time.monotonic() + _SETTLE_S
    while directory is not None and time.monotonic() < deadline:
        told = read_failure(directory.error_of(0))
        if told is not None:
            return told.message == str(error)
        time.sleep(0.05)
    return False


# --- The error report of a job: one message for all ranks. No torch ---


STOPPED = (RESTART_EXIT_CODE, 130)
"""Exit codes of a worker that saved its state after a stop signal."""


@dataclass(frozen=True)
class ProcessExit:
    """The exit of a process.

    Attributes:
        rank: None for an agent, which has ranks of its own.
        code: its exit code; minus the signal's number if one killed it.
        time: Unix time.
        stopped: whether its launcher stopped it.
        starter: its name, if it is a launcher process without a rank.
        failure: the error of the rank, if it could not be recorded.
    """

    rank: int | None
    code: int
    time: float
    stopped: bool = False
    starter: str = ""
    failure: FailureRecord | None = None


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
        asked: the signal that requested the launcher to stop, if any.
        verdict: an addition to the message, or the reason why the launcher itself ended the job.
        said_why: whether a process without a record has already reported its ranks' failure.
    """
    failure = first_failure(directory, exits)
    if failure is not None and failure.type == "Exited" and said_why:
        return failure.exit_code
    # During startup a signal ends a rank at once, and the others lose their peer.
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
    # Stopped as requested, by processes without a handler, which the signal killed.
    return 128 + (asked or signal.SIGTERM)


def first_failure(directory: RunDirectory | None, exits: Sequence[ProcessExit]) -> FailureRecord | None:
    """Return the root-cause failure of a job, or None.

    Recorded errors are root causes, unless they only report a lost peer. A process killed by a signal
    that its launcher did not send is a root cause too. The earliest root cause wins; secondary failures
    only count if there is none.
    """
    failures = []
    for end in exits:
        if end.code == 0 or end.code in STOPPED:
            continue
        recorded = None
        if directory is not None and end.rank is not None:
            recorded = read_failure(directory.error_of(end.rank)) or end.failure
        if recorded is not None:
            if recorded.exit_code not in STOPPED:  # otherwise it had finished, and was killed while exiting
                failures.append(recorded)
        elif not end.stopped:
            failures.append(_unrecorded(directory, end))
    return min(failures, key=lambda failure: (failure.victim, failure.time, failure.rank), default=None)


def expand(end: ProcessExit, directory: RunDirectory | None) -> list[ProcessExit]:
    """Replace an agent's exit by those of its ranks, as recorded; its own code is always 1."""
    if end.rank is not None or end.code == 0 or directory is None:
        return [end]
    recorded = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    ranks = [ProcessExit(f.rank, f.exit_code, f.time, end.stopped) for f in recorded if f is not None]
    # A killed worker records nothing, so keep the agent's own exit for it.
    return ranks if any(f is not None and not f.victim for f in recorded) else [*ranks, end]


def _unrecorded(directory: RunDirectory | None, end: ProcessExit) -> FailureRecord:
    if end.rank is None and end.code > 0:
        message = f"{end.starter} ended with exit code {end.code}; see the output above for the cause"
        kind = "Exited"
    elif end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in signal.valid_signals() else f"signal {-end.code}"
        hint = " (out of memory?)" if end.code == -signal.SIGKILL else ""
        kind, message = "Killed", f"was killed by {name}{hint}"
        if end.rank is None:
            message = f"{end.starter} {message}"
    else:
        kind, message = "Exited", f"exited with status {end.code}"
        # Rank 0 printed to the terminal; its log may be an earlier run's.
        last_line = _last_line(directory, end.rank) if end.rank else ""
        message += f": {last_line.rstrip('.')}" if last_line else ""
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
    """Return the last line that a rank printed, such as the message of an uncaught exception."""
    if directory is None or rank is None:
        return ""
    try:
        with open_regular(directory.log_of(rank)) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 4096))
            lines = [line.strip() for line in file.read(4096).decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1] if lines else ""
