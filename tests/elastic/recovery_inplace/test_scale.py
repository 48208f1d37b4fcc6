"""Workers leave and join a run at work; the model is that of the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.processes import children

from paceline.core.errors import ConfigError
from paceline.data.audit import audit
from paceline.elastic.agent import AgentConnection, RunStatus
from paceline.runs.directory import RunDirectory

TASK = str(Path(__file__).with_name("faulty.py")) + ":Faulty"
_MOST_VIEWS = 20
STEPS = 40  # of the whole run; an evaluation every 3, a checkpoint every 7


class Run:
    """A training job, and what can be asked of its agent."""

    def __init__(self, processes: Any, path: Path, wait_until: Callable[..., None]) -> None:
        self.processes, self.wait_until = processes, wait_until
        self.directory = RunDirectory(path)

    @property
    def _plan(self) -> Path:
        return self.directory.path.with_name("plan")

    def start(self, nproc: int, recover: str, *, held: bool = True) -> subprocess.Popen[str]:
        """Start to train; while ``held``, each group trains on only once it is asked to re-form."""
        plan = self._plan
        plan.mkdir(exist_ok=True)
        for generation in range(_MOST_VIEWS if held else 0):
            (plan / f"reform-{generation}-0-hold").touch()
        command = [sys.executable, "-m", "paceline", "train", TASK, "--run-dir", str(self.directory.path)]
        command += ["--nproc", str(nproc), "--threads", "1", "--recover", recover, "--set", f"plan={plan}"]
        command += ["--eval-every", "3steps", "--checkpoint-every", "7steps", "--best-metric", "accuracy:max"]
        command += ["--heartbeat", "30"]  # a machine that stalls is no fault
        started: subprocess.Popen[str] = self.processes.start(command, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
        return started

    def connect(self, popen: subprocess.Popen[str]) -> AgentConnection:
        def there() -> bool:
            assert popen.poll() is None, popen.communicate()
            return self.directory.agent.exists()

        self.wait_until(there, "the agent")
        return AgentConnection(self.directory)

    def whole(self, agent: AgentConnection, size: int) -> RunStatus:
        """Wait until so many train together."""
        seen: list[RunStatus] = []

        def there() -> bool:
            seen.append(agent.status())
            assert not seen[-1].stopping, f"the run ended before {size} trained"
            return seen[-1].whole and len(seen[-1].ranks) == size

        self.wait_until(there, f"{size} members")
        return seen[-1]

    def go_on(self) -> None:
        """Train on in the last group."""
        for held in self._plan.glob("reform-*"):
            held.unlink(missing_ok=True)

    def finish(self, popen: subprocess.Popen[str]) -> dict[str, Any]:
        self.go_on()
        done = self.processes.finish(popen, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        report = audit(self.directory)
        assert report.clean, report.verdict
        assert report.steps == STEPS
        assert not self.directory.agent.exists()
        result: dict[str, Any] = json.loads(self.directory.result.read_text())
        return result

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.directory.read_events() if event["event"] == kind]


@pytest.fixture
def run(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> Run:
    return Run(run_processes, tmp_path / "run", wait_until)


@pytest.fixture(scope="module")
def undisturbed(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    quiet = Run(module_processes, tmp_path_factory.mktemp("undisturbed") / "run", lambda *_: None)
    return quiet.finish(quiet.start(1, "none", held=False))


def same(result: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for field in ("model_sha256", "metrics", "steps", "samples", "state_version", "best_step"):
        assert result[field] == undisturbed[field], field


def sizes(events: Sequence[dict[str, Any]]) -> list[int]:
    return [event["world_size"] for event in events]


def test_down_to_one_and_up_again(run: Run, undisturbed: dict[str, Any]) -> None:
    popen = run.start(3, "inplace")
    with run.connect(popen) as agent:
        run.whole(agent, 3)
        [fork_server] = children(popen.pid)
        for target in (1, 4, 2, 3):
            fork_server.suspend()  # or the first may be forked before it is known that there are more to come
            assert agent.scale(nproc=target).target == target
            agent.gather()  # four at once, not one after another
            fork_server.resume()
            run.whole(agent, target)
            if target == 2:
                refused(agent)
    same(run.finish(popen), undisturbed)
    assert [event["target"] for event in run.events("scale")] == [1, 4, 2, 3]
    assert run.events("fault") == []
    assert len(run.events("retired")) == 4
    assert sizes(run.events("group")) == [1, 4, 2, 3]


def refused(agent: AgentConnection) -> None:
    with pytest.raises(ConfigError, match=r"7 processes cannot share 6 micro-batches.*--nproc 6 or"):
        agent.scale(nproc=7)
    with pytest.raises(ConfigError, match="at least 1"):
        agent.scale(nproc=0)


def test_before_the_first_group(run: Run, undisturbed: dict[str, Any]) -> None:
    popen = run.start(3, "inplace")
    with run.connect(popen) as agent:
        assert agent.scale(nproc=2).generation == -1
        run.whole(agent, 2)
    same(run.finish(popen), undisturbed)
    assert sizes(run.events("started")) == [2]


def test_who_is_to_leave_is_killed_before_it_has(run: Run, undisturbed: dict[str, Any]) -> None:
    popen = run.start(3, "inplace")
    with run.connect(popen) as agent:
        status = run.whole(agent, 3)
        agent.scale(nproc=2)
        victim = status.ranks[2].pid
        assert victim is not None
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        run.whole(agent, 2)
    same(run.finish(popen), undisturbed)


def test_those_who_stay_are_killed_while_another_leaves(run: Run, undisturbed: dict[str, Any]) -> None:
    popen = run.start(3, "inplace")
    with run.connect(popen) as agent:
        status = run.whole(agent, 3)
        agent.scale(nproc=2)
        for member in status.ranks[:2]:
            assert member.pid is not None
            os.kill(member.pid, signal.SIGKILL)
        run.whole(agent, 2)
    same(run.finish(popen), undisturbed)


def test_the_command_says_what_became_of_it(run: Run, undisturbed: dict[str, Any]) -> None:
    popen = run.start(2, "inplace")
    with run.connect(popen) as agent:
        run.whole(agent, 2)
    done = run.processes.paceline("scale", run.directory.path, "--nproc", "9")
    assert done.returncode == 2
    assert "9 processes cannot share 6 micro-batches" in done.stderr
    done = run.processes.paceline("scale", run.directory.path, "--nproc", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == 1
    same(run.finish(popen), undisturbed)
    done = run.processes.paceline("scale", run.directory.path, "--nproc", "1")
    assert done.returncode == 2
    assert "is not running" in done.stderr
    done = run.processes.paceline("scale", run.directory.path)
    assert "--nproc N and --nodes N" in done.stderr
