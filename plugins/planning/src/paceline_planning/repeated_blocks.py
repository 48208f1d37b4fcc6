"""Equal blocks in a row: a few of them run, and the others count as one of these.

A step on fake tensors takes as long as its operators are many, and a large model has the same ones in each block. Of a
row of equal blocks the first three and the last run. If the second and the third do the same, in forward and in
backward, those that did not run do it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

_FEWEST = 6
"""Blocks in a row from which on it is worth it."""

_KEPT = 4

Event = tuple[int, int, bool, bool]
"""(piece, bytes more or less, is of a weight's new gradient, is of a cast weight)"""


@dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedBlocks:
    """Equal blocks in a row.

    Attributes:
        parent: the list that has them.
        blocks: in its order.
    """

    parent: nn.Module
    blocks: Sequence[nn.Module]

    @property
    def skipped(self) -> Sequence[nn.Module]:
        """Those that do not run."""
        return self.blocks[_KEPT - 1 : -1]

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """While it is entered, the list lacks those that do not run."""
        everything = self.parent._modules
        left_out = {id(block) for block in self.skipped}
        kept = [child for child in everything.values() if id(child) not in left_out]
        self.parent._modules = {str(place): child for place, child in enumerate(kept)}
        try:
            yield
        finally:
            self.parent._modules = everything

    def expand(
        self,
        events: Sequence[Event],
        forward_events: int,
        first: int,
        begins: Mapping[int, int],
        goes_back: Mapping[int, int],
    ) -> tuple[list[Event], int] | None:
        """Return the events of the whole model, and how many are forward's; None if the blocks do not do the same.

        Args:
            events: of the shortened model.
            forward_events: how many of them are forward's.
            first: the number of the first block as a piece.
            begins, goes_back: piece's number -> the place in ``events`` at which its forward, its backward begins.
        """
        more, own, second = len(self.skipped), range(first, first + _KEPT), first + 1
        try:
            starts = [begins[piece] for piece in own]
            ends = [goes_back[piece] for piece in reversed(own)]
        except KeyError:
            return None
        if [*starts, *ends] != sorted([*starts, *ends]):
            return None  # not one after the other

        def moved(part: Iterable[Event], by: int | None = None) -> list[Event]:
            """The part with the numbers of the whole model; with ``by``, as the block so many further does it."""
            found = []
            for piece, *rest in part:
                further = by if by is not None and piece in own else more if piece > second else 0
                found.append((piece + further, *rest))
            return found  # type: ignore[return-value]

        def shared(part: Iterable[Event]) -> list[Event]:
            """A part outside of the blocks, which frees tensors of all of them alike."""
            return [
                (event[0] + by, *event[1:]) if event[0] == second else moved([event])[0]
                for event in part
                for by in range(more + 1 if event[0] == second else 1)
            ]

        forward, next_forward = events[starts[1] : starts[2]], events[starts[2] : starts[3]]
        next_backward, backward = events[ends[1] : ends[2]], events[ends[2] : ends[3]]
        if moved(forward, 1) != moved(next_forward, 0) or moved(backward, 1) != moved(next_backward, 0):
            return None
        found = moved(events[: starts[2]])
        for by in range(1, more + 1):
            found += moved(forward, by)
        found += moved(next_forward, more)
        in_forward = len(found) + len(shared(events[starts[3] : forward_events]))
        found += shared(events[starts[3] : ends[1]])
        found += moved(next_backward, more)
        for by in range(more, -1, -1):
            found += moved(backward, by)
        found += moved(events[ends[3] :])
        left = [0] * (more + 1)
        for piece, delta, *_ in found:
            if second <= piece <= second + more:
                left[piece - second] += delta
        return None if len(set(left)) > 1 else (found, in_forward)


def find_repeated_blocks(module: nn.Module, pieces: Iterable[nn.Module]) -> RepeatedBlocks | None:
    """Return the longest row of equal blocks among the pieces of a model; None if all are short."""
    wanted = {id(piece) for piece in pieces}
    longest: RepeatedBlocks | None = None
    for parent in module.modules():
        children = list(parent.children()) if isinstance(parent, nn.ModuleList | nn.Sequential) else []
        row: list[nn.Module] = []
        for place, child in enumerate(children):
            follows = bool(row) and _are_equal(row[-1], child, place - 1)
            row = [*row, child] if follows else [child] if id(child) in wanted else []
            if len(row) >= max(_FEWEST, len(longest.blocks) + 1 if longest else 0):
                longest = RepeatedBlocks(parent=parent, blocks=tuple(row))
    return longest


def _are_equal(one: nn.Module, other: nn.Module, place: int) -> bool:
    """Return whether two neighbours have the same modules, tensors and settings, except for a number of theirs.

    Args:
        place: the number of the first of them.
    """
    pairs = list(zip(one.modules(), other.modules(), strict=False))
    if one is other or len(pairs) != sum(1 for _ in one.modules()) or len(pairs) != sum(1 for _ in other.modules()):
        return False
    tensors = [
        [
            (name, tensor.shape, tensor.dtype, tensor.requires_grad)
            for name, tensor in (*block.named_parameters(), *block.named_buffers())
        ]
        for block in (one, other)
    ]
    if tensors[0] != tensors[1] or {*map(id, one.parameters())} & {*map(id, other.parameters())}:
        return False
    plain = (bool, int, float, str)
    for a, b in pairs:
        settings = [{k: v for k, v in vars(part).items() if isinstance(v, plain)} for part in (a, b)]
        if type(a) is not type(b) or settings[0].keys() != settings[1].keys():
            return False
        if any(v != settings[1][k] and (v, settings[1][k]) != (place, place + 1) for k, v in settings[0].items()):
            return False
    return True
