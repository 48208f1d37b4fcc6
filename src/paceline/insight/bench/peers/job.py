"""What a peer is given: the same task, data and order for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, TensorDataset

from paceline.insight.bench.tasks import Timed

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
