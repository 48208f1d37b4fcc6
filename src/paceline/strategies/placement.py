"""How a model lies on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.distributed.gradient_norm import clip_gradients
from paceline.task import Loss


class Rehearsal(Protocol):
    """What may be tried of a task before its model is laid out."""

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """What the task says of the parts of its model's forward."""

    def loss(self, module: nn.Module) -> Loss:
        """The loss of a micro-batch of the training data."""


class Placement(Protocol):
    """Lays a model out before anything is built from its parameters.

    Attributes:
        in_step: whether whoever calls the model needs the other ranks to call theirs.
    """

    in_step: bool

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The model as this rank is to hold it, on its device; all ranks call this together.

        Args:
            module: as the task built it, on the CPU.
            device: this rank's.

        Raises:
            ConfigError: the model cannot be laid out so.
        """

    def twin(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        """A second model, laid out as the first and equal to it, that is only evaluated; all ranks together.

        Args:
            build: builds the task's model once more, on the CPU.
            like: the first, as it was placed.
            device: this rank's.
        """

    def take_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        """What steps in place of the optimizers that were built for the model, by name.

        That is often they themselves. They have no state yet. All ranks call this together.

        Raises:
            ConfigError: they cannot work so.
        """

    def whole(self, state: Any, *, keep: bool) -> Any:
        """A state, or a part of one, as one process would have it; all ranks call this together.

        Args:
            state: mappings, lists and tuples of tensors and other values.
            keep: whether this rank needs the result; else it takes part, and holds one tensor at a time.
        """

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        """Scale the gradients of the whole model down to a 2-norm; all ranks call this together."""


class InTurn:
    """One layout after the other, inner ones last: layers are split before their parts are sharded.

    Args:
        layouts: what lays out, the one of the outermost axis of the mesh first.
    """

    in_step = True

    def __init__(self, layouts: Sequence[Placement]) -> None:
        self._layouts = layouts

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        for layout in self._layouts:
            module = layout.place(module, device)
        return module

    def twin(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("layers that are split have no moving average")

    def take_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        for layout in self._layouts:
            optimizers = layout.take_optimizers(optimizers)
        return optimizers

    def whole(self, state: Any, *, keep: bool) -> Any:
        for layout in reversed(self._layouts):
            state = layout.whole(state, keep=keep)
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        self._layouts[0].clip_gradients(module, max_norm)


class Whole:
    """Every rank holds the whole model."""

    in_step = False

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module.to(device)

    def twin(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        return deepcopy(like)

    def take_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers

    def whole(self, state: Any, *, keep: bool) -> Any:
        return state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        clip_gradients(module.parameters(), max_norm)
