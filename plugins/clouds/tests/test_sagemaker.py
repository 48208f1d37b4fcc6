"""``--on sagemaker``: the request compared whole, made at moto's SageMaker, and followed there."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ReadTimeoutError
from botocore.httpsession import URLLib3Session
from moto.core.responses import ActionResult, EmptyResult
from moto.sagemaker.exceptions import ResourceInUseException
from moto.sagemaker.models import FakeTrainingJob, sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.launcher import LaunchSpec, RenderedJob
from paceline_clouds.options import SageMakerOptions
from paceline_clouds.sagemaker import LOG_GROUP, SageMaker, pack

pytestmark = pytest.mark.aws

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"
ROLE = "arn:aws:iam::123456789012:role/training"
REGION = "us-east-1"
NAME = "train-1"
RUN = Path("/opt/ml/checkpoints")
TASK = ("python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", str(RUN))


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """moto's server, with a bucket; what the client libraries need to find it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SageMakerResponse, "stop_training_job", stop_training_job, raising=False)
    monkeypatch.setattr(SageMakerResponse, "create_training_job", create_training_job)
    try:
        boto3.Session().client("s3").create_bucket(Bucket="bucket")
        yield f"http://{host}:{port}"
    finally:
        urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
        server.stop()


def stop_training_job(self: SageMakerResponse) -> EmptyResult:
    """StopTrainingJob, which moto does not have."""
    training_job(self._get_param("TrainingJobName")).training_job_status = "Stopped"
    return EmptyResult()


moto_creates = SageMakerResponse.create_training_job


def create_training_job(self: SageMakerResponse) -> ActionResult:
    """moto takes a name twice, which SageMaker does not."""
    if self._get_param("TrainingJobName") in self.sagemaker_backend.training_jobs:
        raise ResourceInUseException("Training job names must be unique within an AWS account and region")
    return moto_creates(self)


def training_job(name: str) -> FakeTrainingJob:
    job: FakeTrainingJob = sagemaker_backends["123456789012"][REGION].training_jobs[name]
    return job


def at_work(name: str, secondary: str) -> FakeTrainingJob:
    """moto's jobs have ended as soon as they are made."""
    job = training_job(name)
    job.training_job_status, job.secondary_status = "InProgress", secondary
    return job


def render(options: dict[str, Any] | None = None, **fields: Any) -> RenderedJob:
    described: dict[str, Any] = {
        "command": ("python", "train.py", "--lr", "0.1"),
        "name": "train",
        "directory": Path(f"/state/{NAME}"),
        "python": "python",
        **fields,
    }
    given = {"image": IMAGE, "role": ROLE, "instance_type": "ml.g5.12xlarge", "s3": "s3://bucket/prefix"}
    return SageMaker().render(LaunchSpec(**described), SageMakerOptions(**{**given, **(options or {})}))


