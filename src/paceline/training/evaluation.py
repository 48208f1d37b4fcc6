"""Exact evaluation: the same numbers for any number of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from paceline.callback import BatchPlace
from paceline.data.evaluation import EvalBatches
from paceline.data.microbatch import MicroBatch
from paceline.distributed.mesh import Mesh
from paceline.distributed.world import World, lost_peers_reported
from paceline.errors import TaskError
from paceline.task import Loss, Task
from paceline.training.randomness import seed_evaluation
from paceline.training.whole_metrics import WholeMetrics

_GLANCE_S = 0.5


class Autocast(Protocol):
    """Makes a fresh mixed-precision context."""

    def __call__(self) -> AbstractContextManager[Any]: ...


Observe = Callable[[MicroBatch, Mapping[str, Any]], None]
"""Is told of a block, after it is evaluated, and what the task's ``metrics`` said of it."""


class EvaluationStopped(Exception):
    """The ranks left an evaluation together, before its end, because they were asked to stop.

    Attributes:
        stop: what asked, as in the control word.
    """

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


class Evaluator:
    """Evaluates a split in fixed blocks, which the ranks share.

    Each block's sums are kept apart and added exactly (``math.fsum``), so neither the number of
    ranks nor the order of the blocks matters. Rank r of W takes the blocks r, r + W, r + 2 W, ...;
    spares take none.

    Args:
        task: whose ``metrics`` and ``loss`` are evaluated.
        device: the model's.
        batches: the split.
        seed: the run's.
        autocast: the precision to evaluate in.
        split: its name.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        batches: EvalBatches,
        *,
        seed: int,
        autocast: Autocast,
        split: str = "val",
    ) -> None:
        self._task = task
        self._batches = batches
        self._seed = seed
        self._autocast = autocast
        self._split = split
        self._whole = WholeMetrics(task, device)

    @property
    def num_samples(self) -> int:
        """How many samples the split has."""
        return self._batches.num_samples

    @torch.no_grad()
    def run(
        self,
        mesh: Mesh,
        module: nn.Module,
        stop: Callable[[], int],
        *,
        in_step: bool = False,
        observe: Observe | None = None,
    ) -> dict[str, float]:
        """Metrics by name, among them ``loss``. All ranks evaluate together.

        Args:
            mesh: the ranks.
            module: what is evaluated.
            stop: asked now and then; if it answers anything but 0 on any rank, all of them stop.
            in_step: whoever calls the model needs the other ranks to call theirs: one that has no block in a
                round evaluates the last one again, for nothing.
            observe: told of each of this rank's blocks, in the run's precision.

        Raises:
            EvaluationStopped: they stopped; the module is as it was.
            TaskError: the task's metrics are not what they should be.
            PeerLostError: a rank is gone.
        """
        world, data = mesh.world, mesh.data
        was_training = module.training
        module.eval()
        self._whole.reset()
        num_blocks = self._batches.num_blocks
        computing = data.num_computing
        mine = range(data.rank, num_blocks, computing) if data.rank < computing else range(0)
        rounds = -(-num_blocks // computing)
        own = len(mine)
        blocks = self._batches.read([*mine, *[num_blocks - 1] * (rounds - own if in_step else 0)])
        sums: dict[str, list[tuple[float, float]]] = {}
        began, glance_at = time.perf_counter(), 1
        for number in range(rounds):
            if number == glance_at:
                # Rank 0 says when to look again, so that all do so after the same block.
                round_s = (time.perf_counter() - began) / number
                seen = world.all_gather_json([stop(), max(1, int(_GLANCE_S / round_s))])
                glance_at += seen[0][1]
                asked = max(of_rank[0] for of_rank in seen)
                if asked:
                    module.train(was_training)
                    raise EvaluationStopped(asked)
            arguments = None
            world.activity.move("evaluation")
            batch = next(blocks, None)
            if batch is not None:
                seed_evaluation(self._seed, batch.shard)
                self._task.begin_batch(
                    BatchPlace(split=self._split, step=0, number=batch.shard, samples=batch.num_samples)
                )
                with self._autocast(), lost_peers_reported():
                    pairs, arguments = self._block(module, batch, observe)
                if number >= own or not mesh.leads:
                    pairs, arguments = {}, None
                for name, pair in pairs.items():
                    sums.setdefault(name, []).append(pair)
            self._whole.update(world, arguments)
        module.train(was_training)
        return _totals(world, sums) | self._whole.compute()

    def close(self) -> None:
        """End the split's data workers."""
        self._batches.close()

    def _block(
        self, module: nn.Module, microbatch: MicroBatch, observe: Observe | None
    ) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
        """One block's (sum, weight) by name, and what torchmetrics objects take in, by name."""
        batch, samples = microbatch.batch, microbatch.num_samples
        values = self._task.metrics(module, batch)
        pairs = {n: self._pair(n, v, samples) for n, v in values.items() if n not in self._whole.names}
        arguments = {name: value for name, value in values.items() if name in self._whole.names}
        if "loss" not in values:
            loss = as_loss(self._task, self._task.loss(module, batch), samples)
            pairs["loss"] = (float(loss.sum), float(loss.weight))
        if observe is not None:
            observe(microbatch, values)
        return pairs, arguments

    def _pair(self, name: str, value: Any, samples: int) -> tuple[float, float]:
        if isinstance(value, torch.Tensor) and value.shape == (samples,):
            return value.double().sum().item(), float(samples)
        if isinstance(value, tuple) and len(value) == 2:
            return float(value[0]), float(value[1])
        what = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise TaskError(
            f"{type(self._task).__name__}.metrics gave {what} for {name!r} in a batch of {samples} samples; "
            "it must be a 1-d tensor with one value a sample, or a pair (sum, weight)."
        )


def _totals(world: World, sums: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    gathered = world.all_gather_json(sums)
    metrics = {}
    for name in dict.fromkeys(name for of_rank in gathered for name in of_rank):
        pairs = [pair for of_rank in gathered for pair in of_rank.get(name, ())]
        weight = math.fsum(pair[1] for pair in pairs)
        metrics[name] = math.fsum(pair[0] for pair in pairs) / weight if weight else math.nan
    return metrics


def as_loss(task: Task, value: Any, samples: int) -> Loss:
    """A loss as sum and weight; a mean over ``samples`` samples is multiplied out.

    Raises:
        TaskError: it is neither a scalar tensor nor a :class:`Loss`.
    """
    loss = value if isinstance(value, Loss) else None
    total = value if loss is None else loss.sum
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise TaskError(
            f"{type(task).__name__}.loss returned {'' if loss is None else 'a Loss whose sum is '}{what}; "
            "it must return the mean loss of the batch as a scalar tensor, or paceline.Loss(sum, weight)."
        )
    if loss is not None:
        return loss
    # Multiplied in float32: bfloat16 has only 8 bits for the product.
    return Loss((total.float() if total.dtype.itemsize < 4 else total) * samples, float(samples))
