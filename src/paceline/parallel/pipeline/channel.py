"""Messages between neighbouring stages."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.core.errors import TaskError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.world import World
from paceline.torch_internals import is_non_overlapping_and_dense_or_false

# --- Serialization of a model's result: its tensors, and a description of the rest


def pack(result: Any) -> list[Any]:
    """Pack a result into a description, as bytes, and its tensors, numbers and None.

    Args:
        result: tensors, numbers, texts and None, in tuples, lists, dicts, named tuples, dataclasses.

    Raises:
        TaskError: it contains something else.
    """
    leaves: list[Any] = []
    content = json.dumps(_describe(result, leaves)).encode()
    return [torch.frombuffer(bytearray(content), dtype=torch.uint8), *leaves]


def unpack(values: Iterator[Any]) -> Any:
    """Rebuild a packed result.

    Args:
        values: the output of :func:`pack`; later values are not consumed.

    Raises:
        TaskError: a class in it is not imported here.
    """
    return _rebuild(json.loads(bytes(next(values).cpu().numpy())), values)


def _describe(value: Any, leaves: list[Any]) -> Any:
    """Return None for a leaf, else the kind of the value and its parts."""
    if value is None or isinstance(value, torch.Tensor | bool | int | float):
        leaves.append(value)
        return None
    if isinstance(value, str):
        return ["text", value]
    fields = _fields(value)
    if fields is not None:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if _imported(name) is not type(value):
            raise _unsupported(value)
        return [name, [[key, _describe(part, leaves)] for key, part in fields.items()]]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_describe(part, leaves) for part in value]]
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return ["dict", [[key, _describe(part, leaves)] for key, part in value.items()]]
    raise _unsupported(value)


def _rebuild(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    kind, parts = shape
    if kind == "text":
        return parts
    if kind in ("tuple", "list"):
        values = [_rebuild(part, leaves) for part in parts]
        return tuple(values) if kind == "tuple" else values
    items = {key: _rebuild(part, leaves) for key, part in parts}
    if kind == "dict":
        return items
    value_class = _imported(kind)
    if value_class is None:
        raise TaskError(
            f"the model returns a {kind.replace(':', '.')}, which not every rank of the pipeline has "
            "imported. Import it at the top of the task's file."
        )
    return value_class(**items)


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the parts of a dataclass or named tuple, by name; None for anything else."""
    if not _has_fields(type(value)):
        return None
    if isinstance(value, dict):
        return dict(value)  # Hugging Face's ModelOutput, which omits None
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def _imported(name: str) -> Any:
    """Return the class if its module is imported and it only holds values, so that nothing else is called."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) and _has_fields(value) else None


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _unsupported(value: Any) -> TaskError:
    return TaskError(
        f"the model returns a {type(value).__name__}, which a pipeline's last stage cannot send to the "
        "other ranks: only tensors, numbers, texts and None, in tuples, lists, dicts, and named tuples and "
        "dataclasses that a module defines at its top. Have the model return those."
    )


# --- Messages between stages: tensors and numbers of shapes that the receiver does not know in advance ---
#
# A message is one frame: a description, followed by the tensors. Both ends know its length, which is that of the
# longest earlier message on the same route; the rest follows in a second frame. No size exchange is needed,
# and a receiver can post its buffer before the message is sent.


_HEADER = 256  # int64 numbers at the front of every message, enough for some twenty tensors
_MAX_DESCRIPTION = _HEADER - 8  # the rest is the channel's
_HEADER_BYTES = 8 * _HEADER
# Bytes, on a CPU and on a GPU, as of separate tensors: a kernel's choice and its bits may depend on it.
_ALIGNMENT = (64, 512)
_NONE, _TENSOR, _BOOL, _INT, _FLOAT, _TUPLE, _HOST_TENSOR = range(7)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
FORWARD, BACKWARD, EVALUATION = range(3)


class MessageAddress(NamedTuple):
    """The address of a message between two ranks; numbers increase along a route.

    Attributes:
        stage: the receiving stage.
        kind: :data:`FORWARD`, :data:`BACKWARD` or :data:`EVALUATION`.
        number: of the micro-batch.
    """

    stage: int
    kind: int
    number: int = 0

    @property
    def tag(self) -> int:
        """The address as a number."""
        return (self.number * 3 + self.kind) * 1024 + self.stage


_Route = tuple[int, int, int]  # the other rank, the stage and the kind


class StageChannel:
    """Messages between the ranks of a model replica, each by its stage's place in it, over gloo.

    Sending does not wait for the receiver. Tensors on a GPU go through page-locked memory of the CPU, and the sender
    waits until they are there.

    Args:
        world: those ranks, in the order of their stages.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._on_gpu = world.device.type == "cuda"
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # Gloo does not say whether a message has arrived without waiting for it. No schedule has so many on the way.
        self._max_in_flight = 32 + 8 * world.world_size
        self._empty: dict[int, list[torch.Tensor]] = {}  # reusable frames, by their bytes
        self._sent: dict[_Route, int] = {}  # the longest message's bytes
        self._received: dict[_Route, int] = {}
        self._expected: dict[_Route, deque[MessageAddress]] = {}
        self._posted: dict[tuple[int, MessageAddress], tuple[dist.Work, torch.Tensor]] = {}

    def send(self, values: Sequence[Any], to: int, address: MessageAddress) -> None:
        """Send copies of tensors, numbers, None, or tuples of these.

        Raises:
            TaskError: a value is something else.
            PeerLostError: the other rank is gone.
        """
        description, tensors = encode(values, on_gpu=self._on_gpu)
        self._send_frames(description, tensors, to, address)

    def broadcast(self, values: Sequence[Any], address: MessageAddress) -> None:
        """Send values to all other ranks, which call :meth:`receive`.

        Raises: as :meth:`send`.
        """
        for other in range(self.world.world_size):
            if other != self.world.rank:
                self.send(values, other, address)

    def post_recv(self, messages: Sequence[tuple[int, MessageAddress]]) -> None:
        """Post receive buffers for messages before they are sent, one per route at a time.

        Args:
            messages: senders and addresses, in the order of the calls of :meth:`receive`.
        """
        for source, address in messages:
            self._expected.setdefault((source, address.stage, address.kind), deque()).append(address)
        for route in self._expected:
            self._post_next(route)

    def receive(self, source: int, address: MessageAddress) -> list[Any]:
        """Wait for a message; tensors that required a gradient become leaves that do.

        Raises:
            PeerLostError: the other rank is gone.
        """
        activity = self.world.progress_tracker
        activity.begin_collective("pipeline")
        with translate_peer_errors():
            values = self._receive(source, address)
        # The ranks of a pipeline share one exchange, which they enter and leave repeatedly.
        activity.suspend_collective()
        return values

    def wait(self) -> None:
        """Wait until all sent messages have arrived.

        Raises:
            PeerLostError: another rank is gone.
        """
        activity = self.world.progress_tracker
        activity.begin_collective("pipeline")
        with translate_peer_errors():
            self._wait_for_sends()
        activity.end_collective()

    def _receive(self, source: int, address: MessageAddress) -> list[Any]:
        numbers, frame = self._receive_frames(source, address)
        return decode(numbers, frame, frame, self.world.device)

    def _wait_for_sends(self) -> None:
        self._recycle_frames(0)

    def _send_frames(
        self, description: Sequence[int], tensors: Sequence[torch.Tensor], to: int, address: MessageAddress
    ) -> None:
        """Send numbers and tensors through the memory of the CPU."""
        offsets, length = layout(tensors, on_gpu=False)
        route = (to, address.stage, address.kind)
        room = self._sent.get(route, 0)
        self._sent[route] = max(room, length)
        with translate_peer_errors():
            self._recycle_frames(self._max_in_flight)
        frames = [self._frame(_HEADER_BYTES + room)]
        # Not torch.tensor, which reads each of the numbers several times.
        header = torch.frombuffer(array("q", [length, *description]), dtype=torch.int64)
        _view(frames[0], torch.int64, 0, header.shape, (1,)).copy_(header)
        first = _HEADER_BYTES
        if length > room:
            frames.append(self._frame(length))
            self._empty.clear()  # later frames are longer
            first = 0
        fill(frames[-1], first, offsets, tensors)
        if self._on_gpu and any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream(self.world.device).synchronize()
        with translate_peer_errors():
            for frame in frames:
                work = dist.isend(frame, group=self.world.group, group_dst=to, tag=address.tag)
                assert work is not None
                self._in_flight.append((work, frame))

    def _receive_frames(self, source: int, address: MessageAddress) -> tuple[Iterator[int], FrameReader]:
        """Return the numbers and the tensors' frame."""
        route = (source, address.stage, address.kind)
        if (source, address) not in self._posted:
            self._posted[source, address] = self._post(source, address)
        work, frame = self._posted.pop((source, address))
        work.wait()
        numbers = iter(_view(frame, torch.int64, 0, (_HEADER,), (1,)).tolist())
        length, first = next(numbers), _HEADER_BYTES
        if length > self._received.get(route, 0):
            self._received[route] = length
            frame, first = self._new_frame(length), 0
            dist.recv(frame, group=self.world.group, group_src=source, tag=address.tag)
        self._post_next(route)
        return numbers, FrameReader(frame, first)

    def _new_frame(self, nbytes: int) -> torch.Tensor:
        if self._on_gpu:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8)

    def _frame(self, nbytes: int) -> torch.Tensor:
        """Return a send buffer, reused if possible."""
        arrived = self._empty.get(nbytes)
        return arrived.pop() if arrived else self._new_frame(nbytes)

    def _recycle_frames(self, keep: int) -> None:
        """Wait for the oldest messages until no more than ``keep`` may be on their way."""
        while len(self._in_flight) > keep:
            work, frame = self._in_flight.popleft()
            work.wait()
            self._empty.setdefault(frame.numel(), []).append(frame)

    def _post_next(self, route: _Route) -> None:
        expected = self._expected.get(route)
        if expected:
            address = expected.popleft()
            self._posted[route[0], address] = self._post(route[0], address)

    def _post(self, source: int, address: MessageAddress) -> tuple[dist.Work, torch.Tensor]:
        room = self._received.get((source, address.stage, address.kind), 0)
        frame = self._new_frame(_HEADER_BYTES + room)
        work = dist.irecv(frame, group=self.world.group, group_src=source, tag=address.tag)
        assert work is not None
        return work, frame


