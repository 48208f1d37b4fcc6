"""``paceline launch``, ``jobs``, ``status``, ``logs`` and ``cancel``, over processes of this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.job_records import JobRecord, add_record, find_record, record_id
from paceline.launch.launcher import JobStatus, LaunchSpec, TorchrunOptions, get_launcher
from paceline.launch.local import EXIT_CODE, ForegroundJob, process_reference
from paceline.launch.submit import job_directory, refuse_starters
from paceline_pages.jobs_command import cancel, jobs, status

PLACE = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR", "OMP_NUM_THREADS")
words = [os.environ.get(name, "-") for name in names] + sys.argv[1:]
os.write(1, " ".join(words).encode() + b"\\n")
"""

WAITS = """
import os, pathlib, sys, time
print("waiting", flush=True)
pathlib.Path(f"ready{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "place.py").write_text(PLACE)
    (tmp_path / "waits.py").write_text(WAITS)


def test_spawn_starts_any_script(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "spawn", "--nproc", "2", "--threads", "1", "--env", "COLOUR=red"),
        *("--", "place.py", "--lr", "0.1", "{master_addr}:{node_rank}/{nnodes}", "{local_rank} {rank}/{world_size}"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 2 0 2 127.0.0.1 red 1 --lr 0.1 127.0.0.1:0/1 0 0/2",
        "1 2 1 2 127.0.0.1 red 1 --lr 0.1 127.0.0.1:0/1 1 1/2",
    ]


LINES = """
import os, pathlib, sys, time
pathlib.Path(f"{os.getpid()}.here").touch()
while len(list(pathlib.Path().glob("*.here"))) < 3:
    time.sleep(0.001)
for number in range(100):
    print("one line", "in several", "pieces", number)
    print("an error", "in several", "pieces", number, file=sys.stderr)
sys.stdout.write("unfinished")
"""


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_the_lines_of_ranks_are_whole(run_processes: Any, tmp_path: Path, launcher: str) -> None:
    (tmp_path / "lines.py").write_text(LINES)
    words = ("launch", "--on", launcher, "--nproc", "3", "--", "lines.py")
    done = run_processes.paceline(*words, env={"PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    assert Counter(done.stdout.splitlines()) == {
        "unfinished": 3,
        **{f"one line in several pieces {number}": 3 for number in range(100)},
    }
    errors = Counter(line for line in done.stderr.splitlines() if line.startswith("an error"))
    assert errors == {f"an error in several pieces {number}": 3 for number in range(100)}


@pytest.mark.integration
def test_a_line_is_seen_while_its_rank_runs(wait_until: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('a line')\ntime.sleep(600)\n")
    with (tmp_path / "output").open("w") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "paceline", "launch", "--on", "spawn", "--nproc", "2", "--", "waits.py"],
            cwd=tmp_path,
            stdout=output,
        )
    try:
        wait_until(lambda: (tmp_path / "output").read_text() == "a line\na line\n", "both lines")
    finally:
        popen.terminate()
        popen.wait(60)


def test_an_output_that_outlives_its_rank_ends_no_later(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "leaves.sh").write_text("setsid sleep 600 & echo rank $RANK\n")
    try:
        done = run_processes.paceline("launch", "--on", "spawn", "--nproc", "2", "--", "sh", "leaves.sh")
        assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == ["sleep", "600"] and process.cwd() == str(tmp_path):
                process.kill()


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("spawn", ("python", "place.py")),
        ("spawn", ("-m", "place")),
        ("spawn", ("sh", "-c", "echo $RANK $WORLD_SIZE")),
        ("spawn", ("python", "-u", "place.py")),
        ("torchrun", ("python", "-u", "place.py", "-m", "--lr=1")),
        ("torchrun", ("python", "-c", "import place")),
    ],
)
def test_modules_and_programs(run_processes: Any, launcher: str, command: tuple[str, ...]) -> None:
    # A machine may have a python3 only; an activated environment has this name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = ("launch", "--on", launcher, "--nproc", "2", "--", *command)
    done = run_processes.paceline(*words, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[:2] for line in done.stdout.splitlines()) == [["0", "2"], ["1", "2"]]


@pytest.mark.parametrize(
    "start",
    [
        ("paceline", "launch", "--on", "spawn"),
        ("paceline", "launch", "--on", "torchrun"),
        ("paceline.launch.node", "--rank-launcher", "spawn"),
        ("paceline.launch.node", "--rank-launcher", "torchrun"),
    ],
)
def test_the_port_in_the_arguments_is_that_of_the_variable(
    run_processes: Any, tmp_path: Path, start: tuple[str, ...]
) -> None:
    (tmp_path / "ports.py").write_text(
        "import os, sys; os.write(1, f'{sys.argv[1]} {os.environ[\"MASTER_PORT\"]}\\n'.encode())"
    )
    done = run_processes.run(
        [
            *(sys.executable, "-m", *start, "--nproc", "2", "--threads", "1", "--"),
            *(sys.executable, "ports.py", "{master_port}"),
        ]
    )
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first == second
    assert first[0] == first[1] != "0"


def test_the_exit_code_is_the_first_culprits(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "spawn", "--nproc", "2"),
        *("--", "sh", "-c", "if [ $RANK = 1 ]; then exit 7; fi; sleep 600"),
    )
    assert done.returncode == 7
    assert "rank 1 exited with status 7" in done.stderr
    [job] = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert job["status"]["state"] == "failed"
    assert job["status"]["exit_code"] == 7


@pytest.mark.parametrize(("raises", "code"), [("ValueError('no')", 1), ("KeyboardInterrupt", 130)])
def test_a_script_in_this_process_that_raises_leaves_its_exit_code(
    run_processes: Any, tmp_path: Path, raises: str, code: int
) -> None:
    (tmp_path / "raises.py").write_text(f"raise {raises}")
    done = run_processes.paceline("launch", "--on", "inprocess", "--", "raises.py")
    assert done.returncode == code
    [job] = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert job["status"]["exit_code"] == code


def test_a_dry_run_is_the_whole_job(run_processes: Any, tmp_path: Path) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "spawn", "--nproc", "2", "--env-style", "tensorflow", "--threads", "1"),
        *("--roles", "chief=1,worker=1", "--master-port", "4000", "--python", "python", "--dry-run"),
        *("--", "place.py"),
    )
    cluster = '{"chief": ["127.0.0.1:4000"], "worker": ["127.0.0.1:4001"]}'
    assert (
        done.stdout
        == f"""\
