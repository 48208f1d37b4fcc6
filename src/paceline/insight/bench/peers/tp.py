"""The loop that an expert writes by hand with ``parallelize_module``, for the deep MLP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from paceline.insight.bench.peers.job import PeerJob


def train(job: PeerJob) -> None:
    """Train for ``job.total_steps`` steps; all ranks compute the same samples."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels)).flatten(1)

    torch.manual_seed(job.seed)
    model = job.task.build_model()
    linears = [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]
    plan: dict[str, ParallelStyle] = {}
    for column, row in zip(linears[::2], linears[1::2], strict=False):
        plan |= {column: ColwiseParallel(), row: RowwiseParallel()}
    if len(linears) % 2:
        plan[linears[-1]] = ColwiseParallel(output_layouts=Replicate())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer)

    for indices in batches:
        loss = job.task.loss(model, (images[indices], labels[indices]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