def test_a_task_on_spot_instances_compared_whole() -> None:
    rendered = render(
        {"spot": True, "max_wait": "2h", "checkpoints": "s3://bucket/runs/a", "tag": ("team=vision",)},
        nodes=(2, 2),
        nproc=(4,),
        rank_launcher="agent",
        is_task=True,
        run=RUN,
        command=TASK,
        walltime_s=3600.0,
        env={"NOTE": "it's"},
        threads=2,
    )
    assert rendered.text == SPOT.replace("@TASK", " ".join(TASK))


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        ("pytorchddp", {"sagemaker_pytorch_ddp_enabled": "true"}),
        ("torch_distributed", {"sagemaker_torch_distributed_enabled": "true"}),
        (
            "smdistributed",
            {
                "sagemaker_distributed_dataparallel_enabled": "true",
                "sagemaker_distributed_dataparallel_custom_mpi_options": '""',
            },
        ),
    ],
)
def test_each_of_sagemakers_distributions(distribution: str, said: dict[str, str]) -> None:
    rendered = render({"distribution": distribution}, nodes=(2, 2), command=("python", "t.py", "--lr", "0.1", "--n=2"))
    assert list(rendered.files) == ["training-job.json"]
    assert json.loads(rendered.files["training-job.json"]) == {
        "TrainingJobName": NAME,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        "HyperParameters": {
            "sagemaker_program": '"t.py"',
            "sagemaker_submit_directory": '"s3://bucket/prefix/train-1/source/sourcedir.tar.gz"',
            "sagemaker_job_name": '"train-1"',
            "sagemaker_container_log_level": "20",
            "sagemaker_instance_type": '"ml.g5.12xlarge"',
            **said,
            "lr": '"0.1"',
            "n": '"2"',
        },
        "ResourceConfig": {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/prefix/"},
    }


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"image": None}, {}, "--on sagemaker needs --image"),
        ({"role": None}, {}, "--on sagemaker needs --role"),
        ({"role": "training"}, {}, "--role must be such as arn:aws:iam"),
        ({"instance_type": "p4d"}, {}, "--instance-type must be such as ml.g5.12xlarge"),
        ({"s3": "bucket/prefix"}, {}, "--s3 must be s3://BUCKET/PREFIX"),
        ({"distribution": "horovod"}, {}, "one of pytorchddp, torch_distributed, smdistributed"),
        ({"tag": ("vision",)}, {}, "--tag must be KEY=VALUE"),
        ({"max_wait": "soon"}, {}, "max"),
        ({}, {"directory": Path("/state/a_b")}, "Give another --name"),
        ({}, {"nodes": (1, 2)}, "--nodes 1:2: --on sagemaker needs one number"),
        ({}, {"gpus_per_node": 4}, "--gpus-per-node is not supported"),
        ({}, {"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "Secrets Manager"),
        ({}, {"run": Path("/data"), "is_task": True}, "--run-dir /data"),
        (
            {},
            {"command": (*TASK, "--recover", "inplace"), "is_task": True, "run": RUN, "nodes": (2, 2)},
            "--recover inplace on several nodes",
        ),
        ({"distribution": "pytorchddp"}, {"is_task": True, "run": RUN}, "starts scripts only, but this is a task"),
        ({"distribution": "pytorchddp"}, {"nproc": (2,)}, "one process per GPU"),
        ({"distribution": "pytorchddp"}, {"command": ("./a.out",)}, "starts a .py file"),
        ({"distribution": "pytorchddp"}, {"command": ("t.py", "--fast")}, "which --fast is not"),
        ({"distribution": "pytorchddp"}, {"command": ("t.py", "data")}, "which data is not"),
        ({"distribution": "pytorchddp"}, {"command": ("t.py", "--a=1", "--a=2")}, "which --a is not"),
    ],
)
def test_what_sagemaker_would_refuse_is_refused_before(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options, **fields)


