"""Lightning, in the mode that it has for measuring its own overhead (``barebones``)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from paceline.insight.bench.peers.job import Batch, BatchedTensors, GivenBatches, PeerJob


class Module(pl.LightningModule):  # type: ignore[misc]  # Any where Lightning is not installed
    """The task as a LightningModule with automatic optimization."""

    def __init__(self, job: PeerJob) -> None:
        super().__init__()
        self.job = job
        self.model = job.task.build_model()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss of one batch."""
        return self.job.task.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        """The task's optimizer, and its schedule stepped each step."""
        optimizer = self.job.optimizer(self.model)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.job.scheduler(optimizer), "interval": "step"},
        }


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels))[:, job.rank]
    loader = DataLoader(BatchedTensors(images, labels), sampler=GivenBatches(batches), batch_size=None)

    torch.manual_seed(job.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.world_size,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        plugins=[LightningEnvironment()],
        use_distributed_sampler=False,
        max_epochs=1,
        barebones=True,
    )
    trainer.fit(Module(job), loader)
