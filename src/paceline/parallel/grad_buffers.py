"""Flat gradient buffers, and module buffers that each micro-batch changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.errors import TaskError
from paceline.parallel.transports import Bucket, GradBuffer
from paceline.torch_internals import (
    buffer_table,
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_mul,
    foreach_sub,
)

# --- The layout of gradients and module buffers in flat buffers ---


_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_GPU_ALIGNMENT_BYTES = 512  # of memory that torch allocates on a GPU


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor's place in a flat buffer, in the buffer's elements.

    A complex tensor lies in the flat buffer of its real type, so that transports see real numbers only.
    """

    dtype: torch.dtype  # of the tensor
    flat_dtype: torch.dtype
    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    def view(self, grad_buffer: GradBuffer) -> torch.Tensor:
        if self.start == self.stop:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return grad_buffer[self.flat_dtype][self.start : self.stop].view(self.dtype).as_strided(self.shape, self.stride)


class FlatLayout:
    """The places of the gradients of ``parameters`` and of the contributions to module buffers.

    Gradients are in reverse order of the parameters, about the order in which backward produces them; complex ones are
    pairs of real numbers. On a GPU each begins at a multiple of 512 bytes, as memory that torch allocates: kernels that
    sum unaligned memory (norms do) add in another order, and a pipeline's stages have other neighbours. Floating-point
    buffers follow in their own dtype's flat buffer, half-precision ones in float32's; integer buffers (counters) share
    one int64 flat buffer with the counts of micro-batches and changed buffers.

    Attributes:
        flat_buffers: elements of each dtype's flat buffer.
        gradients: elements of each that are gradients (they come first).
        buckets: slices of the gradients of about 25 MiB (1 MiB for the first, so that sending starts early), then one
            slice for each dtype's module buffers.
        bucket_of: for each parameter, the bucket of its gradient.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        float_buffers: Iterable[torch.Tensor],
        integer_buffers: Iterable[torch.Tensor],
        counts: torch.Tensor,
    ) -> None:
        self.flat_buffers: dict[torch.dtype, int] = {}
        self.buckets: list[Bucket] = []
        self._gradient_places: list[_TensorPlace] = []
        self.bucket_of: list[int] = []
        open_bucket: dict[torch.dtype, int] = {}
        for parameter in reversed(list(parameters)):
            alignment = _GPU_ALIGNMENT_BYTES if parameter.device.type == "cuda" else 1
            place = self._append(parameter.dtype, parameter, _dense_stride(parameter), alignment)
            self._gradient_places.insert(0, place)
            number = open_bucket.get(place.flat_dtype)
            limit = _FIRST_BUCKET_BYTES if number == 0 or number is None else _BUCKET_BYTES
            if number is None or (place.stop - self.buckets[number].start) * place.flat_dtype.itemsize > limit:
                number = open_bucket[place.flat_dtype] = len(self.buckets)
                self.buckets.append(Bucket(place.flat_dtype, place.start, place.stop))
            else:
                self.buckets[number] = Bucket(place.flat_dtype, self.buckets[number].start, place.stop)
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
        """Return the slices of neighbouring parameters' gradients in each flat buffer."""
        slices: dict[torch.dtype, slice] = {}
        for number in parameters:
            place = self._gradient_places[number]
            if place.flat_dtype not in self.flat_buffers:
                continue
            previous = slices.get(place.flat_dtype, slice(place.start, place.start))
            start, stop = min(previous.start, place.start), max(previous.stop, place.stop)
            slices[place.flat_dtype] = slice(start, stop)
        return slices

    def gradient_views(self, grad_buffer: GradBuffer) -> list[torch.Tensor]:
        """Return one view per parameter, with its shape, its memory format and a count of writes to it alone."""
        return [place.view(grad_buffer).data for place in self._gradient_places]

    def float_buffer_views(self, grad_buffer: GradBuffer) -> list[torch.Tensor]:
        """Return one view per floating-point buffer."""
        return [place.view(grad_buffer) for place in self._float_places]

    def integer_buffer_views(self, grad_buffer: GradBuffer) -> list[torch.Tensor]:
        """Return one int64 view per integer buffer."""
        return [place.view(grad_buffer) for place in self._integer_places]

    def counts_view(self, grad_buffer: GradBuffer) -> torch.Tensor:
        """Return the int64 counts of micro-batches and changed buffers."""
        return self._counts_place.view(grad_buffer)

    def _append(
        self, dtype: torch.dtype, tensor: torch.Tensor, stride: tuple[int, ...], alignment_bytes: int = 1
    ) -> _TensorPlace:
        flat_dtype = dtype.to_real() if dtype.is_complex else dtype
        parts = 2 if dtype.is_complex else 1
        # Only an even element can be the first of a complex tensor.
        multiple = max(parts, alignment_bytes // flat_dtype.itemsize)
        start = -(-self.flat_buffers.get(flat_dtype, 0) // multiple) * multiple
        stop = start + parts * tensor.numel()
        if tensor.numel():
            self.flat_buffers[flat_dtype] = stop
        return _TensorPlace(dtype, flat_dtype, start, stop, tensor.shape, stride, tensor.device)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if they leave no gaps (channels last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


# --- Module buffers over the micro-batches of a step (batch norm's running statistics, counters) ---


class MicrobatchBuffers:
    """Starts every micro-batch from the step's base values, and averages the results.

    A floating-point or complex buffer becomes the mean over the micro-batches, weighted by their samples; one that no
    micro-batch changed (a mask, a table) stays bitwise unchanged. An integer buffer changes by the mean of the
    micro-batches' changes: a counter rises by one per step.

    ``counts`` is an int64 vector: the number of micro-batches, then for each floating-point buffer the number of
    micro-batches that changed it.

    If several forwards precede the first backward, surround each forward by :meth:`swap_in` and :meth:`swap_out`, and
    call :meth:`restore` before :meth:`add_to`.

    Args:
        holds: selects the buffers.
    """

    def __init__(self, module: nn.Module, holds: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        places: dict[int, _Place] = {}
        for owner in module.modules():
            for name, buffer in buffer_table(owner).items():
                if buffer is not None and holds(buffer):
                    places.setdefault(id(buffer), (buffer_table(owner), name, buffer))
        inexact = {key for key, (_, _, buffer) in places.items() if buffer.is_floating_point() or buffer.is_complex()}
        self._floats = [place for key, place in places.items() if key in inexact]
        self._integers = [place for key, place in places.items() if key not in inexact]
        self.floats = [_as_real(buffer) for _, _, buffer in self._floats]
        self.integers = [buffer for _, _, buffer in self._integers]
        self.counts = torch.zeros(1 + len(self.floats) if self.floats or self.integers else 0, dtype=torch.int64)
        self._unset = [
            (buffer_table(owner), f"{prefix}.{name}".lstrip("."), name)
            for prefix, owner in module.named_modules()
            for name, buffer in buffer_table(owner).items()
            if buffer is None
        ]
        self._float_base: list[torch.Tensor] = []
        self._integer_base: list[torch.Tensor] = []
        # On a CPU it is faster to decide about each buffer; on a GPU each decision would be a wait.
        self._on_gpu = any(buffer.is_cuda for buffer in (*self.floats, *self.integers))
        if self._on_gpu and self.floats:
            self._sizes = torch.tensor([buffer.numel() for buffer in self.floats], device=self.floats[0].device)
            self._bounds = nn.functional.pad(self._sizes.cumsum(0), (1, 0))

    def begin(self) -> None:
        """Record the base values of the step."""
        floats = [_as_real(buffer) for _, _, buffer in self._floats]
        self._float_base = [torch.empty_like(buffer) for buffer in floats]
        self._integer_base = [torch.empty_like(buffer, dtype=torch.int64) for buffer in self.integers]
        _copy(self._float_base, floats)
        _copy(self._integer_base, self.integers)

    def rollback(self) -> None:
        """Restore the base values of an unfinished step; does nothing after :meth:`assign`."""
        if self._float_base:
            _restore(self._floats, self._float_base)
        if self._integer_base:
            _restore(self._integers, self._integer_base)
        self._float_base, self._integer_base = [], []

    def reset(self) -> None:
        """Restore the base values of the current step.

        Raises:
            TaskError: a micro-batch has set a buffer that was None.
        """
        self._require_unset()
        _restore(self._floats, self._float_base)
        _restore(self._integers, self._integer_base)

    def swap_in(self) -> None:
        """Give the next forward copies of the buffers, because an earlier one's backward reads the originals."""
        for owner, name, buffer in (*self._floats, *self._integers):
            owner[name] = buffer.clone()

    def swap_out(self) -> list[torch.Tensor]:
        """Return the buffers that the forward left, and bind those of the step's base again."""
        places = (*self._floats, *self._integers)
        values = [_current(place) for place in places]
        for place in places:
            _bind(place)
        return values

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Bind the buffers that a forward left."""
        for (owner, name, _), value in zip((*self._floats, *self._integers), values, strict=True):
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
        """Add one micro-batch's contribution; restore the base values if another micro-batch follows."""
        self._require_unset()
        if not counts.numel():
            return
        values = [_as_real(_current(place)) for place in self._floats]
        counts.add_(self._count_changes(values))
        if self.floats:
            # Half-precision buffers are summed in float32, where sums neither overflow nor lose digits.
            values = [value.to(total.dtype) for value, total in zip(values, float_sums, strict=True)]
            # Multiplied first: a fused multiply-add would round a lone micro-batch differently from a pair.
            foreach_add_(list(float_sums), foreach_mul(values, float(samples)))
        if self.integers:
            current = [_current(place).to(torch.int64) for place in self._integers]
            foreach_add_(list(integer_sums), foreach_sub(current, self._integer_base))
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
        if self._on_gpu:
            self._assign_without_wait(float_sums, integer_sums, counts, samples)
        else:
            microbatches, *changed = counts.tolist()
            for place, total, times in zip(self._floats, float_sums, changed, strict=True):
                if times:
                    _assign(place, total.div_(samples))
                else:
                    _bind(place)
            for place, base, total in zip(self._integers, self._integer_base, integer_sums, strict=True):
                _assign(place, base + total.div_(microbatches, rounding_mode="floor"))
        self._float_base, self._integer_base = [], []

    def _count_changes(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what one micro-batch adds to the counts: 1, then 1 for each floating-point buffer that it changed."""
        # Compared by value, because batch norm does not raise its statistics' version counters.
        if not self._on_gpu:
            pairs = zip(values, self._float_base, strict=True)
            return torch.tensor([1, *(int(not torch.equal(value, base)) for value, base in pairs)])
        if not values:
            return torch.ones((), dtype=torch.int64, device=self.integers[0].device)
        differences = (_joined(values) != _joined(self._float_base)).cumsum(0)
        changed = nn.functional.pad(differences, (1, 0))[self._bounds].diff() > 0
        return nn.functional.pad(changed.to(torch.int64), (1, 0), value=1)

    def _assign_without_wait(
        self,
        float_sums: Sequence[torch.Tensor],
        integer_sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        samples: float,
    ) -> None:
        if self._floats:
            foreach_div_(list(float_sums), samples)
            base = _joined(self._float_base)
            is_changed = (counts[1:] > 0).repeat_interleave(self._sizes, output_size=base.numel())
            _restore(self._floats, _divided(torch.where(is_changed, _joined(float_sums), base), self._float_base))
        if self._integers:
            changes = _joined(integer_sums).div_(counts[0], rounding_mode="floor")
            _restore(self._integers, _divided(changes.add_(_joined(self._integer_base)), self._integer_base))

    def _require_unset(self) -> None:
        for owner, full_name, name in self._unset:
            if owner[name] is not None:
                raise TaskError(
                    f"the buffer {full_name!r} was None when training began, and forward has set it: each rank would "
                    "keep its own, and no checkpoint could be loaded. Register it with a tensor of its shape, and "
                    "an integer buffer that tells whether it is set."
                )


_Place = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]


def _restore(places: Sequence[_Place], values: Sequence[torch.Tensor]) -> None:
    """Set buffers; on a GPU with one kernel for all that are real."""
    on_gpu = [(p[2], value) for p, value in zip(places, values, strict=True) if value.is_cuda and not p[2].is_complex()]
    _copy([buffer for buffer, _ in on_gpu], [value for _, value in on_gpu])
    for place, value in zip(places, values, strict=True):
        if value.is_cuda and not place[2].is_complex():
            _bind(place)
        else:
            _assign(place, value)


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        foreach_copy_(into, values)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors, 1-d, of a dtype that holds all of their values."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _divided(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _current(place: _Place) -> torch.Tensor:
    """Return the buffer's current value; the module may have bound another tensor to its name."""
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


def _as_real(buffer: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of a complex buffer, (..., 2), or any other buffer itself."""
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer


def _assign(place: _Place, value: torch.Tensor) -> None:
    # A sum's offset in a flat buffer may be odd, so it cannot be viewed as complex.
    place[2].copy_(torch.complex(value[..., 0], value[..., 1]) if place[2].is_complex() else value)
    _bind(place)


def _bind(place: _Place) -> None:
    owner, name, buffer = place
    owner[name] = buffer
