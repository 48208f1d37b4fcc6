"""What ``self.log`` was given: means over samples that are the same for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import TaskError

Pair = tuple[Any, float]
"""A mean and its weight; the mean is a tensor until it is needed."""


@dataclass(frozen=True)
class Entry:
    """One call of ``self.log``.

    Attributes:
        value: the mean over a batch.
        weight: the batch's samples.
        on_step: report each step's mean.
        on_epoch: report the epoch's mean.
        to_logger: have loggers write it.
    """

    value: Any
    weight: float
    on_step: bool
    on_epoch: bool
    to_logger: bool


class StepLog:
    """What ``training_step`` logs: by name and shard, until the step's means are due.

    Means over a step or an epoch are sums over samples, each computed for a shard and added without
    rounding, so neither the number of ranks nor their order matters. Ranks talk at due steps only; where
    something is logged ``on_epoch``, at every step.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], Entry] = {}
        self._epoch: dict[str, list[list[float]]] = {}
        self._to_logger: dict[str, bool] = {}

    def add(self, name: str, shard: int, entry: Entry) -> None:
        """Take in a value; a shard that is computed again says the same again."""
        self._entries[name, shard] = entry

    def reduce(
        self, gather: Callable[[Any], list[Any]], *, due: bool, first: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The step's means by name, and those of them that loggers write; all ranks call it together.

        Nothing but the epoch's sums is kept of the step.

        Args:
            gather: every rank's value.
            due: the step is reported.
            first: nothing is known of what is logged.

        Raises:
            TaskError: something is logged by epochs that was not in the run's first step.
        """
        entries, self._entries = self._entries, {}
        if not (due or first or self._epoch):
            late = next((name for (name, _), entry in entries.items() if entry.on_epoch), None)
            if late is None:
                return {}, {}
            raise TaskError(
                f"self.log({late!r}, ..., on_epoch=True) was not called in the run's first steps. Log it in "
                "every step, so that the ranks know of it."
            )
        mine = [
            [name, shard, float(entry.value), entry.weight, entry.on_step, entry.on_epoch, entry.to_logger]
            for (name, shard), entry in entries.items()
        ]
        # By name and shard: one that two ranks have computed counts once.
        found = {(row[0], row[1]): row for of_rank in gather(mine) for row in of_rank}
        sums: dict[str, list[list[float]]] = {}
        for name, _, value, weight, on_step, on_epoch, to_logger in (found[key] for key in sorted(found)):
            self._to_logger[name] = to_logger
            for kept, wanted in ((sums, on_step), (self._epoch, on_epoch)):
                if wanted:
                    totals = kept.setdefault(name, [[], []])
                    add_exactly(totals[0], value * weight)
                    add_exactly(totals[1], weight)
        means = {name: _mean(totals) for name, totals in sums.items()}
        return means, {name: mean for name, mean in means.items() if self._to_logger[name]}

    def end_epoch(self) -> tuple[dict[str, float], dict[str, float]]:
        """The epoch's means by name, and those of them that loggers write; the next epoch begins."""
        means = {name: _mean(totals) for name, totals in self._epoch.items() if totals[1]}
        self._epoch = {name: [[], []] for name in self._epoch}
        return means, {name: mean for name, mean in means.items() if self._to_logger.get(name, True)}

    def state_dict(self) -> dict[str, Any]:
        """The epoch's sums so far."""
        return {"epoch": {name: [list(part) for part in totals] for name, totals in self._epoch.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._entries = {}
        self._epoch = {name: [list(part) for part in totals] for name, totals in state["epoch"].items()}


def add_exactly(partials: list[float], value: float) -> None:
    """Add to a sum that is kept without rounding, as numbers that do not overlap.

    Shewchuk, "Adaptive Precision Floating-Point Arithmetic" (1997); ``math.fsum`` does the same. Infinities
    and NaN stay as they are.
    """
    if not math.isfinite(value):
        partials.append(value)
        return
    place = 0
    for partial in partials:
        larger, smaller = (value, partial) if abs(value) >= abs(partial) else (partial, value)
        total = larger + smaller
        rest = smaller - (total - larger)
        if rest:
            partials[place] = rest
            place += 1
        value = total
    partials[place:] = [value]


def _mean(totals: list[list[float]]) -> float:
    value, weight = math.fsum(totals[0]), math.fsum(totals[1])
    return value / weight if weight else math.nan


def checked(name: str, value: Any) -> Any:
    """A value that ``self.log`` may be given: a number, or a tensor of one.

    Raises:
        TaskError: it is something else.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.detach()
        what = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, int | float):
        return value
    else:
        what = f"a {type(value).__name__}"
    raise TaskError(f"self.log({name!r}) was given {what}; it takes a number, or a tensor of one element.")
