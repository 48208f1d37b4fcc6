"""The GPUs of this node, counted without torch and without CUDA: a process that has called into CUDA cannot fork."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import util
from pathlib import Path
from typing import Literal

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_NVML = "libnvidia-ml.so.1"


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many NVIDIA GPUs of this node a process sees, by the rules of CUDA_VISIBLE_DEVICES.

    The first entry that names no GPU ends the list; a repeated one empties it; of MIG instances a process sees one.
    See "CUDA Environment Variables" in NVIDIA's CUDA C++ Programming Guide.
    """
    installed = _installed_gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not installed:
        return installed
    entries: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            name = entry
        else:
            number = re.match(r"\+?\d+", entry)  # as strtoul reads it
            if number is None or int(number[0]) >= installed:
                break
            name = str(int(number[0]))
        if name in entries:
            return 0
        entries.append(name)
    return min(len(entries), 1 if visible.startswith("MIG-") else installed)


def preferred_device() -> Literal["cpu", "cuda"]:
    """Return the device of ``--device auto`` on this node: GPUs, if some are visible and torch is built for them."""
    return "cuda" if visible_gpus() and torch_has_cuda() else "cpu"


@cache
def torch_has_cuda() -> bool:
    """Return whether the installed torch is built with CUDA; reads its version file, since importing it takes long."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return _names_cuda(Path(found.origin).with_name("version.py"))


def _names_cuda(version: Path) -> bool:
    # A torch without the file is of an unknown kind; a worker will see.
    return not version.is_file() or re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE) is not None


@cache
def _installed_gpus() -> int:
    # The driver lists all of the machine's, also in a container that was given some of them, or none.
    if given := sum(map(_is_given, _NVIDIA_GPUS.glob("*/information"))):
        return given
    # NVIDIA's library makes the device files that a machine lacks after its start. The Windows Subsystem for Linux has
    # the library, but not the driver's files.
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _is_given(information: Path) -> bool:
    """Return whether this process may open a GPU; a group of processes may be denied the use of a device."""
    try:
        minor = re.search(r"^Device Minor:\s*(\d+)", information.read_text(), re.MULTILINE)
    except OSError:
        return False
    return minor is not None and os.access(_DEVICES / f"nvidia{minor[1]}", os.R_OK | os.W_OK)
