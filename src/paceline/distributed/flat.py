"""Where each gradient and each buffer of a module lies in the flat lanes that are summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.parameter import UninitializedParameter

from paceline.distributed.transport import Bucket, Slot
from paceline.errors import TaskError

_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Place:
    """A tensor's place in its lane, in elements."""

    dtype: torch.dtype
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, slot: Slot) -> torch.Tensor:
        if self.dtype not in slot:  # an empty tensor takes no lane
            return torch.empty(self.shape, dtype=self.dtype)
        return slot[self.dtype][self.start : self.start + self.shape.numel()].as_strided(
            self.shape, self.stride
        )


class FlatLayout:
    """Places for the gradients of ``parameters`` and the contributions to buffers.

    Gradients lie in the reverse order of the parameters, about the order in which backward
    produces them. Floating-point buffers follow in their own dtype's lane, half-precision ones in
    float32's; integer buffers (counters) share one int64 lane with the counts of shards and changed
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
        self.lanes: dict[torch.dtype, int] = {}
        self.buckets: list[Bucket] = []
        self._gradient_places: list[_Place] = []
        self.bucket_of: list[int] = []
        open_bucket: dict[torch.dtype, int] = {}
        for name, parameter in reversed(list(parameters)):
            if isinstance(parameter, UninitializedParameter):
                raise TaskError(
                    f"parameter {name!r} has no shape yet; run one batch through the model in build_model()."
                )
            if parameter.is_complex():
                raise TaskError(
                    f"parameter {name!r} is complex; use view_as_real, complex gradients cannot be summed."
                )
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
        self.gradients = dict(self.lanes)
        self._float_places = [
            self._append(torch.promote_types(b.dtype, torch.float32), b, _contiguous_stride(b.shape))
            for b in float_buffers
        ]
        self._integer_places = [
            self._append(torch.int64, b, _contiguous_stride(b.shape)) for b in integer_buffers
        ]
        self._counts_place = self._append(torch.int64, counts, counts.stride())
        self.buckets += [
            Bucket(dtype, self.gradients.get(dtype, 0), numel)
            for dtype, numel in self.lanes.items()
            if numel > self.gradients.get(dtype, 0)
        ]

    def stretch(self, parameters: range) -> dict[torch.dtype, slice]:
        """Where the gradients of neighbouring parameters lie in each lane."""
        found: dict[torch.dtype, slice] = {}
        for number in parameters:
            place = self._gradient_places[number]
            if place.dtype not in self.lanes:
                continue
            before = found.get(place.dtype, slice(place.start, place.start))
            start, stop = min(before.start, place.start), max(before.stop, place.start + place.shape.numel())
            found[place.dtype] = slice(start, stop)
        return found

    def gradient_views(self, slot: Slot) -> list[torch.Tensor]:
        """One view for each parameter, with its shape and memory format."""
        return [place.view(slot) for place in self._gradient_places]

    def float_buffer_views(self, slot: Slot) -> list[torch.Tensor]:
        """One view for each floating-point buffer."""
        return [place.view(slot) for place in self._float_places]

    def integer_buffer_views(self, slot: Slot) -> list[torch.Tensor]:
        """One int64 view for each integer buffer."""
        return [place.view(slot) for place in self._integer_places]

    def counts_view(self, slot: Slot) -> torch.Tensor:
        """The int64 counts of shards and changed buffers."""
        return self._counts_place.view(slot)

    def _append(self, dtype: torch.dtype, tensor: torch.Tensor, stride: tuple[int, ...]) -> _Place:
        start = self.lanes.get(dtype, 0)
        if tensor.numel():
            self.lanes[dtype] = start + tensor.numel()
        return _Place(dtype, start, tensor.shape, stride)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides where they leave no gaps (channels last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
