"""What a task may have called while it is trained, beside computing its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.options import Interval

if TYPE_CHECKING:
    import torch
    from torch import nn

_EACH_EPOCH = Interval(epochs=1)


@dataclass(frozen=True, kw_only=True)
class RunSchedule:
    """How long a run goes on, and how often it is evaluated.

    Attributes:
        total_steps: of the whole run; None for a stream trained by epochs.
        steps_per_epoch: None for streams.
        eval_every: steps or epochs between two evaluations.
    """

    total_steps: int | None
    steps_per_epoch: int | None
    eval_every: Interval = _EACH_EPOCH


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """Where a batch stands in its run: the same whichever rank computes it, and whenever.

    Attributes:
        split: "train", "val" or "test".
        step: training steps done before; 0 in evaluations.
        number: the micro-batch; in evaluations the block.
        samples: how many the batch holds; 0 where it weighs nothing.
    """

    split: str
    step: int
    number: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The ranks that train together, and where they write.

    Attributes:
        rank: this process's.
        world_size: how many there are.
        local_rank: this process's, among those of its machine.
        device: where the model is.
        directory: the run's.
        log_every: steps between two records.
        gather: every rank's value (JSON types), by rank; all ranks call it together, and it raises
            ``PeerLostError`` where one is gone.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    directory: Path
    log_every: int
    gather: Callable[[Any], list[Any]]


class Callback:
    """Called at fixed points of a run, by every rank alike; by itself it does nothing.

    It is a part of the run's state, and so must depend on nothing but the run: what it keeps is saved and
    handed over with the model, and what it decides must be the same on all ranks. It is made before the
    optimizers, by :meth:`Task.build_callback`.

    Attributes:
        should_stop: looked at after an evaluation and at an epoch's end: the run is then over, as with
            ``--early-stop``.
    """

    should_stop = False

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        """Training begins or goes on, in this group; called again whenever the group is another one."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Epochs are counted from 0."""

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        """``step`` steps are done."""

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        """The gradients of all micro-batches are summed up, and nothing has changed yet; ranks may communicate.

        Args:
            due: the step has a record in ``metrics.jsonl``.

        Returns:
            Numbers for the record, the same on all ranks; used where one is due.
        """
        return {}

    def on_before_optimizer_step(self) -> None:
        """The gradients are those of the whole step, not yet clipped; the optimizers come next."""

    def on_step_end(self, step: int, loss: float) -> None:
        """``step`` steps are done now.

        Args:
            step: counts this one.
            loss: the step's mean loss.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """The epoch's evaluation, where there was one, is over."""

    def on_eval_begin(self, split: str, module: nn.Module) -> None:
        """``module`` is what is evaluated, and may be a moving average. It may begin more than once."""

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Take the metrics of a whole split; return them as they are to be judged and recorded."""
        return metrics

    def on_fit_end(self) -> None:
        """The last step is done."""

    def close(self) -> None:
        """Free what it holds; training may be over or not."""

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs: tensors, numbers, text, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
