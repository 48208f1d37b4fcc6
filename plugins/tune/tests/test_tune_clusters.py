"""``paceline tune`` on clusters: in a Ray cluster that is there, with a machine lost, and in a Slurm job."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.lab.machines import Machines
from tests.lab.slurm_cluster import SlurmCluster
from tests.processes import Processes

from paceline_tune.history import read_trials

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

TASK = f"{Path(__file__).parent / 'tasks.py'}:Line"
LENGTH = ("--max-steps", "16", "--eval-every", "4steps", "--checkpoint-every", "4steps")
SPACE = ("--search", "lr=log:1e-4:0.3", "--scheduler", "none")
TUNE = (sys.executable, "-m", "paceline", "tune", TASK, *SPACE, *LENGTH)
NODE = (sys.executable, "-m", "paceline_ray.node", "--cpus", "2", "--directory")
SMALL = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 2**20)}
STEPS = [4, 8, 12, 16]
TIME_LIMIT_S = 300


@pytest.fixture(autouse=True)
def small_and_recorded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cluster(run_processes: Processes, tmp_path: Path) -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """A Ray cluster of somebody else's: its variables, and the process that it ends with."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    says = "import json, os, signal; print(json.dumps(dict(os.environ)), flush=True); signal.pause()"
    started = run_processes.start([*NODE, directory, "--", sys.executable, "-c", says])
    assert started.stdout is not None
    assert started.stderr is not None
    line = started.stdout.readline()
    assert line, started.stderr.read()
    env = {name: value for name, value in json.loads(line).items() if name.startswith("RAY_")}
    yield env, psutil.Process(started.pid)
    started.send_signal(signal.SIGTERM)
    started.wait(60)


def places(search: Path) -> set[str]:
    """The machines that have given results."""
    return {result.place.partition(":")[0] for result in read_trials(search / "journal.jsonl").results}


def steps_told(search: Path) -> dict[int, list[int]]:
    """The steps of each trial's evaluations, as they came."""
    trials = read_trials(search / "journal.jsonl").trials
    return {number: [result.step for result in trials[number].results] for number in sorted(trials)}


def trial_runs(head: psutil.Process) -> list[psutil.Process]:
    """The actors of searches below a cluster's head."""
    found = []
    for process in head.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "TrialRun" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_trials_of_two_processes_in_a_cluster_that_is_there(
    cluster: tuple[dict[str, str], psutil.Process],
    run_processes: Processes,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    """One of them is killed on the way, and goes on; the cluster stays, and the search's actors do not."""
    env, head = cluster
    search = tmp_path / "search"
    words = (
        "--trials",
        "2",
        "--nproc",
        "2",
        "--microbatches",
        "2",
        "--recover",
        "none",
        "--run-dir",
        search,
        "--json",
    )
    harm = ("--set", "killed_at=6", "--set", f"mark={tmp_path / 'killed'}")
    done = run_processes.run(
        [*TUNE, *words, *harm, "--ray-address", env.pop("RAY_ADDRESS")],
        env=env,
        timeout_s=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "was lost, and continues from its last checkpoint" in done.stderr
    assert "The time of the search in the cluster" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["states"] == {"finished": 2}
    assert steps_told(search) == {0: STEPS, 1: STEPS}
    assert json.loads((search / "tune.json").read_text())["cpus"] == 2
    assert head.is_running()
    wait_until(lambda: not trial_runs(head), "the end of the search's actors")


@pytest.mark.slow
def test_a_lost_machines_trial_goes_on_at_another(
    machines: Machines, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    nodes = machines(2)
    search, marks = tmp_path / "search", tmp_path / "marks"
    marks.mkdir()
    words = ("--trials", "2", "--cpus-per-trial", "2", "--run-dir", search)
    waits = ("--set", "waits_at=6", "--set", f"mark={marks}")
    environment = {"PACELINE_NODES": "2", "PACELINE_HOSTS": ",".join(node.address for node in nodes)}
    started = [
        node.start(
            [*NODE, tmp_path, "--", *TUNE, *words, *waits],
            env={"PACELINE_NODE_RANK": str(rank), **environment},
        )
        for rank, node in enumerate(nodes)
    ]
    wait_until(lambda: len(list(marks.glob("here-*"))) == 2, "both trials wait", 200)
    assert places(search) == {node.address for node in nodes}
    nodes[1].cut()
    nodes[1].kill()
    wait_until(lambda: "was lost, and continues" in started[0].text, "the loss is noticed", 120)
    (marks / "go").touch()
    assert started[0].wait(200) == 0, started[0].text
    assert json.loads((search / "result.json").read_text())["states"] == {"finished": 2}
    assert steps_told(search) == {0: STEPS, 1: STEPS}


@pytest.mark.slurm
@pytest.mark.slow
def test_in_a_slurm_job_trials_run_on_all_its_machines(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The same command goes on with the search when a queue starts it again."""
    cluster, search = slurm_cluster, tmp_path / "search"

    def submit(trials: int) -> dict[str, Any]:
        done = cluster.run(
            *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--rank-launcher", "ray", "--nodes", "2"),
            *("--cpus-per-task", "1", "--wait", "--", *TUNE, "--trials", str(trials)),
            *("--resume", "--run-dir", search),
            timeout_s=TIME_LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads((search / "result.json").read_text())
        return result

    assert submit(2)["states"] == {"finished": 2}
    assert places(search) == {node.address for node in cluster.nodes[:2]}
    before = (search / "journal.jsonl").read_text()
    assert submit(3)["states"] == {"finished": 3}
    after = (search / "journal.jsonl").read_text()
    assert after.startswith(before)
    assert steps_told(search) == {0: STEPS, 1: STEPS, 2: STEPS}
