"""``--on ray`` and ``--rank-launcher ray``, with real clusters: of the job's own, and one that is there."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from plugins.ray.tests.actor_jobs import prepare, spec
from tests.processes import children, runs

from paceline.core.errors import ConfigError
from paceline.core.job import RecoveryPolicy
from paceline.core.sockets import job_port
from paceline.launch.launcher import get_launcher
from paceline.launch.node import node_command
from paceline_ray.launcher import RayOptions
from paceline_ray.node import main as ray_node

pytestmark = pytest.mark.ray

# The documents' own, whose lines have lost some of their indentation there.
TEST = """\
import ray

ray.init()

@ray.remote
def f(x):
    return x * x

futures = [f.remote(i) for i in range(4)]

print(ray.get(futures)) # [0, 1, 4, 9]

@ray.remote
class Counter(object):
    def __init__(self):
        self.n = 0

    def increment(self):
        self.n += 1

    def read(self):
        return self.n

counters = [Counter.remote() for i in range(4)]
[c.increment.remote() for c in counters]
futures = [c.read.remote() for c in counters]
print(ray.get(futures)) # [1, 1, 1, 1]
"""

# Ray's own default is 15 more: beside other work, a process of such a job would hardly run.
NICENESS = """
import os

@ray.remote
def niceness():
    return os.nice(0)

print("as nice as its driver" if ray.get(niceness.remote()) == os.nice(0) else "nicer")
"""

# The get-started of Ray Train's documentation, with a small model and data of its own.
RAY_TRAIN = """\
import os
import tempfile

import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset


def train_func():
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    for epoch in range(2):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)


trainer = ray.train.torch.TorchTrainer(
    train_func,
    scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=False),
    run_config=ray.train.RunConfig(storage_path=os.path.abspath("results")),
)
result = trainer.fit()
with result.checkpoint.as_directory() as folder:
    print(sorted(torch.load(os.path.join(folder, "model.pt"))), result.metrics["epoch"])
"""
RUN = ("--microbatches", "12", "--global-batch-size", "96", "--threads", "1", "--seed", "7")


@pytest.fixture(autouse=True)
def small_and_recorded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 * 2**20))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "test.py").write_text(TEST)


class Cluster:
    """A cluster that is there before a job and after it."""

    def __init__(self, env: dict[str, str], pid: int) -> None:
        self.env = env
        self.pid = pid

    @property
    def address(self) -> str:
        return self.env["RAY_ADDRESS"]

    def processes(self) -> list[psutil.Process]:
        return children(self.pid, recursive=True)

    def actors(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "NodeActor" in _title(process)]


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, IndexError):
        return process.cmdline()[0]
    return ""


@pytest.fixture(scope="module")
def cluster(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    says = "import json, os, signal; print(json.dumps(dict(os.environ)), flush=True); signal.pause()"
    started = module_processes.start(
        [
            *(
                sys.executable,
                "-m",
                "paceline_ray.node",
                "--directory",
                directory,
                "--cpus",
                "2",
            ),
            *("--", sys.executable, "-c", says),
        ],
        # A cluster that srun has started, whose processes are ranks of its step.
        env={"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 2**20), "SLURM_STEP_ID": "0"},
        shared=True,
    )
    line = started.stdout.readline()
    assert line, started.stderr.read()
    env = {name: value for name, value in json.loads(line).items() if name.startswith("RAY_")}
    yield Cluster(env, started.pid)
    below = children(started.pid, recursive=True)
    started.send_signal(signal.SIGTERM)
    started.wait(60)
    # What belonged to it ended before it did; so did the files.
    assert [process for process in below if process.is_running()] == []
    assert list(directory.iterdir()) == []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a folder for the temporary files of one test, with a name as short as Ray's sockets need."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as name:
        yield Path(name)


# What would run


def test_a_program_is_rendered_with_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = get_launcher("ray")
    own = ray.render(spec(rank_launcher="ray", cpus_per_task=4, interface="lo", env={"A": "b"}))
    assert own.text == (
        "# a Ray cluster on this machine, and the program in it\n"
        "GLOO_SOCKET_IFNAME=lo \\\n  NCCL_SOCKET_IFNAME=lo \\\n  UCX_NET_DEVICES=lo \\\n  A=b \\\n"
        "  python -P -m paceline_ray.node --directory /jobs/train --cpus 4 --interface lo "
        "-- python train.py\n"
    )
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert ray.render(spec(rank_launcher="ray", env_style="none")).text == (
        "# the program, with the Ray cluster at head:6379\nRAY_ADDRESS=head:6379 \\\n  python train.py\n"
    )


def test_machines_are_rendered_as_a_file_and_a_command() -> None:
    job = spec(
        nodes=(2, 2),
        nproc=(4, 2),
        cpus_per_task=3,
        gpus_per_node=4,
        env={"A": "b"},
        recovery=RecoveryPolicy(max_restarts=2),
    )
    rendered = get_launcher("ray").render(job, RayOptions(address="head:6379", placement="strict-spread"))
    assert (
        rendered.text
        == """\
