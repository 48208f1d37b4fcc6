"""Facts about one node: its software, GPUs, limits, network and storage."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any, TypeVar

import psutil

from paceline.core.environment import Environment, is_loopback, visible_gpus
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.ownership import lock_now
from paceline.core.sockets import LOOPBACK, address_towards, interface_address, interface_of, is_ours
from paceline.core.task_loading import load_task_class
from paceline.runs.checkpoint_manifest import read_manifest
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory
from paceline.runs.file_system import probe
from paceline_checks.preflight.spec import PreflightSpec

T = TypeVar("T")

_MARK_BYTES = 1 << 20


def collect(spec: PreflightSpec) -> dict[str, Any]:
    """Return the facts about this node as JSON types; None is "no limit" or "unknown".

    ``task`` has an "error" if the import failed, and is None without a task. ``named`` are the addresses of the node's
    own name. ``checkpoints`` are the sizes in bytes of the run's intact ones.
    """
    import torch

    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {
        "python": platform.python_version(),
        **_libraries(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()},
        "visible_gpus": visible_gpus(),
        "task": _task_facts(spec.task) if spec.task else None,
        **_gpus(),
        "interfaces": interfaces(),
        "named": _known(lambda: sorted(set(socket.gethostbyname_ex(socket.gethostname())[2]))) or [],
        "open_files": soft,
        "most_open_files": hard,
        "shm_free": _known(lambda: shutil.disk_usage("/dev/shm").free),
        "cores": os.cpu_count() or 1,
        "core_quota": _known(_core_quota),
    }


def _libraries() -> dict[str, Any]:
    """Return all installed distributions, of duplicates the one that is imported, and Paceline's own dependencies."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:
            versions.setdefault(name.lower().replace("_", "-"), distribution.version)
    needed: list[str] = []
    with suppress(Exception):  # not installed when it runs from its sources
        lines = [line for line in requires("paceline") or [] if "extra ==" not in line]
        needed = [found[0].lower().replace("_", "-") for line in lines if (found := re.match(r"[\w.-]+", line))]
    return {"libraries": versions, "needed": needed}


def _task_facts(spec: str) -> dict[str, Any]:
    """Return the bytes of the task's model, or the error of its import."""
    import torch

    model_bytes = None
    with contextlib.redirect_stdout(sys.stderr):
        try:
            task_class = load_task_class(spec)
        except Exception as error:
            text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
            return {"error": text.partition("\n")[0]}
        # The meta device needs no computation or memory; a model that cannot be built on it is still valid.
        with suppress(Exception), torch.device("meta"):
            model = task_class().build_model()
            tensors = [*model.parameters(), *model.buffers()]
            model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"model_bytes": model_bytes}


def _known(read: Callable[[], T]) -> T | None:
    """Return what a function reads from the system; None if it cannot."""
    with suppress(OSError, ValueError):
        return read()
    return None


def _core_quota() -> float:
    """Return the core quota of a container by its control group (version 2)."""
    quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    return int(quota) / int(period)


# --- GPUs, by NVIDIA's tools ---
#
# Fields and names are those of ``nvidia-smi --help-query-gpu``; bits of clock reasons are NVML's
# ``nvmlClocksEventReason*``.


