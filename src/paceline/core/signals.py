"""Signals of a job's processes: requests to stop, and dumps of Python's stacks; why a process does not respond.

No torch.
"""

from __future__ import annotations

import faulthandler
import functools
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from paceline.core.parent_death import die_with_parent as die_with_parent
from paceline.core.plugins import is_own_file

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that request a launcher to stop its job."""

WORKER_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that request a worker to finish its step, save and exit. Slurm can warn with SIGUSR1."""

ECHO_S = 1.0
"""A second SIGINT within this time is an echo: the terminal and the launcher both delivered the first one."""

_TURN_S = 0.5


class StopRequests:
    """Classifies stop signals: the first request, repetitions, and the one that ends the process at once.

    Only Ctrl-C (SIGINT) on top of another request ends the process at once. Schedulers repeat SIGTERM and
    SIGUSR1, send them to a launcher and to its children, and kill by themselves after a grace period; a save in
    progress must not be abandoned earlier.

    Python handles simultaneous signals in the order of their numbers, SIGINT first, so which of two was sent
    first cannot matter, except when a launcher may forward Ctrl-C as another signal.

    Args:
        echo_s: another SIGINT within this time after one is its echo; if above 0, only SIGINT ends the process.
    """

    def __init__(self, echo_s: float = 0.0) -> None:
        self.first: int | None = None
        self._echo_s = echo_s
        self._interrupted_at = -math.inf

    def hear(self, number: int) -> Literal["first", "again", "end"]:
        """Classify a signal: the first request to stop, a repetition, or a request to end at once."""
        now = time.monotonic()
        echo = number == signal.SIGINT and now - self._interrupted_at < self._echo_s
        if number == signal.SIGINT and not echo:
            self._interrupted_at = now
        if self.first is None:
            self.first = number
            return "first"
        hurried = number == signal.SIGINT or (self.first == signal.SIGINT and not self._echo_s)
        return "end" if hurried and not echo else "again"


def forwarded_signal(number: int) -> signal.Signals:
    """Return the signal by which a launcher forwards a signal that it received; workers do not handle SIGHUP."""
    return signal.Signals(number) if number in WORKER_STOP_SIGNALS else signal.SIGTERM


@contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals within the block; do nothing outside the main thread, where Python cannot.

    A SIGHUP that is ignored stays ignored: the user has started the command with ``nohup``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handler) for number in numbers if not _by_nohup(number)}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def _by_nohup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def interrupt_at_exit(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block, so that the block's work completes.

    A second one is raised at once; all of these signals count as Ctrl-C.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    with handle_signals(numbers, on_signal):
        yield
    if received:
        raise KeyboardInterrupt


def wait_for(event: threading.Event) -> None:
    """Wait in the main thread for an event that a signal handler may set.

    It polls: Python checks for signals before it begins a wait, and would handle one that arrives right then only after
    the wait.
    """
    while not event.wait(_TURN_S):
        pass


def dump_stacks_on_signal() -> None:
    """Print all threads' Python stacks to stderr on SIGUSR2, and on a crash such as SIGSEGV.

    Also install the handler through which a supervisor reads them silently; see :mod:`paceline.core.signals`.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    install_dump_handler()


# --- Stacks of this process's threads, and of another process even while a C call holds its interpreter ---
#
# :func:`install_dump_handler` makes ``faulthandler`` write the stacks into a memory file on an otherwise unused
# signal. Other processes of the same user read that file through ``/proc/PID/fd``. No torch.


_FILE = "paceline-stacks"
_SIGNAL = signal.SIGRTMIN
_GLANCE_S = 0.01
_LIBRARIES = ("/site-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen", "<string>")
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_FUNCTIONAL = "/torch/distributed/_functional_collectives.py"  # what split layers wait in
_ENGINE = ("/torch/autograd/graph.py", "_engine_run_backward")
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class Frame(NamedTuple):
    """One call: the function's qualified name, if known, and its location."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"`{self.name}` ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True)
class UserFrame:
    """The location of a thread, as text.

    Attributes:
        where: the innermost call of the user's code, else of Paceline's; "" if unknown.
        inside: the innermost call of the thread, if ``where`` is not the innermost.
        collective: the torch.distributed function in which the user's code, or a split layer, waits; "" for none.
        is_users: whether ``where`` is in the user's code.
    """

    where: str = ""
    inside: str = ""
    collective: str = ""
    is_users: bool = False


def locate_user_frame(frames: Sequence[Frame]) -> UserFrame:
    """Return the location of a thread with these frames, innermost first.

    A user's function called by Paceline counts; the user's script that calls Paceline does not.
    """
    if not frames:
        return UserFrame()
    collective = of_layers = ""
    chosen, is_users = frames[0], False
    for frame in frames:
        if frame.file.endswith(_COLLECTIVES):
            collective = frame.name  # the outermost is what was called
        elif frame.file.endswith(_FUNCTIONAL):
            of_layers = of_layers or frame.name
        elif is_own_file(frame.file):
            chosen = frame
            break
        elif not any(part in frame.file for part in _LIBRARIES):
            chosen, is_users = frame, True
            break
    waits_in = of_layers or (collective if is_users else "")
    return UserFrame(
        where=str(chosen),
        inside="" if chosen == frames[0] else str(frames[0]),
        collective=f"torch.distributed.{waits_in}" if waits_in else "",
        is_users=is_users,
    )


def frames_of(thread: int) -> list[Frame]:
    """Return the frames of a thread of this process, innermost first.

    A thread that runs a backward on a GPU waits for a thread of torch's autograd, which calls the hooks and the user's
    functions: the frames of that one come first. If there are several, as for several GPUs, that of a collective does.
    """
    stacks = {ident: _unwind(frame) for ident, frame in sys._current_frames().items()}
    frames = stacks.pop(thread, [])
    if not frames or frames[0].name != _ENGINE[1] or not frames[0].file.endswith(_ENGINE[0]):
        return frames
    python_threads = {
        thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }
    hooks = [stack for ident, stack in stacks.items() if ident not in python_threads]
    return max(hooks, key=_is_in_collective, default=[]) + frames


def _is_in_collective(frames: Sequence[Frame]) -> bool:
    return any(frame.file.endswith((_COLLECTIVES, _FUNCTIONAL)) for frame in frames)


def _unwind(innermost: FrameType) -> list[Frame]:
    frame: FrameType | None = innermost
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(Frame(code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno))
        frame = frame.f_back
    return frames


def all_stacks(first: int) -> str:
    """Return the stacks of all threads of this process but the calling one, thread ``first`` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in stacks
        if ident != threading.get_ident()
    )


@functools.cache
def install_dump_handler() -> None:
    """Let other processes of this user request this process's stacks; a second call does nothing."""
    faulthandler.register(_SIGNAL, file=os.memfd_create(_FILE), all_threads=True, chain=False)


def stacks_of(pid: int, limit_s: float = 0.5) -> str:
    """Return the stacks of another process, in ``faulthandler``'s format; "" if it does not answer in time."""
    with suppress(OSError, StopIteration, ValueError):
        directory = Path(f"/proc/{pid}/fd")
        file = next(link for link in directory.iterdir() if _FILE in os.readlink(link))
        if not _is_caught(pid):
            return ""
        before = file.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + limit_s
        size = before
        while time.monotonic() < deadline:
            time.sleep(_GLANCE_S)
            now = file.stat().st_size
            if now == size > before:
                break
            size = now
        with file.open("rb") as stacks:
            stacks.seek(before)
            return stacks.read().decode(errors="replace")
    return ""


def _is_caught(pid: int) -> bool:
    """Return whether the process handles the signal; otherwise the signal would kill it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def parse_frames(stacks: str) -> list[Frame]:
    """Parse the frames of the interrupted thread, innermost first, out of ``faulthandler``'s text."""
    # The thread that took the signal, which is the main thread, is the "current" one.
    _, _, current = stacks.rpartition("Current thread")
    thread = (current or stacks).split("\n\n", 1)[0]
    return [Frame(m["name"], m["file"], int(m["line"])) for m in _FRAME.finditer(thread)]


# --- The kernel's view of an unresponsive process. No torch; Linux ---


_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "R": "runs without answering, as C code does that holds the interpreter",
    "S": "holds the interpreter in a call that blocks",
    "D": "is blocked in the kernel (uninterruptible)",
    "Z": "has ended",
    "X": "has ended",
}


def describe_unresponsive(pid: int | None, limit_s: float = 0.3) -> str:
    """Explain why a process does not answer, as a predicate ("is stopped"); "" if it is gone.

    Args:
        pid: the process's id.
        limit_s: time to wait for its stack.
    """
    state = state_of(pid) if pid is not None else ""
    if not state or pid is None:
        return ""
    text = _STATES.get(state, f"is in state {state}")
    if state in "DS":
        text += _in_kernel(pid)
    if state in "RS":
        located = locate_user_frame(parse_frames(stacks_of(pid, limit_s)))
        text += f", in {located.where}" if located.where else ""
    return text


def is_computing(pid: int) -> bool:
    """Return whether a thread of a process runs, waits for a processor, or for a disk in the kernel.

    Any thread counts, since backward and optimizers compute in threads of their own. A process that is stuck while
    one of its threads spins therefore counts too.
    """
    with suppress(OSError):
        return any(state_of(f"{pid}/task/{thread}") in {"R", "D"} for thread in os.listdir(f"/proc/{pid}/task"))
    return False


def state_of(pid: int | str) -> str:
    """Return the letter of a process's state, as in ``/proc/PID/stat``; "" if there is no such process."""
    with suppress(OSError, IndexError):
        # The name in front may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _in_kernel(pid: int) -> str:
    """Name the kernel function in which the process waits, if the kernel reports it."""
    with suppress(OSError):
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip()
        return f", waiting in {wchan}" if wchan not in ("", "0") else ""
    return ""
