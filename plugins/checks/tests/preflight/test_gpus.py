"""GPU checks, on outputs in the form that NVIDIA documents.

``nvidia-smi`` here is a script that prints them: the form is NVIDIA's, the machine that it describes is ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plugins.checks.tests.preflight.examined import found

from paceline_checks.preflight.facts import parse_gpus
from paceline_checks.preflight.spec import PreflightReport

# index, name, driver_version, memory.used, temperature.gpu,
# ecc.errors.uncorrected.volatile.total, clocks_throttle_reasons.active
TWO_GOOD = """\
0, NVIDIA A100-SXM4-80GB, 535.161.08, 4, 33, 0, 0x0000000000000001
1, NVIDIA A100-SXM4-80GB, 535.161.08, 4, 35, 0, 0x0000000000000000
"""
TWO_BAD = """\
0, NVIDIA A100-SXM4-80GB, 535.161.08, 40536, 91, 0, 0x0000000000000068
1, NVIDIA A100-SXM4-80GB, 535.161.08, 4, 36, 3, 0x0000000000000004
"""
CONSUMER = "0, NVIDIA GeForce RTX 4090, 550.54.14, 1, 41, [N/A], 0x0000000000000001\n"


def test_the_table() -> None:
    first, second = parse_gpus(TWO_BAD)
    assert first["driver"] == "535.161.08"
    assert (first["temperature_c"], first["used_mib"]) == (91, 40536)
    assert first["slowed_by"] == ["hardware slowdown", "thermal slowdown", "hardware thermal slowdown"]
    assert second["uncorrected_errors"] == 3
    assert second["slowed_by"] == [], "a power cap is how GPUs are run"
    assert [gpu["slowed_by"] for gpu in parse_gpus(TWO_GOOD)] == [[], []]
    [consumer] = parse_gpus(CONSUMER)
    assert consumer["uncorrected_errors"] is None, "it has no ECC"


def programs(directory: Path, script: str) -> Path:
    """A directory for PATH with an ``nvidia-smi``."""
    directory.mkdir()
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "nvidia-smi").chmod(0o755)
    return directory


def examined(run_processes: Any, path: Path, *options: str) -> PreflightReport:
    variables = {"PATH": os.pathsep.join([str(path), os.environ["PATH"]])}
    done = run_processes.paceline("doctor", "--json", *options, env=variables)
    report = msgspec.json.decode(done.stdout, type=PreflightReport)
    assert done.returncode == (1 if report.status == "fail" else 0), done.stderr
    return report


def test_gpus_that_fail(run_processes: Any, tmp_path: Path) -> None:
    """The torch here is built without CUDA, which is found first; health is judged all the same."""
    path = programs(tmp_path / "bin", f"cat <<END\n{TWO_BAD}END")
    report = examined(run_processes, path, "--gpus-per-node", "2")
    health = found(report, "gpu-health")
    assert health.status == "fail"
    for part in (
        "GPU 1 has 3 uncorrected memory errors",
        "GPU 0 is slowed at 91 °C (hardware slowdown, thermal slowdown, hardware thermal slowdown)",
        "GPU 0 has 40536 MiB already in use",
    ):
        assert part in health.found


def test_a_driver_that_does_not_answer(run_processes: Any, tmp_path: Path) -> None:
    words = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    report = examined(run_processes, programs(tmp_path / "bin", f"echo '{words}'; exit 9"))
    gpus = found(report, "gpus")
    assert (gpus.status, gpus.found) == ("fail", f"nvidia-smi: {words}")


@pytest.mark.gpu
def test_real_gpus(run_processes: Any) -> None:
    report = examined(run_processes, Path("/nowhere"), "--gpus-per-node", "1")
    assert found(report, "gpus").status == "pass"
    assert "GPU" in found(report, "gpus").found or "NVIDIA" in found(report, "gpus").found
