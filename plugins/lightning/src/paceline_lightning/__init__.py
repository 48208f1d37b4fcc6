"""A ``LightningModule`` as a Paceline task: :class:`LightningTask`, or in one line :func:`task`."""

from __future__ import annotations

from paceline.core.errors import TaskError
from paceline.core.plugins import install_command

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise TaskError(
        f"paceline_lightning needs Lightning ({error.name} is not installed): {install_command('lightning')}"
    ) from error

from paceline_lightning.task import LightningTask, task

__all__ = ["LightningTask", "task"]
