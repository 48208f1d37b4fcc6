"""Search spaces: ``lr=log:1e-3:1``, ``momentum=uniform:0:0.9 if optimizer=sgd``, and constraints."""

from __future__ import annotations

import ast
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from paceline.core.errors import ConfigError

# A configuration's parameters depend only on the seed and its number, so a resumed search has the same ones. A
# finite number of combinations is tried in a shuffled order, each once.


Value = float | int | str | bool | None
Parameters = Mapping[str, Value]
Kind = Literal["log", "uniform", "int", "log-int", "choice"]

FORMS = "NAME=log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, log-int:LOW:HIGH or choice:A,B,C"
_MAX_LISTED = 100_000
_MAX_DRAWS = 1000
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """A field of the task, or an option of ``paceline train``, with its possible values.

    Attributes:
        kind: the distribution; "log" and "log-int" are uniform in the logarithm.
        values: the lowest and the highest value; with "choice" all values.
        parent: the dimension that decides whether this one applies, if there is one.
    """

    name: str
    kind: Kind
    values: tuple[Value, ...]
    parent: str | None = None
    parent_values: tuple[Value, ...] = ()

    @property
    def options(self) -> Sequence[Value] | None:
        if self.kind == "choice":
            return self.values
        return range(int(self.bounds[0]), int(self.bounds[1]) + 1) if self.kind == "int" else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest value of a range."""
        low, high = self.values
        assert low is not None
        assert high is not None
        return float(low), float(high)

    def applies(self, parameters: Parameters) -> bool:
        return self.parent is None or (self.parent in parameters and parameters[self.parent] in self.parent_values)

    def draw(self, random_number: random.Random) -> Value:
        if self.options is not None:
            return random_number.choice(self.options)
        low, high = self.bounds
        if self.kind == "uniform":
            return self.round(random_number.uniform(low, high))
        if self.kind == "log":
            return self.round(math.exp(random_number.uniform(math.log(low), math.log(high))))
        # Each whole number has the part of the logarithmic scale that is nearest to it.
        return self.round(math.exp(random_number.uniform(math.log(low - 0.5), math.log(high + 0.5))))

    def round(self, value: float) -> float | int:
        """Round a number to four significant digits, which are easy to copy, or to a whole number."""
        low, high = self.bounds
        if self.kind == "log-int":
            return int(min(max(round(value), low), high))
        return min(max(float(f"{value:.{_DIGITS}g}"), low), high)


@dataclass(frozen=True)
class Space:
    """All dimensions of a search; ``seed`` decides the drawn values and their order."""

    dimensions: tuple[Dimension, ...]
    seed: int
    constraints: tuple[Constraint, ...] = ()

    @property
    def size(self) -> int | None:
        """The number of different configurations; None if they are not countable, or too many."""
        return None if self._order is None else len(self._order)

    @cached_property
    def _order(self) -> Sequence[int] | None:
        """Return the numbers of all different configurations in a shuffled order."""
        counts = [None if d.options is None else len(d.options) for d in self.dimensions]
        product = math.prod(count for count in counts if count is not None)
        if None in counts or product > _MAX_LISTED:
            return None
        order = list(range(product))
        random.Random(f"{self.seed}").shuffle(order)
        if not self.constraints and all(dimension.parent is None for dimension in self.dimensions):
            return order
        # Configurations that differ only in what does not apply are one.
        different: dict[tuple[tuple[str, Value], ...], int] = {}
        for number in order:
            if self.allows(parameters := self._combine(number)):
                different.setdefault(tuple(parameters.items()), number)
        return list(different.values())

    def _combine(self, number: int) -> dict[str, Value]:
        parameters: dict[str, Value] = {}
        for dimension in self.dimensions:
            assert dimension.options is not None
            number, index = divmod(number, len(dimension.options))
            if dimension.applies(parameters):
                parameters[dimension.name] = dimension.options[index]
        return parameters

    def allows(self, parameters: Parameters) -> bool:
        return all(constraint.holds(parameters) for constraint in self.constraints)

    def parameters(self, number: int) -> dict[str, Value]:
        """Return the parameters of configuration ``number``, by name."""
        if self._order is not None:
            if not self._order:
                raise ConfigError(f"no configuration satisfies {self._constraint_flags}. Relax one of them.")
            return self._combine(self._order[number])
        for attempt in range(_MAX_DRAWS):
            key = f"{self.seed}/{number}" if attempt == 0 else f"{self.seed}/{number}.{attempt}"
            parameters: dict[str, Value] = {}
            for dimension in self.dimensions:
                if dimension.applies(parameters):
                    parameters[dimension.name] = dimension.draw(random.Random(f"{key}/{dimension.name}"))
            if self.allows(parameters):
                return parameters
        raise ConfigError(
            f"of {_MAX_DRAWS} drawn configurations none satisfies {self._constraint_flags}. Relax them, or narrow the "
            "ranges of --search."
        )

    @property
    def _constraint_flags(self) -> str:
        return ", ".join(f"--constraint {constraint.text!r}" for constraint in self.constraints)


def parse_space(
    texts: Sequence[str],
    seed: int,
    *,
    constraints: Sequence[str] = (),
    choices: Mapping[str, Sequence[Value]] | None = None,
) -> Space:
    """Parse ``--search`` and ``--constraint``.

    Args:
        choices: the values of choices with their types, by name; default: as text.

    Raises:
        ConfigError: a text has another form, or a name occurs twice.
    """
    dimensions: dict[str, Dimension] = {}
    given: dict[str, Sequence[str]] = {}
    for text in texts:
        what, _, condition = text.partition(" if ")
        dimension, words = _parse(what.strip(), text)
        name = dimension.name
        if name in dimensions:
            raise ConfigError(f"--search contains {name} twice. Give each field one range.")
        values = tuple((choices or {}).get(name, ()))
        parent, parent_values = _parse_condition(condition, text, dimensions, given) if condition else (None, ())
        given[name] = words
        values = values if values and len(values) == len(words) else dimension.values
        dimensions[name] = Dimension(name, dimension.kind, values, parent, parent_values)
    # Without dimensions, the task will declare some.
    parsed = tuple(parse_constraint(each, dimensions) for each in constraints) if dimensions else ()
    return Space(tuple(dimensions.values()), seed, parsed)


def _parse(text: str, whole: str) -> tuple[Dimension, Sequence[str]]:
    """Parse a dimension without its condition; return it, and its choices as text."""
    name, _, distribution = text.partition("=")
    kind, _, rest = distribution.partition(":")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"--search {whole!r} must be {FORMS}.")
    match kind.strip():
        case "choice":
            words = tuple(word.strip() for word in rest.split(","))
            if "" in words or len(set(words)) < len(words):
                raise ConfigError(f"--search {whole!r}: choices must be different values, such as {name}=choice:32,64.")
            return Dimension(name, "choice", words), words
        case "log" | "uniform" as chosen:
            low, high = _bounds(whole, rest, float)
        case "int" | "log-int" as chosen:
            low, high = _bounds(whole, rest, int)
        case _:
            raise ConfigError(f"--search {whole!r}: unknown kind {kind.strip()!r}. Use {FORMS}.")
    if chosen.startswith("log") and low <= 0:
        raise ConfigError(f"--search {whole!r}: a logarithmic range must start above 0.")
    return Dimension(name, chosen, (low, high)), ()


def _bounds(text: str, rest: str, number: type[float] | type[int]) -> tuple[float, float]:
    low_text, separator, high_text = rest.partition(":")
    try:
        low, high = number(low_text), number(high_text)
    except ValueError:
        low, high = math.nan, math.nan
    if not separator or not (math.isfinite(low) and math.isfinite(high) and low < high):
        number_kind = "whole numbers" if number is int else "numbers"
        raise ConfigError(f"--search {text!r}: a range must be two {number_kind} LOW:HIGH, the lower one first.")
    return low, high


def _parse_condition(
    condition: str, text: str, dimensions: Mapping[str, Dimension], given: Mapping[str, Sequence[str]]
) -> tuple[str, tuple[Value, ...]]:
    """Parse ``NAME=VALUE,VALUE``; return the parent's name and its values."""
    name, _, rest = condition.partition("=")
    name = name.strip().replace("-", "_")
    parent = dimensions.get(name)
    if parent is None or parent.options is None:
        raise ConfigError(
            f"--search {text!r}: the condition must be 'if NAME=VALUE' or 'if NAME=VALUE,VALUE' for a choice or int "
            "dimension given before it."
        )
    words = [word.strip() for word in rest.split(",")]
    known = given[name] or [str(value) for value in parent.options]
    if unknown := [word for word in words if word not in known]:
        raise ConfigError(f"--search {text!r}: {name} is never {', '.join(unknown) or 'empty'}.")
    return name, tuple(parent.options[known.index(word)] for word in words)


