"""A training job on Amazon SageMaker."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.signals import interrupt_at_exit
from paceline.launch.clouds import copied_path, fixed_nodes, without_shared_directory
from paceline.launch.job_logs import StatusPoller
from paceline.launch.launcher import (
    FileSharing,
    JobHandle,
    JobStatus,
    Launcher,
    LaunchSpec,
    RenderedJob,
    State,
)
from paceline.launch.node import node_command
from paceline.launch.options import DISTRIBUTIONS, SageMakerOptions
from paceline.launch.rendering import refuse_secrets

# --- Amazon's API: its clients, and its refusals in our words ---


_T = TypeVar("_T")


class AwsApiError(LaunchError):
    """AWS did not do what was asked.

    Attributes:
        code: AWS's own word for the reason; empty where nobody answered.
        lost: whether it may have been done nevertheless: the request was sent, and nobody said what became
            of it.
    """

    def __init__(self, message: str, code: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


def connect(service: str, region: str | None, *, attempts: int = 3) -> Any:
    """A client of a service.

    Args:
        service: its name in boto3.
        region: default: the one that AWS is configured for.
        attempts: how often a request is sent that is not answered.

    Raises:
        LaunchError: boto3 is not installed, or AWS is not configured.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise LaunchError(
            "--on sagemaker submits and follows jobs with boto3. Install it: "
            "pip install 'paceline[sagemaker]'. --dry-run works without."
        ) from error
    settings = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": attempts, "mode": "standard"})
    try:
        return boto3.Session().client(service, region_name=region, config=settings)
    except BotoCoreError as error:
        raise LaunchError(f"AWS is not configured: {error} Give --region, or run `aws configure`.") from error


def asked(what: str, call: Callable[[], _T]) -> _T:
    """The answer to a request.

    Raises:
        Refused: AWS refused it, or cannot be reached; its words are passed on.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError

    try:
        return call()
    except NoCredentialsError as error:
        raise AwsApiError(f"could not {what}: {error}. Run `aws configure`, or set AWS_PROFILE.") from error
    except ClientError as error:
        said = error.response.get("Error", {})
        code, message = said.get("Code", ""), str(said.get("Message", error)).rstrip(".")
        advice = {
            "AccessDenied": "Ask for the right to do so, or set another AWS_PROFILE.",
            "AccessDeniedException": "Ask for the right to do so, or set another AWS_PROFILE.",
            "NoSuchBucket": "Make the bucket, or give another --s3.",
            "ResourceInUse": "Give another --name.",
            "ResourceLimitExceeded": "Ask for a higher quota, or give another --instance-type.",
            "ThrottlingException": "Give the command again in a minute.",
        }.get(code, "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        raise AwsApiError(
            f"AWS refused to {what}: {code}: {message}. {advice}".rstrip(), code, lost=status >= 500
        ) from error
    except BotoCoreError as error:
        raise AwsApiError(
            f"could not {what}: {str(error).rstrip('.')}. Check the network and --region.",
            lost=isinstance(error, HTTPClientError),
        ) from error


# --- The directory that a job's machines are given a copy of, as one archive ---


_LEFT_OUT = {"__pycache__", "runs", "jobs", "node_modules"}
_MOST_BYTES = 500 * 1024**2


def pack(directory: Path) -> bytes:
    """A gzipped tar of a directory's :func:`packed_files`; equal contents make equal bytes.

    Raises:
        ConfigError: there is no such directory, or it is too large.
    """
    files = packed_files(directory)
    size = sum(path.stat().st_size for path in files)
    if size > _MOST_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"--source {directory} has {size >> 20} MiB, over {_MOST_BYTES >> 20}; the "
            f"largest file is {largest.relative_to(directory)}. Put data into S3, and name another directory."
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(directory).as_posix())
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def packed_files(directory: Path) -> list[Path]:
    """The files of a directory that the machines get, sorted; their paths begin with the directory's.

    Hidden files, ``runs``, ``jobs`` and caches are left out, links to directories, and links that lead
    elsewhere.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"--source {directory}: there is no such directory.")
    return sorted(_files(directory, directory.resolve()))


