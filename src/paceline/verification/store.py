"""The tensors of a reference run, step by step on disk, and how far others are from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


class ReferenceWriter:
    """Writes a step's tensors as one file, as float64."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._tensors: dict[str, torch.Tensor] = {}
        self._squares: dict[str, float] = {}
        self._numels: dict[str, int] = {}

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor of the step: a "gradient" or a "weight"."""
        value = tensor.detach().cpu().double().clone(memory_format=torch.contiguous_format)
        self._tensors[f"{kind}/{name}"] = value
        self._squares[kind] = self._squares.get(kind, 0.0) + float(value.square().sum())
        self._numels[kind] = self._numels.get(kind, 0) + value.numel()

    def end_step(self, step: int) -> None:
        """Write what was noted."""
        rms = {
            kind: repr(math.sqrt(square / max(1, self._numels[kind])))
            for kind, square in self._squares.items()
        }
        save_file(self._tensors, self._directory / f"step-{step}.safetensors", metadata=rms)
        self._tensors, self._squares, self._numels = {}, {}, {}


class Reference:
    """What :class:`ReferenceWriter` wrote."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = 0
        self._file: Any = None
        self._names: frozenset[str] = frozenset()
        self._rms: Mapping[str, float] = {}

    def distance(self, step: int, kind: str, name: str, tensor: torch.Tensor) -> float | None:
        """How far a tensor is from the reference's; None where that has none.

        The root mean square of the difference, over that of the reference's tensor or, where that is smaller
        (a bias whose gradient is zero but for rounding), of all its tensors of this kind.
        """
        if step != self._step:
            self._open(step)
        key = f"{kind}/{name}"
        if key not in self._names:
            return None
        expected: torch.Tensor = self._file.get_tensor(key)
        value = tensor.detach().cpu().double()
        if value.shape != expected.shape:
            return math.inf
        if not value.numel():
            return 0.0
        scale = max(_rms(expected), self._rms.get(kind, 0.0))
        distance = _rms(value - expected)
        if not math.isfinite(distance):
            return math.inf
        return distance / scale if scale else distance

    def _open(self, step: int) -> None:
        self._file = safe_open(self._directory / f"step-{step}.safetensors", framework="pt")
        self._names = frozenset(self._file.keys())
        self._rms = {kind: float(text) for kind, text in (self._file.metadata() or {}).items()}
        self._step = step


def _rms(tensor: torch.Tensor) -> float:
    return math.sqrt(float(tensor.square().mean()))
