"""A model as a table: its layers in the order in which they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Layer:
    """A module without children, or with parameters of its own.

    Attributes:
        name: in the model.
        kind: its class.
        shape: of its output for one sample, without the batch; None where it has not computed.
        parameters: how many numbers; those of a parameter that an earlier layer has, too, count there.
        trained: how many of them are trained.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    parameters: int
    trained: int


@dataclass(frozen=True)
class Architecture:
    """A model.

    Attributes:
        kind: its class.
        layers: in the order in which they computed first; those that did not come last.
        parameters: how many numbers, each once.
        trained: how many of them are trained.
        bytes: of parameters and buffers.
    """

    kind: str
    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    bytes: int


class Watch:
    """Notes the layers' outputs during their first forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        ]
        self._shapes: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is entered, forwards are noted."""
        handles = [
            module.register_forward_hook(partial(self._computed, name)) for name, module in self._layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _computed(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._shapes.setdefault(name, _shape(output))

    def architecture(self) -> Architecture:
        """What was seen."""
        seen: set[int] = set()
        layers = {}
        for name, module in self._layers:
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen |= {id(p) for p in own}
            layers[name] = Layer(
                name=name,
                kind=type(module).__name__,
                shape=self._shapes.get(name),
                parameters=sum(p.numel() for p in own),
                trained=sum(p.numel() for p in own if p.requires_grad),
            )
        order = [*self._shapes, *(name for name in layers if name not in self._shapes)]
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return Architecture(
            kind=type(self._model).__name__,
            layers=tuple(layers[name] for name in order),
            parameters=sum(p.numel() for p in self._model.parameters()),
            trained=sum(p.numel() for p in self._model.parameters() if p.requires_grad),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
        )


def _shape(output: Any) -> tuple[int, ...]:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return tuple(tensors[0].shape[1:]) if tensors else ()
