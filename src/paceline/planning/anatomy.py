"""A model as pieces: the stages that it can be cut into, and what a rank holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

from paceline.planning.parts import Activations, Part, Piece, Precision, Trace, activations


@dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """What the model is made of.

    Attributes:
        whole: all of it.
        pieces: in the order of forward.
        traces: of a micro-batch, by precision.
        cut_by: what stages are to have equal parts of, by piece; empty for the operations.
        steps_at_once: the optimizer steps all parameters at once, and needs more the more there are.
    """

    whole: Part
    pieces: tuple[Piece, ...]
    traces: Mapping[Precision, Trace]
    cut_by: tuple[float, ...] = ()
    steps_at_once: bool = True

    @property
    def costs(self) -> tuple[float, ...]:
        """The pieces' parts of the time."""
        return self.cut_by or tuple(map(float, self.traces["fp32"].flops))

    @property
    def most_stages(self) -> int:
        """The most stages that each have something to compute; 1 where pieces share parameters."""
        if any(piece.shares is not None for piece in self.pieces):
            return 1  # the parameter's gradient would have to be summed over two stages
        return max(1, sum(cost > 0 for cost in self.costs))

    def stages(self, number: int) -> tuple[Part, ...]:
        """The model cut into so many, balanced by operations."""
        return _stages(self, number)


@cache
def _stages(anatomy: Anatomy, number: int) -> tuple[Part, ...]:
    if number == 1:
        return (anatomy.whole,)
    cuts = balanced_cuts(anatomy.costs, number)
    return tuple(_stage(anatomy, first, last) for first, last in pairwise(cuts))


def _stage(anatomy: Anatomy, first: int, last: int) -> Part:
    whole, trace = anatomy.whole, anatomy.traces["fp32"]
    pieces = anatomy.pieces[first:last]
    trained = sum(piece.gradient_bytes for piece in pieces)
    share = trained / whole.gradient_bytes
    parameters = sum(piece.parameter_bytes for piece in pieces)
    return Part(
        parameter_bytes=parameters,
        gradient_bytes=trained,
        largest_gradient=max(piece.largest_gradient for piece in pieces),
        buffer_bytes=sum(piece.buffer_bytes for piece in pieces),
        optimizer_bytes=round(whole.optimizer_bytes * share),
        optimizer_temporary=round(whole.optimizer_temporary * (share if anatomy.steps_at_once else 1.0)),
        flops=sum(trace.flops[first:last]),
        received_bytes=_handed_on(trace, first),
        sent_bytes=_handed_on(trace, last),
        reduced_bytes=round(whole.reduced_bytes * sum(trace.flops[first:last]) / max(1, whole.flops)),
        root_bytes=parameters,
        activations={name: activations(of, first, last) for name, of in anatomy.traces.items()},
    )


def _handed_on(trace: Trace, border: int) -> int:
    """Bytes of activations that go over the border before a piece."""
    return trace.output_bytes[border - 1] if 0 < border < len(trace.output_bytes) else 0


def balanced_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where to cut the pieces so that the slowest stage is as fast as can be: by dynamic programming.

    Args:
        costs: of each piece; at least as many as stages.
        stages: how many.

    Returns:
        The stages' first pieces, and the number of pieces.
    """
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)
    n = len(costs)
    best = [until[i] for i in range(n + 1)]
    cut = [[0] * (n + 1)]
    for stage in range(2, stages + 1):
        now, where = [0.0] * (n + 1), [0] * (n + 1)
        for end in range(stage, n + 1):
            now[end], where[end] = min(
                (max(best[k], until[end] - until[k]), k) for k in range(stage - 1, end)
            )
        best = now
        cut.append(where)
    cuts = [n]
    for where in reversed(cut[1:]):
        cuts.append(where[cuts[-1]])
    return (0, *reversed(cuts))


def split_further(one: Part, half: Part, degree: int) -> Part:
    """What a rank of ``degree`` holds, from one rank's and from one of two: what is not split stays."""

    def of(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping):
            return {key: of(a[key], b[key]) for key in a}
        if isinstance(a, tuple):
            return tuple(of(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, Activations):
            return Activations(**{f.name: of(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})
        return max(0, round(2 * b - a + 2 * (a - b) / degree))

    activations_of_half = {
        precision: half.activations.get(precision) or _estimated(one, half, precision)
        for precision in one.activations
    }
    half = replace(half, activations=activations_of_half)
    values = {f.name: of(getattr(one, f.name), getattr(half, f.name)) for f in fields(one)}
    return Part(**{**values, "reduced_bytes": half.reduced_bytes})


def _estimated(one: Part, half: Part, precision: Precision) -> Activations:
    """Half of a part's activations in half precision: weights' copies as the weights, all else as in fp32."""
    was, now, own = one.activations["fp32"], half.activations["fp32"], one.activations[precision]
    weights = half.parameter_bytes / max(1, one.parameter_bytes)

    def of(before: int, after: int, value: int, copies: int) -> int:
        held = min(value, copies)
        return round(held * weights + (value - held) * after / max(1, before))

    copies = one.parameter_bytes // 2
    return Activations(
        saved=of(was.saved, now.saved, own.saved, copies),
        peak=of(was.peak, now.peak, own.peak, copies),
        kept=of(was.kept, now.kept, own.kept, 0),
        again_peak=of(was.again_peak, now.again_peak, own.again_peak, 0),
    )