_FIELDS = (
    *("index", "name", "driver_version", "memory.used", "temperature.gpu"),
    *("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active"),
)
_SLOWED = {0x08: "hardware slowdown", 0x20: "thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


def _gpus() -> dict[str, Any]:
    """Query nvidia-smi, if it is installed."""
    error = None
    try:
        query = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
        if not done.returncode:
            return {"gpus": parse_gpus(done.stdout), "gpu_error": None}
        error = (done.stdout + done.stderr).strip().partition("\n")[0] or f"exit code {done.returncode}"
    except FileNotFoundError:
        pass
    except (OSError, subprocess.SubprocessError) as failure:
        error = str(failure)
    return {"gpus": [], "gpu_error": error}


def parse_gpus(table: str) -> list[dict[str, Any]]:
    """Parse the lines of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    gpus = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_FIELDS):
            index, name, driver, *numbers, reasons = cells
            used, heat, errors = (int(text) if text.isdigit() else None for text in numbers)
            bits = int(reasons, 16) if reasons.startswith("0x") else 0
            values = {"index": int(index), "name": name, "driver": driver, "used_mib": used, "temperature_c": heat}
            slowed_by = [reason for bit, reason in _SLOWED.items() if bits & bit]
            gpus.append({**values, "uncorrected_errors": errors, "slowed_by": slowed_by})
    return gpus


# --- The network interfaces, and the address that a job's ranks on this node would use ---


def interfaces() -> list[dict[str, Any]]:
    """Return the interfaces that are up and have an IPv4 address, without loopback."""
    states = psutil.net_if_stats()
    return [
        {"name": name, "address": entry.address}
        for name, found in psutil.net_if_addrs().items()
        for entry in found
        if entry.family == socket.AF_INET and name in states and states[name].isup and not is_loopback(entry.address)
    ]


def choose_address(interface: str | None, environment: Environment) -> dict[str, Any]:
    """Return the ``address`` and ``interface`` towards the other nodes, and the ``address_problem``, if any."""
    problem, master = None, environment.master_addr or LOOPBACK
    address, name = LOOPBACK, "lo"
    try:
        if interface is not None:
            return {"address": interface_address(interface), "interface": interface, "address_problem": None}
    except ConfigError as error:
        problem = str(error)
    if environment.nodes > 1:
        for other in interfaces()[:1]:  # any other address will do for the remaining checks
            address, name = other["address"], other["name"]
        try:
            own = environment.node_rank == 0 and is_ours(master)
            host = socket.gethostbyname(master) if own else address_towards(master, environment.master_port or 1)
            if not is_loopback(host) or is_loopback(master):
                address, name = host, interface_of(host)
            else:
                problem = problem or f"{master}, the name of node 0, is a loopback address on this node: {host}"
        except ConfigError as error:
            problem = problem or str(error)
    return {"address": address, "interface": name, "address_problem": problem}


# --- Storage ---


def nearest_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def obstacle(path: Path) -> str | None:
    """Return why this cannot become a directory: it, or a part of its path, is something else."""
    found = next(each for each in (path, *path.parents) if os.path.lexists(each))
    return None if found.is_dir() else f"{found} is not a directory"


def inspect_storage(run: Path) -> dict[str, Any]:
    """Return the free bytes, the sizes of the run's checkpoints, and what the file system lacks."""
    directory = nearest_existing(run)
    return {
        "path": str(directory),
        "free": _known(lambda: shutil.disk_usage(directory).free),
        "checkpoints": _known(lambda: list(_checkpoint_sizes(RunDirectory(run).checkpoints))) or [],
        "lacks": _known(lambda: probe(directory)) or [],
    }


def _checkpoint_sizes(directory: Path) -> Iterator[int]:
    """Yield the bytes of each checkpoint whose manifest can be read."""
    for path in scan(directory):
        with suppress(CheckpointError):
            yield sum(file.size for file in read_manifest(path).files.values())


def leave_mark(path: Path, stack: ExitStack) -> str | None:
    """Write a file like a checkpoint's, and lock it until ``stack`` removes it; return the error, if any."""
    try:
        file = stack.enter_context(path.open("wb"))
        stack.callback(path.unlink, missing_ok=True)
        file.write(bytes(_MARK_BYTES))
        file.flush()
        os.fsync(file.fileno())
        lock_now(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def can_lock(mark: Path) -> bool:
    """Return whether this node can lock another one's mark, though that one has locked it."""
    try:
        with mark.open("r+b") as file:
            return lock_now(file.fileno())
    except OSError:  # it is locked, or another user's
        return False
