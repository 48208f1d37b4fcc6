"""What --on horovod would run, compared whole; and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.job import RecoveryPolicy
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.submit import submit, task_job
from paceline_frameworks.horovod import HorovodOptions, check_build


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Horovod nor MPI is found, and nobody is root."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def job(**fields: object) -> LaunchSpec:
    defaults = {"command": ("python", "train.py"), "name": "train", "directory": Path("/jobs/train-1")}
    defaults |= {"python": "/nowhere/python", "rank_launcher": "horovod", "env_style": "horovod", "nproc": (2,)}
    return LaunchSpec(**{**defaults, **fields})  # type: ignore[arg-type]


def text(spec: LaunchSpec, **options: object) -> str:
    return get_launcher("horovod").render(spec, HorovodOptions(**options)).text  # type: ignore[arg-type]


def test_here_on_loopback() -> None:
    assert (
        text(job(threads=1, env={"NOTE": "n"}), horovod_args="--cycle-time-ms 2")
        == """\
# Horovod starts 2 ranks
OMP_NUM_THREADS=1 \\
  NOTE=n \\
  horovodrun -np 2 --gloo --network-interface lo --cycle-time-ms 2 python train.py
"""
    )


def test_on_hosts_as_the_handbooks_have_it() -> None:
    assert (
        text(job(nproc=(1,), interface="ib0"), hosts="gpu12:2,gpu13:2")
        == """\
# Horovod starts 4 ranks
GLOO_SOCKET_IFNAME=ib0 \\
  NCCL_SOCKET_IFNAME=ib0 \\
  UCX_NET_DEVICES=ib0 \\
  horovodrun -np 4 --gloo -H gpu12:2,gpu13:2 --network-interface ib0 python train.py
"""
    )


def test_elastic() -> None:
    options = {"min_np": 1, "max_np": 4, "host_discovery_script": "./machines.sh"}
    assert (
        text(job(interface="lo"), **options).splitlines()[-1].strip()
        == "horovodrun -np 2 --gloo --network-interface lo --host-discovery-script ./machines.sh --min-np 1 "
        "--max-np 4 python train.py"
    )
    assert "--network-interface" not in text(job(), **options)


def test_the_mpi_controller_is_mpirun() -> None:
    assert (
        text(job(env_style="torch", nproc=(1,)), hosts="a:1,b:1", controller="mpi").splitlines()[-1]
        == "mpirun -np 2 --map-by slot:OVERSUBSCRIBE --bind-to none --host a:1,b:1 -x PATH /nowhere/python "
        "-P -m paceline.launch.rank --env-style torch --master-addr a --master-port 28804 -- python train.py"
    )


def test_a_task() -> None:
    config = config_from_mapping({"task": "fashion-mnist", "run_dir": "/runs/a", "strategy": "horovod"}, "a test")
    spec = task_job(config, {"nproc": (2,)}, get_launcher("horovod"), "python")
    assert (
        text(spec)
        == """\
# Horovod starts 2 ranks
horovodrun -np 2 --gloo --network-interface lo python -P -m paceline.launch.rank --env-style torch -- python \
-m paceline train fashion-mnist --run-dir /runs/a --strategy horovod
"""
    )


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"controller": "jsrun"}, "--controller must be gloo or mpi, but is 'jsrun'"),
        ({}, {"min_np": 1}, "--min-np and --max-np need --host-discovery-script"),
        ({"nproc": (1,)}, {"min_np": 3, "hosts": "a:1,b:1"}, "--nproc 2, with which the job begins"),
        ({}, {"host_discovery_script": "x", "hosts": "a:2"}, "leave --hosts out"),
        ({}, {"host_discovery_script": "x", "controller": "mpi"}, "--controller mpi cannot be elastic"),
        ({"env_style": "torch"}, {"host_discovery_script": "x"}, "Use --env-style horovod"),
        ({"walltime_s": 5.0}, {}, "--walltime does not work with --on horovod"),
        ({"nodes": (2, 2)}, {}, "--nodes 2 needs --hosts"),
        ({"recovery": RecoveryPolicy(max_restarts=1)}, {}, "--max-restarts does not work with --on horovod"),
        ({"env": {"HF_TOKEN": "x"}}, {}, "--env HF_TOKEN: every user who can see the job can read its variables"),
        ({}, {"controller": "mpi", "horovod_args": "-v"}, "--horovod-args are for horovodrun"),
    ],
)
def test_what_it_refuses(fields: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        text(job(**fields), **options)
    assert message in str(raised.value)


def test_an_elastic_task_is_sent_to_pacelines_own_agents() -> None:
    config = config_from_mapping({"task": "fashion-mnist", "run_dir": "/runs/a"}, "a test")
    spec = task_job(config, {"nproc": (2,)}, get_launcher("horovod"), "python")
    with pytest.raises(ConfigError, match="A Paceline task grows and shrinks with --on spawn"):
        text(spec, host_discovery_script="./machines.sh")


def test_a_missing_horovod_is_told_with_what_builds_it(tmp_path: Path) -> None:
    launcher = get_launcher("horovod")
    with pytest.raises(LaunchError, match=r"horovodrun is not installed.*scripts/build-horovod"):
        submit(launcher, launcher.render(job(directory=tmp_path / "job")))
    with pytest.raises(LaunchError, match=r"horovodrun is not installed.*scripts/build-horovod"):
        check_build("/nowhere/python")


@pytest.mark.parametrize("reduction", ["allreduce", "ddp"])
def test_horovod_sums_the_gradients_itself(reduction: str) -> None:
    with pytest.raises(ConfigError, match=f"--reduction {reduction} does not work with --strategy horovod"):
        config_from_mapping({"task": "x", "strategy": "horovod", "reduction": reduction}, "a test")
    with pytest.raises(ConfigError, match="--sdc-check-every needs --reduction exact or allreduce: Horovod adds up"):
        config_from_mapping({"task": "x", "strategy": "horovod", "sdc_check_every": 5}, "a test")
