"""``--backup-to s3://...`` and what reads it, against moto's S3, as a user meets them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from plugins.stores.tests.conftest import SECRET
from tests.processes import Processes
from tests.runs.packages.conftest import put_package

import paceline
from paceline.core.errors import CheckpointError
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory
from paceline.runs.package import open_package
from paceline.runs.package_registry import PackageReference, Registry
from paceline_stores.objects import download
from paceline_stores.package_store import PackageStore

pytestmark = pytest.mark.aws

TASK = Path(__file__).with_name("slow_task.py")
LENGTH = ("--max-steps", "30", "--eval-every", "7steps", "--checkpoint-every", "10steps", "--keep-checkpoints", "2")
Faults = Callable[..., None]


@pytest.fixture
def faults(server: str) -> Faults:
    """Let the next ``count`` requests fail that match."""

    def put(kind: str, match: str = ".", count: int = 1) -> None:
        fault = json.dumps({"kind": kind, "match": match, "count": count}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{server}/faults", fault, method="PUT")).close()

    put("none", count=0)
    return put


def keys(aws: Any) -> list[str]:
    return [each["Key"] for each in aws.list_objects_v2(Bucket="bucket").get("Contents", ())]


def train(processes: Processes, address: str, *more: str, env: dict[str, str] | None = None) -> CompletedProcess[str]:
    words = ("train", f"{TASK}:Slow", *LENGTH, "--threads", "1", "--backup-to", address, "--run-dir", "runs/a", *more)
    return processes.paceline(*words, env=env)


def events(run: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(Path(run)).read_events() if event["event"] == kind]


def sha(run: str) -> Any:
    return (RunDirectory(Path(run)).read_result() or {})["model_sha256"]


def test_a_machine_that_has_only_the_address_continues(
    run_processes: Processes, aws: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    paceline_ = run_processes.paceline
    whole = paceline_("train", f"{TASK}:Slow", *LENGTH, "--threads", "1", "--run-dir", "runs/whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    words = [sys.executable, "-m", "paceline", "train", f"{TASK}:Slow", *LENGTH, "--threads", "1"]
    popen = run_processes.start(
        [*words, "--backup-to", "s3://bucket/team/run1", "--run-dir", "runs/a"], env={"STOP_AT": "21"}
    )
    wait_until(lambda: any(event["step"] >= 20 for event in events("runs/a", "backup")), "the copy of step 20")
    rival = paceline_("resume", "s3://bucket/team/run1", "--run-dir", "runs/rival")
    assert rival.returncode == 2, rival.stderr
    assert f"is written by process {popen.pid} of" in rival.stderr
    assert f"for {tmp_path}/runs/a" in rival.stderr
    os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    for run in ("runs/a", "runs/rival"):
        shutil.rmtree(run)

    resumed = paceline_("resume", "s3://bucket/team/run1", "--nproc", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert sha("runs/run1") == sha("runs/whole")
    assert events("runs/run1", "started")[-1]["world_size"] == 2
    assert events("runs/run1", "started")[-1]["step"] >= 20
    assert audit(RunDirectory(Path("runs/run1"))).clean

    # What it has made is in the store as well, and a finished run is finished from there, too.
    finished = paceline_("resume", "s3://bucket/team/run1", "--run-dir", "runs/b")
    assert "runs/b has finished; nothing is left to train." in finished.stderr + finished.stdout
    assert sha("runs/b") == sha("runs/whole")

    tuned = paceline_(
        *("train", f"{TASK}:Slow", "--max-steps", "1", "--threads", "1", "--quiet"),
        *("--init-from", "s3://bucket/team/run1@last", "--run-dir", "runs/tuned"),
    )
    assert tuned.returncode == 0, tuned.stderr
    assert RunDirectory(Path("runs/tuned")).read_manifest()["parent"]["model_sha256"] == sha("runs/whole")
    forked = paceline_("fork", "s3://bucket/team/run1", "--max-steps", "32", "--run-dir", "runs/fork")
    assert forked.returncode == 0, forked.stderr
    fork = RunDirectory(Path("runs/fork")).read_manifest()
    assert fork["forked"]["path"] == "s3://bucket/team/run1"
    assert "backup_to" not in fork["config"], "the address is of the other run"
    loaded = paceline.load("s3://bucket/team/run1", "last").state_dict()
    for name, value in paceline.load("runs/whole", "last").state_dict().items():
        assert torch.equal(loaded[name], value)

    assert not any("writer.json" in key for key in keys(aws)), "the writer has left"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    stored = [aws.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys(aws)]
    assert not any(SECRET.encode() in content for content in (*(path.read_bytes() for path in written), *stored))


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("s3://no-such-bucket/run1", None, "there is no such bucket or object. Check the address."),
        ("s3://bucket/run1", "denied", "the store denies it .* Check the credentials"),
        ("s3://bucket/run1", "expired", "the store denies it .*expired"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_training(
    run_processes: Processes, aws: Any, faults: Faults, address: str, kind: str | None, message: str
) -> None:
    if kind is not None:
        faults(kind, "PUT /bucket/run1/writer.json", 100)
    ended = train(run_processes, address)
    assert ended.returncode == 2, ended.stderr
    assert re.search(rf"paceline: --backup-to: {address} cannot be .*{message}", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    assert SECRET not in ended.stderr
    assert not RunDirectory(Path("runs/a")).exists()


@pytest.mark.slow
@pytest.mark.cold  # fsspec reads its configuration when it is imported
def test_a_store_that_fails_stops_no_training(
    run_processes: Processes, aws: Any, faults: Faults, wait_until: Callable[..., None]
) -> None:
    words = [sys.executable, "-m", "paceline", "train", f"{TASK}:Slow", "--max-steps", "30", "--eval-every", "never"]
    words += ["--checkpoint-every", "10steps", "--threads", "1", "--backup-to", "s3://bucket/run1"]
    popen = run_processes.start([*words, "--run-dir", "runs/a"], env={"WAIT_FOR": "go"})
    wait_until(lambda: any("writer.json" in key for key in keys(aws)), "the claim")
    faults("error", "PUT /bucket/run1/checkpoints/.*model", 10**6)
    Path("go0").touch()
    wait_until(lambda: events("runs/a", "backup failed"), "a failed copy of step 10")
    assert not any(key.endswith("manifest.json") for key in keys(aws))
    faults("cut", "PUT /bucket/run1/checkpoints/.*optimizers", 4)
    wait_until(lambda: events("runs/a", "backup"), "the copy is repeated")
    faults("silence", "PUT /bucket/run1/run/", 4)
    Path("go10").touch()
    wait_until(lambda: len(events("runs/a", "backup")) == 2, "the copy of step 20")
    faults("expired", " /bucket/run1/", 10**6)
    Path("go20").touch()
    ended = run_processes.finish(popen)
    assert ended.returncode == 0, ended.stderr
    assert "no backup of step 10 yet: s3://bucket/run1 cannot be written" in ended.stderr
    assert "s3://bucket/run1 lacks the checkpoint of step 30: its copy failed." in ended.stderr
    assert sha("runs/a")
    faults("none", count=0)
    resumed = run_processes.paceline("resume", "s3://bucket/run1", "--run-dir", "runs/b")
    assert resumed.returncode == 0, resumed.stderr
    assert events("runs/b", "started")[-1]["step"] == 20
    assert sha("runs/b") == sha("runs/a")


@pytest.mark.cold
def test_a_stopped_run_waits_for_its_last_upload(
    run_processes: Processes, aws: Any, faults: Faults, wait_until: Callable[..., None]
) -> None:
    words = [sys.executable, "-m", "paceline", "train", f"{TASK}:Slow", "--max-steps", "30", "--eval-every", "never"]
    words += ["--threads", "1", "--backup-to", "s3://bucket/run1", "--run-dir", "runs/a"]
    popen = run_processes.start(words, env={"WAIT_FOR": "go"})
    wait_until(lambda: any("writer.json" in key for key in keys(aws)), "the claim")
    faults("error", "PUT /bucket/run1/checkpoints/.*model", 1)  # it is repeated
    popen.send_signal(signal.SIGTERM)
    Path("go0").touch()
    ended = run_processes.finish(popen)
    assert ended.returncode == 75, ended.stderr
    assert [event["step"] for event in events("runs/a", "backup")] == [1], ended.stderr
    assert "s3://bucket/run1 has the checkpoint of step 1." in ended.stderr
    assert any(key.endswith("manifest.json") for key in keys(aws))


def test_data_by_address_is_downloaded_once_and_whole(
    aws: Any, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content in (("web-1.bin", b"one"), ("web-0.bin", b"zero"), ("deep/web-2.bin", b"two"), ("other", b"")):
        aws.put_object(Bucket="bucket", Key=f"corpus/{name}", Body=content)
    faults("expired", ".", 100)
    with pytest.raises(paceline.CheckpointError, match=r"Check the credentials .* whether they have expired"):
        download("s3://bucket/corpus/web-*.bin")
    faults("none", count=0)
    files = download("s3://bucket/corpus/web-*.bin")
    assert [(file.name, file.read_bytes()) for file in files] == [("web-0.bin", b"zero"), ("web-1.bin", b"one")]
    record = json.loads((files[1].parent / "download.json").read_text())
    assert record["address"] == "s3://bucket/corpus/web-1.bin"
    assert record["sha256"] == hashlib.sha256(b"one").hexdigest()
    before = files[1].stat().st_mtime_ns
    assert download("s3://bucket/corpus/web-1.bin") == files[1:]
    assert files[1].stat().st_mtime_ns == before
    files[1].write_bytes(b"o")  # damaged: its size tells
    assert download("s3://bucket/corpus/web-1.bin")[0].read_bytes() == b"one"
    aws.put_object(Bucket="bucket", Key="corpus/web-1.bin", Body=b"new")
    assert download("s3://bucket/corpus/web-1.bin")[0].read_bytes() == b"new"
    for address in ("s3://bucket/corpus/none.bin", "s3://bucket/corpus/none-*.bin", "s3://none/a.bin"):
        with pytest.raises(paceline.CheckpointError, match=r"Check the address"):
            download(address)


def test_a_package_is_seen_whole_or_not_at_all(aws: Any, faults: Faults, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    digest = put_package(registry)
    manifest = open_package(registry.path_of(digest)).manifest

    def read(name: str) -> Iterator[bytes]:
        yield (registry.path_of(digest) / name).read_bytes()

    store = PackageStore("s3://bucket/models")
    faults("denied", "PUT /bucket/models/.*/weights")
    with pytest.raises(CheckpointError, match="the store denies it"):
        store.store(manifest, read)
    assert not store.is_whole(digest)
    assert store.digests() == []
    store.store(manifest, read)
    store.put_tag(PackageReference("demo", "prod"), digest)
    assert store.is_whole(digest)
    assert store.resolve("demo@prod") == store.resolve(digest[:10]) == digest
    weights = b"".join(store.read(digest, "weights.safetensors", manifest.files["weights.safetensors"].size))
    assert weights == (registry.path_of(digest) / "weights.safetensors").read_bytes()
