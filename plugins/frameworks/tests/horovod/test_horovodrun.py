"""Jobs under a real horovodrun, and Horovod's optimizer in a Paceline run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.horovod

EXAMPLES = Path(__file__).parents[2] / "examples"
BESIDE = Path(sys.executable).parent
TENSORFLOW = Path(sys.prefix) / "horovod-tensorflow" / "bin" / "python"

TASK = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline


@dataclass
class Small(paceline.Task):
    failing_rank: int = -1
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        # A head that only some batches use, and one that none does.
        return nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3), "unused": nn.Linear(8, 3)})

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        # 100 is no multiple of 24: in an epoch's last step there is one microbatch, so one rank has none.
        return TensorDataset(torch.randn(100, 8, generator=data), torch.randint(0, 3, (100,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        head = "a" if batch[0][0, 0] > 0 else "b"
        return nn.functional.cross_entropy(model[head](batch[0]), batch[1])
"""
TRAIN = ("train", "small.py:Small", "--threads", "1", "--seed", "3", "--quiet")
HOROVOD = ("--on", "horovod", "--nproc", "2")
ELASTIC = """
import os, signal
from pathlib import Path
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


@hvd.elastic.run
def train(state):
    while state.step < 20:
        if state.step == 5 and hvd.rank() == 1 and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
print(f"rank {hvd.rank()} of {hvd.size()} is at step {state.step}", flush=True)
"""


@pytest.fixture(autouse=True)
def horovod() -> None:
    if shutil.which("horovodrun", path=str(BESIDE)) is None:
        pytest.skip("Horovod is missing: scripts/build-horovod builds it")


