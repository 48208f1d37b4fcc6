"""``--on slurm --rank-launcher horovod``: horovodrun in a job's allocation."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.lab.slurm_cluster import SlurmCluster
from tests.launch.slurm_specs import SAVES

pytestmark = [pytest.mark.slurm, pytest.mark.horovod, pytest.mark.slow, pytest.mark.timeout(300)]

SUM = """
import os
import horovod.torch as hvd
import torch

hvd.init()
total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()} on {os.uname().nodename} has {total:.0f}")
"""

JOB = ("launch", "--on", "slurm", "--rank-launcher", "horovod", "--nodes", "2", "--nproc", "2", "--threads", "1")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    if shutil.which("horovodrun", path=beside) is None:
        pytest.skip("Horovod is missing: scripts/build-horovod builds it")
    # Not on PATH: it is found next to the interpreter.
    others = [path for path in os.environ["PATH"].split(os.pathsep) if path != beside]
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": os.pathsep.join(others)}


def test_a_script_on_machines_of_the_job(slurm_cluster: SlurmCluster, tmp_path: Path, env: dict[str, str]) -> None:
    """They have no ssh server; beside each of the two that horovodrun looks for, a step starts the ranks."""
    (tmp_path / "sum.py").write_text(SUM)
    done = slurm_cluster.run(
        *(sys.executable, "-m", "paceline", *JOB, "--wait", "--", "sum.py"),
        env=env,
        cwd=tmp_path,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line.partition(":")[2] for line in done.stdout.splitlines() if "has" in line)
    assert [line.split(" on ")[0] for line in said] == [f"rank {rank} of 4" for rank in range(4)]
    assert all(line.endswith("has 10") for line in said)
    assert len({line.split(" on ")[1] for line in said}) == 2, "two machines"


def test_a_preempted_script_saves_on_all_ranks_and_is_requeued(
    slurm_cluster: SlurmCluster, tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    launch = (sys.executable, "-m", "paceline", *JOB, "--env-style", "torch", "--requeue", "--json")
    done = slurm_cluster.run(*launch, "--", "saves.py", "run", env=env)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["reference"]["id"]
    slurm_cluster.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4, "all ranks")
    slurm_cluster.sbatch("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true")
    slurm_cluster.wait_until(lambda: slurm_cluster.state(job) == "COMPLETED", "the end of the restarted job")
    assert [(tmp_path / f"run-{rank}").read_text() for rank in range(4)] == ["SIGTERM"] * 4
    assert slurm_cluster.show(job)["Restarts"] == "1"
