"""``paceline doctor`` and ``--preflight``, as users give them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from plugins.checks.tests.preflight.examined import found
from tests.processes import children
from tests.small_disk import small_disk

from paceline.core.sockets import job_port
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import commit
from paceline_checks.preflight.spec import CHECKS, PreflightReport, PreflightSpec

ROOT = Path(__file__).parents[4]
BROKEN = "import paceline\nimport a_library_that_is_not_there\n"
SLOW = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_this_machine(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline("doctor", "--threads", "1", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout
    assert "1 node: " in done.stdout
    assert f"{tmp_path} is writable" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [], "no run and no job is begun"


def test_another_interpreter_and_other_variables(run_processes: Any, tmp_path: Path) -> None:
    """They are what is looked at: with them, the examination is a process of its own."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nBY=python exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    (tmp_path / "told.py").write_text("import os\nraise ImportError('{TOLD} {BY}'.format_map(os.environ))\n")
    words = ("doctor", "told.py:Task", "--threads", "1", "--json", "--env", "TOLD=env")
    done = run_processes.paceline(*words, "--python", other)
    assert done.returncode == 1, done.stderr
    assert "env python" in found(msgspec.json.decode(done.stdout, type=PreflightReport), "task").found
    assert {path.name for path in tmp_path.iterdir()} <= {"python", "told.py", "state", "__pycache__"}


