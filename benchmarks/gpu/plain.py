"""The peer: a loop by hand, one rank of it: ``python -m benchmarks.gpu.plain JOB RANK RANKS``, JOB being JSON.

It has what makes a loop fast: the data on the GPU, no wait for it, gradients in DDP's buckets. It sees no gradient
clipping, no logs and no checkpoints; Paceline's contenders save none in these steps either.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import models
from benchmarks.gpu.turns import Turns, steps_of


def main(job: dict[str, Any], rank: int, ranks: int) -> None:
    """Train in turns with others.

    Args:
        job: ``model`` (a class of :mod:`benchmarks.gpu.models`), ``fields``, ``turns``, ``name``, ``rounds``, ``batch``
            (samples a rank), ``microbatches`` (a rank), ``deterministic``.
        rank: of this process, and the number of its GPU.
        ranks: all of them.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not job["deterministic"]
    if job["deterministic"]:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if ranks > 1:
        meeting = f"file://{job['turns']}/{job['name']}.store"
        dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks)
    task = getattr(models, job["model"])(**job["fields"])
    torch.manual_seed(0)
    plain: nn.Module = task.build_model().to(device)
    optimizer = task.build_optimizer(plain)
    model = plain
    if ranks > 1:
        model = DistributedDataParallel(plain, device_ids=[rank], gradient_as_bucket_view=True)
    tensors = [tensor.to(device) for tensor in task.build_dataset("train").tensors]
    turns = Turns(Path(job["turns"]), job["name"], job["rounds"], rank)
    steps, generator = steps_of(job["rounds"]), torch.Generator().manual_seed(rank)
    rows = torch.randint(len(tensors[0]), (steps, job["batch"]), generator=generator).to(device)
    for step in range(steps):
        turns.before_step(step)
        optimizer.zero_grad(set_to_none=True)
        parts = rows[step].chunk(job["microbatches"])
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last or ranks == 1 else model.no_sync():  # type: ignore[operator]
                with torch.autocast("cuda", torch.bfloat16):
                    loss = task.loss(model, [tensor[part] for tensor in tensors])
                (loss / len(parts)).backward()
        optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
