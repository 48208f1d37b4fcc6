"""What the ranks of ``--preflight`` check where a job's nodes are pods of Kubernetes."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import yaml

from paceline_checks.preflight.spec import PreflightSpec

KUBERNETES = ("--on", "kubernetes", "--image", "i:1", "--name", "mine")


def test_what_pods_check(run_processes: Any) -> None:
    """The run's directory, which is in a volume; for a script none: nothing of the machine that submits is there."""
    job = (*KUBERNETES, "--kind", "job", "--preflight", "--dry-run", "--nodes", "2")

    def run_of(*words: str) -> str | None:
        done = run_processes.paceline(*words)
        assert done.returncode == 0, done.stderr
        *_, job = yaml.safe_load_all(done.stdout)
        [container] = job["spec"]["template"]["spec"]["containers"]
        command = container["command"]
        text = shlex.split(command[command.index("--preflight") + 1])[-1]
        return msgspec.json.decode(text, type=PreflightSpec).run

    assert run_of("launch", *job, "--", "s.py") is None
    assert run_of("train", "fashion-mnist", *job, "--volume", "runs:/runs", "--run-dir", "/runs/a") == "/runs/a"
