"""``--on sagemaker``: a training job on Amazon SageMaker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from paceline.errors import ConfigError, LaunchError
from paceline.launchers.base import Files, JobHandle, JobSpec, Launcher, Rendered
from paceline.launchers.sagemaker.aws import asked, connect
from paceline.launchers.sagemaker.job import SageMakerJob
from paceline.launchers.sagemaker.options import SageMakerOptions
from paceline.launchers.sagemaker.request import CHECKPOINTS, SOURCE, START, Request, split_s3, training_job
from paceline.launchers.sagemaker.source import pack


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
        uploaded: list[str] = []
        try:
            for file, content in contents.items():
                key = f"{prefix}/{file}"
                put = partial(s3.put_object, Bucket=bucket, Key=key, Body=content)
                asked(f"upload s3://{bucket}/{key}", put)
                uploaded.append(key)
            asked(f"make the training job {name}", partial(sagemaker.create_training_job, **rendered.request))
        except (LaunchError, KeyboardInterrupt):
            for key in uploaded:
                with suppress(LaunchError):
                    asked("delete what was uploaded", partial(s3.delete_object, Bucket=bucket, Key=key))
            raise
        return SageMakerJob({"id": name, "region": options.region, "nodes": spec.nodes[0]})

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the job again by its name."""
        return SageMakerJob(reference)
