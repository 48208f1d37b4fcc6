"""The machine and the software that a measurement belongs to; imports no torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil


def describe_machine() -> dict[str, str]:
    """CPU, cores, memory, kernel, Python, torch and today's date (UTC), each as text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cpu": _cpu_model(),
        "cores": str(cores),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": installed_version("torch") or "none",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Only x86 names its model there.
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
