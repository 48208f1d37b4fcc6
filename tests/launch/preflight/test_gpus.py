"""GPU checks, on outputs in the forms that NVIDIA documents: of nvidia-smi, and in the kernel's log.

``nvidia-smi`` here is a script that prints them: the form is NVIDIA's, the machine that it describes is ours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.launch.preflight.examined import found

from paceline.launch.preflight.facts import parse_gpus, parse_links, parse_xids
from paceline.launch.preflight.spec import PreflightReport

# index, name, driver_version, memory.total, memory.used, temperature.gpu,
# ecc.errors.uncorrected.volatile.total, clocks_throttle_reasons.active
TWO_GOOD = """\
0, NVIDIA A100-SXM4-80GB, 535.161.08, 81920, 4, 33, 0, 0x0000000000000001
1, NVIDIA A100-SXM4-80GB, 535.161.08, 81920, 4, 35, 0, 0x0000000000000000
"""
TWO_BAD = """\
0, NVIDIA A100-SXM4-80GB, 535.161.08, 81920, 40536, 91, 0, 0x0000000000000068
1, NVIDIA A100-SXM4-80GB, 535.161.08, 81920, 4, 36, 3, 0x0000000000000004
"""
CONSUMER = "0, NVIDIA GeForce RTX 4090, 550.54.14, 24564, 1, 41, [N/A], 0x0000000000000001\n"
HEAD = """\
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.161.08             Driver Version: 535.161.08   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
"""
NVLINK = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\t0-63\t0\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\t0-63\t0\t\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\t64-127\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
TWO_SOCKETS = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tSYS\t0-15\t0
GPU1\tPIX\t X \tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \t16-31\t1
"""
LOG = """\
[    2.114080] nvidia-nvlink: Nvlink Core is being initialized, major device number 236
[ 8123.200101] NVRM: GPU at PCI:0000:3b:00: GPU-2b1c
[ 8123.200105] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
"""


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


def test_the_topology() -> None:
    assert parse_links(NVLINK) == dict.fromkeys(["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"], "NV12")
    assert parse_links(TWO_SOCKETS) == {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"}
    assert parse_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}


def test_the_kernels_log() -> None:
    [xid] = parse_xids(LOG)
    assert xid.startswith("Xid 79 (PCI:0000:3b:00): ")
    assert xid.endswith("GPU has fallen off the bus.")


def programs(directory: Path, *, table: str, links: str = "", log: str | None = "", error: str = "") -> Path:
    """A directory for PATH with an ``nvidia-smi`` and a ``dmesg``."""
    directory.mkdir()
    for name, text in (("table", table), ("head", HEAD), ("links", links), ("log", log or "")):
        (directory / name).write_text(text)
    fails = f"echo '{error}'; exit 9" if error else ""
    scripts = {
        "nvidia-smi": f'{fails}\ncase "$1" in\n--query*) cat {directory}/table;;\n'
        f"topo) cat {directory}/links;;\n*) cat {directory}/head;;\nesac",
        "dmesg": f"cat {directory}/log" if log is not None else "echo 'not permitted' >&2; exit 1",
    }
    for name, script in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    return directory


def examined(run_processes: Any, path: Path, *options: str) -> PreflightReport:
    variables = {"PATH": os.pathsep.join([str(path), os.environ["PATH"]])}
    done = run_processes.paceline("doctor", "--json", *options, env=variables)
    report = PreflightReport.from_json(json.loads(done.stdout))
    assert done.returncode == (1 if report.status == "fail" else 0), done.stderr
    return report


def test_gpus_that_fail(run_processes: Any, tmp_path: Path) -> None:
    """The torch here is built without CUDA, which is found first; health is judged all the same."""
    path = programs(tmp_path / "bin", table=TWO_BAD, links=TWO_SOCKETS, log=LOG)
    report = examined(run_processes, path, "--gpus-per-node", "2")
    health = found(report, "gpu-health")
    assert health.status == "fail"
    for part in (
        "GPU 1 has 3 uncorrected memory errors",
        "Xid 79",
        "GPU 0 is slowed at 91 °C (hardware slowdown, thermal slowdown, hardware thermal slowdown)",
        "GPU 0 has 40536 MiB already in use",
    ):
        assert part in health.found
    links = found(report, "gpu-links")
    assert links.status == "warn"
    assert "0-2, 1-2" in links.found


def test_a_driver_that_does_not_answer(run_processes: Any, tmp_path: Path) -> None:
    words = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    report = examined(run_processes, programs(tmp_path / "bin", table="", error=words))
    gpus = found(report, "gpus")
    assert (gpus.status, gpus.found) == ("fail", f"nvidia-smi: {words}")


@pytest.mark.gpu
def test_real_gpus(run_processes: Any) -> None:
    report = examined(run_processes, Path("/nowhere"), "--gpus-per-node", "1")
    assert found(report, "gpus").status == "pass"
    assert "GPU" in found(report, "gpus").found or "NVIDIA" in found(report, "gpus").found
