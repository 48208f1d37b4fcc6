"""Elastic torchrun, ``--nodes 1:2``, on machines that a launcher reaches: they come, are lost, and come again."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.machines import Node
from tests.lab.slurm_cluster import SlurmCluster
from tests.lab.sshd import SshLab

# A machine without power says nothing: the others' workers find out by the time-out of their group.
WORKS = """
import datetime, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
with open("groups", "a") as file:
    file.write(f"{os.uname().nodename} of {dist.get_world_size()}\\n")
done = torch.zeros(1)
while not done.item():
    time.sleep(0.05)
    done.fill_(os.path.exists("done"))
    dist.all_reduce(done)
dist.destroy_process_group()
"""
FAILS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
open(f"began-{os.environ['RANK']}", "w").close()
while not os.path.exists("fail"):
    pass
raise SystemExit(3)
"""
FAILS_ONCE = """
import os, pathlib, time
if pathlib.Path("failed").exists():
    raise SystemExit(0)
if os.environ["RANK"] == "0":
    time.sleep(60)
pathlib.Path("failed").touch()
raise SystemExit(3)
"""
# torchrun waits 30 s for further machines once there are enough.
OPTIONS = ("--max-restarts", "9", "--threads", "1", "--torchrun", "rdzv-conf=last_call_timeout=2")
ELASTIC = ("--nodes", "1:2", *OPTIONS)
PATIENCE = ("--connect-timeout", "3", "--lost-after", "6")


class Groups:
    """The worker groups that a job's machines have been in, as their workers write them down."""

    def __init__(self, path: Path, wait_until: Callable[..., None]) -> None:
        self.path = path
        self._wait_until = wait_until
        (path / "works.py").write_text(WORKS)
        (path / "fails.py").write_text(FAILS)
        (path / "fails_once.py").write_text(FAILS_ONCE)

    def wait_for(self, node: Node, size: int, times: int = 1) -> None:
        """Wait until this machine has been in that many groups of that size."""
        line = f"{node.name} of {size}"
        self._wait_until(lambda: self._lines().count(line) >= times, f"{line}, {times} times", timeout_s=180)

    def wait_for_all(self, machines: int = 2) -> None:
        """Wait until that many machines are in one group, for the first time."""

        def there() -> bool:
            return len({line for line in self._lines() if line.endswith(f" of {machines}")}) == machines

        self._wait_until(there, f"{machines} machines in one group", timeout_s=180)

    def end(self) -> None:
        (self.path / "done").touch()

    def _lines(self) -> list[str]:
        file = self.path / "groups"
        return file.read_text().splitlines() if file.exists() else []


# --- ssh ---


@pytest.mark.ssh
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ssh_takes_a_machine_that_comes_three_times(
    ssh_machines: Callable[[int], SshLab], wait_until: Callable[..., None]
) -> None:
    """It is not there at first, then killed, and then without power."""
    lab = ssh_machines(3)
    first, second, here = lab.nodes
    groups = Groups(lab.path, wait_until)
    second.kill()
    launcher = lab.launch(here, "node0,node1", *ELASTIC, *PATIENCE, "--", "works.py")
    groups.wait_for(first, 1)
    for times in (1, 2, 3):
        lab.boot(second)
        groups.wait_for(first, 2, times)
        groups.wait_for(second, 2, times)
        if times < 3:
            if times == 2:
                second.cut()
            second.kill()
            groups.wait_for(first, 1, times + 1)
    groups.end()
    assert launcher.wait(60) == 0, launcher.text
    assert "paceline: node1 joins once it can be reached: " in launcher.text
    assert launcher.text.count("paceline: node1 joins.\n") == 3
    assert launcher.text.count("paceline: node1 was lost: its ssh has ended. It rejoins once it can be reached.") == 2


