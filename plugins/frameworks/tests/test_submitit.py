"""submitit on this machine: what is rendered, functions, tasks that are preempted, and folders."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from plugins.frameworks.tests.submitit_programs import ADD, COUNT, NETWORK
from tests.processes import Processes, children

import paceline
from paceline.core.errors import ConfigError, TaskError
from paceline.launch.job_records import JobRecord
from paceline.launch.launcher import LaunchSpec, get_launcher, make_options
from paceline_frameworks.submitit import SubmititOptions, executor_parameters
from paceline_frameworks.submitit_running import check_private, make_private

TRAIN = (
    *("train", "fashion-mnist", "--microbatches", "12", "--global-batch-size", "96", "--max-steps", "120"),
    *("--threads", "1", "--seed", "7", "--eval-every", "never", "--checkpoint-every", "5steps"),
)

WHOLE_TEXT = '''\
# /shared/net/job/submit.py
"""Submits the job with submitit, and prints its number."""

import submitit
from paceline_frameworks.submitit_running import StartCommand

executor = submitit.AutoExecutor(
    folder='/shared/net/job/submitit',
    cluster='slurm',
    slurm_max_num_timeout=100,
    slurm_python='/opt/python',
)
executor.update_parameters(
    name='net',
    nodes=2,
    tasks_per_node=1,
    timeout_min=90,
    stderr_to_stdout=True,
    gpus_per_node=4,
    cpus_per_task=16,
    slurm_partition='main',
    slurm_setup=['module load cuda'],
    slurm_srun_args=['--cpu-bind=cores'],
    slurm_additional_parameters={'signal': 'USR1@300', 'nice': '10'},
)
command = ['/opt/python', '-P', '-m', 'paceline.launch.node', '--rank-launcher', 'torchrun', '--nodes', '2',
 '--nproc', '4', '--', 'python', 'train.py', '--lr', '0.1']
print(executor.submit(StartCommand(command, each='machine')).job_id)

# submit
SUBMITIT_PREEMPT_SIGNAL=USR1 \\
  NAME='a b' \\
  PYTHON /shared/net/job/submit.py
'''


@dataclass
class Named(paceline.Task):
    name: str = "one"


def spec(**fields: object) -> LaunchSpec:
    values = {"command": ("python", "train.py", "--lr", "0.1"), "name": "net", "python": "/opt/python"}
    return LaunchSpec(**{"directory": Path("/shared/net/job"), **values, **fields})


def rendered(job: LaunchSpec, **options: object) -> str:
    launcher = get_launcher("submitit")
    return launcher.render(job, make_options(launcher, options)).text


def test_the_whole_text() -> None:
    job = spec(nodes=(2, 2), nproc=(4,), gpus_per_node=4, cpus_per_task=4, walltime_s=5400, env={"NAME": "a b"})
    more = {"srun_args": ("--cpu-bind=cores",), "signal_delay_s": 300}
    text = rendered(job, partition="main", setup=("module load cuda",), slurm=("nice=10",), **more)
    assert text.replace(sys.executable, "PYTHON") == WHOLE_TEXT


def test_an_array_of_functions_has_what_submitit_calls_the_same() -> None:
    options = SubmititOptions(array_parallelism=4, stderr_to_stdout=True)
    parameters = executor_parameters(spec(), options, tasks_per_node=1, cpus_per_task=None, signal_name="USR2")
    assert (parameters["slurm_array_parallelism"], parameters["stderr_to_stdout"]) == (4, True)
    assert "cpus_per_task" not in parameters


def test_a_task_of_slurms_for_each_rank() -> None:
    assert "    cpus_per_task=3,\n" in rendered(spec(nproc=(3,)))  # one task, which starts three processes
    text = rendered(spec(nodes=(2, 2), nproc=(3,), cpus_per_task=2, rank_launcher="srun"))
    assert "    tasks_per_node=3,\n" in text
    assert "    cpus_per_task=2,\n" in text
    assert "'paceline.launch.rank'" in text
    assert "each='rank'" in text


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"nodes": (1, 2)}, {}, "--nodes 1:2: --on submitit needs one number"),
        ({"nodes": (2, 2)}, {"executor": "local"}, "--nodes is 2"),
        ({"nodes": (2, 2), "nproc": (1, 2), "rank_launcher": "srun"}, {}, "--nproc is a list"),
        ({"rank_launcher": "srun"}, {"executor": "local"}, "--rank-launcher srun needs Slurm"),
        ({}, {"executor": "local", "partition": "main"}, "--partition is for Slurm"),
        ({}, {"executor": "local", "signal_delay_s": 9}, "--signal-delay-s is for Slurm"),
        ({}, {"signal_delay_s": 0}, "--signal-delay-s must be at least 1, but is 0"),
        ({}, {"array_parallelism": 2}, "--array-parallelism is for paceline.submit_array"),
        ({}, {"executor": "pbs"}, "--executor must be slurm or local"),
        ({}, {"slurm": ("nice",)}, "--slurm must be KEY=VALUE"),
        ({}, {"colour": "red"}, "--colour is not supported by --on submitit"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(spec(**fields), **options)


def test_functions_of_a_program_run_as_jobs(
    run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "add.py").write_text(ADD)
    done = run_processes.run([sys.executable, "add.py", "local"], timeout_s=120)
    assert done.returncode == 0, done.stderr
    results, last = done.stdout.splitlines()
    assert results == "12 [12, 12, 12] [4, 6]"
    number, state, printed = last.split(maxsplit=2)
    assert (state, printed) == ("succeeded", "'adding 5 7'")
    folder = tmp_path / "log_test"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    listed = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert [job["name"] for job in listed] == ["add", "add", "sums", "sums"]
    assert {job["status"]["state"] for job in listed} == {"succeeded"}
    assert "adding 5 7" in run_processes.paceline("logs", number).stdout


def test_a_callable_network_spawns_its_workers(
    run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "net.py").write_text(NETWORK)
    done = run_processes.run([sys.executable, "net.py"], timeout_s=120)
    assert (done.stdout, done.returncode) == ("(1, [11.0, 11.0])\n", 0), done.stderr


def test_a_worker_that_imports_the_program_does_not_submit_again() -> None:
    def function() -> None: ...

    function.__module__ = "__mp_main__"  # as multiprocessing calls the program in its workers
    with pytest.raises(ConfigError, match='Put the call under if __name__ == "__main__":'):
        paceline.submit(function, on="local")


def test_a_callable_is_asked_what_to_continue_with(
    run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "count.py").write_text(COUNT)
    done = run_processes.run([sys.executable, "count.py"], timeout_s=120)
    assert done.returncode == 0, done.stderr
    continued, ended, failed = done.stdout.splitlines()
    assert continued == "(10, 2)"
    assert "checkpoint function returned None" in ended
    assert ended.endswith("failed")
    assert "ValueError: no such thing" in failed
    assert failed.endswith("failed")


@pytest.mark.slow
def test_a_task_that_is_preempted_ends_with_the_same_model(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    undisturbed = run_processes.paceline(*TRAIN, "--run-dir", "undisturbed", "--json", "--quiet")
    expected = json.loads(undisturbed.stdout.splitlines()[-1])["model_sha256"]
    on = ("--on", "submitit", "--executor", "local")
    submitted = run_processes.paceline(*TRAIN, "--nproc", "2", "--run-dir", "run", *on, "--json")
    job = json.loads(submitted.stdout)
    controller = psutil.Process(job["reference"]["pid"])
    try:
        wait_until(lambda: any((tmp_path / "run/checkpoints").glob("step-*")), "a checkpoint", 60)
        [task] = children(controller.pid)
        task.send_signal(signal.SIGUSR1)
        psutil.wait_procs([controller], timeout=150)
    finally:
        run_processes.paceline("cancel", job["id"])
    status = json.loads(run_processes.paceline("status", job["id"], "--json").stdout)["status"]
    assert status["state"] == "succeeded", status
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["model_sha256"], result["restarts"]) == (expected, 1)
    pickles = [path.name for path in (tmp_path / "run").rglob("*.pkl")]
    assert len(pickles) == 2, "submitit's own two: the command line and the exit code"


def test_a_submitted_task_is_cancelled_and_then_continued_from_python(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(
        "import sys, paceline\n"
        "from paceline_tasks.fashion_mnist import FashionMNIST\n"
        'if __name__ == "__main__":\n'
        "    job = paceline.submit(FashionMNIST(lr=0.05), on='local', run_dir='run', nproc=1,\n"
        "                          max_steps=int(sys.argv[1]), threads=1, checkpoint_every='5steps')\n"
        "    print(job.id, flush=True)\n"
        "    if sys.argv[2:]:\n"
        "        print(job.result().steps)\n"
    )
    first = run_processes.run([sys.executable, "train.py", "4000"], timeout_s=120)
    controller = psutil.Process(int(first.stdout))
    wait_until(lambda: any((tmp_path / "run/checkpoints").glob("step-*")), "a checkpoint", 60)
    assert run_processes.paceline("cancel", first.stdout.strip()).returncode == 0
    psutil.wait_procs([controller], timeout=60)
    status = run_processes.paceline("status", first.stdout.strip(), "--json").stdout
    assert json.loads(status)["status"]["state"] == "cancelled"
    assert (tmp_path / "run/run.toml").exists()
    assert not controller.is_running()


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    made = make_private(tmp_path / "new")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert make_private(made) == made
    made.chmod(0o750)
    with pytest.raises(ConfigError, match=r"mode 750.*chmod 700"):
        paceline.submit(print, on="local", folder=made)
    made.chmod(0o700)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(ConfigError, match="a link or a file"):
        check_private(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(made, 12345, -1)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            check_private(made)
    with pytest.raises(ConfigError, match="cannot make the folder"):
        make_private(Path("/dev/null/jobs"))


def test_wrong_calls_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="differ in length"):
        paceline.submit_array(max, [1, 2], [1], on="local")
    with pytest.raises(ConfigError, match="nothing to submit"):
        paceline.submit_array(max, [], on="local")
    with pytest.raises(ConfigError, match="--partitoin is not supported by --on submitit"):
        paceline.submit(print, on="slurm", partitoin="main")
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        paceline.submit(print, threading.Lock(), on="local")
    with pytest.raises(ConfigError, match="nproc must be at least 1"):
        paceline.submit(print, on="local", nproc=0)
    with pytest.raises(TaskError, match="is ' two', which --set would read as"):
        paceline.submit(Named(name=" two"), on="local")
    assert [path.name for path in tmp_path.rglob("*")] == ["jobs"]


def test_functions_that_cannot_be_recorded_are_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot record the job in"):
        paceline.submit_array(max, [1, 2], [3, 4], on="local")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "jobs"]


@pytest.mark.integration
def test_functions_that_cannot_all_be_recorded_are_all_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept: list[JobRecord] = []

    def first_alone(record: JobRecord) -> None:
        if kept:
            raise ConfigError("cannot record the job: the disk is full.")
        kept.append(record)

    monkeypatch.setattr("paceline.launch.submit.add_record", first_alone)
    there = children(os.getpid())  # whatever other tests share
    with pytest.raises(ConfigError, match=r"submitit-\d+ is cancelled: cannot record the job"):
        paceline.submit_array(time.sleep, [60, 60, 60], on="local")
    assert len(list(tmp_path.glob("jobs/*/*_cancelled"))) == 3
    assert set(children(os.getpid())) <= set(there)
