"""Which machine this is, as each system says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.environment import NodeEnvironment, detect_node, expand_hosts
from paceline.core.errors import ConfigError

POOLS = {"pool0": ["a:2222"], "pool1": ["b:2222", "c:2222"]}


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, NodeEnvironment()),
        (
            {"PACELINE_NODE_RANK": "1", "PACELINE_HOSTS": "a,b"},
            NodeEnvironment(node_rank=1, nodes=2, hosts=("a", "b"), source="paceline"),
        ),
        (
            {"PET_NODE_RANK": "1", "PET_NNODES": "2:4", "PET_MASTER_ADDR": "job-node-0-0.job"},
            NodeEnvironment(node_rank=1, nodes=4, hosts=("job-node-0-0.job",), source="kubeflow"),
        ),
        (
            {
                "SM_CURRENT_HOST": "algo-2",
                "SM_HOSTS": '["algo-1", "algo-2"]',
                "TRAINING_JOB_NAME": "t",
            },
            NodeEnvironment(node_rank=1, nodes=2, hosts=("algo-1", "algo-2"), job_id="t", source="sagemaker"),
        ),
        (
            {"JOB_COMPLETION_INDEX": "2", "PACELINE_NODES": "3", "PACELINE_HOSTS": "j-0.j"},
            NodeEnvironment(node_rank=2, nodes=3, hosts=("j-0.j",), source="kubernetes"),
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "n[1-2]",
                "SLURM_NODEID": "1",
                "SLURM_JOB_ID": "7",
                "SLURM_RESTART_COUNT": "2",
            },
            NodeEnvironment(node_rank=1, nodes=2, hosts=("n1", "n2"), job_id="7.0.2", source="slurm"),
        ),
        (
            {"PET_NODE_RANK": "2", "PET_NNODES": "2", "PACELINE_NODES": "4", "PACELINE_HOSTS": "j-0.j,j-1.j"},
            NodeEnvironment(node_rank=2, nodes=4, hosts=("j-0.j", "j-1.j"), source="kubeflow"),
        ),
        (
            {"CLUSTER_SPEC": json.dumps({"cluster": POOLS, "task": {"type": "pool1", "index": 1}, "job": "j"})},
            NodeEnvironment(node_rank=2, nodes=3, hosts=("a", "b", "c"), job_id="j", source="vertex"),
        ),
        # The body of a batch script is no step: nothing there says that it is one of several machines.
        ({"SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}, NodeEnvironment()),
    ],
)
def test_each_system(environ: dict[str, str], node: NodeEnvironment) -> None:
    assert detect_node(environ) == node


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PACELINE_NODE_RANK": "x"}, "PACELINE_NODE_RANK must be a whole number, but is 'x'"),
        (
            {"PACELINE_NODE_RANK": "2", "PACELINE_NODES": "2"},
            "the node rank from paceline is 2, but must be between 0 and 1",
        ),
        ({"SM_CURRENT_HOST": "c", "SM_HOSTS": '["a"]'}, "SM_CURRENT_HOST='c' is not in SM_HOSTS"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}, "SLURM_NODEID is not set, but SLURM_STEP_ID=0"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_node(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("gpu[03-05,12],login1", ("gpu03", "gpu04", "gpu05", "gpu12", "login1")),
        ("r[1-2]n[09-10]", ("r1n09", "r1n10", "r2n09", "r2n10")),
        ("a[1-2]-ib,b", ("a1-ib", "a2-ib", "b")),
    ],
)
def test_node_lists_of_slurm(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-]", "n[a-b]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(ConfigError, match="the Slurm node list"):
        expand_hosts(text)


def test_sagemaker_says_it_in_a_file_where_its_toolkit_is_not_in_the_image(tmp_path: Path) -> None:
    environ = {"TRAINING_JOB_NAME": "t", "SAGEMAKER_BASE_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"resourceconfig.json does not name this host"):
        detect_node(environ)
    file = tmp_path / "input/config/resourceconfig.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-2", "algo-1"], "network_interface_name": "eth0"}')
    node = NodeEnvironment(node_rank=1, nodes=2, hosts=("algo-1", "algo-2"), job_id="t", source="sagemaker")
    assert detect_node(environ) == node
    file.write_text('{"current_host": "algo-3", "hosts": ["algo-1"]}')
    with pytest.raises(ConfigError, match="'algo-3', is not one of the hosts"):
        detect_node(environ)
