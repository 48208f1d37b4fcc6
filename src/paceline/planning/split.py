"""One rank's part of a tensor-parallel model: layers cut in two, as a plan of torch's styles says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from paceline.errors import ConfigError
from paceline.planning.parts import nbytes
from paceline.strategies.tensor_plan import found_plan
from paceline.task import Task

_HALF = 2
_DEGREES = (2, 4, 8)
"""Ranks that layers are split over: beyond one machine's, their all-reduces are the step."""


@dataclass
class Splitting:
    """How a model's layers are split over two ranks.

    Attributes:
        styles: module's name -> its style; only those that split a layer.
        degrees: the numbers of ranks that can share all of them equally.
        reduced_bytes: of tensors that the ranks add up, in forward and in backward.
    """

    styles: Mapping[str, ParallelStyle]
    degrees: tuple[int, ...]
    reduced_bytes: int = field(default=0, init=False)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """While it is entered, ``module`` is one rank's; its parameters stay cut."""
        cut: dict[int, nn.Parameter] = {}
        with ExitStack() as hooks:
            for name, style in self.styles.items():
                layer = module.get_submodule(name)
                columns = isinstance(style, ColwiseParallel)
                for own, dimension in _dimensions(layer, columns).items():
                    parameter = getattr(layer, own)
                    if parameter is None:
                        continue
                    if id(parameter) not in cut:
                        half = parameter.detach().chunk(_HALF, dimension)[0].clone()
                        cut[id(parameter)] = nn.Parameter(half, requires_grad=parameter.requires_grad)
                    setattr(layer, own, cut[id(parameter)])
                if not columns and isinstance(layer, nn.Linear) and _is_whole(style, "input_layouts"):
                    hooks.callback(layer.register_forward_pre_hook(_own_input).remove)
                hooks.callback(layer.register_forward_hook(self._communicates(style, columns)).remove)
            yield

    def _communicates(self, style: ParallelStyle, columns: bool) -> Any:
        gathers = columns and _is_whole(style, "output_layouts")

        def hook(_layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            if not columns:
                self.reduced_bytes += nbytes([output])
                return None
            if inputs[0].requires_grad:
                self.reduced_bytes += nbytes([inputs[0]])
            if not gathers:
                return None
            self.reduced_bytes += nbytes([output])
            return torch.cat([output] * _HALF, dim=-1)

        return hook


def splitting(task: Task, module: nn.Module) -> Splitting | None:
    """How ``--strategy tp`` splits the task's model over two ranks; None where it does not."""
    # Who can be shared by more can be shared by two.
    for degree in reversed(_DEGREES):
        plan = _plan(task, module, degree)
        styles = {
            name: style
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear | nn.Embedding)
            for pattern, style in plan.items()
            if fnmatchcase(name, pattern) and isinstance(style, ColwiseParallel | RowwiseParallel)
        }
        if styles and _is_shared_equally(module, styles, degree):
            return Splitting(styles, tuple(d for d in _DEGREES if d <= degree))
    return None


def _is_shared_equally(module: nn.Module, styles: Mapping[str, ParallelStyle], degree: int) -> bool:
    return all(
        getattr(layer, own).shape[dimension] % degree == 0
        for name, style in styles.items()
        for layer in (module.get_submodule(name),)
        for own, dimension in _dimensions(layer, isinstance(style, ColwiseParallel)).items()
        if getattr(layer, own) is not None
    )


def _plan(task: Task, module: nn.Module, degree: int) -> Mapping[str, ParallelStyle]:
    given = task.tensor_parallel_plan(module)
    if given is not None:
        return given
    try:
        return found_plan(module, degree)
    except ConfigError:  # nothing to split, or not into so many parts
        return {}


def _own_input(_layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].chunk(_HALF, dim=-1)[0], *inputs[1:])


def _is_whole(style: ParallelStyle, which: str) -> bool:
    return any(isinstance(layout, Replicate) for layout in getattr(style, which, ()))


def _dimensions(layer: nn.Module, columns: bool) -> dict[str, int]:
    """The dimension that each of the layer's own parameters is cut along."""
    if isinstance(layer, nn.Embedding):
        return {"weight": 1 if columns else 0}
    return {"weight": 0, "bias": 0} if columns else {"weight": 1}
