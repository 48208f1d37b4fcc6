"""Tasks whose optimizers get their parameters in another order in each process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.training.format1.task import Square
from torch import nn
from torch.optim import AdamW, Optimizer

from paceline.core.task import BatchInfo

KILLED_AT = 4  # steps done; the checkpoint is older


class Skipping(AdamW):
    """Leaves the last parameter of each group alone for five steps, so that it has no state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            if group["steps"] <= 5:
                group["params"][-1].grad = None
        return super().step(closure)


@dataclass
class Shuffled(Square):
    """Shuffles the parameters, as a set may, which orders tensors by their addresses.

    Attributes:
        order: ``model``, ``shuffled``, ``set``, or ``names``, which is that of a set of the names.
        killed: a file that tells that rank 1 has been killed; without one it is not.
    """

    order: str = "shuffled"
    killed: str = ""

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        parameters = dict(model.named_parameters())
        if self.order == "shuffled":
            return random.SystemRandom().sample([*parameters.values()], len(parameters))
        if self.order == "set":
            return [*set(parameters.values())]
        if self.order == "names":
            return [parameters[name] for name in set(parameters)]
        return [*parameters.values()]

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        if self.optimizer == "skipping":
            return Skipping(self.parameters(model), lr=0.02)
        return super().build_optimizer(model)

    def on_batch_begin(self, info: BatchInfo) -> None:
        if self.killed and info.step == KILLED_AT and _rank() == 1 and not Path(self.killed).exists():
            Path(self.killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class GroupsOfRanks(Square):
    """Gives each rank its groups in another order."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rows = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": rows}]
        return AdamW(groups[:: -1 if _rank() else 1], lr=0.02)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
