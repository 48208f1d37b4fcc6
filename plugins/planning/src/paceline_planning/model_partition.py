"""The parts of a model, and the memory of its tensors over time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from paceline.parallel.pipeline.stage_split import BlockCost, balanced_split
from paceline.parallel.wrap_units import repeated_units
from paceline.torch_internals import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, TorchDispatchMode, tree_leaves

# --- The bytes of live tensors, of fake tensors as of real ones, by owner ---


class MemoryTracker(TorchDispatchMode):
    """While it is entered, counts the storages that operators make, until they are freed.

    A storage counts once, however many views it has.

    Attributes:
        now: bytes of the storages that live.
        peak: the most that ``now`` has been.
        owner: the current part of the model, to which new storages and operations are attributed.
        events: (owner, bytes more or less), in order.
        copies: the places in ``events`` at which weights were cast.
        gradients: those at which weights' new gradients were made; :meth:`mark_gradient` adds to them.
        flops: by owner: of matrix products, convolutions and attention.

    Args:
        known: tensors that were there before, and do not count.
        weights: those of them whose casts are copies.
    """

    def __init__(self, known: Iterable[torch.Tensor], weights: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.owner = 0
        self.events: list[tuple[int, int]] = []
        self.copies: set[int] = set()
        self.gradients: set[int] = set()
        self.flops: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sums: dict[int, list[int]] = {}
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._living: set[weakref.ref[Any]] = set()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = _BEFORE
        self._weights = weakref.WeakSet(tensor.untyped_storage() for tensor in weights)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = _FLOPS.get(func.overloadpacket)
        if counted is not None:
            flops = int(counted(*args, **kwargs, out_val=result))
            self.flops[self.owner] = self.flops.get(self.owner, 0) + flops
        if isinstance(result, torch.Tensor):  # nearly always: and models have many operators
            is_copy = func is _CAST and args[0].untyped_storage() in self._weights
            self._count(result.untyped_storage(), is_copy)
            if func is _ADD:
                tensors = [value for value in args if isinstance(value, torch.Tensor)]
                self._sums[self._place(result)] = [self._place(tensor) for tensor in tensors]
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Take a tensor for the new gradient of a weight: if several layers share the weight, for a sum of theirs."""
        pending = [self._place(gradient)]
        while pending:
            place = pending.pop()
            if place != _BEFORE and place not in self.gradients:
                self.gradients.add(place)
                pending += self._sums.get(place, ())

    def with_ends(self, places: set[int]) -> set[int]:
        """Return the places, and those at which what was made there was freed."""
        return places | {self._ends[place] for place in places if place in self._ends}

    def _place(self, tensor: torch.Tensor) -> int:
        return self._seen.get(tensor.untyped_storage(), _BEFORE)

    def _count(self, storage: Any, is_copy: bool = False) -> None:
        if storage in self._seen:
            return
        place = self._seen[storage] = len(self.events)
        if is_copy:
            self.copies.add(place)
        self._change(self.owner, storage.nbytes())
        self.peak = max(self.peak, self.now)
        gone = partial(self._gone, self.owner, storage.nbytes(), place)
        self._living.add(weakref.ref(storage, gone))

    def _gone(self, owner: int, nbytes: int, place: int, reference: weakref.ref[Any]) -> None:
        self._living.discard(reference)
        self._ends[place] = len(self.events)
        self._change(owner, -nbytes)

    def _change(self, owner: int, nbytes: int) -> None:
        self.now += nbytes
        self.events.append((owner, nbytes))


_CAST = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor
_BEFORE = -1  # the place of what was there before


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return int(flops)


# The attention operators of the CPU; torch counts only those of a GPU.
_FLOPS: dict[Any, Any] = {**flop_registry, CPU_ATTENTION: _attention, CPU_ATTENTION_BACKWARD: _attention_backward}


# --- Measures of a part of a model: the pieces that its forward runs one after the other, and stages of them


Precision = Literal["fp32", "bf16", "bf16 gathers"]
"""With "bf16 gathers", fsdp gathers weights that autocast would cast in half precision, and there are no copies."""

Recompute = Literal["none", "selective", "block"]
"""What backward recomputes, as in ``--checkpoint-activations``."""

