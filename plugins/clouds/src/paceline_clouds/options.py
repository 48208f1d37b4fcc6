"""The options of ``--on sagemaker``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.options import at_least, parse_duration_s, require_form
from paceline.launch.launcher import option

DISTRIBUTIONS = {
    "pytorchddp": "sagemaker_pytorch_ddp_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
    "smdistributed": "sagemaker_distributed_dataparallel_enabled",
}
"""SageMaker's own ways to start the ranks, and their names in its training toolkit."""

_S3, _S3_FORM = r"s3://[a-z0-9][a-z0-9.-]{2,62}(/.*)?", "s3://BUCKET/PREFIX, with a bucket of 3 to 63 characters"


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
        for flag, text, pattern, form in (
            ("--role", self.role, r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "such as arn:aws:iam::123456789012:role/NAME"),
            ("--instance-type", self.instance_type, r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "such as ml.g5.12xlarge"),
            ("--s3", self.s3, _S3, _S3_FORM),
            ("--checkpoints", self.checkpoints, _S3, _S3_FORM),
            ("--distribution", self.distribution, "|".join(DISTRIBUTIONS), f"one of {', '.join(DISTRIBUTIONS)}"),
        ):
            if text is not None:
                require_form(flag, pattern, text, form)
        at_least("volume_gb", self.volume_gb, 1)
        self.max_wait_s()
        self.tags()

    def max_wait_s(self) -> int:
        """Return the seconds that a spot job may wait for instances, over all interruptions."""
        return int(parse_duration_s(self.max_wait, "max_wait"))

    def tags(self) -> list[dict[str, str]]:
        """Return the tags in the API's form."""
        pairs = [require_form("--tag", r"([^=]+)=(.*)", word, "KEY=VALUE") for word in self.tag]
        return [{"Key": pair[1], "Value": pair[2]} for pair in pairs]
