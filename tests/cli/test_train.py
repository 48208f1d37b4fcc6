"""``paceline train`` and ``paceline.fit`` in all the ways in which they are started."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TASK = """
from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Small(paceline.Task):
    failing_rank: int = -1
    exits_in_step: bool = False
    ends_in_step: bool = False
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(100, 8, generator=data), torch.randint(0, 3, (100,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
        if rank == str(self.failing_rank):
            raise ValueError("boom")
        if self.exits_in_step:
            sys.exit(0)
        if self.ends_in_step:
            os._exit(0)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    result = paceline.fit(Small(), max_steps=6, threads=1, seed=3, run_dir="run", quiet=True)
    os.write(1, f"SHA {result.model_sha256}\\n".encode())  # in one piece, as all ranks write it
"""
OPTIONS = ("small.py:Small", "--max-steps", "6", "--threads", "1", "--seed", "3", "--quiet")
TRAIN = ("-m", "paceline", "train", *OPTIONS)
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable)
# Where pip puts mpirun, too.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
needs_mpi = pytest.mark.skipif(shutil.which("mpirun", path=PATH) is None, reason="needs mpirun")
by_mpirun = (pytest.mark.mpi, needs_mpi)


@pytest.fixture(scope="module")
def one_process(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The run of one process: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("one_process")
    (directory / "small.py").write_text(TASK)
    done = module_processes.run([*PYTHON, *TRAIN, "--json", "--run-dir", "run"], cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory, done


@pytest.fixture(scope="module")
def sha256(one_process: tuple[Path, Any]) -> str:
    return str(json.loads(one_process[1].stdout)["model_sha256"])


@pytest.fixture
def start(run_processes: Any, tmp_path: Path) -> Callable[..., Any]:
    """Start a command beside the task."""
    (tmp_path / "small.py").write_text(TASK)
    return lambda *words: run_processes.start(words, env={"PATH": PATH, "OMP_NUM_THREADS": "1"})


def test_json_is_the_result_and_quiet_is_quiet(one_process: tuple[Path, Any]) -> None:
    directory, done = one_process
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result == json.loads((directory / "run/result.json").read_text())
    assert {
        *("task", "strategy", "reduction", "world_size", "microbatches", "steps", "epochs", "samples"),
        *("metrics", "model_sha256", "restarts", "seconds", "samples_per_s", "torch"),
    } <= result.keys()
    assert (result["steps"], result["samples"], result["world_size"]) == (6, 24 * 4 + 4 + 24, 1)


def test_without_json_stdout_stays_empty_and_progress_goes_to_stderr(
    start: Callable[..., Any], run_processes: Any
) -> None:
    done = run_processes.finish(start(*PYTHON, *[w for w in TRAIN if w != "--quiet"], "--run-dir", "run"))
    assert done.returncode == 0
    assert done.stdout == ""
    assert "paceline audit run" in done.stderr
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*PYTHON, *TRAIN, "--nproc", "2", "--run-dir", "run"), id="spawn"),
        pytest.param((*TORCHRUN, *TRAIN, "--run-dir", "run"), id="torchrun"),
        pytest.param((*LAUNCH, *TRAIN, "--run-dir", "run"), id="launch", marks=pytest.mark.slow),
        pytest.param((*MPIRUN, *TRAIN, "--run-dir", "run"), id="mpirun", marks=by_mpirun),
    ],
)
def test_the_same_model_under_every_launcher(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path, sha256: str, words: tuple[str, ...]
) -> None:
    done = run_processes.finish(start(*words, "--json"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["model_sha256"], result["world_size"]) == (sha256, 2)
    assert sorted(path.name for path in (tmp_path / "run/logs").iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*PYTHON, "small.py"), id="python"),
        pytest.param((*TORCHRUN, "small.py"), id="torchrun"),
        pytest.param((*LAUNCH, "small.py"), id="launch", marks=pytest.mark.slow),
        pytest.param((*MPIRUN, "small.py"), id="mpirun", marks=[*by_mpirun, pytest.mark.slow]),
    ],
)
def test_a_script_needs_no_change(
    start: Callable[..., Any], run_processes: Any, sha256: str, words: tuple[str, ...]
) -> None:
    done = run_processes.finish(start(*words))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {f"SHA {sha256}"}


def test_two_machines_by_hand(start: Callable[..., Any], run_processes: Any, tmp_path: Path, sha256: str) -> None:
    endpoint = f"127.0.0.1:{run_processes.free_port()}"
    machines = [
        start(
            *(*PYTHON, *TRAIN, "--run-dir", "run", "--json", "--nodes", "2"),
            *("--node-rank", str(number), "--rdzv-endpoint", endpoint),
        )
        for number in (1, 0)
    ]
    for machine in machines:
        done = run_processes.finish(machine)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model_sha256"] == sha256
    assert {path.name for path in (tmp_path / "run").glob("job*.toml")} == {"job.toml", "job-1.toml"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param((*PYTHON, *TRAIN, "--nproc", "2", "--run-dir", "run"), 1, id="spawn"),
        pytest.param((*TORCHRUN, *TRAIN, "--run-dir", "run"), 1, id="torchrun"),
        pytest.param((*MPIRUN, *TRAIN, "--run-dir", "run"), 1, id="mpirun", marks=[*by_mpirun, pytest.mark.slow]),
    ],
)
def test_the_rank_that_failed_is_named_once(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    done = run_processes.finish(start(*words, "--set", "failing_rank=1"))
    assert done.returncode == code
    assert done.stderr.count("paceline: rank 1 failed first: ValueError: boom (in step 1 during forward)\n") == 1
    assert f'{tmp_path}/small.py", line ' in done.stderr
    assert "log: run/logs/rank-1.log" in done.stderr
    assert done.stderr.count("boom") == 1
    assert "Traceback" in (tmp_path / "run/logs/rank-1.log").read_text()


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_task_that_exits_has_not_trained(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path, nproc: str
) -> None:
    words = (*PYTHON, *TRAIN, "--run-dir", "run", "--nproc", nproc, "--set", "exits_in_step=true")
    done = run_processes.finish(start(*words))
    assert done.returncode == 2
    assert done.stderr.count("ended this process before the run's end, by sys.exit(0) in ") == 1
    assert not (tmp_path / "run/result.json").exists()


@needs_mpi
@pytest.mark.mpi
def test_quiet_reaches_the_ranks_that_a_launcher_starts(start: Callable[..., Any], run_processes: Any) -> None:
    words = (*PYTHON, *TRAIN, "--on", "mpi", "--nproc", "2", "--run-dir", "run")
    done = run_processes.finish(start(*words))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("recover", ["inplace", "none"])
def test_processes_that_end_without_a_result_have_not_trained(
    start: Callable[..., Any], run_processes: Any, recover: str
) -> None:
    words = (*PYTHON, *TRAIN, "--run-dir", "run", "--nproc", "2", "--recover", recover, "--set", "ends_in_step=true")
    done = run_processes.finish(start(*words))
    assert done.returncode == 1
    assert "the processes ended with status 0, but run has no result" in done.stderr


UNGUARDED = """
import torch
import paceline
from small import Small


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, number):
        return torch.ones(8), number % 3


class Mine(Small):
    def build_dataset(self, split):
        return Items() if split == "train" else None


paceline.fit(Mine(), max_steps=2, threads=1, run_dir="run", quiet=True, OPTION)
"""


@pytest.mark.parametrize(
    ("option", "message"),
    [("nproc=2", "the file calls fit() when it is imported"), ("num_workers=1", "each data worker runs the script")],
)
def test_a_script_without_a_main_guard(run_processes: Any, tmp_path: Path, option: str, message: str) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "unguarded.py").write_text(UNGUARDED.replace("OPTION", option))
    done = run_processes.run((*PYTHON, "unguarded.py"))
    assert done.returncode != 0
    assert message in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_a_module_of_a_package_is_found_by_its_name(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/small.py").write_text(TASK)
    script = "import paceline\nfrom .small import Small\nclass Mine(Small):\n    pass\n"
    fit = "paceline.fit(Mine(), max_steps=2, threads=1, run_dir='run', quiet=True, nproc=2)"
    (tmp_path / "package/script.py").write_text(f"{script}if __name__ == '__main__':\n    {fit}\n")
    done = run_processes.run((*PYTHON, "-m", "package.script"))
    assert done.returncode == 0, done.stderr
    assert 'spec = "package.script:Mine"' in (tmp_path / "run/run.toml").read_text()


def test_a_loopback_interface_that_is_down_is_named(start: Callable[..., Any], run_processes: Any) -> None:
    if run_processes.run(("unshare", "--net", "true")).returncode:
        pytest.skip("a network namespace is not allowed here")
    done = run_processes.finish(start("unshare", "--net", *PYTHON, *TRAIN, "--nproc", "2", "--run-dir", "run"))
    assert done.returncode == 2
    assert "cannot reach each other over 127.0.0.1: Network is unreachable. Bring the loopback" in done.stderr


def test_nproc_counts_in_a_world_of_one(run_processes: Any, tmp_path: Path, sha256: str) -> None:
    (tmp_path / "small.py").write_text(TASK)
    words = (*PYTHON, *TRAIN, "--run-dir", "run", "--nproc", "2", "--json")
    done = run_processes.run(words, env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "job-0", "MASTER_PORT": "1"})
    assert done.returncode == 0, done.stderr
    assert "a launcher that sets RANK has started one process alone, so --nproc 2 counts" in done.stderr
    result = json.loads(done.stdout)
    assert (result["model_sha256"], result["world_size"]) == (sha256, 2)


def test_more_processes_than_microbatches(start: Callable[..., Any], run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.finish(start(*PYTHON, *TRAIN, "--nproc", "2", "--microbatches", "1", "--run-dir", "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: 2 processes cannot share 1 micro-batches")
    assert "--nproc 1 or fewer" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run/run.toml").exists()


@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        ((), ["paceline.training.worker run/job.toml"]),
        (("--nproc", "2"), ["forks 2 workers of run/job.toml", "-P -m paceline.training.worker"]),
        (
            ("--nproc", "2", "--recover", "none"),
            ["RANK=0", "RANK=1", "MASTER_ADDR=127.0.0.1", ">>run/logs/rank-1.log"],
        ),
        (
            ("--nproc", "2", "--on", "torchrun"),
            ["torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2"],
        ),
    ],
)
def test_a_dry_run_says_what_would_run_and_touches_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: tuple[str, ...],
    starts: list[str],
) -> None:
    from paceline import cli

    (tmp_path / "small.py").write_text("this is never imported")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *OPTIONS, *launcher, "--run-dir", "run", "--dry-run"])
    assert cli.main() == 0
    said = capsys.readouterr()
    assert said.err == ""
    for part in (*starts, "OMP_NUM_THREADS=1", "#   max_steps = 6"):
        assert part in said.out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    assert cli.main() == 0
    described = json.loads(capsys.readouterr().out)
    assert "max_steps = 6" in described["files"]["run/job.toml"]
    assert described["commands"][0]["env"]["OMP_NUM_THREADS"] == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["small.py"]
