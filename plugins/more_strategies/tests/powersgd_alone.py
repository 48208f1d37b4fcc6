"""Calls PowerSGD's hook as ``DistributedDataParallel`` does, while buckets become others; a line each time.

A program, as a process group in pytest's own process can keep that from ending.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn

from paceline.core.environment import Environment
from paceline.parallel.world import open_world
from paceline_more_strategies.compression import POWERSGD_WARMUP, PowerSGD

SHAPE = (6, 5)
SIZE = 30


@dataclass(frozen=True)
class Bucket:
    """Gradients one behind the other."""

    number: int
    of: list[nn.Parameter]
    flat: torch.Tensor
    last: bool

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[nn.Parameter]:
        return self.of

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [part.view(SHAPE) for part in self.flat.split(SIZE)]

    def is_last(self) -> bool:
        return self.last


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(SHAPE)) for name in "abc"}
    owed = {name: torch.zeros(SHAPE) for name in parameters}
    with open_world(Environment(), device="cpu") as world:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        memory = PowerSGD(nn.ParameterDict(parameters), world, rank=1, scale=1.0)
        memory.load({"steps": POWERSGD_WARMUP, "errors": {}, "factors": {}})
        for buckets in ("a", "bc"), *[("a", "c", "b")] * 50, ("ac", "b"):
            answers = []
            for number, names in enumerate(buckets):
                gradients = torch.randn(SIZE * len(names), generator=generator)
                for name, part in zip(names, gradients.split(SIZE), strict=True):
                    owed[name] += part.view(SHAPE)
                of = [parameters[name] for name in names]
                answers.append(memory.hook(Bucket(number, of, gradients, last=names == buckets[-1])))
            for names, answer in zip(buckets, answers, strict=True):
                for name, part in zip(names, answer.wait().split(SIZE), strict=True):
                    owed[name] -= part.view(SHAPE)
            kept = memory.gather_state()["errors"]
            wrong = [name for name in owed if not torch.allclose(kept[name][0], owed[name], atol=1e-5)]
            print(json.dumps({"buckets": buckets, "wrong": wrong}), flush=True)
        os._exit(0)  # nothing is left to be tidied up, and the group's threads would wait for each other


if __name__ == "__main__":
    main()
