"""Kill a process when its parent dies: ``python parent_death.py SIGNAL PARENT_PID COMMAND...``, or a call.

Standard library only, and run by path: it stands between a launcher and a worker for some 20 ms. A ``preexec_fn`` would
run Python between fork and exec, which can deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process signal ``number`` when its parent ends. Linux only.

    The kernel watches the *thread* that started this process. The setting survives ``exec``, not ``fork``.

    Args:
        parent: the parent's process id; if that process has already ended, the signal is raised at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def set_child_subreaper(adopt: bool = True) -> None:
    """Make this process adopt descendants whose own parent dies, or stop doing so. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def kill_with_parent_command(command: Sequence[str], number: int = signal.SIGKILL) -> tuple[str, ...]:
    """Wrap ``command`` so that it gets signal ``number`` when the thread that starts it ends."""
    return (sys.executable, "-I", "-S", __file__, str(int(number)), str(os.getpid()), *command)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        print(f"paceline: {sys.argv[3]} cannot be run: {error.strerror}.", file=sys.stderr)
        sys.exit(127)
