"""From a pretrained directory and tokens on S3 to a served answer, as it is typed; only paths and sizes are small."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugins.lm.tests.directories import TEXTS, save_model, write_lines
from tests.processes import Processes

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

pytestmark = [pytest.mark.system, pytest.mark.aws, pytest.mark.slow]

OWN = ("--threads", "1", "--num-workers", "0", "--quiet")
PRETRAIN = (
    *("train", "hf:model", "--from-scratch", "--data", "bin:s3://corpus/web-*.bin=0.7,bin:code.bin=0.3"),
    *("--context", "16", "--strategy", "fsdp", "--compile", "--tokens", "2K", "--lr-schedule", "cosine"),
    *("--warmup", "1%", "--microbatches", "6"),
)


@pytest.fixture
def files(aws: Any, tmp_path: Path) -> None:
    """A corpus in S3; a model, chats and tokens in the working directory."""
    save_model(tmp_path / "model")
    chats = [(TEXTS[n % 8], TEXTS[n * 3 % 8]) for n in range(24)]
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats]
    write_lines(tmp_path / "chat.jsonl", [{"messages": messages} for messages in turns])
    draw = np.random.default_rng(0)
    aws.create_bucket(Bucket="corpus")
    for number in range(2):
        content = draw.integers(0, 256, 640).astype("<u2").tobytes()
        aws.put_object(Bucket="corpus", Key=f"web-{number}.bin", Body=content)
    draw.integers(0, 256, 640).astype("<u2").tofile(tmp_path / "code.bin")


def paceline(processes: Processes, *words: str) -> str:
    done = processes.paceline(*words, timeout_s=240)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.usefixtures("files")
def test_chats_are_trained_exported_and_served(run_processes: Processes, tmp_path: Path) -> None:
    paceline(
        run_processes,
        *("train", "hf:model", "--data", "chat.jsonl", "--pack", "64", "--lora", "rank=2", "--nproc", "2"),
        *(*OWN, "--run-dir", "run"),
    )
    audited = audit(RunDirectory(tmp_path / "run"))
    assert audited.clean
    assert "24 documents" in audited.verdict
    for kind, file, *merge in (("hf", "config.json", "--merge"), ("peft", "adapter_config.json")):
        paceline(run_processes, "export", "run", "--format", kind, *merge)
        assert (tmp_path / "run" / kind / file).is_file()
    # What vLLM would get: a program of its name writes down its words.
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "vllm").write_text(f"#!/bin/sh\necho \"$@\" > '{tmp_path}/words'\nexit 3\n")
    (programs / "vllm").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    served = run_processes.paceline("serve", "run", "--engine", "vllm", "--port", "0", env={"PATH": path})
    assert served.returncode != 0
    command, model, *rest = (tmp_path / "words").read_text().split()
    assert (command, model, rest[:3]) == ("serve", "hf", ["--host", "127.0.0.1", "--port"])


@pytest.mark.usefixtures("files")
def test_tokens_on_s3_are_trained_and_another_machine_resumes_from_the_address(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    paceline(run_processes, *PRETRAIN, *OWN, "--nproc", "3", "--run-dir", "whole")
    words = (*PRETRAIN, *OWN, "--nproc", "2", "--checkpoint-every", "4steps", "--backup-to", "s3://bucket/run1")
    popen = run_processes.start([sys.executable, "-m", "paceline", *words, "--run-dir", "run1"])
    events = tmp_path / "run1" / "events.jsonl"
    wait_until(lambda: events.exists() and '"backup"' in events.read_text(), "the copy of a checkpoint", 240)
    os.killpg(popen.pid, signal.SIGKILL)
    assert popen.wait() == -signal.SIGKILL  # it had not finished
    shutil.rmtree(tmp_path / "run1")  # as on another machine, which has the address alone
    paceline(run_processes, "resume", "s3://bucket/run1", "--nproc", "3", "--run-dir", "resumed", "--quiet")
    whole, resumed = (RunDirectory(tmp_path / name).read_result() or {} for name in ("whole", "resumed"))
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert audit(RunDirectory(tmp_path / "resumed")).clean


def test_a_configuration_is_planned_without_data(run_processes: Processes, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    words = ("plan", "hf:model", "--context", "64", "--gpus", "8", "--gpu-memory")
    assert "fsdp" in paceline(run_processes, *words, "96GiB")
    assert "Nothing fits" in run_processes.paceline(*words, "10KiB").stdout
