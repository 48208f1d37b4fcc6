"""``--on sagemaker``: a training job on Amazon SageMaker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from paceline.distributed.process import interrupted_afterwards
from paceline.errors import ConfigError, LaunchError
from paceline.launchers.base import Files, JobHandle, JobSpec, Launcher, Rendered
from paceline.launchers.sagemaker.aws import Refused, asked, connect
from paceline.launchers.sagemaker.job import SageMakerJob
from paceline.launchers.sagemaker.options import SageMakerOptions
from paceline.launchers.sagemaker.request import (
    CHECKPOINTS,
    SOURCE,
    START,
    Request,
    source_of,
    split_s3,
    training_job,
)
from paceline.launchers.sagemaker.source import pack, packed_files
from paceline.launchers.unshared import copied_path

_IN_USE = "ResourceInUse"
_NO_SUCH_JOB = ("ValidationException", "ResourceNotFound")


@dataclass(frozen=True, kw_only=True)
class RenderedSageMaker(Rendered):
    """A request, and what is uploaded before it."""

    request: Request


class SageMaker(Launcher):
    """Submits to SageMaker's API."""

    name = "sagemaker"
    inners = ("torchrun", "agent", "spawn")
    files: ClassVar[Files] = "uploaded"
    default_run = CHECKPOINTS
    extra = "sagemaker"

    def render(self, spec: JobSpec, options: SageMakerOptions | None = None) -> RenderedSageMaker:
        """Render the request as JSON, which ``aws sagemaker create-training-job --cli-input-json`` takes."""
        options = options or SageMakerOptions()
        if spec.run is not None and str(spec.run) != CHECKPOINTS:
            raise ConfigError(
                f"--run {spec.run}: SageMaker keeps {CHECKPOINTS} alone. Leave out --run; --checkpoints says "
                "where it is kept."
            )
        request, start = training_job(spec, options)
        files = {"training-job.json": json.dumps(request, indent=2) + "\n"}
        if start is not None:
            files[START] = start
        return RenderedSageMaker(spec=spec, options=options, files=files, request=request)

    def place_of(self, path: str, options: SageMakerOptions) -> str:
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

    def submit(self, rendered: Rendered) -> JobHandle:
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
        except (Refused, KeyboardInterrupt) as error:
            in_use = isinstance(error, Refused) and error.code == _IN_USE
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
        with interrupted_afterwards():
            try:
                asked(f"make the training job {name}", partial(once.create_training_job, **request))
            except Refused as error:
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
    except Refused as error:
        if error.code in _NO_SUCH_JOB:
            return False
        raise LaunchError(
            f"the training job {name} may have been made, and nobody says: {error} If it is there, end it: "
            f"aws sagemaker stop-training-job --region {sagemaker.meta.region_name} "
            f"--training-job-name {name}"
        ) from error
    return source_of(there) == source_of(request)
