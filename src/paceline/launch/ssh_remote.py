"""The program that the ssh launcher starts on a machine: ``python -m paceline.launch.ssh_remote OPTIONS -- COMMAND``.

It runs the command while the other end of its standard input is open, and then ends all its processes: ssh itself
forwards no signal, and its remote command continues when it dies.

Its input has one message per line: ``go``: start the command; ``signal N``: forward that signal; ``kill``: end all
immediately; an empty line: a heartbeat. The end of the input, or silence, is the end of the connection.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.core.job import Command
from paceline.core.parent_death import set_child_subreaper
from paceline.launch.supervisor import RankStarter, SupervisedJob, end_processes

READY = "paceline: ready"
"""Printed when nothing is in the way of the command any more."""

_GRACE_S = 30.0
_LAST_OUTPUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.ssh_remote", description=__doc__)
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a message after which it ends")
    parser.add_argument("--shared", type=Path, help="a directory that must be there")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.shared is not None and not options.shared.is_dir():
        print(
            f"paceline: there is no directory {options.shared}. The machines of a job must share the run's "
            "directory: put --run-dir on a file system that they all have.",
            file=sys.stderr,
        )
        return 2
    print(READY, flush=True)
    messages = _messages(options.silence)
    if next((word for word in messages if word), None) != "go":
        return 1
    starter = RankStarter(name="the command", says_why=True, death_signal=signal.SIGKILL, relays_output=True)
    command = Command(title="the command", argv=tuple(options.command))
    job = SupervisedJob((command,), starter=starter, grace_s=_GRACE_S)
    threading.Thread(target=_obey, args=(messages, job), daemon=True).start()
    code = job.wait()
    # Of daemons that have dropped the variable by which the job knows its orphans, this process is the parent as well;
    # they may start others meanwhile.
    set_child_subreaper()
    while children := psutil.Process().children(recursive=True):
        end_processes(children)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return 1 if code == 255 else code  # with 255 ssh says that it has failed itself


def _messages(silence_s: float) -> Iterator[str]:
    """Yield the lines that come in, until the connection has ended."""
    unread = b""
    while select.select([0], [], [], silence_s)[0] and (data := os.read(0, 4096)):
        *lines, unread = (unread + data).split(b"\n")
        yield from (line.decode(errors="replace").strip() for line in lines)


def _obey(messages: Iterator[str], job: SupervisedJob) -> None:
    """Execute messages; end the job, and then this process, when the connection has ended."""
    with suppress(OSError):  # the job has ended just now
        for word in messages:
            if word.startswith("signal "):
                job.forward(int(word.removeprefix("signal ")))
            elif word == "kill":
                job.kill()
            _reap_orphans(job.pids)
        job.cancel()
    time.sleep(_GRACE_S + _LAST_OUTPUT_S)
    os._exit(1)  # the main thread waits for the reader of the last output


def _reap_orphans(own: Collection[int]) -> None:
    """Reap the ended processes that were left to this one, but not its own."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
