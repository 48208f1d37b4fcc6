"""The jobs of ``tests/training``, under the strategies of this plug-in."""

from __future__ import annotations

from tests.parallel.distributed.stage_cluster import cluster
from tests.training.conftest import start_trainings, tasks_file

__all__ = ["cluster", "start_trainings", "tasks_file"]
