"""Ranks of a Slurm job hear each signal once, and end in their own time: ``python -m paceline.launch.stop_codes``.

Slurm signals every process of a step (proctrack/linuxproc), or only the programs that it started itself
(proctrack/cgroup); it signals no process of the batch script, such as mpirun and the ranks on its node. srun, torchrun
and mpirun kill the ranks that still save once the first one has ended with 75, and some end with 1 instead.

So a program above each rank (:func:`run_rank`) passes a signal on, unless Slurm has signalled the rank too. It ends
with 0 in place of 75 and leaves the code in a directory, which the job's script reads when all ranks have ended.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from paceline.core.errors import RESTART_EXIT_CODE
from paceline.core.files import write_atomically
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import WORKER_STOP_SIGNALS, handle_signals

STOP_CODES = "PACELINE_STOP_CODES"
"""The variable that names the directory; set by the job's script.

Its files: ``code-*`` has the exit code of a rank that was asked to stop; the rank removes it when torchrun restarts it.
``failed-*`` has the exit code of the rank that failed first, in a file for each restart by torchrun. ``rank-NODE-PID``
stands for the program above a running rank.
"""

_SLURM_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_CANARY_S = 0.5


def stop_codes_command(python: str, command: Sequence[str], mode: str | None = None) -> tuple[str, ...]:
    """Return the command that runs another one below this module: a rank's, or ``--shield``."""
    return (python, "-P", "-m", "paceline.launch.stop_codes", *([mode] if mode else []), *command)


def leave_stop_code(code: int, *, asked: bool) -> int:
    """Return the exit code for the program that starts ranks: 0 if the job's script gets the code instead.

    Args:
        asked: whether a signal asked them to stop. One that exits with 75 stops of its own accord.
    """
    if code == 0:
        return 0
    try:
        if asked or code == RESTART_EXIT_CODE:
            write_atomically(_stop_code_file(), f"{code}\n".encode())
            return 0
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        with suppress(FileExistsError), _file(f"failed-{attempt:06}").open("x") as first:
            first.write(f"{code}\n")
    except OSError as error:
        print(f"paceline: the exit code {code} could not be left for the job's script: {error}", file=sys.stderr)
    return code


def _file(name: str) -> Path:
    return Path(os.environ[STOP_CODES]) / name


def _stop_code_file() -> Path:
    """The file of a rank, the same one after a restart by the program that starts ranks."""
    local_rank = os.environ.get("LOCAL_RANK", f"of-{os.getpid()}")
    return _file(f"code-{os.uname().nodename}-{os.getppid()}-{local_rank}")


def run_rank(command: Sequence[str]) -> int:
    """Run a rank; return the exit code for the program that starts ranks.

    Raises:
        OSError: it cannot be run.
    """
    # MPICH's daemons pass the mask of `shield` on to their ranks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SLURM_SIGNALS)
    with suppress(OSError):
        _stop_code_file().unlink(missing_ok=True)  # torchrun asks the ranks to stop before it starts them again
    heard: dict[int, bool] = {}
    processes: list[subprocess.Popen[bytes]] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        heard.setdefault(number, False)
        pass_on()

    def pass_on() -> None:
        """Pass on each signal that was heard, unless it has reached the processes below this one by itself."""
        for number, is_passed_on in tuple(heard.items()):
            if len(processes) == 2 and not is_passed_on:
                heard[number] = True
                canary, rank = processes
                try:
                    canary.wait(_CANARY_S)
                except subprocess.TimeoutExpired:
                    rank.send_signal(number)

    with handle_signals(WORKER_STOP_SIGNALS, on_signal), _registered():
        # The canary ends by the first signal that reaches it. The rank stays in this process group, which torchrun
        # signals, and has MPI's open files.
        canary = subprocess.Popen(
            kill_with_parent_command(("sleep", "infinity")), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        processes.append(canary)
        try:
            rank = subprocess.Popen(kill_with_parent_command(command), close_fds=False)
            processes.append(rank)
            pass_on()
            code = rank.wait()
        finally:
            canary.kill()
            canary.wait()
        # One without a handler may be dead before this process has heard.
        asked = bool(heard) or -code in _SLURM_SIGNALS
        return leave_stop_code(128 - code if code < 0 else code, asked=asked)


@contextmanager
def _registered() -> Iterator[None]:
    """Let :func:`signal_ranks` find this process."""
    file = _file(f"rank-{os.uname().nodename}-{os.getpid()}")
    with suppress(OSError):
        file.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def signal_ranks(number: int) -> None:
    """Signal the programs above the job's ranks on this node; each passes a signal on once."""
    for file in _file("").glob(f"rank-{glob.escape(os.uname().nodename)}-*"):
        with suppress(ProcessLookupError):
            os.kill(int(file.name.rpartition("-")[2]), number)


def listen() -> int:
    """Pass Slurm's signals to the ranks on this node until stdin ends: mpirun and horovodrun pass on none."""
    with handle_signals(_SLURM_SIGNALS, lambda number, _: signal_ranks(number)):
        sys.stdin.buffer.read()
    return 0


def shield(command: Sequence[str]) -> int:
    """Become a command that does not hear Slurm's signals, which would end mpirun, its daemons and their ranks."""
    # Daemons have handlers of their own, and some shells clear the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SLURM_SIGNALS)
    for number in _SLURM_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.execvp(command[0], tuple(command))


def main(argv: Sequence[str]) -> int:
    """Run a rank's command, or one of the modes ``--listen`` and ``--shield``; return the exit code."""
    try:
        match argv:
            case ["--listen"]:
                return listen()
            case ["--shield", *command]:
                return shield(command)
            case _:
                return run_rank(argv)
    except OSError as error:
        program = next((word for word in argv if not word.startswith("--")), "")
        print(f"paceline: {program} cannot be run: {error.strerror}.", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
