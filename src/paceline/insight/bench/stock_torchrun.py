"""Training under plain torchrun as tutorials show it: DistributedDataParallel and a snapshot each epoch.

``torchrun --max-restarts=N stock_torchrun.py DIRECTORY EPOCHS``. What is not in the tutorials is the fault
script: the two calls that kill the process and record the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.insight.bench.disturbed import build_dataset, build_model, build_optimizer
from paceline.insight.bench.faults import FaultScript
from paceline.insight.bench.workload import GLOBAL_BATCH_SIZE


class SnapshotTrainer:
    """A model, its data, and the snapshot that a restart goes on from."""

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
