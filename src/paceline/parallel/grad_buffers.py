"""Flat buffers of gradients, and buffers of modules that each micro-batch changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import TaskError
from paceline.parallel.transports import Bucket, GradBuffer

# --- Where each gradient and each buffer of a module lies in the flat lanes that are summed ---


_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor's place in its lane, in elements."""

    dtype: torch.dtype
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, slot: GradBuffer) -> torch.Tensor:
        if self.dtype not in slot:  # an empty tensor takes no lane
            return torch.empty(self.shape, dtype=self.dtype)
        return slot[self.dtype][self.start : self.start + self.shape.numel()].as_strided(self.shape, self.stride)


class FlatLayout:
    """Places for the gradients of ``parameters`` and the contributions to buffers.

    Gradients lie in the reverse order of the parameters, about the order in which backward
    produces them. Floating-point buffers follow in their own dtype's lane, half-precision ones in
    float32's; integer buffers (counters) share one int64 lane with the counts of micro-batches and changed
    buffers.

    Attributes:
        lanes: elements of each dtype's lane.
        gradients: elements of each lane that are gradients (they come first).
        buckets: the gradients in stretches of about 25 MiB (1 MiB for the first, so that sending
            starts early), then one for each lane's buffers.
        bucket_of: for each parameter, the bucket of its gradient.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        float_buffers: Iterable[torch.Tensor],
        integer_buffers: Iterable[torch.Tensor],
        counts: torch.Tensor,
    ) -> None:
        self.flat_buffers: dict[torch.dtype, int] = {}
        self.buckets: list[Bucket] = []
        self._gradient_places: list[_TensorPlace] = []
        self.bucket_of: list[int] = []
        open_bucket: dict[torch.dtype, int] = {}
        for name, parameter in reversed(list(parameters)):
            if isinstance(parameter, UninitializedParameter):
                raise TaskError(
                    f"parameter {name!r} has no shape yet; run one batch through the model in build_model()."
                )
            if parameter.is_complex():
                raise TaskError(f"parameter {name!r} is complex; use view_as_real, complex gradients cannot be summed.")
            place = self._append(parameter.dtype, parameter, _dense_stride(parameter))
            self._gradient_places.insert(0, place)
            number = open_bucket.get(place.dtype)
            limit = _FIRST_BUCKET_BYTES if number == 0 or number is None else _BUCKET_BYTES
            stop = place.start + parameter.numel()
            if number is None or (stop - self.buckets[number].start) * place.dtype.itemsize > limit:
                number = open_bucket[place.dtype] = len(self.buckets)
                self.buckets.append(Bucket(place.dtype, place.start, stop))
            else:
                self.buckets[number] = Bucket(place.dtype, self.buckets[number].start, stop)
            self.bucket_of.insert(0, number)
        self.gradients = dict(self.flat_buffers)
        self._float_places = [
            self._append(torch.promote_types(b.dtype, torch.float32), b, _contiguous_stride(b.shape))
            for b in float_buffers
        ]
        self._integer_places = [self._append(torch.int64, b, _contiguous_stride(b.shape)) for b in integer_buffers]
        self._counts_place = self._append(torch.int64, counts, counts.stride())
        self.buckets += [
            Bucket(dtype, self.gradients.get(dtype, 0), numel)
            for dtype, numel in self.flat_buffers.items()
            if numel > self.gradients.get(dtype, 0)
        ]

    def slice_of(self, parameters: range) -> dict[torch.dtype, slice]:
        """Where the gradients of neighbouring parameters lie in each lane."""
        found: dict[torch.dtype, slice] = {}
        for number in parameters:
            place = self._gradient_places[number]
            if place.dtype not in self.flat_buffers:
                continue
            before = found.get(place.dtype, slice(place.start, place.start))
            start, stop = min(before.start, place.start), max(before.stop, place.start + place.shape.numel())
            found[place.dtype] = slice(start, stop)
        return found

    def gradient_views(self, slot: GradBuffer) -> list[torch.Tensor]:
        """One view for each parameter, with its shape and memory format."""
        return [place.view(slot) for place in self._gradient_places]

    def float_buffer_views(self, slot: GradBuffer) -> list[torch.Tensor]:
        """One view for each floating-point buffer."""
        return [place.view(slot) for place in self._float_places]

    def integer_buffer_views(self, slot: GradBuffer) -> list[torch.Tensor]:
        """One int64 view for each integer buffer."""
        return [place.view(slot) for place in self._integer_places]

    def counts_view(self, slot: GradBuffer) -> torch.Tensor:
        """The int64 counts of micro-batches and changed buffers."""
        return self._counts_place.view(slot)

    def _append(self, dtype: torch.dtype, tensor: torch.Tensor, stride: tuple[int, ...]) -> _TensorPlace:
        start = self.flat_buffers.get(dtype, 0)
        if tensor.numel():
            self.flat_buffers[dtype] = start + tensor.numel()
        return _TensorPlace(dtype, start, tensor.shape, stride)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides where they leave no gaps (channels last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


# --- A module's buffers over the micro-batches of a step (batch norm's running statistics, counters) ---


class MicrobatchBuffers:
    """Lets every micro-batch start from the step's base values, and takes the mean of what they made.

    A floating-point buffer becomes the mean over the micro-batches, weighted by their samples; one that
    no micro-batch changed (a mask, a table) is left untouched, bit for bit. An integer buffer changes by
    the mean of the micro-batches' changes: a counter rises by one a step.

    ``counts`` is an int64 vector: the micro-batches present, then for each floating-point buffer how many
    micro-batches changed it.

    Where forwards of several micro-batches come before the first one's backward, each forward is put between
    :meth:`swap_in` and :meth:`swap_out`, and :meth:`restore` comes before :meth:`add_to`.

    Args:
        module: whose buffers are meant.
        holds: says of a buffer whether it is one of them.
    """

    def __init__(self, module: nn.Module, holds: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        places: dict[int, tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = {}
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and holds(buffer):
                    places.setdefault(id(buffer), (owner._buffers, name, buffer))
        self._floats = [place for place in places.values() if place[2].is_floating_point()]
        self._integers = [
            place for place in places.values() if not (place[2].is_floating_point() or place[2].is_complex())
        ]
        self.floats = [buffer for _, _, buffer in self._floats]
        self.integers = [buffer for _, _, buffer in self._integers]
        self.counts = torch.zeros(1 + len(self.floats) if self.floats or self.integers else 0, dtype=torch.int64)
        self._float_base: list[torch.Tensor] = []
        self._integer_base: list[torch.Tensor] = []

    def begin(self) -> None:
        """Remember the values that every micro-batch of the step starts from."""
        self._float_base = [buffer.clone() for buffer in self.floats]
        self._integer_base = [buffer.to(torch.int64, copy=True) for buffer in self.integers]

    def rollback(self) -> None:
        """Go back to the base values of a step that is not finished; does nothing after :meth:`assign`."""
        if self._float_base:
            self._restore(self._floats, self._float_base)
        if self._integer_base:
            self._restore(self._integers, self._integer_base)
        self._float_base, self._integer_base = [], []

    def reset(self) -> None:
        """Go back to the base values of the step under way."""
        self._restore(self._floats, self._float_base)
        self._restore(self._integers, self._integer_base)

    def swap_in(self) -> None:
        """Have the next forward write to tensors of its own: an earlier one's backward reads the others."""
        for owner, name, buffer in (*self._floats, *self._integers):
            owner[name] = buffer.clone()

    def swap_out(self) -> list[torch.Tensor]:
        """What the forward left; the buffers are those of the step's base again."""
        places = (*self._floats, *self._integers)
        left = [_current(place) for place in places]
        for place in places:
            _bind(place)
        return left

    def restore(self, left: Sequence[torch.Tensor]) -> None:
        """Have the buffers be what a forward left."""
        for (owner, name, _), value in zip((*self._floats, *self._integers), left, strict=True):
            owner[name] = value

    def add_to(
        self,
        float_sums: Sequence[torch.Tensor],
        integer_sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        samples: int,
        *,
        reset: bool,
    ) -> None:
        """Add one micro-batch's contribution, and go back to the base values if another micro-batch follows."""
        if not counts.numel():
            return
        changed = [1]
        if self.floats:
            values = [_current(place) for place in self._floats]
            # By value: batch norm does not raise its statistics' version counters.
            changed += [int(not torch.equal(v, base)) for v, base in zip(values, self._float_base, strict=True)]
            # Half-precision buffers are summed in float32, where sums neither overflow nor lose digits.
            values = [value.to(total.dtype) for value, total in zip(values, float_sums, strict=True)]
            # Multiplied first: a fused multiply-add would round a lone micro-batch differently from a pair.
            torch._foreach_add_(list(float_sums), torch._foreach_mul(values, float(samples)))
        if self.integers:
            now = [_current(place).to(torch.int64) for place in self._integers]
            torch._foreach_add_(list(integer_sums), torch._foreach_sub(now, self._integer_base))
        counts.add_(torch.tensor(changed, device=counts.device))
        if reset:
            self.reset()

    def assign(
        self,
        float_sums: Sequence[torch.Tensor],
        integer_sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        samples: float,
    ) -> None:
        """Set the buffers to the step's values."""
        if not counts.numel():
            return
        microbatches, *changed = counts.tolist()
        for place, total, times in zip(self._floats, float_sums, changed, strict=True):
            if times:
                _assign(place, total.div_(samples))
            else:
                _bind(place)
        for place, base, total in zip(self._integers, self._integer_base, integer_sums, strict=True):
            _assign(place, base + total.div_(microbatches, rounding_mode="floor"))
        self._float_base, self._integer_base = [], []

    def _restore(
        self,
        places: Sequence[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]],
        base: Sequence[torch.Tensor],
    ) -> None:
        for place, value in zip(places, base, strict=True):
            _assign(place, value)


def _current(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor]) -> torch.Tensor:
    """The buffer's value now; the module may have bound another tensor to its name."""
    owner, name, buffer = place
    value = owner[name]
    if value is None:
        return buffer
    if value.shape != buffer.shape:
        raise TaskError(
            f"buffer {name!r} had shape {tuple(buffer.shape)} and got {tuple(value.shape)} in forward; "
            "buffers are averaged over the micro-batches and must keep their shape. Make it a plain attribute."
        )
    return value.detach()


def _assign(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor], value: torch.Tensor) -> None:
    place[2].copy_(value)
    _bind(place)


def _bind(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor]) -> None:
    owner, name, buffer = place
    owner[name] = buffer
