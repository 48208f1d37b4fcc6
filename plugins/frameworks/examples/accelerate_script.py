"""A script for Hugging Face Accelerate that does not use Paceline.

    accelerate launch --cpu --num_processes 2 accelerate_script.py
    paceline launch --on spawn --nproc 2 --env ACCELERATE_USE_CPU=true -- accelerate_script.py

Both start two processes, which share the batches and end with the same weights. ACCELERATE_USE_CPU is what
``accelerate launch --cpu`` sets; with GPUs it is not needed.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def points(number: int) -> TensorDataset:
    """Points in the plane, and whether they lie within a circle."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 2, generator=generator)
    return TensorDataset(x, (x.square().sum(dim=1) < 1.4).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    set_seed(1)
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    # Before the processes connect: modules that the first optimizer imports would keep a reference to their group,
    # whose threads then occasionally abort the interpreter at its end.
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
    accelerator = Accelerator()
    loader = DataLoader(points(512), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    loss = torch.zeros(())
    for _ in range(options.epochs):
        for x, label in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), label)
            accelerator.backward(loss)
            optimizer.step()

    weights = nn.utils.parameters_to_vector(network.parameters()).detach().cpu()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes}: "
        f"{len(loader)} batches an epoch, weights {digest}",
        flush=True,
    )
    # DistributedDataParallel keeps a reference to the group, too: free it first.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
