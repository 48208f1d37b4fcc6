"""A pytest plugin: tests marked ``gpu(gpus=1, real=False)`` are deselected where there are not as many CUDA GPUs.

``real``: a GPU that the CPU pretends to be is not enough.
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here; deselected tests are counted, but are no skips."""
    marked = {item: [mark.kwargs for mark in item.iter_markers("gpu")] for item in items}
    if not any(marked.values()):
        return
    import torch

    gpus, real = torch.cuda.device_count(), "GPU_STAND_IN" not in os.environ
    deselected = {
        item
        for item, needs in marked.items()
        if any(need.get("gpus", 1) > gpus or (need.get("real", False) and not real) for need in needs)
    }
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]
