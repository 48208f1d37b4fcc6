"""Stages whose layers are split over ranks once more: what a pipeline asks of whoever splits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from paceline.strategies.pipeline.blocks import Block, Blocks, merged


class Splitting(Protocol):
    """Splits the layers of a stage over the ranks that hold this stage of one copy of the model.

    Attributes:
        degree: how many ranks these are.
    """

    @property
    def degree(self) -> int: ...

    def decide(self, module: nn.Module) -> Mapping[str, bool]:
        """How the layers of the whole model are to be split, which :meth:`split` then does.

        Returns:
            The parameters, in the model's order, of layers whose output is split (True) and of those that
            take such an output in (False): between them, ranks hold different features.

        Raises:
            ConfigError: they cannot be shared by so many ranks.
            TaskError: the task's plan is not for its model.
        """

    def split(self, module: nn.Module) -> None:
        """Split the layers that are here: those whose parameters are not on the ``meta`` device."""

    def whole(self, state: Any, *, keep: bool) -> Any:
        """As :meth:`paceline.strategies.placement.Placement.whole`."""


def closed(found: Blocks, splits: Mapping[str, bool]) -> Blocks:
    """The same, with no cut where ranks hold different features: random numbers differ there, too.

    Args:
        found: the model's blocks.
        splits: as :meth:`Splitting.decide` returns it.
    """
    kept: list[Block] = []
    pending: list[Block] = []
    for block in found.blocks:
        pending.append(block)
        marks = [opens for name, opens in splits.items() if name in block.holds]
        is_open = marks[-1] if marks else len(pending) > 1
        if not is_open:
            kept.append(merged(pending))
            pending = []
    if pending:
        kept.append(merged(pending))
    names = {block.name for block in found.blocks}
    return replace(
        found, blocks=tuple(kept), closed=tuple(block.name for block in kept if block.name not in names)
    )
