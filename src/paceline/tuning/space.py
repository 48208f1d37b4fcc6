"""What is searched: ``lr=log:1e-3:1``, and the parameters of each trial.

Trial k's parameters follow from the seed and k alone, so that a search which goes on after a kill means the
same trials. Where there are only so many combinations, they come in a shuffled order, and none comes twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.errors import ConfigError

Value = float | int | str
Kind = Literal["log", "uniform", "int", "choice"]

FORMS = "NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or NAME=choice:A,B,C"
_MOST_LISTED = 100_000
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """One field of the task, and what values it may have.

    Attributes:
        field: its name.
        kind: how a value is drawn; "log" is uniform in the logarithm.
        values: the lowest and the highest value; with "choice" all of them, as text.
    """

    field: str
    kind: Kind
    values: tuple[Value, ...]

    @property
    def options(self) -> Sequence[Value] | None:
        """All values, where they can be counted."""
        if self.kind == "choice":
            return self.values
        return range(int(self.values[0]), int(self.values[1]) + 1) if self.kind == "int" else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value of a range."""
        return float(self.values[0]), float(self.values[1])

    def draw(self, random_number: random.Random) -> Value:
        """A value; floats have four significant digits, so that a person can copy them."""
        if self.options is not None:
            return random_number.choice(self.options)
        low, high = self.bounds
        if self.kind == "log":
            drawn = math.exp(random_number.uniform(math.log(low), math.log(high)))
        else:
            drawn = random_number.uniform(low, high)
        return min(max(float(f"{drawn:.{_DIGITS}g}"), low), high)


@dataclass(frozen=True)
class Space:
    """All dimensions of a search, and what decides the order in which values come.

    Attributes:
        dimensions: at least one.
        seed: decides what is drawn.
    """

    dimensions: tuple[Dimension, ...]
    seed: int

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where they cannot be counted."""
        counts = [None if d.options is None else len(d.options) for d in self.dimensions]
        return math.prod(count for count in counts if count is not None) if None not in counts else None

    @cached_property
    def _order(self) -> Sequence[int] | None:
        """The numbers of all combinations, shuffled."""
        if self.size is None or self.size > _MOST_LISTED:
            return None
        order = list(range(self.size))
        random.Random(f"{self.seed}").shuffle(order)
        return order

    def parameters(self, number: int) -> dict[str, Value]:
        """The parameters of a trial, by field.

        Args:
            number: from 0; below ``size`` where there is one.
        """
        if self._order is None:
            return {
                d.field: d.draw(random.Random(f"{self.seed}/{number}/{d.field}")) for d in self.dimensions
            }
        rest, chosen = self._order[number], {}
        for dimension in self.dimensions:
            assert dimension.options is not None
            rest, place = divmod(rest, len(dimension.options))
            chosen[dimension.field] = dimension.options[place]
        return chosen


def parse_space(texts: Sequence[str], seed: int) -> Space:
    """Read what ``--search`` says.

    Raises:
        ConfigError: one of the texts has another form, or a field comes twice.
    """
    if not texts:
        raise ConfigError(f"there is nothing to search. Say what: --search {FORMS}.")
    dimensions = tuple(map(_parse, texts))
    names = [dimension.field for dimension in dimensions]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--search names {', '.join(twice)} twice. Give each field one range.")
    return Space(dimensions, seed)


def _parse(text: str) -> Dimension:
    field, _, how = text.partition("=")
    kind, _, rest = how.partition(":")
    if not field.strip().isidentifier():
        raise ConfigError(f"--search {text!r}: write {FORMS}.")
    match kind.strip():
        case "choice":
            values = tuple(word.strip() for word in rest.split(","))
            if "" in values or len(set(values)) < len(values):
                raise ConfigError(f"--search {text!r}: list different values, such as {field}=choice:32,64.")
            return Dimension(field.strip(), "choice", values)
        case "log" | "uniform" as chosen:
            low, high = _bounds(text, rest, float)
            if chosen == "log" and float(low) <= 0:
                raise ConfigError(f"--search {text!r}: a logarithmic range must begin above 0.")
            return Dimension(field.strip(), chosen, (low, high))
        case "int":
            return Dimension(field.strip(), "int", _bounds(text, rest, int))
    raise ConfigError(f"--search {text!r}: there is no kind {kind.strip()!r}. Write {FORMS}.")


def _bounds(text: str, rest: str, number: type[float] | type[int]) -> tuple[Value, Value]:
    low_text, separator, high_text = rest.partition(":")
    try:
        low, high = number(low_text), number(high_text)
    except ValueError:
        low, high = math.nan, math.nan
    if not separator or not (math.isfinite(low) and math.isfinite(high) and low < high):
        what = "whole numbers" if number is int else "numbers"
        raise ConfigError(f"--search {text!r}: give two {what}, LOW:HIGH, the lower one first.")
    return low, high


def assignments(parameters: Mapping[str, Value]) -> tuple[str, ...]:
    """Parameters as ``--set`` takes them."""
    return tuple(f"{name}={value}" for name, value in parameters.items())
