"""What --dry-run prints, compared whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.job import Placement, Recovery, RecoveryPolicy
from paceline.launch.launcher import LOCAL_LAUNCHERS, LaunchSpec, get_launcher
from paceline.runs.directory import RunDirectory

WORKER = ("python", "-P", "-m", "paceline.training.worker", "runs/a b/job.toml")


def test_inprocess() -> None:
    rendered = get_launcher("inprocess").render(LaunchSpec(command=WORKER, threads=2))
    assert (
        rendered.text
        == """\
# in this process
OMP_NUM_THREADS=2 \\
  python -P -m paceline.training.worker 'runs/a b/job.toml'
"""
    )


def test_spawn() -> None:
    spec = LaunchSpec(
        command=WORKER,
        nproc=(2,),
        threads=1,
        master_port=29500,
        env={"NOTE": "it's"},
        placement=Placement(log_directory=RunDirectory(Path("runs/a b"))),
    )
    assert (
        get_launcher("spawn").render(spec).text
        == """\
# rank 0
RANK=0 \\
  WORLD_SIZE=2 \\
  LOCAL_RANK=0 \\
  LOCAL_WORLD_SIZE=2 \\
  GROUP_RANK=0 \\
  GROUP_WORLD_SIZE=1 \\
  MASTER_ADDR=127.0.0.1 \\
  MASTER_PORT=29500 \\
  OMP_NUM_THREADS=1 \\
  NOTE='it'"'"'s' \\
  python -P -m paceline.training.worker 'runs/a b/job.toml'

# rank 1
RANK=1 \\
  WORLD_SIZE=2 \\
  LOCAL_RANK=1 \\
  LOCAL_WORLD_SIZE=2 \\
  GROUP_RANK=0 \\
  GROUP_WORLD_SIZE=1 \\
  MASTER_ADDR=127.0.0.1 \\
  MASTER_PORT=29500 \\
  OMP_NUM_THREADS=1 \\
  NOTE='it'"'"'s' \\
  python -P -m paceline.training.worker 'runs/a b/job.toml' \\
  >>'runs/a b/logs/rank-1.log' 2>&1
"""
    )


def test_spawn_on_the_second_of_two_machines() -> None:
    spec = LaunchSpec(
        command=("python", "train.py"),
        nproc=(1,),
        nodes=(2, 2),
        threads=1,
        placement=Placement(node_rank=1, rdzv_endpoint="node0:4000", rdzv_id="mine"),
    )
    assert (
        get_launcher("spawn").render(spec).text
        == """\
# rank 1
RANK=1 \\
  WORLD_SIZE=2 \\
  LOCAL_RANK=0 \\
  LOCAL_WORLD_SIZE=1 \\
  GROUP_RANK=1 \\
  GROUP_WORLD_SIZE=2 \\
  MASTER_ADDR=node0 \\
  MASTER_PORT=4000 \\
  PACELINE_JOB_ID=mine \\
  OMP_NUM_THREADS=1 \\
  python train.py
"""
    )


def test_torchrun() -> None:
    spec = LaunchSpec(command=WORKER, nproc=(2,), threads=1)
    assert (
        get_launcher("torchrun").render(spec).text
        == """\
# torchrun, 2 processes
OMP_NUM_THREADS=1 \\
  python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m paceline.training.worker 'runs/a b/job.toml'
"""
    )


def test_torchrun_on_several_machines() -> None:
    spec = LaunchSpec(
        command=("python", "train.py", "--x"),
        nproc=(4,),
        nodes=(2, 2),
        threads=1,
        placement=Placement(rdzv_endpoint="node0:4000"),
    )
    assert (
        get_launcher("torchrun").render(spec).text
        == """\
# torchrun, 4 processes
OMP_NUM_THREADS=1 \\
  python -m torch.distributed.run --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:4000 \
