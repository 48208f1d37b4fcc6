"""The variables by which each framework's processes know their place."""

from __future__ import annotations

import json

import pytest

from paceline.distributed.environment import Environment
from paceline.errors import ConfigError
from paceline.launchers.contracts import contract_variables, expand_placeholders, parse_roles

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
    assert contract_variables("torch", SECOND_OF_FOUR) == {
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
    assert contract_variables("none", SECOND_OF_FOUR) == {}


def test_tensorflow_names_every_worker_and_this_one() -> None:
    variables = contract_variables("tensorflow", SECOND_OF_FOUR, hosts=("a", "b"))
    assert json.loads(variables["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:4000", "a:4001", "b:4000", "b:4001"]},
        "task": {"type": "worker", "index": 2},
    }


def test_tensorflow_with_roles() -> None:
    """As TensorFlow wants it: an evaluator is no member of the cluster, and counts by itself."""
    roles = parse_roles("chief=1,worker=1,ps=1,evaluator=1", 4)
    configs = [
        json.loads(
            contract_variables(
                "tensorflow",
                Environment(
                    source="variables",
                    rank=rank,
                    world_size=4,
                    local_rank=rank,
                    local_world_size=4,
                    master_addr="127.0.0.1",
                    master_port=4000,
                ),
                roles=roles,
            )["TF_CONFIG"]
        )
        for rank in range(4)
    ]
    assert {json.dumps(config["cluster"]) for config in configs} == {
        json.dumps({"chief": ["127.0.0.1:4000"], "worker": ["127.0.0.1:4001"], "ps": ["127.0.0.1:4002"]})
    }
    assert [(config["task"]["type"], config["task"]["index"]) for config in configs] == [
        ("chief", 0),
        ("worker", 0),
        ("ps", 0),
        ("evaluator", 0),
    ]


def test_what_tensorflow_cannot_be_told() -> None:
    with pytest.raises(ConfigError, match="needs the addresses of all 2 machines, but only 1 is known: a"):
        contract_variables("tensorflow", SECOND_OF_FOUR)
    with pytest.raises(ConfigError, match="--roles names 1 processes, but there are 4"):
        contract_variables("tensorflow", SECOND_OF_FOUR, hosts=("a", "b"), roles=("chief",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boss=1", "with the roles chief, worker, ps, evaluator, but is 'boss=1'"),
        ("worker=x", "must be such as chief=1,worker=2"),
        ("worker=3", "names 3 processes, but 2 are started"),
        ("chief=2", "there can be only one chief"),
    ],
)
def test_wrong_roles(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_roles(text, 2)


def test_only_their_own_launchers_keep_these() -> None:
    with pytest.raises(ConfigError, match=r"kept by mpirun alone\. Use --inner mpi, or --on mpi"):
        contract_variables("mpi", SECOND_OF_FOUR)
    with pytest.raises(ConfigError, match="kept by horovodrun alone"):
        contract_variables("horovod", SECOND_OF_FOUR)


def test_placeholders_leave_other_braces_alone() -> None:
    command = ("x", "--url=tcp://{master_addr}:{master_port}", "{node_rank}/{nnodes}", '{"a": {}}')
    assert expand_placeholders(command, master_addr="a", master_port=4, node_rank=1, nodes=2) == (
        "x",
        "--url=tcp://a:4",
        "1/2",
        '{"a": {}}',
    )
