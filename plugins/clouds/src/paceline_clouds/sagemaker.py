"""``--on sagemaker``: training jobs on Amazon SageMaker."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.plugins import install_command
from paceline.core.signals import interrupt_at_exit
from paceline.launch.launcher import (
    FileSharing,
    JobHandle,
    JobStatus,
    LaunchSpec,
    RenderedJob,
    State,
    fixed_nodes,
)
from paceline.launch.node import node_command
from paceline.launch.rendering import refuse_secrets
from paceline.launch.status_poller import PolledJob
from paceline.launch.submit import ClusterLauncher
from paceline_clouds.options import DISTRIBUTIONS, SageMakerOptions
from paceline_clouds.rendered import copied_path, without_shared_directory

# --- AWS clients and errors ---


_T = TypeVar("_T")


class AwsApiError(LaunchError):
    """A request to AWS failed.

    Attributes:
        code: AWS's error code; "" without an answer.
        lost: whether the request may have been carried out, because it was sent but not answered.
    """

    def __init__(self, message: str, code: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


_BAD_CREDENTIALS = (
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch"),
    "UnrecognizedClientException",
)


def connect(service: str, region: str | None, *, attempts: int = 3) -> Any:
    """Return a client of a service.

    Args:
        service: its name in boto3.
        region: default: the configured one.
        attempts: how often an unanswered request is sent.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, InvalidRegionError, NoRegionError
    except ImportError as error:
        raise LaunchError(
            f"--on sagemaker uploads to --s3, and submits and follows jobs, with boto3 ({error}). Install it: "
            f"{install_command('sagemaker')}. --dry-run works without."
        ) from error
    settings = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": attempts, "mode": "standard"})
    try:
        return boto3.Session().client(service, region_name=region, config=settings)
    except BotoCoreError as error:
        advice = "Give --region" if isinstance(error, NoRegionError | InvalidRegionError) else "Set AWS_PROFILE"
        raise LaunchError(
            f"AWS is not configured: {str(error).rstrip('.')}. {advice}, or run `aws configure`."
        ) from error


def request_aws(what: str, call: Callable[[], _T]) -> _T:
    """Return the answer to a request."""
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    try:
        return call()
    except ClientError as error:
        details = error.response.get("Error", {})
        code, message = details.get("Code", ""), str(details.get("Message", error)).rstrip(".")
        advice = {
            "AccessDenied": "Request the permission, or set another AWS_PROFILE.",
            "AccessDeniedException": "Request the permission, or set another AWS_PROFILE.",
            **dict.fromkeys(_BAD_CREDENTIALS, "Renew your credentials, or set another AWS_PROFILE."),
            "NoSuchBucket": "Create the bucket, or give another --s3.",
            "ResourceInUse": "Give another --name.",
            "ResourceLimitExceeded": "Request a higher quota, or give another --instance-type.",
            "ThrottlingException": "Repeat the command in a minute.",
        }.get(code, "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        raise AwsApiError(
            f"AWS refused to {what}: {code}: {message}. {advice}".rstrip(), code, lost=status >= 500
        ) from error
    except BotoCoreError as error:
        is_network = isinstance(error, HTTPClientError | ConnectionError)
        advice = "Check the network and --region" if is_network else "Run `aws configure`, or set AWS_PROFILE"
        raise AwsApiError(
            f"could not {what}: {str(error).rstrip('.')}. {advice}.",
            lost=isinstance(error, HTTPClientError),
        ) from error


# --- The source directory, copied to the nodes as one archive ---


_EXCLUDED = {"__pycache__", "runs", "jobs", "node_modules"}
_MAX_BYTES = 500 * 1024**2


def pack(directory: Path) -> bytes:
    """Return a gzipped tar of a directory's :func:`packed_files`; equal contents give equal bytes."""
    files = packed_files(directory)
    size = sum(path.stat().st_size for path in files)
    if size > _MAX_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"--source {directory} has {size >> 20} MiB, over {_MAX_BYTES >> 20}; the "
            f"largest file is {largest.relative_to(directory)}. Put data into S3, or choose another directory."
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(directory).as_posix())
            content = path.read_bytes()
            entry.size = len(content)
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def packed_files(directory: Path) -> list[Path]:
    """Return the files of a directory to copy to the nodes, sorted, with the directory in their paths.

    Leaves out hidden files, ``runs``, ``jobs`` and caches, links to directories, and links to other places.
    """
    if not directory.is_dir():
        raise ConfigError(f"--source {directory}: this directory does not exist.")
    return sorted(_files(directory, directory.resolve()))


def _files(directory: Path, source: Path) -> list[Path]:
    files = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name in _EXCLUDED:
            continue
        if path.is_dir() and not path.is_symlink():
            files += _files(path, source)
        elif path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(source)):
            files.append(path)
    return files


