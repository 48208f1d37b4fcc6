"""The peers' training loops, and one rank of one: ``python -m benchmarks.peers LOOP JOB``, JOB being JSON.

All get the same task, data and order. The process group meets in a file, so that no port is needed and
nothing but gloo itself listens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from benchmarks.tasks import Timed
from benchmarks.workloads import PIPELINE_MICROBATCHES
from paceline.core.task_loading import TaskReference

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PeerJob:
    """A peer's work on one rank.

    Attributes:
        task: builds the model, the optimizer, the schedule and the loss, and holds the clock.
        rank: this process's rank.
        world_size: processes.
        batch_size: samples a rank and step.
        total_steps: steps to train.
        seed: decides the initial weights and the order of the data.
    """

    task: Timed
    rank: int
    world_size: int
    batch_size: int
    total_steps: int
    seed: int = 0

    def tensors(self) -> Batch:
        """Images (N, 1, 28, 28) uint8 and labels (N,) int64."""
        dataset = self.task.build_dataset("train")
        assert isinstance(dataset, TensorDataset)
        images, labels = dataset.tensors
        return images, labels

    def index_batches(self, num_samples: int) -> torch.Tensor:
        """Sample indices, shape (total_steps, world_size, batch_size).

        All epochs in a row, each a fresh permutation without its last, short batch: a peer meets
        no end of an epoch, and pays for no permutation while the clock runs.
        """
        generator = torch.Generator().manual_seed(self.seed)
        global_batch_size = self.world_size * self.batch_size
        steps_per_epoch = num_samples // global_batch_size
        epochs = -(-self.total_steps // steps_per_epoch)
        orders = [
            torch.randperm(num_samples, generator=generator)[: steps_per_epoch * global_batch_size]
            for _ in range(epochs)
        ]
        return torch.cat(orders).view(-1, self.world_size, self.batch_size)[: self.total_steps]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The task's only optimizer."""
        optimizer = self.task.build_optimizer(model)
        assert isinstance(optimizer, Optimizer)
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The task's schedule, over the whole job."""
        scheduler = self.task.build_scheduler(optimizer, self.total_steps)
        assert isinstance(scheduler, LRScheduler)
        return scheduler


class BatchedTensors(Dataset[Batch]):
    """A dataset whose item is a batch: one indexing operation a tensor, and no collation."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return self.images[indices], self.labels[indices]


class GivenBatches(BatchSampler):
    """A batch sampler that yields the rows of ``indices`` (batches, batch_size) in order."""

    def __init__(self, indices: torch.Tensor) -> None:
        super().__init__(SequentialSampler(range(indices.numel())), batch_size=indices.shape[1], drop_last=False)
        self.indices = indices

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]  # a tensor serves as a list here
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _run_loop(
    job: PeerJob, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batches: torch.Tensor
) -> None:
    """Train ``model`` by hand on the rows of ``batches``, which are samples' indices."""
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer)

    for indices in batches:
        loss = job.task.loss(model, (images[indices], labels[indices]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()


def train_ddp(job: PeerJob) -> None:
    """Train as an expert writes it by hand with DistributedDataParallel: the baseline."""
    images, labels = job.tensors()
    batches = job.index_batches(len(labels))[:, job.rank]

    torch.manual_seed(job.seed)
    # Measured too: static_graph and plain buckets are within the noise of this. Only to stop the broadcast
    # of batch norm's statistics is faster (6 to 7 % on the ConvNet), but then each rank has its own model.
    model = DistributedDataParallel(job.task.build_model(), gradient_as_bucket_view=True)
    _run_loop(job, model, images, labels, batches)


def train_accelerate(job: PeerJob) -> None:
    """Train with Hugging Face Accelerate, as its documentation shows it."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs

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


def train_lightning(job: PeerJob) -> None:
    """Train with Lightning, in the mode that it has for measuring its own overhead (``barebones``)."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

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


def train_fsdp(job: PeerJob) -> None:
    """Train as an expert writes it by hand with ``fully_shard``.

    The model's direct children with parameters are gathered one by one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    images, labels = job.tensors()
    batches = job.index_batches(len(labels))[:, job.rank]

    torch.manual_seed(job.seed)  # every rank builds the same
    model: nn.Module = job.task.build_model()
    mesh = init_device_mesh("cpu", (job.world_size,))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _run_loop(job, model, images, labels, batches)


def train_tp(job: PeerJob) -> None:
    """Train the deep MLP as an expert writes it by hand with ``parallelize_module``.

    All ranks compute the same samples.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

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
    _run_loop(job, model, images, labels, batches)


def train_pp(job: PeerJob) -> None:
    """Train the deep MLP as an expert writes it by hand with ``torch.distributed.pipelining``.

    The clock is read as a step begins on the first stage.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    from paceline_tasks.fashion_mnist import normalise

    images, labels = job.tensors()
    batches = job.index_batches(len(labels)).flatten(1)

    torch.manual_seed(job.seed)
    model = job.task.build_model()
    assert isinstance(model, nn.Sequential)
    cuts = [len(model) * stage // job.world_size for stage in range(job.world_size + 1)]
    part = model[cuts[job.rank] : cuts[job.rank + 1]]
    stage = PipelineStage(part, job.rank, job.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PIPELINE_MICROBATCHES, loss_fn=functional.cross_entropy)
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


LOOPS: Mapping[str, Callable[[PeerJob], None]] = {
    "ddp": train_ddp,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "fsdp": train_fsdp,
    "tp": train_tp,
    "pp": train_pp,
}


def main(loop: str, text: str) -> None:
    """Train ``text``'s job by a loop."""
    description = json.loads(text)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
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
    LOOPS[loop](job)
    dist.destroy_process_group()
    # A device mesh keeps its group for ever, whose threads can abort the interpreter's own way out.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