--rdzv-id=paceline --nproc-per-node=4 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 train.py --x
"""
    )


@pytest.mark.parametrize(
    ("hosts", "node_rank", "known_by"),
    [
        (("10.0.0.5", "gpu-b"), 0, ["--local-addr=10.0.0.5"]),
        (("10.0.0.5", "gpu-b"), 1, ["--local-addr=gpu-b"]),
        (("10.0.0.5",), 1, []),
        ((), 0, []),
    ],
)
def test_torchrun_is_told_what_other_machines_know_this_one_by(
    hosts: tuple[str, ...], node_rank: int, known_by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own idea, ``socket.getfqdn()``, may be ``localhost`` or a name that the others cannot look up."""
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.9")  # and not a loopback address, as some have
    spec = LaunchSpec(
        command=("python", "train.py"),
        nodes=(2, 2),
        placement=Placement(node_rank=node_rank, rdzv_endpoint="10.0.0.5:4000", hosts=hosts),
    )
    [process] = get_launcher("torchrun").render(spec).commands
    assert [word for word in process.argv if word.startswith("--local-addr")] == known_by
    assert f"--rdzv-conf=is_host={1 - node_rank}" in process.argv


def test_torchrun_that_restarts() -> None:
    spec = LaunchSpec(
        command=WORKER,
        nproc=(2,),
        threads=1,
        recovery=RecoveryPolicy(recover="restart", max_restarts=5),
    )
    assert (
        get_launcher("torchrun").render(spec).text
        == """\
# torchrun, 2 processes
OMP_NUM_THREADS=1 \\
  python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --max-restarts=5 \
-m paceline.training.worker 'runs/a b/job.toml'
"""
    )


@pytest.mark.parametrize(
    ("nodes", "recover", "is_shared"),
    [
        ((2, 2), "restart", False),
        ((2, 2), "none", True),
        ((1, 2), "restart", False),
        # A node that joins restarts the workers, also if none may fail.
        ((1, 2), "none", False),
        ((1, 1), "restart", True),
    ],
)
def test_torchrun_shares_no_store_where_the_nodes_may_meet_again(
    nodes: tuple[int, int], recover: Recovery, is_shared: bool
) -> None:
    spec = LaunchSpec(
        command=WORKER,
        nodes=nodes,
        threads=1,
        placement=Placement(rdzv_endpoint="node0:4000"),
        recovery=RecoveryPolicy(recover=recover),
    )
    [process] = get_launcher("torchrun").render(spec).commands
    own_store = {} if is_shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert process.env == {"OMP_NUM_THREADS": "1", **own_store}


def test_the_users_own_threads_are_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rendered = get_launcher("inprocess").render(LaunchSpec(command=WORKER))
    assert "OMP_NUM_THREADS" not in rendered.text


@pytest.mark.parametrize("name", LOCAL_LAUNCHERS)
def test_rendering_starts_and_writes_nothing(name: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    script = tmp_path.with_suffix(".py")
    script.write_text("raise SystemExit('started')")
    spec = LaunchSpec(
        command=(sys.executable, str(script)),
        placement=Placement(log_directory=directory),
    )
    assert get_launcher(name).render(spec).text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cold
@pytest.mark.integration
def test_rendering_imports_no_torch() -> None:
    code = (
        "import sys; from paceline.launch.launcher import LaunchSpec, get_launcher;"
        "[get_launcher(n).render(LaunchSpec(command=('python', 'x.py'))) for n in ('inprocess', 'spawn', 'torchrun')];"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_wrong_specs() -> None:
    with pytest.raises(ConfigError, match=r"no launcher 'slurmm'. Choose one of: inprocess, spawn, torchrun"):
        get_launcher("slurmm")
    with pytest.raises(ConfigError, match="--on inprocess runs one process, but 2 were asked for"):
        get_launcher("inprocess").render(LaunchSpec(command=WORKER, nproc=(2,)))
    with pytest.raises(ConfigError, match="--nproc must be at least 1, but is 0"):
        LaunchSpec(command=WORKER, nproc=(0,))
    with pytest.raises(ConfigError, match="needs --rdzv-endpoint HOST:PORT"):
        get_launcher("spawn").render(LaunchSpec(command=WORKER, nodes=(2, 2)))
    with pytest.raises(ConfigError, match="--node-rank must be between 0 and 1, but is 2"):
        LaunchSpec(
            command=WORKER,
            nodes=(2, 2),
            placement=Placement(node_rank=2, rdzv_endpoint="a:1"),
        )
    with pytest.raises(ConfigError, match="needs --node-rank: 0 on the node of"):
        get_launcher("spawn").render(
            LaunchSpec(
                command=WORKER,
                nodes=(2, 2),
                placement=Placement(rdzv_endpoint="a:1"),
            )
        )
