"""The connection to a search's scheduler, which decides after each evaluation whether this trial continues.

The run waits for the answer, so that it stops at the very step whose evaluation was judged. One message of JSON each
way, over a Unix socket::

    {"step", "epoch", "metrics": {name: value}, "finished"}  ->  {"go_on": true}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

from paceline.runs.metric_writers import finite
from paceline.training.control import StopCause
from paceline.training.group_context import GroupContext
from paceline.training.hooks import RunHook
from paceline.training.run_context import RunContext
from paceline.training.trainer import Trainer


class TrialSchedulerClient(RunHook):
    """Rank 0's end of the connection, which opens at the first request."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        assert run.trial_scheduler is not None, "the run is a trial"
        self._address = run.trial_scheduler
        self._connection: Connection | None = None

    def after_evaluation(self, trainer: Trainer, group: GroupContext) -> StopCause:
        """Tell of an evaluation, and wait for the answer; all ranks call this together.

        A scheduler that no longer answers does not need the rest of the trial.
        """
        progress, finished, go_on = trainer.state.progress, trainer.finished, False
        if group.world.rank == 0:
            metrics = finite(dict(trainer.validation.metrics))
            go_on = self._ask(
                {"step": progress.step, "epoch": progress.epoch, "metrics": metrics, "finished": finished}
            )
        go_on = bool(group.world.broadcast_object(go_on)) or finished
        return StopCause.NONE if go_on else StopCause.TRIAL_SCHEDULER

    def _ask(self, evaluation: Mapping[str, Any]) -> bool:
        try:
            if self._connection is None:
                self._connection = Client(self._address, "AF_UNIX")
            self._connection.send_bytes(json.dumps(evaluation).encode())
            return bool(json.loads(self._connection.recv_bytes())["go_on"])  # recv() would unpickle
        except (OSError, EOFError, ValueError):
            return False

    def close(self) -> None:
        """End the connection; a later question makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