@pytest.mark.ssh
@pytest.mark.timeout(180)
@pytest.mark.parametrize("loss", ["killed", pytest.param("without power", marks=pytest.mark.slow)])
def test_ssh_ends_when_the_machine_with_torchruns_store_is_lost(
    ssh_machines: Callable[[int], SshLab], wait_until: Callable[..., None], loss: str
) -> None:
    """torchrun itself would wait for a silent store until TCP gives up, a quarter of an hour."""
    lab = ssh_machines(3)
    first, second, here = lab.nodes
    groups = Groups(lab.path, wait_until)
    launcher = lab.launch(here, "node0,node1", *ELASTIC, *PATIENCE, "--", "works.py")
    groups.wait_for(second, 2)
    if loss == "without power":
        first.cut()
    first.kill()
    assert launcher.wait(90) == 1, launcher.text
    reason = "node0 was lost: its ssh has ended. It had torchrun's store, which the others need."
    assert launcher.text.endswith(f"paceline: {reason}\n")


@pytest.mark.ssh
def test_ssh_needs_the_first_machine_to_begin(ssh_machines: Callable[[int], SshLab]) -> None:
    lab = ssh_machines(3)
    lab.nodes[0].kill()
    launcher = lab.launch(lab.nodes[2], "node0,node1", *ELASTIC, "--connect-timeout", "2", "--", "true")
    assert launcher.wait(60) == 1
    said = "1 of 2 machines cannot be used; nothing runs on the others. The first one is needed; 1 can begin.\n"
    assert said in launcher.text


