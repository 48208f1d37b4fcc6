"""Answers to inference requests, in JSON or with binary tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from paceline.serving.datatypes import DATATYPES
from paceline.serving.infer_request import InferRequest
from paceline.serving.servable import Array, Arrays, ModelSpec

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")


def build_response(spec: ModelSpec, request: InferRequest, outputs: Arrays) -> tuple[Headers, bytes]:
    """The headers and the body of an answer. In JSON, NaN and infinities are null: JSON has none."""
    entries = []
    binary: list[bytes] = []
    for name, in_binary in request.outputs.items():
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": array.shape}
        if in_binary:
            content = _bytes_of(array)
            binary.append(content)
            entry["parameters"] = {"binary_data_size": len(content)}
        else:
            entry["data"] = np.ascontiguousarray(array).reshape(-1)
        entries.append(entry)
    document = {"model_name": spec.name, "model_version": spec.version, "outputs": entries}
    if request.id is not None:
        document["id"] = request.id
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary:
        return [JSON_TYPE], header
    length = str(len(header)).encode()
    headers = [(b"content-type", b"application/octet-stream"), (b"inference-header-content-length", length)]
    return headers, b"".join((header, *binary))


def _bytes_of(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
