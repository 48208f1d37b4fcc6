"""A loop of one's own: a script that builds its parts and takes its steps itself, with a moving average of the weights.

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node=2 examples/own_loop.py
    paceline launch --on slurm --gpus-per-node 8 --nproc 8 --rank-launcher srun --walltime 1h -- examples/own_loop.py

With the same number of threads a process (OMP_NUM_THREADS=1), all end with the same weights. Kill it and start it
again: it continues at the newest checkpoint. The digits are scikit-learn's, so it needs `pip install scikit-learn`.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/own-loop")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(labels)
    train_data, test_data = TensorDataset(images[:1440], digits[:1440]), TensorDataset(images[1440:], digits[1440:])

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * 1440 // 48)

    def loss(batch: list[torch.Tensor]) -> torch.Tensor:
        images, digits = batch
        return functional.cross_entropy(model(images + 0.1 * torch.randn_like(images)), digits)

    def metrics(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, digits = batch
        return {
            "accuracy": (model(images).argmax(dim=1) == digits).float(),
            "average_accuracy": (average(images).argmax(dim=1) == digits).float(),
        }

    run = paceline.Run(
        options.run_dir,
        model,
        optimizer,
        train_data,
        global_batch_size=48,
        microbatches=6,
        state={"schedule": schedule, "average": average},  # what else is saved
    )
    for step in run.steps(epochs=options.epochs):
        step.backward(loss)
        step.update(clip_norm=1.0)
        schedule.step()
        average.update_parameters(model)
        if step.ends_epoch:
            print(f"step {step.step + 1}: {run.evaluate(metrics, test_data)}")
    print(run.result)


if __name__ == "__main__":
    main()
