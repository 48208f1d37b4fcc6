"""Hooks that a task may register for fixed points of its training."""

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
    """The length of a run and its evaluation interval.

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
    """The position of a batch in its run, independent of which rank computes it.

    Attributes:
        split: "train", "val" or "test".
        step: training steps done before; 0 in evaluations.
        number: index of the micro-batch; in evaluations, of the evaluation batch.
        samples: number of samples in the batch; 0 if it has no weight.
        epoch: epochs done before, in training; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1, in training; None if their number is unknown.
    """

    split: str
    step: int
    number: int
    samples: int
    epoch: int | None = None
    progress: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This rank, its world, and where the run writes.

    Attributes:
        rank: this process's.
        local_rank: this process's, among those of its node.
        device: where the model is.
        directory: the run's.
        log_every: steps between two records.
        gather: returns every rank's value (JSON types), by rank. It is a collective, and raises ``PeerLostError`` if a
            rank is lost.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    directory: Path
    log_every: int
    gather: Callable[[Any], list[Any]]


class Callback:
    """Hooks that every rank calls at fixed points of a run; the base class does nothing.

    A callback is part of the run's state, so it must depend on nothing but the run: its state is saved and transferred
    with the model, and its decisions must be equal on all ranks. :meth:`Task.build_callback` builds it before the
    optimizers.

    Attributes:
        should_stop: set it to end the run after the current evaluation or epoch, as ``--early-stop`` does.
    """

    should_stop = False

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        """Called when training begins or resumes in this group, and again after each change of the group."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before epoch ``epoch``, counted from 0."""

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        """Called before a step; ``step`` steps are done."""

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        """Called when the gradients of all micro-batches are summed, before anything is updated.

        A parameter that no micro-batch of the step used has no gradient. Ranks may communicate here.

        Args:
            due: whether ``metrics.jsonl`` gets a record of this step.

        Returns:
            Numbers for the record, the same on all ranks; ignored unless ``due``.
        """
        return {}

    def on_before_optimizer_step(self) -> None:
        """Called with the gradients of the whole step, not yet clipped, before the optimizers."""

    def on_step_end(self, step: int, loss: float) -> None:
        """Called after a step.

        Args:
            step: steps done, including this one.
            loss: the step's mean loss.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """Called after an epoch and its evaluation."""

    def on_eval_begin(self, split: str, module: nn.Module) -> None:
        """Called before an evaluation of ``module``, which may be a moving average. May be called more than once."""

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Take the metrics of a whole split; return the metrics to select by and to record."""
        return metrics

    def on_fit_end(self) -> None:
        """Called after the last step."""

    def close(self) -> None:
        """Free resources; training may have been interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors, numbers, text, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