def _files(directory: Path, source: Path) -> list[Path]:
    found = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name in _LEFT_OUT:
            continue
        if path.is_dir() and not path.is_symlink():
            found += _files(path, source)
        elif path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(source)):
            found.append(path)
    return found


# --- A job as a CreateTrainingJob request, as SageMaker's ModelTrainer makes them ---
#
# Without ``--distribution`` the container starts ``start.sh``, from the input channel ``code``, on each
# machine: it unpacks the source and becomes the node's command. With it, the image's own training toolkit
# unpacks the source and starts the ranks. Hyperparameters tell it how, each one JSON:
# https://github.com/aws/sagemaker-training-toolkit.


Request = dict[str, Any]

CHECKPOINTS = "/opt/ml/checkpoints"
"""A directory that SageMaker fills from ``--checkpoints`` at the start, and copies there as it changes."""

SOURCE = "sourcedir.tar.gz"
START = "start.sh"
_DATA = "/opt/ml/input/data/code"
_CODE = "/opt/ml/code"
_LONGEST_S = 86400


def training_job(spec: LaunchSpec, options: SageMakerOptions) -> tuple[Request, str | None]:
    """The request, and the text of ``start.sh`` where the job has one.

    Raises:
        ConfigError: SageMaker cannot run this job.
    """
    name = spec.directory.name
    _check(name, spec, options)
    source = f"{_prefix(options)}/{name}/source"
    algorithm: Request = {"TrainingImage": options.image, "TrainingInputMode": "File"}
    request: Request = {"TrainingJobName": name, "RoleArn": options.role, "AlgorithmSpecification": algorithm}
    start = None
    if options.distribution is None:
        start = _start(spec)
        algorithm |= {"ContainerEntrypoint": ["/bin/bash"], "ContainerArguments": [f"{_DATA}/{START}"]}
        place = {"S3DataType": "S3Prefix", "S3Uri": f"{source}/", "S3DataDistributionType": "FullyReplicated"}
        request["InputDataConfig"] = [{"ChannelName": "code", "DataSource": {"S3DataSource": place}}]
    else:
        request["HyperParameters"] = _hyperparameters(name, f"{source}/{SOURCE}", spec, options)
    environment = {**_threads(spec), **spec.env}
    if environment:
        request["Environment"] = environment
    request["ResourceConfig"] = {
        "InstanceType": options.instance_type,
        "InstanceCount": spec.nodes[0],
        "VolumeSizeInGB": options.volume_gb,
    }
    longest = int(spec.walltime_s or _LONGEST_S)
    request["StoppingCondition"] = {"MaxRuntimeInSeconds": longest}
    if options.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = longest + options.max_wait_s()
    if spec.is_task or options.spot or options.checkpoints:
        kept = options.checkpoints or f"{_prefix(options)}/{name}/checkpoints"
        request["CheckpointConfig"] = {"S3Uri": kept, "LocalPath": CHECKPOINTS}
    request["OutputDataConfig"] = {"S3OutputPath": f"{_prefix(options)}/"}
    if options.tags():
        request["Tags"] = options.tags()
    return request, start


def source_of(job: Mapping[str, Any]) -> str:
    """Where a job reads its source, by its request or its description; empty for others' jobs."""
    for channel in job.get("InputDataConfig") or ():
        if channel["ChannelName"] == "code":
            return str(channel["DataSource"].get("S3DataSource", {}).get("S3Uri", ""))
    return str((job.get("HyperParameters") or {}).get("sagemaker_submit_directory", ""))


