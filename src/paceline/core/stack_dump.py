"""Where a process stands: its Python stacks on request, and what the kernel says of it."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import paceline

# --- Where threads are: this process's, and another's even while its interpreter is held. No torch ---
#
# Who calls :func:`install_dump_handler` can be asked from outside: on a signal that nothing else uses,
# ``faulthandler`` writes the stacks into a file in memory, which whoever may read ``/proc/PID/fd`` can read.


_FILE = "paceline-stacks"
_SIGNAL = signal.SIGRTMIN
_GLANCE_S = 0.01
_LIBRARIES = ("/site-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen", "<string>")
_OURS = f"{Path(paceline.__file__).parent}/"
_RECIPES = f"{_OURS}training/tasks/"  # tasks, as a user would write them
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_FUNCTIONAL = "/torch/distributed/_functional_collectives.py"  # what split layers wait in
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class Frame(NamedTuple):
    """One call: its function, with the class where that is known, and where it is."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"`{self.name}` ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True)
class UserFrame:
    """Where a thread is, in words.

    Attributes:
        where: the innermost call of the user's code, else of Paceline's; "" where there is none.
        inside: the innermost call of all, where that is another one.
        collective: the function of torch.distributed that the user's code, or a split layer, waits in; "" for
            none.
        is_users: whether ``where`` is in the user's code.
    """

    where: str = ""
    inside: str = ""
    collective: str = ""
    is_users: bool = False


def locate_user_frame(frames: Sequence[Frame]) -> UserFrame:
    """Where a thread with these frames is, the innermost first.

    A user's function that Paceline has called counts; the user's script that has called Paceline does not.
    """
    if not frames:
        return UserFrame()
    collective = of_layers = ""
    found, is_users = frames[0], False
    for frame in frames:
        if frame.file.endswith(_COLLECTIVES):
            collective = frame.name  # the outermost is what was called
        elif frame.file.endswith(_FUNCTIONAL):
            of_layers = of_layers or frame.name
        elif frame.file.startswith(_OURS) and not frame.file.startswith(_RECIPES):
            found = frame
            break
        elif not any(part in frame.file for part in _LIBRARIES):
            found, is_users = frame, True
            break
    waits_in = of_layers or (collective if is_users else "")
    return UserFrame(
        where=str(found),
        inside="" if found == frames[0] else str(frames[0]),
        collective=f"torch.distributed.{waits_in}" if waits_in else "",
        is_users=is_users,
    )


def frames_of(thread: int) -> list[Frame]:
    """The frames of a thread of this process, the innermost first."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(Frame(code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno))
        frame = frame.f_back
    return frames


def all_stacks(first: int) -> str:
    """The stacks of all threads of this process but the calling one, one of them first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in stacks
        if ident != threading.get_ident()
    )


@functools.cache
def install_dump_handler() -> None:
    """Let other processes of this user ask for this one's stacks; a second call does nothing."""
    faulthandler.register(_SIGNAL, file=os.memfd_create(_FILE), all_threads=True, chain=False)


def stacks_of(pid: int, limit_s: float = 0.5) -> str:
    """The stacks of another process, in ``faulthandler``'s form; "" where it does not tell them in time."""
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
    """Whether the process has a handler for the signal: else it would die of it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def parse_frames(stacks: str) -> list[Frame]:
    """The frames of the thread that was asked, the innermost first, out of ``faulthandler``'s text."""
    # The thread that took the signal, which is the main thread, is the "current" one.
    _, _, current = stacks.rpartition("Current thread")
    thread = (current or stacks).split("\n\n", 1)[0]
    return [Frame(m["name"], m["file"], int(m["line"])) for m in _FRAME.finditer(thread)]


# --- What the kernel says of a process that says nothing itself. No torch; Linux ---


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
    """Why a process does not answer, as the end of a sentence whose subject it is; "" where it has gone.

    Args:
        pid: the process's id.
        limit_s: how long to wait for its stack.
    """
    state = state_of(pid) if pid is not None else ""
    if not state or pid is None:
        return ""
    text = _STATES.get(state, f"is in state {state}")
    if state in "DS":
        text += _in_kernel(pid)
    if state in "RS":
        place = locate_user_frame(parse_frames(stacks_of(pid, limit_s)))
        text += f", in {place.where}" if place.where else ""
    return text


def state_of(pid: int) -> str:
    """The letter of a process's state, as in ``/proc/PID/stat``; "" where there is no such process."""
    with suppress(OSError, IndexError):
        # The name in front may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _in_kernel(pid: int) -> str:
    """The kernel's function that the process waits in, where the kernel tells it."""
    with suppress(OSError):
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip()
        return f", waiting in {wchan}" if wchan not in ("", "0") else ""
    return ""
