"""``--config``: a file's options, a run's own record among them, under those of the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tests.processes import Processes

RUN_TOML = """
[task]
spec = "fashion-mnist"
name = "FashionMNIST"
fields = { lr = 0.05, momentum = 0.8 }

[config]
run_dir = "runs/first"
epochs = 2
seed = 7
checkpoint_every = ["5steps", "1epoch"]
"""


def job_of(processes: Processes, *arguments: str | Path) -> dict[str, Any]:
    """The job that ``--dry-run`` prints, in comments above the command."""
    finished = processes.paceline("train", *arguments, "--dry-run")
    assert finished.returncode == 0, finished.stderr
    comments = [line[4:] for line in finished.stdout.splitlines() if line.startswith("#   ")]
    return tomllib.loads("\n".join(comments))["config"]


def test_a_runs_record_brings_its_task_fields_and_options(run_processes: Processes, tmp_path: Path) -> None:
    record = tmp_path / "run.toml"
    record.write_text(RUN_TOML)
    job = job_of(run_processes, "--config", record, "--run-dir", "runs/second", "--set", "lr=0.01", "--max-steps", "9")
    assert job["task"] == "fashion-mnist"
    assert job["run_dir"] == "runs/second"
    assert job["set"] == ["lr=0.05", "momentum=0.8", "lr=0.01"], "the last one wins"
    assert (job["seed"], job["checkpoint_every"]) == (7, ["5steps", "1epoch"])
    assert job["max_steps"] == 9
    assert "epochs" not in job, "the command line's length replaces the file's"


def test_another_task_takes_no_fields_from_the_record(run_processes: Processes, tmp_path: Path) -> None:
    record = tmp_path / "run.toml"
    record.write_text(RUN_TOML)
    job = job_of(run_processes, "fashion-mnist-mlp", "--config", record)
    assert job["task"] == "fashion-mnist-mlp"
    assert "set" not in job
    assert job["seed"] == 7


def test_a_file_may_name_the_task_itself(run_processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)  # a neighbour, which was not named
    options = tmp_path / "options.toml"
    options.write_text('[config]\ntask = "fashion-mnist-mlp"\nseed = 3\n')
    job = job_of(run_processes, "--config", options)
    assert (job["task"], job["seed"]) == ("fashion-mnist-mlp", 3)
    assert "set" not in job