def split_s3(url: str) -> tuple[str, str]:
    """Bucket and key of ``s3://BUCKET/KEY``."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def _prefix(options: SageMakerOptions) -> str:
    assert options.s3 is not None
    return options.s3.rstrip("/")


def _start(spec: LaunchSpec) -> str:
    """What each machine runs. They share no directory: that of the checkpoints goes through S3, and late."""
    spec = without_shared_directory(spec, "sagemaker")
    return (
        "#!/bin/bash\n"
        "set -eu\n"
        f"mkdir -p {_CODE}\n"
        f"tar -xzf {_DATA}/{SOURCE} -C {_CODE}\n"
        f"cd {_CODE}\n"
        f"exec {shlex.join(node_command(spec))}\n"
    )


def _hyperparameters(name: str, source: str, spec: LaunchSpec, options: SageMakerOptions) -> dict[str, str]:
    """What the training toolkit reads; it gives the other ones to the script, as ``--name value``."""
    assert options.distribution is not None
    script, *arguments = spec.command[1:] if Path(spec.command[0]).name.startswith("python") else spec.command
    if not script.endswith(".py"):
        raise ConfigError(
            f"--distribution {options.distribution} starts a .py file, but the command is "
            f"{shlex.join(spec.command)}. Leave out --distribution: then Paceline starts it."
        )
    own: dict[str, Any] = {
        "sagemaker_program": script,
        "sagemaker_submit_directory": source,
        "sagemaker_job_name": name,
        "sagemaker_container_log_level": 20,
        DISTRIBUTIONS[options.distribution]: True,
        "sagemaker_instance_type": options.instance_type,
    }
    if options.region is not None:
        own["sagemaker_region"] = options.region
    if options.distribution == "smdistributed":
        own["sagemaker_distributed_dataparallel_custom_mpi_options"] = ""
    values = {**own, **_named(arguments, options.distribution)}
    return {key: json.dumps(value) for key, value in values.items()}


def _named(arguments: list[str], distribution: str) -> dict[str, str]:
    """Arguments by name, which is all that hyperparameters can say.

    Raises:
        ConfigError: one is a flag without a value, has no name, or is there twice.
    """
    named: dict[str, str] = {}
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not equals and words and not words[0].startswith("--"):
            value, equals = words.pop(0), "="
        if not re.fullmatch(r"--[A-Za-z][\w-]*", name) or not equals or name[2:] in named:
            raise ConfigError(
                f"--distribution {distribution} hands arguments over as hyperparameters, each --NAME "
                f"VALUE and once, but there is {name}. Leave out --distribution: then Paceline starts it."
            )
        named[name[2:]] = value
    return named


def _threads(spec: LaunchSpec) -> dict[str, str]:
    return {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}


def _check(name: str, spec: LaunchSpec, options: SageMakerOptions) -> None:
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
        raise ConfigError(
            f"SageMaker would refuse a job named {name!r}: letters, digits and dashes, at most 63. Give another --name."
        )
    fixed_nodes(spec, "sagemaker")
    for flag, value in (("--gpus-per-node", spec.gpus_per_node), ("--cpus-per-task", spec.cpus_per_task)):
        if value is not None:
            raise ConfigError(f"{flag} does not work with --on sagemaker: --instance-type says it.")
    refuse_secrets(spec.env, "Let --role read it from AWS Secrets Manager, in the script.")
    if options.distribution is None:
        return
    if spec.is_task:
        raise ConfigError(
            f"--distribution {options.distribution} starts scripts, and Paceline's agent starts tasks. Leave it out."
        )
    if spec.preflight:
        raise ConfigError(
            f"--preflight: --distribution {options.distribution} has the image's own toolkit start the job, "
            "and nothing of ours before it. Leave out one of them."
        )
    if spec.nproc != (1,):
        raise ConfigError(f"--nproc: --distribution {options.distribution} starts one process a GPU.")


# --- A job on SageMaker, followed through its API; what it prints is in CloudWatch ---


LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_POLL_S = 5.0
_STREAMS = 100  # that can be read at once
_LATE_MS = 60_000  # what one machine printed may come after what others printed later
_STATES: dict[str, State] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}
_NOT_YET = (
    "Starting",
    "Pending",
    "LaunchingMLInstances",
    "PreparingTrainingStack",
    "Downloading",
    "Restarting",
)


class SageMakerJob(JobHandle):
    """A training job.

    Args:
        reference: its name as ``id``, ``region``, and ``nodes``, the number of machines.
    """

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)
        self._name: str = reference["id"]
        self._region: str | None = reference["region"]
        self._client: Any = None

    @property
    def reference(self) -> dict[str, Any]:
        """As it is recorded."""
        return self._reference

    def status(self) -> JobStatus:
        """What DescribeTrainingJob says."""
        job = self._ask("describe the training job", "describe_training_job")
        passed = [step["Status"] for step in job.get("SecondaryStatusTransitions", [])]
        restarts = passed.count("Restarting")
        state = _STATES.get(job["TrainingJobStatus"])
        secondary = str(job.get("SecondaryStatus", ""))
        if state == "succeeded":
            return JobStatus(state=state, exit_code=0, restarts=restarts)
        if state is not None:
            reason = str(job.get("FailureReason", secondary))
            code = re.search(r"exit ?code:? ?(\d+)", reason, flags=re.IGNORECASE)
            return JobStatus(state=state, detail=reason, exit_code=int(code[1]) if code else None, restarts=restarts)
        waits = secondary in _NOT_YET
        return JobStatus(state="pending" if waits else "running", detail=secondary, restarts=restarts)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What the machines print; with several, each line begins with the machine's name."""
        several = self._reference["nodes"] > 1
        seen: set[str] = set()
        since = 0
        watch = self._watch()
        while True:
            look = partial(self._look, since)
            ended, events = (watch.answer(look) or (False, [])) if follow else (True, self._events(since))
            latest: set[str] = set()
            for event in events:
                if event["eventId"] not in seen:
                    host = event["logStreamName"].rpartition("/")[2].rpartition("-")[0]
                    yield f"{host} | {event['message']}" if several and host else event["message"]
                latest.add(event["eventId"])
                since = max(since, event["timestamp"] - _LATE_MS)
            seen |= latest
            if ended:
                return
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        """Stop the job: its machines get SIGTERM, and two minutes to save."""
        if not self.status().ended:
            self._ask("stop the training job", "stop_training_job")

    def wait(self) -> int:
        """Ask until it has ended."""
        status = self._watch().wait()
        if status.state != "succeeded":
            print(f"paceline: training job {self._name} {status.state}: {status.detail}.", file=sys.stderr)
        return 1 if status.exit_code is None else status.exit_code

    def _watch(self) -> StatusPoller:
        return StatusPoller(self.status, (_POLL_S, _POLL_S))

    def _look(self, since_ms: int) -> tuple[bool, list[Mapping[str, Any]]]:
        """Whether it has ended, and what the machines have printed by then."""
        return self.status().ended, self._events(since_ms)

    def _events(self, since_ms: int) -> list[Mapping[str, Any]]:
        """What the machines have printed, from a time on; each has a stream of its own."""
        client = connect("logs", self._region)

        def pages(operation: str, **given: Any) -> Iterator[Mapping[str, Any]]:
            pages: Iterator[Mapping[str, Any]] = iter(
                client.get_paginator(operation).paginate(logGroupName=LOG_GROUP, **given)
            )
            return pages

        def read() -> list[Mapping[str, Any]]:
            streams = [
                stream["logStreamName"]
                for page in pages("describe_log_streams", logStreamNamePrefix=f"{self._name}/")
                for stream in page["logStreams"]
            ]
            parts = [streams[at : at + _STREAMS] for at in range(0, len(streams), _STREAMS)]
            return [
                event
                for part in parts
                for page in pages("filter_log_events", logStreamNames=part, startTime=since_ms)
                for event in page["events"]
            ]

        try:
            return asked("read the log", read)
        except LaunchError as error:
            if "ResourceNotFoundException" in str(error):  # no job has printed anything yet
                return []
            raise

    def _ask(self, what: str, method: str) -> Any:
        if self._client is None:
            self._client = connect("sagemaker", self._region)
        return asked(f"{what} {self._name}", lambda: getattr(self._client, method)(TrainingJobName=self._name))


