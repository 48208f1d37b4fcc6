"""``--on slurm`` on a real cluster: tasks, scripts of all kinds, and what fails."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, TASK
from tests.lab.machines import Node
from tests.lab.slurm_cluster import SlurmCluster
from tests.launch.slurm_specs import SAVES

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

pytestmark = pytest.mark.slurm

# A line of PyTorch's own log, as torchrun writes it: "W1123 19:02:55.521000 128 torch/...".
TORCH_LOG = re.compile(r"[IWEC]\d{4} \d\d:\d\d:\d\d")

SUM = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
host = os.uname().nodename
local, words = os.environ["LOCAL_RANK"], " ".join(["", *sys.argv[1:]])
# In one piece: unbuffered, the ranks' lines may else be mixed.
sys.stdout.write(f"rank {dist.get_rank()} local {local} on {host} has {int(total)}{words}\\n")
dist.destroy_process_group()
"""

# As PyTorch's ImageNet example has it: one process on each machine starts the others.
DISTRIBUTED = """
import argparse, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing

def work(local_rank, options):
    rank = options.rank * 2 + local_rank
    dist.init_process_group(
        "gloo", init_method=options.dist_url, world_size=options.world_size * 2, rank=rank
    )
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    sys.stdout.write(f"rank {rank} on {os.uname().nodename} has {int(total)}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist-url")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--multiprocessing-distributed", action="store_true", required=True)
    torch.multiprocessing.spawn(work, (parser.parse_args(),), nprocs=2)
"""
MPI = """
import os, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
sys.stdout.write(f"rank {world.rank} of {world.size} has {total} {os.environ['COLOUR']}\\n")
"""
# Number 2 is left when the others have begun, and has the number of the whole array. It stops while 0 is at
# work, and once more when nobody else is.
STOPS = """
echo >>starts-$1
starts=$(wc -l <starts-$1)
others() { [ $(squeue --noheader --jobs=$SLURM_ARRAY_JOB_ID | wc -l) -gt 1 ]; }
case $1-$starts in
  0-1) until [ -e starts-2 ] && [ $(wc -l <starts-2) -ge 2 ]; do sleep 0.1; done; exit 75 ;;
  2-1) exit 75 ;;
  2-2) while others; do sleep 0.1; done; exit 75 ;;
esac
"""
WHO_SUMS = {
    "rank 0 local 0 on node1 has 10",
    "rank 1 local 1 on node1 has 10",
    "rank 2 local 0 on node2 has 10",
    "rank 3 local 1 on node2 has 10",
}