Variant = tuple[Precision, Recompute]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The memory of one micro-batch in addition to parameters, gradients and the optimizer's state, in bytes.

    Attributes:
        saved: kept for backward when forward is done; weights that autocast has converted are among it.
        peak: the most at any time of forward and backward, new gradients included.
        forward_peak: the most in forward, without weights' new gradients.
        backward_peaks: the most in the backward of each piece, without weights' new gradients.
    """

    saved: int
    peak: int
    forward_peak: int
    backward_peaks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The state and computation of one rank for a micro-batch: the whole model, a stage, a split of either.

    Sizes in bytes.

    Attributes:
        gradient_bytes: of the parameters that are trained.
        optimizer_bytes: the optimizers' state after a step.
        optimizer_temporary: their additional memory during a step.
        flops: of forward and backward.
        received_bytes: of a micro-batch, from the stage before; as much goes back.
        sent_bytes: to the stage after; as much comes back.
        reduced_bytes: of tensors that all ranks of a tensor-parallel group add up.
        root_bytes: the parameters that fsdp gathers with the whole model.
        block_bytes: the other modules that it gathers, in the model's order.
        block_pieces: the piece that each of them is, or is in.
        lowered_root_bytes, lowered_block_bytes: the same where it gathers layers that autocast casts in half precision.
        activations: by precision, and by what backward recomputes.
    """

    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    optimizer_temporary: int
    flops: int
    received_bytes: int = 0
    sent_bytes: int = 0
    reduced_bytes: int = 0
    root_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    block_pieces: tuple[int, ...] = ()
    lowered_root_bytes: int = 0
    lowered_block_bytes: tuple[int, ...] = ()
    activations: Mapping[Variant, Activations]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A module that forward calls between two others.

    A shared parameter is the first piece's; ``shares`` is an earlier piece with the same parameter.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    shares: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """One forward and backward.

    Attributes:
        events: (piece, bytes more or less), in order; the loss is the last piece's.
        forward_events: how many of them are forward's.
        flops, output_bytes: by piece.
        gradient_events: the places of the weights' new gradients, and of their end.
    """

    events: tuple[tuple[int, int], ...]
    forward_events: int
    flops: tuple[int, ...]
    output_bytes: tuple[int, ...]
    gradient_events: frozenset[int] = frozenset()


def find_segments(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return candidates for pieces: the model's blocks, and the outermost modules next to them."""
    blocks = {id(unit) for unit in repeated_units(module)}
    found: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            holds_blocks = any(id(part) in blocks for part in child.modules())
            # A container's children are called one by one; other modules know what they do with theirs.
            if id(child) not in blocks and (holds_blocks or isinstance(child, nn.ModuleList | nn.Sequential)):
                visit(f"{prefix}{name}.", child)
            else:
                found.append((prefix + name, child))

    visit("", module)
    return found or [("", module)]


