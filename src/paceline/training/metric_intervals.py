"""Confidence intervals of the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.core.stats import Estimate, Floats, mean, ratio
from paceline.data.samples import MicroBatch


class MetricIntervals:
    """Collects the values of an evaluation, batch by batch; an instance is an ``Observe``."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}

    def __call__(self, microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
        """Add a batch and the task's ``metrics`` for it."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(_kept(value, microbatch.num_samples))

    def per_sample(self) -> dict[str, Floats]:
        """Return the metrics that have a value for each sample, (N,), by name."""
        return {
            name: np.concatenate(parts)
            for name, parts in self._values.items()
            if all(isinstance(part, np.ndarray) for part in parts)
        }

    def estimate(self, name: str, value: float) -> Estimate:
        """Return the interval of a metric whose value the evaluation has summed exactly."""
        parts = self._values.get(name, [])
        found = Estimate(value)
        if parts and all(isinstance(part, np.ndarray) for part in parts):
            found = mean(np.concatenate(parts))
        elif parts and all(isinstance(part, tuple) for part in parts):
            pairs = np.array(parts, dtype=np.float64)
            found = ratio(pairs[:, 0], pairs[:, 1])
        return replace(found, value=value)


def _kept(value: Any, samples: int) -> Any:
    """Return a metric's values by sample, its (sum, weight), or None if it is neither."""
    if isinstance(value, torch.Tensor) and value.shape == (samples,):
        return value.detach().double().cpu().numpy()
    if isinstance(value, tuple) and len(value) == 2 and all(_is_number(part) for part in value):
        return float(value[0]), float(value[1])
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)
