"""A Horovod script for PyTorch that does not use Paceline.

    horovodrun -np 2 python horovod_pytorch.py
    paceline launch --on horovod --nproc 2 -- horovod_pytorch.py

It fits a line to points, of which every rank has its own share, and prints what it found.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn


def main() -> None:
    """Train on this rank's share."""
    hvd.init()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(hvd.rank())
    x = torch.rand(256, 1, generator=generator)
    y = 3 * x - 1 + 0.01 * torch.randn(256, 1, generator=generator)

    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    slope, offset = model.weight.item(), model.bias.item()
    print(f"rank {hvd.rank()} of {hvd.size()}: y = {slope:.2f} x {offset:+.2f}", flush=True)


if __name__ == "__main__":
    main()
