"""A GAN that draws digits: two networks that are updated in turn, in a loop of one's own, with a picture of each epoch.

    python examples/gan.py
    torchrun --standalone --nproc-per-node=2 examples/gan.py

The digits are scikit-learn's, 8x8 pixels, so it needs `pip install scikit-learn`. As a task, for `paceline train`, the
same calls stand in `Task.train_step`: docs/train-step.md.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import paceline

NOISE = 16


def picture(images: torch.Tensor) -> str:
    """Draw images, (N, 64) from -1 to 1, in a row, in characters."""
    rows = images.view(-1, 8, 8).transpose(0, 1).flatten(start_dim=1)
    shades = (2.5 * (rows + 1)).int().clamp(0, 4).tolist()
    return "\n".join("".join(" .+x#"[shade] for shade in row) for row in shades)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/gan")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()
    )
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    models = {"generator": generator, "critic": critic}
    optimizers = {name: torch.optim.Adam(model.parameters(), 1e-3, (0.5, 0.99)) for name, model in models.items()}
    data = TensorDataset(torch.from_numpy(load_digits().data).float() / 8 - 1)
    shown = torch.randn(6, NOISE)  # drawn before the run begins, so the same in a run that continues

    def critic_loss(batch: list[torch.Tensor]) -> torch.Tensor:
        (real,) = batch
        drawn = generator(torch.randn(len(real), NOISE, device=real.device)).detach()
        return (softplus(-critic(real)) + softplus(critic(drawn))).mean()

    def generator_loss(batch: list[torch.Tensor]) -> torch.Tensor:
        (real,) = batch
        return softplus(-critic(generator(torch.randn(len(real), NOISE, device=real.device)))).mean()

    run = paceline.Run(options.run_dir, models, optimizers, data, global_batch_size=96, microbatches=6)
    for step in run.steps(epochs=options.epochs):
        losses = {"critic": step.backward(critic_loss, "critic")}
        step.update("critic")
        losses["generator"] = step.backward(generator_loss, "generator")
        step.update("generator")
        step.log(**losses)
        if step.ends_epoch:  # on all ranks; the terminal shows what rank 0 prints
            with torch.no_grad():
                print(picture(generator(shown.to(next(generator.parameters()).device)).cpu()))
    print(run.result)


if __name__ == "__main__":
    main()
