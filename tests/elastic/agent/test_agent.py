"""The agent over scripted workers: who is replaced, who is not, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lab.listening_agent import listening_agent
from tests.processes import children, runs

from paceline.core.job import LaunchSpec, Placement, RecoveryPolicy
from paceline.elastic.consensus.discovery import DiscoveryInfo, PeerDirectory, record_agents
from paceline.elastic.consensus.messages import NodeSet
from paceline.elastic.consensus.witness import FileWitness
from paceline.elastic.leader import JobLeader, make_planner
from paceline.elastic.node import Ended, FileWork
from paceline.runs.directory import RunDirectory

DRIVER = Path(__file__).with_name("driver.py")


class Job:
    """An agent in a process of its own, and what its workers leave in the run's directory."""

    def __init__(self, processes: Any, path: Path, wait_until: Callable[..., None]) -> None:
        self.processes, self.path, self.wait_until = processes, path, wait_until

    def start(
        self,
        nproc: int,
        faults: Mapping[str, Any],
        *,
        steps: int = 200,
        max_restarts: int = 8,
        recover: str = "inplace",
        port: int | None = None,
        imports_long: bool = False,
    ) -> subprocess.Popen[str]:
        script = {"steps": steps, "world": nproc, "faults": faults, "imports_long": imports_long}
        (self.path / "job.json").write_text(json.dumps(script))
        started: subprocess.Popen[str] = self.processes.start(
            [sys.executable, DRIVER, str(nproc), str(max_restarts), recover, *([] if port is None else [str(port)])],
            cwd=self.path,
        )
        return started

    def run(self, nproc: int, faults: Mapping[str, Any], **options: Any) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(nproc, faults, **options))

    def finish(self, popen: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.processes.finish(popen)
        assert self.alive() == [], "workers are left"
        return done

    def wait_for_step(self, popen: subprocess.Popen[str], step: int) -> None:
        def there() -> bool:
            assert popen.poll() is None, popen.communicate()
            file = self.path / "step"
            return file.exists() and int(file.read_text()) >= step

        self.wait_until(there, f"step {step}")

    def wait_gone(self, pids: list[int]) -> None:
        self.wait_until(lambda: not any(runs(pid) for pid in pids), f"the end of {pids}")

    def pids(self, index: int) -> list[int]:
        return [int(line) for line in (self.path / f"starts-{index}").read_text().split()]

    def alive(self) -> list[int]:
        started = [int(pid) for file in self.path.glob("starts-*") for pid in file.read_text().split()]
        return [pid for pid in started if runs(pid)]

    def groups(self) -> dict[int, list[int]]:
        """The local indices of each generation, by rank."""
        groups: dict[int, dict[int, int]] = {}
        for line in (self.path / "groups").read_text().splitlines():
            generation, rank, _, index = json.loads(line)
            groups.setdefault(generation, {})[rank] = index
        return {g: [of[r] for r in sorted(of)] for g, of in sorted(groups.items())}

    def last_group(self) -> list[int]:
        """The local indices of the newest generation but the first."""
        [_, *later] = self.groups().values()
        return later[-1] if later else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.path / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture
def job(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> Job:
    return Job(run_processes, tmp_path, wait_until)


def test_without_a_fault_there_is_one_group_and_no_event(job: Job) -> None:
    done = job.run(3, {})
    assert (done.returncode, done.stderr) == (0, "")
    assert job.groups() == {0: [0, 1, 2]}
    assert not (job.path / "events.jsonl").exists()


def test_a_start_without_enough_nodes_ends_after_its_time_limit(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = job.run(1, {}, port=port)
    assert done.returncode == 2, done.stderr
    assert "the run begins with 2 nodes (--nodes). After 1 s (--init-timeout)" in done.stderr
    assert "reach each other is 1. Start all nodes within that time" in done.stderr


def test_killed_and_stopped_members_are_replaced(job: Job) -> None:
    done = job.run(3, {"0:1": [50, "kill"], "2:1": [120, "stop"]}, steps=400)
    assert done.returncode == 0
    lost, *_, continues = done.stderr.splitlines()
    follows = r"The others continue, and another worker starts\."
    assert re.fullmatch(rf"paceline: after step \d+, rank 0 on \S+ was killed by SIGKILL\. {follows}", lost)
    assert re.search(rf"rank 1 on \S+ did not answer within 1.5 s: it is stopped \(SIGSTOP\)\. {follows}", done.stderr)
    assert re.fullmatch(r"paceline: training continues after step \d+ with 3 workers, [\d.]+ s later\.", continues)
    groups = list(job.groups().values())
    # Survivors go on in their order; a worker that joins is last, whether it joins at once or in a group of its own.
    assert [group for group in groups if len(group) == 3] == [[0, 1, 2], [1, 2, 0], [1, 0, 2]]
    assert [group for group in groups if len(group) < 3] in ([], [[1, 2]], [[1, 0]], [[1, 2], [1, 0]])
    assert [(e["local_index"], e["how"]) for e in job.events("fault")] == [
        (0, "was killed by SIGKILL"),
        (2, "did not answer within 1.5 s: it is stopped (SIGSTOP)"),
    ]
    assert [e["members"] for e in job.events("group")] == groups[1:]
    assert [e["generation"] for e in job.events("joined")] == list(job.groups())[1:]
    assert max(e["seconds"] for e in job.events("group")) >= 1
    assert f"worker 2 of {job.pids(2)[1]}" in (job.path / "logs/rank-2.log").read_text()
    # All have the launcher's terminal, whichever of them is rank 0.
    assert {f"terminal of {index}" for index in range(3)} <= set(done.stdout.splitlines())


def test_a_member_that_computes_without_an_answer_has_the_time_of_a_step(job: Job) -> None:
    done = job.run(3, {"1:1": [20, "busy"], "2:1": [20, "grip"]}, steps=500)
    assert done.returncode == 0
    ((index, how),) = [(event["local_index"], event["how"]) for event in job.events("fault")]
    assert (index, how.partition(" it ")[0]) == (2, "did not answer within 4 s:")
    assert "runs without answering, as C code does that holds the interpreter" in how


def test_a_worker_for_which_there_is_no_log_prints_to_the_terminal(job: Job) -> None:
    (job.path / "logs/rank-1.log").mkdir(parents=True)
    done = job.run(2, {})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"worker 1 of {job.pids(1)[0]}" in done.stdout.splitlines()


@pytest.mark.integration
def test_a_stderr_on_a_full_disk_does_not_end_the_agent() -> None:
    says = "from paceline.core.standard_streams import print_status; print_status('the run continues.')"
    program = f"{says}; print('so does the agent')"
    with open("/dev/full", "w") as full:
        popen = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full)
        assert popen.communicate(timeout=60)[0] == b"so does the agent\n"


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[PeerDirectory]:
    """The peers of an agent whose witness directory is not there."""
    directory = RunDirectory(tmp_path)
    meeting = DiscoveryInfo(
        name="a",
        is_first=True,
        address="127.0.0.1",
        interface="lo",
        endpoints=(),
        token=b"",
        listener=None,
        hello={},
        witness=FileWitness(tmp_path / "nowhere", "0" * 32),
    )
    spec = LaunchSpec(
        command=("worker",),
        job_file=tmp_path / "job.toml",
        placement=Placement(log_directory=directory),
    )
    files = FileWork(lambda: None)
    yield PeerDirectory(spec, directory, meeting, None, files)
    files.close()


def test_an_agent_of_another_start_of_the_run_is_refused(
    peers: PeerDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.sees_directory_of("b", {"lease": "0" * 32})
    assert peers.sees_directory_of("c", {})  # it does not know yet
    assert not capsys.readouterr().err
    for _ in range(3):
        assert not peers.sees_directory_of("d", {"lease": "1" * 32})
    assert capsys.readouterr().err.count("d belongs to another start of this run") == 1


@pytest.mark.parametrize("several", [False, True], ids=["one node", "two nodes"])
def test_a_start_leaves_the_run_to_an_agent_that_lacks_the_lock(job: Job, several: bool) -> None:
    """As a survivor does until it leads: its leader has died, and has left the lock."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if several else None
    # It accepts connections, and says nothing: a stranger at a port that an agent had.
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        with listening_agent(job.path, "b") as survivor:
            agents = [("a", ("127.0.0.1", port or 9)), ("b", survivor), ("c", stranger.getsockname())]
            record_agents(RunDirectory(job.path), agents, job.path / "job.json")
            done = job.run(1, {}, port=port)
        assert f"{job.path} is in use by another process." in done.stderr
        assert not (job.path / "groups").exists()
        done = job.run(1, {})
    assert (done.returncode, done.stderr) == (0, "")


def test_another_runs_agent_at_an_old_port_is_a_stranger(job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with listening_agent(other, "a") as agent, listening_agent(job.path, "of-this-run-now") as renamed:
        record_agents(RunDirectory(job.path), [("a", agent), ("b", renamed)], job.path / "job.json")
        done = job.run(1, {})
    assert (done.returncode, done.stderr) == (0, "")


def test_why_a_lease_cannot_be_taken_is_said_once(peers: PeerDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert peers.acquire_witness(NodeSet(1, ("a", "b")), frozenset("a")) is None
    assert capsys.readouterr().err.count("cannot be used: No such file or directory") == 1


def test_where_all_die_all_are_started_again(job: Job) -> None:
    done = job.run(2, {"0:1": [50, "kill"], "1:1": [50, "kill"]})
    assert done.returncode == 0
    assert "All restart from the newest checkpoint." in done.stderr
    assert len(job.pids(0)) == len(job.pids(1)) == 2
    assert sorted(list(job.groups().values())[-1]) == [0, 1]


def test_a_worker_that_dies_before_the_first_group_is_replaced(job: Job) -> None:
    done = job.run(2, {"1:1": [0, "early"]})
    assert done.returncode == 0
    assert job.groups() == {0: [0, 1]}


def test_an_exception_after_progress_is_a_fault(job: Job) -> None:
    done = job.run(2, {"1:1": [20, "raise"]})
    assert done.returncode == 0
    assert "exited with status 1: ValueError: a bug. The others continue" in done.stderr
    assert [e["how"] for e in job.events("fault")] == ["exited with status 1"]


@pytest.mark.parametrize(("kind", "step", "code"), [("user", 50, 2), ("bug", 0, 1)])
def test_an_error_that_would_happen_again_ends_the_job(job: Job, kind: str, step: int, code: int) -> None:
    done = job.run(2, {"1:1": [step, kind]})
    assert done.returncode == code
    assert done.stderr.startswith(
        "paceline: an option is wrong" if kind == "user" else "paceline: rank 1 failed first: ValueError: a bug"
    )
    assert len(job.pids(1)) == 1


def test_a_worker_that_computes_wrongly_is_replaced_once(job: Job) -> None:
    done = job.run(2, {"1:1": [0, "corrupt"]})
    assert done.returncode == 0
    (group,) = job.events("group")[:1]
    assert group["recovery"] is True


def test_a_machine_that_computes_wrongly_again_ends_the_job(job: Job) -> None:
    done = job.run(2, {"1:1": [20, "corrupt"], "1:2": [40, "corrupt"]})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("paceline: rank 1 computed another gradient: its machine (m)")
    assert len(job.pids(1)) == 2


def test_a_fault_that_always_comes_back_ends_the_job_and_names_the_step(job: Job) -> None:
    always = {f"{index}:{nth}": [80, "kill"] for nth in range(1, 9) for index in range(2)}
    done = job.run(2, always, max_restarts=3)
    assert done.returncode == 1
    assert "was killed by SIGKILL" in done.stderr
    assert re.search(r"still at step \d+ after 3 replacements", done.stderr)


@pytest.mark.parametrize(("allowed", "starts"), [(0, 1), (1, 2)])
def test_a_restart_is_counted_though_a_peer_notices_the_fault_first(job: Job, allowed: int, starts: int) -> None:
    # The one that has lost its peer says so while the other still writes down its error.
    faults = {f"{index}:{nth}": [20, kind] for nth in (1, 2, 3) for index, kind in ((0, "loses"), (1, "late"))}
    done = job.run(2, faults, max_restarts=allowed, recover="restart")
    assert done.returncode == 1
    assert len(job.pids(0)) == len(job.pids(1)) == starts
    assert re.search(rf"still at step \d+ after {allowed} replacements", done.stderr)
    assert "\npaceline: rank 1 failed first: ValueError: a bug" in f"\n{done.stderr}"
    # One sentence tells of each restart, however many processes end, and although the root cause did not report.
    assert done.stderr.count("All restart from the newest checkpoint.") == allowed


def test_a_restart_keeps_more_workers_than_micro_batches(job: Job) -> None:
    # Several hold one model together.
    (job.path / "run.toml").write_text("format = 1\n[config]\nmicrobatches = 2\n")
    done = job.run(3, {"1:1": [20, "kill"]}, recover="restart")
    assert done.returncode == 0
    lost, continues = done.stderr.splitlines()
    assert lost.endswith("was killed by SIGKILL. All restart from the newest checkpoint.")
    assert re.search(r"training continues after step \d+ with 3 workers, [\d.]+ s later", continues)
    assert job.groups() == {0: [0, 1, 2], 1: [0, 1, 2]}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_signal_is_passed_on_once_and_nobody_is_started_after_it(job: Job, number: int, code: int) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    popen.send_signal(number)
    done = job.finish(popen)
    assert (done.returncode, done.stderr) == (code, "")
    passed_on = int(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert {(job.path / f"asked-{index}").read_text() for index in range(2)} == {str(passed_on)}
    assert len(job.pids(0)) == len(job.pids(1)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_while_the_fork_server_imports_ends_all(job: Job, number: signal.Signals) -> None:
    popen = job.start(2, {}, imports_long=True)
    job.wait_until((job.path / "imports").exists, "the imports")
    family = [child.pid for child in children(popen.pid, recursive=True)]
    assert family
    popen.send_signal(number)
    done = job.finish(popen)
    # The kernel ends the agent on SIGQUIT, which it does not handle.
    assert (done.returncode, done.stderr) == (-number if number == signal.SIGQUIT else 128 + number, "")
    job.wait_gone(family)


def test_a_second_signal_kills(job: Job) -> None:
    popen = job.start(2, {"0:1": [20, "stop"]}, steps=10**6)
    job.wait_for_step(popen, 20)
    os.kill(job.pids(1)[0], signal.SIGSTOP)
    popen.send_signal(signal.SIGTERM)
    popen.send_signal(signal.SIGINT)
    assert job.finish(popen).returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_workers_do_not_survive_an_agent_that_is_killed(job: Job) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    family = [child.pid for child in children(popen.pid, recursive=True)]
    # Not even one that is stopped, and would see no end of file.
    os.kill(job.pids(1)[0], signal.SIGSTOP)
    popen.kill()
    job.wait_gone(family)


def test_a_run_is_in_use_until_its_last_worker_has_gone(job: Job) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    second = job.processes.run([sys.executable, DRIVER, "2", "8", "inplace"], cwd=job.path)
    assert "is in use by another process" in second.stderr
    assert popen.poll() is None
    popen.send_signal(signal.SIGTERM)
    assert job.finish(popen).returncode == 75


def test_a_store_host_that_hangs_is_replaced(job: Job) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    workers = {job.pids(0)[0], job.pids(1)[0]}
    (fork_server,) = children(popen.pid)
    (host,) = [child for child in children(fork_server.pid) if child.pid not in workers]
    os.kill(host.pid, signal.SIGSTOP)
    os.kill(job.pids(1)[0], signal.SIGKILL)  # the next group needs a store
    job.wait_gone([host.pid])
    job.wait_until(lambda: job.last_group() == [0, 1], "both again")
    popen.send_signal(signal.SIGTERM)
    assert job.finish(popen).returncode == 75


def test_workers_outlive_one_fork_server_after_the_other(job: Job) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    known: set[int] = set()  # by the agent, too: it adopts what a fork server has forked
    for _ in range(3):
        job.wait_until(lambda: {child.pid for child in children(popen.pid)} - known, "a fork server")
        (fork_server,) = [child for child in children(popen.pid) if child.pid not in known]
        known.update([fork_server.pid, *(child.pid for child in children(fork_server.pid))])
        fork_server.kill()
        job.wait_gone([fork_server.pid])
    os.kill(job.pids(1)[0], signal.SIGKILL)  # needs a fork server at once
    job.wait_until(lambda: len(job.pids(1)) == 2 and job.last_group() == [0, 1], "both again")
    popen.send_signal(signal.SIGTERM)
    assert job.finish(popen).returncode == 75
    assert len(job.pids(0)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_the_exit_codes_of_workers_that_outlive_their_fork_server(job: Job, number: int, code: int) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    (fork_server,) = children(popen.pid)
    fork_server.kill()
    job.wait_gone([fork_server.pid])
    popen.send_signal(number)
    assert job.finish(popen).returncode == code


def test_the_fork_server_and_the_store_host_are_replaced_too(job: Job) -> None:
    popen = job.start(2, {}, steps=10**6)
    job.wait_for_step(popen, 20)
    workers = {job.pids(0)[0], job.pids(1)[0]}
    (fork_server,) = children(popen.pid)
    others = [child for child in children(fork_server.pid) if child.pid not in workers]
    assert len(others) == 1
    others[0].kill()
    fork_server.kill()
    os.kill(job.pids(1)[0], signal.SIGKILL)
    job.wait_until(lambda: job.last_group() == [0, 1], "both again")
    popen.send_signal(signal.SIGTERM)
    assert job.finish(popen).returncode == 75
    assert len(job.pids(0)) == 1
    assert len(job.pids(1)) == 2


def test_a_late_report_of_a_lost_nodes_worker_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = LaunchSpec(command=("worker",), recovery=RecoveryPolicy(max_restarts=8, recover="inplace"))
    directory, files = RunDirectory(tmp_path), FileWork(lambda: None)
    here: Any = SimpleNamespace(files=files)
    leader = JobLeader(spec, directory, make_planner(spec, -1), here, "127.0.0.1")
    report = {"pid": 1, "code": -9, "killed": "", "silent_s": 0.1, "step": 3, "retired": False, "failure": None}
    leader.ended(Ended(worker=7, local_index=1, **report))
    directory.append_queued_events()
    assert [event["event"] for event in directory.read_events()] == ["fault"]
    assert not leader.shutdown.begun
    assert capsys.readouterr().err == ""
    files.close()
