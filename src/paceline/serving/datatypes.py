"""The protocol's names of data types, and torch's and numpy's."""

from __future__ import annotations

# By torch's name, which is numpy's too. https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
