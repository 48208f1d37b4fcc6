"""The Slurm cluster itself: jobs run, GPUs are given out, and nodes that die come back for the next test."""

from __future__ import annotations

import pytest
from tests.lab.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm


def test_jobs_run_on_nodes_with_gpus_and_are_accounted_for(slurm_cluster: SlurmCluster) -> None:
    cluster = slurm_cluster
    done = cluster.run("srun", "-N2", "--gres=gpu:2", "sh", "-c", "hostname; echo $CUDA_VISIBLE_DEVICES")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0,1", "0,1", "node1", "node2"]
    job = cluster.sbatch("--wrap", "exit 3")
    assert cluster.wait_for(job) == "FAILED"
    sacct = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode")
    cluster.wait_until(lambda: cluster.run(*sacct).stdout == "FAILED|3:0\n", "the job in the database")


@pytest.mark.slow
def test_a_job_of_a_lost_node_is_requeued(slurm_cluster: SlurmCluster) -> None:
    cluster = slurm_cluster
    job = cluster.sbatch("--requeue", "--wrap", "sleep 1000")
    cluster.wait_for(job, "RUNNING")
    [node] = [node for node in cluster.nodes if node.name == cluster.show(job)["NodeList"]]
    cluster.kill(node)
    cluster.wait_for(job, "PENDING")
    assert cluster.show(job)["Restarts"] == "1"


def test_each_test_begins_with_three_idle_nodes_and_no_job(slurm_cluster: SlurmCluster) -> None:
    """The test before this has left a job and a dead node."""
    cluster = slurm_cluster
    assert cluster.run("squeue", "-h").stdout == ""
    done = cluster.run("srun", "-N3", "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2", "node3"], done.stderr
