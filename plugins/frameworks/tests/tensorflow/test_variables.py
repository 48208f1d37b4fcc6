"""The variables that tell TensorFlow's processes where the others are."""

from __future__ import annotations

import json

import pytest
from tests.launch.test_contracts import SECOND_OF_FOUR

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.launch.rank_variables import env_style_variables
from paceline_frameworks.tensorflow import parse_roles


def test_tensorflow_names_every_worker_and_this_one() -> None:
    variables = env_style_variables("tensorflow", SECOND_OF_FOUR, hosts=("a", "b"))
    assert json.loads(variables["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:4000", "a:4001", "b:4000", "b:4001"]},
        "task": {"type": "worker", "index": 2},
    }


def test_tensorflow_with_roles() -> None:
    """As TensorFlow wants it: an evaluator is no member of the cluster, and counts by itself."""
    roles = parse_roles("chief=1,worker=1,ps=1,evaluator=1", 4)
    configs = [
        json.loads(
            env_style_variables(
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
        env_style_variables("tensorflow", SECOND_OF_FOUR)
    with pytest.raises(ConfigError, match="--roles names 1 processes, but there are 4"):
        env_style_variables("tensorflow", SECOND_OF_FOUR, hosts=("a", "b"), roles=("chief",))


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
