"""One trial: a run that a scheduler may stop."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from paceline.core.config import config_from_mapping
from paceline.core.environment import variables_of_another_job, with_hash_seed
from paceline.core.errors import LaunchError, PacelineError
from paceline.core.files import read_json_lines, write_atomically
from paceline.core.fork_server import (
    Child,
    Exited,
    Forked,
    ForkServer,
    NotForked,
    redirect_output,
    restore_stop_signals,
    run_fork_server,
)
from paceline.core.job import WorkerConfig
from paceline.core.ownership import make_directory
from paceline.core.parent_death import die_with_parent, kill_with_parent_command
from paceline.core.task_loading import parse_assignments
from paceline.runs.directory import RunDirectory, RunLock
from paceline.runs.failures import read_failure
from paceline_fine_tuning.fork import fork_run
from paceline_ray.launcher import own_variables
from paceline_tune.history import TrialState

_SOCKET = "referee"

# --- Forks trials: ``python -m paceline_tune.trial FD``; see :mod:`paceline.core.fork_server` ---
#
# So a trial begins in milliseconds, and has a process of its own all the same: nothing of one trial is left
# for the next. The fork server ends with the process that started it; its trials end with it.


def main(descriptor: int) -> int:
    """Fork a trial for each request; in a forked child, be one."""
    from paceline.training.worker import preload

    return run_fork_server(descriptor, preload, _prepare_trial)


def _prepare_trial(request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
    """Make a forked process a trial, whose output goes into its own file."""
    die_with_parent(parent=request["parent"])
    restore_stop_signals()
    redirect_output(descriptors[0])
    return partial(_train, Path(request["job_file"]))


def _train(job_file: Path) -> NoReturn:
    """Train as ``paceline train`` does: here, or with several processes."""
    from paceline.launch.local_run import launch

    code = 1
    try:
        code = launch(WorkerConfig.from_toml(job_file))[0]
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the task's may still run


# --- A running trial: the process that trains, and its request after each evaluation ---


_LONGEST_LINE = 2048
_POLL_S = 0.1
_START_S = 600.0  # it imports torch, perhaps from a network's disk, on a busy node
_SAVE_S = 60.0
OUTPUT = "output.log"


class TrialDiedError(LaunchError):
    """The trial's process was killed; its run continues from its last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrialCommand:
    """The order to a trial.

    Attributes:
        iteration: number of reported evaluations.
        step: of the last of them; earlier ones are not reported again.
        stop_file: while it exists, the trial saves and ends.
        parent: directory of the run that it continues with other parameters, if it does.
    """

    options: Mapping[str, Any]
    iteration: int
    step: int
    stop_file: Path
    parent: Path | None = None


@dataclass(frozen=True)
class TrialReport:
    """A trial's message: an evaluation, its end, or both.

    Attributes:
        iteration: evaluations so far.
        step: steps at the last of them.
        state: "running", or how the trial ended; "waiting" if it was stopped from outside, and can continue.
    """

    iteration: int
    step: int
    metrics: Mapping[str, float | None]
    state: TrialState = "running"
    message: str = ""


class TrialServer(ForkServer):
    """The process that trials are forked from."""

    def __init__(self) -> None:
        super().__init__(
            kill_with_parent_command([sys.executable, "-P", "-m", "paceline_tune.trial"]),
            # A task of srun's that starts Ray is a rank of its step; a trial is a job of its own.
            with_hash_seed(variables_of_another_job(own_variables())),
        )

    def start(self, job_file: Path, output: Path) -> Forked:
        """Start a trial; a TrialDiedError says that the server has ended."""
        with output.open("ab") as file:
            self.fork(0, [file.fileno()], parent=self.pid, job_file=str(job_file))
        ready, _, _ = select.select([self], [], [], _START_S)
        if not ready:
            raise TrialDiedError(f"the process that starts trials did not answer within {_START_S:.0f} s")
        match self.report():
            case Forked() as forked:
                return forked
            case NotForked(_, error):
                raise TrialDiedError(f"no process could be forked for it: {error}")
            case _:
                raise TrialDiedError("the process that starts trials ended, and did not say why")

    def close(self) -> None:
        """End it, and what trial it has."""
        self.kill()


class RunningTrial:
    """Starts or continues a trial, and receives its messages."""

    def __init__(self, server: TrialServer, order: TrialCommand) -> None:
        self._server = server
        self._order = order
        self._directory = RunDirectory(Path(order.options["run_dir"]))
        self._iteration = order.iteration
        self._step = order.step
        self._metrics: Mapping[str, float | None] = {}
        self._connection: Connection | None = None
        self._asked = False
        self._exit_code: int | None = None
        self._told_to_stop = False
        self._private = make_directory("trial", longest=len(_SOCKET))  # a run's directory may be on a network's disk
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._private / _SOCKET))
        self._listener.listen()
        self._pidfd: int | None = None
        try:
            self._start()
        except BaseException:
            self._close()
            raise

    def _start(self) -> None:
        self._await_lock()
        if self._order.parent is not None and not self._directory.exists():
            fields = parse_assignments(self._order.options["set"])
            fork_run(RunDirectory(self._order.parent), self._directory, fields)
        for old in self._directory.logs.glob("rank-*.error.json"):
            old.unlink(missing_ok=True)
        worker_config = WorkerConfig(
            config=config_from_mapping(dict(self._order.options), "tune.json"),
            explicit_options=frozenset(self._order.options),
            quiet=True,
            trial_scheduler=str(self._private / _SOCKET),
        )
        self._directory.create()
        file = self._directory.path / "trial.toml"
        write_atomically(file, worker_config.to_toml().encode())
        self._pidfd = self._server.start(file, self._directory.logs / OUTPUT).pidfd

    def _await_lock(self) -> None:
        """Wait for the end of an earlier process, which detects only now that its search is gone."""
        if self._directory.is_running():
            with closing(RunLock(self._directory)) as lock:
                if not lock.take_within(_SAVE_S):
                    raise self._directory.in_use()

    def next(self) -> TrialReport:
        """Let it continue, and wait for its next evaluation or its end; a TrialDiedError says that it was killed."""
        if self._asked:
            self._answer(go_on=True)
        while self._exit_code is None:
            if not self._told_to_stop and self._order.stop_file.exists():
                self._told_to_stop = True
                self._signal(signal.SIGTERM)
            message = self._receive()
            if message is None:
                continue
            if message["step"] <= self._step:  # it does again what a kill has cost
                self._answer(go_on=True)
                continue
            self._step = int(message["step"])
            self._metrics = dict(message["metrics"])
            # Counted from the run's records, because a run that continues after a kill reports some of them again.
            self._iteration = sum(step <= self._step for step in self._evaluations())
            if not message["finished"]:
                return self._told("running")
            self._answer(go_on=True)
        return self._ended(self._exit_code)

    def end(self) -> None:
        """Let it save and stop, if it runs, and wait for that."""
        try:
            if self._asked:
                self._answer(go_on=False)
            elif self._exit_code is None:
                self._signal(signal.SIGTERM)
            deadline = time.monotonic() + _SAVE_S
            while self._exit_code is None and time.monotonic() < deadline:
                if self._receive() is not None:
                    self._answer(go_on=False)
            if self._exit_code is None:
                self._signal(signal.SIGKILL)
                while self._exit_code is None:
                    self._receive()
        finally:
            self._close()

    def _close(self) -> None:
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        shutil.rmtree(self._private, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self._pidfd is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _answer(self, *, go_on: bool) -> None:
        self._asked = False
        assert self._connection is not None
        with suppress(OSError):
            self._connection.send_bytes(json.dumps({"go_on": go_on}).encode())

    def _receive(self) -> dict[str, Any] | None:
        """Return its next request, if one arrives soon; record its end."""
        watched: list[ForkServer | socket.socket | Connection] = [self._server, self._listener]
        if self._connection is not None:
            watched.append(self._connection)
        ready, _, _ = select.select(watched, [], [], _POLL_S)
        if self._connection in ready:
            assert self._connection is not None
            try:
                message = dict(json.loads(self._connection.recv_bytes()))  # recv() would unpickle
            except (EOFError, OSError):  # it has ended, or was killed before it has read the last answer
                self._connection.close()
                self._connection = None
            else:
                self._asked = True
                return message
        elif self._listener in ready:
            # Another rank 0 asks, where the one before it was lost.
            if self._connection is not None:
                self._connection.close()
            self._connection = Connection(self._listener.accept()[0].detach())
        elif self._server in ready:
            report = self._server.report()
            self._exit_code = report.code if isinstance(report, Exited) else -signal.SIGKILL
        return None

    def _told(self, state: TrialState, message: str = "") -> TrialReport:
        return TrialReport(self._iteration, self._step, self._metrics, state, message)

    def _ended(self, code: int) -> TrialReport:
        """Return how it ended; a TrialDiedError says that it was killed."""
        if code == 0:
            # A run that had finished before sends no request for its last evaluation.
            evaluations = self._evaluations()
            if evaluations and max(evaluations) > self._step:
                self._step = max(evaluations)
                self._iteration = len(evaluations)
                self._metrics = evaluations[self._step]
            return self._told("finished")
        if code in (75, 130):
            return self._told("waiting")
        failures = [read_failure(path) for path in sorted(self._directory.logs.glob("rank-*.error.json"))]
        recorded = [failure for failure in failures if failure is not None]
        causes = [failure for failure in recorded if not failure.victim]
        first = min(causes, key=lambda failure: failure.time, default=None)
        if first is not None and first.type == "NonFiniteLossError":
            return self._told("diverged", first.message)
        if first is not None and first.type != "Killed":
            return self._told("failed", f"{first.type}: {first.message}")
        # Where those that said why they ended had only lost another rank, that one was killed.
        if not recorded and code > 0 and code != 128 + signal.SIGKILL:
            return self._told("failed", self._last_line() or f"exit code {code}")
        end = f"by {signal.Signals(-code).name}" if -code in signal.valid_signals() else f"(exit code {code})"
        line = self._last_line()
        raise TrialDiedError(
            f"it was killed {end}{f', after it printed: {line}' if line else ''}; see {self._directory.logs / OUTPUT}"
        )

    def _evaluations(self) -> dict[int, Mapping[str, float | None]]:
        """Return the metrics of the run's evaluations, by step."""
        records = read_json_lines(self._directory.metrics)
        of_val = (r for r in records if r.get("kind") == "eval" and r.get("split") == "val")
        return {int(record["step"]): record["metrics"] for record in of_val}

    def _last_line(self) -> str:
        with suppress(OSError):
            return last_line(self._directory.logs / OUTPUT).removeprefix("paceline: ")
        return ""


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty, at most its last kilobytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        lines = file.read(_LONGEST_LINE).decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
