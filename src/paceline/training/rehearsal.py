"""What is tried of a task before its model is laid out on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from torch import nn

from paceline.data.microbatch import MicroBatch
from paceline.errors import DataError
from paceline.task import Loss
from paceline.training.run import Run
from paceline.training.step import shard_loss


class FirstBatch:
    """Tries the task on the first micro-batch of its training data.

    Args:
        run: what is trained.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._microbatch: MicroBatch | None = None

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """What the task says of the parts of its model's forward."""
        return self._run.task.pipeline_blocks(module)

    def loss(self, module: nn.Module) -> Loss:
        """The loss of the first micro-batch.

        Raises:
            DataError: there is none.
            TaskError: the loss is none.
        """
        if self._microbatch is None:
            # Apart from the run's loader, whose streams must stay where they are.
            with closing(self._run.build_loader(workers=0)) as loader:
                there = loader.fetch(0, 0, range(self._run.num_shards))
            if not there:
                raise DataError("the training data holds no sample.")
            self._microbatch = there[0]
        return shard_loss(self._run, module, 0, self._microbatch)
