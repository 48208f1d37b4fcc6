"""The outer optimizer of DiLoCo: what follows the change that the ranks' steps apart made on average.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD


class OuterOptimizer:
    """SGD with Nesterov momentum, whose gradient is where a round began minus where it ended on average.

    It keeps the weights at which the round began; at a synchronisation these are the model's own, so that a
    checkpoint holds the momentum only.

    Args:
        module: the model.
        lr, momentum: of the outer steps.
    """

    def __init__(self, module: nn.Module, *, lr: float, momentum: float) -> None:
        self._parameters: list[torch.Tensor] = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self._base = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = SGD(self._base, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def begin(self) -> None:
        """A round begins at the model's weights."""
        torch._foreach_copy_(self._base, self._parameters)

    @torch.no_grad()
    def step(self) -> None:
        """End a round: the model's weights are the ranks' average; then the next one begins."""
        for base, parameter in zip(self._base, self._parameters, strict=True):
            base.grad = base - parameter
        self._optimizer.step()
        torch._foreach_copy_(self._parameters, self._base)

    def state_dict(self) -> dict[str, Any]:
        """The momentum."""
        return dict(self._optimizer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the momentum; options stay what they are now."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