# rank 0
TF_CONFIG='{{"cluster": {cluster}, "task": {{"type": "chief", "index": 0}}}}' \\
  OMP_NUM_THREADS=1 \\
  python place.py

# rank 1
TF_CONFIG='{{"cluster": {cluster}, "task": {{"type": "worker", "index": 0}}}}' \\
  OMP_NUM_THREADS=1 \\
  python place.py
"""
    )
    words = ("launch", "--on", "spawn", "--threads", "1", "--dry-run", "--json", "--", "place.py")
    [command] = json.loads(run_processes.paceline(*words).stdout)["commands"]
    assert command["title"] == "rank 0"
    assert command["argv"] == [sys.executable, "place.py"]
    assert command["env"]["OMP_NUM_THREADS"] == "1"
    assert not (tmp_path / "state").exists()


def test_a_detached_job_is_followed_and_cancelled(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    done = run_processes.paceline("launch", "--on", "spawn", "--nproc", "2", "--detach", "--", "waits.py")
    assert done.returncode == 0, done.stderr
    found = re.search(r"paceline logs -f (\d+)", done.stderr)
    assert found is not None
    job = found[1]
    supervisor = psutil.Process(int(job))
    try:
        ready = [tmp_path / f"ready{rank}" for rank in (0, 1)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "both ranks run")
        wait_until(lambda: run_processes.paceline("status", job).returncode == 0, "the job is recorded")
        status = json.loads(run_processes.paceline("status", job, "--json").stdout)
        assert status["status"]["state"] == "running"
        assert status["name"] == "waits"
        assert run_processes.paceline("logs", job).stdout.splitlines() == ["waiting", "waiting"]
        ranks = [psutil.Process(int(path.read_text())) for path in ready]
        assert run_processes.paceline("cancel", f"spawn-{job}").returncode == 0
        psutil.wait_procs([supervisor, *ranks], timeout=30)
        assert not any(process.is_running() for process in (supervisor, *ranks))
        ended = json.loads(run_processes.paceline("status", job, "--json").stdout)
        assert ended["status"]["state"] == "cancelled"
        assert "has already ended" in run_processes.paceline("cancel", job).stdout
    finally:
        for process in (*supervisor.children(recursive=True), supervisor) if supervisor.is_running() else ():
            process.kill()


def test_a_second_cancel_kills_what_is_deaf(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    deaf = "trap '' TERM; echo $$ >pid.part; mv pid.part pid; while :; do sleep 0.1; done"
    words = ("launch", "--on", "spawn", "--name", "mine", "--detach", "--", "sh", "-c", deaf)
    assert run_processes.paceline(*words).returncode == 0
    supervisor = psutil.Process(
        json.loads(run_processes.paceline("status", "mine", "--json").stdout)["reference"]["pid"]
    )
    try:
        wait_until((tmp_path / "pid").exists, "it is deaf")
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        assert run_processes.paceline("cancel", "mine").returncode == 0
        assert rank.is_running()
        assert run_processes.paceline("cancel", "mine").returncode == 0
        psutil.wait_procs([supervisor, rank], timeout=30)
        assert not supervisor.is_running()
        assert not rank.is_running()
    finally:
        for process in (*supervisor.children(recursive=True), supervisor) if supervisor.is_running() else ():
            process.kill()


def test_detach_behind_the_dashes_is_the_programs(run_processes: Any, tmp_path: Path) -> None:
    words = ("launch", "--on", "spawn", "--detach", "--name", "mine")
    done = run_processes.paceline(*words, "--", "sh", "-c", 'echo "$@"', "sh", "--detach")
    assert done.returncode == 0, done.stderr
    assert run_processes.paceline("logs", "-f", "mine").stdout == "--detach\n"
    done = run_processes.paceline("cancel", "mine", "--json")
    assert json.loads(done.stdout)["status"]["state"] == "succeeded"
    assert (tmp_path / "state" / "paceline" / "jobs").stat().st_mode & 0o777 == 0o700


def test_a_detached_job_that_cannot_start_says_so_and_leaves_nothing(run_processes: Any, tmp_path: Path) -> None:
    words = ("launch", "--on", "spawn", "--name", "mine", "--detach", "--", "no-such-program")
    done = run_processes.paceline(*words)
    assert done.returncode == 1
    assert done.stderr == "paceline: no-such-program: command not found or not executable.\n"
    assert list((tmp_path / "state").rglob("mine*")) == []


@pytest.mark.mpi
def test_a_detached_task_is_known_as_soon_as_it_runs(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """The run is named by the time, and there is one of it."""
    done = run_processes.paceline(
        *("train", "fashion-mnist", "--on", "mpi", "--max-steps", "100000", "--threads", "1", "--detach")
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    [job] = json.loads(run_processes.paceline("jobs", "--json").stdout)
    supervisor = psutil.Process(job["reference"]["pid"])
    try:
        assert job["run"] == str(run)
        assert job["status"]["state"] == "running"
        wait_until(lambda: (run / "metrics.jsonl").exists(), "the run has begun")
        stood = json.loads(run_processes.paceline("cancel", job["id"], "--json").stdout)
        assert stood["status"]["state"] == "running"
        psutil.wait_procs([supervisor], timeout=60)
        ended = json.loads(run_processes.paceline("status", job["id"], "--json").stdout)["status"]
        assert (ended["state"], ended["exit_code"]) == ("cancelled", 75)
    finally:
        for process in (*supervisor.children(recursive=True), supervisor) if supervisor.is_running() else ():
            process.kill()


def test_a_run_is_resumed_under_another_launcher(run_processes: Any, tmp_path: Path) -> None:
    words = ("fashion-mnist", "--max-steps", "2", "--threads", "1", "--run-dir", "a", "--quiet")
    assert run_processes.paceline("train", *words).returncode == 0
    done = run_processes.paceline("resume", "a", "--on", "slurm", "--nodes", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"paceline train --run-dir {tmp_path}/a " in " ".join(done.stdout.replace("\\\n", "").split())
    assert "--resume must" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("spawn", "--gpus-per-node", "4"), "--gpus-per-node asks a cluster, but --on spawn"),
        (("torchrun", "--cpus-per-task", "2"), "--cpus-per-task asks a cluster"),
        (("spawn", "--walltime", "1h"), "--walltime does not work with --on spawn"),
        (("spawn", "--max-restarts", "2"), "--max-restarts does not work with --on spawn, which ends"),
        (("ssh", "--hosts", "a", "--gpus-per-node", "4"), "--gpus-per-node asks a cluster, but --on ssh"),
        (("ssh", "--hosts", "a", "--walltime", "1h"), "--walltime does not work with --on ssh"),
        (("ray", "--walltime", "1h"), "--walltime does not work with --on ray"),
        (
            ("slurm", "--rank-launcher", "srun", "--max-restarts", "2"),
            "does not work with --on slurm --rank-launcher srun",
        ),
        (("spawn", "--foo", "3"), "--on spawn also takes: --node-rank, --rdzv"),
        (("inprocess", "--env-style", "torch"), "--env-style torch does not work with --on inprocess"),
    ],
)
def test_nothing_is_passed_over_in_silence(run_processes: Any, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("launch", "--on", *options, "--dry-run", "--", "place.py")
    assert done.returncode == 2
    assert message in done.stderr


def test_where_nobody_is_asked_for_gpus_they_are_looked_for(run_processes: Any) -> None:
    hosts = ("--on", "ssh", "--hosts", "a,b", "--gpus-per-node", "4", "--dry-run")
    for words in (("doctor", *hosts), ("launch", *hosts, "--preflight", "--", "place.py")):
        done = run_processes.paceline(*words)
        assert done.returncode == 0, done.stderr
        assert '"gpus_per_node": 4' in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("slurm", "--env-style", "tensorflow"), "--env-style is for scripts"),
        (
            ("slurm", "--recover", "inplace", "--rank-launcher", "torchrun"),
            "needs Paceline's agent, but with --on slurm",
        ),
        (("ssh", "--hosts", "a", "--recover", "restart", "--rank-launcher", "spawn"), "needs Paceline's agent"),
    ],
)
def test_a_task_is_refused_what_it_cannot_have(run_processes: Any, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", "fashion-mnist", "--on", *options, "--dry-run")
    assert done.returncode == 2
    assert message in done.stderr


def test_a_job_whose_process_was_killed_has_failed(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    popen = run_processes.start([sys.executable, "-m", "paceline", "launch", "--on", "spawn", "--", "waits.py"])
    ready = tmp_path / "ready0"
    wait_until(lambda: ready.exists() and ready.read_text(), "the rank runs")
    rank = psutil.Process(int(ready.read_text()))
    wait_until(lambda: run_processes.paceline("status", str(popen.pid)).returncode == 0, "it is recorded")
    popen.kill()
    popen.wait()
    rank.wait(30)  # the kernel ends it with its launcher
    done = run_processes.paceline("status", str(popen.pid))
    assert done.returncode == 1
    assert "its process is gone, and left no exit code" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--on slrum -- place.py", "there is no launcher 'slrum'. Choose one of: inprocess, spawn"),
        ("--on spawn", "there is no command to launch. Give it after --"),
        ("--on torchrun --max-restarts -1 -- true", "--max-restarts must be at least 0, but is -1."),
        ("--on spawn -- absent.py", "there is no file absent.py in "),
        ("--on spawn -- ./absent", "there is no file ./absent in "),
        ("--on spawn -- no-such-program", "no-such-program: command not found or not executable"),
        ("--on spawn --rank-launcher srun -- place.py", "--rank-launcher srun does not work with --on spawn"),
        ("--on spawn --env-style mpi -- place.py", "--env-style mpi does not work with --on spawn"),
        ("--on spawn --env 1=2 -- place.py", "--env must be NAME=VALUE"),
        ("--on spawn --nproc 2,1 -- place.py", "--nproc 2,1 lists 2 nodes, but --nodes is 1"),
        ("--on inprocess --nproc 2 -- place.py", "--on inprocess runs one process"),
        ("--on inprocess -- echo a b", "runs a script or -m MODULE, not 'echo a b'. Use --on spawn"),
        ("--on inprocess -- python -u place.py", "not 'python -u place.py'. Use --on spawn"),
        ("--on inprocess -- -m", "runs a script or -m MODULE"),
        (
            "--on spawn --nodes 1:4 --node-rank 3 --rdzv-endpoint a:1 -- place.py",
            "--nodes 1:4: the number of nodes is fixed here. Give one number, or use --on torchrun",
        ),
        (
            "--on torchrun --nodes 2 --nproc 8,4 --node-rank 2 --rdzv-endpoint a:1 -- place.py",
            "--node-rank must be between 0 and 1, but is 2",
        ),
        ("--on spawn --rdzv-backend c10d -- place.py", "--rdzv-backend is not supported by --on spawn."),
        ("--on spawn --colour red -- place.py", "--colour"),
        ("--on torchrun --nproc_per_node 2 -- place.py", "--nproc_per_node is torchrun's. Use --nproc. See"),
        ("--on torchrun --nnodes=2 -- place.py", "--nnodes is torchrun's. Use --nodes."),
        ("--on torchrun --tee 3 -- place.py", "--tee is torchrun's. Give it as --torchrun tee=VALUE"),
        ("--on spawn --torchrun tee=3 -- place.py", "--torchrun tee=3: the ranks are started by spawn. Use --rank-"),
        ("--on torchrun --torchrun nnodes=2 -- place.py", "--torchrun nnodes=2 is not allowed. Use --nodes."),
        ("--on torchrun --torchrun te=2 -- place.py", "--torchrun te=2: torchrun has tee, redirects, log-dir"),
    ],
)
def test_bad_input_leaves_nothing(run_processes: Any, tmp_path: Path, words: str, message: str) -> None:
    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    done = run_processes.paceline("launch", *words.split())
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stderr.startswith("paceline: ")
    assert "Traceback" not in done.stderr
    assert files() == before
    assert not list(tmp_path.glob("state/paceline/jobs/*"))


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("torchrun --standalone --nproc_per_node=4 a.py --lr 1", "--on torchrun --nproc 4 -- a.py --lr 1 (on Slurm"),
        ("python -m torch.distributed.run --nproc-per-node 2 a.py", "--on torchrun --nproc 2 -- a.py (on Slurm"),
        ("accelerate launch --num_processes 2 a.py", "--on torchrun --nproc 2 -- a.py (on Slurm"),
        ("fabric run --devices=2 a.py", "--on torchrun --nproc 2 -- a.py (on Slurm"),
        (
            "deepspeed --num_gpus 2 a.py --deepspeed",
            "--on torchrun --nproc 2 -- a.py '--local_rank={local_rank}' --deepspeed (on Slurm",
        ),
        ("deepspeed --no_local_rank a.py", "--on torchrun --nproc N -- a.py (on Slurm"),
        ("python -m torch.distributed.launch a.py", "--nproc N -- a.py '--local-rank={local_rank}' (on Slurm"),
        ("python -m torch.distributed.launch --use_env a.py", "--nproc N -- a.py (on Slurm"),
        ("horovodrun -np 2 python a.py", "--on horovod --nproc 2 -- a.py (on Slurm"),
        ("mpirun -n 4 ./hello", "--on mpi --nproc 4 -- COMMAND (on Slurm"),
    ],
)
def test_a_command_that_starts_ranks_itself_is_told_its_equal(command: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(instead)):
        refuse_starters(command.split(), "torch")
    refuse_starters(command.split(), "none")


def test_torchrun_s_other_options_pass_through() -> None:
    spec = LaunchSpec(command=("python", "place.py"), torchrun=("tee=3", "--log_dir=logs", "rdzv-conf=timeout=9"))
    assert (
        "--standalone --local-addr=127.0.0.1 --rdzv-conf=timeout=9 --tee=3 --log_dir=logs "
        in get_launcher("torchrun").render(spec).text
    )
    spec = dataclasses.replace(spec, nodes=(2, 2))
    options = TorchrunOptions(node_rank=0, rdzv_endpoint="a:1")
    assert "--rdzv-conf=is_host=1,timeout=9 --tee=3 " in get_launcher("torchrun").render(spec, options).text


def test_auto_is_a_process_for_each_gpu_or_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.local_run.visible_gpus", lambda: 3)
    assert get_launcher("torchrun").resolve_sizes((1, 1), None, None) == ((1, 1), (3,))


def test_a_script_in_this_process_fails_as_under_python(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('no')\n")
    done = run_processes.paceline("launch", "--on", "inprocess", "--", "fails.py")
    assert done.returncode == 1
    where = f"  File \"{tmp_path / 'fails.py'}\", line 1, in <module>\n    raise ValueError('no')\n"
    assert done.stderr == f"Traceback (most recent call last):\n{where}ValueError: no\n"


def test_unknown_jobs_are_named(run_processes: Any) -> None:
    for command in ("status", "cancel"):
        done = run_processes.paceline(command, "slurm-1")
        assert done.returncode == 2
        assert "there is no job 'slurm-1'. None was submitted yet." in done.stderr
    assert run_processes.paceline("jobs").stdout.startswith("No jobs.")


def remembered(reference: dict[str, Any], ended: JobStatus | None = None, launcher: str = "spawn") -> None:
    record = JobRecord(
        id=f"{launcher}-1",
        launcher=launcher,
        name="j",
        command=("sleep", "60"),
        directory="/jobs/j",
        reference=reference,
        ended=None if ended is None else dataclasses.asdict(ended),
    )
    add_record(record)


@pytest.fixture
def sleeping(run_processes: Any) -> psutil.Process:
    """What a job's supervisor is to the one who asks."""
    return psutil.Process(run_processes.start(["sleep", "60"]).pid)


