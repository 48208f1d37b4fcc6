"""Calls that a type checker accepts or refuses: `make check` fails where an error that is ignored here is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import Dataset

import paceline


def add(first: int, second: int) -> int:
    return first + second


Points = tuple[torch.Tensor, torch.Tensor]


class Typed(paceline.Task):
    """A task's own types of data set and batch."""

    def build_dataset(self, split: str) -> Dataset[Points]:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Points) -> torch.Tensor:
        points, labels = batch
        labels.no_such_method()  # type: ignore[attr-defined]
        return nn.functional.cross_entropy(model(points), labels)

    def metrics(self, model: nn.Module, batch: Points) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}


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
    job: paceline.TaskJob = paceline.submit(task, on="local", nproc=2, epochs=3, partition="gpu", slurm=["nice=100"])
    paceline.submit(task, run_dir=job.run, env={"A": "1"}, rank_launcher="agent", **given)
    paceline.submit(task, epoch=3)  # type: ignore[call-overload]
    paceline.submit(task, array_parallelism="2")  # type: ignore[call-overload]
    one: paceline.FunctionJob = paceline.submit(add, 1, 2, nodes=2, walltime="2h", mem="64G", kwargs={})
    paceline.submit(one.result, partitoin="gpu")  # type: ignore[call-overload]
    paceline.submit(add, 1, 2, epochs=3)  # type: ignore[call-overload]
    paceline.submit_array(add, [1, 2], [3, 4], array_parallelism=2)
    paceline.submit_array(add, [1, 2], [3, 4], on="ray")  # type: ignore[arg-type]
    paceline.submit_array(add, [1, 2], [3, 4], array_paralelism=2)  # type: ignore[call-arg]
    paceline.log_image("a", model.weight)
    paceline.log_text("a", 1)  # type: ignore[arg-type]
