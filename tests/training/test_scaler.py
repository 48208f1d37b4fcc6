"""A step in half precision is one step, however many optimizers apply it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline.training.optim import ShardedGradScaler


@pytest.mark.parametrize("overflowed", [None, 0, 1, "elsewhere"])
def test_all_optimizers_apply_a_step_or_none(overflowed: int | str | None) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [SGD([parameter], lr=0.5) for parameter in parameters]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((2,), torch.inf if number == overflowed else 8.0)

    applied = scaler.unscale_all(optimizers, finite=overflowed != "elsewhere")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert applied == (overflowed is None)
    expected = 0.5 if overflowed is None else 1.0
    assert [parameter.tolist() for parameter in parameters] == [[expected] * 2] * 2
    assert scaler.get_scale() == (8.0 if overflowed is None else 4.0)


@pytest.mark.parametrize("finite", [True, False])
def test_an_optimizer_without_gradients_applies_nothing(finite: bool) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    frozen, trained = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [SGD([frozen], lr=0.5), SGD([trained], lr=0.5)]
    trained.grad = torch.full((2,), 8.0)

    assert scaler.unscale_all(optimizers, finite=finite) == finite
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert frozen.tolist() == [1.0, 1.0]
    assert trained.tolist() == ([0.5, 0.5] if finite else [1.0, 1.0])
    assert scaler.get_scale() == (8.0 if finite else 4.0)


def test_a_rank_without_any_gradient_follows_the_others() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.5)

    for finite, scale in ((True, 8.0), (False, 4.0)):
        scaler.unscale_all([optimizer], finite=finite)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
