"""A model of which this rank holds some stages: what its forward is then."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from paceline.errors import TaskError
from paceline.strategies.pipeline.blocks import Block, Blocks
from paceline.strategies.pipeline.link import EVALUATION, Address, Link
from paceline.strategies.pipeline.results import pack, unpack

_AT_ONCE = 12  # values of a result in a message, which can describe so many tensors of any usual rank


@dataclass(frozen=True)
class Stage:
    """A stretch of blocks.

    Attributes:
        number: from 0.
        blocks: in order.
        enters: the names of the values that come from the stage before.
        leaves: of those that go to the next one.
        holds: names of its parameters and buffers.
    """

    number: int
    blocks: tuple[Block, ...]
    enters: tuple[str, ...]
    leaves: tuple[str, ...]
    holds: frozenset[str]


def cut(found: Blocks, sizes: Sequence[int]) -> list[Stage]:
    """Stages of so many blocks each."""
    stages, start = [], 0
    for number, size in enumerate(sizes):
        blocks = found.blocks[start : start + size]
        stages.append(
            Stage(
                number,
                blocks,
                enters=found.crossing(start),
                leaves=found.crossing(start + size),
                holds=frozenset(name for block in blocks for name in block.holds),
            )
        )
        start += size
    return stages


@dataclass
class Turn:
    """One stage's forward of one micro-batch, within the task's loss.

    Attributes:
        stage: which.
        entered: what the stage before gave; none for the first.
        left: what goes to the next stage; none for the last.
        called: whether the loss has called the model.
    """

    stage: Stage
    entered: list[Any]
    left: list[Any] = field(default_factory=list)
    called: bool = False


class StageDone(BaseException):
    """Leaves the task's loss after a stage's forward: the rest of it is the last stage's rank's.

    Not an ``Exception``, which the task may catch.
    """


class StagedForward:
    """Takes the place of a model's forward.

    In a :attr:`turn` it computes one stage; otherwise, in an evaluation, all ranks of the copy call it
    together, and each gets the result.

    Torch's random numbers go on from stage to stage as they do in one process: the state of the generators
    travels along wherever a stage has drawn.

    Attributes:
        stages: of the whole model.
        turn: set while the task's loss is called for one stage.

    Args:
        found: the model's blocks.
        stages: of them.
        link: to the other ranks; rank r of R holds the stages r, r + R, ...
    """

    def __init__(self, found: Blocks, stages: Sequence[Stage], link: Link) -> None:
        self._found = found
        self.stages = stages
        self.link = link
        self.turn: Turn | None = None

    @property
    def own(self) -> list[Stage]:
        """The stages of this rank."""
        return [stage for stage in self.stages if self.rank_of(stage.number) == self.link.world.rank]

    def rank_of(self, stage: int) -> int:
        """Who holds a stage, by its rank in the copy of the model."""
        return stage % self.link.world.world_size

    def is_last(self, stage: Stage) -> bool:
        """Whether the loss follows."""
        return stage.number == len(self.stages) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.turn
        if turn is None:
            return self._all_stages(args, kwargs)
        if turn.called:
            raise TaskError(
                "the loss calls the model twice, and a pipeline runs it once for a micro-batch. Call it once "
                "with both batches in one, or use --strategy ddp."
            )
        turn.called = True
        result, turn.left = self._run(turn.stage, turn.entered, args, kwargs)
        if not self.is_last(turn.stage):
            raise StageDone
        return result

    def _run(self, stage: Stage, entered: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result, of the last stage, and what goes to the next one, of the others."""
        values = self._found.bind(*args, **kwargs)
        state: Any = None
        if stage.enters:
            *received, state = entered
            values.update(zip(stage.enters, received, strict=True))
            _set_random(state, self.link.world.device)
        if self.is_last(stage):
            for block in stage.blocks:
                block.run(values)
            return self._found.result(values), []
        before = _random(self.link.world.device)
        for block in stage.blocks:
            block.run(values)
        now = _random(self.link.world.device)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        return None, [*(values[name] for name in stage.leaves), now if drawn else state]

    def _all_stages(self, args: Any, kwargs: Any) -> Any:
        """The whole model's result, without gradients, on every rank."""
        rank, ranks = self.link.world.rank, self.link.world.world_size
        last = len(self.stages) - 1
        with torch.no_grad():
            for stage in self.own:
                entered = []
                if stage.number:
                    address = Address(stage.number, EVALUATION)
                    entered = self.link.receive(self.rank_of(stage.number - 1), address)
                result, left = self._run(stage, entered, args, kwargs)
                if stage.number < last:
                    self.link.send(
                        left, self.rank_of(stage.number + 1), Address(stage.number + 1, EVALUATION)
                    )
            address = Address(last + 1, EVALUATION)
            if rank == self.rank_of(last):
                values = pack(result)
                for other in range(ranks):
                    if other != rank:
                        for first in range(0, len(values), _AT_ONCE):
                            self.link.send(values[first : first + _AT_ONCE], other, address)
            else:
                messages = (self.link.receive(self.rank_of(last), address) for _ in itertools.count())
                result = unpack(itertools.chain.from_iterable(messages))
        self.link.finish()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def staged(module: nn.Module) -> StagedForward:
    """The forward of a model that was laid out in stages."""
    forward = module.forward
    assert isinstance(forward, StagedForward)
    return forward


def _random(device: torch.device) -> tuple[torch.Tensor, ...]:
    host = torch.default_generator.get_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


def _set_random(state: tuple[torch.Tensor, ...] | None, device: torch.device) -> None:
    if state is None:
        return
    # A copy: torch takes a state from where its memory begins, and this one is a part of a message.
    torch.default_generator.set_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone(), device)
