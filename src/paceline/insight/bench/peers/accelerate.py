"""Hugging Face Accelerate, as its documentation shows it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch.utils.data import DataLoader

from paceline.insight.bench.peers.job import BatchedTensors, GivenBatches, PeerJob


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps."""
    images, labels = job.tensors()
    # Accelerate deals the batches out: rank r takes r, r + world_size, ...
    batches = job.index_batches(len(labels)).flatten(end_dim=1)
    loader = DataLoader(BatchedTensors(images, labels), sampler=GivenBatches(batches), batch_size=None)

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    torch.manual_seed(job.seed)
    model = job.task.build_model()
    optimizer = job.optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Not prepared: Accelerate would step it once for each process.
    scheduler = job.scheduler(optimizer)

    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(job.task.loss(model, batch))
        optimizer.step()
        scheduler.step()
