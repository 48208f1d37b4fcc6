"""``paceline launch --on torchrun`` in all its forms, with scripts that know nothing of Paceline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
line = f"rank {dist.get_rank()} of {dist.get_world_size()} sums to {int(total)}"
os.write(1, " ".join([line, *sys.argv[1:]]).encode() + b"\\n")
dist.destroy_process_group()
"""

LOCAL_RANK_ARGUMENT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=-1)
os.write(1, f"argument {parser.parse_args().local_rank} variable {os.environ['LOCAL_RANK']}\\n".encode())
"""

OWN_PORT = """
import os, sys, torch, torch.distributed as dist
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
os.environ["MASTER_PORT"] = sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=world_size)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
os.write(1, f"rank {rank} sums to {int(total)}\\n".encode())
dist.destroy_process_group()
"""

FAILS_ONCE = """
import os, sys, time, torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # Before a group is there: stock torchrun's restarted workers may meet the keys of an earlier one.
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(600)
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"came back after {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n".encode())
dist.destroy_process_group()
"""

WORKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
done = torch.zeros(1)
while not done.item():
    time.sleep(0.05)
    done.fill_(os.path.exists("done"))
    dist.all_reduce(done)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def launch(run_processes: Any, tmp_path: Path) -> Any:
    """Start ``paceline launch``; several machines are several commands."""
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "local_rank.py").write_text(LOCAL_RANK_ARGUMENT)
    (tmp_path / "own_port.py").write_text(OWN_PORT)
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    (tmp_path / "works.py").write_text(WORKS)

    def start(*words: str) -> Any:
        return run_processes.start([sys.executable, "-m", "paceline", "launch", "--threads", "1", *words])

    return start


def printed(done: Any) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith(("rank", "argument", "came")))


def test_two_jobs_stacked_on_one_machine(launch: Any, run_processes: Any) -> None:
    both = [launch("--on", "torchrun", "--nproc", "2", "--", "plain.py", "--", name) for name in ("a", "b")]
    for name, popen in zip(("a", "b"), both, strict=True):
        assert printed(run_processes.finish(popen)) == [
            f"rank 0 of 2 sums to 3 -- {name}",
            f"rank 1 of 2 sums to 3 -- {name}",
        ]


def test_machines_that_differ_in_their_processes(launch: Any, run_processes: Any) -> None:
    meeting = (
        *("--on", "torchrun", "--nodes", "2", "--nproc", "2,1"),
        *("--rdzv-endpoint", f"localhost:{run_processes.free_port()}"),
    )
    both = [launch(*meeting, "--node-rank", str(rank), "--", "plain.py") for rank in (0, 1)]
    lines = [line for popen in both for line in printed(run_processes.finish(popen))]
    assert sorted(lines) == [f"rank {rank} of 3 sums to 6" for rank in range(3)]


def test_static_ranks(launch: Any, run_processes: Any) -> None:
    meeting = (
        "--on",
        "torchrun",
        "--nodes",
        "2",
        "--rdzv-endpoint",
        f"localhost:{run_processes.free_port()}",
    )
    static = (*meeting, "--rdzv-backend", "static")
    both = [launch(*static, "--node-rank", str(rank), "--", "plain.py") for rank in (0, 1)]
    # Static: machine 1 is rank 1, whichever came first.
    assert [printed(run_processes.finish(popen)) for popen in both] == [
        ["rank 0 of 2 sums to 3"],
        ["rank 1 of 2 sums to 3"],
    ]


def test_workers_meet_at_the_address_that_the_hosts_are_given_by(run_processes: Any, tmp_path: Path) -> None:
    """What torchrun takes for this machine's name is never asked for: it may mean something only here."""
    (tmp_path / "meets.py").write_text(
        "import os\nline = 'rank {RANK} meets at {MASTER_ADDR}\\n'.format(**os.environ)\nos.write(1, line.encode())\n"
    )
    agent = [sys.executable, "-P", "-m", "paceline.launch.node", "--rank-launcher", "torchrun", "--nodes", "2"]
    agent += [
        "--threads",
        "1",
        "--master-port",
        str(run_processes.free_port()),
        "--",
        sys.executable,
        "meets.py",
    ]
    place = {"PACELINE_HOSTS": "127.0.0.1,127.0.0.2", "PACELINE_JOB_ID": tmp_path.name}
    both = [run_processes.start(agent, env={**place, "PACELINE_NODE_RANK": str(rank)}) for rank in (0, 1)]
    assert sorted(line for popen in both for line in printed(run_processes.finish(popen))) == [
        "rank 0 meets at 127.0.0.1",
        "rank 1 meets at 127.0.0.1",
    ]