@pytest.mark.slow
@pytest.mark.ssh
def test_ssh_is_stopped_as_asked_after_the_loss_of_a_machine(
    ssh_machines: Callable[[int], SshLab], wait_until: Callable[..., None]
) -> None:
    lab = ssh_machines(3)
    first, second, here = lab.nodes
    groups = Groups(lab.path, wait_until)
    launcher = lab.launch(here, "node0,node1", *ELASTIC, *PATIENCE, "--", "works.py")
    groups.wait_for(second, 2)
    second.kill()
    groups.wait_for(first, 1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(90) == 130, launcher.text


# --- Slurm ---


class Cluster:
    """What a user types on the login node of a Slurm cluster."""

    def __init__(self, cluster: SlurmCluster, path: Path) -> None:
        self.slurm = cluster
        self.groups = Groups(path, cluster.wait_until)
        self.env = {"XDG_STATE_HOME": str(path / "state"), "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def submit(self, *words: str) -> str:
        """``paceline launch --on slurm WORDS``; return the job's number."""
        launch = (sys.executable, "-m", "paceline", "launch", "--json", "--on", "slurm", *words)
        done = self.slurm.run(*launch, env=self.env)
        assert done.returncode == 0, done.stderr
        number: str = json.loads(done.stdout)["reference"]["id"]
        return number

    def nodes_of(self, job: str) -> list[Node]:
        names = self.slurm.run("scontrol", "show", "hostnames", self.slurm.show(job)["NodeList"]).stdout.split()
        return [node for name in names for node in self.slurm.nodes if node.name == name]

    def wait_for_node(self, job: str) -> Node:
        self.slurm.wait_for(job, "RUNNING")
        [node] = self.nodes_of(job)
        return node


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster, tmp_path: Path) -> Cluster:
    return Cluster(slurm_cluster, tmp_path)


@pytest.mark.slurm
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_slurm_goes_on_without_a_lost_node(cluster: Cluster) -> None:
    job = cluster.submit(*ELASTIC, "--", "works.py")
    cluster.groups.wait_for_all()
    first, second = cluster.nodes_of(job)
    cluster.slurm.kill(second)
    cluster.groups.wait_for(first, 1)
    cluster.groups.end()
    cluster.slurm.wait_for(job, "COMPLETED")
    assert cluster.slurm.show(job)["Restarts"] == "0"


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_slurm_job_brings_a_node_three_times(cluster: Cluster) -> None:
    """A job keeps the nodes that it has; a second one joins it, and is requeued when its own node is lost."""
    job = cluster.submit(*ELASTIC, "--master-port", "29500", "--", "works.py")
    cluster.groups.wait_for_all()
    first, lost = cluster.nodes_of(job)
    joining = (sys.executable, "-m", "paceline", "launch", "--on", "torchrun", *ELASTIC)
    meeting = ("--rdzv-endpoint", f"{first.name}:29500", "--rdzv-id", job)
    second_job = ""
    for times in (1, 2, 3):
        cluster.slurm.kill(lost)
        cluster.groups.wait_for(first, 1, times)
        if second_job:
            cluster.slurm.boot(next(node for node in cluster.slurm.nodes if node not in (first, lost)))
        else:
            command = " ".join([*joining, *meeting, "--", "works.py"])
            second_job = cluster.slurm.sbatch(
                "--nodes=1", f"--exclude={first.name}", "--requeue", "--wrap", command, env=cluster.env
            )
        cluster.groups.wait_for(first, 2, times + 1)
        lost = cluster.wait_for_node(second_job)
    cluster.groups.end()
    for each in (job, second_job):
        cluster.slurm.wait_for(each, "COMPLETED")
    assert cluster.slurm.show(second_job)["Restarts"] == "2"


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurm_requeues_a_job_whose_first_node_is_lost(cluster: Cluster) -> None:
    """Both others ask for it; the second one must not end the job that the first one has requeued."""
    job = cluster.submit(*OPTIONS, "--nodes", "1:3", "--requeue", "--", "works.py")
    cluster.groups.wait_for_all(3)
    first, *others = cluster.nodes_of(job)
    # The first node's silence lasts until TCP gives up, here after three seconds in place of a quarter of an hour.
    for node in others:
        assert cluster.slurm.run("sysctl", "-w", "net.ipv4.tcp_retries2=4", node=node).returncode == 0
    cluster.slurm.kill(first)
    cluster.slurm.wait_until(lambda: cluster.slurm.show(job)["Restarts"] == "1", "the requeue")
    cluster.groups.end()
    cluster.slurm.wait_for(job, "COMPLETED")


@pytest.mark.slurm
@pytest.mark.timeout(240)
def test_in_an_allocation_that_outlives_its_nodes(cluster: Cluster) -> None:
    """``--no-kill`` is salloc's; without it Slurm ends the allocation. One node is enough for ``1:2``."""
    launch = (sys.executable, "-m", "paceline", "launch", "--on", "slurm", *ELASTIC, "--")
    session = cluster.slurm.start("salloc", "--quiet", "--no-kill", "--nodes=2", *launch, "works.py", env=cluster.env)
    cluster.groups.wait_for_all()
    [job] = cluster.slurm.run("squeue", "--noheader", "--format=%A").stdout.split()
    first, second = cluster.nodes_of(job)
    cluster.slurm.kill(second)
    cluster.groups.wait_for(first, 1)
    cluster.groups.end()
    assert session.wait(60) == 0, session.text
    alone = cluster.slurm.run("salloc", "--quiet", "--nodes=1", *launch, "true", env=cluster.env)
    assert alone.returncode == 0, alone.stderr


@pytest.mark.slurm
def test_the_code_of_a_script_that_fails_for_good(cluster: Cluster) -> None:
    once = ("--nodes", "1:2", "--max-restarts", "1", "--threads", "1", "--torchrun", "rdzv-conf=last_call_timeout=2")
    (cluster.groups.path / "fail").touch()
    job = cluster.submit(*once, "--", "fails.py")
    cluster.slurm.wait_for(job, "FAILED")
    assert cluster.slurm.show(job)["ExitCode"] == "3:0"


@pytest.mark.slurm
def test_slurm_counts_the_workers_that_were_started_again(cluster: Cluster) -> None:
    """torchrun ends the other one with SIGTERM, as Slurm would at the end of its time."""
    job = cluster.submit("--nproc", "2", "--max-restarts", "1", "--threads", "1", "--", "fails_once.py")
    cluster.slurm.wait_for(job, "COMPLETED")
