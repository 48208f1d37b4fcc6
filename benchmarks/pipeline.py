"""Pipelines of two processes compared in the same processes, step by step in turn.

``python -m benchmarks.pipeline`` prints one JSON object: the bars of balanced against equal
stages, of 1F1B's activations against GPipe's, and of Paceline's runtime against torch.distributed.pipelining
by hand.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from benchmarks.results import Spread
from paceline.core.config import ResolvedConfig
from paceline.core.environment import detect_environment
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.options import Split
from paceline.parallel.pipeline.pipeline import Pipeline, PipelineLayout
from paceline.parallel.pipeline.schedules import Name
from paceline.parallel.pipeline.stages import find_stage_executor
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.world import ParallelDims, World, open_world
from paceline_planning.model_partition import MemoryTracker

RANKS, MICROBATCHES, SAMPLES = 2, 8, 64
UNEQUAL = (768, 768, 768, 768, 64, 64, 64, 64, 10)
"""Widths between layers: half of the layers take nearly all of the time."""
EVEN = (384,) * 8 + (10,)
_LR = 1e-3
_STEPS = 10
"""Of each contender in a round: with two, a round's ratio was anything from 1.09 to 1.36."""


def main() -> int:
    """Start two ranks of this module and print what rank 0 found."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    if "RANK" in os.environ:
        _rank(rounds)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.pipeline", str(rounds)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(RANKS)]
    return max(rank.wait() for rank in ranks)


def _rank(rounds: int) -> None:
    torch.set_num_threads(1)
    with (
        open_world(detect_environment(os.environ), device="cpu") as world,
        tempfile.TemporaryDirectory() as d,
    ):
        directory = Path(d)
        balanced, _ = _contender(world, UNEQUAL, "1f1b", "balanced", directory)
        equal, _ = _contender(world, UNEQUAL, "1f1b", "equal", directory)
        ours, pipeline = _contender(world, EVEN, "1f1b", (4, 4), directory)
        by_hand = _by_hand(EVEN)
        gpipe, all_first = _contender(world, EVEN, "gpipe", (4, 4), directory)
        found = {
            "balanced_over_equal": _ratio(world, balanced, equal, rounds),
            "over_torch_by_hand": _ratio(world, ours, by_hand, rounds),
            "activations_of_gpipe_mib": _peak(all_first, gpipe),
            "activations_of_1f1b_mib": _peak(pipeline, ours),
        }
    if world.rank == 0:
        print(json.dumps(found, indent=2))


def _ratio(world: World, ours: Callable[[], None], other: Callable[[], None], rounds: int) -> dict[str, float]:
    """Steps a second of the one over those of the other: some of each in turn, either one first."""
    ratios = []
    for number in range(rounds + 1):
        seconds: dict[bool, float] = {}
        for is_ours in (True, False) if number % 2 else (False, True):
            step = ours if is_ours else other
            world.barrier()
            began = time.perf_counter()
            for _ in range(_STEPS):
                step()
            world.barrier()
            seconds[is_ours] = time.perf_counter() - began
        if number:  # the first one warms up
            ratios.append(seconds[False] / seconds[True])
    return Spread.of(ratios).as_json() | {"mean": statistics.fmean(ratios)}


def _model(widths: Sequence[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers)


def _data(widths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    number = SAMPLES * MICROBATCHES
    return torch.randn(number, widths[0], generator=generator), torch.arange(number) % widths[-1]


class _Work:
    """What the trainer would do for each micro-batch."""

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        features, labels = microbatch.batch
        return Loss(functional.cross_entropy(model(features), labels, reduction="sum"), len(labels))

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        return self.forward(model, microbatch)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def backward_done(self) -> None:
        pass


class _Trial:
    """What is measured to balance the stages."""

    def __init__(self, microbatch: MicroBatch) -> None:
        self._microbatch = microbatch

    def parts(self, module: nn.Module) -> None:
        return None

    def loss(self, module: nn.Module) -> Loss:
        return _Work().forward(module, self._microbatch)


def _contender(
    world: World, widths: Sequence[int], schedule: Name, how: Split, directory: Path
) -> tuple[Callable[[], None], Pipeline]:
    features, labels = _data(widths)
    chunks = zip(features.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
    microbatches = [MicroBatch(k, batch, SAMPLES, k) for k, batch in enumerate(chunks)]
    mesh = ParallelDims(world, {"pp": RANKS})
    layout = PipelineLayout(mesh, schedule, how, MICROBATCHES, _Trial(microbatches[0]))
    module = layout.place(_model(widths), world.device)
    options = StrategyOptions(
        config=ResolvedConfig(strategy="pp", pp_schedule=schedule),
        work_split=(MICROBATCHES,),
        row_length=1,
        static_graph=False,
        directory=directory,
    )
    strategy = Pipeline(module, mesh, options)
    optimizer = torch.optim.SGD(module.parameters(), lr=_LR)

    def step() -> None:
        strategy.begin_step(range(MICROBATCHES))
        strategy.run_microbatches(microbatches, _Work())
        strategy.reduce([0.0])
        optimizer.step()

    return step, strategy


def _by_hand(widths: Sequence[int]) -> Callable[[], None]:
    """The same with torch's own stages and schedule."""
    rank = int(os.environ["RANK"])
    features, labels = _data(widths)
    whole = _model(widths)
    part = whole[: len(whole) // 2] if rank == 0 else whole[len(whole) // 2 :]
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=_LR)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(features)
        else:
            schedule.step(target=labels, losses=[])
        optimizer.step()

    return step


def _peak(strategy: Pipeline, step: Callable[[], None]) -> float:
    """MiB that a step holds at most in addition to the parameters, their gradients and the data, on rank 0."""
    known: list[Any] = [*strategy.module.parameters(), *(p.grad for p in strategy.module.parameters())]
    with MemoryTracker([tensor for tensor in known if tensor is not None and not tensor.is_meta]) as live:
        step()
    assert find_stage_executor(strategy.module).link.world.world_size == RANKS
    return float(round(live.peak / 2**20, 2))


if __name__ == "__main__":
    sys.exit(main())
