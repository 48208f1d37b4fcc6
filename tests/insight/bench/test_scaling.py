"""paceline bench scaling: what is trained, how efficiency is computed, and what happens when a size fails."""

from __future__ import annotations

import dataclasses
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import Processes

from paceline.cli.job_options import JobOptions
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, LaunchError
from paceline.insight.bench.scaling import ScalingReport, SizeResult, read_result, sized_config
from paceline.launch.launcher import JobHandle, JobStatus, LaunchSpec, RenderedJob
from paceline.launch.slurm import Slurm
from paceline.launch.ssh import Ssh


def result(processes: int, speed: float | None, batch: int = 64) -> SizeResult:
    return SizeResult(
        processes=processes,
        run=f"runs/{processes}",
        global_batch_size=batch if speed else None,
        samples_per_s=speed,
        exit_code=0 if speed else 1,
    )


def test_efficiency_is_the_speed_up_over_that_of_as_many_more_processes() -> None:
    report = ScalingReport("net", "strong", [result(2, 100.0), result(4, 150.0), result(8, None)])
    assert [report.speedup(each) for each in report.results] == [1.0, 1.5, None]
    assert [report.efficiency(each) for each in report.results] == [1.0, 0.75, None]
    assert [each.processes for each in report.failed] == [8]
    [table] = report.tables()
    text = table.as_markdown()
    assert "net: strong scaling (the same global batch)" in text
    assert "| 4 | 64 | 150 | 426.67 | 1.50x | 75% |" in text
    assert "| 8 | - | - | - | - | exit code 1 |" in text
    assert len(ElementTree.fromstring(report.chart()).findall("{*}polyline")) == 2


def test_a_task_is_named_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    [table] = ScalingReport("[old]/net.py:Net", "strong", [result(2, 100.0)]).tables()
    Console(width=100).print(table.as_rich())
    assert "[old]/net.py:Net: strong scaling" in capsys.readouterr().out


def test_the_batch_stays_or_grows(tmp_path: Path) -> None:
    config = RunConfig(task="net", global_batch_size=96)
    strong = sized_config(config, 4, 2, scaling="strong", steps=30, warmup=10, run=tmp_path)
    weak = sized_config(config, 4, 2, scaling="weak", steps=30, warmup=10, run=tmp_path)
    assert (strong.global_batch_size, weak.global_batch_size) == (96, 192)
    assert (weak.nproc, weak.max_steps, weak.log_every) == (4, 40, 10)
    with pytest.raises(ConfigError, match="--scaling weak needs --global-batch-size"):
        sized_config(RunConfig(task="net"), 4, 2, scaling="weak", steps=30, warmup=10, run=tmp_path)


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"global_batch_size": 64}')
    speeds = [(10, 1.0), (20, 100.0), (30, 300.0)]
    records = [{"kind": "train", "step": step, "samples_per_s": speed} for step, speed in speeds]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    # Equal numbers of samples at 100/s and at 300/s take as long as all of them at 150/s.
    assert read_result(tmp_path, 2, 0, warmup=10).samples_per_s == pytest.approx(150)
    assert read_result(tmp_path, 2, 1, warmup=10).samples_per_s is None


def test_sizes_are_trained_and_one_that_fails_is_told(run_processes: Processes, tmp_path: Path) -> None:
    common = ("fashion-mnist-mlp", "--threads", "1", "--steps", "4", "--warmup", "2", "--microbatches", "2")
    done = run_processes.paceline("bench", "scaling", *common, "--nproc", "1,3", "--run-dir", "scaling", "--json")
    # Three processes are more than the two micro-batches.
    assert done.returncode == 1
    report = json.loads(done.stdout)
    first, last = report["results"]
    assert (first["processes"], first["exit_code"], first["efficiency"]) == (1, 0, 1.0)
    assert first["samples_per_s"] > 0
    assert (last["processes"], last["samples_per_s"], last["efficiency"]) == (3, None, None)
    assert last["exit_code"] != 0
    assert json.loads((tmp_path / "scaling/nproc-1/result.json").read_text())["steps"] == 6


