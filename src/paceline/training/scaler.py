"""A gradient scaler for parameters of which each rank may hold a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch.optim import Optimizer

from paceline.distributed.sharded_state import local_part


class PartScaler(torch.amp.GradScaler):
    """Unscales what this rank holds of each gradient.

    torch's takes no plain parameters beside distributed ones. Whether the step is skipped, the ranks agree
    on before: see :func:`paceline.strategies.shard_by_shard.agreed`.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parts = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_part(parameter.detach())
                    part.grad = local_part(parameter.grad)
                    parts.append(part)
        held = SimpleNamespace(param_groups=[{"params": parts}])
        unscaled: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            cast(Optimizer, held), inv_scale, found_inf, allow_fp16
        )
        return unscaled