@pytest.mark.parametrize("launcher", ["spawn", "submitit"])
def test_a_process_of_another_machine_is_not_taken_for_gone(
    sleeping: psutil.Process, tmp_path: Path, launcher: str
) -> None:
    number = str(sleeping.pid)
    local = {"executor": "local", "folder": str(tmp_path), "tasks": 1, "is_command": True}
    here = {"id": number, "directory": str(tmp_path), **process_reference(sleeping.pid), **local}
    for place, detail in (
        ({"host": "node7", "boot": "another"}, "it runs on node7"),
        ({"pid_namespace": "pid:[1]"}, f"it runs in another container of {here['host']}"),
    ):
        remembered({**here, **place}, launcher=launcher)
        stands = find_record("j").status()
        assert (stands.state, stands.detail) == ("unknown", detail)
        assert find_record("j").ended is None
        with pytest.raises(LaunchError, match=f"{detail}. Cancel it there."):
            cancel("j")
        with pytest.raises(LaunchError, match=detail):
            find_record("j").handle().wait()
    assert sleeping.is_running()
    assert not list(tmp_path.glob("*_cancelled"))

    remembered(here, launcher=launcher)
    assert find_record("j").status().state == "running"
    cancel("j")
    assert sleeping.wait(30) is not None
    remembered({**here, "boot": "earlier"}, launcher=launcher)
    assert find_record("j").status().state == ("failed" if launcher == "spawn" else "cancelled")


