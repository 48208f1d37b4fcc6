"""Calls that a type checker accepts or refuses: `make check` fails where an error that is ignored here is none."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

import paceline


def calls(task: paceline.Task, model: nn.Module, optimizer: optim.Optimizer, given: dict[str, Any]) -> None:
    paceline.fit(task, epochs=3, nproc=2, strategy="fsdp", precision="bf16", checkpoint_every=["1epoch", "10min"])
    paceline.fit(task, world_size=2, rank=0, **given)
    paceline.fit(task, epoch=3)  # type: ignore[call-arg]
    paceline.fit(task, epochs="3")  # type: ignore[arg-type]
    paceline.fit(task, precision="bf17")  # type: ignore[arg-type]
    paceline.Run("run", model, optimizer, [], global_batch_size=8, microbatches=4, seed=1, walltime="2h")
    paceline.Run("run", model, optimizer, [], global_batch_size=8, microbatch=4)  # type: ignore[call-arg]
    paceline.Run("run", model, optimizer, [], global_batch_size=8, epochs=4)  # type: ignore[call-arg]
    paceline.Run("run", model, optimizer, [], global_batch_size=8, seed="1")  # type: ignore[arg-type]