@contextmanager
def watch_segments(segments: Sequence[nn.Module], live: MemoryTracker) -> Iterator[dict[int, int]]:
    """While it is entered, ``live.owner`` is the segment that computes, in forward and in backward.

    Gives the bytes of each one's output by its index, in the order in which forward called them first.
    """
    output_bytes: dict[int, int] = {}

    def begin(index: int, *_: Any) -> None:
        output_bytes.setdefault(index, 0)
        live.owner = index

    def end(index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        output_bytes[index] = nbytes(tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(begin, index))  # type: ignore[no-untyped-call]

    with ExitStack() as hooks:
        for index, segment in enumerate(segments):
            hooks.callback(segment.register_forward_pre_hook(partial(begin, index)).remove)
            hooks.callback(segment.register_forward_hook(partial(end, index)).remove)
        yield output_bytes


def activations(trace: MemoryTrace, first: int, last: int) -> Activations:
    """Return the part of the pieces from ``first`` up to, without, ``last``."""
    now = saved = peak = gradients = forward_peak = 0
    backward_peaks = [0] * (last - first)
    for number, (piece, delta) in enumerate(trace.events):
        if number == trace.forward_events:
            saved = now
        if first <= piece < last:
            now += delta
            gradients += delta if number in trace.gradient_events else 0
            peak = max(peak, now)
            if number < trace.forward_events:
                forward_peak = max(forward_peak, now - gradients)
            elif delta > 0:  # what is freed belongs to the piece that made it
                backward_peaks[piece - first] = max(backward_peaks[piece - first], now - gradients)
    return Activations(saved=saved, peak=peak, forward_peak=forward_peak, backward_peaks=tuple(backward_peaks))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- A model as pieces: the stages that it can be cut into, and what a rank holds of it ---


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelPartition:
    """What the model is made of.

    Attributes:
        pieces: in the order of forward.
        traces: of a micro-batch, by precision, and by what backward recomputes.
        cut_by: the quantity to divide equally over stages, by piece; empty for the operations.
        steps_at_once: the optimizer steps all parameters at once, and needs more the more there are.
    """

    whole: ModelPart
    pieces: tuple[Segment, ...]
    traces: Mapping[Variant, MemoryTrace]
    cut_by: tuple[float, ...] = ()
    steps_at_once: bool = True

    @property
    def costs(self) -> tuple[float, ...]:
        """The pieces' parts of the time."""
        return self.cut_by or tuple(map(float, self.traces["fp32", "none"].flops))

    def repetition(self, recompute: Recompute) -> float:
        """Return how many times the operations of a step without recomputation are made."""
        again, once = (sum(self.traces["fp32", what].flops) for what in (recompute, "none"))
        return again / max(1, once)

    @property
    def most_stages(self) -> int:
        """The most stages that each have something to compute; 1 where pieces share parameters."""
        if any(piece.shares is not None for piece in self.pieces):
            return 1  # the parameter's gradient would have to be summed over two stages
        return max(1, sum(cost > 0 for cost in self.costs))

    @cache  # noqa: B019  # one is made for a plan
    def stages(self, number: int) -> tuple[ModelPart, ...]:
        """Cut the model into this number of stages, balanced by operations."""
        if number == 1:
            return (self.whole,)
        costs = [BlockCost(forward_s=cost, backward_s=0, parameter_bytes=0, activation_bytes=0) for cost in self.costs]
        cuts = accumulate(balanced_split(costs, number), initial=0)
        return tuple(_stage(self, first, last) for first, last in pairwise(cuts))


def _stage(anatomy: ModelPartition, first: int, last: int) -> ModelPart:
    whole, trace = anatomy.whole, anatomy.traces["fp32", "none"]
    pieces = anatomy.pieces[first:last]
    trained = sum(piece.gradient_bytes for piece in pieces)
    share = trained / whole.gradient_bytes
    parameters = sum(piece.parameter_bytes for piece in pieces)
    return ModelPart(
        parameter_bytes=parameters,
        gradient_bytes=trained,
        buffer_bytes=sum(piece.buffer_bytes for piece in pieces),
        optimizer_bytes=round(whole.optimizer_bytes * share),
        optimizer_temporary=round(whole.optimizer_temporary * (share if anatomy.steps_at_once else 1.0)),
        flops=sum(trace.flops[first:last]),
        received_bytes=_handed_on(trace, first),
        sent_bytes=_handed_on(trace, last),
        reduced_bytes=round(whole.reduced_bytes * sum(trace.flops[first:last]) / max(1, whole.flops)),
        root_bytes=parameters,
        lowered_root_bytes=parameters,
        activations={variant: activations(of, first, last) for variant, of in anatomy.traces.items()},
    )


def _handed_on(trace: MemoryTrace, border: int) -> int:
    """Return the bytes of activations that cross the border before a piece."""
    return trace.output_bytes[border - 1] if 0 < border < len(trace.output_bytes) else 0


def split_further(one: ModelPart, half: ModelPart, degree: int) -> ModelPart:
    """Extrapolate a part of ``degree`` ranks from that of one rank and of one of two; unsplit sizes stay."""

    def of(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping):
            return {key: of(a[key], b[key]) for key in a}
        if isinstance(a, tuple):
            return tuple(of(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, Activations):
            return Activations(**{f.name: of(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})
        return max(0, round(2 * b - a + 2 * (a - b) / degree))

    activations_of_half = {
        variant: half.activations.get(variant) or _estimated(one, half, variant) for variant in one.activations
    }
    half = replace(half, activations=activations_of_half)
    values = {f.name: of(getattr(one, f.name), getattr(half, f.name)) for f in fields(one)}
    return ModelPart(**{**values, "reduced_bytes": half.reduced_bytes})


def _estimated(one: ModelPart, half: ModelPart, variant: Variant) -> Activations:
    """Half of a part's activations in half precision: weights' copies as the weights, all else as in fp32."""
    precision, recompute = variant
    was, now = one.activations["fp32", recompute], half.activations["fp32", recompute]
    own, without_copies = one.activations[precision, recompute], one.activations["bf16 gathers", recompute]
    weights = half.parameter_bytes / max(1, one.parameter_bytes)

    def of(value: int, rest: int, before: int, after: int) -> int:
        return round((value - rest) * weights + rest * after / max(1, before))

    parts = (own, without_copies, was, now)
    return Activations(
        saved=of(*(part.saved for part in parts)),
        peak=of(*(part.peak for part in parts)),
        forward_peak=of(*(part.forward_peak for part in parts)),
        backward_peaks=tuple(map(of, *(part.backward_peaks for part in parts))),
    )