def assignments(parameters: Parameters) -> tuple[str, ...]:
    """Return parameters as arguments of ``--set``."""
    return tuple(f"{name}={value}" for name, value in parameters.items())


# --- Constraints: ``width * depth <= 512`` ---


_MAX_CONSTRAINT = 1000
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True)
class Constraint:
    """An expression of names, numbers and text that must be true; it is computed here, never run as code."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def holds(self, parameters: Parameters) -> bool:
        """Return whether it is true; a constraint on a dimension that does not apply is."""
        if not self.names <= parameters.keys():
            return True
        try:
            return bool(_compute(self.tree, parameters))
        except ZeroDivisionError:
            return False
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"--constraint {self.text!r} cannot be computed: {error}.") from error


def parse_constraint(text: str, names: Mapping[str, object]) -> Constraint:
    """Parse ``--constraint``.

    Raises:
        ConfigError: it has another form, or names something that is not searched.
    """
    form = "write a comparison such as 'width * depth <= 512', with + - * / // %, and, or, not"
    try:
        tree = ast.parse(text.strip()[: _MAX_CONSTRAINT + 1], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"--constraint {text!r} cannot be read: {form}.") from None
    used = frozenset(part.id for part in ast.walk(tree) if isinstance(part, ast.Name))
    allowed = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Constant, ast.Load, ast.boolop)
    operators = (*_OPERATORS, ast.Not, ast.USub)
    if (
        len(text) > _MAX_CONSTRAINT
        or not all(isinstance(part, (*allowed, *operators)) for part in ast.walk(tree))
        or not used
    ):
        raise ConfigError(f"--constraint {text!r} cannot be read: {form}.")
    if unknown := sorted(used - names.keys()):
        raise ConfigError(
            f"--constraint {text!r}: {', '.join(unknown)} is not searched. The search has: {', '.join(names)}."
        )
    return Constraint(text, tree, used)


def _compute(part: ast.expr, parameters: Parameters) -> Any:
    match part:
        case ast.Name(id=name):
            return parameters[name]
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _compute(operand, parameters)
        case ast.UnaryOp(operand=operand):
            return -_compute(operand, parameters)
        case ast.BinOp(left=left, op=op, right=right):
            values = _compute(left, parameters), _compute(right, parameters)
            if any(isinstance(value, str) for value in values):
                raise TypeError("text can only be compared")  # 'a' * 10**12 would fill the memory
            return _OPERATORS[type(op)](*values)
        case ast.BoolOp(op=op, values=operands):
            every = isinstance(op, ast.And)
            results = (bool(_compute(operand, parameters)) for operand in operands)
            return all(results) if every else any(results)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            values = tuple(_compute(each, parameters) for each in (left, *comparators))
            return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
    raise AssertionError(ast.dump(part))
