"""``paceline chaos`` end to end: what is done when the run is worth nothing unless all of it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TASK = str(Path(__file__).parents[4] / "tests/elastic/recovery_inplace/faulty.py") + ":Faulty"


def chaos(processes: Any, path: Path, *options: str) -> dict[str, Any]:
    done = processes.paceline(
        *("chaos", TASK, "--run-dir", path, "--threads", "1", "--eval-every", "20steps", "--json"),
        *options,
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout_s=280,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    assert (report["samples_lost"], report["samples_duplicated"]) == (0, 0)
    assert report["clean_sha256"] == report["chaos_sha256"]
    return {kind["kind"]: kind for kind in report["kinds"]} | {"report": report}


@pytest.mark.chaos
def test_ten_of_each_kind_and_nothing_is_lost(run_processes: Any, tmp_path: Path) -> None:
    kinds = chaos(
        run_processes,
        tmp_path / "runs",
        *("--nproc", "4", "--faults", "40", "--kinds", "kill,stop,leave,join", "--seed", "1"),
        *("--max-steps", "400", "--heartbeat", "0.6"),
    )
    for kind in ("kill", "stop", "leave", "join"):
        assert (kinds[kind]["planned"], kinds[kind]["injected"], kinds[kind]["recovered"]) == (10, 10, 10)
        assert kinds[kind]["p50_s"] > 0
    assert kinds["report"]["steps"] == 400
    assert kinds["report"]["capacity"]["goodput"] > 0
    # What happened can be read afterwards.
    shown = run_processes.paceline("runs", "show", "--json", tmp_path / "runs/chaos")
    assert shown.returncode == 0, shown.stderr
    timeline = json.loads(shown.stdout)
    events = [entry["event"] for entry in timeline["entries"]]
    assert events.count("fault") >= 20
    assert events.count("scale") == 20
    assert events[-1] == "finished"
    assert 0 < timeline["goodput"]["share"] < 1
    shown = run_processes.paceline("runs", "show", tmp_path / "runs/chaos")
    assert "Goodput" in shown.stdout
    assert "was killed by SIGKILL" in shown.stdout


@pytest.mark.slow
def test_damaged_checkpoints_failing_disks_and_slow_workers(run_processes: Any, tmp_path: Path) -> None:
    kinds = chaos(
        run_processes,
        tmp_path / "runs",
        *("--nproc", "2", "--faults", "5", "--seed", "2"),
        *("--kinds", "bitflip,truncate,enospc,eio,slow"),
        # A worker is slow for a second, whatever the machine does in it.
        *("--max-steps", "1500", "--checkpoint-every", "20steps"),
    )
    assert kinds["report"]["repeated_steps"] > 0
    events = (tmp_path / "runs/chaos/events.jsonl").read_text().splitlines()
    assert {"fallback", "checkpoint failed"} <= {json.loads(line)["event"] for line in events}


@pytest.mark.slow
def test_one_worker_alone_goes_on_from_its_checkpoints(run_processes: Any, tmp_path: Path) -> None:
    kinds = chaos(
        run_processes,
        tmp_path / "runs",
        *("--nproc", "1", "--faults", "3", "--kinds", "kill"),
        *("--max-steps", "200", "--checkpoint-every", "9steps"),
    )
    assert kinds["report"]["repeated_steps"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kinds", "kill,fire"), "unknown kind 'fire'. Choose from kill, stop"),
        (("--nproc", "2", "--kinds", "partition"), "unknown kind 'partition'"),
        (("--nproc", "2", "--faults", "0"), "--faults must be at least 1"),
        (("--nproc", "2", "--recover", "none"), "a run under faults must use inplace"),
        (("--nproc", "auto"), "--nproc must be one number for paceline chaos"),
        (("--nproc", "2,2"), "--nproc must be one number for paceline chaos"),
        (("--nproc", "2", "--nodes", "2", "--rdzv-endpoint", "host:1"), "on one node only"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    options: tuple[str, ...], message: str, run_processes: Any, tmp_path: Path
) -> None:
    done = run_processes.paceline("chaos", TASK, "--run-dir", tmp_path / "runs", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()
