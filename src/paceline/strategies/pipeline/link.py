"""What goes from stage to stage: tensors and numbers, of shapes that the receiver does not know before."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch._prims_common import is_non_overlapping_and_dense_or_false

from paceline.distributed.world import World, lost_peers_reported
from paceline.errors import TaskError

_HEADER = 256  # int64 numbers in front of every message: room for some twenty tensors
_NONE, _TENSOR, _BOOL, _INT, _FLOAT, _TUPLE = range(6)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


class Link:
    """Messages between the ranks that hold one copy of the model, each by its stage's place in it.

    Sending does not wait. On a GPU, tensors go through host memory.

    Args:
        world: those ranks, in the order of their stages.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._on_the_way: list[tuple[dist.Work, torch.Tensor]] = []
        self._inside = False

    def send(self, values: Sequence[Any], to: int, tag: int) -> None:
        """Send tensors, numbers, None, or tuples of these.

        Raises:
            TaskError: a value is none of them.
            PeerLostError: the other rank is gone.
        """
        numbers: list[int] = []
        tensors: list[torch.Tensor] = []
        for value in values:
            _encode(value, numbers, tensors)
        if len(numbers) >= _HEADER:
            raise TaskError(
                f"a stage gives {len(values)} values to the next, more than a message can describe. Have the "
                "model cut where fewer are needed: pipeline_blocks in the task, or --pp-split with numbers."
            )
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: len(numbers) + 1] = torch.tensor([len(values), *numbers])
        with lost_peers_reported():
            self._on_the_way = [(w, t) for w, t in self._on_the_way if not w.is_completed()]
            for tensor in (header, *tensors):
                work = dist.isend(tensor, group=self.world.group, group_dst=to, tag=tag)
                assert work is not None
                self._on_the_way.append((work, tensor))

    def receive(self, source: int, tag: int) -> list[Any]:
        """Wait for a message; tensors that required a gradient are leaves that do.

        Raises:
            PeerLostError: the other rank is gone.
        """
        activity = self.world.activity
        activity.enter("pipeline")
        with lost_peers_reported():
            header = torch.empty(_HEADER, dtype=torch.int64)
            dist.recv(header, group=self.world.group, group_src=source, tag=tag)
            numbers = iter(header.tolist())
            count = next(numbers)
            values = [self._decode(numbers, source, tag) for _ in range(count)]
        # The ranks of a pipeline take part in one exchange, of which they go in and out.
        activity.step_out()
        return values

    def finish(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            PeerLostError: another rank is gone.
        """
        activity = self.world.activity
        activity.enter("pipeline")
        with lost_peers_reported():
            for work, _ in self._on_the_way:
                work.wait()
        self._on_the_way.clear()
        activity.leave()

    def _decode(self, numbers: Any, source: int, tag: int) -> Any:
        kind = next(numbers)
        if kind == _NONE:
            return None
        if kind == _BOOL:
            return bool(next(numbers))
        if kind == _INT:
            return next(numbers)
        if kind == _FLOAT:
            return struct.unpack("<d", struct.pack("<q", next(numbers)))[0]
        if kind == _TUPLE:
            return tuple(self._decode(numbers, source, tag) for _ in range(next(numbers)))
        dtype, requires_grad, dimensions = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        shape = [next(numbers) for _ in range(dimensions)]
        stride = [next(numbers) for _ in range(dimensions)]
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        if flat.numel():
            dist.recv(flat, group=self.world.group, group_src=source, tag=tag)
        tensor = flat.to(self.world.device).as_strided(shape, stride)
        return tensor.requires_grad_(requires_grad)


def _encode(value: Any, numbers: list[int], tensors: list[torch.Tensor]) -> None:
    if value is None:
        numbers.append(_NONE)
    elif isinstance(value, torch.Tensor):
        # In its own order of memory, on which a kernel's choice, and so its bits, may depend.
        dense = (
            value.detach() if is_non_overlapping_and_dense_or_false(value) else value.detach().contiguous()
        )
        numbers += [_TENSOR, _DTYPES.index(value.dtype), int(value.requires_grad), value.dim()]
        numbers += [*value.shape, *dense.stride()]
        if value.numel():
            tensors.append(dense.as_strided((dense.numel(),), (1,)).cpu())
    elif isinstance(value, bool):
        numbers += [_BOOL, int(value)]
    elif isinstance(value, int):
        numbers += [_INT, value]
    elif isinstance(value, float):
        numbers += [_FLOAT, struct.unpack("<q", struct.pack("<d", value))[0]]
    elif isinstance(value, tuple):
        numbers += [_TUPLE, len(value)]
        for part in value:
            _encode(part, numbers, tensors)
    else:
        raise TaskError(
            f"a stage cannot give a {type(value).__name__} to the next: only tensors, numbers, None and "
            "tuples of them. Name the parts of the model in the task: def pipeline_blocks(self, model)."
        )
