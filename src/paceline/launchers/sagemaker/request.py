"""A job as a CreateTrainingJob request, as SageMaker's ModelTrainer makes them.

Without ``--distribution`` the container starts ``start.sh``, from the input channel ``code``, on each
machine: it unpacks the source and becomes the node's command. With it, the image's own training toolkit
unpacks the source and starts the ranks. Hyperparameters tell it how, each one JSON:
https://github.com/aws/sagemaker-training-toolkit.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec
from paceline.launchers.node import node_command
from paceline.launchers.sagemaker.options import DISTRIBUTIONS, SageMakerOptions
from paceline.launchers.secret_variables import refuse_secrets
from paceline.launchers.unshared import fixed_machines, without_shared_directory

Request = dict[str, Any]

CHECKPOINTS = "/opt/ml/checkpoints"
"""A directory that SageMaker fills from ``--checkpoints`` at the start, and copies there as it changes."""

SOURCE = "sourcedir.tar.gz"
START = "start.sh"
_DATA = "/opt/ml/input/data/code"
_CODE = "/opt/ml/code"
_LONGEST_S = 86400


def training_job(spec: JobSpec, options: SageMakerOptions) -> tuple[Request, str | None]:
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


def _start(spec: JobSpec) -> str:
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


def _hyperparameters(name: str, source: str, spec: JobSpec, options: SageMakerOptions) -> dict[str, str]:
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


def _threads(spec: JobSpec) -> dict[str, str]:
    return {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}


def _check(name: str, spec: JobSpec, options: SageMakerOptions) -> None:
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
        raise ConfigError(
            f"SageMaker would refuse a job named {name!r}: letters, digits and dashes, at most 63. Give "
            "another --name."
        )
    fixed_machines(spec, "sagemaker")
    for flag, value in (("--gpus-per-node", spec.gpus_per_node), ("--cpus-per-task", spec.cpus_per_task)):
        if value is not None:
            raise ConfigError(f"{flag} does not work with --on sagemaker: --instance-type says it.")
    refuse_secrets(spec.env, "Let --role read it from AWS Secrets Manager, in the script.")
    if options.distribution is None:
        return
    if spec.is_task:
        raise ConfigError(
            f"--distribution {options.distribution} starts scripts, and Paceline's agent starts tasks. "
            "Leave it out."
        )
    if spec.preflight:
        raise ConfigError(
            f"--preflight: --distribution {options.distribution} has the image's own toolkit start the job, "
            "and nothing of ours before it. Leave out one of them."
        )
    if spec.nproc != (1,):
        raise ConfigError(f"--nproc: --distribution {options.distribution} starts one process a GPU.")
