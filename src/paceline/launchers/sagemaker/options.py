"""What ``--on sagemaker`` can be told."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config import parse_duration_s
from paceline.errors import ConfigError
from paceline.launchers.names import option

DISTRIBUTIONS = {
    "pytorchddp": "sagemaker_pytorch_ddp_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
    "smdistributed": "sagemaker_distributed_dataparallel_enabled",
}
"""SageMaker's own ways to start the ranks, and what its training toolkit calls them."""


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """Options of SageMaker jobs."""

    image: str | None = option("The container image.")
    role: str | None = option("The ARN of the role that the job acts as.")
    instance_type: str | None = option("The machines' type, such as ml.p4d.24xlarge.")
    s3: str | None = option("s3://BUCKET/PREFIX, where the source, checkpoints and output go.")
    source: str = option(
        "The directory that is copied to the machines; a script is named from there. Default: this one.", "."
    )
    checkpoints: str | None = option(
        "s3://BUCKET/PREFIX of the run's directory; the same one continues a run. Default: below --s3."
    )
    spot: bool = option("Use spot instances; the run goes on from its checkpoints.", False)
    max_wait: str = option("How long a spot job may take with its waiting. Default: 24h more.", "24h")
    distribution: str | None = option(
        "pytorchddp, torch_distributed or smdistributed: SageMaker's own image starts a script's ranks."
    )
    volume_gb: int = option("Disk of each machine, in GB. Default: 30.", 30)
    tag: tuple[str, ...] = option("KEY=VALUE, for the job; may be repeated.", ())
    region: str | None = option("The AWS region. Default: the one that AWS is configured for.")

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
            raise ConfigError(
                f"--role must be such as arn:aws:iam::123456789012:role/NAME, but is {self.role!r}."
            )
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", self.instance_type or ""):
            raise ConfigError(
                f"--instance-type must be such as ml.g5.12xlarge, but is {self.instance_type!r}."
            )
        for flag, value in (("--s3", self.s3), ("--checkpoints", self.checkpoints)):
            if value is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/.*)?", value):
                raise ConfigError(f"{flag} must be s3://BUCKET/PREFIX, but is {value!r}.")
        if self.distribution is not None and self.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"--distribution must be one of {', '.join(DISTRIBUTIONS)}, but is {self.distribution!r}."
            )
        if self.volume_gb < 1:
            raise ConfigError(f"--volume-gb must be at least 1, but is {self.volume_gb}.")
        self.max_wait_s()
        self.tags()

    def max_wait_s(self) -> int:
        """Seconds that a spot job may wait for machines, over all interruptions."""
        return int(parse_duration_s(self.max_wait, "max_wait"))

    def tags(self) -> list[dict[str, str]]:
        """Tags as the API takes them."""
        pairs = [word.partition("=") for word in self.tag]
        for key, equals, value in pairs:
            if not key or not equals:
                raise ConfigError(f"--tag must be KEY=VALUE, but is {key + equals + value!r}.")
        return [{"Key": key, "Value": value} for key, _, value in pairs]
