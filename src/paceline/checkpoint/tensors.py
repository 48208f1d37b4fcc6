"""Tensors in the safetensors format, with one copy between the model and the file.

``safetensors.torch.save_file`` would copy the tensors a second time, or hold them while training
changes them. Here the snapshot's buffer *is* the file's data section, so that it can be hashed and
written as it lies. The format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import CheckpointError

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The format's name of each dtype that can be saved."""

_FILE_ALIGNMENT = 64  # bytes; each file's data starts on a cache line of the shared buffer


@dataclass(frozen=True)
class _Slot:
    """Where one tensor lies in the buffer; the data is row-major."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size


class Snapshot:
    """A copy of named tensors in one CPU buffer, which is kept and filled again by the next capture."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, str, torch.dtype, torch.Size, str]] = []
        self._files: dict[str, tuple[bytes, int, int]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def capture(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of each file (file name -> tensor name -> tensor); done when it returns.

        Raises:
            CheckpointError: there is not enough memory for the copy.
        """
        layout = [
            (file, name, tensor.dtype, tensor.shape, tensor.device.type)
            for file, tensors in files.items()
            for name, tensor in tensors.items()
        ]
        if layout != self._layout:
            self._allocate(files)
            self._layout = layout
        sources = [tensor for tensors in files.values() for tensor in tensors.values()]
        if not sources:
            return
        with torch.no_grad():
            torch._foreach_copy_(self._views, sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def contents(self) -> Iterator[tuple[str, tuple[bytes, memoryview]]]:
        """Each file's name, and its header and data; they are valid until the next capture."""
        data = self._buffer.numpy().data
        for file, (header, start, stop) in self._files.items():
            yield file, (header, data[start:stop])

    def _allocate(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        # The old buffer goes first: two would be a second copy of the model.
        self._layout, self._views, self._files = [], [], {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        slots: list[_Slot] = []
        offset = 0
        for file, tensors in files.items():
            file_slots = _arrange(tensors, offset)
            stop = max((slot.stop for slot in file_slots.values()), default=offset)
            self._files[file] = (_header(file_slots, offset), offset, stop)
            slots.extend(file_slots[name] for name in tensors)
            offset = -(-stop // _FILE_ALIGNMENT) * _FILE_ALIGNMENT
        devices = {tensor.device.type for tensor in chain(*(tensors.values() for tensors in files.values()))}
        try:
            # Only copies into page-locked memory are asynchronous, and so overlap one another.
            self._buffer = torch.empty(offset, dtype=torch.uint8, pin_memory="cuda" in devices)
        except RuntimeError as error:
            raise CheckpointError(
                f"no memory for a snapshot of {offset / 2**20:.0f} MiB: {str(error).splitlines()[0]}"
            ) from error
        self._views = [
            self._buffer[slot.start : slot.stop].view(slot.dtype).view(slot.shape) for slot in slots
        ]


def _arrange(tensors: Mapping[str, Tensor], start: int) -> dict[str, _Slot]:
    """Give each tensor its place: widest dtypes first, so that each is aligned without holes."""
    slots = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        slots[name] = _Slot(start, stop, tensor.dtype, tensor.shape)
        start = stop
    return slots


def _header(slots: Mapping[str, _Slot], base: int) -> bytes:
    entries = {
        name: {
            "dtype": SAFETENSORS_DTYPES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.start - base, slot.stop - base],
        }
        for name, slot in slots.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file, on the CPU, in memory of their own.

    Raises:
        CheckpointError: the content is not safetensors.
    """
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"not a safetensors file: {error}") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values as bytes, row-major, whatever its device and memory format."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
