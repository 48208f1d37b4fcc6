"""moto's S3, and the environment in which commands find it."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.processes import Processes

SERVER = Path(__file__).with_name("s3_server.py")
SECRET = "the-secret-of-the-test"
QUICK = {"connect_timeout": 1, "read_timeout": 1, "retries": {"max_attempts": 2}}


@pytest.fixture(scope="module")
def server(module_processes: Processes) -> str:
    """The address of S3."""
    popen = module_processes.start([sys.executable, SERVER], shared=True)
    assert popen.stdout is not None
    return popen.stdout.readline().strip()


@pytest.fixture
def aws(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of S3, with an empty bucket; the environment of commands."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "FSSPEC_S3": json.dumps({"config_kwargs": QUICK}),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    urllib.request.urlopen(f"{server}/moto-api/reset", data=b"").close()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    return client