# --- ``--on sagemaker``: a training job on Amazon SageMaker ---


_IN_USE = "ResourceInUse"
_NO_SUCH_JOB = ("ValidationException", "ResourceNotFound")


@dataclass(frozen=True, kw_only=True)
class RenderedSageMaker(RenderedJob):
    """A request, and what is uploaded before it."""

    request: Request


class SageMaker(Launcher):
    """Submits to SageMaker's API."""

    name = "sagemaker"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "uploaded"
    default_run = CHECKPOINTS
    extra = "sagemaker"

    def render(self, spec: LaunchSpec, options: SageMakerOptions | None = None) -> RenderedSageMaker:
        """Render the request as JSON, which ``aws sagemaker create-training-job --cli-input-json`` takes."""
        options = options or SageMakerOptions()
        if spec.run is not None and str(spec.run) != CHECKPOINTS:
            raise ConfigError(
                f"--run-dir {spec.run}: SageMaker keeps {CHECKPOINTS} alone. Leave out --run-dir; --checkpoints says "
                "where it is kept."
            )
        request, start = training_job(spec, options)
        files = {"training-job.json": json.dumps(request, indent=2) + "\n"}
        if start is not None:
            files[START] = start
        return RenderedSageMaker(spec=spec, options=options, files=files, request=request)

    def remote_path(self, path: str, options: SageMakerOptions) -> str:
        """Where the machines find a file of ``--source``."""
        source = Path.cwd() / options.source
        packed = packed_files(source)
        called = "this directory" if options.source == "." else f"--source {options.source}"
        place = copied_path(path, source, called)
        if not Path(place).is_absolute() and source / place not in packed:
            raise ConfigError(
                f"{path} is not copied to the machines: hidden files, runs and jobs are left out, and links "
                "that lead elsewhere. Put it into another place."
            )
        return place

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Upload the source, then make the job."""
        assert isinstance(rendered, RenderedSageMaker)
        spec, options = rendered.spec, rendered.options
        name = rendered.request["TrainingJobName"]
        bucket, prefix = split_s3(f"{options.s3.rstrip('/')}/{name}/source")
        contents = {SOURCE: pack(spec.workdir / options.source)}
        if START in rendered.files:
            contents[START] = rendered.files[START].encode()
        s3, sagemaker = connect("s3", options.region), connect("sagemaker", options.region)
        # Sent again, a request that was carried out would be refused: the name is in use now.
        once = connect("sagemaker", options.region, attempts=1)
        uploaded: list[str] = []
        try:
            for file, content in contents.items():
                key = f"{prefix}/{file}"
                put = partial(s3.put_object, Bucket=bucket, Key=key, Body=content)
                asked(f"upload s3://{bucket}/{key}", put)
                uploaded.append(key)
            _make(once, sagemaker, rendered.request)
        except (AwsApiError, KeyboardInterrupt) as error:
            in_use = isinstance(error, AwsApiError) and error.code == _IN_USE
            if in_use and _is_there(sagemaker, rendered.request):
                raise  # that job reads its source where this one's has been uploaded
            for key in uploaded:
                with suppress(LaunchError):
                    asked("delete what was uploaded", partial(s3.delete_object, Bucket=bucket, Key=key))
            raise
        region = sagemaker.meta.region_name  # what is configured may be another one later
        return SageMakerJob({"id": name, "region": region, "nodes": spec.nodes[0]})

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the job again by its name."""
        return SageMakerJob(reference)


