"""The jobs of ``tests/training``, under the strategies of this plug-in."""

from __future__ import annotations

from tests.training.conftest import start_trainings, tasks_file

__all__ = ["start_trainings", "tasks_file"]
