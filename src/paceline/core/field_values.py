"""The values of a task's fields as JSON and as text: a run records them, and its processes read them again.

A value is written in the form that people would type (``"none"``, a path's text, an enum's name) if :func:`convert`
reads exactly that value from it; otherwise in a form that names its type: ``{"$type": "str", "value": "none"}``.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from paceline.core.errors import TaskError

_TYPE, _VALUE = "$type", "value"

_NAMED: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "path": Path,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda seconds: datetime.timedelta(seconds=float(seconds)),
    "list": lambda items: [_read_named(item) for item in items],
    "tuple": lambda items: tuple(_read_named(item) for item in items),
    "set": lambda items: {_read_named(item) for item in items},
    "frozenset": lambda items: frozenset(_read_named(item) for item in items),
    "dict": lambda items: {_read_named(key): _read_named(item) for key, item in items},
}
"""How a value is read that is written with the name of its type."""


def encode(value: Any, hint: Any, where: str) -> Any:
    """Return a value as JSON, from which :func:`convert` reads the same value.

    Args:
        value: a number, text, boolean, None, path, date, time, duration, member of an enum or dataclass, or a list,
            tuple, set or dict of them.
        hint: the field's type.
        where: the name of the field, for the error.

    Raises:
        TaskError: a run cannot record it.
    """
    for write in (_write, _write_named):
        written = write(value, where)
        try:
            read = convert(written, hint, where)
        except (TaskError, TypeError):
            continue
        if is_same(value, read):
            return written
    raise _unrecordable(value, where)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal, and of equal types throughout; NaN equals NaN."""
    if type(value) is not type(other) and not _is_number_of_type(value, type(other)):
        return False
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(other)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, Mapping):
        return is_same(list(value.items()), list(other.items()))
    if dataclasses.is_dataclass(value):
        return all(is_same(getattr(value, f.name), getattr(other, f.name)) for f in dataclasses.fields(value))
    return bool(value == other)


def _is_number_of_type(value: Any, kind: type) -> bool:
    """Return whether a value may stand for a number of another type: NumPy's float64 and an int for a float."""
    if isinstance(value, bool | enum.Enum):
        return False
    return isinstance(value, int | float) and (kind is float or (kind is int and isinstance(value, int)))


def _unrecordable(value: Any, where: str) -> TaskError:
    return TaskError(
        f"{where} is a {type(value).__name__}; fields must be numbers, strings, booleans, None, paths, dates, enums or "
        "dataclasses that their annotation names, or lists, tuples, sets and dicts of them, so that the run can record "
        "them."
    )


def _write(value: Any, where: str) -> Any:
    """Write a value as people would type it."""
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, list | tuple):
        return [_write(item, where) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_write(item, where) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(_write(key, where)): _write(item, where) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        return {
            f.name: encode(getattr(value, f.name), hints[f.name], f"{where}.{f.name}")
            for f in dataclasses.fields(value)
            if f.init
        }
    raise _unrecordable(value, where)


def _write_named(value: Any, where: str) -> Any:
    """Write a value with the name of its type."""
    content = _write(value, where)
    name = "none" if value is None else "path" if isinstance(value, PurePath) else type(value).__name__
    if isinstance(value, list | tuple):
        content = [_write_named(item, where) for item in value]
    elif isinstance(value, set | frozenset):
        content = sorted((_write_named(item, where) for item in value), key=repr)
    elif isinstance(value, Mapping):
        content = [[_write_named(key, where), _write_named(item, where)] for key, item in value.items()]
    elif isinstance(value, float):
        name = "float"
    return {_TYPE: name, _VALUE: content}


def _read_named(written: Mapping[str, Any]) -> Any:
    return _NAMED[written[_TYPE]](written[_VALUE])


def convert(value: Any, hint: Any, where: str) -> Any:
    """Convert text from the command line, or what :func:`encode` wrote, to the annotated type.

    Args:
        where: the name of the field or option, for the error.

    Raises:
        TaskError: it is not such a value.
    """
    if isinstance(value, Mapping) and value.get(_TYPE) in _NAMED:
        return _read_named(value)
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    is_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if is_none and (type(None) in options or hint is Any):
        return None
    for option in options:
        try:
            return _convert_to(value, option, where)
        except (ValueError, SyntaxError, TaskError):
            continue
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise TaskError(f"{where} must be {wanted}, but {value!r} was given.")


def _convert_to(value: Any, kind: Any, where: str) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        for choice in typing.get_args(kind):
            if value == choice or value == str(choice):
                return choice
        raise ValueError
    if origin is bool:
        if isinstance(value, bool):
            return value
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ValueError
    if origin is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    if origin is float:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    if origin is str:
        return str(value)
    if origin in (list, tuple, set, frozenset):
        items = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError
        arguments = [a for a in typing.get_args(kind) if a is not Ellipsis]
        kinds = arguments if len(arguments) == len(items) else arguments[:1] * len(items)
        return origin(convert(i, k, where) for i, k in zip(items, kinds, strict=True)) if kinds else origin(items)
    if origin is dict:
        entries = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(entries, Mapping):
            raise ValueError
        if not typing.get_args(kind):
            return dict(entries)
        key, item = typing.get_args(kind)
        return {convert(k, key, where): convert(v, item, where) for k, v in entries.items()}
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return _member(value, origin)
    if isinstance(origin, type) and issubclass(origin, PurePath):
        return origin(str(value))
    if origin in (datetime.datetime, datetime.date, datetime.time):
        return value if isinstance(value, origin) else origin.fromisoformat(str(value))
    if origin is datetime.timedelta:
        return datetime.timedelta(seconds=float(value))
    if dataclasses.is_dataclass(origin):
        return _build(value, origin, where)
    if kind is Any:
        return ast.literal_eval(value) if isinstance(value, str) else value
    raise ValueError


def _member(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Return the member of an enum by its name, or else by its value."""
    for member in kind:
        if value in (member.name, member):
            return member
    for member in kind:
        if value in (member.value, str(member.value)):
            return member
    raise ValueError


def _build(value: Any, kind: Any, where: str) -> Any:
    """Build a dataclass from the values of its fields."""
    entries = ast.literal_eval(value) if isinstance(value, str) else value
    hints = typing.get_type_hints(kind)
    if not isinstance(entries, Mapping) or not set(entries) <= {f.name for f in dataclasses.fields(kind) if f.init}:
        raise ValueError
    return kind(**{name: convert(item, hints[name], f"{where}.{name}") for name, item in entries.items()})