class FrameReader:
    """Reads the tensors of a frame in order.

    Args:
        frame: bytes.
        first: the offset of the first tensor.
    """

    def __init__(self, frame: torch.Tensor, first: int = 0) -> None:
        self._frame = frame
        self._offset = first
        self._alignment = _ALIGNMENT[frame.is_cuda]

    def next(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Return the next tensor, in the frame's memory."""
        tensor = _view(self._frame, dtype, self._offset, shape, stride)
        self._offset += _padded(tensor.numel() * tensor.element_size(), self._alignment)
        return tensor


def layout(tensors: Sequence[torch.Tensor], *, on_gpu: bool) -> tuple[list[int], int]:
    """Return the first byte of each tensor in a frame, and the end of the last one."""
    offsets, length, alignment = [], 0, _ALIGNMENT[on_gpu]
    for tensor in tensors:
        offsets.append(length)
        length += _padded(tensor.numel() * tensor.element_size(), alignment)
    return offsets, length


def fill(frame: torch.Tensor, first: int, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to their offsets in a frame; a copy from a GPU is not finished on return."""
    for offset, tensor in zip(offsets, tensors, strict=True):
        view = _view(frame, tensor.dtype, first + offset, tensor.shape, tensor.stride())
        if tensor.is_cuda:
            view.copy_(tensor, non_blocking=True)
        else:
            view.copy_(tensor)


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _view(
    frame: torch.Tensor, dtype: torch.dtype, at: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor in the frame's memory, not a torch view, so that in-place changes are independent."""
    empty = torch.empty(0, dtype=dtype, device=frame.device) if frame.is_cuda else torch.empty(0, dtype=dtype)
    return empty.set_(frame.untyped_storage(), at // dtype.itemsize, torch.Size(shape), tuple(stride))


def _wait_for_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, also if it is a lazy one that waits for a split layer's ranks."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or is_non_overlapping_and_dense_or_false(tensor)  # the latter takes 0.1 ms


def encode(values: Sequence[Any], *, on_gpu: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Describe values by numbers, and return the dense tensors in them besides.

    Args:
        values: tensors, numbers, None, or tuples of these.
        on_gpu: whether the receiver puts tensors on a GPU unless their description says that they were not on one.

    Raises:
        TaskError: a value is something else, or there are too many.
    """
    numbers = [len(values)]
    tensors: list[torch.Tensor] = []
    for value in values:
        _encode(value, on_gpu, numbers, tensors)
    if len(numbers) > _MAX_DESCRIPTION:
        raise TaskError(
            f"a stage sends {len(values)} values to the next, more than a message can describe. Split the "
            "model where fewer are needed: with pipeline_blocks in the task, or --pp-split with numbers."
        )
    return numbers, tensors


def _encode(value: Any, on_gpu: bool, numbers: list[int], tensors: list[torch.Tensor]) -> None:
    if value is None:
        numbers.append(_NONE)
    elif isinstance(value, torch.Tensor):
        plain = _wait_for_value(value).detach()
        # In its own memory order, on which a kernel's choice and its bits may depend.
        dense = plain if _is_dense(plain) else plain.contiguous()
        numbers.append(_TENSOR if value.is_cuda == on_gpu else _HOST_TENSOR)
        numbers += [_DTYPES.index(value.dtype), int(value.requires_grad), value.dim()]
        numbers += [*value.shape, *dense.stride()]
        tensors.append(dense)
    elif isinstance(value, bool):
        numbers += [_BOOL, int(value)]
    elif isinstance(value, int):
        numbers += [_INT, value]
    elif isinstance(value, float):
        numbers += [_FLOAT, struct.unpack("<q", struct.pack("<d", value))[0]]
    elif isinstance(value, tuple):
        numbers += [_TUPLE, len(value)]
        for part in value:
            _encode(part, on_gpu, numbers, tensors)
    else:
        raise TaskError(
            f"a stage cannot send a {type(value).__name__} to the next: only tensors, numbers, None and "
            "tuples of them. Name the parts of the model in the task: def pipeline_blocks(self, model)."
        )


def decode(numbers: Iterator[int], on_device: FrameReader, on_host: FrameReader, device: torch.device) -> list[Any]:
    """Return the values of a description; tensors that required a gradient become leaves that do.

    Args:
        numbers: the description, from :func:`encode`.
        on_device: the frame of the tensors on the device.
        on_host: the frame of the tensors on the CPU; the same one if all tensors are in one.
        device: of the tensors that were on the sender's.
    """
    return list(_decode(numbers, next(numbers), on_device, on_host, device))


def _decode(
    numbers: Iterator[int], count: int, on_device: FrameReader, on_host: FrameReader, device: torch.device
) -> Iterator[Any]:
    for _ in range(count):
        kind = next(numbers)
        if kind == _NONE:
            yield None
        elif kind == _BOOL:
            yield bool(next(numbers))
        elif kind == _INT:
            yield next(numbers)
        elif kind == _FLOAT:
            yield struct.unpack("<d", struct.pack("<q", next(numbers)))[0]
        elif kind == _TUPLE:
            yield tuple(_decode(numbers, next(numbers), on_device, on_host, device))
        else:
            dtype, requires_grad, dimensions = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
            shape = [next(numbers) for _ in range(dimensions)]
            stride = [next(numbers) for _ in range(dimensions)]
            tensor = (on_device if kind == _TENSOR else on_host).next(dtype, shape, stride)
            if kind == _TENSOR and device.type == "cuda":
                tensor = tensor.to(device, non_blocking=True)
            yield tensor.requires_grad_(requires_grad)
