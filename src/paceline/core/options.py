"""Declaration of options: fields of groups, each with a help text and a classification."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.option_values import flag
from paceline.core.plugins import GROUP_OF_TYPE, plugin_names

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

# --- An option of a run: a field with a help text and a classification ---


Resume = Literal["fixed", "adjustable", "kept", "fresh"]
"""How resuming a run treats an option.

fixed: the recorded value stays, and another one is an error. adjustable: a given value replaces the recorded one.
kept: ``paceline resume`` keeps the recorded value; ``paceline train`` uses the current one. fresh: the current value.
"""

Bits = Literal["always", "by_strategy", "rounding", "never"]
"""Whether an option affects the bits of the model.

always: another value trains another model. by_strategy: some values do, with some strategies. rounding: models are
equal within rounding. never: models are bitwise equal.
"""

Scope = Literal[
    "task", "place", "start", "process", "recovery", "parallel", "training", "data", "evaluation", "records"
]
"""The subject of an option.

task: the task and its fields. place: the run directory, this node and its network. start: the launcher and the number
of processes. process: the settings of one process. recovery: fault handling. parallel: the split of the work.
training: the optimization. data: the training data. evaluation: when to evaluate, and model selection. records: saved
and shown values.
"""

Capability = Literal["corruption", "spares", "compile", "ema", "recompute", "lockstep"]
"""A capability of a strategy that an option may need.

corruption: two ranks can compute and compare the same micro-batch's gradient. spares: a rank can hold the state without
computing. compile: torch.compile applies to the model. ema: a rank averages each parameter that it updates. recompute:
backward can recompute activations. lockstep: all ranks are in the same step.
"""


@dataclass(frozen=True)
class Requirement:
    """A condition on another option, without which an option has no effect.

    Attributes:
        option: the other option.
        value: the value that it must have; None: any but its default.
        other_than: the only value that it must not have, if that is not its default.
        message: the error, with the option as ``{flag}``, its value as ``{own}`` and the other's value as ``{value}``;
            None for a generated sentence.
    """

    option: str
    value: object = None
    other_than: object = None
    message: str | None = None

    def is_met(self, value: object, default: object) -> bool:
        """Return whether ``value`` of the other option, with this ``default``, meets the requirement."""
        if self.value is not None:
            return value == self.value
        return value != (default if self.other_than is None else self.other_than)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option; the other attributes are arguments of :func:`option`.

    Attributes:
        name: that of the field; the flag has hyphens.
        type: of a given value.
    """

    name: str = ""
    type: Any = None
    default: Any
    help: str
    group: str
    resume: Resume
    bits: Bits
    scope: Scope
    parse: Callable[[Any], Any] | None
    given: Any
    strategies: tuple[str, ...]
    needs: Capability | None
    requires: Requirement | None
    replaces: str | None
    minimum: float | None
    maximum: float | None
    exclusive: bool
    from_launcher: bool
    fingerprint: bool
    evaluation: bool

    def parsed(self, value: Any) -> Any:
        """Return the field's value for a given one.

        Raises:
            ConfigError: the value is not of the option's type, is out of bounds, or cannot be parsed.
        """
        check_type(self.name, value, self.type)
        check_bounds(self.name, value, self)
        if self.parse is None or value is None:
            return value
        return tuple(map(self.parse, value)) if isinstance(value, tuple) else self.parse(value)


def option(
    default: Any,
    help: str,
    *,
    group: str,
    resume: Resume,
    bits: Bits,
    scope: Scope,
    parse: Callable[[Any], Any] | None = None,
    given: Any = None,
    strategies: tuple[str, ...] = (),
    needs: Capability | None = None,
    requires: Requirement | None = None,
    replaces: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
    from_launcher: bool = False,
    fingerprint: bool = False,
    evaluation: bool = False,
) -> Any:
    """Declare an option: a field of an :class:`OptionGroup`.

    Args:
        default: as a user would give it.
        help: the text of ``--help``.
        group: the heading in ``--help``.
        resume: how resuming a run treats it.
        bits: whether it affects the bits of the model.
        scope: its subject.
        parse: makes the field's value of a given one, or of each item of a tuple, or raises a ConfigError.
        given: the type of a given value or item, where that is another than the field's; with ``parse`` text.
        strategies: the strategies to which it applies; empty: all.
        needs: the capability that the strategy must have.
        requires: the condition on another option.
        replaces: the option that it excludes.
        exclusive: whether both bounds are exclusive.
        from_launcher: whether the launcher sets it for each node.
        fingerprint: whether checkpoints record it in the numerics fingerprint, on which equal bits depend.
        evaluation: whether packages record it, because evaluating the model needs it.
    """
    its = Option(
        default=default,
        help=help,
        group=group,
        resume=resume,
        bits=bits,
        scope=scope,
        parse=parse,
        given=given,
        strategies=strategies,
        needs=needs,
        requires=requires,
        replaces=replaces,
        minimum=minimum,
        maximum=maximum,
        exclusive=exclusive,
        from_launcher=from_launcher,
        fingerprint=fingerprint,
        evaluation=evaluation,
    )
    return field(metadata={"option": its})


