"""The same task in float64: what all other runs are measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def in_double(module: nn.Module) -> nn.Module:
    """The module with float64 parameters and buffers, whose submodules take inputs of less precision too."""
    module.double()
    for child in module.modules():
        child.register_forward_pre_hook(_doubled_inputs, with_kwargs=True)
    return module


def doubled(value: Any) -> Any:
    """The same, nested as it is, with floating-point tensors as float64."""

    def of(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    return pytree.tree_map(of, value)


class DoubleMode(TorchFunctionMode):
    """What is asked for in float32 is made in float64: ``x.float()``, ``dtype=torch.float32``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
        return func(*args, **kwargs)


def _doubled_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return doubled(args), doubled(kwargs)