class Jobs:
    """What a user types on the login node, in an empty directory."""

    def __init__(self, cluster: SlurmCluster, path: Path) -> None:
        self.cluster = cluster
        self.path = path
        self._env = {
            "XDG_STATE_HOME": str(path / "state"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }

    def paceline(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run ``paceline ARGUMENTS``; return its stdout, or its stderr where it is to fail."""
        done = self.cluster.run(sys.executable, "-m", "paceline", *arguments, env={**self._env, **(env or {})})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Submit a job; return its record."""
        record: dict[str, Any] = json.loads(self.paceline(arguments[0], "--json", *arguments[1:], env=env))
        return record

    def launch(self, *arguments: str) -> dict[str, Any]:
        return self.submit("launch", "--on", "slurm", *arguments)

    def status(self, record: dict[str, Any]) -> dict[str, Any]:
        done = self.cluster.run(sys.executable, "-m", "paceline", "status", record["id"], "--json", env=self._env)
        status: dict[str, Any] = json.loads(done.stdout)["status"]
        return status

    def end_of(self, record: dict[str, Any], *states: str) -> set[str]:
        """Wait for a job; return the lines that its scripts have printed.

        torchrun's own log is left out: it warns or not, depending on which of two nodes ends first.
        """
        self.cluster.wait_for(record["reference"]["id"], *states)
        lines = self.paceline("logs", record["id"]).splitlines()
        return {line for line in lines if not TORCH_LOG.match(line)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the same run, of one process that nobody disturbed."""
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "small.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, "--run-dir", "run"]
    subprocess.run(command, cwd=path, capture_output=True, timeout=120, check=True)
    sha256: str = json.loads((path / "run/result.json").read_text())["model_sha256"]
    return sha256


@pytest.fixture
def jobs(slurm_cluster: SlurmCluster, tmp_path: Path) -> Jobs:
    for name, text in (
        ("sums.py", SUM),
        ("mpi.py", MPI),
        ("distributed.py", DISTRIBUTED),
        ("small.py", TASK),
        ("saves.py", SAVES),
    ):
        (tmp_path / name).write_text(text)
    return Jobs(slurm_cluster, tmp_path)


class Run:
    """A task's run in a job, which stands still after the step that ``hold`` names."""

    def __init__(self, jobs: Jobs, *options: str) -> None:
        self.cluster = jobs.cluster
        self._path = jobs.path
        self.directory = RunDirectory(jobs.path / "run")
        self.hold(12)
        where = ("--on", "slurm", "--nodes", "2", "--nproc", "2", "--run-dir", "run")
        self.record = jobs.submit("train", "small.py:Small", *OPTIONS, *PATIENT, *where, *options)
        self.job: str = self.record["reference"]["id"]
        self.wait_for("checkpoint", lambda event: event["step"] == 10)

    def hold(self, step: int) -> None:
        new = self._path / "hold.new"
        new.write_text(str(step))
        new.rename(self._path / "hold")

    def go_on(self) -> None:
        (self._path / "hold").unlink()

    def wait_for(self, what: str, matching: Callable[[dict[str, Any]], bool] = lambda event: True) -> None:
        self.cluster.wait_until(lambda: self._happened(what, matching), what)

    def step_until(self, what: str, matching: Callable[[dict[str, Any]], bool]) -> None:
        """Go on step by step until this event is there."""

        def there() -> bool:
            if self._happened(what, matching):
                return True
            held = int((self._path / "hold").read_text())
            if (self._path / f"held-{held}").exists():
                self.hold(held + 1)
            return False

        self.cluster.wait_until(there, what)

    def _happened(self, what: str, matching: Callable[[dict[str, Any]], bool]) -> bool:
        events = self.directory.read_events() if self.directory.events.exists() else []
        return any(event["event"] == what and matching(event) for event in events)

    @property
    def log(self) -> str:
        return Path(self.record["directory"], f"slurm-{self.job}.log").read_text()

    def nodes(self) -> list[Node]:
        """The machines that the job has, in the order of their ranks."""
        names = self.cluster.run("scontrol", "show", "hostnames", self.cluster.show(self.job)["NodeList"])
        return [node for name in names.stdout.split() for node in self.cluster.nodes if node.name == name]

    def model(self) -> str:
        """The finished run's."""
        report = audit(self.directory)
        assert report.clean, report.verdict
        assert report.steps == 40
        sha256: str = json.loads(self.directory.result.read_text())["model_sha256"]
        return sha256


def test_a_task_has_the_bits_of_spawn(jobs: Jobs) -> None:
    options = ("--microbatches", "12", "--global-batch-size", "96", "--max-steps", "10", "--threads", "1")
    train = ("train", "fashion-mnist", *options, "--seed", "7")
    jobs.paceline(*train, "--on", "spawn", "--nproc", "4", "--run-dir", "here")
    record = jobs.submit(*train, "--on", "slurm", "--nodes", "2", "--nproc", "2", "--run-dir", "there")
    assert record["run"] == str(jobs.path / "there")
    jobs.cluster.wait_for(record["reference"]["id"], "COMPLETED")
    here, there = (json.loads((jobs.path / run / "result.json").read_text()) for run in ("here", "there"))
    assert here["model_sha256"] == there["model_sha256"]
    assert jobs.status(record) == {"state": "succeeded", "detail": "COMPLETED", "exit_code": 0, "restarts": 0}


@pytest.mark.parametrize(
    "lost",
    [pytest.param(0, id="the first node", marks=pytest.mark.slow), pytest.param(1, id="the second node")],
)
def test_a_task_goes_on_without_a_lost_node(jobs: Jobs, undisturbed: str, lost: int) -> None:
    run = Run(jobs)
    nodes = run.nodes()
    run.cluster.kill(nodes[lost])
    run.hold(14)
    run.wait_for("joined")
    run.go_on()
    run.cluster.wait_for(run.job, "COMPLETED")
    assert run.model() == undisturbed
    events = {event["event"] for event in run.directory.read_events()}
    assert ("takeover" if lost == 0 else "node lost") in events
    status = jobs.status(run.record)
    assert (status["state"], status["exit_code"]) == ("succeeded", 0)
    # The batch script was on the first node: Slurm starts it again, and it finds the finished run.
    assert status["restarts"] == (1 if lost == 0 else 0)


def test_a_preempted_task_is_saved_requeued_and_goes_on(jobs: Jobs, undisturbed: str) -> None:
    run = Run(jobs)
    cluster = run.cluster
    urgent = cluster.sbatch("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true")
    cluster.wait_until(lambda: "CANCELLED AT" in run.log, "the signal of Slurm's")
    # Slurm's own word may be there before the workers have got theirs.
    run.step_until("stopped", lambda event: event["cause"] == "SIGTERM")
    cluster.wait_for(urgent, "COMPLETED")
    run.go_on()
    cluster.wait_for(run.job, "COMPLETED")
    assert run.model() == undisturbed
    assert jobs.status(run.record)["restarts"] == 1
    assert "paceline: saved; back into the queue" in run.log


@pytest.mark.parametrize("mode", ["REQUEUE", pytest.param("CANCEL", marks=pytest.mark.slow)])
def test_scripts_that_are_preempted_save_and_are_requeued(jobs: Jobs, mode: str) -> None:
    cluster = jobs.cluster
    set_mode = ("scontrol", "update", "PartitionName=main")
    # The lab's Slurm preempts with the job's own signal where it has one.
    two = ("--nodes", "2")
    torchrun = two if mode == "REQUEUE" else ("--nodes", "1:2", "--max-restarts", "3")
    wishes = {"torchrun": torchrun, "mpi": two, "srun": ("--signal-before", "1min", "--walltime", "1h"), "spawn": ()}
    ranks = {"torchrun": 4, "mpi": 4, "srun": 2, "spawn": 2}
    records = {}
    assert cluster.run(*set_mode, f"PreemptMode={mode}").returncode == 0
    try:
        for name, options in wishes.items():
            launch = ("--requeue", "--rank-launcher", name, "--nproc", "2", "--threads", "1", *options)
            records[name] = jobs.launch(*launch, "--", "saves.py", name)
        cluster.wait_until(lambda: len(list(jobs.path.glob("ready-*"))) == sum(ranks.values()), "all ranks")
        cluster.sbatch("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true")
        # A preempted job is briefly in a state that an ended one has.
        cluster.wait_until(
            lambda: all(cluster.state(record["reference"]["id"]) == "COMPLETED" for record in records.values()),
            "the end of the restarted jobs",
        )
    finally:
        cluster.run(*set_mode, "PreemptMode=REQUEUE")
    for name, count in ranks.items():
        heard = [(jobs.path / f"{name}-{rank}").read_text() for rank in range(count)]
        assert heard == ["SIGUSR1" if name == "srun" else "SIGTERM"] * count
        assert jobs.status(records[name])["restarts"] == 1
        assert not list(Path(records[name]["directory"]).glob("stopped-*"))


def test_scripts_by_torchrun_by_rank_and_by_their_own_processes(jobs: Jobs) -> None:
    two = ("--nodes", "2", "--nproc", "2", "--threads", "1")
    where = "{rank}/{world_size} {master_addr}:{node_rank}/{nnodes} {local_rank}"
    of_torchrun = ("--torchrun", "tee=3", "--torchrun", "role=trainer")  # lines after the role and the local rank
    torchrun = jobs.launch(*two, *of_torchrun, "--", "sums.py", where)
    by_rank = jobs.launch(*two, "--rank-launcher", "srun", "--", "sums.py", "{rank}/{world_size} {local_rank}")
    own = jobs.launch(
        *("--nodes", "2", "--cpus-per-task", "2", "--env-style", "none", "--", "distributed.py"),
        *("--dist-url", "tcp://{master_addr}:{master_port}", "--multiprocessing-distributed"),
        *("--rank", "{node_rank}", "--world-size", "{nnodes}"),
    )
    lines = jobs.end_of(torchrun, "COMPLETED")
    assert len(lines) == 4, lines
    # torchrun numbers the nodes in an order of its own.
    assert all(line.split()[-3] == f"{line.split()[1]}/4" for line in lines)
    first = min(line.split()[5] for line in lines)
    assert sorted(line.split()[-2:] for line in lines) == [
        [f"{first}:{node}/2", str(local)] for node in (0, 1) for local in (0, 1)
    ]
    assert {line.partition(" on")[0] for line in lines} == {
        f"[trainer{rank % 2}]:rank {rank} local {rank % 2}" for rank in range(4)
    }
    lines = jobs.end_of(by_rank, "COMPLETED")
    assert [line.split()[-2:] for line in sorted(lines)] == [[f"{rank}/4", str(rank % 2)] for rank in range(4)]
    lines = jobs.end_of(own, "COMPLETED")
    assert {line.split(" on ")[0] for line in lines} == {f"rank {rank}" for rank in range(4)}
    assert all(line.endswith("has 10") for line in lines)


def test_mpirun_starts_its_daemons_by_slurm(jobs: Jobs) -> None:
    mpi = ("--nodes", "2", "--nproc", "2", "--rank-launcher", "mpi", "--threads", "1", "--env", "COLOUR=red")
    own = jobs.launch(*mpi, "--", "mpi.py")
    assert "red" not in Path(own["directory"], "job.sh").read_text()
    for_torch = jobs.launch(*mpi, "--env-style", "torch", "--", "sums.py")
    assert jobs.end_of(own, "COMPLETED") == {f"rank {rank} of 4 has 10 red" for rank in range(4)}
    lines = jobs.end_of(for_torch, "COMPLETED")
    assert {line.partition(" local")[0] for line in lines} == {f"rank {rank}" for rank in range(4)}
    assert all(line.endswith("has 10") for line in lines)


def test_an_array_is_a_job_for_each_number(jobs: Jobs) -> None:
    record = jobs.launch(
        *("--array", "0-2,5%2", "--env-style", "none", "--name", "sweep"),
        *("--", "sh", "-c", "echo lr {array_index} $SLURM_ARRAY_TASK_ID; test {array_index} != 5"),
    )
    job = record["reference"]["id"]
    jobs.cluster.wait_until(lambda: jobs.status(record)["state"] == "failed", "the last job of the array")
    status = jobs.status(record)
    assert sorted(status["detail"].split(", ")) == ["1 FAILED (NonZeroExitCode)", "3 COMPLETED"]
    lines = jobs.paceline("logs", "sweep").splitlines()
    assert [line for line in lines if "| lr" in line] == [
        f"slurm-{job}_{number}.log | lr {number} {number}" for number in (0, 1, 2, 5)
    ]


def test_each_job_of_an_array_comes_back_alone(jobs: Jobs) -> None:
    (jobs.path / "stops.sh").write_text(STOPS)
    record = jobs.launch(
        *("--array", "0-2", "--requeue", "--env-style", "none", "--", "sh", "stops.sh", "{array_index}")
    )
    jobs.cluster.wait_until(lambda: jobs.status(record)["state"] == "succeeded", "the whole array")
    assert [len((jobs.path / f"starts-{number}").read_text()) for number in range(3)] == [2, 1, 3]
    assert jobs.status(record)["restarts"] == 3


def test_logs_status_and_cancel_from_another_process(jobs: Jobs) -> None:
    command = "echo waiting on $(hostname); echo $$ >pid-$(hostname); sleep 600"
    record = jobs.launch("--nodes", "2", "--env-style", "none", "--name", "waits", "--", "sh", "-c", command)
    job = record["reference"]["id"]
    assert record["id"] == f"slurm-{job}"
    jobs.cluster.wait_until(lambda: len(list(jobs.path.glob("pid-*"))) == 2, "both machines")
    jobs.cluster.wait_until(lambda: "node2" in jobs.paceline("logs", job), "the output")
    assert jobs.status(record)["detail"] == "RUNNING"
    assert set(jobs.paceline("logs", "waits").splitlines()) == {"waiting on node1", "waiting on node2"}
    jobs.paceline("cancel", job)
    jobs.cluster.wait_for(job, "CANCELLED")
    status = jobs.status(record)
    assert status["state"] == "cancelled"
    assert status["exit_code"] != 0
    [listed] = json.loads(jobs.paceline("jobs", "--json"))
    assert listed["status"] == status
    assert "has already ended" in jobs.paceline("cancel", job)


def test_waiting_ends_as_the_job_does(jobs: Jobs) -> None:
    launch = ("launch", "--on", "slurm", "--env-style", "none", "--wait")
    assert jobs.paceline(*launch, "--", "sh", "-c", "echo done").splitlines() == ["done"]
    jobs.paceline(*launch, "--", "sh", "-c", "exit 7", code=7)
    jobs.paceline(*launch, "--setup", "no-such-program", "--", "true", code=127)
    # The rank on the other node ends later, with a higher code.
    fails = '[ "$RANK" = 1 ] && exit 3; trap "exit 9" TERM; while true; do sleep 0.1; done'
    two = ("--nodes", "2", "--env-style", "torch", "--rank-launcher", "spawn")
    jobs.paceline(*launch[:3], *two, "--wait", "--", "sh", "-c", fails, code=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--partition", "gpus"), "nvalid partition name specified. Check --partition gpus."),
        (("--exclude", "gpu7"), "Invalid node name specified. Check --exclude gpu7."),
        (("--gpus-per-node", "3"), "Requested node configuration is not available. Check"),
        (("--mem", "9T"), "Check --mem 9T."),
        (("--slurm", "frobnicate=1"), "unrecognized option '--frobnicate=1'. Check --slurm frobnicate=1."),
        (("--output", "logs/%j.log"), "--output: the folder {path}/logs does not exist"),
    ],
)
def test_what_sbatch_refuses_leaves_nothing(jobs: Jobs, options: tuple[str, ...], said: str) -> None:
    before = set(jobs.path.rglob("*"))
    code = 2 if "--output" in options else 1
    error = jobs.paceline("launch", "--on", "slurm", *options, "--", "sums.py", code=code)
    assert said.format(path=jobs.path) in error
    assert set(jobs.path.rglob("*")) == before
    assert jobs.cluster.run("squeue", "-h").stdout == ""


def test_a_container_without_pyxis_and_apptainer_says_what_to_do(jobs: Jobs) -> None:
    record = jobs.launch("--container", "docker://ubuntu:24.04", "--", "sums.py")
    lines = jobs.end_of(record, "FAILED")
    [said] = [line for line in lines if "--container" in line]
    assert said.startswith("paceline: --container needs pyxis (srun --container-image) or apptainer, and node")
    assert "Load the site's module with --module apptainer" in said
    assert jobs.status(record)["exit_code"] == 1


def test_an_image_that_no_node_has_ends_the_job_at_once(jobs: Jobs) -> None:
    record = jobs.launch("--container", "none.sif", "--", "sums.py")
    assert f"has no file {jobs.path}/none.sif" in "".join(jobs.end_of(record, "FAILED"))
    assert jobs.status(record)["exit_code"] == 1


def test_a_cluster_that_does_not_answer(jobs: Jobs) -> None:
    conf = (jobs.cluster.directory / "slurm.conf").read_text()
    elsewhere = jobs.path / "slurm.conf"
    elsewhere.write_text(conf.replace("ClusterName", "SlurmctldPort=1\nSlurmctldTimeout=1\nClusterName", 1))
    done = jobs.cluster.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--", "sums.py"),
        env={"SLURM_CONF": str(elsewhere), "XDG_STATE_HOME": str(jobs.path / "state")},
    )
    assert done.returncode == 1
    assert "the cluster is not reachable" in done.stderr
    assert not (jobs.path / "jobs").exists()


@pytest.mark.slow
def test_slurms_signal_before_the_time_limit_saves_and_requeues(jobs: Jobs) -> None:
    # Slurm looks at limits every half a minute, and may signal a minute early.
    env = {"SBATCH_TIMELIMIT": "3"}
    options = ("--max-steps", "100000", "--threads", "1", "--signal-before", "100s", "--run-dir", "run")
    where = ("--on", "slurm", "--nodes", "2", "--nproc", "2")
    record = jobs.submit("train", "fashion-mnist", *options, *where, env=env)
    directory = RunDirectory(jobs.path / "run")

    def stopped() -> bool:
        events = directory.read_events() if directory.events.exists() else []
        return any(event["event"] == "stopped" and event["cause"] == "SIGUSR1" for event in events)

    jobs.cluster.wait_until(stopped, "the stop")
    jobs.cluster.wait_until(lambda: jobs.status(record)["restarts"] == 1, "the restart")
    jobs.paceline("cancel", record["id"])
    jobs.cluster.wait_for(record["reference"]["id"], "CANCELLED")


def test_ctrl_c_ends_the_steps_in_an_allocation(jobs: Jobs) -> None:
    command = "trap 'echo saved >saved; exit 75' TERM; touch ready; while true; do sleep 0.1; done"
    launch = ("-m", "paceline", "launch", "--on", "slurm", "--env-style", "none", "--", "sh", "-c", command)
    env = {"XDG_STATE_HOME": str(jobs.path / "state")}
    session = jobs.cluster.start("salloc", "--quiet", sys.executable, *launch, env=env)
    jobs.cluster.wait_until((jobs.path / "ready").exists, "the step")
    [launcher] = [each for each in session.tree() if each.cmdline()[1:4] == ["-m", "paceline", "launch"]]
    launcher.send_signal(signal.SIGINT)
    assert session.wait() != 0
    jobs.cluster.wait_until((jobs.path / "saved").exists, "the step's last word")
    left = [jobs.cluster.run("pgrep", "-f", "touch ready", node=node) for node in jobs.cluster.nodes]
    assert [done.stdout for done in left] == ["", "", ""]


def test_in_an_allocation_the_job_is_a_step(jobs: Jobs) -> None:
    jobs.paceline("launch", "--on", "slurm", "--", "true", "--dry-run")
    launch = (sys.executable, "-m", "paceline", "launch", "--on", "slurm")
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2")
    env = {"XDG_STATE_HOME": str(jobs.path / "state"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    two = ("--nodes", "2", "--nproc", "2", "--threads", "1")
    done = jobs.cluster.run(*salloc, *launch, *two, "--rank-launcher", "srun", "--", "sums.py", env=env)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == WHO_SUMS
    # Slurm gives three CPUs and one; the job follows that, or has its own layout.
    uneven = ("salloc", "--quiet", "--nodes=2", "-n", "4", "sh", "-c")
    words = " ".join([*launch, "--threads 1 --rank-launcher srun"])
    where = "-- sh -c 'echo $0 $RANK $(hostname)'"
    followed = f"{words} --nproc auto {where} 3,1 && {words} --nodes 2 --nproc 2 {where} 2,2"
    torchrun = f"{words.replace('srun', 'torchrun')} --nproc auto {where} torchrun"
    done = jobs.cluster.run(*uneven, f"{followed} && {torchrun}", env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{layout} {rank} node{node}"
        for layout, nodes in (("2,2", (1, 1, 2, 2)), ("3,1", (1, 1, 1, 2)), ("torchrun", (1, 1, 1, 2)))
        for rank, node in enumerate(nodes)
    ]
    # Without tasks, it gives two GPUs and one.
    gpus = ("salloc", "--quiet", "--nodes=2", "--gpus=3")
    where = ("--", "sh", "-c", "echo $RANK $(hostname) $CUDA_VISIBLE_DEVICES")
    done = jobs.cluster.run(
        *gpus, *launch, "--threads", "1", "--rank-launcher", "srun", "--nproc", "auto", *where, env=env
    )
    assert sorted(done.stdout.splitlines()) == ["0 node1 0,1", "1 node1 0,1", "2 node2 0"], done.stderr
    done = jobs.cluster.run(*salloc, *launch, "--nodes", "3", "--", "sums.py", env=env)
    assert done.returncode == 2
    assert "--nodes 3, but this allocation of Slurm's has 2" in done.stderr
    limits = ("--nodes", "1:2", "--gpus-per-node", "1", "--walltime", "10min", "--env-style", "none")
    command = ("--", "sh", "-c", "echo $SLURM_STEP_NUM_NODES $CUDA_VISIBLE_DEVICES; squeue -hs -o %j:%l")
    for gpus in ("--gres=gpu:2", "--gpus-per-node=2"):
        larger = ("salloc", "--quiet", "--nodes=3", gpus)
        done = jobs.cluster.run(*larger, *launch, *limits, *command, env=env)
        assert done.returncode == 0, done.stderr
        place, step = sorted(set(done.stdout.splitlines()))
        assert place == "2 0", "machines, and the one GPU"
        assert step.endswith(":10:00")
    done = jobs.cluster.run(*salloc, *launch, "--partition", "high", "--", "sums.py", env=env)
    assert done.returncode == 2
    assert "--partition: only for submission, but this shell is in a Slurm allocation" in done.stderr
    train = (sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, "--run-dir", "run")
    done = jobs.cluster.run(*salloc, *train, "--on", "slurm", *two[:4], env=env)
    assert done.returncode == 0, done.stderr
    assert (jobs.path / "run" / "result.json").exists()
    train = (*train[:-1], "on-gpus", "--device", "cuda")
    for starter in (("--on", "slurm", "--nproc", "2", "--nodes", "2"), ("--on", "spawn")):
        done = jobs.cluster.run(*salloc, *train, *starter, env={**env, "CUDA_VISIBLE_DEVICES": "0,1"})
        assert done.returncode != 0
        assert "--device cuda: torch" in done.stderr
        assert not (jobs.path / "on-gpus" / "result.json").exists()
