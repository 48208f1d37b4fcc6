"""The files for Azure ML and Google's Vertex AI, compared whole, and what is said of submitting them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, get_launcher, make_options
from paceline_clouds.rendered import AzureMLOptions

AZURE = {"image": "registry.example/train:1", "compute": "gpus"}
PLACE = 'import os; os.write(1, f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
GOOGLE = {"image": "registry.example/train:1", "machine_type": "a2-highgpu-4g"}


def render(name: str, options: dict[str, Any], **fields: Any) -> str:
    described: dict[str, Any] = {
        "command": ("python", "t.py", "--note", "it's"),
        "name": "train",
        "directory": Path("/state/t-1"),
        "python": "python",
        "workdir": Path("/home/me/code"),
        **fields,
    }
    launcher = get_launcher(name)
    rendered = launcher.render(LaunchSpec(**described), make_options(launcher, options))
    [text] = rendered.files.values()
    assert isinstance(yaml.safe_load(text), dict)
    assert rendered.text == f"# /state/t-1/job.yaml\n{text}"
    return text


def task(run: str) -> dict[str, Any]:
    command = ("python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", run)
    return {"command": command, "run": Path(run), "is_task": True, "rank_launcher": "agent"}


def test_an_azure_job_on_two_machines() -> None:
    text = render(
        "azureml",
        AZURE,
        nodes=(2, 2),
        nproc=(4,),
        walltime_s=7200.0,
        env={"NOTE": "1"},
        **task("/azureml/run"),
    )
    command = (
        'PACELINE_NODE_RANK="$NODE_RANK" PACELINE_NODES=2 PACELINE_HOSTS="$MASTER_ADDR" env -u RANK '
        "-u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT -u TF_CONFIG "
        "python -P -m paceline.launch.node --rank-launcher agent --nodes 2 --nproc 4 -- python -m paceline train "
        "fashion-mnist --run-dir ${{outputs.run}} --recover none"
    )
    assert text == AZURE_TWO.replace("@COMMAND", json.dumps(command))


def test_an_azure_job_on_one_machine() -> None:
    assert render("azureml", AZURE) == AZURE_ONE


def test_azure_is_given_a_script_of_the_directory_that_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    azure, options = get_launcher("azureml"), AzureMLOptions(**AZURE)
    assert azure.remote_path(str(tmp_path / "t.py"), options) == azure.remote_path("t.py", options) == "t.py"
    with pytest.raises(
        ConfigError, match=r"this directory does not contain /.*/elsewhere.py.* Copy it into this directory"
    ):
        azure.remote_path(str(tmp_path.parent / "elsewhere.py"), options)


@pytest.mark.integration
def test_azures_word_for_a_machine_reaches_the_ranks(tmp_path: Path) -> None:
    """The command as Azure's shell runs it, on each of two machines, with all that Azure sets."""
    (tmp_path / "place.py").write_text(PLACE)
    command = (sys.executable, "place.py")
    text = render(
        "azureml", AZURE, command=command, python=sys.executable, nodes=(2, 2), nproc=(2,), rank_launcher="spawn"
    )
    printed = []
    for node in ("0", "1"):
        told = {
            "NODE_RANK": node,
            "RANK": node,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        done = subprocess.run(
            ["bash", "-c", yaml.safe_load(text)["command"]],
            env={**os.environ, **told},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout.splitlines()
    assert sorted(printed) == ["0 4", "1 4", "2 4", "3 4"]


def test_a_google_job() -> None:
    options = {"accelerator": "NVIDIA_TESLA_A100", "service_account": "trainer@project.example"}
    text = render(
        "google",
        {**GOOGLE, **options},
        nodes=(3, 3),
        nproc=(4,),
        gpus_per_node=4,
        walltime_s=7200.0,
        env={"NOTE": "1"},
        **task("/gcs/bucket/a"),
    )
    assert text == GOOGLE_THREE


@pytest.mark.parametrize(
    ("name", "options", "fields", "message"),
    [
        ("azureml", {"image": "i"}, {}, "needs --compute"),
        ("azureml", {"compute": "c"}, {}, "needs --image"),
        ("azureml", AZURE, {"nodes": (1, 2)}, "--nodes 1:2: --on azureml needs one number"),
        ("azureml", AZURE, task("/data/a"), "Leave out --run-dir"),
        ("azureml", AZURE, {"env": {"API_KEY": "x"}}, "key vault"),
        ("google", {"image": "i"}, {}, "needs --machine-type"),
        ("google", GOOGLE, {"gpus_per_node": 4}, "--accelerator TYPE and --gpus-per-node N need each other"),
        ("google", GOOGLE, task("/data/a"), "--run-dir must be in a bucket"),
        ("google", GOOGLE, {"env": {"DB_PASSWORD": "x"}}, "Secret Manager"),
    ],
)
def test_what_cannot_work_is_refused(name: str, options: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(name, options, **fields)


def test_submitting_says_the_clouds_own_command(
    run_processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "t.py").touch()
    options = ("--on", "azureml", "--image", "i", "--compute", "gpus")
    done = run_processes.paceline("launch", *options, "--", "t.py")
    assert done.returncode == 2
    [file] = (tmp_path / "state").rglob("job.yaml")
    assert f"az ml job create --file {file} --workspace-name" in done.stderr.replace("\n", "")
    options = ("--on", "google", "--image", "i", "--machine-type", "m", "--region", "europe-west4")
    done = run_processes.paceline("train", "fashion-mnist", *options, "--run-dir", "/gcs/b/a")
    assert done.returncode == 2
    assert "gcloud ai custom-jobs create --region=europe-west4" in done.stderr
    assert json.loads(run_processes.paceline("jobs", "--json").stdout) == []


AZURE_TWO = """\
"$schema": https://azuremlschemas.azureml.ms/latest/commandJob.schema.json
type: command
name: t-1
display_name: train
code: /home/me/code
command: @COMMAND
environment:
  image: registry.example/train:1
compute: azureml:gpus
resources:
  instance_count: 2
  shm_size: "8g"
distribution:
  type: pytorch
  process_count_per_instance: 1
environment_variables:
  NOTE: "1"
outputs:
  run:
    type: uri_folder
    mode: rw_mount
    path: azureml://datastores/workspaceblobstore/paths/runs/t-1
limits:
  timeout: 7200
"""

AZURE_ONE = """\
"$schema": https://azuremlschemas.azureml.ms/latest/commandJob.schema.json
type: command
name: t-1
display_name: train
code: /home/me/code
command: "python -P -m paceline.launch.node --rank-launcher torchrun --nproc 1 -- python t.py --note 'it'\\"'\\"'s'"
environment:
  image: registry.example/train:1
compute: azureml:gpus
resources:
  instance_count: 1
  shm_size: "8g"
"""

GOOGLE_THREE = """\
workerPoolSpecs:
  - machineSpec:
      machineType: a2-highgpu-4g
      acceleratorType: NVIDIA_TESLA_A100
      acceleratorCount: 4
    replicaCount: 1
    containerSpec:
      imageUri: registry.example/train:1
      command:
        - env
        - "-u"
        - RANK
        - "-u"
        - WORLD_SIZE
        - "-u"
        - LOCAL_RANK
        - "-u"
        - LOCAL_WORLD_SIZE
        - "-u"
        - MASTER_ADDR
        - "-u"
        - MASTER_PORT
        - "-u"
        - TF_CONFIG
        - python
        - "-P"
        - "-m"
        - paceline.launch.node
        - "--rank-launcher"
        - agent
        - "--nodes"
        - "3"
        - "--nproc"
        - "4"
        - "--"
        - python
        - "-m"
        - paceline
        - train
        - fashion-mnist
        - "--run-dir"
        - /gcs/bucket/a
        - "--recover"
        - none
      env:
        - name: NOTE
          value: "1"
  - machineSpec:
      machineType: a2-highgpu-4g
      acceleratorType: NVIDIA_TESLA_A100
      acceleratorCount: 4
    replicaCount: 2
    containerSpec:
      imageUri: registry.example/train:1
      command:
        - env
        - "-u"
        - RANK
        - "-u"
        - WORLD_SIZE
        - "-u"
        - LOCAL_RANK
        - "-u"
        - LOCAL_WORLD_SIZE
        - "-u"
        - MASTER_ADDR
        - "-u"
        - MASTER_PORT
        - "-u"
        - TF_CONFIG
        - python
        - "-P"
        - "-m"
        - paceline.launch.node
        - "--rank-launcher"
        - agent
        - "--nodes"
        - "3"
        - "--nproc"
        - "4"
        - "--"
        - python
        - "-m"
        - paceline
        - train
        - fashion-mnist
        - "--run-dir"
        - /gcs/bucket/a
        - "--recover"
        - none
      env:
        - name: NOTE
          value: "1"
scheduling:
  timeout: "7200s"
serviceAccount: "trainer@project.example"
"""
