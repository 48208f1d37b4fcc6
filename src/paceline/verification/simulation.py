"""How a method that is its own reference is simulated in one process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

import torch

from paceline.training.run import Run


class Simulation(Protocol):
    """Trains in this process as so many ranks would, one rank's part after the other's."""

    def __call__(self, run: Run, world_size: int) -> Mapping[str, torch.Tensor]:
        """The model's state after the last step, as one process would save it.

        Args:
            run: what is trained, with the options of the real run.
            world_size: ranks to simulate.
        """


def load_simulation(place: str) -> Simulation:
    """The function at ``module:function``."""
    module, _, name = place.partition(":")
    return cast(Simulation, getattr(importlib.import_module(module), name))
