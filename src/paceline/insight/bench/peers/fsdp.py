"""The baseline of ``--strategy fsdp``: the loop that an expert writes by hand with ``fully_shard``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.insight.bench.peers.job import PeerJob


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps; the model's direct children with parameters are gathered alone."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels))[:, job.rank]

    torch.manual_seed(job.seed)  # every rank builds the same
    model: nn.Module = job.task.build_model()
    mesh = init_device_mesh("cpu", (job.world_size,))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer)

    for indices in batches:
        loss = job.task.loss(model, (images[indices], labels[indices]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
