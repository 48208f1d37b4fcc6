"""The process that forks workers, asked without an agent."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW = """
import multiprocessing, os, signal, socket, sys, time
from multiprocessing import util
from paceline.core.fork_server import ForkServerProcess
from paceline.core.signals import WORKER_STOP_SIGNALS
from paceline.training.worker import prepare_child
from paceline.training import worker

setsid = os.setsid

def late():
    time.sleep(0.5)
    setsid()

os.setsid = late

def main(job, *arguments):
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    names = util.get_temp_dir(), f"/dev/shm/sem.{semaphore._semlock.name[1:]}"
    print(*names, file=open(job.with_name("started"), "w"), flush=True)
    time.sleep(600)

worker.main_under_agent = main
for number in WORKER_STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
child = ForkServerProcess(socket.socket(fileno=int(sys.argv[1])), prepare_child).serve()
sys.exit(0 if child is None else child())
"""


def test_a_worker_heeds_what_it_is_sent_as_soon_as_it_is_there(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = socket.socketpair()
    with ours, channel, other:
        with theirs:
            command = [sys.executable, "-c", SLOW, str(theirs.fileno())]
            popen = run_processes.start(command, pass_fds=(theirs.fileno(),))
        request = {"fork": 1, "local_index": 0, "job_file": str(tmp_path / "job.json")}
        socket.send_fds(ours, [json.dumps(request).encode()], [other.fileno()])
        content, (pidfd,), _, _ = socket.recv_fds(ours, 4096, 1)
        told = json.loads(content)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        os.close(pidfd)
        assert json.loads(ours.recv(4096)) == {"exited": told["pid"], "code": -signal.SIGTERM}
        # What a killed worker has put into multiprocessing's temporary folder goes with it, and what it has named.
        socket.send_fds(ours, [json.dumps(request).encode()], [other.fileno()])
        content, (pidfd,), _, _ = socket.recv_fds(ours, 4096, 1)
        told = json.loads(content)
        started = tmp_path / "started"
        wait_until(lambda: started.is_file() and started.read_text().endswith("\n"), "the worker runs")
        folder, semaphore = map(Path, started.read_text().split())
        assert folder.is_dir()
        assert semaphore.is_file()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        assert json.loads(ours.recv(4096)) == {"exited": told["pid"], "code": -signal.SIGKILL}
        assert not folder.exists()
        assert not semaphore.exists()
    assert run_processes.finish(popen).returncode == 0
