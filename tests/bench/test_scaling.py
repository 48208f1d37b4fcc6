"""paceline scan: what is trained, how efficiency is computed, and what happens when a size fails."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.conftest import Processes

from paceline.bench.scaling import ScalingReport, SizeResult, read_result, sized_config
from paceline.config import RunConfig
from paceline.errors import ConfigError


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
    text = report.as_markdown()
    assert "net: strong scaling (the same global batch)" in text
    assert "| 4 | 64 | 150 | 426.67 | 1.50x | 75% |" in text
    assert "| 8 | - | - | - | - | exit code 1 |" in text
    assert len(ElementTree.fromstring(report.chart()).findall("{*}polyline")) == 2


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
    common = ("fashion-mnist-mlp", "--threads", "1", "--steps", "4", "--warmup", "2", "--shards", "2")
    done = run_processes.paceline("scan", *common, "--nproc", "1,3", "--run", "scan", "--json")
    # Three processes are more than the two shards.
    assert done.returncode == 1
    report = json.loads(done.stdout)
    first, last = report["results"]
    assert (first["processes"], first["exit_code"], first["efficiency"]) == (1, 0, 1.0)
    assert first["samples_per_s"] > 0
    assert (last["processes"], last["samples_per_s"], last["efficiency"]) == (3, None, None)
    assert last["exit_code"] != 0
    assert json.loads((tmp_path / "scan/nproc-1/result.json").read_text())["steps"] == 6


def test_each_size_is_a_job(
    run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    common = ("fashion-mnist-mlp", "--threads", "1", "--steps", "4", "--warmup", "2", "--shards", "2")
    on = ("--on", "submitit", "--executor", "local")
    done = run_processes.paceline("scan", *common, "--nproc", "1,2", *on, "--run", "scan", "--markdown")
    assert done.returncode == 0, done.stderr
    assert [line.split(" |")[0] for line in done.stdout.splitlines()[4:6]] == ["| 1", "| 2"]
    jobs = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert [job["status"]["state"] for job in jobs] == ["succeeded", "succeeded"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nproc", "1,1"), "--nproc must list different numbers"),
        (("--nproc", "auto"), "--nproc must list different numbers"),
        (("--nproc", "1,2", "--steps", "0"), "--steps must be at least 1"),
        (("--nproc", "1,2", "--nodes", "1:2"), "a scan is of fixed sizes"),
        (("--nproc", "1,2", "--plot", "scan.png"), "ends in .svg"),
    ],
)
def test_what_cannot_be_scanned_is_refused(
    run_processes: Processes, words: tuple[str, ...], message: str
) -> None:
    done = run_processes.paceline("scan", "fashion-mnist", *words)
    assert done.returncode == 2
    assert message in done.stderr
