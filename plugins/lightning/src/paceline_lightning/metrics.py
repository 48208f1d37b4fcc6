"""The logged values of a LightningModule: `self.log`, and torchmetrics over whole splits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from paceline.core.errors import TaskError

# --- What ``self.log`` was given: means over samples that are the same for any number of ranks ---


Pair = tuple[Any, float]
"""A mean and its weight; the mean is a tensor until it is needed."""


@dataclass(frozen=True)
class LoggedValue:
    """One call of ``self.log``."""

    value: Any
    weight: float
    on_step: bool
    on_epoch: bool
    to_logger: bool


class StepLog:
    """What ``training_step`` logs: by name and micro-batch, until the step's means are due.

    Means over a step or an epoch are sums over samples, each computed for a micro-batch and added without
    rounding, so neither the number of ranks nor their order matters. Ranks talk at due steps only; where
    something is logged ``on_epoch``, at every step.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], LoggedValue] = {}
        self._epoch: dict[str, list[list[float]]] = {}
        self._to_logger: dict[str, bool] = {}

    def add(self, name: str, microbatch: int, entry: LoggedValue) -> None:
        """Add a value; a recomputed micro-batch replaces its value by the same one."""
        self._entries[name, microbatch] = entry

    def reduce(
        self, gather: Callable[[Any], list[Any]], *, due: bool, first: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the step's means by name, and those of them for the loggers; all ranks call this together.

        Nothing but the epoch's sums is kept of the step.

        Args:
            due: the step is reported.
            first: nothing is known of what is logged.
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
        mine = [(*key, float(e.value), e.weight, e.on_step, e.on_epoch, e.to_logger) for key, e in entries.items()]
        # By name and micro-batch: one that two ranks have computed counts once.
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
        """Return the epoch's means by name, and those of them for the loggers; begin the next epoch."""
        means = {name: _mean(totals) for name, totals in self._epoch.items() if totals[1]}
        self._epoch = {name: [[], []] for name in self._epoch}
        return means, {name: mean for name, mean in means.items() if self._to_logger.get(name, True)}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": {name: [list(part) for part in totals] for name, totals in self._epoch.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries = {}
        self._epoch = {name: [list(part) for part in totals] for name, totals in state["epoch"].items()}


def add_exactly(partials: list[float], value: float) -> None:
    """Add to a sum that is kept without rounding, as numbers that ``math.fsum`` adds up."""
    terms = [*partials, value]
    if not math.isfinite(total := sum(terms)):
        partials[:] = [total]
        return
    partials.clear()
    while rest := math.fsum(terms):
        partials.append(rest)
        terms.append(-rest)


def _mean(totals: list[list[float]]) -> float:
    value, weight = math.fsum(totals[0]), math.fsum(totals[1])
    return value / weight if weight else math.nan


def checked(name: str, value: Any) -> Any:
    """Check a value of ``self.log``: a number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.detach()
        what = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, int | float):
        return value
    else:
        what = f"a {type(value).__name__}"
    raise TaskError(f"self.log({name!r}) was given {what}; it takes a number, or a tensor of one element.")


# --- torchmetrics objects in a module: each sees a whole split, on every rank, in the blocks' order ---


_SUFFIX = " (torchmetrics)"


class MetricRecorder:
    """Stands between a module's metrics and their callers.

    In a step, a metric gets that batch alone and computes its value. In an evaluation, its arguments are kept too;
    Paceline sends them to all ranks, and then updates the metric itself with all of them.

    Attributes:
        recorded: each metric's object, by path in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.recorded: dict[str, _RecordedMetric] = {}
        for path, child in module.named_modules():
            if isinstance(child, MetricCollection):
                # Otherwise one of them gets the calls, and the others share its state.
                child._enable_compute_groups = False
                if child._groups_checked:
                    raise TaskError(f"the MetricCollection {path!r} needs compute_groups=False here.")
            if isinstance(child, Metric) and not any(path.startswith(f"{outer}.") for outer in self.recorded):
                self.recorded[path] = _RecordedMetric(child)

    def share(self, module: nn.Module) -> None:
        """Have a copy of the module use the same metrics."""
        for path, tap in self.recorded.items():
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, tap.metric)

    def on_batch_begin(self) -> None:
        for tap in self.recorded.values():
            tap.begin()

    def end_batch(self) -> dict[str, Any]:
        """Return the arguments of the metrics in the batch, in the form of the task's ``metrics``."""
        calls = {}
        for path, tap in self.recorded.items():
            tap.in_batch = False
            if tap.calls:
                calls[path + _SUFFIX] = tuple(tap.calls)
        return calls

    def path_of(self, metric: Metric) -> str | None:
        """Return a metric's path, or None if it is not the module's."""
        return next((path for path, tap in self.recorded.items() if tap.metric is metric), None)


