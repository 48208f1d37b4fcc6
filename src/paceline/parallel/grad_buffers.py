"""Flat gradient buffers and their fingerprints, and module buffers that each micro-batch changes."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.errors import TaskError
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import Bucket, GradBuffer
from paceline.torch_internals import buffer_table, foreach_copy_

# --- The layout of gradients and module buffers in flat buffers ---


_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_GPU_ALIGNMENT_BYTES = 512  # of memory that torch allocates on a GPU


@dataclass(frozen=True)
class _TensorSpan:
    """A tensor's span in a flat buffer, in the buffer's elements.

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
    """The spans of the gradients of ``parameters`` and of the contributions to module buffers.

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
        self._gradient_spans: list[_TensorSpan] = []
        self.bucket_of: list[int] = []
        open_bucket: dict[torch.dtype, int] = {}
        for parameter in reversed(list(parameters)):
            alignment = _GPU_ALIGNMENT_BYTES if parameter.device.type == "cuda" else 1
            span = self._append(parameter.dtype, parameter, _dense_stride(parameter), alignment)
            self._gradient_spans.insert(0, span)
            number = open_bucket.get(span.flat_dtype)
            limit = _FIRST_BUCKET_BYTES if number == 0 or number is None else _BUCKET_BYTES
            if number is None or (span.stop - self.buckets[number].start) * span.flat_dtype.itemsize > limit:
                number = open_bucket[span.flat_dtype] = len(self.buckets)
                self.buckets.append(Bucket(span.flat_dtype, span.start, span.stop))
            else:
                self.buckets[number] = Bucket(span.flat_dtype, self.buckets[number].start, span.stop)
            self.bucket_of.insert(0, number)
        self.gradients = dict(self.flat_buffers)
        for buffer in float_buffers:
            self._append(_sum_dtype(buffer), buffer, ())
        self._floats = {d: slice(self.gradients.get(d, 0), n) for d, n in self.flat_buffers.items()}
        start = self.flat_buffers.get(torch.int64, 0)
        for buffer in integer_buffers:
            self._append(torch.int64, buffer, ())
        self._integers = slice(start, self.flat_buffers.get(torch.int64, 0))
        self._counts_span = self._append(torch.int64, counts, counts.stride())
        self.buckets += [
            Bucket(dtype, self.gradients.get(dtype, 0), numel)
            for dtype, numel in self.flat_buffers.items()
            if numel > self.gradients.get(dtype, 0)
        ]

    def slice_of(self, parameters: range) -> dict[torch.dtype, slice]:
        """Return the slices of neighbouring parameters' gradients in each flat buffer."""
        slices: dict[torch.dtype, slice] = {}
        for number in parameters:
            span = self._gradient_spans[number]
            if span.flat_dtype not in self.flat_buffers:
                continue
            previous = slices.get(span.flat_dtype, slice(span.start, span.start))
            start, stop = min(previous.start, span.start), max(previous.stop, span.stop)
            slices[span.flat_dtype] = slice(start, stop)
        return slices

    def gradient_views(self, grad_buffer: GradBuffer) -> list[torch.Tensor]:
        """Return one view per parameter, with its shape, its memory format and a count of writes to it alone."""
        return [span.view(grad_buffer).data for span in self._gradient_spans]

    def buffer_sums(self, grad_buffer: GradBuffer) -> BufferSums:
        """Return the sums over micro-batches of the module buffers, and their counts."""
        floats = {dtype: grad_buffer[dtype][part] for dtype, part in self._floats.items() if part.start < part.stop}
        counts = self._counts_span.view(grad_buffer)
        integers = grad_buffer[torch.int64][self._integers] if self._integers.stop else counts[:0]
        return BufferSums(floats, integers, counts)

    def _append(
        self, dtype: torch.dtype, tensor: torch.Tensor, stride: tuple[int, ...], alignment_bytes: int = 1
    ) -> _TensorSpan:
        flat_dtype = dtype.to_real() if dtype.is_complex else dtype
        parts = 2 if dtype.is_complex else 1
        # Only an even element can be the first of a complex tensor.
        multiple = max(parts, alignment_bytes // flat_dtype.itemsize)
        start = -(-self.flat_buffers.get(flat_dtype, 0) // multiple) * multiple
        stop = start + parts * tensor.numel()
        if tensor.numel():
            self.flat_buffers[flat_dtype] = stop
        return _TensorSpan(dtype, flat_dtype, start, stop, tensor.shape, stride, tensor.device)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if they leave no gaps (channels last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


# --- Module buffers over the micro-batches of a step (batch norm's running statistics, counters) ---


@dataclass(frozen=True)
class BufferSums:
    """The sums of module buffers over some micro-batches.

    Attributes:
        floats: for each dtype of sums, those of the floating-point buffers one after the other, (N,).
        integers: those of the integer buffers' changes, int64 (N,).
        counts: int64: the number of micro-batches, then for each floating-point buffer the number of micro-batches that
            changed it; empty for a module without buffers.
    """

    floats: Mapping[torch.dtype, torch.Tensor]
    integers: torch.Tensor
    counts: torch.Tensor


class MicrobatchBuffers:
    """Starts every micro-batch from the step's base values, and averages the results.

    A floating-point or complex buffer becomes the mean over the micro-batches, weighted by their samples; one that no
    micro-batch changed (a mask, a table) stays bitwise unchanged. An integer buffer changes by the mean of the
    micro-batches' changes: a counter rises by one per step. Buffers of a kind are joined in one tensor: a model may
    have hundreds, and to begin an operation on a GPU takes longer than the operation.

    If several forwards precede the first backward, surround each forward by :meth:`swap_in` and :meth:`swap_out`, and
    call :meth:`restore` before :meth:`add_to`.

    Args:
        holds: selects the buffers.
    """

    def __init__(self, module: nn.Module, holds: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        entries: dict[int, _BufferEntry] = {}
        for owner in module.modules():
            for name, buffer in buffer_table(owner).items():
                if buffer is not None and holds(buffer):
                    entries.setdefault(id(buffer), (buffer_table(owner), name, buffer))
        groups: dict[torch.dtype, list[_BufferEntry]] = {}
        for entry in entries.values():
            groups.setdefault(_sum_dtype(entry[2]), []).append(entry)
        self._integers = _Joined(torch.int64, groups.pop(torch.int64, []))
        self._floats = [_Joined(dtype, of_dtype) for dtype, of_dtype in groups.items()]
        self._groups = [*self._floats, self._integers]
        self._entries = [entry for group in self._groups for entry in group.entries]
        self.floats = [_as_real(buffer) for group in self._floats for _, _, buffer in group.entries]
        self.integers = [buffer for _, _, buffer in self._integers.entries]
        self.counts = torch.zeros(1 + len(self.floats) if self._entries else 0, dtype=torch.int64)
        self._unset = [
            (buffer_table(owner), f"{prefix}.{name}".lstrip("."), name)
            for prefix, owner in module.named_modules()
            for name, buffer in buffer_table(owner).items()
            if buffer is None
        ]
        self._is_begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Record the base values of the step."""
        for group in self._groups:
            group.begin()
        self._is_begun = True

    def rollback(self) -> None:
        """Restore the base values of an unfinished step; does nothing after :meth:`assign`."""
        if self._is_begun:
            self.undo()

    def undo(self) -> None:
        """Restore the base values of a step that does not count, also after :meth:`assign`."""
        self._restore_base()
        self._is_begun = False

    def reset(self) -> None:
        """Restore the base values of the current step.

        Raises:
            TaskError: a micro-batch has set a buffer that was None.
        """
        self._require_unset()
        self._restore_base()

    def swap_in(self) -> None:
        """Give the next forward copies of the buffers, because an earlier one's backward reads the originals."""
        for owner, name, buffer in self._entries:
            owner[name] = buffer.clone()

    def swap_out(self) -> list[torch.Tensor]:
        """Return the buffers that the forward left, and bind those of the step's base again."""
        values = [_current(entry).detach() for entry in self._entries]
        for owner, name, buffer in self._entries:
            owner[name] = buffer
        return values

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Bind the buffers that a forward left."""
        for (owner, name, _), value in zip(self._entries, values, strict=True):
            owner[name] = value

    @torch.no_grad()
    def add_to(self, sums: BufferSums, samples: int, *, reset: bool) -> None:
        """Add one micro-batch's contribution; restore the base values if another micro-batch follows."""
        self._require_unset()
        if not self._entries:
            return
        values = [group.current() for group in self._floats]
        changed = [group.changed(value) for group, value in zip(self._floats, values, strict=True)]
        sums.counts.add_(nn.functional.pad(torch.cat(changed), (1, 0), value=1) if changed else 1)
        for group, value in zip(self._floats, values, strict=True):
            if value.numel():
                # Multiplied first: a fused multiply-add would round a lone micro-batch differently from a pair.
                sums.floats[group.dtype].add_(value.mul_(float(samples)))
        if self.integers:
            sums.integers.add_(self._integers.current().sub_(self._integers.base))
        if reset:
            self.reset()

    @torch.no_grad()
    def assign(self, sums: BufferSums, samples: float) -> None:
        """Set the buffers to the step's values."""
        if not self._entries:
            return
        changed = (sums.counts[1:] > 0).split_with_sizes([len(group.entries) for group in self._floats])
        for group, of_buffers in zip(self._floats, changed, strict=True):
            is_changed = group.of_elements(of_buffers)
            if is_changed.numel():
                group.set(torch.where(is_changed, sums.floats[group.dtype].div_(samples), group.base))
        if self.integers:
            changes = sums.integers.div_(sums.counts[0], rounding_mode="floor")
            self._integers.set(changes.add_(self._integers.base))
        self._is_begun = False

    @torch.no_grad()
    def _restore_base(self) -> None:
        for group in self._groups:
            group.restore()

    def _require_unset(self) -> None:
        for owner, full_name, name in self._unset:
            if owner[name] is not None:
                raise TaskError(
                    f"the buffer {full_name!r} was None when training began, and forward has set it: each rank would "
                    "keep its own, and no checkpoint could be loaded. Register it with a tensor of its shape, and "
                    "an integer buffer that tells whether it is set."
                )


_BufferEntry = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]


class _Joined:
    """Buffers whose sums have one dtype.

    Half-precision buffers are summed in float32, where sums neither overflow nor lose digits.

    Attributes:
        dtype: of the sums.
        entries: of the buffers.
        base: their values at the beginning of the step, (N,) of that dtype.
    """

    def __init__(self, dtype: torch.dtype, entries: Sequence[_BufferEntry]) -> None:
        self.dtype = dtype
        self.entries = entries
        self.base = torch.empty(0, dtype=dtype)
        self._base_parts: Sequence[torch.Tensor] | None = None
        buffers = [_as_real(buffer) for _, _, buffer in entries]
        self._shapes = [b.shape for b in buffers]
        self._sizes = [b.numel() for b in buffers]
        # On a CPU it is faster to compare each buffer; on a GPU each comparison would be a wait.
        self._on_gpu = any(buffer.is_cuda for buffer in buffers)
        self._numbers = torch.tensor(self._sizes, dtype=torch.int64, device=buffers[0].device if buffers else None)
        self._bounds = nn.functional.pad(self._numbers.cumsum(0), (1, 0))

    def current(self) -> torch.Tensor:
        """Return a copy of their values, (N,) of the sums' dtype; the module may have bound others to their names."""
        if not self.entries:
            return torch.empty(0, dtype=self.dtype)
        parts = [_as_real(_current(entry)) for entry in self.entries]
        if any(part.dtype is not self.dtype for part in parts):
            parts = [part.to(self.dtype) for part in parts]
        return torch.cat([part if part.dim() == 1 else part.reshape(-1) for part in parts])

    def begin(self) -> None:
        """Record the base values."""
        self.base = self.current()
        self._base_parts = None  # a step of one micro-batch needs none

    def changed(self, values: torch.Tensor) -> torch.Tensor:
        """Return 1 for each buffer that differs from the base, else 0, int64.

        Compared by value, because batch norm does not raise its statistics' version counters.
        """
        if self._on_gpu:
            differences = nn.functional.pad((values != self.base).cumsum(0), (1, 0))
            return (differences[self._bounds].diff() > 0).to(torch.int64)
        pairs = zip(values.split_with_sizes(self._sizes), self.base.split_with_sizes(self._sizes), strict=True)
        return torch.tensor([int(not torch.equal(value, base)) for value, base in pairs])

    def of_elements(self, of_buffers: torch.Tensor) -> torch.Tensor:
        """Return the value of its buffer for each element, (N,)."""
        return of_buffers.repeat_interleave(self._numbers, output_size=sum(self._sizes))

    def set(self, values: torch.Tensor) -> None:
        """Set the buffers, and bind them to their names."""
        self._copy(self._divided(values))

    def restore(self) -> None:
        """Set the buffers to the base values."""
        if self._base_parts is None:
            self._base_parts = self._divided(self.base)
        self._copy(self._base_parts)

    def _divided(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = values.split_with_sizes(self._sizes)
        return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _copy(self, parts: Sequence[torch.Tensor]) -> None:
        real: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        for (owner, name, buffer), part in zip(self.entries, parts, strict=True):
            owner[name] = buffer
            if buffer.is_complex():
                buffer.copy_(torch.complex(part[..., 0], part[..., 1]))  # it may be a conjugate
            else:
                into.append(buffer)
                real.append(part)
        if real:
            foreach_copy_(into, real)


def _sum_dtype(buffer: torch.Tensor) -> torch.dtype:
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return torch.int64
    return torch.promote_types(buffer.dtype.to_real(), torch.float32)


def _current(entry: _BufferEntry) -> torch.Tensor:
    """Return the buffer's current value."""
    owner, name, buffer = entry
    value = owner[name]
    if value is None or value is buffer:
        return buffer
    if value.shape != buffer.shape:
        raise TaskError(
            f"buffer {name!r} had shape {tuple(buffer.shape)} and got {tuple(value.shape)} in forward; "
            "buffers are averaged over the micro-batches and must keep their shape. Make it a plain attribute."
        )
    return value


def _as_real(buffer: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of a complex buffer, (..., 2), or any other buffer itself."""
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer


# --- Fingerprints of one micro-batch's gradient, in a separate buffer, to compare two ranks' results ---

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**18  # elements; bounds the memory, and fits a cache
_BYTES = 6  # of the result, so that a float64 in a step's row represents it exactly
_MASK = 2**64 - 1


def fingerprint(flat_buffers: Iterable[torch.Tensor], *numbers: float) -> int:
    """Return a number in [1, 2**48] for the bits of some tensors and numbers.

    For each tensor's elements x_i, taken as integers, the sums of x_i and of (2 i + 1) x_i are computed modulo 2**64 on
    its device; a single wrong element always changes the first. Integers have no rounding, so the result does not
    depend on device or threads.

    Args:
        flat_buffers: 1-d, contiguous.
        numbers: further values to include.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}d", *numbers), digest_size=_BYTES)
    for flat_buffer in flat_buffers:
        bits = flat_buffer.view(_INTEGERS[flat_buffer.element_size()])
        odd = torch.arange(min(_CHUNK, bits.numel()), device=bits.device).mul_(2).add_(1)
        sums = []
        for chunk in torch.tensor_split(bits, list(range(_CHUNK, bits.numel(), _CHUNK))):
            wide = chunk.to(torch.int64)  # a view for 64-bit types, so do not change it
            sums += [wide.sum(), (wide * odd[: wide.numel()]).sum()]
        plain = weighted = 0
        for number, value in enumerate(torch.stack(sums).tolist()):
            if number % 2 == 0:
                plain += value
                weighted += 2 * _CHUNK * (number // 2) * value
            else:
                weighted += value
        digest.update(struct.pack("<QQ", plain & _MASK, weighted & _MASK))
    return int.from_bytes(digest.digest(), "little") + 1


class ScratchGradient:
    """A buffer for one micro-batch's gradient, separate from the sums; allocated on first use.

    Args:
        layout: offsets of the gradients.
        like: a gradient buffer on the same device.
    """

    def __init__(self, layout: FlatLayout, like: GradBuffer) -> None:
        self._layout = layout
        self._like = like
        self.flat_buffers: GradBuffer = {}

    def views(self) -> list[torch.Tensor]:
        """Allocate the buffer; return one view per parameter's gradient."""
        self.flat_buffers = {
            dtype: torch.empty_like(self._like[dtype][:numel]) for dtype, numel in self._layout.gradients.items()
        }
        return self._layout.gradient_views(self.flat_buffers)

    def zero(self) -> None:
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.zero_()

    def add_to(self, grad_buffer: GradBuffer) -> None:
        """Add the gradient to a gradient buffer."""
        for dtype, flat_buffer in self.flat_buffers.items():
            grad_buffer[dtype][: flat_buffer.numel()].add_(flat_buffer)

    def fingerprint(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, checksum: int) -> int:
        """Return the fingerprint of the gradient, the sums of the losses and weights, and the checksum."""
        return fingerprint(self.flat_buffers.values(), float(loss_sum.detach()), float(weight), float(checksum))

    def close(self) -> None:
        self.flat_buffers.clear()
        self._like = {}


# --- A rank's header, sent with a step's gradients ---


_NO_MICROBATCH = -1.0


@dataclass(frozen=True)
class MicrobatchSums:
    """One micro-batch's sums; the loss stays on its device until the step's end, to synchronise only once."""

    microbatch: int
    samples: int
    weight: torch.Tensor | float
    loss_sum: torch.Tensor
    checksum: int


class SubtreeSums(NamedTuple):
    """The sums over the micro-batches of one subtree of the tree; without a micro-batch, all are 0."""

    samples: float = 0.0
    weight: float = 0.0
    loss_sum: float = 0.0
    checksum: float = 0.0

    def plus(self, other: SubtreeSums) -> SubtreeSums:
        """Return the sums of both subtrees."""
        return SubtreeSums(
            self.samples + other.samples,
            self.weight + other.weight,
            self.loss_sum + other.loss_sum,
            self.checksum + other.checksum,
        )


_SUBTREE_LENGTH = len(SubtreeSums._fields)


# --- A set of parameters, as the bits of an integer, in float64 numbers ---


_BITS = 53  # of an integer that a float64 represents exactly


def set_length(size: int) -> int:
    """Return how many numbers a set of parameters takes that are numbered below ``size``."""
    return -(-size // _BITS)


def pack_set(bits: int, size: int) -> list[float]:
    """Return a set of parameters as numbers; bit i of ``bits`` is parameter i."""
    return [float(bits >> start & (1 << _BITS) - 1) for start in range(0, size, _BITS)]


def union(packed: Iterable[Sequence[float]]) -> int:
    """Return the parameters that are in any of the sets from :func:`pack_set`."""
    bits = 0
    for numbers in packed:
        for position, number in enumerate(numbers):
            bits |= int(number) << _BITS * position
    return bits


class StepHeader:
    """A rank's header: equally many float64 values on every rank.

    Args:
        plan: the work split and the tree.
        row_length: number of values in a rank's row.
        num_parameters: number of the model's trainable parameters.

    Attributes:
        length: number of values in a header.
    """

    def __init__(self, plan: ReductionPlan, rank: int, row_length: int, num_parameters: int) -> None:
        self._plan = plan
        self._rank = rank
        self._num_parameters = num_parameters
        self._row = slice(1, 1 + row_length)  # after the first bad micro-batch
        self._used = slice(self._row.stop, self._row.stop + set_length(num_parameters))  # the subtrees' sums follow
        self.length = self._used.stop + _SUBTREE_LENGTH * max(len(subtrees) for subtrees in plan.subtrees)

    def pack(self, row: Sequence[float], used: int, microbatches_sums: Sequence[MicrobatchSums]) -> list[float]:
        """Return the header of this rank, which has computed these micro-batches, in order.

        Args:
            row: the rank's values.
            used: the parameters that they used, as a set of bits.
            microbatches_sums: of each micro-batch.
        """
        assert len(row) == self._row.stop - self._row.start
        subtrees = self._plan.subtrees[self._rank]
        microbatches = [sums.microbatch for sums in microbatches_sums]
        numbers = read_numbers([number for sums in microbatches_sums for number in (sums.weight, sums.loss_sum)])
        weights, losses = numbers[::2], numbers[1::2]
        bad_microbatch = _NO_MICROBATCH
        subtree_sums = [SubtreeSums()] * self._plan.num_grad_buffers[self._rank]
        # The same additions in the same order as for the gradients, in float64.
        for step, sums, weight, loss in zip(
            self._plan.accumulation(self._rank, microbatches), microbatches_sums, weights, losses, strict=True
        ):
            values = SubtreeSums(sums.samples, weight, loss, sums.checksum)
            subtree_sums[step.buffer] = values if step.fresh else subtree_sums[step.buffer].plus(values)
            for into, other in step.merges:
                subtree_sums[into] = subtree_sums[into].plus(subtree_sums[other])
            if bad_microbatch == _NO_MICROBATCH and not (math.isfinite(loss) and math.isfinite(weight)):
                bad_microbatch = sums.microbatch
        header = [bad_microbatch, *row, *pack_set(used, self._num_parameters)]
        for subtree, of_subtree in zip(subtrees, subtree_sums, strict=False):
            has_microbatch = any(subtree.start <= microbatch < subtree.stop for microbatch in microbatches)
            header += of_subtree if has_microbatch else SubtreeSums()
        return header + [0.0] * (self.length - len(header))

    def rows(self, headers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Return each rank's row."""
        return [header[self._row] for header in headers]

    def used(self, headers: Sequence[Sequence[float]]) -> int:
        """Return the parameters that any rank has used, as a set of bits."""
        return union(header[self._used] for header in headers)

    def subtree_sums(self, headers: Sequence[Sequence[float]]) -> list[SubtreeSums]:
        """Return the sums of each subtree, in the order of the plan."""
        return [
            SubtreeSums(*headers[rank][self._used.stop + _SUBTREE_LENGTH * i :][:_SUBTREE_LENGTH])
            for rank, subtrees in enumerate(self._plan.subtrees)
            for i in range(len(subtrees))
        ]

    def bad_microbatch(self, headers: Sequence[Sequence[float]]) -> int | None:
        """Return the lowest micro-batch whose loss was NaN or infinite."""
        return min((int(header[0]) for header in headers if header[0] != _NO_MICROBATCH), default=None)


def read_numbers(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return the numbers in zero-dimensional tensors, with one wait for a GPU in total."""
    on_gpu = [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]
    numbers = iter(torch.stack([value.double() for value in on_gpu]).tolist() if on_gpu else ())
    return [next(numbers) if isinstance(value, torch.Tensor) and value.is_cuda else float(value) for value in values]
