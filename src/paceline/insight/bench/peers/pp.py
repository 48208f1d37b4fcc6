"""The loop that an expert writes by hand with ``torch.distributed.pipelining``, for the deep MLP."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from paceline.insight.bench.peers.job import PeerJob
from paceline.insight.bench.workload import MICRO_BATCHES
from paceline.training.tasks.fashion_mnist import normalise


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps; the clock is read as a step begins on the first stage."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels)).flatten(1)

    torch.manual_seed(job.seed)
    model = job.task.build_model()
    assert isinstance(model, nn.Sequential)
    cuts = [len(model) * stage // job.world_size for stage in range(job.world_size + 1)]
    part = model[cuts[job.rank] : cuts[job.rank + 1]]
    stage = PipelineStage(part, job.rank, job.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=functional.cross_entropy)
    optimizer = job.optimizer(part)
    scheduler = job.scheduler(optimizer)

    for indices in batches:
        if job.rank == 0 and job.task.probe.tick():
            job.task.probe.write(Path(job.task.report), 0.0)
        optimizer.zero_grad(set_to_none=True)
        inputs = normalise(images[indices])
        if job.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels[indices])
        optimizer.step()
        scheduler.step()
