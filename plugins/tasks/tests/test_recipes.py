"""The built-in recipes, on data made up here."""

from __future__ import annotations

import pytest
import torch

from paceline_tasks.fashion_mnist import FashionMNIST, FashionMNISTMLP, normalise


@pytest.fixture
def batch() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return [images, torch.arange(16) % 10]


@pytest.mark.parametrize(("recipe", "parameters"), [(FashionMNIST, 29_034), (FashionMNISTMLP, 25_450)])
def test_a_recipe_learns_a_batch_by_heart(
    recipe: type[FashionMNIST], parameters: int, batch: list[torch.Tensor]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = recipe()
        model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer, total_steps=30)
    first = task.loss(model, batch).item()
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        scheduler.step()
    metrics = task.metrics(model, batch)
    assert metrics["accuracy"].mean() > 0.9
    assert metrics["loss"].shape == (16,)
    assert metrics["loss"].mean() < first / 4


@pytest.mark.parametrize("total_steps", [*range(1, 13), 1407])
def test_the_schedule_holds_for_runs_of_any_length(total_steps: int) -> None:
    task = FashionMNIST(lr=0.2)
    optimizer = task.build_optimizer(torch.nn.Linear(1, 1))
    scheduler = task.build_scheduler(optimizer, total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) <= 0.2 + 1e-12
    assert total_steps < 100 or (max(rates) > 0.199 and rates[-1] < 1e-5)


def test_pixels_are_normalised_with_the_training_sets_moments() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8)
    expected = (torch.tensor([0.0, 1.0]) - 0.2860) / 0.3530
    assert torch.allclose(normalise(pixels), expected, atol=1e-6)


def test_the_recipe_has_no_validation_split() -> None:
    assert FashionMNIST().build_dataset("val") is None
