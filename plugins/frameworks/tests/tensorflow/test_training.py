"""TensorFlow's own strategies, in plain scripts that know nothing of Paceline: the examples."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lab.slurm_cluster import SlurmCluster
from tests.lab.sshd import SshLab
from tests.processes import Processes

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]
OPTIONS = ("--env-style", "tensorflow", "--threads", "1", "--env", "TF_CPP_MIN_LOG_LEVEL=3")

# A guide's of those days; only its data are other ones, which need no network.
TF_2_0 = """
import tensorflow as tf
import numpy as np

strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
global_batch_size = 64 * 2

def mnist_dataset(batch_size):
    draw = np.random.default_rng(1)
    x_train, y_train = draw.random((2000, 28, 28), dtype=np.float32), draw.integers(0, 10, 2000)
    return tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60000).repeat().batch(batch_size)

def build_and_compile_cnn_model():
    model = tf.keras.Sequential([
        tf.keras.Input(shape=(28, 28)),
        tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
        tf.keras.layers.Conv2D(32, 3, activation='relu'),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation='relu'),
        tf.keras.layers.Dense(10)
    ])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
        metrics=['accuracy'])
    return model

dataset = mnist_dataset(global_batch_size)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
multi_worker_model.fit(dataset, epochs=1, steps_per_epoch=5, verbose=2)
"""


def spawn(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "launch", "--on", "spawn", *OPTIONS, *arguments]


def printed(text: str) -> list[dict[str, Any]]:
    """The JSON objects, each on a line of its own behind a machine's name or none."""
    lines = (line.rpartition(" | ")[2] for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def state(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.mark.slow
def test_mirrored(run_processes: Processes, tmp_path: Path) -> None:
    script = str(EXAMPLES / "tensorflow_mirrored.py")
    done = run_processes.run(spawn("--", script, "--replicas", "2", "--steps", "40"), env=state(tmp_path))
    assert done.returncode == 0, done.stderr
    [seen] = printed(done.stdout)
    assert seen["replicas"] == 2
    assert seen["loss"] < 2.0  # of ln 10 = 2.3 at the start


@pytest.mark.ssh
def test_workers_on_two_machines(ssh_machines: Callable[[int], SshLab]) -> None:
    lab = ssh_machines(2)
    script = EXAMPLES / "tensorflow_multiworker.py"
    launcher = lab.launch(lab.nodes[0], "node0,node1", *OPTIONS, "--", script, "--steps", "20")
    assert launcher.wait(120) == 0, launcher.text
    first, second = sorted(printed(launcher.text), key=lambda seen: seen["worker"])
    assert (first.pop("worker"), second.pop("worker")) == (0, 1)
    assert first == second
    assert first["of"] == 2
    assert first["loss"] < 2.0


@pytest.mark.slow
def test_fit_of_tf_keras(run_processes: Processes, tmp_path: Path) -> None:
    script = str(EXAMPLES / "tensorflow_multiworker_tf_keras.py")
    done = run_processes.run(spawn("--nproc", "2", "--", script, "--steps", "40"), env=state(tmp_path), timeout_s=120)
    assert done.returncode == 0, done.stderr
    first, second = sorted(printed(done.stdout), key=lambda seen: seen["worker"])
    assert first["loss"] == second["loss"] < 2.0


@pytest.mark.slow
def test_a_script_of_tensorflow_2_0_runs_unchanged(run_processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "tf_multi_keras.py").write_text(TF_2_0)
    legacy = ("--env", "TF_USE_LEGACY_KERAS=1")
    done = run_processes.run(
        spawn("--nproc", "2", *legacy, "--", "tf_multi_keras.py"), env=state(tmp_path), timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if "loss" in line]
    assert first.partition("loss: ")[2].split()[0] == second.partition("loss: ")[2].split()[0]


@pytest.mark.slow
def test_workers_that_are_asked_to_stop(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """They ignore SIGTERM, and end all the same; ``nothing_leaks`` looks."""
    script = tmp_path / "train.py"
    text = (EXAMPLES / "tensorflow_multiworker.py").read_text()
    at_work = 'Path(f"at-work-{strategy.cluster_resolver.task_id}").touch()\n'
    loop = "    for _ in range(options.steps):\n        loss = step(next(batches))\n"
    assert loop in text
    script.write_text(text.replace(loop, f"{loop}        {at_work}"))
    started = run_processes.start(spawn("--nproc", "2", "--", "train.py", "--steps", "100000"), env=state(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("at-work-*"))) == 2, "both workers", timeout_s=90)
    started.send_signal(signal.SIGTERM)
    done = run_processes.finish(started, timeout_s=60)
    assert done.returncode == 143, done.stderr


@pytest.mark.slow
def test_parameter_server_with_an_evaluator(run_processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    script = str(EXAMPLES / "tensorflow_parameter_server.py")
    roles = ("--nproc", "5", "--roles", "chief=1,worker=2,ps=1,evaluator=1")
    done = run_processes.run(
        spawn(*roles, "--", script, "--checkpoints", "checkpoints"), env=state(tmp_path), timeout_s=180
    )
    assert done.returncode == 0, done.stderr
    seen = {line["role"]: line for line in printed(done.stdout)}
    assert seen["chief"]["last"] < 1.0 < seen["chief"]["first"]
    assert seen["evaluator"]["step"] == 200
    assert seen["evaluator"]["loss"] < 1.0


@pytest.mark.slow
@pytest.mark.ssh
def test_parameter_server_on_two_machines(ssh_machines: Callable[[int], SshLab]) -> None:
    lab = ssh_machines(2)
    script = EXAMPLES / "tensorflow_parameter_server.py"
    roles = ("--roles", "chief=1,ps=1,worker=2")
    launcher = lab.launch(lab.nodes[0], "node0:2,node1:2", *OPTIONS, *roles, "--", script)
    assert launcher.wait(180) == 0, launcher.text
    [chief] = printed(launcher.text)
    assert chief["last"] < 1.0 < chief["first"]


@pytest.mark.slow
@pytest.mark.slurm
def test_mirrored_in_a_slurm_job_of_one_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--gpus-per-node", "2", "--wait")
    done = slurm_cluster.run(
        *(*command, *OPTIONS, "--", EXAMPLES / "tensorflow_mirrored.py"), env=state(tmp_path), timeout_s=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = printed(done.stdout)
    assert line["replicas"] == 2
    assert line["loss"] < 2.0


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize(
    ("script", "nproc", "more"),
    [
        ("tensorflow_multiworker.py", "1", ()),
        ("tensorflow_parameter_server.py", "2", ("--roles", "chief=1,ps=1,worker=2")),
    ],
)
def test_on_slurm(slurm_cluster: SlurmCluster, tmp_path: Path, script: str, nproc: str, more: tuple[str, ...]) -> None:
    command = (sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--nodes", "2", "--nproc", nproc)
    done = slurm_cluster.run(
        *(*command, *OPTIONS, *more, "--wait", "--", EXAMPLES / script), env=state(tmp_path), timeout_s=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = printed(done.stdout)
    assert [line.get("worker", line.get("role")) for line in seen] in ([0, 1], [1, 0], ["chief"])
    assert all(line.get("last", line.get("loss")) < 2.0 for line in seen)
