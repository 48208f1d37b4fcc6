"""Ray over several machines: under Slurm, and with one of them lost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, TASK, Run
from tests.lab.machines import Machines, Node
from tests.lab.slurm_cluster import SlurmCluster

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec
from paceline.launch.slurm import Slurm, SlurmOptions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """\
import os

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init()
nodes = ray.nodes()
everywhere = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]


@ray.remote
def f(x):
    return x * x


@ray.remote
def where():
    return os.uname().nodename


print(ray.get([f.remote(i) for i in range(4)]))
print(sorted(ray.get([where.options(scheduling_strategy=there).remote() for there in everywhere])))
print(sorted((node["NodeManagerHostname"], node["Resources"]["CPU"]) for node in nodes))
"""


@pytest.fixture(autouse=True)
def small_and_recorded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 * 2**20))


def processes_of(node: Node, word: str) -> list[psutil.Process]:
    """The processes on a machine whose command line begins with a word that has this in it."""
    here = os.readlink(f"/proc/{node.pid}/ns/pid")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, IndexError):
            if word in process.cmdline()[0] and os.readlink(f"/proc/{process.pid}/ns/pid") == here:
                found.append(process)
    return found


def test_the_script_for_slurm_starts_one_program_on_each_machine() -> None:
    job = LaunchSpec(
        command=("python", "test.py"),
        name="test",
        directory=Path("/jobs/test"),
        workdir=Path("/work"),
        python="python",
        nodes=(2, 2),
        rank_launcher="ray",
        env_style="none",
        cpus_per_task=8,
        gpus_per_node=2,
    )
    text = " ".join(Slurm().render(job).files["job.sh"].replace("\\\n", "").split())
    assert (
        "srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 "
        "python -P -m paceline_ray.node --directory /jobs/test --cpus 8 --gpus 2 "
        "-- python test.py & "
    ) in text
    with pytest.raises(ConfigError, match=r"--signal-before: .* Leave it out with --rank-launcher ray"):
        Slurm().render(job, SlurmOptions(signal_before="60s"))


@pytest.mark.slurm
def test_a_ray_cluster_in_a_slurm_job(slurm_cluster: SlurmCluster) -> None:
    cluster = slurm_cluster
    (cluster.workdir / "test.py").write_text(PROGRAM)
    done = cluster.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--rank-launcher", "ray", "--nodes", "2"),
        *("--cpus-per-task", "4", "--wait", "--json", "--", "test.py"),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-4:-1] == ["[0, 1, 4, 9]", "['node1', 'node2']", "[('node1', 4.0), ('node2', 4.0)]"]
    record = json.loads(lines[-1])
    assert not [path for path in Path(record["directory"]).iterdir() if path.name.startswith("ray-")]
    assert not [p for node in cluster.nodes for p in processes_of(node, "ray")]


@pytest.mark.slurm
def test_a_ray_cluster_in_a_slurm_job_of_one_node(slurm_cluster: SlurmCluster) -> None:
    """As the guide of a computing centre has it; the program asks Ray for a GPU of those that the job has."""
    program = PROGRAM + (
        "gpus = ray.remote(num_gpus=1)(lambda: os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "print(ray.get(gpus.remote()), ray.cluster_resources()['GPU'])\n"
    )
    (slurm_cluster.workdir / "test.py").write_text(program)
    done = slurm_cluster.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--rank-launcher", "ray"),
        *(
            "--cpus-per-task",
            "4",
            "--gpus-per-node",
            "2",
            "--walltime",
            "00:30:00",
            "--comment",
            "xxx",
            "--wait",
            "--",
            "test.py",
        ),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-4:] == ["[0, 1, 4, 9]", "['node1']", "[('node1', 4.0)]", "0 2.0"]


@pytest.mark.slurm
@pytest.mark.slow
def test_a_cancelled_slurm_job_leaves_nothing_of_its_cluster(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = slurm_cluster
    (cluster.workdir / "test.py").write_text(
        PROGRAM + "import pathlib, time\npathlib.Path('there').touch()\ntime.sleep(600)\n"
    )
    launch = (sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--rank-launcher", "ray", "--nodes", "2")
    done = cluster.run(*launch, "--cpus-per-task", "4", "--json", "--", "test.py")
    record = json.loads(done.stdout)
    cluster.wait_until((cluster.workdir / "there").exists, "the program", 120)
    assert all(processes_of(node, "raylet") for node in cluster.nodes[:2])
    assert cluster.run(sys.executable, "-m", "paceline", "cancel", record["id"]).returncode == 0
    cluster.wait_for(record["reference"]["id"], "CANCELLED")
    cluster.wait_until(
        lambda: not [p for node in cluster.nodes for p in processes_of(node, "ray")],
        "Ray's processes are gone",
    )


@pytest.mark.slow
def test_a_lost_machine_is_replaced_by_another_of_the_cluster(
    machines: Machines, run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    nodes = machines(3)
    run = Run(nodes[0].lab, wait_until)
    run.hold(12)
    hosts = ",".join(node.address for node in nodes)
    command = [
        *(
            sys.executable,
            "-m",
            "paceline_ray.node",
            "--directory",
            run.path,
            "--cpus",
            "1",
        ),
        *("--", sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, *PATIENT),
        *("--run-dir", "run", "--on", "ray", "--nodes", "2", "--placement", "strict-spread"),
    ]
    started = [
        node.start(
            command,
            env={
                "PACELINE_NODE_RANK": str(rank),
                "PACELINE_NODES": "3",
                "PACELINE_HOSTS": hosts,
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )
        for rank, node in enumerate(nodes)
    ]
    run.wait_for("checkpoint", lambda event: event["step"] == 10, *started)
    at_work = [node for node in nodes if processes_of(node, "ray::NodeActor")]
    assert len(at_work) == 2
    victim = at_work[-1]
    remaining = [process for process, node in zip(started, nodes, strict=True) if node is not victim]
    victim.kill()
    run.hold(14)
    run.wait_for_joiners(1, *remaining, leader=at_work[0])
    run.step_until("group", lambda event: event["nodes"] == 2, *remaining)
    run.go_on()
    assert [process.wait(120) for process in remaining] == [0, 0], started[0].text
    assert "was lost" in started[0].text
    (tmp_path / "small.py").write_text(TASK)
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    assert run.result()["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]
    assert not [p for node in nodes if node is not victim for p in processes_of(node, "ray")]
