"""submitit on a real Slurm cluster: functions, arrays, tasks over machines, preemption."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from plugins.frameworks.tests.submitit_programs import ADD
from tests.lab.slurm_cluster import SlurmCluster
from tests.processes import Processes

pytestmark = pytest.mark.slurm

PACELINE = (sys.executable, "-m", "paceline")
TRAIN = (
    *("train", "fashion-mnist", "--microbatches", "12", "--global-batch-size", "96", "--max-steps", "120"),
    *("--threads", "1", "--seed", "7", "--eval-every", "never", "--checkpoint-every", "5steps"),
)


def test_functions_and_what_slurm_refuses(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    (tmp_path / "add.py").write_text(ADD)
    done = slurm_cluster.run(sys.executable, "add.py", "slurm", env=env)
    assert done.returncode == 0, done.stderr
    results, last = done.stdout.splitlines()
    assert results == "12 [12, 12, 12] [4, 6]"
    number, state, printed = last.split(maxsplit=2)
    assert (state, printed) == ("succeeded", "'adding 5 7'")
    # The two calls of an array are one job of Slurm's.
    array = sorted(path.name for path in tmp_path.glob("jobs/sums-*/*_submission.sh"))
    assert len(array) == 1
    script = (tmp_path / "log_test" / f"{number}_submission.sh").read_text()
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert "#SBATCH --time=60\n" in script
    (tmp_path / "wrong.py").write_text("import paceline\npaceline.submit(print, partition='none', name='wrong')\n")
    refused = slurm_cluster.run(sys.executable, "wrong.py", env=env)
    assert refused.returncode == 1
    assert "sbatch refused the job: invalid partition specified: none" in refused.stderr
    assert "Check --partition none." in refused.stderr
    assert not list(tmp_path.glob("jobs/wrong*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_on_two_machines_is_requeued_and_ends_with_the_same_model(
    slurm_cluster: SlurmCluster, run_processes: Processes, tmp_path: Path
) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    undisturbed = run_processes.paceline(*TRAIN, "--run-dir", "undisturbed", "--json", "--quiet")
    expected = json.loads(undisturbed.stdout.splitlines()[-1])["model_sha256"]
    on = ("--on", "submitit", "--nodes", "2", "--nproc", "2", "--run-dir", "run", "--heartbeat", "60")
    submitted = slurm_cluster.run(*PACELINE, *TRAIN, *on, "--json", env=env)
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)
    number = job["reference"]["id"]
    slurm_cluster.wait_until(lambda: any((tmp_path / "run/checkpoints").glob("step-*")), "a checkpoint")
    # What Slurm sends to the steps of a job that is preempted, or near its time limit.
    assert slurm_cluster.run("scancel", "--signal=USR1", number).returncode == 0
    slurm_cluster.wait_for(number, "COMPLETED", timeout_s=180)
    status = json.loads(slurm_cluster.run(*PACELINE, "status", number, "--json", env=env).stdout)["status"]
    assert status["state"] == "succeeded", slurm_cluster.describe(number)
    assert status["restarts"] == 1
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["model_sha256"], result["world_size"]) == (expected, 4)


def test_ranks_as_tasks_of_slurm_and_cancelling(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    (tmp_path / "say.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1])\n")
    on = ("--on", "submitit", "--nodes", "2", "--nproc", "2", "--rank-launcher", "srun")
    done = slurm_cluster.run(*PACELINE, "launch", *on, "--wait", "--", "say.py", "{nnodes}", env=env)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("| ")[2] for line in done.stdout.splitlines() if "rank " in line and "_log" in line)
    assert [line for line in said if line.startswith("rank")] == [f"rank {n} 2" for n in range(4)]
    submitted = slurm_cluster.run(
        *PACELINE, "launch", "--on", "submitit", "--rank-launcher", "spawn", "--json", "--", "sleep", "1000", env=env
    )
    number = json.loads(submitted.stdout)["reference"]["id"]
    slurm_cluster.wait_for(number, "RUNNING")
    assert slurm_cluster.run(*PACELINE, "cancel", number, env=env).returncode == 0
    slurm_cluster.wait_for(number, "CANCELLED")
    status = slurm_cluster.run(*PACELINE, "status", number, "--json", env=env)
    assert json.loads(status.stdout)["status"]["state"] == "cancelled"
