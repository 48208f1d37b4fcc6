"""What the kernel says of a process that says nothing itself. No torch; Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from paceline.stacks import parse_frames, stacks_of, whereabouts

_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "R": "runs without answering, as C code does that holds the interpreter",
    "S": "holds the interpreter in a call that blocks",
    "D": "is blocked in the kernel (uninterruptible)",
    "Z": "has ended",
    "X": "has ended",
}


def describe_silence(pid: int | None, limit_s: float = 0.3) -> str:
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
        place = whereabouts(parse_frames(stacks_of(pid, limit_s)))
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
