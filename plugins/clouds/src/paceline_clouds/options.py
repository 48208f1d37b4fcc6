"""The options of ``--on sagemaker``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.options import parse_duration_s
from paceline.launch.launcher import option

DISTRIBUTIONS = {
    "pytorchddp": "sagemaker_pytorch_ddp_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
    "smdistributed": "sagemaker_distributed_dataparallel_enabled",
}
"""SageMaker's own ways to start the ranks, and their names in its training toolkit."""


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """Options of SageMaker jobs."""

    image: str | None = option("Container image.")
    role: str | None = option("ARN of the job's role.")
    instance_type: str | None = option("Instance type of the nodes, such as ml.p4d.24xlarge.")
    s3: str | None = option("s3://BUCKET/PREFIX for the source, checkpoints and output.")
    source: str = option("Directory to copy to the nodes; script paths are relative to it. Default: this one.", ".")
    checkpoints: str | None = option(
        "s3://BUCKET/PREFIX of the run's directory; use the same one to continue a run. Default: below --s3."
    )
    spot: bool = option("Use spot instances; the run continues from its checkpoints.", False)
    max_wait: str = option("Extra time that a spot job may wait for instances. Default: 24h.", "24h")
    distribution: str | None = option(
        "pytorchddp, torch_distributed or smdistributed: let SageMaker's image start a script's ranks."
    )
    volume_gb: int = option("Disk of each node, in GB. Default: 30.", 30)
    tag: tuple[str, ...] = option("KEY=VALUE, for the job; may be repeated.", ())
    region: str | None = option("AWS region. Default: the configured one.")

    def __post_init__(self) -> None:
        for flag, value, example in (
            (
                "--image",
                self.image,
                "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.6.0-gpu-py312",
            ),
            ("--role", self.role, "arn:aws:iam::123456789012:role/training"),
            ("--instance-type", self.instance_type, "ml.g5.12xlarge"),
            ("--s3", self.s3, "s3://my-bucket/training"),
        ):
            if not value:
                raise ConfigError(f"--on sagemaker needs {flag}, such as {example}.")
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", self.role or ""):
            raise ConfigError(f"--role must be such as arn:aws:iam::123456789012:role/NAME, but is {self.role!r}.")
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", self.instance_type or ""):
            raise ConfigError(f"--instance-type must be such as ml.g5.12xlarge, but is {self.instance_type!r}.")
        for flag, value in (("--s3", self.s3), ("--checkpoints", self.checkpoints)):
            if value is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{2,62}(/.*)?", value):
                raise ConfigError(
                    f"{flag} must be s3://BUCKET/PREFIX, with a bucket of 3 to 63 characters, but is {value!r}."
                )
        if self.distribution is not None and self.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"--distribution must be one of {', '.join(DISTRIBUTIONS)}, but is {self.distribution!r}."
            )
        if self.volume_gb < 1:
            raise ConfigError(f"--volume-gb must be at least 1, but is {self.volume_gb}.")
        self.max_wait_s()
        self.tags()

    def max_wait_s(self) -> int:
        """Return the seconds that a spot job may wait for instances, over all interruptions."""
        return int(parse_duration_s(self.max_wait, "max_wait"))

    def tags(self) -> list[dict[str, str]]:
        """Return the tags in the API's form."""
        pairs = [word.partition("=") for word in self.tag]
        for key, equals, value in pairs:
            if not key or not equals:
                raise ConfigError(f"--tag must be KEY=VALUE, but is {key + equals + value!r}.")
        return [{"Key": key, "Value": value} for key, _, value in pairs]
