"""The jobs of ``tests/training``, with the weights of other runs."""

from __future__ import annotations

from tests.cli.conftest import numerics, paceline
from tests.training.conftest import start_trainings, tasks_file

__all__ = ["numerics", "paceline", "start_trainings", "tasks_file"]
