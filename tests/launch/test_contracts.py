"""The variables by which each framework's processes know their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.launch.rank_variables import env_style_variables, expand_placeholders

SECOND_OF_FOUR = Environment(
    source="variables",
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=1,
    nodes=2,
    master_addr="a",
    master_port=4000,
)


def test_torch() -> None:
    assert env_style_variables("torch", SECOND_OF_FOUR) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "4000",
    }


def test_none() -> None:
    assert env_style_variables("none", SECOND_OF_FOUR) == {}


def test_only_their_own_launchers_keep_these() -> None:
    with pytest.raises(ConfigError, match=r"kept by mpirun alone\. Use --rank-launcher mpi, or --on mpi"):
        env_style_variables("mpi", SECOND_OF_FOUR)
    with pytest.raises(ConfigError, match="kept by horovodrun alone"):
        env_style_variables("horovod", SECOND_OF_FOUR)


@pytest.fixture
def places(run_processes: Any) -> Callable[..., list[str]]:
    """What a process is told that ``launchers.rank`` becomes, under a launcher's variables."""

    def start(environ: Mapping[str, str], *options: str) -> list[str]:
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        shown = " ".join(f"${name}" for name in names)
        done = run_processes.run(
            [
                *(sys.executable, "-m", "paceline.launch.rank", "--env-style", "torch", *options),
                *("--", "sh", "-c", f"echo {shown} {{node_rank}}/{{nnodes}}"),
            ],
            env=environ,
        )
        assert done.returncode == 0, done.stderr
        return list(done.stdout.split())

    return start


def test_a_rank_is_who_its_launcher_says_not_a_profile_or_an_image(places: Callable[..., list[str]]) -> None:
    of_the_pod = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    of_the_pod |= {"MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"}
    of_mpi = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    of_mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpi.items()} | {"PMIX_NAMESPACE": "job"}
    found = places({**of_the_pod, **of_mpi})
    assert found == places(of_mpi)
    assert [*found[:5], found[6]] == ["1", "2", "0", "1", "127.0.0.1", "0/1"]
    assert found[5] != "29500"


@pytest.mark.parametrize(("rank", "machine"), [(0, "0"), (1, "0"), (2, "1"), (3, "2"), (4, "2")])
@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD_", "HOROVOD_"])
def test_machines_are_numbered_where_they_have_different_numbers_of_ranks(
    places: Callable[..., list[str]], prefix: str, rank: int, machine: str
) -> None:
    local, size = [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)][rank]
    values = {"RANK": rank, "SIZE": 5, "LOCAL_RANK": local, "LOCAL_SIZE": size}
    # Horovod counts the machines that have a process of this local rank.
    values |= {"CROSS_RANK": int(machine) - local * (machine == "2"), "CROSS_SIZE": 2 if local else 3}
    environ = {f"{prefix}{name}": str(value) for name, value in values.items()}
    found = places(environ, "--nproc", "2,1,2", "--master-addr", "a", "--master-port", "4000")
    assert found == [str(rank), "5", machine, "3", "a", "4000", f"{machine}/3"]


def test_ranks_that_the_launcher_did_not_number_are_told(run_processes: Any) -> None:
    words = ("--env-style", "torch", "--nproc", "2,1", "--master-addr", "a", "--", "true")
    done = run_processes.run([sys.executable, "-m", "paceline.launch.rank", *words])
    assert done.returncode == 2
    assert "3 ranks are wanted, 2,1 by machine, but the launcher says that there are 1" in done.stderr


def test_placeholders_leave_other_braces_alone() -> None:
    command = ("x", "--url=tcp://{master_addr}:{master_port}", "{node_rank}/{nnodes}", '{"a": {}}', "{{node_rank}}")
    place = {"master_port": 4, "node_rank": 1, "nnodes": 2}
    assert expand_placeholders(("{local_rank}", "{{local_rank}}"), master_addr="a", local_rank=3, **place) == (
        "3",
        "{local_rank}",
    )
    in_a_shell = ("for rank in 1 2; do echo ${rank} $local_rank ${master_addr}; done",)
    assert expand_placeholders(in_a_shell, master_addr="a", rank=0, **place) == in_a_shell
    of_a_rank = ("{local_rank} {rank} {world_size}", "{{rank}}")
    assert expand_placeholders(of_a_rank, master_addr="a", keep_literals=True, **place) == of_a_rank
    assert expand_placeholders(of_a_rank, master_addr="a", local_rank=0, rank=2, world_size=4, **place) == (
        "0 2 4",
        "{rank}",
    )
    assert expand_placeholders(command, master_addr="a", **place) == (
        "x",
        "--url=tcp://a:4",
        "1/2",
        '{"a": {}}',
        "{node_rank}",
    )
