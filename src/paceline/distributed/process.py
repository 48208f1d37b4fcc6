"""What processes of a job owe each other: a record of their end, stacks when asked, signals. No torch."""

from __future__ import annotations

import faulthandler
import json
import math
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from paceline import errors
from paceline.distributed.tether import die_with_parent as die_with_parent
from paceline.errors import DataError, HangError, PacelineError, PeerLostError, UserError
from paceline.run_directory import RunDirectory, write_atomically
from paceline.stacks import offer_stacks

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a launcher to stop its job."""

WORKER_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a worker to finish its step, save, and end. Slurm warns with SIGUSR1 where it is asked to."""

ECHO_S = 1.0
"""Within this time a second SIGINT is the first one, on another way: from a terminal and a launcher."""

_TURN_S = 0.5


class StopRequests:
    """Tells the first request to stop from those that change nothing and from the one that ends all.

    Only somebody who presses Ctrl-C (SIGINT) beside another request ends at once. Schedulers repeat
    SIGTERM and SIGUSR1, send them to a launcher and to what it started, and kill by themselves when
    their patience ends: a state that is being saved by then must not be given up sooner.

    Signals that come together are handled in the order of their numbers, SIGINT first, so which of two
    was sent first cannot matter. It does where a launcher may pass a Ctrl-C on as another signal.

    Args:
        echo_s: for so long after a SIGINT another one is its echo; above 0, nothing else after it ends.
    """

    def __init__(self, echo_s: float = 0.0) -> None:
        self.first: int | None = None
        self._echo_s = echo_s
        self._interrupted_at = -math.inf

    def hear(self, number: int) -> Literal["first", "again", "end"]:
        """What a signal means: stop in good order, nothing new, or end at once."""
        now = time.monotonic()
        echo = number == signal.SIGINT and now - self._interrupted_at < self._echo_s
        if number == signal.SIGINT and not echo:
            self._interrupted_at = now
        if self.first is None:
            self.first = number
            return "first"
        hurried = number == signal.SIGINT or (self.first == signal.SIGINT and not self._echo_s)
        return "end" if hurried and not echo else "again"


def passed_on(number: int) -> signal.Signals:
    """The signal by which a launcher passes on one that it got: workers know no SIGHUP."""
    return signal.Signals(number) if number in WORKER_STOP_SIGNALS else signal.SIGTERM


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
    f'"{Path(errors.__file__).parent}/',
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


@contextmanager
def signals_handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals so until the block ends; nothing outside the main thread, as Python cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interrupted_afterwards(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Ctrl-C is raised where the block ends, if it ends well: by then it is known what was done.

    A second one is raised at once; any of these signals is Ctrl-C.
    """
    asked: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with signals_handled(numbers, on_signal):
        yield
    if asked:
        raise KeyboardInterrupt


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait in the main thread until these have ended, or until a signal's handler raises.

    In turns, as :func:`wait_for` says.
    """
    for thread in threads:
        while thread.is_alive():
            thread.join(_TURN_S)


def wait_for(event: threading.Event) -> None:
    """Wait in the main thread for what a signal's handler may set.

    In turns: Python looks for signals before it begins a wait, and one that comes just then would be heard
    only when the wait is over.
    """
    while not event.wait(_TURN_S):
        pass


def dump_stacks_on_signal() -> None:
    """Print all threads' Python stacks to stderr on SIGUSR2, and on a crash such as SIGSEGV.

    Whoever watches over this process gets them without a trace; see :mod:`paceline.stacks`.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    offer_stacks()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that what it has started is ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with signals_handled((signal.SIGTERM,), interrupt):
        yield
