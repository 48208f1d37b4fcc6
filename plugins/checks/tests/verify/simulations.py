"""Simulations of data parallelism in plain loops: a right one, and one that forgets to divide."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import torch

from paceline.training.run_context import RunContext
from paceline.training.state_manager import StateManager
from paceline.training.step import microbatch_loss
from paceline_checks.verify.plain import AVERAGE, train_plainly


def right(run: RunContext, world_size: int) -> Mapping[str, torch.Tensor]:
    return _simulated(run, 0.0)


def plain(run: RunContext, world_size: int) -> Mapping[str, torch.Tensor]:
    return train_plainly(run)


def plain_with_a_decayed_bias(run: RunContext, world_size: int) -> Mapping[str, torch.Tensor]:
    trained = train_plainly(run)
    return trained | {"1.bias": (1 - 1e-5) * trained["1.bias"], "of another model": torch.zeros(3)}


def plain_with_a_forgotten_average(run: RunContext, world_size: int) -> Mapping[str, torch.Tensor]:
    trained = train_plainly(run)
    return trained | {AVERAGE + name: value for name, value in trained.items() if not name.startswith(AVERAGE)}


def wrong(run: RunContext, world_size: int) -> Mapping[str, torch.Tensor]:
    return _simulated(run, 1e-3 * world_size)


def _simulated(run: RunContext, error: float) -> Mapping[str, torch.Tensor]:
    assert run.data.total_steps is not None
    with closing(run.build_loader(workers=0)) as loader:
        state = StateManager(run, loader).state
        parameters = list(state.module.parameters())
        for step in range(run.data.total_steps):
            gradients, weights = [], []
            for microbatch in loader.fetch(0, step, range(run.num_microbatches)):
                loss = microbatch_loss(run, state.module, step, microbatch)
                gradients.append(torch.autograd.grad(loss.sum, parameters))
                weights.append(float(loss.weight))
            pairs = list(zip(*gradients, strict=True))
            assert len(gradients) == 4
            for parameter, (a, b, c, d) in zip(parameters, pairs, strict=True):
                parameter.grad = ((a + b) + (c + d)) / sum(weights) + error
            state.update(run.config.training.clip_norm)
    return dict(state.module.state_dict())
