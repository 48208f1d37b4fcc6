"""mpirun and horovodrun in the script of a Slurm job, compared whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.options import SlurmOptions
from paceline.launch.slurm_script import BODIES


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def job(**fields: object) -> LaunchSpec:
    defaults = {
        "command": ("./hello",),
        "name": "hello",
        "directory": Path("/jobs/hello-1"),
        "python": "python",
    }
    return LaunchSpec(**{**defaults, "nodes": (2, 2), "nproc": (2,), **fields})  # type: ignore[arg-type]


def body(spec: LaunchSpec) -> str:
    assert "#SBATCH --ntasks-per-node=2\n" in get_launcher("slurm").render(spec, SlurmOptions()).text
    return "\n".join(BODIES[spec.rank_launcher](spec, "", True))


def test_mpirun() -> None:
    assert (
        body(job(rank_launcher="mpi", env_style="mpi"))
        == """\
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
mpirun -np 4 --map-by ppr:2:node:OVERSUBSCRIBE --bind-to none ./hello &
steps+=("$!")
wait_for "$!"
code=$?"""
    )


def test_mpirun_is_asked_to_stop_by_the_signal_that_it_passes_on() -> None:
    text = body(job(rank_launcher="mpi", is_task=True, run=Path("/runs/a")))
    assert """\ntrap 'signalled=1; kill -s USR1 "${steps[@]}"' TERM INT\nmpirun -np 4 """ in text
    assert "paceline.launch.rank" in text
    assert "--master-port 29697" in text


def test_a_task_under_mpirun_saves_on_sigterm_and_goes_back_into_the_queue(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    programs = {
        "mpirun": "trap 'exit 75' USR1; touch ready; while true; do sleep 0.05; done",
        "scontrol": 'echo "$*" >>asked',
        "squeue": "echo RUNNING",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    spec = job(rank_launcher="mpi", is_task=True, run=tmp_path, directory=tmp_path)
    (tmp_path / "job.sh").write_text(get_launcher("slurm").render(spec, SlurmOptions()).files["job.sh"])
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    script = run_processes.start(["bash", "job.sh"], env=env)
    wait_until((tmp_path / "ready").exists, "mpirun")
    script.terminate()
    assert script.wait() == 75
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"


def test_horovodrun_on_one_machine_as_the_handbooks_have_it() -> None:
    horovod = {"rank_launcher": "horovod", "env_style": "horovod", "interface": "ib0"}
    assert (
        body(job(**horovod, nodes=(1, 1), command=("python", "train.py")))
        == """\
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:2/' | paste -sd, -)"
horovodrun -np 2 --gloo --network-interface ib0 -H "$hosts" python train.py &
steps+=("$!")
wait_for "$!"
code=$?"""
    )


def test_a_number_of_machines_that_may_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--nodes 1:2: --rank-launcher mpi needs one number"):
        get_launcher("slurm").render(job(rank_launcher="mpi", nodes=(1, 2)), SlurmOptions())
