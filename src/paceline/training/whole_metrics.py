"""Metrics that do not decompose into sums (AUROC, F1): torchmetrics objects that see a whole split."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from paceline.distributed.world import World
from paceline.errors import TaskError
from paceline.task import Task

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


class WholeMetrics:
    """The task's torchmetrics objects, which take in every block on every rank, in the blocks' order.

    torchmetrics would add up the ranks' states instead: sums of floats that depend on the number of
    ranks, and states of different types where a rank has no block, which abort the process.

    Attributes:
        names: of the metrics.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = type(task).__name__
        self._device = device
        self._metrics = {name: metric.to(device) for name, metric in task.build_metrics().items()}
        self.names = frozenset(self._metrics)
        for metric in self._metrics.values():
            for part in metric.modules():
                part.distributed_available_fn = _nothing_to_gather

    def reset(self) -> None:
        """Begin a split."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, world: World, arguments: Mapping[str, Any] | None) -> None:
        """Take in a block of each rank, in the order of ranks; every rank calls it alike.

        Args:
            world: the ranks.
            arguments: of each metric's ``update``, by name; None where this rank has no more block.

        Raises:
            TaskError: arguments are no tuple, or hold what other ranks cannot be told.
        """
        if not self.names:
            return
        for name, value in (arguments or {}).items():
            if not isinstance(value, tuple):
                raise TaskError(
                    f"{self._task}.metrics gave a {type(value).__name__} for {name!r}; it must be a tuple, "
                    f"the arguments of the update() of build_metrics()[{name!r}]."
                )
        gathered: list[Any] = [arguments]
        if world.world_size > 1:
            encoded = world.all_gather_json(None if arguments is None else self._encoded(arguments))
            gathered = [_decoded(value, self._device) for value in encoded]
        for of_rank in gathered:
            for name, value in (of_rank or {}).items():
                self._metrics[name].update(*value)

    def compute(self) -> dict[str, float]:
        """The metrics of all blocks, the same on every rank.

        Raises:
            TaskError: a metric is not one number.
        """
        return {name: self._number(name, metric.compute()) for name, metric in self._metrics.items()}

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TaskError(
            f"{self._task}.build_metrics: {name!r} computes {what}; it must be one number. "
            "Choose an average, such as average='macro'."
        )

    def _encoded(self, value: Any) -> Any:
        """The value as JSON types; lists stand for themselves, all else that is nested for a pair."""
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
        if isinstance(value, Mapping):
            return {"mapping": {name: self._encoded(inner) for name, inner in value.items()}}
        if isinstance(value, list | tuple):
            return [self._encoded(inner) for inner in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TaskError(
            f"{self._task}.metrics gave a {type(value).__name__} to a metric of build_metrics(); with "
            "several processes it can take tensors, numbers, text, and lists and dicts of them."
        )


def _nothing_to_gather() -> bool:
    return False


def _decoded(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decoded(inner, device) for inner in value]
    if not isinstance(value, dict):
        return value
    if "mapping" in value:
        return {name: _decoded(inner, device) for name, inner in value["mapping"].items()}
    name, shape, data = value["tensor"]
    content = bytearray(base64.b64decode(data))
    if not content:
        return torch.empty(shape, dtype=_DTYPES[name], device=device)
    return torch.frombuffer(content, dtype=_DTYPES[name]).reshape(shape).to(device)