@pytest.fixture
def start(run_processes: Any, tmp_path: Path) -> Callable[..., Any]:
    """Start a command of Paceline's."""

    def start(*words: str | Path) -> Any:
        (tmp_path / "small.py").write_text(TASK)
        path = os.pathsep.join([str(BESIDE), os.environ["PATH"]])
        env = {"PATH": path, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
        return run_processes.start([sys.executable, "-m", "paceline", *words], env=env, cwd=tmp_path)

    return start


@pytest.fixture
def run(start: Callable[..., Any], run_processes: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *words: run_processes.finish(start(*words), timeout_s=180)


def what_was_found(stdout: str) -> tuple[list[str], set[str]]:
    """Which ranks the examples speak of, and the lines that they fitted, without horovodrun's prefixes."""
    told = re.findall(r"rank (\d) of 2: (y = .+)$", stdout, flags=re.MULTILINE)
    return sorted(rank for rank, _ in told), {line for _, line in told}


def test_a_script_that_knows_nothing_of_paceline(run: Callable[..., Any]) -> None:
    done = run("launch", *HOROVOD, "--", EXAMPLES / "horovod_pytorch.py")
    assert done.returncode == 0, done.stderr
    assert what_was_found(done.stdout) == (["0", "1"], {"y = 3.00 x -1.00"})
    [record] = json.loads(run("jobs", "--json").stdout)
    assert (record["launcher"], record["status"]["state"]) == ("horovod", "succeeded")


def test_a_task_ends_with_the_model_of_one_process_and_by_horovods_sums_nearly_so(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    length = ("--epochs", "2")
    alone = json.loads(run(*TRAIN, *length, "--run-dir", "alone", "--json").stdout)
    done = run(*TRAIN, *length, "--run-dir", "exact", *HOROVOD)
    assert done.returncode == 0, done.stderr
    exact = json.loads((tmp_path / "exact/result.json").read_text())
    assert (exact["model_sha256"], exact["world_size"]) == (alone["model_sha256"], 2)

    done = run(*TRAIN, *length, "--run-dir", "summed", *HOROVOD, "--strategy", "horovod")
    assert done.returncode == 0, done.stderr
    summed = json.loads((tmp_path / "summed/result.json").read_text())
    assert (summed["strategy"], summed["reduction"], summed["world_size"]) == ("horovod", "horovod", 2)
    assert (summed["steps"], summed["samples"]) == (alone["steps"], alone["samples"])
    models = [
        load_file(max((tmp_path / name / "checkpoints").glob("*/model.safetensors"))) for name in ("alone", "summed")
    ]
    for name, tensor in models[0].items():
        assert tensor.allclose(models[1][name], rtol=0, atol=1e-6), name


def test_a_strategy_whose_processes_horovod_does_not_know_is_refused(run: Callable[..., Any]) -> None:
    done = run(*TRAIN, "--max-steps", "2", "--run-dir", "run", "--nproc", "2", "--strategy", "horovod")
    assert done.returncode == 2
    assert "Horovod has 1 processes, but there are 2. Start them with horovodrun: --on horovod." in (done.stderr)


def test_a_rank_that_fails_ends_the_job(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(300)\n"
    )
    done = run("launch", *HOROVOD, "--", "fails.py")
    assert done.returncode == 1
    assert "Process name: 1\nExit code: 3\n" in done.stderr
    assert "paceline: horovodrun ended with exit code 1; see the output above for the cause." in done.stderr


@pytest.mark.slow
def test_doctor_shows_what_horovod_was_built_with(run: Callable[..., Any]) -> None:
    plain = subprocess.run([BESIDE / "horovodrun", "--check-build"], capture_output=True, text=True, check=True)
    build = json.loads(run("doctor", "--horovod", "--json").stdout)
    assert build["text"] == plain.stdout.strip()
    assert run("doctor", "--horovod").stdout.strip() == build["text"]
    assert (build["frameworks"]["PyTorch"], build["controllers"]["Gloo"]) == (True, True)
    assert build["version"] == "0.28.1"


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_task_that_is_asked_to_stop_saves_its_state(
    start: Callable[..., Any],
    run_processes: Any,
    tmp_path: Path,
    wait_until: Callable[..., None],
    controller: str,
) -> None:
    job = start(
        *(*TRAIN, "--run-dir", "run", "--epochs", "100000", "--log-every", "5", "--strategy", "horovod"),
        *(*HOROVOD, "--controller", controller),
    )
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step"' in metrics.read_text(), "a step", timeout_s=120)
    job.send_signal(signal.SIGTERM)
    done = run_processes.finish(job)
    assert done.returncode == 75, done.stderr
    assert "everything is saved" in done.stderr


@pytest.mark.slow
def test_the_mpi_controller(run: Callable[..., Any]) -> None:
    done = run("launch", *HOROVOD, "--controller", "mpi", "--", EXAMPLES / "horovod_pytorch.py")
    assert done.returncode == 0, done.stderr
    assert what_was_found(done.stdout) == (["0", "1"], {"y = 3.00 x -1.00"})


def test_an_elastic_job_on_this_node_alone_needs_no_interface(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    (tmp_path / "lost").touch()  # no process is lost here
    machines = tmp_path / "machines.sh"
    machines.write_text("#!/bin/sh\necho localhost:2\n")
    machines.chmod(machines.stat().st_mode | stat.S_IXUSR)
    elastic = ("--min-np", "1", "--max-np", "2", "--host-discovery-script", "./machines.sh")
    done = run("launch", *HOROVOD, *elastic, "--", "elastic.py")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d) of 2 is at step 20", done.stdout)) == ["0", "1"]
    assert "./machines.sh lists only this machine, so Horovod uses the network interface lo" in done.stderr


def test_an_elastic_job_that_waits_for_a_second_node_says_so(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    elastic = ("--min-np", "1", "--max-np", "4", "--host-discovery-script", "echo 192.0.2.250:2")
    job = start("launch", *HOROVOD, *elastic, "--", "elastic.py")
    said = job.stderr.readline()
    assert "echo 192.0.2.250:2 lists only 192.0.2.250, and without --interface horovodrun waits for a" in said
    job.send_signal(signal.SIGTERM)
    assert run_processes.finish(job).returncode != 0


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_lost_process(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    machines = tmp_path / "machines.sh"
    machines.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    machines.chmod(machines.stat().st_mode | stat.S_IXUSR)
    done = run(
        *("launch", *HOROVOD, "--min-np", "1", "--max-np", "2"),
        *("--host-discovery-script", machines, "--horovod-args=--blacklist-cooldown-range 2 4"),
        *("--", "elastic.py"),
    )
    assert (tmp_path / "lost").exists()
    assert re.findall(r"rank \d of \d is at step 20", done.stdout), done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.tensorflow
def test_tensorflow_in_an_environment_of_its_own(run: Callable[..., Any]) -> None:
    if not TENSORFLOW.exists():
        pytest.skip("its environment is missing: scripts/build-horovod --tensorflow ENV makes it")
    done = run("launch", *HOROVOD, "--python", TENSORFLOW, "--", EXAMPLES / "horovod_tensorflow.py")
    assert done.returncode == 0, done.stderr
    assert what_was_found(done.stdout) == (["0", "1"], {"y = 3.00 x -1.00"})
