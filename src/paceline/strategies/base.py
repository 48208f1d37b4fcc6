"""What a strategy answers: which shards are mine, and how a step's contributions become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.distributed.reducer import GradientReducer, StepSums
from paceline.distributed.tree import Kind, ReductionPlan
from paceline.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What every strategy is built with.

    Attributes:
        shares: the number of shards of each rank; together S.
        kind: the order in which gradients are summed.
        row_length: numbers that a rank adds to a step's sums.
        timeout_s: how long a rank may keep the others waiting.
        compile: compile the model with ``torch.compile``.
        static_graph: the task uses the same parameters in every step.
    """

    shares: tuple[int, ...]
    kind: Kind
    row_length: int
    timeout_s: float
    compile: bool
    static_graph: bool


class Strategy(Protocol):
    """Places a model's work on the ranks and sums a step over them.

    A step is :meth:`begin_step`; for each of this rank's present shards :meth:`begin_shard`,
    forward, :meth:`backward` and :meth:`end_shard`; then :meth:`finish_step`.

    Attributes:
        module: the model itself, whose state is saved.
        model: what the task's ``loss`` is called with (it may be wrapped or compiled).
        shards: the shards that this rank computes.
        needs_backward: whether a rank without a present shard must still run one (weighing nothing).
    """

    module: nn.Module
    model: nn.Module
    shards: range
    needs_backward: bool

    def begin_step(self, present: Sequence[int]) -> None:
        """Start a step in which this rank computes the shards ``present``."""

    def begin_shard(self) -> None:
        """Get ready for the next shard's forward."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the shard's gradient of ``loss``, a sum over its samples."""

    def end_shard(
        self, samples: int, weight: torch.Tensor | float, loss_sum: torch.Tensor, checksum: int
    ) -> None:
        """Take in the shard's sums."""

    def finish_step(self, row: Sequence[float]) -> StepSums:
        """Sum over all shards; gradients and buffers then hold the step's means on every rank.

        Raises:
            PeerLostError: a rank went away.
        """

    def abandon(self) -> None:
        """Undo what a step that cannot be finished has changed in the module."""

    def close(self) -> None:
        """Free what the strategy holds."""


class ReducerStrategy:
    """Every rank holds the whole model, and the :class:`GradientReducer` sums the gradients.

    Attributes:
        plan: who computes which shard.
        reducer: what sums.
    """

    needs_backward = False

    def __init__(self, module: nn.Module, world: World, options: StrategyOptions) -> None:
        plan = self.plan = ReductionPlan(sum(options.shares), world.world_size, options.kind, options.shares)
        self.module = module
        self.model: nn.Module = compiled(module) if options.compile else module
        self.shards = plan.shards_of(world.rank)
        self.reducer = GradientReducer(
            module, plan, world, row_length=options.row_length, timeout_s=options.timeout_s
        )

    def begin_step(self, present: Sequence[int]) -> None:
        self.reducer.begin(present)

    def begin_shard(self) -> None:
        self.reducer.begin_shard()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def end_shard(
        self, samples: int, weight: torch.Tensor | float, loss_sum: torch.Tensor, checksum: int
    ) -> None:
        self.reducer.end_shard(samples, weight, loss_sum, checksum)

    def finish_step(self, row: Sequence[float]) -> StepSums:
        return self.reducer.finish(row)

    def abandon(self) -> None:
        self.reducer.abandon()

    def close(self) -> None:
        self.reducer.close()


def compiled(module: nn.Module) -> nn.Module:
    """The module, compiled on its first call."""
    wrapped = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped
