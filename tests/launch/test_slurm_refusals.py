"""What cannot run on Slurm is refused at once; what is said where Slurm is gone, or has forgotten a job."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.launch.slurm_specs import SCRIPT, TASK, text

from paceline.core.errors import ConfigError
from paceline.core.job import RecoveryPolicy
from paceline.launch.launcher import SlurmOptions, get_launcher


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"requeue": True, "no_requeue": True}, {}, "--requeue and --no-requeue contradict"),
        ({"conda": "a", "venv": "b"}, {}, "--conda and --venv"),
        ({"slurm": ("nodes=4",)}, {}, "--slurm nodes is not allowed, since Paceline sets it. Use --nodes."),
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
            {"rank_launcher": "srun", "recovery": RecoveryPolicy(max_restarts=2)},
            "--max-restarts does not work with --on slurm --rank-launcher srun",
        ),
        ({}, {"rank_launcher": "horovod", "env": {"HF_TOKEN": "s"}}, "--env HF_TOKEN: every user who can see the job"),
        ({}, {"rank_launcher": "srun", "nodes": (2, 2), "nproc": (2, 1)}, "--nproc 2,1: under --rank-launcher srun"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        text(SCRIPT, SlurmOptions(**options), **changes)


def test_what_no_step_in_an_allocation_could_be_held_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    limits = {"walltime_s": 60.0, "gpus_per_node": 2}
    with pytest.raises(ConfigError, match="--gpus-per-node, --walltime: in an existing Slurm allocation"):
        text(SCRIPT, rank_launcher="horovod", env_style="horovod", **limits)
    with pytest.raises(ConfigError, match="--gpus-per-node: in an existing Slurm allocation"):
        text(TASK, rank_launcher="mpi", **limits)
    assert "mpirun" in text(TASK, rank_launcher="mpi", walltime_s=60.0), "a task looks at the time itself"


def test_the_jobs_of_an_array_need_a_run_each() -> None:
    with pytest.raises(ConfigError, match="need a run each"):
        text(TASK, SlurmOptions(array="0-3"))
    sweep = dataclasses.replace(TASK, run=Path("/home/me/runs/{array_index}"))
    assert '/home/me/runs/"$SLURM_ARRAY_TASK_ID"/result.json' in text(sweep, SlurmOptions(array="0-3"))


TRAIN = ("train", "fashion-mnist", "--on", "slurm", "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--nodes", "4", "--nproc", "4", "--microbatches", "12"),
            "16 processes cannot share --microbatches 12",
        ),
        (("--nproc", "4,4"), "--nproc 4,4 lists 2 nodes, but --nodes is 1"),
        (("--nproc", "4", "--gpus-per-node", "2"), "--nproc 4 processes cannot have a GPU each"),
        (("--walltime", "20min", "--checkpoint-every", "30min"), "--walltime 20min is over before the first"),
        (("--hosts", "a,b"), "hosts"),
    ],
)
def test_a_task_that_cannot_run_is_refused_at_once(run_processes: Any, arguments: tuple[str, ...], said: str) -> None:
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


@pytest.fixture
def fake_slurm(tmp_path: Path) -> dict[str, str]:
    """The variables for a Slurm that takes one job, and writes down what it was asked."""
    for name, script in {"sbatch": "$TAKES; echo 4711", "scancel": "exit $REFUSES"}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n{script}\n')
        program.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TAKES": "true", "REFUSES": "0"}


def test_a_job_that_cannot_be_recorded_is_not_submitted(
    run_processes: Any, tmp_path: Path, fake_slurm: dict[str, str]
) -> None:
    (tmp_path / "file").touch()
    env = {**fake_slurm, "XDG_STATE_HOME": str(tmp_path / "file")}
    done = run_processes.paceline("launch", "--on", "slurm", "--", "hostname", env=env)
    assert done.returncode == 2
    assert "cannot record the job in" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "file"]


@pytest.mark.parametrize(
    ("refuses", "code", "said"),
    [
        ("0", 2, "slurm-4711 is cancelled: cannot record the job in"),
        ("1", 1, "slurm-4711 was submitted, but cannot record the job in"),
    ],
)
def test_a_job_that_cannot_be_recorded_after_all_is_cancelled(
    run_processes: Any, tmp_path: Path, fake_slurm: dict[str, str], refuses: str, code: int, said: str
) -> None:
    env = {**fake_slurm, "XDG_STATE_HOME": str(tmp_path / "state"), "REFUSES": refuses}
    env["TAKES"] = f"sh {tmp_path}/bin/full"
    (tmp_path / "bin/full").write_text(f"rm -r {tmp_path}/state && touch {tmp_path}/state\n")
    done = run_processes.paceline("launch", "--on", "slurm", "--", "hostname", env=env)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "scancel 4711"


class Forgotten:
    """Job 7, of which Slurm knows what a test says that it does; in the words of Slurm 22.05."""

    def __init__(self, path: Path, array: str | None) -> None:
        self._path = path
        self._reference = {"id": "7", "name": "old", "directory": str(path), "logs": [], "array": array}
        self.controller_says(None)
        self.accounting_says(None)

    def controller_says(self, *jobs: str | None) -> None:
        words = None if None in jobs else [f"{job} Reason=None ExitCode=0:0" for job in jobs]
        self._command("scontrol", words, "slurm_load_jobs error: Invalid job id specified")

    def accounting_says(self, *jobs: str | None) -> None:
        self._command("sacct", None if None in jobs else jobs, "Slurm accounting storage is disabled")

    def leaves(self, name: str, code: int) -> None:
        (self._path / name).write_text(f"{code}\n")

    def status(self) -> tuple[str, str, int | None]:
        """Its state, in which words, and the exit code."""
        status = get_launcher("slurm").reopen(self._reference).status()
        return status.state, status.detail, status.exit_code

    def _command(self, name: str, lines: Sequence[str | None] | None, refusal: str) -> None:
        said = "\n".join(str(line) for line in lines or ())
        does = f"echo '{refusal}' >&2; exit 1" if lines is None else f"cat <<'END'\n{said}\nEND"
        (self._path / name).write_text(f"#!/bin/sh\n{does}\n")
        (self._path / name).chmod(0o755)


@pytest.fixture
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Forgotten]:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return lambda array=None: Forgotten(tmp_path, array)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("said", "state", "exit_code"),
    [
        ("COMPLETED|0:0", "succeeded", 0),
        ("FAILED|7:0", "failed", 7),
        ("CANCELLED by 1000|0:15", "cancelled", 143),
        ("TIMEOUT|0:0", "failed", 1),
        ("OUT_OF_MEMORY|0:125", "failed", 253),
    ],
)
def test_a_job_that_the_controller_has_forgotten(
    forgotten: Callable[..., Forgotten], said: str, state: str, exit_code: int
) -> None:
    job = forgotten()
    job.accounting_says(f"7|{said}")
    assert job.status() == (state, said.partition("|")[0], exit_code)


@pytest.mark.integration
def test_a_job_that_slurm_has_forgotten_has_left_its_exit_code(forgotten: Callable[..., Forgotten]) -> None:
    job = forgotten()
    assert job.status() == ("unknown", "Slurm does not know job 7 any more", None)
    job.leaves("exit-code", 7)
    assert job.status() == ("failed", "exit code 7", 7)


@pytest.mark.integration
def test_an_array_of_which_the_controller_has_forgotten_some(forgotten: Callable[..., Forgotten]) -> None:
    array = forgotten(array="0-2%1")
    array.controller_says("JobId=7 ArrayJobId=7 ArrayTaskId=2 JobName=a_1 JobState=COMPLETED")
    array.leaves("exit-code-6_0", 0)  # of an earlier array in this directory
    assert array.status() == ("unknown", "2 forgotten by Slurm, 1 COMPLETED", None)
    array.accounting_says("7_0|NODE_FAIL|0:0", "7_1|COMPLETED|0:0")
    assert array.status() == ("failed", "1 NODE_FAIL, 2 COMPLETED", 1)
    array.accounting_says(None)
    array.leaves("exit-code-7_0", 3)
    assert array.status() == ("failed", "1 exit code 3, 1 forgotten by Slurm, 1 COMPLETED", 3)
    array.leaves("exit-code-7_0", 0)
    array.leaves("exit-code-7_1", 0)
    assert array.status() == ("succeeded", "2 exit code 0, 1 COMPLETED", 0)


@pytest.mark.integration
def test_an_array_that_is_at_work_has_not_failed_yet(forgotten: Callable[..., Forgotten]) -> None:
    array = forgotten(array="0-9:3,20%1")
    array.controller_says(
        "JobId=7 ArrayJobId=7 ArrayTaskId=6-9:3,20%1 ArrayTaskThrottle=1 JobName=a JobState=PENDING",
        "JobId=9 ArrayJobId=7 ArrayTaskId=3 ArrayTaskThrottle=1 JobName=a JobState=RUNNING",
    )
    array.leaves("exit-code-7_0", 3)
    assert array.status() == ("running", "1 exit code 3, 1 RUNNING, 3 PENDING", None)
    array.controller_says("JobId=7 ArrayJobId=7 ArrayTaskId=20 JobName=a JobState=CANCELLED")
    array.accounting_says("7_[6-9:3]|CANCELLED by 0|0:0", "7_3|COMPLETED|0:0", "7_0|COMPLETED|0:0")
    assert array.status() == ("cancelled", "2 COMPLETED, 2 CANCELLED by 0, 1 CANCELLED", 1)


def test_logs_whose_numbers_are_padded_are_found(tmp_path: Path) -> None:
    """Slurm pads up to ten digits, and nothing but numbers."""
    (tmp_path / "train-00004711-%.log").write_text("alone\n")
    (tmp_path / "0000004711_004.log").write_text("in an array\n")
    job = {"id": "4711", "name": "train", "directory": str(tmp_path), "array": None}
    slurm = get_launcher("slurm")
    assert list(slurm.reopen({**job, "logs": [f"{tmp_path}/%9x-%8j-%%.log"]}).logs()) == ["alone"]
    array = slurm.reopen({**job, "logs": [f"{tmp_path}/%12A_%3a.log"], "array": "4"})
    assert list(array.logs()) == ["in an array"]
