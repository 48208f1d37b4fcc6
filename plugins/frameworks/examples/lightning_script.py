"""A script for Lightning that does not use Paceline.

    torchrun --standalone --nproc-per-node=2 lightning_script.py --devices 2
    paceline launch --on spawn --nproc 2 --threads 1 -- lightning_script.py --devices 2

Both start two processes; Lightning sees that it need start none itself. As everywhere with Lightning,
``devices`` must be the number of processes a machine, and ``num_nodes`` the number of machines.
"""

from __future__ import annotations

import argparse
import hashlib

import lightning.pytorch as pl
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def points(number: int) -> TensorDataset:
    """Points in the plane, and whether they lie within a circle."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 2, generator=generator)
    return TensorDataset(x, (x.square().sum(dim=1) < 1.4).long())


class Circle(pl.LightningModule):  # type: ignore[misc]  # Any where Lightning is not installed
    """A small classifier."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, label = batch
        return functional.cross_entropy(self.model(x), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    pl.seed_everything(1)
    module = Circle(options.lr)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(points(512), batch_size=32, shuffle=True))

    weights = nn.utils.parameters_to_vector(module.parameters()).detach().cpu()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: "
        f"{trainer.num_training_batches} batches an epoch, weights {digest}",
        flush=True,
    )
    # Lightning leaves the process group to the interpreter's end, which gloo's threads occasionally abort.
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
