"""Forks one trial after another, with torch imported: ``python -m paceline.tuning.trial_server FD``.

So a trial begins in milliseconds, and has a process of its own all the same: nothing of one trial is left for
the next. This process has no threads, and ends with the process that started it; its trials end with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from paceline.distributed.process import WORKER_STOP_SIGNALS
from paceline.distributed.tether import die_with_parent
from paceline.job import Job

LONGEST = 65536


def main(argv: Sequence[str]) -> int:
    """Fork a trial for each request, one at a time, and tell how it ended."""
    from paceline.worker import preload

    with socket.socket(fileno=int(argv[0])) as orders:
        preload()
        # What asks trials to stop is sent to these themselves.
        for number in WORKER_STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        while content := orders.recv(LONGEST):
            order = json.loads(content)
            process = os.fork()
            if process == 0:
                orders.close()
                os._exit(_trial(Path(order["job"]), Path(order["output"])))
            orders.send(json.dumps({"started": process}).encode())
            _, status = os.waitpid(process, 0)
            orders.send(json.dumps({"exited": os.waitstatus_to_exitcode(status)}).encode())
    return 0


def _trial(job_file: Path, output: Path) -> int:
    """Be a trial; what it prints goes into its own file."""
    die_with_parent(parent=os.getppid())
    for stop_signal in WORKER_STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_DFL)
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    code = 1
    try:
        code = run_trial(Job.from_toml(job_file))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run_trial(job: Job) -> int:
    """Train as ``paceline train`` does: here, or with several processes; return the exit code."""
    from paceline.errors import PacelineError
    from paceline.launchers.training import launch

    try:
        return launch(job)[0]
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
