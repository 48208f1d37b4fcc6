"""Rows to predict from files: pictures, arrays, CSV and JSON."""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError, DataError
from paceline.inference import TensorSpec
from paceline.serving.servable import Array, ModelSpec, rows_of

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class Rows:
    """What to predict.

    Attributes:
        arrays: by the model's input, rows first; a large ``.npy`` stays on the disk until it is read.
        names: of the rows, for people.
    """

    arrays: Mapping[str, Array]
    names: Sequence[str]


def read_rows(paths: Sequence[Path], spec: ModelSpec) -> Rows:
    """Read files, whose rows follow one another, and check them against the model's inputs.

    Raises:
        DataError: a file cannot be read, or does not fit; says what the model takes.
    """
    if not paths:
        raise ConfigError("nothing to predict was given: name images, or .npy, .npz, .csv or .json files.")
    found = [_read(path, spec) for path in paths]
    names = [
        path.name if arrays_rows == 1 else f"{path.name}[{i}]"
        for path, arrays in zip(paths, found, strict=True)
        for arrays_rows in [rows_of(arrays)]
        for i in range(arrays_rows)
    ]
    if len(found) == 1:
        return Rows(found[0], names)
    return Rows({name: np.concatenate([arrays[name] for arrays in found]) for name in spec.inputs}, names)


def _read(path: Path, spec: ModelSpec) -> dict[str, Array]:
    kind = path.suffix.lower()
    try:
        if kind in _PICTURES:
            raw: Any = {_only_input(spec, path): _picture(path, spec)}
        elif kind == ".npy":
            raw = {_only_input(spec, path): np.load(path, mmap_mode="r", allow_pickle=False)}
        elif kind == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                raw = {name: archive[name] for name in archive.files}
        elif kind == ".csv":
            raw = {_only_input(spec, path): _csv(path)}
        elif kind == ".json":
            document = json.loads(path.read_bytes())
            raw = document if isinstance(document, dict) else {_only_input(spec, path): document}
        else:
            known = ", ".join((*_PICTURES, ".npy", ".npz", ".csv", ".json"))
            raise DataError(
                f"{path}: what is in a {kind or 'file without an ending'} is not known; these are: {known}."
            )
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return _conform(path, raw, spec)


def _only_input(spec: ModelSpec, path: Path) -> str:
    if len(spec.inputs) != 1:
        raise DataError(
            f"{path}: {spec.name} has the inputs {', '.join(spec.inputs)}; "
            "give them by name, as .npz or a JSON object."
        )
    return next(iter(spec.inputs))


def _picture(path: Path, spec: ModelSpec) -> Array:
    """One picture as the model's only input has it: (1, C, H, W), (1, H, W, C) or (1, H, W), uint8."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"{path}: pictures take Pillow: pip install pillow ({error})") from error
    tensor = spec.inputs[_only_input(spec, path)]
    shape = tensor.shape
    first = len(shape) == 3 and shape[0] in _CHANNELS
    sizes = shape[1:] if first else shape[:2]
    channels = 1 if len(shape) == 2 else shape[0] if first else shape[-1]
    if tensor.dtype != "uint8" or len(shape) not in (2, 3) or channels not in _CHANNELS:
        raise DataError(f"{path}: {spec.name} takes {_said(tensor)}, which is no picture.")
    with Image.open(path) as picture:
        height, width = (
            want if want is not None else has for want, has in zip(sizes, picture.size[::-1], strict=True)
        )
        converted = picture.convert(_CHANNELS[channels]).resize((width, height))
    pixels = np.asarray(converted, np.uint8).reshape(height, width, channels)
    if first:
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels[..., 0] if len(shape) == 2 else pixels)[np.newaxis]


def _csv(path: Path) -> Array:
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file) if line]
    if lines and not _is_number(lines[0][0]):  # a heading
        del lines[0]
    values = np.asarray([[float(cell) for cell in line] for line in lines])
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _conform(path: Path, raw: Mapping[str, Any], spec: ModelSpec) -> dict[str, Array]:
    """The model's inputs, of its types and shapes; flat rows are brought into shape."""
    if raw.keys() != spec.inputs.keys():
        raise DataError(
            f"{path} has {', '.join(raw) or 'nothing'}; {spec.name} takes {', '.join(spec.inputs)}."
        )
    arrays = {
        name: _fit(path, name, np.asanyarray(raw[name]), tensor) for name, tensor in spec.inputs.items()
    }
    if len({len(array) for array in arrays.values()}) != 1:
        raise DataError(f"{path}: its arrays have different numbers of rows.")
    if rows_of(arrays) == 0:
        raise DataError(f"{path} has no rows.")
    return arrays


def _fit(path: Path, name: str, array: Array, tensor: TensorSpec) -> Array:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} is not all numbers, or its rows differ in length.")
    sizes = tensor.shape
    if array.ndim == 2 and None not in sizes and array.shape[1] == math.prod(size or 0 for size in sizes):
        array = array.reshape(len(array), *(size for size in sizes if size is not None))
    fits = array.ndim == 1 + len(sizes) and all(
        want in (None, has) for want, has in zip(sizes, array.shape[1:], strict=True)
    )
    if not fits:
        raise DataError(f"{path}: {name} has the shape {array.shape}; {_said(tensor)} is taken.")
    if array.dtype == np.dtype(tensor.dtype):
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(tensor.dtype)
    if np.dtype(tensor.dtype).kind in "biu" and not (converted == array).all():
        raise DataError(f"{path}: {name} holds numbers that are not {tensor.dtype}.")
    return converted


def _said(tensor: TensorSpec) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in tensor.shape)
    return f"{tensor.dtype} of (rows, {sizes})" if sizes else f"{tensor.dtype} of (rows,)"