def test_a_job_from_its_submission_to_its_end(
    aws: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_clouds.sagemaker._POLL_S", 0.01)
    (tmp_path / "train.py").write_text("print('hello')\n")
    for left_out in (".git", "runs", "__pycache__"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "file").write_text("no")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").touch()
    job = SageMaker().submit(render(nodes=(2, 2), workdir=tmp_path))
    assert job.reference["region"] == REGION  # which was not given, and may not be the configured one later
    again = SageMaker().reopen(json.loads(json.dumps(job.reference)))

    s3 = boto3.Session().client("s3")
    keys = [kept["Key"] for kept in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    assert keys == [f"prefix/{NAME}/source/{file}" for file in ("sourcedir.tar.gz", "start.sh")]
    packed = s3.get_object(Bucket="bucket", Key=keys[0])["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [name for name in tar.getnames() if "state" not in name] == ["package/module.py", "train.py"]

    kept = at_work(NAME, "LaunchingMLInstances")
    assert (again.status().state, again.status().detail) == ("pending", "LaunchingMLInstances")
    assert list(again.logs()) == [], "nobody has printed anything yet"
    logs = boto3.Session().client("logs")
    logs.create_log_group(logGroupName=LOG_GROUP)
    for stream, message in (
        (f"{NAME}/algo-1-1", "first"),
        (f"{NAME}/algo-2-1", "second"),
        ("other/algo-1-1", "no"),
    ):
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        events = [{"timestamp": int(time.time() * 1000), "message": message}]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)
    kept.secondary_status = "Training"
    assert (again.status().state, again.status().detail) == ("running", "Training")
    followed = again.logs(follow=True)
    assert {next(followed), next(followed)} == {"algo-1 | first", "algo-2 | second"}

    kept.training_job_status, kept.failure_reason = "Failed", "AlgorithmError: , exit code: 3"
    assert list(followed) == []
    assert (again.status().state, again.status().exit_code) == ("failed", 3)
    assert again.wait() == 3
    assert "AlgorithmError" in capfd.readouterr().err
    kept.training_job_status = "Completed"
    assert (again.status().state, again.wait()) == ("succeeded", 0)


def test_lines_of_a_machine_that_come_late_are_shown(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_clouds.sagemaker._POLL_S", 0.01)
    job = SageMaker().submit(render(nodes=(2, 2), workdir=empty(tmp_path)))
    kept = at_work(NAME, "Training")
    logs, now = boto3.Session().client("logs"), int(time.time() * 1000)
    logs.create_log_group(logGroupName=LOG_GROUP)

    def arrive(stream: str, lines: dict[int, str]) -> None:
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{NAME}/{stream}")
        events = [{"timestamp": now + after_ms, "message": line} for after_ms, line in lines.items()]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=f"{NAME}/{stream}", logEvents=events)

    arrive("algo-1-1", {-9000: "step 1", -1000: "lost algo-2"})
    followed = job.logs(follow=True)
    assert [next(followed), next(followed)] == ["algo-1 | step 1", "algo-1 | lost algo-2"]
    arrive("algo-2-1", {-6000: "Traceback", -500: "exit 1"})
    kept.training_job_status = "Failed"
    assert list(followed) == ["algo-2 | Traceback", "algo-2 | exit 1"]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(LaunchError, match=r"pip install 'boto3<"):
        SageMaker().submit(render(workdir=tmp_path))


def test_start_sh_unpacks_the_source_and_becomes_the_command(tmp_path: Path) -> None:
    """As it is, but for the places, which are SageMaker's."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").write_text(
        "import os, sys\n"
        "words = [os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]]\n"
        "os.write(1, ' '.join(words).encode() + b'\\n')\n"
    )
    data = tmp_path / "ml/input/data/code"
    data.mkdir(parents=True)
    (data / "sourcedir.tar.gz").write_bytes(pack(tmp_path / "source"))
    config = {"current_host": "algo-1", "hosts": ["algo-1"]}
    (tmp_path / "ml/input/config").mkdir()
    (tmp_path / "ml/input/config/resourceconfig.json").write_text(json.dumps(config))
    command = (sys.executable, "train.py", "--name", "a b")
    rendered = render(python=sys.executable, command=command, rank_launcher="spawn", nproc=(2,))
    start = rendered.files["start.sh"].replace("/opt/ml", str(tmp_path / "ml"))
    done = subprocess.run(
        ["/bin/bash", "-c", start],
        env={**os.environ, "TRAINING_JOB_NAME": NAME, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 --name a b", "1 2 --name a b"]


def test_the_command_line(aws: str, run_processes: Any, tmp_path: Path) -> None:
    options = ("--on", "sagemaker", "--image", IMAGE, "--role", ROLE, "--instance-type", "ml.g5.12xlarge")
    submitted = run_processes.paceline(
        *(
            "train",
            "fashion-mnist",
            *options,
            "--s3",
            "s3://bucket/prefix",
            "--nodes",
            "2",
            "--spot",
            "--json",
        )
    )
    assert submitted.returncode == 0, submitted.stderr
    name = json.loads(submitted.stdout)["reference"]["id"]
    kept = at_work(name, "Training")
    assert kept.enable_managed_spot_training
    assert kept.checkpoint_config == {
        "S3Uri": f"s3://bucket/prefix/{name}/checkpoints",
        "LocalPath": str(RUN),
    }
    assert run_processes.paceline("cancel", name).returncode == 0
    ended = run_processes.paceline("status", name, "--json")
    assert json.loads(ended.stdout)["status"]["state"] == "cancelled"
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("no bucket", r"refused to upload.*NoSuchBucket.*Create the bucket"),
        ("the same name", r"refused to create the training job train-1: ResourceInUse.*another --name"),
        ("no credentials", r"Unable to locate credentials. Run `aws configure`"),
        ("half of them", r"AWS is not configured: Partial credentials.*Set AWS_PROFILE, or run `aws configure`"),
        ("no profile", r"The config profile \(nowhere\) could not be found\. Set AWS_PROFILE"),
        ("no region", r"You must specify a region\. Give --region, or run `aws configure`"),
        ("no answer", r"Could not connect to the endpoint URL.*Check the network and --region"),
    ],
)
def test_a_refusal_is_passed_on_and_leaves_nothing(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, message: str
) -> None:
    workdir = tmp_path / "source"
    workdir.mkdir()
    options: dict[str, Any] = {}
    s3 = boto3.Session().client("s3")
    match trouble:
        case "no bucket":
            options["s3"] = "s3://nobody-has-it/prefix"
        case "the same name":
            others = render({"s3": "s3://bucket/others"})
            boto3.Session().client("sagemaker").create_training_job(**others.request)
        case "no credentials":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        case "half of them":
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        case "no profile":
            monkeypatch.setenv("AWS_PROFILE", "nowhere")
        case "no region":
            monkeypatch.delenv("AWS_DEFAULT_REGION")
        case "no answer":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(LaunchError, match=message):
        SageMaker().submit(render(options, workdir=workdir))
    assert "Contents" not in s3.list_objects_v2(Bucket="bucket")


def uploaded() -> list[str]:
    """The names of the files in the bucket."""
    listed = boto3.Session().client("s3").list_objects_v2(Bucket="bucket")
    return [kept["Key"].rpartition("/")[2] for kept in listed.get("Contents", [])]


@pytest.mark.parametrize("distribution", [None, "torch_distributed"])
def test_a_job_that_was_made_is_found_though_the_answer_was_lost(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str | None
) -> None:
    lose_answers(monkeypatch, "CreateTrainingJob")
    job = SageMaker().submit(render({"distribution": distribution}, workdir=empty(tmp_path)))
    assert job.status().ended, "as moto's jobs have as soon as they are made"
    assert uploaded() == (["sourcedir.tar.gz", "start.sh"] if distribution is None else ["sourcedir.tar.gz"])


def test_the_source_stays_where_nobody_says_whether_the_job_was_made(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_answers(monkeypatch, "CreateTrainingJob", "DescribeTrainingJob")
    with pytest.raises(LaunchError, match=f"stop-training-job --region {REGION} --training-job-name {NAME}$"):
        SageMaker().submit(render(workdir=empty(tmp_path)))
    assert uploaded() == ["sourcedir.tar.gz", "start.sh"]


def test_a_job_of_that_name_keeps_its_source(aws: str, tmp_path: Path) -> None:
    rendered = render(workdir=empty(tmp_path))
    SageMaker().submit(rendered)
    with pytest.raises(LaunchError, match="Give another --name"):
        SageMaker().submit(rendered)
    assert uploaded() == ["sourcedir.tar.gz", "start.sh"]


def test_nothing_is_left_where_the_job_was_not_made(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_answers(monkeypatch, "CreateTrainingJob", carried_out=False)
    with pytest.raises(LaunchError, match="create the training job"):
        SageMaker().submit(render(workdir=empty(tmp_path)))
    assert uploaded() == []


def test_ctrl_c_while_the_job_is_made_stops_it(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: SageMakerResponse) -> ActionResult:
        signal.pthread_kill(main_thread, signal.SIGINT)
        made = create_training_job(self)
        at_work(NAME, "Starting")
        return made

    main_thread = threading.get_ident()
    monkeypatch.setattr(SageMakerResponse, "create_training_job", slow)
    with pytest.raises(KeyboardInterrupt):
        SageMaker().submit(render(workdir=empty(tmp_path)))
    assert training_job(NAME).training_job_status == "Stopped"
    assert uploaded() == []


def empty(tmp_path: Path) -> Path:
    """A directory that the tests' own files are not in."""
    directory = tmp_path / "source"
    directory.mkdir()
    return directory


def lose_answers(monkeypatch: pytest.MonkeyPatch, *operations: str, carried_out: bool = True) -> None:
    """The connection breaks before the answer to these requests."""
    sends = URLLib3Session.send

    def send(self: URLLib3Session, request: Any) -> Any:
        target = request.headers.get("X-Amz-Target", b"")
        loses = target in [f"SageMaker.{operation}".encode() for operation in operations]
        answer = sends(self, request) if carried_out or not loses else None
        if loses:
            raise ReadTimeoutError(endpoint_url=request.url)
        return answer

    monkeypatch.setattr(URLLib3Session, "send", send)


SPOT = """\
# /state/train-1/training-job.json
{
  "TrainingJobName": "train-1",
  "RoleArn": "arn:aws:iam::123456789012:role/training",
  "AlgorithmSpecification": {
    "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "TrainingInputMode": "File",
    "ContainerEntrypoint": [
      "/bin/bash"
    ],
    "ContainerArguments": [
      "/opt/ml/input/data/code/start.sh"
    ]
  },
  "InputDataConfig": [
    {
      "ChannelName": "code",
      "DataSource": {
        "S3DataSource": {
          "S3DataType": "S3Prefix",
          "S3Uri": "s3://bucket/prefix/train-1/source/",
          "S3DataDistributionType": "FullyReplicated"
        }
      }
    }
  ],
  "Environment": {
    "OMP_NUM_THREADS": "2",
    "NOTE": "it's"
  },
  "ResourceConfig": {
    "InstanceType": "ml.g5.12xlarge",
    "InstanceCount": 2,
    "VolumeSizeInGB": 30
  },
  "StoppingCondition": {
    "MaxRuntimeInSeconds": 3600,
    "MaxWaitTimeInSeconds": 10800
  },
  "EnableManagedSpotTraining": true,
  "CheckpointConfig": {
    "S3Uri": "s3://bucket/runs/a",
    "LocalPath": "/opt/ml/checkpoints"
  },
  "OutputDataConfig": {
    "S3OutputPath": "s3://bucket/prefix/"
  },
  "Tags": [
    {
      "Key": "team",
      "Value": "vision"
    }
  ]
}

# /state/train-1/start.sh
#!/bin/bash
set -eu
mkdir -p /opt/ml/code
tar -xzf /opt/ml/input/data/code/sourcedir.tar.gz -C /opt/ml/code
cd /opt/ml/code
exec python -P -m paceline.launch.node --rank-launcher agent --nodes 2 --nproc 4 --threads 2 -- @TASK --recover none
"""