def _make(once: Any, sagemaker: Any, request: Request) -> None:
    """Make a job; one whose making is interrupted is stopped.

    Args:
        once: a client that sends a request once.
        sagemaker: one that tries again.
        request: the job.

    Raises:
        Refused: there is no such job.
        LaunchError: AWS does not say whether there is; the message says how to end it.
    """
    name = request["TrainingJobName"]
    try:
        with interrupt_at_exit():
            try:
                asked(f"make the training job {name}", partial(once.create_training_job, **request))
            except AwsApiError as error:
                if not (error.lost and _is_there(sagemaker, request)):
                    raise
    except KeyboardInterrupt:
        if _is_there(sagemaker, request):
            stop = partial(sagemaker.stop_training_job, TrainingJobName=name)
            asked(f"stop the training job {name}", stop)
        raise


def _is_there(sagemaker: Any, request: Request) -> bool:
    """Whether there is a job of that name, which reads its source where the request says.

    Raises:
        LaunchError: AWS does not say; the message says how to end it.
    """
    name = request["TrainingJobName"]
    try:
        there = asked(
            f"describe the training job {name}",
            partial(sagemaker.describe_training_job, TrainingJobName=name),
        )
    except AwsApiError as error:
        if error.code in _NO_SUCH_JOB:
            return False
        raise LaunchError(
            f"the training job {name} may have been made, and nobody says: {error} If it is there, end it: "
            f"aws sagemaker stop-training-job --region {sagemaker.meta.region_name} "
            f"--training-job-name {name}"
        ) from error
    return source_of(there) == source_of(request)
