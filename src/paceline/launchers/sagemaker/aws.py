"""Amazon's API: its clients, and its refusals in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import LaunchError

_T = TypeVar("_T")


class Refused(LaunchError):
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
    settings = Config(
        connect_timeout=5, read_timeout=30, retries={"total_max_attempts": attempts, "mode": "standard"}
    )
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
        raise Refused(f"could not {what}: {error}. Run `aws configure`, or set AWS_PROFILE.") from error
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
        raise Refused(
            f"AWS refused to {what}: {code}: {message}. {advice}".rstrip(), code, lost=status >= 500
        ) from error
    except BotoCoreError as error:
        raise Refused(
            f"could not {what}: {str(error).rstrip('.')}. Check the network and --region.",
            lost=isinstance(error, HTTPClientError),
        ) from error
