"""``paceline doctor`` and ``--preflight``, as users give them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.doctor.examined import found, not_passed
from tests.lab.machines import Machines

from paceline.doctor.checks import CHECKS, Report

ROOT = Path(__file__).parents[2]
BROKEN = "import paceline\nimport a_library_that_is_not_there\n"
SLOW = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_this_machine(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline("doctor", "--threads", "1", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout
    assert "1 machine: " in done.stdout
    assert f"{tmp_path} is writable" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [], "no run and no job is begun"


def test_a_task_that_cannot_be_imported(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = run_processes.paceline("doctor", "broken.py:Task", "--json")
    assert done.returncode == 1
    task = found(Report.from_json(json.loads(done.stdout)), "task")
    assert task.status == "fail"
    assert "imports 'a_library_that_is_not_there', which is not installed" in task.found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py:Task"], "there is no file"),
        (["--on", "nowhere"], "there is no launcher 'nowhere'. Choose one of:"),
        (["--nproc", "auto"], "--nproc auto does not work here"),
        (["--nproc", "2,1"], "--nproc 2,1 lists 2 machines, but --nodes is 1."),
        (["--nodes", "2"], "give the same command on each machine, with --rdzv-endpoint"),
        (["--checkpoint-size", "large"], "--checkpoint-size must be such as 500MB or 2GiB, but is 'large'."),
    ],
)
def test_bad_input(run_processes: Any, tmp_path: Path, words: list[str], said: str) -> None:
    done = run_processes.paceline("doctor", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_on_two_machines(machines: Machines) -> None:
    """Without a cluster: each prints the one report that machine 0 has made."""
    nodes = machines(2)
    for rank, node in enumerate(nodes):
        node.start(
            [
                *(sys.executable, "-m", "paceline", "doctor", "--nodes", "2", "--run", "shared"),
                *("--rdzv-endpoint", "node0:29500", "--node-rank", str(rank), "--gpus-per-node", "1"),
                *("--threads", "1", "--json"),
            ],
            env={"XDG_STATE_HOME": str(node.lab.directory / f"state{rank}")},
        )
    reports = []
    for node in nodes:
        assert node.processes[0].wait(240) == 1, node.processes[0].text
        reports.append(Report.from_json(json.loads(node.processes[0].text.splitlines()[-1])))
    assert reports[0] == reports[1]
    assert reports[0].machines == ("node0", "node1")
    assert not_passed(reports[0]) == {("gpus", "node0"), ("gpus", "node1")}
    left = {path.name for path in (nodes[0].lab.directory / "shared/doctor").iterdir()}
    assert left == {"report.json", "exit-code"}, "no token"


def test_a_job_that_preflight_stops(run_processes: Any, tmp_path: Path) -> None:
    words = ("launch", "--on", "spawn", "--threads", "1", "--preflight")
    done = run_processes.paceline(*words, "--gpus-per-node", "4", "--", "touch", "started")
    assert done.returncode == 1
    assert "preflight fail: " in done.stderr
    assert "0 GPUs, 4 asked for. Ask the cluster" in done.stderr
    assert done.stderr.splitlines()[-1] == "paceline: the job is not started."
    assert not (tmp_path / "started").exists()


def test_a_task_that_preflight_lets_go(run_processes: Any, tmp_path: Path) -> None:
    words = ("train", "fashion-mnist", "--preflight", "--max-steps", "2", "--threads", "1", "--quiet")
    done = run_processes.paceline(*words, "--run", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert "preflight" not in done.stderr, "nothing is wrong"
    assert json.loads(done.stdout)["steps"] == 2
    assert not (tmp_path / "run/doctor").exists()


def test_what_preflight_runs_on_a_cluster(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "slurm", "--nodes", "2", "--inner", "torchrun", "--name", "mine", "--preflight"),
        *("--python", "/python", "--dry-run", "--", "/bin/echo", "hello"),
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.replace("\\\n", " ").splitlines()]
    [line] = [line for line in lines if "paceline.launchers.node" in line]
    first, rest = line.split(" --preflight ", 1)
    assert "/python -m paceline.launchers.node" in first
    assert rest.startswith("'/python -m paceline.doctor.node --directory ")
    assert "--preflight --nodes '" in rest
    assert rest.endswith("-- /bin/echo hello &")


def test_preflight_where_each_rank_is_started(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "slurm", "--inner", "srun", "--preflight", "--dry-run", "--", "/bin/echo"),
    )
    assert done.returncode == 2
    assert "--preflight needs a command that is started once on each machine, and --inner srun" in done.stderr


def test_the_whole_job(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline(
        *("doctor", "--on", "spawn", "--nodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29500"),
        *("--nproc", "8,4", "--threads", "2", "--gpus-per-node", "4", "--interface", "ib0", "--run", "/r"),
        *(
            "--checkpoint-size",
            "2GiB",
            "--keep",
            "5",
            "--timeout",
            "2min",
            "--python",
            "/python",
            "--dry-run",
        ),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "# rank 1\n"
        "GLOO_SOCKET_IFNAME=ib0 \\\n"
        "  NCCL_SOCKET_IFNAME=ib0 \\\n"
        "  UCX_NET_DEVICES=ib0 \\\n"
        "  /python -m paceline.doctor.node --directory /r/doctor --run /r --nproc 8,4 --keep 5 --timeout 120 "
        "--threads 2 --gpus-per-node 4 --interface ib0 --checkpoint-bytes 2147483648 --nodes 2 --node-rank 1 "
        "--master-addr node0 --master-port 29500\n"
    )


def test_ctrl_c_leaves_nothing(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"
    )
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "paceline", "doctor", "slow.py:Task"]
    popen = run_processes.start(command, env={"TMPDIR": str(tmp_path / "tmp")})
    wait_until((tmp_path / "importing").exists, "the import", 60)
    below = psutil.Process(popen.pid).children(recursive=True)
    assert below
    os.kill(popen.pid, signal.SIGINT)
    assert run_processes.finish(popen).returncode == 130
    psutil.wait_procs(below, 10)
    assert not any(process.is_running() for process in below)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_every_check_is_documented() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert [f"`{id}`" for id in CHECKS] == [row for row in rows if row.strip("`") in CHECKS]


@pytest.mark.slow
@pytest.mark.horovod
def test_what_horovod_was_built_with(run_processes: Any) -> None:
    pytest.importorskip("horovod")
    done = run_processes.paceline("doctor", "--horovod")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Horovod v")
    assert "Available Controllers:" in done.stdout
