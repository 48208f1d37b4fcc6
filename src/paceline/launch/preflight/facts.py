"""Facts about one node."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distributions, requires
from pathlib import Path
from re import match
from typing import Any, TypedDict

import psutil

from paceline.core import parent_death

# --- GPUs, by NVIDIA's tools. No torch ---
#
# Fields and names are those of ``nvidia-smi --help-query-gpu``; bits of clock reasons are NVML's
# ``nvmlClocksEventReason*``; Xid errors are listed in NVIDIA's "XID Errors" document.


_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
)
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_TIME_LIMIT_S = 60


class Gpu(TypedDict):
    """One GPU; values that it does not report are None."""

    index: int
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    temperature_c: int | None
    uncorrected_errors: int | None
    slowed_by: list[str]


class GpuFacts(TypedDict):
    """All GPUs of a node.

    ``error`` is a failure of nvidia-smi. ``cuda`` is the newest CUDA that the driver supports. ``links`` are the
    connections of pairs of GPUs: ``{"0-1": "NV18"}``. ``xids`` are GPU errors in the kernel's log, None if it
    cannot be read.
    """

    gpus: list[Gpu]
    error: str | None
    cuda: str | None
    links: dict[str, str]
    xids: list[str] | None


def gpu_facts() -> GpuFacts:
    """Query nvidia-smi, if it is installed."""
    facts = GpuFacts(gpus=[], error=None, cuda=None, links={}, xids=None)
    try:
        table = _run("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return facts
    except (OSError, subprocess.SubprocessError) as error:
        facts["error"] = _describe_error(error)
        return facts
    facts["gpus"] = parse_gpus(table)
    for name, command in (
        ("cuda", ("nvidia-smi",)),
        ("links", ("nvidia-smi", "topo", "-m")),
        ("xids", ("dmesg",)),
    ):
        try:
            text = _run(*command)
        except (OSError, subprocess.SubprocessError):
            continue
        if name == "cuda":
            match = re.search(r"CUDA Version:\s*([\d.]+)", text)
            facts["cuda"] = match[1] if match else None
        elif name == "links":
            facts["links"] = parse_links(text)
        else:
            facts["xids"] = parse_xids(text)
    return facts


def parse_gpus(table: str) -> list[Gpu]:
    """Parse the lines of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    gpus = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            continue
        reasons = int(cells[7], 16) if cells[7].startswith("0x") else 0
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                memory_mib=_number(cells[3]),
                used_mib=_number(cells[4]),
                temperature_c=_number(cells[5]),
                uncorrected_errors=_number(cells[6]),
                slowed_by=[name for bit, name in _SLOWED.items() if reasons & bit],
            )
        )
    return gpus


def parse_links(matrix: str) -> dict[str, str]:
    """Parse the pairs of GPUs of ``nvidia-smi topo -m``: ``{"0-1": "NV18", "0-2": "SYS"}``."""
    links = {}
    # The header may contain the terminal's escape codes for underlining.
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and words[1:2] != ["X"]), [])
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    for words in lines:
        if words[:1] and words[0] in columns and words is not header:
            for column, link in zip(columns, words[1:], strict=False):
                first, second = int(words[0][3:]), int(column[3:])
                if first < second:
                    links[f"{first}-{second}"] = link
    return links


def parse_xids(log: str) -> list[str]:
    """Parse GPU errors of the kernel's log: ``Xid 79 (PCI:0000:3b:00): GPU has fallen off the bus.``"""
    errors = re.findall(r"NVRM: Xid \((PCI:[\w:.]+)\): (\d+), *(.*)", log)
    return [f"Xid {number} ({device}): {text}"[:200] for device, number, text in errors]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)
    return done.stdout


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _describe_error(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stdout + error.stderr).strip().partition("\n")[0] or f"exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_TIME_LIMIT_S} s"
    return str(error)


# --- Other facts. torch is imported in a separate process ---


_IMPORT_LIMIT_S = 300
_INFINIBAND = Path("/sys/class/infiniband")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Interface(TypedDict):
    """A network interface that is up; ``mbit_per_s`` is 0 if unknown."""

    name: str
    address: str
    mbit_per_s: int


class NodeFacts(TypedDict):
    """All facts about a node; None for "no limit" and "unknown".

    ``torch`` and ``task`` have an "error" if the import failed; ``task`` is None without a task. ``named`` are
    the addresses of the node's own name.
    """

    host: str
    python: str
    libraries: dict[str, str]
    needed: list[str]
    torch: dict[str, Any]
    task: dict[str, Any] | None
    gpus: GpuFacts
    interfaces: list[Interface]
    named: list[str]
    open_files: int | None
    most_open_files: int | None
    locked_memory: int | None
    rdma: list[str]
    shm_free: int | None
    cores: int
    usable_cores: int
    core_quota: float | None


def collect(task: str) -> NodeFacts:
    """Collect the facts of this node; importing torch takes some seconds."""
    import_facts = import_torch_and(task)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        libraries=_libraries(),
        needed=_needed(),
        torch=import_facts["torch"],
        task=import_facts.get("task"),
        gpus=gpu_facts(),
        interfaces=interfaces(),
        named=_addresses_of_name(),
        open_files=_limit(soft),
        most_open_files=_limit(hard),
        locked_memory=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        rdma=sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else [],
        shm_free=_free("/dev/shm"),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        core_quota=_core_quota(),
    )


def import_torch_and(task: str) -> dict[str, Any]:
    """Run :mod:`paceline.launch.preflight.imports` in a separate process, which an import may crash."""
    try:
        done = run_python("paceline.launch.preflight.imports", [task] if task else [], time_limit_s=_IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"torch": {"error": f"the import did not finish within {_IMPORT_LIMIT_S} s"}}
    facts: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        with suppress(ValueError):
            facts |= json.loads(line)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    crash = {"error": f"the import ended its process: {last}"}
    facts.setdefault("torch", crash)
    if task:
        facts.setdefault("task", crash)
    return facts


def run_python(module: str, arguments: Sequence[str], *, time_limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module of Paceline in a process that ends with this one."""
    return subprocess.run(
        parent_death.kill_with_parent_command([sys.executable, "-P", "-m", module, *arguments]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=time_limit_s,
    )


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an IPv4 address, without loopback."""
    states = psutil.net_if_stats()
    return [
        Interface(name=name, address=entry.address, mbit_per_s=states[name].speed)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
        and name in states
        and states[name].isup
        and not entry.address.startswith("127.")
    ]


def _libraries() -> dict[str, str]:
    """Return all installed distributions; of duplicates the first, which is the one that is imported."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(name.lower().replace("_", "-"), distribution.version)
    return versions


def _needed() -> list[str]:
    """Return Paceline's own dependencies."""
    with suppress(Exception):  # not installed when it runs from its sources
        lines = [line for line in requires("paceline") or [] if "extra ==" not in line]
        names = [found[0] for line in lines if (found := match(r"[\w.-]+", line))]
        return [name.lower().replace("_", "-") for name in names]
    return []


def _addresses_of_name() -> list[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        return sorted({str(address[0]) for *_, address in found})
    return []


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _free(path: str) -> int | None:
    with suppress(OSError):
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
    return None


def _core_quota() -> float | None:
    """Return the core quota of a container by its control group (version 2)."""
    with suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        return int(quota) / int(period)
    return None
