"""Launchers and the process group together: the ranks meet, on loopback, also after a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.job import Placement
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.directory import RunDirectory

MEETS = """
import json, os, psutil, sys
from pathlib import Path
from paceline.core.environment import detect_environment
from paceline.parallel.world import open_world
environment = detect_environment()
with open_world(environment, device="cpu", init_timeout_s=30) as world:
    ranks = world.all_gather_object(world.rank)
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    world.barrier()
place = [environment.local_rank, environment.local_world_size, environment.node_rank, world.one_host]
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps([ranks, sorted(set(listening)), place]))
"""

PLAIN = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(str(int(total)))
dist.destroy_process_group()
"""

DIES_ONCE = """
import os, signal, sys
from pathlib import Path
from paceline.core.environment import detect_environment
from paceline.parallel.world import open_world
environment = detect_environment()
with open_world(environment, device="cpu", init_timeout_s=30) as world:
    world.barrier()
    if environment.restart_count == 0:
        if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        while True: world.barrier()
    ranks = world.all_gather_object([world.rank, environment.restart_count])
Path(sys.argv[1], f"{world.rank}.json").write_text(str(ranks))
"""


def _script(tmp_path: Path, text: str) -> tuple[str, str, str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return sys.executable, str(path), str(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_the_ranks_meet_on_loopback(tmp_path: Path, launcher: str) -> None:
    spec = LaunchSpec(
        command=_script(tmp_path, MEETS),
        nproc=(2,),
        threads=1,
        placement=Placement(log_directory=RunDirectory(tmp_path / "run")),
    )
    chosen = get_launcher(launcher)
    assert chosen.submit(chosen.render(spec)).wait() == 0
    for rank in (0, 1):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said == [[0, 1], ["127.0.0.1"], [rank, 2, 0, True]]


@pytest.mark.integration
def test_spawn_starts_a_script_that_knows_nothing_of_paceline(tmp_path: Path) -> None:
    spec = LaunchSpec(command=_script(tmp_path, PLAIN), nproc=(2,), threads=1)
    spawn = get_launcher("spawn")
    assert spawn.submit(spawn.render(spec)).wait() == 0
    assert [(tmp_path / f"{rank}.json").read_text() for rank in (0, 1)] == ["3", "3"]


def test_two_machines_by_hand(tmp_path: Path, run_processes: Any) -> None:
    spawn = get_launcher("spawn")
    endpoint = f"127.0.0.1:{run_processes.free_port()}"
    handles = [
        spawn.submit(
            spawn.render(
                LaunchSpec(
                    command=_script(tmp_path, MEETS),
                    nproc=(1,),
                    nodes=(2, 2),
                    threads=1,
                    placement=Placement(
                        node_rank=node_rank, rdzv_endpoint=endpoint, log_directory=RunDirectory(tmp_path / "run")
                    ),
                )
            )
        )
        for node_rank in (1, 0)
    ]
    assert [handle.wait() for handle in handles] == [0, 0]
    for rank in (0, 1):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said == [[0, 1], ["127.0.0.1"], [0, 1, rank, True]]


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
def test_torchrun_restarts_a_killed_worker_and_does_not_hang(tmp_path: Path, run_processes: Any, attempt: int) -> None:
    done = run_processes.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--max-restarts=2", *_script(tmp_path, DIES_ONCE)[1:]),
        ],
        env={"OMP_NUM_THREADS": "1"},
        timeout_s=90,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0.json").read_text() == "[[0, 1], [1, 1]]"