class Replayed:
    """A metric as the task's ``build_metrics`` returns it, whichever module has it just then."""

    def __init__(self, taps: Any, path: str) -> None:
        self._taps = taps
        self._path = path

    def to(self, device: Any) -> Replayed:
        """Do nothing: the metric moves with its module."""
        return self

    def modules(self) -> list[nn.Module]:
        """Return none: no metric here gathers."""
        return []

    def reset(self) -> None:
        self._taps().recorded[self._path].reset()

    def update(self, *calls: Any) -> None:
        self._taps().recorded[self._path].update(calls)

    def compute(self) -> torch.Tensor:
        """Return the metric, if it is one number; otherwise, and without any update, NaN."""
        number: torch.Tensor = self._taps().recorded[self._path].number()
        return number


def replay_metrics(taps: Any) -> dict[str, Replayed]:
    """Return the metrics for the task's ``build_metrics``."""
    return {path + _SUFFIX: Replayed(taps, path) for path in taps().recorded}


def named(metrics: Mapping[str, float], aliases: Mapping[str, str]) -> dict[str, float]:
    """Return the logged metrics under the names of their logging calls."""
    logged = {name: metrics[path + _SUFFIX] for name, path in aliases.items() if path + _SUFFIX in metrics}
    return {name: value for name, value in metrics.items() if not name.endswith(_SUFFIX)} | logged


class _RecordedMetric:
    """One metric, and a copy of it that sees one batch."""

    def __init__(self, metric: Metric) -> None:
        self.scratch = copy.deepcopy(metric)
        for part in (*metric.modules(), *self.scratch.modules()):
            part.distributed_available_fn = _nothing_to_gather
        self.metric = metric
        self.calls: list[Any] = []
        self.in_batch = False
        self._own = {name: getattr(metric, name) for name in ("update", "forward", "compute", "reset")}
        for name in self._own:
            setattr(metric, name, getattr(self, f"_{name}"))

    def __deepcopy__(self, memo: Any) -> _RecordedMetric:
        return self  # a copied module's metrics are shared

    def begin(self) -> None:
        self.calls = []
        self.in_batch = True
        if self.scratch.device != self.metric.device:
            self.scratch.to(self.metric.device)
        self.scratch.reset()

    def reset(self) -> None:
        self._own["reset"]()

    def update(self, calls: Any) -> None:
        for args, kwargs in calls:
            self._own["update"](*args, **kwargs)

    def number(self) -> torch.Tensor:
        value = self._own["compute"]() if self.metric.update_called else None
        return value if isinstance(value, torch.Tensor) and value.numel() == 1 else torch.tensor(math.nan)

    def _update(self, *args: Any, **kwargs: Any) -> None:
        self._require_batch("update")
        self.calls.append([list(args), kwargs])
        self.scratch.update(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._require_batch("forward")
        self.calls.append([list(args), kwargs])
        return self.scratch(*args, **kwargs)

    def _compute(self) -> Any:
        if self.in_batch:
            return self.scratch.compute()
        if not self.metric.update_called:
            raise TaskError(
                f"the metric {type(self.metric).__name__} was computed outside a step, and has seen nothing. "
                "In training a metric knows its batch alone: log it in training_step, with on_epoch=True for "
                "the mean over the epoch."
            )
        return self._own["compute"]()

    def _reset(self) -> None:
        (self.scratch.reset if self.in_batch else self._own["reset"])()

    def _require_batch(self, what: str) -> None:
        if not self.in_batch:
            raise TaskError(
                f"the metric {type(self.metric).__name__}: {what} outside a step. Call it in training_step, "
                "validation_step or test_step, where Paceline sees which samples it is given."
            )


def _nothing_to_gather() -> bool:
    return False
