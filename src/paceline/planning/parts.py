"""What a part of a model takes: the pieces that its forward runs one after the other, and stages of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.planning.live_bytes import LiveBytes

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What one micro-batch takes beside parameters, gradients and the optimizer's state, in bytes.

    Attributes:
        saved: kept for backward when forward is done; weights that autocast has converted are among it.
        peak: the most at any time of forward and backward, new gradients included.
        kept: what is saved where the inside of each piece is computed again in backward.
        again_peak: the peak then.
    """

    saved: int
    peak: int
    kept: int
    again_peak: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds and computes of a micro-batch: the whole model, a stage, a split of either.

    Sizes in bytes.

    Attributes:
        parameter_bytes: of its parameters, each once.
        gradient_bytes: of those that are trained.
        largest_gradient: of one parameter.
        buffer_bytes: of its buffers.
        optimizer_bytes: the optimizers' state after a step.
        optimizer_temporary: what they need more, while they step.
        flops: of forward and backward.
        received_bytes: of a micro-batch, from the stage before; as much goes back.
        sent_bytes: to the stage after; as much comes back.
        reduced_bytes: of tensors that all ranks of a tensor-parallel group add up.
        root_bytes: what fsdp gathers with the whole model.
        block_bytes: the other modules that it gathers, in the model's order.
        activations: by precision.
    """

    parameter_bytes: int
    gradient_bytes: int
    largest_gradient: int
    buffer_bytes: int
    optimizer_bytes: int
    optimizer_temporary: int
    flops: int
    received_bytes: int = 0
    sent_bytes: int = 0
    reduced_bytes: int = 0
    root_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    activations: Mapping[Precision, Activations]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A module that forward calls between two others.

    Attributes:
        name: in the model.
        parameter_bytes, gradient_bytes, largest_gradient, buffer_bytes: as of a :class:`Part`; a shared
            parameter is the first piece's.
        shares: an earlier piece with the same parameter; None where there is none.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    largest_gradient: int
    buffer_bytes: int
    shares: int | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward and backward.

    Attributes:
        events: (piece, bytes more or less), in order; the loss is the last piece's.
        forward_events: how many of them are forward's.
        flops: by piece.
        output_bytes: by piece.
    """

    events: tuple[tuple[int, int], ...]
    forward_events: int
    flops: tuple[int, ...]
    output_bytes: tuple[int, ...]


def find_pieces(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that are no mere containers, and are in none that is not: candidates for pieces."""
    found: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            # A container's children are called one by one; other modules know what they do with theirs.
            if isinstance(child, nn.ModuleList | nn.Sequential):
                visit(f"{prefix}{name}.", child)
            else:
                found.append((prefix + name, child))

    visit("", module)
    return found or [("", module)]


class Watched:
    """Watches which piece computes, in forward and in backward.

    Attributes:
        order: indices of the pieces, as forward called them first.
    """

    def __init__(self, pieces: Sequence[nn.Module], live: LiveBytes) -> None:
        self.order: list[int] = []
        self.output_bytes: dict[int, int] = {}
        self._pieces = pieces
        self._live = live

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While it is entered, ``live.owner`` is the piece that computes."""
        handles: list[Any] = []
        for index, piece in enumerate(self._pieces):
            handles.append(piece.register_forward_pre_hook(partial(self._begins, index)))
            handles.append(piece.register_forward_hook(partial(self._ends, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, index: int, *_: Any) -> None:
        if index not in self.output_bytes:
            self.order.append(index)
        self._live.owner = index

    def _ends(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.output_bytes[index] = nbytes(tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._goes_back, index))  # type: ignore[no-untyped-call]

    def _goes_back(self, index: int, _gradient: torch.Tensor) -> None:
        self._live.owner = index


def activations(trace: Trace, first: int, last: int) -> Activations:
    """Of the pieces from ``first`` up to ``last``, which is not among them."""
    now = saved = peak = again = 0
    within = [0] * (last - first)
    at_end = [0] * (last - first)
    highest = [0] * (last - first)
    for number, (piece, delta) in enumerate(trace.events):
        if number == trace.forward_events:
            saved, at_end = now, list(within)
        if not first <= piece < last:
            continue
        now += delta
        peak = max(peak, now)
        within[piece - first] += delta
        highest[piece - first] = max(highest[piece - first], within[piece - first])
    kept = [min(held, trace.output_bytes[first + k]) for k, held in enumerate(at_end)]
    again = sum(kept) + max((high - held for high, held in zip(highest, kept, strict=True)), default=0)
    return Activations(saved=saved, peak=peak, kept=sum(kept), again_peak=min(peak, again))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
