"""The pods of a Kubernetes job: machines with the names, variables and command that its manifest says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, Run
from tests.lab.machines import NodeProcess

from paceline.launch.launcher import LaunchSpec
from paceline_kubernetes.launcher import Kubernetes
from paceline_kubernetes.options import KubernetesOptions

pytestmark = pytest.mark.k8s


class Pods:
    """A job's pods, each on a machine of its own; they train up to where the run stands still."""

    def __init__(self, run: Run, nodes: tuple[int, int], *more: str) -> None:
        words = ("train", "small.py:Small", "--run-dir", str(run.directory.path), *OPTIONS, *PATIENT, *more)
        spec = LaunchSpec(
            command=("python", "-m", "paceline", *words),
            name="t",
            directory=Path("/state/t-1"),
            nodes=nodes,
            nproc=(2,),
            rank_launcher="agent",
            is_task=True,
            run=run.directory.path,
            python="python",
        )
        options = KubernetesOptions(kind="job", image="train:1", volume=(f"runs:{run.path}",))
        _, job = Kubernetes().render(spec, options).request
        [self._container] = job["spec"]["template"]["spec"]["containers"]
        self._run = run
        with run.lab.hosts.open("a") as hosts:  # what the headless service does
            hosts.writelines(f"{node.address} t-1-{index}.t-1\n" for index, node in enumerate(run.lab.nodes))

    def start(self, index: int) -> NodeProcess:
        env = {variable["name"]: variable["value"] for variable in self._container["env"]}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env |= {"JOB_COMPLETION_INDEX": str(index), "PATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return self._run.lab.nodes[index].start(self._container["command"], env=env)


def test_a_job_grows_and_shrinks(run: Run, undisturbed: str) -> None:
    """Nobody says `join`: the pod that comes has the command of those that are there."""
    pods = Pods(run, (1, 2))
    run.hold(12)
    first = pods.start(0)
    run.wait_for("checkpoint", lambda event: event["step"] == 10, first)
    second = pods.start(1)
    run.wait_for_joiners(2, first, second)
    run.step_until("group", lambda event: event["nodes"] == 2, first, second)
    second.send_signal(signal.SIGTERM)
    run.wait_for("scale", lambda event: event["nodes"] == 1, first)
    run.step_until("machines", lambda event: len(event["nodes"]) == 1, first)
    assert second.wait() == 75, second.text
    run.go_on()
    assert first.wait(90) == 0, first.text
    assert run.result()["model_sha256"] == undisturbed


@pytest.mark.slow
def test_the_first_pod_is_lost_and_replaced(run: Run, undisturbed: str) -> None:
    """The one that takes its name over finds another one leading, and joins it."""
    pods = Pods(run, (2, 2))
    first_node, second_node = run.lab.nodes
    run.hold(12)
    first, second = pods.start(0), pods.start(1)
    run.wait_for("checkpoint", lambda event: event["step"] == 10, first, second)
    first_node.kill()
    run.wait_for("group", lambda event: event["nodes"] == 1, second)
    first_node.boot()
    replacement = pods.start(0)
    run.wait_for_joiners(2, second, replacement, leader=second_node)
    run.step_until("group", lambda event: event["nodes"] == 2 and event["step"] > 12, second, replacement)
    run.go_on()
    assert second.wait(90) == 0, second.text
    assert replacement.wait(90) == 0, replacement.text
    assert run.result()["model_sha256"] == undisturbed


@pytest.mark.slow
def test_a_run_that_restarts_begins_with_pods_that_come_late(run: Run, undisturbed: str) -> None:
    """The second pod finds the first one waiting for it, and takes part from the beginning."""
    pods = Pods(run, (2, 2), "--recover", "restart")
    first = pods.start(0)
    run.wait_until(run.directory.agents.exists, "the first pod's agent")
    second = pods.start(1)
    assert first.wait(120) == 0, first.text
    assert second.wait(60) == 0, second.text
    assert run.result()["model_sha256"] == undisturbed
