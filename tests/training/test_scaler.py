"""A step in half precision is one step, however many optimizers apply it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline.training.scaler import PartScaler


@pytest.mark.parametrize("overflowed", [None, 0, 1, "elsewhere"])
def test_all_optimizers_apply_a_step_or_none(overflowed: int | str | None) -> None:
    scaler = PartScaler("cpu", init_scale=8.0)
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
