"""The moving average of the weights."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.distributed.sharded_state import local_part


class MovingAverage(AveragedModel):
    """torch's exponential moving average, of parameters that may be distributed: each rank averages its part.

    Args:
        module: a second model, laid out as the first and equal to it, that becomes the average.
        decay: of the average.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # AveragedModel would copy the model, which a sharded one does not allow.
        super().__init__(nn.Module(), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]
        self.module = module

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the model."""
        pairs = zip(_parts(self.module), _parts(model), strict=True)
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]]
        groups = defaultdict(list)
        for average, value in pairs:
            groups[average.dtype, average.device].append((average, value))
        for group in groups.values():
            averages, values = ([pair[side] for pair in group] for side in (0, 1))
            if self.n_averaged == 0:
                torch._foreach_copy_(averages, values)
            else:
                assert self.multi_avg_fn is not None
                self.multi_avg_fn(averages, values, self.n_averaged)
        self.n_averaged += 1


def _parts(module: nn.Module) -> list[torch.Tensor]:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return [local_part(tensor.detach()) for tensor in tensors]
