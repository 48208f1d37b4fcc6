"""Ranks in a step of Slurm's that end after its signal, each in its own time: ``python -m paceline.launch.stop_codes``.

Slurm signals every process of a step. srun and torchrun kill the ranks that still save once the first one has ended
with 75, and torchrun ends with 1 instead. So the program above the ranks ends with 0 in place of such a code and leaves
the code in a directory, which the job's script reads when the whole step has ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import RESTART_EXIT_CODE
from paceline.core.files import write_atomically
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import WORKER_STOP_SIGNALS, handle_signals

STOP_CODES = "PACELINE_STOP_CODES"
"""The variable that names the directory; set by the job's script."""


def leave_stop_code(code: int, *, asked: bool) -> int:
    """Return the exit code for Slurm or torchrun: 0 if the job's script gets the code instead.

    Args:
        code: the ranks' exit code.
        asked: whether a signal asked them to stop. One that exits with 75 stops of its own accord.
    """
    if code == 0 or not (asked or code == RESTART_EXIT_CODE):
        return code
    try:
        write_atomically(
            Path(os.environ[STOP_CODES]) / f"{os.uname().nodename}-{secrets.token_hex(8)}", f"{code}\n".encode()
        )
    except OSError as error:
        print(f"paceline: the exit code {code} could not be left for the job's script: {error}", file=sys.stderr)
        return code
    return 0


def run_rank(command: Sequence[str]) -> int:
    """Run a rank, which gets its signals from Slurm; return the exit code for the program that starts ranks.

    Raises:
        OSError: it cannot be run.
    """
    heard: list[int] = []
    with handle_signals(WORKER_STOP_SIGNALS, lambda number, _: heard.append(number)):
        # The rank stays in this process group, which torchrun signals, and has MPI's open files.
        code = subprocess.Popen(kill_with_parent_command(command), close_fds=False).wait()
    # One without a handler may be dead before this process has heard.
    asked = bool(heard) or -code in (signal.SIGTERM, signal.SIGUSR1)
    return leave_stop_code(128 - code if code < 0 else code, asked=asked)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