# --- Groups of options ---


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What options change in the training, of which the core knows only this.

    Attributes:
        strategy: what steps in place of the strategy's own class, as ``module:Class``.
        reducer: the engine that sums gradients.
        outer_optimizer: steps when ranks synchronise, as ``module:Class``; a checkpoint has its state.
        sync_every: steps between synchronisations; a run evaluates and saves after one.
        own_state: the given options with which ranks have state of their own, as on the command line: none can join,
            leave or save alone, and a task cannot compute its steps itself.
        results: entries of ``result.json``.
    """

    strategy: str | None = None
    reducer: str | None = None
    outer_optimizer: str | None = None
    sync_every: int = 1
    own_state: tuple[str, ...] = ()
    results: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)  # each method that is made takes time
class OptionGroup:
    """Options of one subject: a frozen dataclass, in a module without torch; :func:`option` makes its fields."""

    def check(self, config: RunConfig) -> None:
        """Reject combinations, with each other or with other groups' options, that do not work.

        Raises:
            ConfigError: the message names the options to change.
        """

    def changes(self, config: RunConfig) -> Changes:
        """Return what these options change in the training."""
        return Changes()


def options_of(group: type[OptionGroup]) -> dict[str, Option]:
    """Return the options of a group by their names."""
    hints = typing.get_type_hints(group)
    return {each.name: _named(each.name, each.metadata["option"], hints[each.name]) for each in fields(group)}


def _named(name: str, its: Option, hint: Any) -> Option:
    given = its.given or (None if its.parse is None else str)
    if given is not None:
        hint = tuple[given, ...] if isinstance(its.default, tuple) else given  # type: ignore[valid-type]
        hint = hint | None if its.default is None else hint
    return replace(its, name=name, type=hint)


# --- Checks of single values ---


def check_bounds(name: str, value: object, its: Option) -> None:
    """Reject a number outside an option's bounds.

    Raises:
        ConfigError: the message gives the bounds.
    """
    low, high = its.minimum, its.maximum
    if low is None or isinstance(value, bool) or not isinstance(value, int | float):
        return
    most = math.inf if high is None else high
    if its.exclusive:
        works = low < value and (high is None or value < high)
        rule = "positive" if low == 0 and most == math.inf else f"between {low:g} and {most:g}"
    else:
        works = low <= value <= most
        shown = "2**63 - 1" if high == 2**63 - 1 else f"{most:g}"
        rule = f"at least {low:g}" if high is None else f"between {low:g} and {shown}"
    if not works:
        raise ConfigError(f"{flag(name)} must be {rule}, but is {value}.")


_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def check_type(name: str, value: Any, hint: Any) -> None:
    """Reject a value that does not have the annotated type.

    Raises:
        ConfigError: the message gives the valid types or choices.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return
        elif option in GROUP_OF_TYPE:
            if value in plugin_names(GROUP_OF_TYPE[option]):
                return
        elif typing.get_origin(option) is tuple:
            if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
                return
        elif isinstance(value, bool):
            if option is bool:
                return
        elif isinstance(value, int | float if option is float else option):
            return
    wanted: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            wanted += [str(choice) for choice in typing.get_args(option)]
        elif option in GROUP_OF_TYPE:
            wanted += plugin_names(GROUP_OF_TYPE[option])
        elif option is not type(None):
            wanted.append(_IN_WORDS.get(option, str(option)))
    choices = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if wanted[:-1] else wanted)
    raise ConfigError(f"{flag(name)} must be {choices}, but is {value!r}.")
