"""Jobs under a real mpirun: Open MPI's, and MPICH's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import runs

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[3]
BESIDE = Path(sys.executable).parent
MPICH = Path(sys.prefix) / "mpich" / "bin"

TORCH = """
import os, sys, torch
from torch import distributed

distributed.init_process_group("gloo")
total = torch.tensor(float(distributed.get_rank() + 1))
distributed.all_reduce(total)
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
# In one piece: the ranks write at once.
os.write(1, f"{total.item():g} {place} {sys.argv[1:]} {os.environ['NOTE']}\\n".encode())
distributed.destroy_process_group()
"""
MPI4PY = """
import os
from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
os.write(1, f"{total} {world.rank == int(os.environ['RANK'])}\\n".encode())
"""
TASK = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline


@dataclass
class Small(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(96, 8, generator=data), torch.randint(0, 3, (96,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TRAIN = ("train", "small.py:Small", "--threads", "1", "--seed", "3", "--quiet", "--run-dir", "run")


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Whose mpirun is on PATH."""
    if shutil.which(*program(request.param)) is None:
        pytest.skip(f"{request.param}'s mpirun is missing: make test-systems installs it")
    return str(request.param)


OFTEN_UNDER_ONE = pytest.mark.parametrize(
    "mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)], indirect=True
)


def program(mpi: str) -> tuple[str, int, str]:
    return "mpirun", os.X_OK, str(BESIDE if mpi == "openmpi" else MPICH)


@pytest.fixture
def start(run_processes: Any, tmp_path: Path) -> Callable[..., Any]:
    """Start a command of Paceline's where one mpirun is on PATH."""

    def start(mpi: str, *words: str) -> Any:
        (tmp_path / "small.py").write_text(TASK)
        path = os.pathsep.join([program(mpi)[2], os.environ["PATH"]])
        env = {"PATH": path, "XDG_STATE_HOME": str(tmp_path / "state"), "NOTE": "", "OMP_NUM_THREADS": "1"}
        return run_processes.start([sys.executable, "-m", "paceline", *words], env=env, cwd=tmp_path)

    return start


@pytest.fixture
def run(start: Callable[..., Any], run_processes: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *words: run_processes.finish(start(*words), timeout_s=120)


def test_a_script_for_torch_finds_its_place(run: Callable[..., Any], mpi: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCH)
    words = ("{nnodes}", "{local_rank}", "{rank}/{world_size}")
    done = run(mpi, "launch", "--on", "mpi", "--nproc", "3", "--env", "NOTE=it's", "--", "script.py", *words)
    assert done.returncode == 0, done.stderr

    assert sorted(done.stdout.splitlines()) == [
        f"6 {[str(rank), '3', str(rank), '3', '0']} ['1', '{rank}', '{rank}/3'] it's" for rank in range(3)
    ]
    [record] = json.loads(run(mpi, "jobs", "--json").stdout)
    assert (record["launcher"], record["status"]["state"]) == ("mpi", "succeeded")


def test_a_compiled_program_and_one_in_python(run: Callable[..., Any], mpi: str, tmp_path: Path) -> None:
    compiler = Path(program(mpi)[2]) / "mpicc"
    subprocess.run([compiler, Path(__file__).with_name("hello.c"), "-o", tmp_path / "hello"], check=True)
    done = run(mpi, "launch", "--on", "mpi", "--nproc", "3", "--env-style", "mpi", "--", "./hello")
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert sorted(done.stdout.splitlines()) == [
        *(f"rank {rank} of 3 on {host}" for rank in range(3)),
        "the sum of all ranks is 3",
    ]
    if mpi == "openmpi":  # which mpi4py is installed for
        (tmp_path / "ring.py").write_text(MPI4PY)
        done = run(mpi, "launch", "--on", "mpi", "--nproc", "2", "--", "ring.py")
        assert done.stdout.splitlines() == ["3 True", "3 True"], done.stderr


@OFTEN_UNDER_ONE
def test_a_task_ends_with_the_model_of_one_process(run: Callable[..., Any], mpi: str, tmp_path: Path) -> None:
    alone = run(mpi, *TRAIN[:-1], "alone", "--max-steps", "6", "--json")
    done = run(mpi, *TRAIN, "--max-steps", "6", "--on", "mpi", "--nproc", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["world_size"] == 3
    assert result["model_sha256"] == json.loads(alone.stdout)["model_sha256"]
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 0


@OFTEN_UNDER_ONE
def test_a_task_that_is_asked_to_stop_saves_its_state(
    start: Callable[..., Any],
    run: Callable[..., Any],
    run_processes: Any,
    mpi: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    job = start(mpi, *TRAIN, "--epochs", "100000", "--log-every", "5", "--on", "mpi", "--nproc", "2")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step"' in metrics.read_text(), "a step", timeout_s=60)
    job.send_signal(signal.SIGTERM)
    done = run_processes.finish(job)
    assert done.returncode == 75, done.stderr
    told = re.search(r"stopped after step (\d+), by SIGUSR1; everything is saved", done.stderr)
    assert told is not None, done.stderr
    listed = json.loads(run(mpi, "checkpoint", "ls", "run", "--json").stdout)
    assert str(told[1]) in json.dumps(listed)


@pytest.mark.parametrize("how", ["ctrl-c", "killed", "mpirun killed"])
def test_no_rank_outlives_its_job(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path, wait_until: Callable[..., None], how: str
) -> None:
    # Deaf, and started bare: nothing but Paceline can end it.
    (tmp_path / "deaf.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{os.getpid()}.pid', 'w').close()\n"
        "time.sleep(300)\n"
    )
    contract = "torch" if how == "killed" else "mpi"
    job = start("openmpi", "launch", "--on", "mpi", "--nproc", "2", "--env-style", contract, "--", "deaf.py")
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "two ranks", timeout_s=60)
    ranks = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.pid")]
    if how == "ctrl-c":
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGTERM)
        wait_until(lambda: job.poll() is not None or job.send_signal(signal.SIGINT), "an end")
    elif how == "killed":
        job.kill()
    else:
        ranks[0].parent().kill()
    run_processes.finish(job)
    wait_until(lambda: not any(map(runs, ranks)), "their end")


def test_a_rank_that_fails_ends_the_job_with_its_code(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(300)\n"
    )
    done = run("openmpi", "launch", "--on", "mpi", "--nproc", "2", "--", "fails.py")
    assert done.returncode == 3
    assert "paceline: mpirun ended with exit code 3; see the output above for the cause." in done.stderr
