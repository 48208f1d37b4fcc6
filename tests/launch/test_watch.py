"""Waiting for jobs whose system does not answer for a while."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import LaunchError
from paceline.launch import status_poller
from paceline.launch.job_records import JobRecord, read_records
from paceline.launch.launcher import JobHandle, JobStatus
from paceline.launch.slurm import SlurmJob
from paceline.launch.submit import finish
from paceline_clouds.sagemaker import SageMakerJob
from paceline_frameworks.submitit import SubmititJob
from paceline_kubernetes.api import KubernetesJob

AWAY = LaunchError("the cluster is not reachable.")
RUNNING = JobStatus(state="running")
SUCCEEDED = JobStatus(state="succeeded", exit_code=0)
FORGOTTEN = JobStatus(state="unknown", detail="Slurm does not know job 7 any more")


@dataclasses.dataclass
class Clock:
    """What passes while somebody sleeps."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(status_poller, "time", clock)
    return clock


def handle(kind: str, folder: Path) -> JobHandle:
    submitit = {"id": "7", "folder": str(folder), "tasks": 1, "is_command": True}
    made: dict[str, Callable[[], JobHandle]] = {
        "slurm": lambda: SlurmJob({"id": "7", "directory": str(folder), "logs": ["x.log"]}),
        "submitit": lambda: SubmititJob({**submitit, "executor": "slurm"}),
        "kubernetes": lambda: KubernetesJob({"id": "t-7", "kind": "Job", "nodes": [1, 1]}),
        "sagemaker": lambda: SageMakerJob({"id": "t-7", "region": None, "nodes": 1}),
    }
    return made[kind]()


def answering(*answers: Any) -> Callable[..., Any]:
    """Gives these answers one after another, the last one for ever; raises those that are errors."""

    def ask(*_: Any) -> Any:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def endless() -> Iterator[Any]:
        yield from answers
        while True:
            yield answers[-1]

    left = endless()
    return ask


@pytest.mark.parametrize("kind", ["slurm", "submitit", "kubernetes", "sagemaker"])
def test_a_question_that_is_not_answered_does_not_end_the_wait(
    kind: str,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = handle(kind, tmp_path)
    monkeypatch.setattr(type(job), "status", answering(AWAY, AWAY, RUNNING, AWAY, SUCCEEDED))
    assert job.wait() == 0
    said = capsys.readouterr().err
    assert said == "paceline: the cluster is not reachable. Retrying for 10 min.\n" * 2


@pytest.mark.parametrize("kind", ["slurm", "submitit", "kubernetes", "sagemaker"])
def test_a_system_that_stays_away_ends_the_wait(
    kind: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = handle(kind, tmp_path)
    monkeypatch.setattr(type(job), "status", answering(RUNNING, AWAY))
    with pytest.raises(LaunchError, match="not reachable"):
        job.wait()
    assert 600 < clock.now - 1000 < 620


@pytest.mark.parametrize("kind", ["slurm", "submitit", "kubernetes", "sagemaker"])
def test_logs_are_followed_while_the_system_is_away(
    kind: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = handle(kind, tmp_path)
    asked = answering(AWAY, RUNNING, AWAY, SUCCEEDED)
    module = {"kubernetes": "paceline_kubernetes.api", "sagemaker": "paceline_clouds.sagemaker"}.get(kind)
    monkeypatch.setattr(f"{module or 'paceline.launch.job_logs'}.time", clock)
    monkeypatch.setattr(type(job), "status", asked)
    if kind == "kubernetes":
        monkeypatch.setattr("paceline_kubernetes.api._POLL_S", 0.0)
        monkeypatch.setattr(type(job), "intervals_s", (0.0, 0.0))
        monkeypatch.setattr(job, "_pods", answering(AWAY, []))
    elif kind == "sagemaker":
        event = {"eventId": "1", "timestamp": 1, "logStreamName": "t-7/algo-1-1", "message": "last words"}
        monkeypatch.setattr(job, "_events", answering([], AWAY, [event]))
    else:
        monkeypatch.setattr(type(job), "_log_files", lambda self: [], raising=False)
    assert list(job.logs(follow=True)) == (["last words"] if kind == "sagemaker" else [])


def test_a_job_of_another_machine_is_followed_to_its_end(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = JobStatus(state="unknown", detail="it runs on node7")
    monkeypatch.setattr("paceline.launch.job_logs.time", clock)
    monkeypatch.setattr(SubmititJob, "status", answering(elsewhere, elsewhere, SUCCEEDED))
    (tmp_path / "7_0_log.out").write_text("last words\n")
    reference = {"id": "7", "folder": str(tmp_path), "tasks": 1, "is_command": True, "executor": "local"}
    assert list(SubmititJob(reference).logs(follow=True)) == ["last words"]


def test_a_job_that_slurm_has_forgotten_ends_the_wait(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, logs in (("slurm", "x.log"), ("submitit", str(tmp_path))):
        job = handle(kind, tmp_path)
        monkeypatch.setattr(type(job), "status", answering(RUNNING, FORGOTTEN))
        with pytest.raises(LaunchError, match=f"does not know job 7 any more. Its logs: {logs}"):
            job.wait()


@pytest.mark.integration
@pytest.mark.parametrize("said", ["Socket timed out on send/recv operation", "Zero Bytes were transmitted"])
def test_a_controller_that_is_too_busy_has_not_forgotten_the_job(
    said: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'slurm_load_jobs error: {said}' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LaunchError, match=f"the cluster is not reachable.*{said}"):
        handle("slurm", tmp_path).status()


def test_no_library_comes_of_waiting(clock: Clock) -> None:
    missing = LaunchError("Install it.")
    missing.__cause__ = ImportError("boto3")
    with pytest.raises(LaunchError, match="Install it"):
        status_poller.StatusPoller(answering(missing)).wait()


def test_an_end_that_cannot_be_asked_for_again_is_still_an_end(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    job = handle("slurm", tmp_path)
    monkeypatch.setattr(SlurmJob, "status", answering(SUCCEEDED, AWAY))
    record = JobRecord(id="slurm-7", launcher="slurm", name="t", command=("t",), directory=str(tmp_path), reference={})
    assert finish(record, job) == 0
    assert read_records() == [], "nothing wrong is remembered"
