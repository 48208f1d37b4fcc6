"""What a machine can say about itself. No torch: that is asked in a process of its own."""

from __future__ import annotations

import json
import os
import platform
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

from paceline.distributed import tether
from paceline.doctor.gpus import GpuFacts, gpu_facts

_IMPORT_LIMIT_S = 300
_INFINIBAND = Path("/sys/class/infiniband")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Interface(TypedDict):
    """A network interface that is up; ``mbit_per_s`` is 0 where it does not know."""

    name: str
    address: str
    mbit_per_s: int


class Facts(TypedDict):
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


def collect(task: str) -> Facts:
    """Look at this machine; takes some seconds, for torch."""
    imported = import_torch_and(task)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
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
    """What :mod:`paceline.doctor.imports` finds; an import may crash its process."""
    try:
        done = run_python("paceline.doctor.imports", [task] if task else [], time_limit_s=_IMPORT_LIMIT_S)
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


def run_python(
    module: str, arguments: Sequence[str], *, time_limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a module of Paceline's in a process that does not outlive this one."""
    return subprocess.run(
        tether.tethered([sys.executable, "-m", module, *arguments]),
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