def test_each_size_is_a_job(run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    common = ("fashion-mnist-mlp", "--threads", "1", "--steps", "4", "--warmup", "2", "--microbatches", "2")
    on = ("--on", "submitit", "--executor", "local")
    words = ("--nproc", "1,2", *on, "--run-dir", "scaling", "--markdown")
    done = run_processes.paceline("bench", "scaling", *common, *words)
    assert done.returncode == 0, done.stderr
    assert [line.split(" |")[0] for line in done.stdout.splitlines()[4:6]] == ["| 1", "| 2"]
    jobs = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert [job["status"]["state"] for job in jobs] == ["succeeded", "succeeded"]


def test_a_size_without_a_result_has_failed(tmp_path: Path) -> None:
    lost = read_result(tmp_path, 2, 0, warmup=10)
    assert lost.samples_per_s is None
    report = ScalingReport("net", "strong", [result(1, 100.0), lost])
    assert report.failed == [lost]
    assert "| 2 | - | - | - | - | no result |" in report.tables()[0].as_markdown()


class Job(JobHandle):
    """A job that ends as it is told to; one that succeeds leaves a result."""

    def __init__(self, spec: LaunchSpec, end: int | BaseException) -> None:
        self.number, self.end, self.cancelled = spec.name, end, False
        assert spec.run is not None
        self.run = spec.run

    @property
    def reference(self) -> dict[str, Any]:
        return {"id": self.number}

    def status(self) -> JobStatus:
        return JobStatus(state="succeeded" if self.end == 0 else "failed")

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        return iter(())

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self) -> int:
        if isinstance(self.end, BaseException):
            raise self.end
        (self.run / "result.json").write_text('{"global_batch_size": 64}')
        record = {"kind": "train", "step": 30, "samples_per_s": 100.0}
        (self.run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return self.end


class Cluster:
    """A Slurm whose jobs end as they are told to, by their numbers of processes."""

    def __init__(self) -> None:
        self.ends: dict[int, int | BaseException] = {}
        self.jobs: dict[int, Job] = {}

    def submit(self, rendered: RenderedJob) -> JobHandle:
        [nproc] = rendered.spec.nproc
        if nproc not in self.ends:
            raise LaunchError("sbatch refused the job.")
        self.jobs[nproc] = Job(rendered.spec, self.ends[nproc])
        return self.jobs[nproc]

    @property
    def cancelled(self) -> list[int]:
        return [nproc for nproc, job in self.jobs.items() if job.cancelled]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # Which launchers' options there are is decided once in a process, by its command line: here all.
    monkeypatch.setattr(sys, "argv", ["pytest"])
    for launcher in (Slurm, Ssh):
        monkeypatch.setattr(launcher, "submit", lambda launcher, rendered: cluster.submit(rendered))
    return cluster


@dataclasses.dataclass
class Own:
    """A launcher's own options."""

    hosts: str | None = None
    image: str | None = None
    rdzv_backend: str | None = None


def scale_on(on: str, nproc: str, own: Own | None = None, **job: Any) -> int:
    from paceline.cli.bench_scaling import Options, scaling

    return scaling(
        "fashion-mnist",
        run_dir=Path("scaling"),
        options=Options(on=on, nproc=nproc),
        job=JobOptions(**job) if job else None,
        launcher_options=own,
        json=True,
    )


def test_a_job_whose_end_cannot_be_learned_ends_no_other(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.ends = {1: 0, 2: LaunchError("Slurm does not know it any more."), 4: 0}
    assert scale_on("slurm", "1,2,4") == 1
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert [(each["exit_code"], each["samples_per_s"]) for each in results] == [(0, 100), (1, None), (0, 100)]
    assert "paceline: --nproc 2: Slurm does not know it any more.\n" in printed.err
    assert cluster.cancelled == []


@pytest.mark.parametrize(
    ("ends", "error", "cancelled"),
    [({1: 0, 2: KeyboardInterrupt(), 4: 0}, KeyboardInterrupt, [2, 4]), ({1: 0, 2: 0}, LaunchError, [1, 2])],
)
def test_ctrl_c_and_a_refused_size_end_the_others(
    cluster: Cluster,
    ends: dict[int, int | BaseException],
    error: type[BaseException],
    cancelled: list[int],
) -> None:
    cluster.ends = ends
    with pytest.raises(error):
        scale_on("slurm", "1,2,4")
    assert cluster.cancelled == cancelled


def test_hosts_say_how_many_machines_there_are(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.ends = {1: 0, 2: 0}
    assert scale_on("ssh", "1,2", Own(hosts="a,b")) == 0
    assert [each["processes"] for each in json.loads(capsys.readouterr().out)["results"]] == [2, 4]


@pytest.mark.parametrize(
    ("on", "own", "job", "message"),
    [
        ("kubernetes", Own(image="i"), {}, "--on kubernetes: its results are not seen from here"),
        ("sagemaker", None, {}, "paceline train --on sagemaker"),
        ("slurm", None, {"preflight": True}, "--preflight: a scaling benchmark runs no preflight checks"),
        ("slurm", None, {"wait": True}, "--wait: a scaling benchmark waits for its jobs anyway"),
        ("ssh", Own(hosts="a,b"), {"detach": True}, "--detach: a scaling benchmark stays"),
        ("slurm", None, {"env_style": "none"}, "--env-style is for scripts"),
        ("spawn", None, {"gpus_per_node": 2}, "--gpus-per-node: only for jobs on a cluster"),
        ("torchrun", Own(rdzv_backend="static"), {}, "--rdzv-backend: .* but --on is torchrun"),
        ("ssh", Own(hosts="a:2,b:2"), {}, "--nproc 1: --hosts says 2 processes a machine"),
        ("slurm", None, {"gpus_per_node": 1}, "--nproc 2 processes cannot have a GPU each"),
    ],
)
def test_what_no_job_or_not_every_size_can_have_is_refused_before_the_first_is_submitted(
    cluster: Cluster, on: str, own: Own | None, job: dict[str, Any], message: str
) -> None:
    cluster.ends = {1: 0, 2: 0}
    with pytest.raises(ConfigError, match=message):
        scale_on(on, "1,2", own, **job)
    assert cluster.jobs == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nproc", "1,1"), "--nproc must list different numbers"),
        (("--nproc", "auto"), "--nproc must list different numbers"),
        (("--nproc", "1,2", "--steps", "0"), "--steps must be at least 1"),
        (("--nproc", "1,2", "--nodes", "1:2"), "a scaling benchmark is of fixed sizes"),
        (("--nproc", "1,2", "--plot", "scaling.png"), "ends in .svg"),
    ],
)
def test_what_cannot_be_measured_is_refused(run_processes: Processes, words: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("bench", "scaling", "fashion-mnist", *words)
    assert done.returncode == 2
    assert message in done.stderr
