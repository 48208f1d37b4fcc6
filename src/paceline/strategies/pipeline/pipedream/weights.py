"""Copies of the weights for shards whose backward comes after an update: weight stashing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Version = dict[str, torch.Tensor]
"""A module's parameters as they were, by name: leaves that take gradients of their own."""


def stashed(module: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """A copy of the parameters of these names as they are now."""
    return {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if name in names
    }


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the module's buffers, for a forward to change."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assign_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Write what a forward made of its copies into the module's own buffers."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])


class At(nn.Module):
    """A module, called with other parameters and buffers than its own.

    Args:
        module: the model, or a part of it.
        tensors: by name; whatever is missing is the module's own.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        # Not registered: the module is not this one's child.
        self.__dict__["at"] = (module, tensors)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, tensors = self.__dict__["at"]
        return functional_call(module, tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["at"][0], name)


@contextmanager
def gradients_shared(module: nn.Module, version: Version) -> Iterator[None]:
    """Within, the copies' gradients are added to where the module's own parameters have theirs."""
    own = dict(module.named_parameters())
    for name, tensor in version.items():
        tensor.grad = own[name].grad
    yield
    for tensor in version.values():
        tensor.grad = None
