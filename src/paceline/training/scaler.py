"""A gradient scaler for parameters of which each rank may hold a part."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from types import SimpleNamespace
from typing import cast

import torch
from torch.optim import Optimizer

from paceline.distributed.sharded_state import ShardedOptimizer, local_part

LEAST_SCALE = 2.0**-14
"""The smallest normal number of a half: gradients that it does not bring into range are not finite at all."""


class PartScaler(torch.amp.GradScaler):
    """Unscales what this rank holds of each gradient, and skips a step for all optimizers or for none.

    torch's takes no plain parameters beside distributed ones, and decides for each optimizer: a step that
    only one of them applied would be neither a step nor a skipped one. What other ranks hold of the gradients
    it does not see: whether all of it is finite, the ranks agree on before.
    """

    def unscale_all(self, optimizers: Collection[Optimizer], *, finite: bool) -> bool:
        """Unscale the gradients of a step.

        Args:
            optimizers: of all parameters.
            finite: whether the gradients of all ranks are.

        Returns:
            Whether the optimizers are to apply it: none does where a gradient is not finite.
        """
        for optimizer in optimizers:
            self.unscale_(optimizer)
        found = list(chain.from_iterable(self._found_inf_per_device(each).values() for each in optimizers))
        finite = finite and not any(inf.item() for inf in found)
        if not finite:
            for inf in found:
                inf.fill_(1.0)
        return finite

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        held = SimpleNamespace(param_groups=[{"params": _parts(optimizer)}])
        unscaled: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            cast(Optimizer, held), inv_scale, found_inf, allow_fp16
        )
        # torch's steps with no optimizer of which it has looked at nothing.
        return unscaled or {found_inf.device: found_inf}


def _parts(optimizer: Optimizer) -> list[torch.Tensor]:
    """Tensors whose ``grad`` is what this rank holds of each gradient."""
    parts = []
    if isinstance(optimizer, ShardedOptimizer):
        for gradient in optimizer.gradients():
            part = gradient.detach()
            part.grad = gradient
            parts.append(part)
        return parts
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                part = local_part(parameter.detach())
                part.grad = local_part(parameter.grad)
                parts.append(part)
    return parts