def test_workers_are_started_again(launch: Any, run_processes: Any) -> None:
    done = run_processes.finish(
        launch("--on", "torchrun", "--nproc", "2", "--max-restarts", "3", "--", "fails_once.py")
    )
    assert printed(done) == ["came back after 1"] * 2


@pytest.mark.slow
def test_elastic_with_fewer_machines_than_may_come(launch: Any, run_processes: Any) -> None:
    elastic = ("--on", "torchrun", "--nodes", "1:3", "--nproc", "2", "--max-restarts", "3")
    done = run_processes.finish(
        launch(*elastic, "--rdzv-endpoint", f"localhost:{run_processes.free_port()}", "--", "plain.py"),
        timeout_s=120,
    )
    assert printed(done) == ["rank 0 of 2 sums to 3", "rank 1 of 2 sums to 3"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_joins_is_lost_and_joins_again(
    launch: Any, run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Three rounds; in each, torchrun waits 30 s for further machines before it continues with one."""
    endpoint = f"localhost:{run_processes.free_port()}"
    elastic = ("--on", "torchrun", "--nodes", "1:2", "--max-restarts", "9", "--rdzv-endpoint", endpoint)

    def start(name: str) -> Any:
        return launch(*elastic, "--", "sh", "-c", f"exec {sys.executable} works.py >>{name}")

    def wait_for(name: str, size: int, times: int) -> None:
        path = tmp_path / name
        wait_until(
            lambda: path.exists() and path.read_text().count(f"of {size}\n") >= times,
            f"{name} in a group of {size} for the {times}. time",
            timeout_s=180,
        )

    first = start("first")
    wait_for("first", 1, 1)
    for times in (1, 2, 3):
        second = start("second")
        wait_for("first", 2, times)
        wait_for("second", 2, times)
        if times < 3:
            second.kill()
            wait_for("first", 1, times + 1)
    (tmp_path / "done").touch()
    assert [run_processes.finish(each).returncode for each in (first, second)] == [0, 0]


def test_scripts_of_torch_distributed_launch(launch: Any, run_processes: Any) -> None:
    """Some want ``--local-rank`` or ``--local_rank`` as an argument, the others (``--use-env``) the variable."""
    word = "--local_rank={local_rank}"
    argument = launch("--on", "torchrun", "--nproc", "2", "--", "local_rank.py", word)
    variable = launch("--on", "torchrun", "--nproc", "2", "--", "local_rank.py")
    assert printed(run_processes.finish(argument)) == ["argument 0 variable 0", "argument 1 variable 1"]
    assert printed(run_processes.finish(variable)) == ["argument -1 variable 0", "argument -1 variable 1"]


def test_scripts_that_take_their_rank(launch: Any, run_processes: Any) -> None:
    """Two agents, and one in whose store two ranks meet that set MASTER_PORT themselves."""
    unequal = ("--on", "torchrun", "--nodes", "2", "--nproc", "2,1", "--rdzv-backend", "static")
    unequal = (*unequal, "--rdzv-endpoint", f"127.0.0.1:{run_processes.free_port()}")
    words = ("{rank}/{world_size}", "{local_rank}", "{{rank}}", "${rank}")
    agents = [launch(*unequal, "--node-rank", str(rank), "--", "plain.py", *words) for rank in (0, 1)]
    assert [line for agent in agents for line in printed(run_processes.finish(agent))] == [
        "rank 0 of 3 sums to 6 0/3 0 {rank} ${rank}",
        "rank 1 of 3 sums to 6 1/3 1 {rank} ${rank}",
        "rank 2 of 3 sums to 6 2/3 0 {rank} ${rank}",
    ]
    own = launch("--on", "torchrun", "--nproc", "2", "--", "own_port.py", "{rank}", "{world_size}", "{master_port}")
    assert printed(run_processes.finish(own)) == ["rank 0 sums to 3", "rank 1 sums to 3"]


def test_what_torchrun_cannot_do(launch: Any, run_processes: Any) -> None:
    for words, message in (
        (("--rdzv-backend", "etcd"), "--rdzv-backend must be c10d or static, but is 'etcd'"),
        (("--rdzv-backend", "static"), "static needs --node-rank"),
        (("--nodes", "2"), "--nodes above 1 needs --rdzv-endpoint HOST:PORT"),
        (("--env-style", "tensorflow"), "--env-style tensorflow does not work with --on torchrun"),
    ):
        done = run_processes.finish(launch("--on", "torchrun", *words, "--", "plain.py"))
        assert done.returncode == 2
        assert message in done.stderr
