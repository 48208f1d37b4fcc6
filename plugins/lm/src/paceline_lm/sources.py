"""``--data`` as it is typed: files, patterns and addresses of tokens or documents, and their weights."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.built_in import PARTS
from paceline.core.errors import CheckpointError, TaskError
from paceline.core.files import check_location, is_address
from paceline.core.plugins import import_object

_TOKENS, _STREAM = "bin:", "stream:"


@dataclass(frozen=True)
class Source:
    """A source of data.

    Attributes:
        place: a file, a pattern such as ``web-*.bin``, or an address of either.
        kind: ``bin:`` for files of tokens, ``stream:`` for documents that are not encoded first, empty for others.
    """

    place: str
    kind: str
    weight: float | None

    def __str__(self) -> str:
        weight = "" if self.weight is None else f"={self.weight!r}"
        return f"{self.kind}{self.place}{weight}"

    @property
    def is_tokens(self) -> bool:
        return self.kind == _TOKENS

    @property
    def is_stream(self) -> bool:
        return self.kind == _STREAM

    @property
    def name(self) -> str:
        """The last part of the place, for messages."""
        return self.place.rstrip("/").rpartition("/")[2]

    def files(self, option: str) -> list[Path]:
        """Return its files, by name; those of an address are downloaded, once on each node.

        Raises:
            TaskError: there is none, or the object store does not give it.
        """
        if is_address(self.place):
            check_location(self.place, option)
            download: Callable[[str], list[Path]] = import_object(PARTS["data"])
            try:
                return download(self.place)
            except CheckpointError as error:
                raise TaskError(f"{option} {self}: {error}") from error
        if glob.has_magic(self.place) and not Path(self.place).exists():
            files = sorted(Path(name) for name in glob.glob(self.place, recursive=True))
            if not files:
                raise TaskError(f"{option} {self}: no file matches this pattern.")
            return files
        return [Path(self.place)]


def parse_sources(value: str, option: str) -> tuple[Source, ...]:
    """Parse ``PLACE`` or ``PLACE=WEIGHT,PLACE=WEIGHT...``; places are made absolute.

    Raises:
        TaskError: a source has no weight, or one that is not a positive number; or tokens are mixed with documents.
    """
    parts = [value] if Path(_without_kind(value)).exists() else value.split(",")
    if len(parts) == 1 and not re.search(r"=[\d.]+$", value):
        return (_source(value, None),)
    sources = []
    for part in parts:
        place, _, text = part.strip().rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not place or not 0 < weight < math.inf:
            raise TaskError(
                f"{option}: {part.strip()!r} has no weight above 0. Write each source of a mixture with its share of "
                "the tokens, as in bin:web.bin=0.7,bin:code.bin=0.3"
            )
        sources.append(_source(place, weight))
    if len({source.kind for source in sources}) > 1:
        raise TaskError(f"{option} mixes files of tokens (bin:), documents or streams (stream:). Use one kind.")
    if len({source.place for source in sources}) < len(sources):
        raise TaskError(f"{option} names a source twice. Give it one weight.")
    return tuple(sources)


def _source(place: str, weight: float | None) -> Source:
    kind, place = place.removesuffix(_without_kind(place)), _without_kind(place)
    # Recorded, and so found if the run continues from another directory.
    return Source(place if is_address(place) else str(Path(place).absolute()), kind, weight)


def _without_kind(place: str) -> str:
    return place.removeprefix(_TOKENS if place.startswith(_TOKENS) else _STREAM)


def parse_tokens(value: int | str) -> int:
    """Parse a number of tokens, such as ``20B``.

    Raises:
        TaskError: it is not a positive number with K, M, B or T, or without.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", str(value).strip().upper().replace("_", ""))
    tokens = round(float(found[1]) * 1000 ** " KMBT".index(found[2] or " ")) if found else 0
    if tokens < 1:
        raise TaskError(f"--tokens {value}: give a number of tokens, such as 500M or 20B.")
    return tokens
