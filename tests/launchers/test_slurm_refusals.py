"""What cannot run on Slurm is refused at once; what is said where Slurm is gone, or has forgotten a job."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.launchers.slurm_specs import SCRIPT, TASK, text

from paceline.errors import ConfigError
from paceline.launchers.slurm.options import SlurmOptions


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"requeue": True, "no_requeue": True}, {}, "--requeue and --no-requeue contradict"),
        ({"conda": "a", "venv": "b"}, {}, "--conda and --venv"),
        ({"slurm": ("nodes=4",)}, {}, "--slurm nodes: Paceline has an option of its own for it: --nodes."),
        ({"slurm": ("--nice=1", "a b=1")}, {}, "--slurm must be KEY=VALUE"),
        ({"comment": "two\nlines"}, {}, "--comment must be one line"),
        (
            {"signal_before": "2h"},
            {"walltime_s": 3600.0},
            "--signal-before 2h must be shorter than --walltime",
        ),
        ({"signal_before": "soon"}, {}, "--signal-before must be a duration"),
        ({"array": "all"}, {}, "--array must be such as 0-9"),
        ({}, {"command": ("train", "{array_index}")}, "{array_index} needs --array"),
        (
            {},
            {"inner": "srun", "max_restarts": 2},
            "--max-restarts does not work with --on slurm --inner srun",
        ),
        ({}, {"inner": "horovod", "env": {"HF_TOKEN": "s"}}, "--env HF_TOKEN: whoever sees the job"),
        ({}, {"inner": "srun", "nodes": (2, 2), "nproc": (2, 1)}, "--nproc 2,1: under --inner srun"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        text(SCRIPT, SlurmOptions(**options), **changes)


def test_the_jobs_of_an_array_need_a_run_each() -> None:
    with pytest.raises(ConfigError, match="need a run each"):
        text(TASK, SlurmOptions(array="0-3"))
    sweep = dataclasses.replace(TASK, run=Path("/home/me/runs/{array_index}"))
    assert '/home/me/runs/"$SLURM_ARRAY_TASK_ID"/result.json' in text(sweep, SlurmOptions(array="0-3"))


TRAIN = ("train", "fashion-mnist", "--on", "slurm", "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "4", "--nproc", "4", "--shards", "12"), "16 processes cannot share --shards 12"),
        (("--nproc", "4,4"), "--nproc 4,4 lists 2 machines, but --nodes is 1"),
        (("--nproc", "4", "--gpus-per-node", "2"), "--nproc 4 processes cannot have a GPU each"),
        (("--walltime", "20min", "--checkpoint-every", "30min"), "--walltime 20min is over before the first"),
        (("--hosts", "a,b"), "hosts"),
    ],
)
def test_a_task_that_cannot_run_is_refused_at_once(
    run_processes: Any, arguments: tuple[str, ...], said: str
) -> None:
    done = run_processes.paceline(*TRAIN, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_without_slurm_the_job_can_be_seen_but_not_submitted(run_processes: Any, tmp_path: Path) -> None:
    launch = ("launch", "--on", "slurm", "--nodes", "2")
    nowhere = {"PATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    assert run_processes.paceline(*launch, "--dry-run", "--", "hostname", env=nowhere).returncode == 0
    done = run_processes.paceline(*launch, "--", "hostname", env=nowhere)
    assert done.returncode == 1
    assert "there is no sbatch here: give the command on a login node" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "state", "exit_code"),
    [
        ("COMPLETED|0:0", "succeeded", 0),
        ("FAILED|7:0", "failed", 7),
        ("CANCELLED by 1000|0:15", "cancelled", 143),
        ("TIMEOUT|0:0", "failed", 1),
        ("OUT_OF_MEMORY|0:125", "failed", 253),
        ("COMPLETED|0:0\nNODE_FAIL|0:0\nCOMPLETED|0:0", "failed", 1),
    ],
)
def test_a_job_that_the_controller_has_forgotten(
    run_processes: Any, tmp_path: Path, said: str, state: str, exit_code: int
) -> None:
    """What scontrol and sacct print then, recorded with Slurm 22.05."""
    commands = {
        "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "sacct": f"cat <<'END'\n{said}\nEND",
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    record = {"id": "slurm-7", "launcher": "slurm", "name": "old", "command": ["true"], "submitted": 0}
    reference = {"id": "7", "name": "old", "directory": str(tmp_path), "logs": [], "array": None}
    jobs = tmp_path / "state" / "paceline" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "slurm-7.json").write_text(
        json.dumps({**record, "directory": str(tmp_path), "reference": reference})
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state")}
    done = run_processes.paceline("status", "7", "--json", env=env)
    status = json.loads(done.stdout)["status"]
    assert (status["state"], status["exit_code"]) == (state, exit_code)
    # Without accounting there is what the job has left.
    (tmp_path / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    (tmp_path / "exit-code").write_text("7\n")
    (jobs / "slurm-7.json").write_text(
        json.dumps({**record, "directory": str(tmp_path), "reference": reference})
    )
    status = json.loads(run_processes.paceline("status", "7", "--json", env=env).stdout)["status"]
    assert (status["state"], status["exit_code"]) == ("failed", 7)
