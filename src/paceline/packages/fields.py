"""Fields of a JSON document from somewhere else, taken out one by one and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from paceline.errors import PackageError

_MAX_TEXT = 65_536


class Fields:
    """The fields of a JSON object; each is taken once, and none may be left over.

    Args:
        document: what should be a JSON object.
        where: its place in the whole, for messages.

    Raises:
        PackageError: it is none; all methods raise it where a value is not what it must be.
    """

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise PackageError(f"{where} must be a JSON object, but is {document!r:.80}")
        self._left: dict[str, Any] = dict(document)
        self._where = where

    def take(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self._left:
            raise PackageError(f"{self._where} has no field {name!r}")
        return self._left.pop(name)

    def text(self, name: str) -> str:
        """A text of at most 65,536 characters."""
        return _text(self.take(name), f"{self._where}.{name}")

    def optional_text(self, name: str) -> str | None:
        """A text or null."""
        value = self.take(name)
        return None if value is None else _text(value, f"{self._where}.{name}")

    def count(self, name: str) -> int:
        """A whole number from 0."""
        value = self.take(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise PackageError(
                f"{self._where}.{name} must be an integer from 0 to 2**63 - 1, but is {value!r:.80}"
            )
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        return _number(self.take(name), f"{self._where}.{name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(_text(item, f"{self._where}.{name}") for item in self.items(name))

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise PackageError(f"{self._where}.{name} must be a list, but is {value!r:.80}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object with any content."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise PackageError(f"{self._where}.{name} must be a JSON object, but is {value!r:.80}")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """Finite numbers by name."""
        return {key: _number(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def named_texts(self, name: str) -> dict[str, str]:
        """Texts by name."""
        return {key: _text(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def end(self) -> None:
        """Refuse what is left over."""
        if self._left:
            raise PackageError(f"{self._where} has an unknown field {min(self._left)!r:.80}")


def parse_object(content: bytes, where: str) -> Fields:
    """The fields of a JSON object: no NaN, no key twice, no nesting beyond Python's stack.

    Raises:
        PackageError: it is not such JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise PackageError(f"{where} holds {constant}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise PackageError(f"{where} holds a key twice")
        return mapping

    try:
        return Fields(json.loads(content, parse_constant=refuse, object_pairs_hook=unique), where)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{where} is not JSON: {error}") from error


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """The one text of a document."""
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise PackageError(
            f"{where} must be a text of at most {_MAX_TEXT:,} characters, but is {value!r:.80}"
        )
    return value


def _number(value: Any, where: str) -> float:
    # An integer too large for a float would raise at the first use of it.
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise PackageError(f"{where} must be a number, but is {value!r:.80}")
    return value if isinstance(value, float) else float(value)