# --- A job as a CreateTrainingJob request, like those of SageMaker's ModelTrainer ---
#
# Without ``--distribution`` the container runs ``start.sh`` from the input channel ``code`` on each node: it
# unpacks the source and runs the node's command. With it, the image's own training toolkit unpacks the source and
# starts the ranks, controlled by hyperparameters in JSON: https://github.com/aws/sagemaker-training-toolkit.


Request = dict[str, Any]

CHECKPOINTS = "/opt/ml/checkpoints"
"""A directory that SageMaker fills from ``--checkpoints`` at the start, and copies there when it changes."""

SOURCE = "sourcedir.tar.gz"
START = "start.sh"
_DATA = "/opt/ml/input/data/code"
_CODE = "/opt/ml/code"
_MAX_S = 86400


def training_job(spec: LaunchSpec, options: SageMakerOptions) -> tuple[Request, str | None]:
    """Return the request, and the text of ``start.sh`` if the job has one.

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
        data_source = {"S3DataType": "S3Prefix", "S3Uri": f"{source}/", "S3DataDistributionType": "FullyReplicated"}
        request["InputDataConfig"] = [{"ChannelName": "code", "DataSource": {"S3DataSource": data_source}}]
    else:
        request["HyperParameters"] = _hyperparameters(name, f"{source}/{SOURCE}", spec, options)
    threads = {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
    environment = {**threads, **spec.env}
    if environment:
        request["Environment"] = environment
    request["ResourceConfig"] = {
        "InstanceType": options.instance_type,
        "InstanceCount": spec.nodes[0],
        "VolumeSizeInGB": options.volume_gb,
    }
    max_s = int(spec.walltime_s or _MAX_S)
    request["StoppingCondition"] = {"MaxRuntimeInSeconds": max_s}
    if options.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = max_s + options.max_wait_s()
    if spec.is_task or options.spot or options.checkpoints:
        checkpoints_url = options.checkpoints or f"{_prefix(options)}/{name}/checkpoints"
        request["CheckpointConfig"] = {"S3Uri": checkpoints_url, "LocalPath": CHECKPOINTS}
    request["OutputDataConfig"] = {"S3OutputPath": f"{_prefix(options)}/"}
    if options.tags():
        request["Tags"] = options.tags()
    return request, start


def source_of(job: Mapping[str, Any]) -> str:
    """Return the location of a job's source by its request or description; "" for jobs of other programs."""
    for channel in job.get("InputDataConfig") or ():
        if channel["ChannelName"] == "code":
            return str(channel["DataSource"].get("S3DataSource", {}).get("S3Uri", ""))
    return str((job.get("HyperParameters") or {}).get("sagemaker_submit_directory", ""))


def _prefix(options: SageMakerOptions) -> str:
    assert options.s3 is not None
    return options.s3.rstrip("/")


def _start(spec: LaunchSpec) -> str:
    """Return the script of each node. The nodes share no directory, since checkpoints pass through S3 with a delay."""
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
    """Return the training toolkit's hyperparameters; it passes others to the script as ``--name value``."""
    assert options.distribution is not None
    script, *arguments = spec.command[1:] if Path(spec.command[0]).name.startswith("python") else spec.command
    if not script.endswith(".py"):
        raise ConfigError(
            f"--distribution {options.distribution} starts a .py file, but the command is "
            f"{shlex.join(spec.command)}. Leave out --distribution, so that Paceline starts it."
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
    values = {**own, **_arguments_by_name(arguments, options.distribution)}
    return {key: json.dumps(value) for key, value in values.items()}


def _arguments_by_name(arguments: list[str], distribution: str) -> dict[str, str]:
    """Return arguments by name, the only form of hyperparameters."""
    named: dict[str, str] = {}
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not equals and words and not words[0].startswith("--"):
            value, equals = words.pop(0), "="
        if not re.fullmatch(r"--[A-Za-z][\w-]*", name) or not equals or name[2:] in named:
            raise ConfigError(
                f"--distribution {distribution} passes arguments as hyperparameters, each --NAME VALUE and once, "
                f"which {name} is not. Leave out --distribution, so that Paceline starts the script."
            )
        named[name[2:]] = value
    return named


def _check(name: str, spec: LaunchSpec, options: SageMakerOptions) -> None:
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
        raise ConfigError(
            f"the job name {name!r} is not valid in SageMaker: it must consist of letters, digits and dashes, at most "
            "63. Give another --name."
        )
    fixed_nodes(spec, "--on sagemaker")
    for flag, value in (("--gpus-per-node", spec.gpus_per_node), ("--cpus-per-task", spec.cpus_per_task)):
        if value is not None:
            raise ConfigError(f"{flag} is not supported by --on sagemaker, where --instance-type decides it.")
    refuse_secrets(spec.env, "Let --role read it from AWS Secrets Manager, in the script.")
    if options.distribution is None:
        return
    if spec.is_task:
        raise ConfigError(
            f"--distribution {options.distribution} starts scripts only, but this is a task. Leave it out."
        )
    if spec.preflight:
        raise ConfigError(
            f"--preflight cannot be combined with --distribution {options.distribution}, where the image's own toolkit "
            "starts the job. Leave out one of them."
        )
    if spec.nproc != (1,):
        raise ConfigError(f"--nproc: --distribution {options.distribution} starts one process per GPU. Leave it out.")


# --- A job, followed through SageMaker's API; its output is in CloudWatch ---


LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_POLL_S = 5.0
_MAX_STREAMS = 100  # per request
_MAX_DELAY_MS = 60_000  # a node's output may appear after later output of other nodes
_STATES: dict[str, State] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}
_PENDING_STATES = (
    "Starting",
    "Pending",
    "LaunchingMLInstances",
    "PreparingTrainingStack",
    "Downloading",
    "Restarting",
)


