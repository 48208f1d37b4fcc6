"""The baseline: the loop that an expert writes by hand with DistributedDataParallel."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.insight.bench.peers.job import PeerJob


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels))[:, job.rank]

    torch.manual_seed(job.seed)
    # Measured too: static_graph and plain buckets are within the noise of this. Only to stop the broadcast
    # of batch norm's statistics is faster (6 to 7 % on the ConvNet), but then each rank has its own model.
    model = DistributedDataParallel(job.task.build_model(), gradient_as_bucket_view=True)
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer)

    for indices in batches:
        loss = job.task.loss(model, (images[indices], labels[indices]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