# /jobs/train/ray-job.json
{
  "command": ["python", "-P", "-m", "paceline.launch.node", "--rank-launcher", "torchrun", "--nodes", "2", "--nproc", \
"4,2", "--max-restarts", "2", "--", "python", "train.py"],
  "workdir": "/work",
  "env": {"A": "b"},
  "recovers": false,
  "replacements": 3,
  "cpus": [12, 6],
  "gpus": 4,
  "placement": "strict-spread",
  "own_cluster": false
}

# the job, in the Ray cluster at head:6379
RAY_ADDRESS=head:6379 \\
  python -P -m paceline_ray.job paceline_ray.launcher /jobs/train/ray-job.json
"""
    )
    own = get_launcher("ray").render(spec(nproc=(2,)))
    assert own.commands[0].argv == (
        *(
            "python",
            "-P",
            "-m",
            "paceline_ray.node",
            "--directory",
            "/jobs/train",
            "--cpus",
            "2",
            "--",
        ),
        *("python", "-P", "-m", "paceline_ray.job", "paceline_ray.launcher", "/jobs/train/ray-job.json"),
    )


def test_the_machines_are_examined_once() -> None:
    """By their actors, or by the one command that starts a cluster for a program."""
    ray = get_launcher("ray")
    job = spec(preflight=("doctor", "{node_rank}"), nodes=(2, 2))
    assert ray.render(job).text.count("--preflight") == 1
    assert ray.render(job, RayOptions(address="head:6379")).text.count("--preflight") == 1
    assert ray.render(spec(rank_launcher="ray", preflight=("doctor",))).text.count("--preflight") == 1


def test_a_preflight_is_told_which_machine_this_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_NODE_RANK", "1")
    monkeypatch.setenv("PACELINE_HOSTS", "node0,node1")
    monkeypatch.setenv("PACELINE_JOB_ID", "7.0")
    says = f"{sys.executable} -c 'import sys; print(*sys.argv[1:5]); sys.exit(3)'"
    places = "{node_rank} {nnodes} {master_addr} {master_port}"
    assert ray_node(["--directory", "/jobs/train", "--preflight", f"{says} {places}", "--", "true"]) == 3
    assert capfd.readouterr().out == f"1 2 node0 {job_port('7.0')}\n"


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    ray = get_launcher("ray")
    with pytest.raises(ConfigError, match=r"--nproc 2: under --rank-launcher ray .* --rank-launcher torchrun"):
        ray.render(spec(rank_launcher="ray", nproc=(2,)))
    with pytest.raises(ConfigError, match=r"--nodes 2: a program that uses Ray starts once"):
        ray.render(spec(rank_launcher="ray", nodes=(2, 2)))
    with pytest.raises(ConfigError, match=r"--nodes 1:2: .* paceline join"):
        ray.render(spec(nodes=(1, 2)))
    with pytest.raises(ConfigError, match=r"--placement must be one of spread, pack"):
        ray.render(spec(), RayOptions(placement="near"))
    with pytest.raises(ConfigError, match=r"--machine-restarts must be at least 0, but is -1"):
        ray.render(spec(), RayOptions(machine_restarts=-1))
    with pytest.raises(ConfigError, match=r"--address must be HOST:PORT"):
        ray.render(spec(), RayOptions(address="head"))
    with pytest.raises(ConfigError, match=r"--preflight: .* the Ray cluster at head:6379 .* Leave it out"):
        ray.render(spec(rank_launcher="ray", preflight=("doctor",)), RayOptions(address="head:6379"))


def test_nothing_of_a_token_is_rendered() -> None:
    assert "token" not in get_launcher("ray").render(spec(rank_launcher="ray", env_style="none")).text
    assert "token" not in " ".join(node_command(spec(rank_launcher="ray", nodes=(2, 2))))


# A cluster of the job's own


def test_a_program_with_tasks_and_actors_runs_as_it_is(run_processes: Any, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "test.py").write_text(TEST + NICENESS)
    words = ("launch", "--on", "ray", "--cpus-per-task", "2", "--", "test.py")
    done = run_processes.paceline(*words, env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 4, 9]", "[1, 1, 1, 1]", "as nice as its driver"]
    assert list(temporary.glob("paceline-ray-*")) == []


def test_a_driver_skips_what_ray_train_warns_of_without_a_dashboard(cluster: Cluster) -> None:
    # Ray, once imported, would leave a variable in this process.
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    controller = Path(found.origin).parent / "train/v2/_internal/execution/controller"
    source = (controller / "placement_group_cleaner.py").read_text()
    assert re.search(cluster.env["RAY_DEDUP_LOGS_SKIP_REGEX"], source)


@pytest.mark.slow
def test_ray_train_does_not_repeat_that_there_is_no_dashboard(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAY_TRAIN)
    skips = {"RAY_DEDUP_LOGS_SKIP_REGEX": "Requesting resources"}
    words = ("launch", "--on", "ray", "--cpus-per-task", "2", "--", "train.py")
    done = run_processes.paceline(*words, env=skips, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("['bias', 'weight'] 1\n")
    assert "Attempting to start training worker group of size 1" in done.stderr  # what Ray Train logs is shown
    assert "Requesting resources" not in done.stderr  # but for what the user skips
    assert "Failed to query Ray Train Controller actor state" not in done.stderr


@pytest.mark.slow
def test_a_program_that_preflight_lets_go(run_processes: Any) -> None:
    words = ("launch", "--on", "ray", "--cpus-per-task", "1", "--preflight")
    done = run_processes.paceline(*words, "--", "echo", "started")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n"


def test_a_task_with_a_worker_killed_ends_with_the_same_bits(run_processes: Any, tmp_path: Path) -> None:
    undisturbed = run_processes.paceline(
        "train", "fashion-mnist", *RUN, "--max-steps", "60", "--run-dir", "undisturbed", "--json"
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    (tmp_path / "plan" / "kill-100").touch()
    done = run_processes.paceline(
        *("train", "harmed.py:Harmed", "--set", f"plan={tmp_path}/plan", "--on", "ray", "--nproc", "2"),
        # The end of a worker is seen without it, and a machine that stalls is no fault.
        *(*RUN, "--max-steps", "60", "--run-dir", "run", "--heartbeat", "60", "--purity", "off"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["model_sha256"] == json.loads(undisturbed.stdout)["model_sha256"]
    assert result["recoveries"] == 1
    # Not by another start of the machine: its agent has recovered within the step.
    assert "was lost" not in done.stderr
    assert {path.name for path in (tmp_path / "run" / "job").iterdir()} == {"ray-job.json", "exit-code"}


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing(
    run_processes: Any, tmp_path: Path, temporary: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "plan" / "wait-100").touch()
    started = run_processes.start(
        [
            *(
                sys.executable,
                "-m",
                "paceline",
                "train",
                "harmed.py:Harmed",
                "--set",
                f"plan={tmp_path}/plan",
            ),
            *("--on", "ray", *RUN, "--max-steps", "100000", "--run-dir", "run", "--purity", "off"),
        ],
        env={"TMPDIR": str(temporary)},
    )
    wait_until((tmp_path / "plan" / "here").exists, "the task waits", 120)
    assert len(list(temporary.glob("paceline-ray-*"))) == 1
    below = children(started.pid, recursive=True)
    assert any("NodeActor" in _title(process) for process in below)
    started.send_signal(signal.SIGINT)
    (tmp_path / "plan" / "go").touch()
    done = run_processes.finish(started, timeout_s=90)
    assert done.returncode == 130, done.stderr
    assert "everything is saved" in done.stderr
    assert [process for process in below if process.is_running()] == []
    assert list(temporary.glob("paceline-ray-*")) == []


# A cluster that is there


def test_the_cluster_listens_on_loopback_alone_and_wants_its_token(
    cluster: Cluster, run_processes: Any, tmp_path: Path
) -> None:
    token = Path(cluster.env["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text().strip()
    assert not any(secret in word for p in cluster.processes() for word in p.cmdline())
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(cluster.pid), *cluster.processes()]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    other = tmp_path / "token"
    other.write_text("0" * 64)
    done = run_processes.paceline(
        *("launch", "--on", "ray", "--rank-launcher", "spawn", "--", "waits.py"),
        env={**cluster.env, "RAY_AUTH_TOKEN_PATH": str(other)},
    )
    assert done.returncode == 1
    assert f"the Ray cluster at {cluster.address} cannot be used" in done.stderr
    assert done.stderr.endswith("RAY_AUTH_TOKEN_PATH name its token?\n")


def test_a_scripts_machines_are_actors(
    cluster: Cluster, run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "place.py").write_text(
        "import os\n"
        "names = ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK', 'MASTER_ADDR', 'RAY_ADDRESS', 'A')\n"
        "os.write(1, ' '.join(os.environ[name] for name in names).encode() + b'\\n')\n"
        "os.write(2, b'to stderr, %d\\n' % ('SLURM_STEP_ID' in os.environ))\n"
    )
    done = run_processes.paceline(
        *("launch", "--on", "ray", "--nodes", "2", "--rank-launcher", "spawn", "--placement", "pack", "--env", "A=b"),
        *("--address", cluster.address, "--", "place.py"),
        env=cluster.env,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"machine {rank} | {rank} 2 {rank} 0 127.0.0.1 {cluster.address} b" for rank in (0, 1)
    ]
    assert sorted(line for line in done.stderr.splitlines() if "to stderr" in line) == [
        "machine 0 | to stderr, 0",
        "machine 1 | to stderr, 0",
    ]
    wait_until(lambda: cluster.actors() == [], "its actors are gone")


def test_one_failure_ends_all_and_gives_its_exit_code(
    cluster: Cluster, run_processes: Any, wait_until: Callable[..., None]
) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "ray", "--nodes", "2", "--rank-launcher", "spawn", "--env-style", "torch", "--"),
        *("sh", "-c", "if [ $RANK = 1 ]; then exit 7; fi; trap '' TERM; while :; do sleep 1; done"),
        env=cluster.env,
    )
    assert done.returncode == 7
    assert "ended with exit code 7" in done.stderr
    wait_until(lambda: cluster.actors() == [], "its actors are gone")


def test_cancel_removes_a_detached_jobs_actors_and_processes(
    cluster: Cluster, run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "ray", "--nodes", "2", "--rank-launcher", "spawn", "--name", "mine", "--detach"),
        *("--", "waits.py"),
        env=cluster.env,
    )
    assert done.returncode == 0, done.stderr
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "both ranks wait", 90)
    ranks = [psutil.Process(int(path.read_text())) for path in ready]
    assert len(cluster.actors()) == 2
    [job] = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert (job["name"], job["status"]["state"]) == ("mine", "running")
    own = psutil.Process(int(job["reference"]["pid"]))
    assert run_processes.paceline("cancel", "mine").returncode == 0
    # It is nobody's child here.
    wait_until(lambda: not runs(own), "the job ends", 60)
    assert not any(rank.is_running() for rank in ranks)
    wait_until(lambda: cluster.actors() == [], "its actors are gone")
    assert "waiting" in run_processes.paceline("logs", "mine").stdout
    assert json.loads(run_processes.paceline("status", "mine", "--json").stdout)["status"]["state"] == "cancelled"


def test_a_cluster_that_does_not_answer_is_named(run_processes: Any) -> None:
    done = run_processes.paceline(
        "launch", "--on", "ray", "--rank-launcher", "torchrun", "--address", "127.0.0.1:1", "--", "waits.py"
    )
    assert done.returncode == 1
    assert "no Ray cluster answers at --address 127.0.0.1:1" in done.stderr
    assert len(done.stderr.splitlines()) == 1
