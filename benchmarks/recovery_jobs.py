"""The jobs of ``python -m benchmarks recovery``, which kills their workers: one small model for all candidates.

:class:`RecoveryWorkload` is Paceline's task. ``torchrun --max-restarts=N -m benchmarks.recovery_jobs DIRECTORY
EPOCHS`` trains the same under stock torchrun.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.faults import GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH, FaultScript
from paceline.core.task import Defaults, Task


def build_model() -> nn.Module:
    """Vectors (B, 64) -> logits (B, 10), with dropout."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def build_dataset() -> TensorDataset:
    """Random vectors and labels, the same in every process; an epoch is ten steps."""
    generator = torch.Generator().manual_seed(0)
    samples = STEPS_PER_EPOCH * GLOBAL_BATCH_SIZE
    return TensorDataset(
        torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def build_optimizer(model: nn.Module) -> Optimizer:
    """AdamW: it counts its steps, so its state tells how many are done."""
    return AdamW(model.parameters(), lr=1e-3)


@dataclass
class RecoveryWorkload(Task):
    """The same as a task of Paceline's.

    Attributes:
        script: the directory of a :class:`~benchmarks.faults.FaultScript`.
    """

    script: str = ""

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=GLOBAL_BATCH_SIZE)

    def __post_init__(self) -> None:
        self._faults = FaultScript(Path(self.script))

    def build_model(self) -> nn.Module:
        """The model that all contenders train."""
        return build_model()

    def build_dataset(self, split: str) -> Any:
        """The data that all contenders see; nothing to evaluate on."""
        return build_dataset() if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of all contenders; each of its steps is recorded."""
        self._optimizer = build_optimizer(model)
        self._optimizer.register_step_post_hook(self._after_step)
        return self._optimizer

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean cross-entropy; a scripted kill comes before it."""
        self._faults.before_step(self._steps_done() + 1, *_place())
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    def _after_step(self, *_: Any) -> None:
        self._faults.after_step(self._steps_done(), _place()[0])

    def _steps_done(self) -> int:
        return int(next((state["step"] for state in self._optimizer.state.values()), 0))


def _place() -> tuple[int, int]:
    """Rank and world size as they are now: worlds change."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class SnapshotTrainer:
    """Training under plain torchrun as tutorials show it: DistributedDataParallel and a snapshot each epoch.

    Only the fault script is not in the tutorials: the two calls that kill the process and record the steps.
    """

    def __init__(self, directory: Path) -> None:
        self.script = FaultScript(directory)
        self.snapshot_path = directory / "snapshot.pt"
        torch.manual_seed(0)
        model = build_model()
        self.optimizer = build_optimizer(model)
        self.epochs_run = 0
        if self.snapshot_path.exists():
            snapshot = torch.load(self.snapshot_path)
            model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
        self.model = DistributedDataParallel(model)
        dataset = build_dataset()
        self.sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(), sampler=self.sampler)

    def train(self, total_epochs: int) -> None:
        """Train what is left of ``total_epochs``."""
        for epoch in range(self.epochs_run, total_epochs):
            self._run_epoch(epoch)
            if dist.get_rank() == 0:
                snapshot = {
                    "model": self.model.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epochs_run": epoch + 1,
                }
                torch.save(snapshot, self.snapshot_path)

    def _run_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(self.loader):
            step = epoch * len(self.loader) + index + 1
            self.script.before_step(step, dist.get_rank(), dist.get_world_size())
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.script.after_step(step, dist.get_rank())


def main(directory: Path, total_epochs: int) -> None:
    """Train, and leave the model's hash."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = SnapshotTrainer(directory)
    trainer.train(total_epochs)
    if int(os.environ["RANK"]) == 0:
        digest = hashlib.sha256()
        for tensor in trainer.model.module.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        (directory / "result.json").write_text(json.dumps({"model_sha256": digest.hexdigest()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
