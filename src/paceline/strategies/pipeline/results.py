"""What a model returns, for the ranks that did not compute it: its tensors, and a description of the rest."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from paceline.errors import TaskError


def pack(result: Any) -> list[Any]:
    """A description, as bytes, and the tensors, numbers and None that it names.

    Args:
        result: of tensors, numbers, texts and None: tuples, lists, dicts, named tuples, dataclasses.

    Raises:
        TaskError: there is something else in it.
    """
    leaves: list[Any] = []
    content = json.dumps(_describe(result, leaves)).encode()
    return [torch.frombuffer(bytearray(content), dtype=torch.uint8), *leaves]


def unpack(values: Iterator[Any]) -> Any:
    """The result again.

    Args:
        values: what :func:`pack` gave; nothing that comes after it is taken.

    Raises:
        TaskError: a class that it names is not imported here.
    """
    return _rebuild(json.loads(bytes(next(values).cpu().numpy())), values)


def _describe(value: Any, leaves: list[Any]) -> Any:
    """None for a leaf, else what it is and its parts."""
    if value is None or isinstance(value, torch.Tensor | bool | int | float):
        leaves.append(value)
        return None
    if isinstance(value, str):
        return ["text", value]
    named = _fields(value)
    if named is not None:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if _imported(name) is not type(value):
            raise _unknown(value)
        return [name, [[key, _describe(part, leaves)] for key, part in named.items()]]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_describe(part, leaves) for part in value]]
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return ["dict", [[key, _describe(part, leaves)] for key, part in value.items()]]
    raise _unknown(value)


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
    found = _imported(kind)
    if found is None:
        raise TaskError(
            f"the model returns a {kind.replace(':', '.')}, and not every rank of the pipeline has imported "
            "that. Import it at the top of the task's file."
        )
    return found(**items)


def _fields(value: Any) -> dict[str, Any] | None:
    """The parts of a dataclass or named tuple, by name; None of anything else."""
    if not _has_fields(type(value)):
        return None
    if isinstance(value, dict):
        return dict(value)  # Hugging Face's ModelOutput: what is None is no item of it
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def _imported(name: str) -> Any:
    """The class, if its module is imported and it is one that only holds values: nothing else is called."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and _has_fields(found) else None


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _unknown(value: Any) -> TaskError:
    return TaskError(
        f"the model returns a {type(value).__name__}, and a pipeline's last stage cannot give that to the "
        "other ranks: only tensors, numbers, texts and None, in tuples, lists, dicts, and named tuples and "
        "dataclasses that a module defines at its top. Have the model return those."
    )
