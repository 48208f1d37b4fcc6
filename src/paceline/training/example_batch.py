"""A trial of the task before its model is laid out on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from torch import nn

from paceline.core.errors import DataError
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.training.run_context import RunContext
from paceline.training.step import microbatch_loss


class ExampleBatch:
    """Tries the task on the first micro-batch of its training data."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._microbatch: MicroBatch | None = None

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """Return the task's parts of its model's forward."""
        return self._run.task.pipeline_blocks(module)

    def loss(self, module: nn.Module) -> Loss:
        """Compute the loss of the first micro-batch.

        Raises:
            DataError: there is no sample.
            TaskError: the task returned no loss.
        """
        if self._microbatch is None:
            # With another loader, so that the run's own keeps its position in streams.
            with closing(self._run.build_loader(workers=0)) as loader:
                there = loader.fetch(0, 0, range(self._run.num_microbatches))
            if not there:
                raise DataError("the training data holds no sample.")
            self._microbatch = there[0]
        return microbatch_loss(self._run, module, 0, self._microbatch)
