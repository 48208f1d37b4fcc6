"""A ``LightningModule`` as a Paceline task: :class:`LightningTask`, or in one line :func:`task`."""

from __future__ import annotations

from paceline.errors import TaskError

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise TaskError(
        f"paceline.adapters.lightning needs Lightning ({error.name} is not installed): "
        "pip install 'paceline[lightning]'"
    ) from error

from paceline.adapters.lightning.factory import task
from paceline.adapters.lightning.task import LightningTask

__all__ = ["LightningTask", "task"]
