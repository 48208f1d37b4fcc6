"""What tests of runs on several machines share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, TASK, Run
from tests.lab import etcd
from tests.lab.machines import Machines


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the same run, of one process that nobody disturbed."""
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "small.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, "--run-dir", "run"]
    subprocess.run(command, cwd=path, capture_output=True, timeout=300, check=True)
    sha256: str = json.loads((path / "run/result.json").read_text())["model_sha256"]
    return sha256


@pytest.fixture
def coordinator(request: pytest.FixtureRequest) -> str:
    """What decides on the leader and the nodes: the agents, or as the test's parameter says."""
    return getattr(request, "param", "embedded")


@pytest.fixture(params=[2])
def run(
    request: pytest.FixtureRequest, machines: Machines, wait_until: Callable[..., None], coordinator: str
) -> Iterator[Run]:
    """A run on two machines, or as many as the test's parameter says."""
    lab = machines(request.param)[0].lab
    if coordinator == "embedded":
        yield Run(lab, wait_until)
        return
    reason = etcd.why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = etcd.EtcdCluster(lab, wait_until)
    try:
        yield Run(lab, wait_until, cluster)
    finally:
        cluster.end()