class SageMakerJob(PolledJob):
    """A training job; ``reference`` has its name as ``id``, ``region``, and ``nodes``, the number of nodes."""

    intervals_s = (_POLL_S, _POLL_S)

    def __init__(self, reference: Mapping[str, Any]) -> None:
        super().__init__(reference)
        self._name: str = reference["id"]
        self._region: str | None = reference["region"]
        self.title = f"training job {self._name}"
        self._client: Any = None

    def status(self) -> JobStatus:
        job = self._request("describe the training job", "describe_training_job")
        transitions = [step["Status"] for step in job.get("SecondaryStatusTransitions", [])]
        restarts = transitions.count("Restarting")
        state = _STATES.get(job["TrainingJobStatus"])
        secondary = str(job.get("SecondaryStatus", ""))
        if state == "succeeded":
            return JobStatus(state=state, exit_code=0, restarts=restarts)
        if state is not None:
            reason = str(job.get("FailureReason", secondary))
            code = re.search(r"exit ?code:? ?(\d+)", reason, flags=re.IGNORECASE)
            return JobStatus(state=state, detail=reason, exit_code=int(code[1]) if code else None, restarts=restarts)
        is_pending = secondary in _PENDING_STATES
        return JobStatus(state="pending" if is_pending else "running", detail=secondary, restarts=restarts)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the output of the nodes, with the node's name before each line if there are several."""
        has_several = self._reference["nodes"] > 1
        seen: set[str] = set()
        since = 0
        poller = self.poller()
        while True:
            poll = partial(self._poll, since)
            ended, events = (poller.answer(poll) or (False, [])) if follow else (True, self._events(since))
            latest: set[str] = set()
            for event in events:
                if event["eventId"] not in seen:
                    host = event["logStreamName"].rpartition("/")[2].rpartition("-")[0]
                    yield f"{host} | {event['message']}" if has_several and host else event["message"]
                latest.add(event["eventId"])
                since = max(since, event["timestamp"] - _MAX_DELAY_MS)
            seen |= latest
            if ended:
                return
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        """Stop the job: its nodes get SIGTERM, and two minutes to save."""
        if not self.status().ended:
            self._request("stop the training job", "stop_training_job")

    def _poll(self, since_ms: int) -> tuple[bool, list[Mapping[str, Any]]]:
        """Return whether the job has ended, and the output of its nodes until then."""
        return self.status().ended, self._events(since_ms)

    def _events(self, since_ms: int) -> list[Mapping[str, Any]]:
        """Return the output of the nodes since a time; each node has its own stream."""
        client = connect("logs", self._region)

        def pages(operation: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
            pages: Iterator[Mapping[str, Any]] = iter(
                client.get_paginator(operation).paginate(logGroupName=LOG_GROUP, **arguments)
            )
            return pages

        def read() -> list[Mapping[str, Any]]:
            streams = [
                stream["logStreamName"]
                for page in pages("describe_log_streams", logStreamNamePrefix=f"{self._name}/")
                for stream in page["logStreams"]
            ]
            parts = [streams[at : at + _MAX_STREAMS] for at in range(0, len(streams), _MAX_STREAMS)]
            return [
                event
                for part in parts
                for page in pages("filter_log_events", logStreamNames=part, startTime=since_ms)
                for event in page["events"]
            ]

        try:
            return request_aws("read the log", read)
        except LaunchError as error:
            if "ResourceNotFoundException" in str(error):  # there is no output of any job yet
                return []
            raise

    def _request(self, what: str, method: str) -> Any:
        if self._client is None:
            self._client = connect("sagemaker", self._region)
        return request_aws(f"{what} {self._name}", lambda: getattr(self._client, method)(TrainingJobName=self._name))


# --- The launcher ---


_IN_USE = "ResourceInUse"
_NO_SUCH_JOB = ("ValidationException", "ResourceNotFound")


class SageMaker(ClusterLauncher):
    """A launcher that submits jobs to SageMaker's API."""

    name = "sagemaker"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "uploaded"
    default_run = CHECKPOINTS
    extra = "sagemaker"

    def render(self, spec: LaunchSpec, options: SageMakerOptions | None = None) -> RenderedJob:
        """Render the request as JSON for ``aws sagemaker create-training-job --cli-input-json``."""
        options = options or SageMakerOptions()
        if spec.run is not None and str(spec.run) != CHECKPOINTS:
            raise ConfigError(
                f"--run-dir {spec.run}: SageMaker keeps only {CHECKPOINTS}. Leave out --run-dir; --checkpoints is its "
                "location in S3."
            )
        request, start = training_job(spec, options)
        files = {"training-job.json": json.dumps(request, indent=2) + "\n"}
        if start is not None:
            files[START] = start
        return RenderedJob(spec=spec, options=options, files=files, request=request)

    def remote_path(self, path: str, options: SageMakerOptions) -> str:
        """Return the path of a file of ``--source`` on the nodes."""
        source = Path.cwd() / options.source
        packed = packed_files(source)
        name = "this directory" if options.source == "." else f"--source {options.source}"
        remote = copied_path(path, source, name)
        if not Path(remote).is_absolute() and source / remote not in packed:
            raise ConfigError(
                f"{path} is not copied to the nodes: hidden files, runs and jobs are left out, and links to other "
                "places. Move it to another place."
            )
        return remote

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Upload the source, then create the job."""
        spec, options = rendered.spec, rendered.options
        name = rendered.request["TrainingJobName"]
        bucket, _, prefix = f"{_prefix(options)}/{name}/source".removeprefix("s3://").partition("/")
        contents = {SOURCE: pack(spec.workdir / options.source)}
        if START in rendered.files:
            contents[START] = rendered.files[START].encode()
        s3, sagemaker = connect("s3", options.region), connect("sagemaker", options.region)
        # A repeated request would be refused if the first was carried out, since the name would be in use.
        once = connect("sagemaker", options.region, attempts=1)
        uploaded: list[str] = []
        try:
            for file, content in contents.items():
                key = f"{prefix}/{file}"
                put = partial(s3.put_object, Bucket=bucket, Key=key, Body=content)
                request_aws(f"upload s3://{bucket}/{key}", put)
                uploaded.append(key)
            _create_job(once, sagemaker, rendered.request)
        except (AwsApiError, KeyboardInterrupt) as error:
            in_use = isinstance(error, AwsApiError) and error.code == _IN_USE
            if in_use and _job_exists(sagemaker, rendered.request):
                raise  # the existing job reads the source that was just uploaded
            for key in uploaded:
                with suppress(LaunchError):
                    request_aws("delete the uploaded source", partial(s3.delete_object, Bucket=bucket, Key=key))
            raise
        region = sagemaker.meta.region_name  # the configured region may change later
        return SageMakerJob({"id": name, "region": region, "nodes": spec.nodes[0]})

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        return SageMakerJob(reference)


def _create_job(once: Any, sagemaker: Any, request: Request) -> None:
    """Create a job, or stop it if its creation is interrupted."""
    name = request["TrainingJobName"]
    try:
        with interrupt_at_exit():
            try:
                request_aws(f"create the training job {name}", partial(once.create_training_job, **request))
            except AwsApiError as error:
                if not (error.lost and _job_exists(sagemaker, request)):
                    raise
    except KeyboardInterrupt:
        if _job_exists(sagemaker, request):
            stop = partial(sagemaker.stop_training_job, TrainingJobName=name)
            request_aws(f"stop the training job {name}", stop)
        raise


def _job_exists(sagemaker: Any, request: Request) -> bool:
    """Return whether a job of this name exists that reads the request's source."""
    name = request["TrainingJobName"]
    try:
        description = request_aws(
            f"describe the training job {name}",
            partial(sagemaker.describe_training_job, TrainingJobName=name),
        )
    except AwsApiError as error:
        if error.code in _NO_SUCH_JOB:
            return False
        raise LaunchError(
            f"the training job {name} may have been created, but AWS does not say: {error} If it exists, stop it: "
            f"aws sagemaker stop-training-job --region {sagemaker.meta.region_name} "
            f"--training-job-name {name}"
        ) from error
    return source_of(description) == source_of(request)
