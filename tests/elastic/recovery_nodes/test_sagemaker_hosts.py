"""The hosts of a SageMaker job: machines that share nothing but what S3 brings them at the start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, Run
from tests.lab.machines import NodeProcess

from paceline.launch.launcher import LaunchSpec
from paceline.runs.directory import RunDirectory
from paceline_clouds.options import SageMakerOptions
from paceline_clouds.sagemaker import CHECKPOINTS, SOURCE, SageMaker, pack

pytestmark = pytest.mark.aws


class Hosts:
    """A job's hosts, each with a directory of its own in the place of /opt/ml."""

    def __init__(self, run: Run) -> None:
        words = ("train", "small.py:Small", "--run-dir", CHECKPOINTS, *OPTIONS, *PATIENT)
        spec = LaunchSpec(
            command=("python", "-m", "paceline", *words),
            name="t",
            directory=Path("/state/t-1"),
            nodes=(2, 2),
            nproc=(2,),
            rank_launcher="agent",
            is_task=True,
            run=Path(CHECKPOINTS),
            python="python",
        )
        options = SageMakerOptions(
            image="train:1",
            role="arn:aws:iam::123456789012:role/training",
            instance_type="ml.g5.12xlarge",
            s3="s3://bucket/prefix",
        )
        self._start = SageMaker().render(spec, options).files["start.sh"]
        self._run = run
        self._source = run.path / "source"
        self._source.mkdir()
        shutil.copy(run.path / "small.py", self._source)
        (self._source / "hold").write_text("12")
        with run.lab.hosts.open("a") as hosts:
            hosts.writelines(f"{node.address} algo-{i + 1}\n" for i, node in enumerate(run.lab.nodes))

    def go_on(self) -> None:
        """Stand still no more: here, and from the next start's source on."""
        (self._source / "hold").unlink()
        for index in (0, 1):
            (self._run.path / f"ml-{index}/code/hold").unlink()

    def checkpoints(self, index: int) -> Path:
        return self._run.path / f"ml-{index}/checkpoints"

    def start(self, index: int) -> NodeProcess:
        base = self._run.path / f"ml-{index}"
        for part in ("input/data/code", "input/config", "checkpoints"):
            (base / part).mkdir(parents=True, exist_ok=True)
        (base / "input/data/code" / SOURCE).write_bytes(pack(self._source))
        config = {"current_host": f"algo-{index + 1}", "hosts": ["algo-1", "algo-2"]}
        (base / "input/config/resourceconfig.json").write_text(json.dumps(config))
        env = {
            "TRAINING_JOB_NAME": "t-1",
            "SAGEMAKER_BASE_DIR": str(base),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = ["bash", "-c", self._start.replace("/opt/ml", str(base))]
        return self._run.lab.nodes[index].start(command, env=env)


@pytest.mark.slow
def test_a_spot_job_goes_on_after_its_interruption(run: Run, undisturbed: str) -> None:
    hosts = Hosts(run)
    directory = RunDirectory(hosts.checkpoints(0))
    processes = [hosts.start(0), hosts.start(1)]

    def trains() -> bool:
        assert all(process.poll() is None for process in processes), [p.text for p in processes]
        return directory.events.exists() and any(e["event"] == "checkpoint" for e in directory.read_events())

    run.wait_until(trains, "a checkpoint")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    hosts.go_on()
    assert [process.wait() for process in processes] == [75, 75], [process.text for process in processes]
    assert directory.read_result() is None
    # S3 keeps what both have written, and gives it to both.
    shutil.copytree(hosts.checkpoints(0), hosts.checkpoints(1), dirs_exist_ok=True)
    processes = [hosts.start(0), hosts.start(1)]
    assert [process.wait(120) for process in processes] == [0, 0], [process.text for process in processes]
    result = directory.read_result()
    assert result is not None
    assert result["model_sha256"] == undisturbed
