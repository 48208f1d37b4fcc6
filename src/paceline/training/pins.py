"""What the bits of a run depend on besides task, configuration and seed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.config import RunConfig

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def numerics_kept() -> Iterator[None]:
    """Put back at exit what :func:`configure_numerics` sets: a script may go on after its training."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def configure_numerics(config: RunConfig, threads: int) -> None:
    """Set what makes equal inputs give equal bits, for the whole process; see :func:`numerics_kept`."""
    torch.set_num_threads(threads)
    exact = config.summed_by == "exact"
    torch.backends.cudnn.benchmark = not exact
    if exact:
        # Read by cuBLAS when its first handle is made.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling every torch.empty() would cost more than it could ever find.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def current_pins(config: RunConfig, device: torch.device) -> dict[str, str | int | bool]:
    """The pins of this process; equal pins promise equal bits."""
    return {
        "torch": str(torch.__version__),
        "device": _device_model(device),
        "threads": torch.get_num_threads(),
        "global_batch_size": config.global_batch_size or 0,
        "shards": config.shards or 0,
        "precision": config.precision,
        "reduction": config.summed_by,
        "compile": config.compile,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def _device_model(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
