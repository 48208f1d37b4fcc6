"""Messages between the server and its replicas: a JSON header and raw arrays, over a socket pair.

A frame is::

    uint32 length of the header, uint64 length of the arrays, header (JSON), arrays

The header's ``tensors`` gives each array's name, dtype and shape. Nothing in a frame can run code.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline_serving.model import Array, Arrays

LENGTHS = struct.Struct("!IQ")
_NO_ARRAYS: dict[str, Array] = {}


def encode(header: Mapping[str, Any], arrays: Arrays | None = None) -> list[bytes | memoryview]:
    """Return the pieces of a frame, to be written in order; contiguous arrays are not copied."""
    pieces: list[bytes | memoryview] = []
    tensors = []
    for name, array in (arrays or _NO_ARRAYS).items():
        whole = np.ascontiguousarray(array)
        tensors.append((name, whole.dtype.name, array.shape))
        pieces.append(whole.reshape(-1).view(np.uint8).data)
    text = json.dumps({**header, "tensors": tensors}).encode()
    return [LENGTHS.pack(len(text), sum(map(len, pieces))) + text, *pieces]


def decode(text: bytes, payload: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return a frame's header and arrays, which are views of ``payload``."""
    header: dict[str, Any] = json.loads(text)
    arrays: dict[str, Array] = {}
    offset = 0
    for name, dtype_name, shape in header.pop("tensors"):
        dtype = np.dtype(dtype_name)
        count = math.prod(shape)
        arrays[name] = np.frombuffer(payload, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return header, arrays


def send(channel: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a frame to a blocking socket."""
    for piece in pieces:
        channel.sendall(piece)


def receive(channel: socket.socket) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """Read a frame from a blocking socket; None if the peer has closed it."""
    lengths = _read(channel, LENGTHS.size)
    if lengths is None:
        return None
    text_length, payload_length = LENGTHS.unpack(lengths)
    text = _read(channel, text_length)
    payload = _read(channel, payload_length)
    if text is None or payload is None:
        return None
    return decode(bytes(text), payload)


def _read(channel: socket.socket, length: int) -> bytearray | None:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return content
