"""What --on mpi would run, compared whole; and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.job import RecoveryPolicy
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.mpi import MpiOptions, find_mpirun
from paceline.launch.submit import submit, task_job

SCRIPT = ("python", "train.py", "--lr", "0.1")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No MPI is found, and nobody is root."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def job(**fields: object) -> LaunchSpec:
    defaults = {"command": SCRIPT, "name": "train", "directory": Path("/jobs/train-1"), "python": "python"}
    return LaunchSpec(**{**defaults, "rank_launcher": "mpi", **fields})  # type: ignore[arg-type]


def text(spec: LaunchSpec, **options: str) -> str:
    return get_launcher("mpi").render(spec, MpiOptions(**options)).text


def test_open_mpi_here() -> None:
    assert (
        text(job(nproc=(4,), threads=2, env={"NOTE": "it's"}))
        == """\
# Open MPI starts 4 ranks
OMP_NUM_THREADS=2 \\
  NOTE='it'"'"'s' \\
  mpirun -np 4 --map-by slot:OVERSUBSCRIBE --bind-to none python -P -m paceline.launch.rank --env-style torch \
--threads 2 -- python train.py --lr 0.1
"""
    )


def test_open_mpi_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    spec = job(env={"KEY": "v"}, interface="eth0", walltime_s=90.4)
    assert (
        text(spec, hosts="node0:2,node1:1", mpi_args="--mca pml ob1")
        == """\
# Open MPI starts 3 ranks
GLOO_SOCKET_IFNAME=eth0 \\
  NCCL_SOCKET_IFNAME=eth0 \\
  UCX_NET_DEVICES=eth0 \\
  KEY=v \\
  mpirun --allow-run-as-root -np 3 --map-by slot:OVERSUBSCRIBE --bind-to none --host node0:2,node1:1 -x PATH \
-x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME -x UCX_NET_DEVICES -x KEY --mca btl_tcp_if_include eth0 \
--timeout 90 --mca pml ob1 python -P -m paceline.launch.rank --env-style torch --nproc 2,1 \
--master-addr node0 --interface eth0 --master-port 28804 -- python train.py --lr 0.1
"""
    )


def test_mpich_on_hosts() -> None:
    spec = job(nodes=(2, 2), nproc=(2,), interface="eth0", walltime_s=60.0, master_port=4000)
    assert (
        text(spec, hosts="node0,node1", mpi="mpich")
        == """\
# MPICH starts 4 ranks
GLOO_SOCKET_IFNAME=eth0 \\
  NCCL_SOCKET_IFNAME=eth0 \\
  UCX_NET_DEVICES=eth0 \\
  MPIEXEC_TIMEOUT=60 \\
  mpiexec.hydra -n 4 -bind-to none -hosts node0:2,node1:2 -iface eth0 python -P -m paceline.launch.rank \
--env-style torch --master-addr node0 --interface eth0 --master-port 4000 -- python train.py --lr 0.1
"""
    )


def test_a_program_that_asks_mpi_is_started_bare_unless_it_has_placeholders() -> None:
    bare = text(job(command=("./hello", "1"), env_style="mpi", nproc=(2,)))
    assert bare.endswith("--bind-to none ./hello 1\n")
    filled = text(job(command=("./hello", "{master_addr}"), env_style="mpi", nproc=(2,)))
    assert filled.endswith("python -P -m paceline.launch.rank --env-style mpi -- ./hello '{master_addr}'\n")


def test_a_task_stops_by_itself_and_is_given_no_limit() -> None:
    config = config_from_mapping(
        {"task": "fashion-mnist", "run_dir": "/runs/a", "walltime": "1min", "threads": 1}, "a test"
    )
    spec = task_job(config, {"nproc": (2,), "walltime_s": 60.0}, get_launcher("mpi"), "python")
    assert (
        text(spec)
        == """\
# Open MPI starts 2 ranks
OMP_NUM_THREADS=1 \\
  mpirun -np 2 --map-by slot:OVERSUBSCRIBE --bind-to none python -P -m paceline.launch.rank --env-style torch \
--threads 1 -- python -m paceline train fashion-mnist --run-dir /runs/a --walltime 1min
"""
    )


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\necho "mpirun (Open MPI) 5.0.1"\n')
    path.chmod(0o755)
    return path


def test_which_mpirun_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mpirun() == ("openmpi", "mpirun")
    # Debian's alternatives: a link says whose it is, and both may be there.
    (tmp_path / "debian").mkdir()
    for name in ("mpirun.openmpi", "mpiexec.hydra", "ompi_info"):
        program(tmp_path / "debian" / name)
    (tmp_path / "debian/mpirun").symlink_to("mpiexec.hydra")
    monkeypatch.setenv("PATH", str(tmp_path / "debian"))
    assert find_mpirun() == ("mpich", "mpirun")
    assert find_mpirun("openmpi") == ("openmpi", "mpirun.openmpi")
    assert find_mpirun("mpich") == ("mpich", "mpiexec.hydra")
    # Intel MPI's mpirun is a script beside hydra.
    program(tmp_path / "intel/mpirun")
    program(tmp_path / "intel/mpiexec.hydra")
    monkeypatch.setenv("PATH", str(tmp_path / "intel"))
    assert find_mpirun() == ("mpich", "mpirun")
    # Without one on PATH, that of the interpreter's own environment.
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "venv/mpirun").with_name("python")))
    assert find_mpirun() == ("openmpi", str(tmp_path / "venv/mpirun"))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"nodes": (2, 2)}, {}, "--nodes 2 needs --hosts"),
        ({"nodes": (1, 3)}, {}, "--nodes 1:3: --on mpi needs one number"),
        ({"nodes": (3, 3)}, {"hosts": "a:1,b:1"}, "--nodes 3 needs as many hosts, but --hosts names 2"),
        ({"nproc": (3,)}, {"hosts": "a:1,b:2"}, "--nproc 3 contradicts --hosts, which says 1,2"),
        ({"gpus_per_node": 1}, {}, "--gpus-per-node asks a cluster"),
        ({"cpus_per_task": 1}, {}, "--cpus-per-task asks a cluster"),
        ({"recovery": RecoveryPolicy(max_restarts=1)}, {}, "--max-restarts does not work with --on mpi"),
        ({}, {"mpi": "lam"}, "--mpi must be openmpi or mpich, but is 'lam'"),
    ],
)
def test_what_it_refuses(fields: dict[str, object], options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        text(job(**fields), **options)
    assert message in str(raised.value)


@pytest.mark.parametrize("recover", ["inplace", "restart"])
def test_a_recovery_that_mpirun_leaves_no_room_for_is_refused(recover: str) -> None:
    config = config_from_mapping({"task": "fashion-mnist", "recover": recover, "run_dir": "a"}, "a test")
    with pytest.raises(ConfigError, match=f"--recover {recover} needs Paceline's agent, but with --on mpi"):
        task_job(config, {}, get_launcher("mpi"), "python")


@pytest.mark.integration
def test_a_missing_mpirun_is_told_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = get_launcher("mpi")
    spec = job(directory=tmp_path / "job")
    with pytest.raises(LaunchError, match=r"mpirun is not installed.*pip install 'mpi4py<"):
        submit(launcher, launcher.render(spec))
    assert not spec.directory.exists()
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/mpiexec.hydra").parent))
    with pytest.raises(LaunchError, match=r"mpiexec\.hydra is not MPICH's, but Open MPI's.*--mpi openmpi"):
        submit(launcher, launcher.render(spec, MpiOptions(mpi="mpich")))
