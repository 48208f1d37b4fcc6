"""The device of this process: chosen here for every way in which a process that computes can start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.core.errors import ConfigError
from paceline.core.gpus import visible_gpus

DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LocalDevice:
    """The device of this process, and how its tensors travel.

    Attributes:
        device: for its tensors; the current device of this process.
        backend: ``"gloo"`` or ``"nccl"``, for messages of tensors on ``device``; CPU tensors always use gloo.
    """

    device: torch.device
    backend: Literal["gloo", "nccl"]


def choose_device(
    wanted: DeviceName = "auto",
    backend: BackendName = "auto",
    *,
    local_rank: int = 0,
    expected: Literal["cpu", "cuda"] | None = None,
) -> LocalDevice:
    """Choose the device of this process, and make it the current one.

    Call it once, after the last fork and before anything is seeded: CUDA does not survive a fork, and torch seeds the
    current GPU alone.

    Args:
        wanted: ``auto`` is a GPU if torch sees one.
        backend: ``auto`` is NCCL on a GPU, else gloo. Under gloo, several processes may share a GPU.
        local_rank: of this process on its node. It takes the GPU of this number among those that it sees, which are all
            of the node's, one of its own (Slurm's ``--gpus-per-task=1``), or several of its own: forming a group finds
            processes that share one.
        expected: the device that the launcher on this node has found.

    Raises:
        ConfigError: there is no such device, or it is not the launcher's.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if gpus == 0 and "cuda" in (wanted, expected):
        cause = "" if wanted == "cuda" else f", but the launcher has counted {visible_gpus()} on this node"
        raise ConfigError(
            f"--device {wanted}: torch {torch.__version__} sees no GPU on this node{_why_no_gpu()}{cause}. "
            "Install a torch for CUDA that fits the driver (docs/gpus.md), or use --device cpu."
        )
    if gpus and wanted == "auto" and expected == "cpu":
        raise ConfigError(
            f"--device auto: torch sees {gpus} GPUs that the launcher has not found on this node. "
            "Say which you want: --device cuda or --device cpu."
        )
    if gpus == 0:
        if backend == "nccl":
            raise ConfigError("--backend nccl needs GPUs, but the device is cpu. Use --backend gloo or auto.")
        return LocalDevice(device=torch.device("cpu"), backend="gloo")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return LocalDevice(device=device, backend="gloo" if backend == "gloo" else "nccl")


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return " (it is built without CUDA)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def gpu_identity(device: torch.device) -> str | None:
    """Return the identity of a GPU, unique over all nodes; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """Return the name of a device for people: ``NVIDIA H100 80GB HBM3``, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def why_idle(device: torch.device, processes: int) -> str | None:
    """Return why GPUs that this node's processes see are not used; None if all are.

    Args:
        processes: of the run, on this node.
    """
    visible = visible_gpus()
    if device.type == "cuda":
        idle = visible - processes
        return f"{_gpus(idle)} idle: --nproc auto uses all" if idle > 0 else None
    if not visible:
        return None
    built = "" if torch.version.cuda is not None else f": torch {torch.__version__} is built without CUDA"
    return f"{_gpus(visible)} idle{built}"


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"