def test_an_interpreter_that_is_not_there_or_has_no_paceline(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline("doctor", "--python", "/nonexistent/python", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nonexistent/python: command not found or not executable" in done.stderr
    done = run_processes.paceline("doctor", "--python", "/bin/true")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the checks left no report. Check that /bin/true is a Python" in done.stderr
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho No module named paceline >&2\nexit 1\n")
    bare.chmod(0o755)
    done = run_processes.paceline("doctor", "--python", bare)
    assert done.returncode == 1, done.stdout
    assert "No module named paceline" in done.stderr


def test_an_interface_that_this_machine_does_not_have(run_processes: Any) -> None:
    done = run_processes.paceline("doctor", "--interface", "nosuch0", "--threads", "1", "--json")
    assert done.returncode == 1, done.stderr
    check = found(msgspec.json.decode(done.stdout, type=PreflightReport), "interface")
    assert check.found.startswith("--interface 'nosuch0' has no IPv4 address on this node. Interfaces with one: ")


def test_a_small_disk_with_the_checkpoints_of_a_run(run_processes: Any, tmp_path: Path) -> None:
    """Three of a MiB each: the next one removes the oldest of them."""
    with small_disk(tmp_path / "disk", "6m"):
        checkpoints = tmp_path / "disk/run/checkpoints"
        for step in range(3):
            info = CheckpointInfo(
                task="tasks:Demo",
                step=step,
                state_version=step + 1,
                epoch=0,
                generation=0,
                microbatches=1,
                pins={"threads": 1},
            )
            commit(checkpoints, info, [("model.safetensors", [bytes(1 << 20)])])
        done = run_processes.paceline("doctor", "--threads", "1", "--run-dir", "disk/run", "--json")
    room = found(msgspec.json.decode(done.stdout, type=PreflightReport), "disk-space")
    assert room.status == "pass", room
    assert room.found.endswith("; 3 + 1 checkpoints of 1 MiB, of which 3 exist")


def test_a_directory_that_is_read_only(run_processes: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m,ro"):
        done = run_processes.paceline("doctor", "--threads", "1", "--run-dir", "disk/run", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    check = found(msgspec.json.decode(done.stdout, type=PreflightReport), "run-directory")
    assert check.found == f"{tmp_path / 'disk'} cannot be written: Read-only file system"


def test_a_run_directory_that_is_a_file(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_processes.paceline("doctor", "--threads", "1", "--run-dir", "file/run", "--json")
    check = found(msgspec.json.decode(done.stdout, type=PreflightReport), "run-directory")
    assert (done.returncode, check.status) == (1, "fail")
    assert check.found.endswith(f"cannot be written: {tmp_path / 'file'} is not a directory")


def test_the_defaults_of_a_site_hold(run_processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text('[run]\nthreads = 3\n[job]\ncpus_per_task = 5\n[slurm]\npartition = "gpu"\n')
    monkeypatch.setenv("PACELINE_SITE_CONFIG", str(tmp_path / "site.toml"))
    text = run_processes.paceline("doctor", "--on", "slurm", "--nodes", "2", "--dry-run").stdout
    for expected in ("--cpus-per-task=5", "--partition=gpu", "--threads 3"):
        assert expected in text


def test_a_task_that_cannot_be_imported(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = run_processes.paceline("doctor", "broken.py:Task", "--json")
    assert done.returncode == 1
    task = found(msgspec.json.decode(done.stdout, type=PreflightReport), "task")
    assert task.status == "fail"
    assert "imports 'a_library_that_is_not_there', which is not installed" in task.found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py:Task"], "there is no file"),
        (["--on", "nowhere"], "there is no launcher 'nowhere'. Choose one of:"),
        (["--on", "slurm", "--nproc", "auto"], "--nproc auto is not supported by paceline doctor"),
        (["--nproc", "2,1"], "--nproc 2,1 lists 2 nodes, but --nodes is 1."),
        (["--nodes", "2"], "run the same command on each node, with --rdzv-endpoint"),
        (["--master-port", "99999"], "--master-port must be between 1 and 65535, but is 99999."),
        (["--gpus-per-node", "-1"], "--keep-checkpoints and --gpus-per-node must be positive numbers."),
        (["--keep-checkpoints", "0"], "--keep-checkpoints and --gpus-per-node must be positive numbers."),
        (["--checkpoint-size", "large"], "--checkpoint-size must be such as 500MB or 2GiB, but is 'large'."),
    ],
)
def test_bad_input(run_processes: Any, tmp_path: Path, words: list[str], said: str) -> None:
    done = run_processes.paceline("doctor", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_preflight_stops(run_processes: Any, tmp_path: Path) -> None:
    words = ("launch", "--on", "spawn", "--threads", "1", "--preflight")
    done = run_processes.paceline(*words, "--gpus-per-node", "4", "--", "touch", "started")
    assert done.returncode == 1
    assert "preflight fail: " in done.stderr
    assert "0 GPUs, 4 requested. Request nodes" in done.stderr
    assert done.stderr.splitlines()[-1] == "paceline: the job was not started."
    assert not (tmp_path / "started").exists()


def test_a_task_that_preflight_lets_go(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline_tasks.fashion_mnist import FashionMNISTMLP\n"
        "if sys.argv[0].endswith('preflight/rank.py'):\n"
        "    Path('checked').write_text(sys.argv[1])\n"
        "class Small(FashionMNISTMLP):\n"
        "    pass\n"
    )
    words = ("train", "small.py:Small", "--preflight", "--max-steps", "2", "--threads", "1", "--quiet", "--json")
    done = run_processes.paceline(*words)
    assert done.returncode == 0, done.stderr
    assert "preflight" not in done.stderr, "nothing is wrong"
    result = json.loads(done.stdout)
    assert result["steps"] == 2
    run = tmp_path / result["run"]
    checked = msgspec.json.decode((tmp_path / "checked").read_text(), type=PreflightSpec)
    assert checked.run == str(run), "it checked the directory of another run"


def test_a_task_that_preflight_stops(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    done = run_processes.paceline("train", "broken.py:Task", "--preflight", "--threads", "1")
    assert done.returncode == 1
    assert "nothing_of_this_name" in done.stderr
    assert not list(tmp_path.glob("runs/*")), "a run that has not started leaves a directory"


def test_what_preflight_runs_on_a_cluster(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "slurm", "--nodes", "2", "--rank-launcher", "torchrun", "--name", "mine", "--preflight"),
        *("--python", "/python", "--dry-run", "--", "/bin/echo", "hello"),
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.replace("\\\n", " ").splitlines()]
    [line] = [line for line in lines if "paceline.launch.node" in line]
    first, rest = line.split(" --preflight ", 1)
    assert "/python -P -m paceline.launch.node" in first
    assert rest.startswith("'/python -P -m paceline_checks.preflight.rank ")
    assert '"before_job": true' in rest
    assert rest.endswith("-- /bin/echo hello &")


@pytest.mark.parametrize(
    ("words", "agents"),
    [
        (["--on", "slurm", "--nodes", "2"], True),
        (["--on", "slurm", "--rank-launcher", "torchrun"], False),
        (["--nproc", "2"], True),
        (["--nproc", "2", "--recover", "none"], False),
        (["--on", "torchrun", "--recover", "restart"], False),
    ],
)
def test_preflight_knows_who_starts_the_ranks(run_processes: Any, words: list[str], agents: bool) -> None:
    done = run_processes.paceline("train", "fashion-mnist", *words, "--preflight", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "paceline_checks.preflight.rank" in done.stdout
    assert ('"agents": true' in done.stdout) == agents


def test_preflight_where_each_rank_is_started(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "slurm", "--rank-launcher", "srun", "--preflight", "--dry-run", "--", "/bin/echo"),
    )
    assert done.returncode == 2
    assert "--preflight needs a command that is started once on each node, but --rank-launcher srun" in done.stderr


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (("train", "fashion-mnist", "--on", "slurm", "--nodes", "2", "--init-timeout", "20min"), "1200.0"),
        (
            (
                *("train", "fashion-mnist", "--nodes", "2", "--node-rank", "0", "--run-dir", "shared"),
                *("--rdzv-endpoint", "node0:29500", "--init-timeout", "20min"),
            ),
            "1200.0",
        ),
        (("launch", "--on", "slurm", "--nodes", "2"), "300.0"),
    ],
)
def test_how_long_machines_wait_for_each_other(
    run_processes: Any, tmp_path: Path, words: tuple[str, ...], seconds: str
) -> None:
    (tmp_path / "s.py").touch()
    script = ("--", "s.py") if words[0] == "launch" else ()
    done = run_processes.paceline(*words, "--preflight", "--dry-run", *script)
    assert done.returncode == 0, done.stderr
    assert f'"timeout_s": {seconds}' in done.stdout


def test_the_whole_job(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline(
        *("doctor", "--on", "spawn", "--nodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29500"),
        *("--nproc", "8,4", "--threads", "2", "--gpus-per-node", "4", "--interface", "ib0", "--run-dir", "/r"),
        *(
            "--checkpoint-size",
            "2GiB",
            "--keep-checkpoints",
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
    text = done.stdout.replace("\\\n ", "")
    assert text.count("# rank ") == 4
    assert "RANK=8 " in text
    assert "MASTER_ADDR=node0  MASTER_PORT=29500 " in text
    assert "GLOO_SOCKET_IFNAME=ib0 " in text
    [line, *_] = [line for line in text.splitlines() if "preflight" in line]
    python, *module, spec = shlex.split(line[line.index("/python") :])
    assert (python, *module) == ("/python", "-P", "-m", "paceline_checks.preflight.rank")
    given = {"gpus_per_node": 4, "interface": "ib0", "checkpoint_bytes": 2 << 30, "keep": 5, "timeout_s": 120.0}
    assert msgspec.json.decode(spec, type=PreflightSpec) == PreflightSpec(run="/r", nproc=(8, 4), threads=2, **given)


def test_ctrl_c_leaves_nothing(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n")
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "paceline", "doctor", "slow.py:Task"]
    popen = run_processes.start(command, env={"TMPDIR": str(tmp_path / "tmp")})
    wait_until((tmp_path / "importing").exists, "the import", 60)
    below = children(popen.pid, recursive=True)
    assert below
    os.kill(popen.pid, signal.SIGINT)
    assert run_processes.finish(popen).returncode == 130
    psutil.wait_procs(below, 10)
    assert not any(process.is_running() for process in below)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "the launcher"),
        (signal.SIGUSR1, "the launcher"),
        (signal.SIGTERM, "all"),
        (signal.SIGINT, "all"),
    ],
)
def test_a_preflight_that_is_stopped_leaves_nothing(
    run_processes: Any,
    tmp_path: Path,
    wait_until: Callable[..., None],
    number: signal.Signals,
    to: str,
) -> None:
    """Schedulers send a signal to what they have started, or to all processes, in whichever order."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    doctor = PreflightSpec(run=str(tmp_path / "run"), before_job=True)
    popen = run_processes.start(
        [
            *(sys.executable, "-P", "-m", "paceline.launch.node", "--rank-launcher", "spawn", "--nodes", "2"),
            *("--preflight", shlex.join(doctor.command(sys.executable)), "--", "touch", "started"),
        ],
        env={
            "TMPDIR": str(tmp_path / "tmp"),
            "PACELINE_NODE_RANK": "0",
            "PACELINE_NODES": "2",
            "PACELINE_HOSTS": "127.0.0.1,127.0.0.1",
            "PACELINE_JOB_ID": str(tmp_path),
        },
    )
    port = job_port(str(tmp_path))
    wait_until(lambda: f":{port:04X} " in Path("/proc/net/tcp").read_text(), "waiting for the other machine", 60)
    below = children(popen.pid, recursive=True)
    if to == "the launcher":
        popen.send_signal(number)
    else:
        os.killpg(popen.pid, number)
    done = run_processes.finish(popen)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    psutil.wait_procs(below, 10)
    assert not any(process.is_running() for process in below)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "started").exists()


def test_every_check_is_documented() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert [f"`{id}`" for id in CHECKS] == [row for row in rows if row.strip("`") in CHECKS]
