"""Facts about one machine."""

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

# --- What NVIDIA's tools say about the GPUs of this machine. No torch ---
#
# The fields and their words are those of ``nvidia-smi --help-query-gpu``; the bits of the clocks' reasons are
# NVML's ``nvmlClocksEventReason*``; Xid errors are listed in NVIDIA's "XID Errors" document.


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
    """One GPU; None for what it does not report."""

    index: int
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    temperature_c: int | None
    uncorrected_errors: int | None
    slowed_by: list[str]


class GpuFacts(TypedDict):
    """All GPUs of a machine.

    ``error`` says why nvidia-smi could not be asked, where there is one. ``cuda`` is the newest CUDA that the
    driver runs. ``links`` says how two GPUs reach each other: ``{"0-1": "NV18"}``. ``xids`` are the GPUs'
    errors in the kernel's log, None where it cannot be read.
    """

    gpus: list[Gpu]
    error: str | None
    cuda: str | None
    links: dict[str, str]
    xids: list[str] | None


def gpu_facts() -> GpuFacts:
    """Ask nvidia-smi, where there is one."""
    facts = GpuFacts(gpus=[], error=None, cuda=None, links={}, xids=None)
    try:
        table = _run("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return facts
    except (OSError, subprocess.SubprocessError) as error:
        facts["error"] = _words(error)
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
    """The lines of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
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
    """The pairs of GPUs in ``nvidia-smi topo -m``: ``{"0-1": "NV18", "0-2": "SYS"}``."""
    links = {}
    # The header may be underlined, with escape codes of the terminal.
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
    """The GPUs' errors in the kernel's log: ``Xid 79 (PCI:0000:3b:00): GPU has fallen off the bus.``"""
    found = re.findall(r"NVRM: Xid \((PCI:[\w:.]+)\): (\d+), *(.*)", log)
    return [f"Xid {number} ({device}): {text}"[:200] for device, number, text in found]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)
    return done.stdout


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stdout + error.stderr).strip().partition("\n")[0] or f"exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_TIME_LIMIT_S} s"
    return str(error)


# --- What a machine can say about itself. No torch: that is asked in a process of its own ---


_IMPORT_LIMIT_S = 300
_INFINIBAND = Path("/sys/class/infiniband")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Interface(TypedDict):
    """A network interface that is up; ``mbit_per_s`` is 0 where it does not know."""

    name: str
    address: str
    mbit_per_s: int


class NodeFacts(TypedDict):
    """All that a machine says about itself; None for "no limit" and "not known".

    ``torch`` and ``task`` have an "error" where they cannot be imported; ``task`` is None where there is
    none. ``named`` are the addresses of the machine's own name.
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
    """Look at this machine; takes some seconds, for torch."""
    imported = import_torch_and(task)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        libraries=_libraries(),
        needed=_needed(),
        torch=imported["torch"],
        task=imported.get("task"),
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
    """What :mod:`paceline.launch.preflight.imports` finds; an import may crash its process."""
    try:
        done = run_python("paceline.launch.preflight.imports", [task] if task else [], time_limit_s=_IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"torch": {"error": f"the import did not end within {_IMPORT_LIMIT_S} s"}}
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        with suppress(ValueError):
            found |= json.loads(line)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    crash = {"error": f"the import ended its process: {last}"}
    found.setdefault("torch", crash)
    if task:
        found.setdefault("task", crash)
    return found


def run_python(module: str, arguments: Sequence[str], *, time_limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module of Paceline's in a process that does not outlive this one."""
    return subprocess.run(
        parent_death.kill_with_parent_command([sys.executable, "-m", module, *arguments]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=time_limit_s,
    )


def interfaces() -> list[Interface]:
    """The interfaces that are up and lead to other machines: with an IPv4 address, but for loopback."""
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
    """All installed distributions; of several of one name the first, which is the one that is imported."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return found


def _needed() -> list[str]:
    """What Paceline itself builds on."""
    with suppress(Exception):  # run from its sources, it is not installed
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
    """The cores that a container may use, by its control group (version 2)."""
    with suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        return int(quota) / int(period)
    return None
