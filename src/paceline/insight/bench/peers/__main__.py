"""One rank of a peer: ``python -m paceline.insight.bench.peers MODULE JOB``, JOB being JSON.

The process group meets in a file, so that no port is needed and nothing but gloo itself listens.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import torch
import torch.distributed as dist

from paceline.core.task_loading import TaskReference
from paceline.insight.bench.peers.job import PeerJob
from paceline.insight.bench.tasks import Timed


def main(module: str, text: str) -> None:
    """Train ``text``'s job by ``module``'s loop."""
    description = json.loads(text)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    train = importlib.import_module(module).train
    task = TaskReference(description["task"], description["fields"]).load()
    assert isinstance(task, Timed)
    task.note_imports()
    job = PeerJob(
        task=task,
        rank=rank,
        world_size=world_size,
        batch_size=description["batch_size"],
        total_steps=description["total_steps"],
    )
    dist.init_process_group("gloo", init_method=description["init_method"], rank=rank, world_size=world_size)
    train(job)
    dist.destroy_process_group()
    # A device mesh keeps its group for ever, whose threads can abort the interpreter's own way out.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
