"""Scripts for Accelerate, Lightning and TRL that know nothing of Paceline, under the launchers here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lab.slurm_cluster import SlurmCluster
from tests.lab.sshd import SshLab

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = re.compile(r"rank (\d) of (\d): (\d+) batches an epoch, weights (\w{16})")


def checked(text: str) -> str:
    """The weights that both ranks ended with: each had half of the 16 batches, and none was started twice."""
    said = sorted(SAID.findall(text))
    assert [rank[:3] for rank in said] == [("0", "2", "8"), ("1", "2", "8")], text
    (weights,) = {rank[3] for rank in said}
    return str(weights)


def script(name: str, *, machines: int) -> list[str]:
    """An example's options and command, for one process a machine, or two on one."""
    if name == "accelerate":
        return ["--env", "ACCELERATE_USE_CPU=true", "--", str(EXAMPLES / "accelerate_script.py")]
    if name == "trl":
        return ["--", str(EXAMPLES / "trl_sft_script.py")]
    sizes = ["--devices", str(2 // machines), "--num-nodes", str(machines)]
    return ["--", str(EXAMPLES / "lightning_script.py"), *sizes]


@pytest.mark.docs
@pytest.mark.parametrize("name", ["accelerate", "lightning", pytest.param("trl", marks=pytest.mark.slow)])
def test_the_script_is_two_ranks_with_the_same_weights(run_processes: Any, tmp_path: Path, name: str) -> None:
    launch = [sys.executable, "-m", "paceline", "launch", "--nproc", "2", "--threads", "1"]
    started = [
        run_processes.start(
            [*launch, "--on", on, *script(name, machines=1)],
            env={"XDG_STATE_HOME": str(tmp_path / "state")},
        )
        for on in ("spawn", "torchrun")
    ]
    weights = set()
    for popen in started:
        finished = run_processes.finish(popen, timeout_s=120)
        assert finished.returncode == 0, finished.stderr
        weights.add(checked(finished.stdout))
    assert len(weights) == 1


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["accelerate", "lightning", "trl"])
def test_the_script_under_mpirun(run_processes: Any, tmp_path: Path, name: str) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "mpi", "--nproc", "2", "--threads", "1", *script(name, machines=1)),
        env={"XDG_STATE_HOME": str(tmp_path / "state")},
        timeout_s=180,
    )
    assert done.returncode == 0, done.stderr
    checked(done.stdout)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("inner", ["torchrun", "srun"])
@pytest.mark.parametrize("name", ["accelerate", "lightning", "trl"])
def test_the_script_on_two_machines_of_a_slurm_cluster(
    slurm_cluster: SlurmCluster, tmp_path: Path, name: str, inner: str
) -> None:
    paceline = [sys.executable, "-m", "paceline"]
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    sizes = ("--nodes", "2", "--nproc", "1", "--threads", "1", "--rank-launcher", inner)
    done = slurm_cluster.run(
        *(*paceline, "launch", "--json", "--on", "slurm", *sizes, *script(name, machines=2)), env=env
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    slurm_cluster.wait_for(record["reference"]["id"], "COMPLETED")
    checked(slurm_cluster.run(*paceline, "logs", record["id"], env=env).stdout)


@pytest.mark.slow
@pytest.mark.ssh
@pytest.mark.parametrize("name", ["accelerate", "lightning", "trl"])
def test_the_script_on_two_machines_over_ssh(ssh_machines: Callable[[int], SshLab], name: str) -> None:
    lab = ssh_machines(2)
    launcher = lab.launch(lab.nodes[0], "node0,node1", "--threads", "1", *script(name, machines=2))
    assert launcher.wait() == 0, launcher.text
    checked(launcher.text)