def test_what_a_job_of_another_machine_has_left_is_seen(sleeping: psutil.Process, tmp_path: Path) -> None:
    reference = {"id": "1", "directory": str(tmp_path), **process_reference(sleeping.pid), "boot": "another"}
    remembered({**reference, "host": "node7"})
    (tmp_path / EXIT_CODE).write_text("7\n")
    assert find_record("j").status().exit_code == 7


def test_what_the_runs_last_job_has_left_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / EXIT_CODE).write_text("130\n")
    started: Any = None
    elsewhere = {**ForegroundJob(started, tmp_path).reference, "host": "node7", "boot": "another"}
    remembered(elsewhere)
    assert find_record("j").status().state == "unknown"


def test_a_job_is_cancelled_that_was_recorded_as_failed_elsewhere(
    sleeping: psutil.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records had no host once, and said "failed" wherever there was no such process."""
    process = {"id": "1", "pid": sleeping.pid, "created": sleeping.create_time(), "directory": str(tmp_path)}
    gone = JobStatus(state="failed", detail="its process is gone, and left no exit code")
    remembered(process, gone)
    cancel("j")
    assert sleeping.wait(30) is not None
    assert "is being cancelled" in capsys.readouterr().out
    assert find_record("j").ended is None
    assert find_record("j").status().state == "unknown"
    remembered(process, gone)
    cancel("j")
    assert "has already ended: failed" in capsys.readouterr().out


def test_jobs_of_two_machines_with_one_number_are_both_kept(sleeping: psutil.Process) -> None:
    here = {"id": "1", "directory": "/jobs/j", **process_reference(sleeping.pid)}
    remembered({**here, "host": "node7", "boot": "another"})
    assert record_id("spawn", here) == "spawn-1-2"
    remembered(here)
    assert record_id("spawn", here) == "spawn-1"


@pytest.mark.parametrize(("show", "code"), [(jobs, 0), (lambda: status("j"), 1)])
def test_what_a_job_says_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: Callable[[], int], code: int
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = JobStatus(state="failed", detail="AWS: [/opt] is full [sic]", exit_code=1)
    add_record(
        JobRecord(
            id="spawn-1",
            launcher="spawn",
            name="j",
            command=("python", "train.py", "[/data]", "[relu,tanh]"),
            directory="/jobs/[red]",
            reference={"id": "1"},
            ended=dataclasses.asdict(said),
        )
    )
    assert show() == code
    shown = capsys.readouterr().out
    assert "python train.py [/data] [relu,tanh]" in shown
    assert "AWS: [/opt] is full [sic]" in shown
    assert code == 0 or "/jobs/[red]" in shown


def test_jobs_that_begin_at_once_have_a_directory_each() -> None:
    directories = {job_directory("a b", attached=False) for _ in range(20)}
    assert len(directories) == 20
    assert all(re.fullmatch(r"a-b-\d{8}-\d{6}-[0-9a-f]{6}", each.name) for each in directories)
