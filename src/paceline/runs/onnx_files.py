"""The files that an ONNX model names.

onnxruntime looks for them in the current directory when it is given a model's bytes, so an untrusted model
could return any file there as its weights. The format: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. The
onnx package, which also parses it, is not needed to serve a model.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.errors import PackageError

_CHILDREN = {  # message -> field number -> the message in it, as far as it leads to a tensor
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Tensor": {13: "Entry"},
}
_WEIGHT = ("Model", "Graph", "Tensor", "Entry")
_DEPTH = len(_WEIGHT)  # of a place that is kept, one more than needed
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # https://protobuf.dev/programming-guides/encoding


def external_files(model: bytes) -> frozenset[str]:
    """Return the files from which a model takes its weights.

    Raises:
        PackageError: the bytes are not an ONNX model, or it takes other values from files, which onnxruntime cannot be
            given in memory.
    """
    names = set()
    remaining: list[tuple[tuple[str, ...], memoryview]] = [(("Model",), memoryview(model))]
    try:
        while remaining:
            path, message = remaining.pop()
            children = _CHILDREN.get(path[-1], {})
            texts = {}
            for field, content in _fields(message):
                if field in children:
                    remaining.append(((*path[-_DEPTH:], children[field]), content))
                elif path[-1] == "Entry":
                    texts[field] = str(content, "utf-8")
            if texts.get(1) == "location":
                if path != _WEIGHT:
                    raise PackageError(
                        f"the ONNX program takes a constant from the file {texts.get(2, '')!r:.80}, which only its "
                        "weights may be taken from. Export the run again, or use another program."
                    )
                names.add(texts.get(2, ""))
    except (IndexError, UnicodeDecodeError):
        raise PackageError("the ONNX program is damaged. Export the run again, or use another program.") from None
    return frozenset(names)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the content of each field of bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _varint(message, position)
            continue
        if wire_type == _BYTES:
            size, position = _varint(message, position)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise IndexError  # groups, which ONNX does not have
        if position + size > len(message):
            raise IndexError
        if wire_type == _BYTES:
            yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = shift = 0
    while shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
        shift += 7
    raise IndexError
