"""What to say where a model takes a split layer's weight past the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import TaskError


@contextmanager
def mixing_explained() -> Iterator[None]:
    """Say what to do where a model uses a split layer's weight past the layer itself.

    Raises:
        TaskError: it does.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TaskError(
            "--strategy tp: the model uses the weight of a split layer without calling the layer "
            f"({str(error).splitlines()[0]}). Name the layers to split in the task's tensor_parallel_plan, "
            "and leave that one out."
        ) from error
