"""Print what this Python's torch finds, as JSON: GPUs, versions, and packages that are missing.

Run in a process of its own, whose end frees the GPU and whose crash is only an answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from typing import Any

from benchmarks.gpu.rows import IS_REAL

NEEDED = (
    *("cyclopts", "msgspec", "tomli_w", "numpy", "safetensors", "rich", "psutil", "yaml"),
    "attrs",  # of cyclopts
    *("orjson", "prometheus_client"),  # of predictions
    *("pytest", "pytest_timeout", "hypothesis"),
)


def describe() -> dict[str, object]:
    """Return ``problem`` (a sentence, or None), ``gpus``, ``real`` and ``facts``."""
    try:
        import torch
    except ImportError as error:
        return {"problem": f"it has no torch ({error}). Give a Python that has it: PYTHON=PATH"}
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return {"problem": f"it has no {', '.join(missing)}. Give a folder of wheels or packages: SITE=FOLDER"}

    if not torch.cuda.is_available():
        why = "it is built without CUDA" if torch.version.cuda is None else "the driver shows none"
        return {"problem": f"torch {torch.__version__} sees no GPU ({why})"}

    count = torch.cuda.device_count()
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "compute capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(cudnn.version()) if IS_REAL else "none",
        "NCCL": ".".join(map(str, nccl.version())) if IS_REAL else "none",
        "Python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
    }
    return {
        "problem": None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "real": IS_REAL,
        "facts": facts,
    }


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


if __name__ == "__main__":
    print(json.dumps(describe()))
