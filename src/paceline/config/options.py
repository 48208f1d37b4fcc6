"""What an option of a run is: a field with a help text, and how its value is checked."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import ConfigError

Resume = Literal["fixed", "adjustable", "kept", "fresh"]
"""What becomes of an option when its run is continued.

fixed: the recorded value stays, and another one is refused. adjustable: the recorded value stays unless
another one is given. kept: the same under ``paceline resume``; ``paceline train`` takes the present
value. fresh: the present value.
"""

Bits = Literal["always", "by_strategy", "rounding", "never"]
"""Whether an option decides bits of the model.

always: another value trains another model. by_strategy: some values do, under some strategies. rounding:
models are equal within rounding. never: models are equal bit for bit.
"""

Scope = Literal[
    "task", "place", "start", "process", "recovery", "parallel", "training", "data", "evaluation", "records"
]
"""What an option is about.

task: which task is trained. place: where the run's directory, a machine and its network are. start: what
starts the processes, and how many. process: how one process works. recovery: what happens after a fault.
parallel: how work is split. training: the optimization. data: what is trained on. evaluation: when the
model is evaluated, and which model is best. records: what is saved and shown.
"""

Capability = Literal["corruption", "spares", "compile", "ema", "recompute", "lockstep"]
"""What a strategy is able to do, and an option may need.

corruption: two ranks compute the same shard's gradient, which can be compared. spares: a rank holds the
state and computes nothing. compile: torch.compile gets the model. ema: a rank averages each parameter
that it updates. recompute: backward computes activations again. lockstep: all ranks are in the same
step.
"""


@dataclass(frozen=True)
class Requirement:
    """Another option, without which an option has no meaning.

    Attributes:
        option: the other option.
        value: the value that it must have; None: any but its default.
        other_than: the only value that it must not have, where that is not its default.
        message: says so, with the option as ``{flag}``, its value as ``{own}`` and the other's value as
            ``{value}``; None for a sentence that is made from the rest.
    """

    option: str
    value: object = None
    other_than: object = None
    message: str | None = None

    def is_met(self, value: object, default: object) -> bool:
        """Whether the other option's value is one with which the option has a meaning.

        Args:
            value: of the other option.
            default: of the other option.
        """
        if self.value is not None:
            return value == self.value
        return value != (default if self.other_than is None else self.other_than)


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What an option says of itself; its attributes are arguments of :func:`option`."""

    resume: Resume
    bits: Bits
    scope: Scope
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
    summary: bool


def option(
    default: Any,
    help: str,
    *,
    group: str,
    resume: Resume,
    bits: Bits,
    scope: Scope,
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
    summary: bool = False,
) -> Any:
    """A field of an options class; one that is not classified is a ``TypeError`` at import.

    Args:
        default: its value where it is not given.
        help: what ``--help`` says of it.
        group: the heading that it stands under there.
        resume: what becomes of it when its run is continued.
        bits: whether it decides bits of the model.
        scope: what it is about.
        strategies: those that it belongs to, where it has no meaning beside others.
        needs: what the strategy must be able to do.
        requires: the other option without which it has no meaning.
        replaces: the option whose place it takes.
        minimum: the least number.
        maximum: the greatest number.
        exclusive: neither of the two is allowed itself.
        from_launcher: a launcher gives it to each machine in words of its own.
        fingerprint: checkpoints record it among the pins, which promise equal bits.
        evaluation: packages record it, for the evaluation of a model follows from it.
        summary: the dashboard shows it.
    """
    classification = Classification(
        resume=resume,
        bits=bits,
        scope=scope,
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
        summary=summary,
    )
    return field(default=default, metadata={"help": help, "group": group, "classification": classification})


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def at_least(name: str, value: int, low: int) -> None:
    """Refuse a smaller value.

    Raises:
        ConfigError: it is smaller.
    """
    if value < low:
        raise ConfigError(f"{flag(name)} must be at least {low}, but is {value}.")


def check_bounds(name: str, value: object, its: Classification) -> None:
    """Refuse a number that is out of an option's bounds.

    Raises:
        ConfigError: says which numbers work.
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
    """Refuse a value that is not of the annotated type.

    Raises:
        ConfigError: says what it must be.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
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
        elif option is not type(None):
            wanted.append(_IN_WORDS.get(option, str(option)))
    choices = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if wanted[:-1] else wanted)
    raise ConfigError(f"{flag(name)} must be {choices}, but is {value!r}.")
