"""How an option is declared, and how its text becomes a value."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.plugins import GROUP_OF_TYPE, plugin_names

# --- What an option of a run is: a field with a help text, and how its value is checked ---


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

corruption: two ranks compute the same micro-batch's gradient, which can be compared. spares: a rank holds the
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


# --- The values of options that are texts with a form of their own: durations, intervals, counts ---


@dataclass(frozen=True)
class Interval:
    """How often something is due: exactly one of the three is set; none means never."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None


_UNITS_S = {"ms": 0.001, "s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


def parse_duration_s(text: str, name: str) -> float:
    """Seconds of "90s", "5min", "2h" or "30d".

    Raises:
        ConfigError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|sec|min|h|d)", text.strip())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"{flag(name)} must be a duration such as 90s, 5min or 2h, but is {text!r}.")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_hang_timeout(text: str) -> float | None:
    """Seconds that a step may take; None for "auto", infinite for "never".

    Raises:
        ConfigError: the text is none of these, and no duration.
    """
    if text == "auto":
        return None
    if text == "never":
        return math.inf
    try:
        return parse_duration_s(text, "hang_timeout")
    except ConfigError:
        raise ConfigError(
            f"--hang-timeout must be auto, never or a duration such as 90s, 5min or 2h, but is {text!r}."
        ) from None


def parse_interval(text: str, name: str, *, allow_time: bool = True) -> Interval:
    """Parse "50steps", "1epoch", "5min" or "never".

    Raises:
        ConfigError: the text is none of these.
    """
    text = text.strip()
    if text == "never":
        return Interval()
    match = re.fullmatch(r"(\d+)\s*(steps?|epochs?)", text)
    if match and int(match[1]) > 0:
        return Interval(steps=int(match[1])) if match[2].startswith("step") else Interval(epochs=int(match[1]))
    if allow_time:
        try:
            return Interval(seconds=parse_duration_s(text, name))
        except ConfigError:
            pass
    times = ", 5min" if allow_time else ""
    raise ConfigError(f"{flag(name)} must be such as 50steps, 1epoch{times} or never, but is {text!r}.")


def parse_nodes(value: int | str) -> tuple[int, int]:
    """The least and the greatest number of machines of 2, "2" or "1:4".

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nodes must be at least 1, or MIN:MAX such as 1:4, but is {value}.")
    return least, most


def parse_nproc(value: int | str) -> tuple[int, ...] | None:
    """The processes of one machine, or of each, of 2, "2" or "8,4"; None for "auto".

    Raises:
        ConfigError: it is none of these.
    """
    if value == "auto":
        return None
    if isinstance(value, str) and not re.fullmatch(r"\d+(,\d+)*", value.strip()):
        raise ConfigError(f"--nproc must be a whole number, auto, or a list such as 8,4, but is {value!r}.")
    counts = tuple(int(word) for word in str(value).split(","))
    for count in counts:
        at_least("nproc", count, 1)
    return counts


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is ordered: by samples (``block`` 1), by blocks of neighbours, or not at all (0)."""

    window: int = 1


def parse_shuffle(text: str) -> Shuffle:
    """Parse "sample", "window:N" or "none".

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "sample":
        return Shuffle(window=1)
    if text == "none":
        return Shuffle(window=0)
    match = re.fullmatch(r"window:(\d+)", text)
    if match and int(match[1]) > 0:
        return Shuffle(window=int(match[1]))
    raise ConfigError(f"--shuffle must be sample, window:N or none, but is {text!r}.")


def parse_early_stop(text: str) -> tuple[str, int]:
    """Metric name and patience (evaluations) of "METRIC:PATIENCE".

    Raises:
        ConfigError: the text has another form.
    """
    metric, _, patience = text.rpartition(":")
    if not metric or not patience.isdigit() or int(patience) < 1:
        raise ConfigError(f"--early-stop must be METRIC:PATIENCE, such as loss:3, but is {text!r}.")
    return metric, int(patience)


def parse_best(text: str) -> tuple[str, Literal["min", "max"]]:
    """Metric name and direction of "METRIC:min" or "METRIC:max".

    Raises:
        ConfigError: the text has another form.
    """
    metric, _, direction = text.rpartition(":")
    if metric and direction == "min":
        return metric, "min"
    if metric and direction == "max":
        return metric, "max"
    raise ConfigError(f"--best-metric must be METRIC:min or METRIC:max, such as accuracy:max, but is {text!r}.")


def parse_mesh(text: str | None, axes: Sequence[str]) -> dict[str, int]:
    """The sizes of "AXIS=SIZE,AXIS=SIZE", in the order of ``axes``; empty for None.

    Raises:
        ConfigError: the text has another form, or names an axis that there is not.
    """
    if text is None:
        return {}
    found: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"([a-z]+)=([1-9]\d*)", word.strip())
        if not match or match[1] in found:
            raise ConfigError(f"--mesh must be such as {axes[0]}=2,{axes[-1]}=2, but is {text!r}.")
        if match[1] not in axes:
            raise ConfigError(f"--mesh {text}: there is no axis {match[1]!r}. The axes: {', '.join(axes)}.")
        found[match[1]] = int(match[2])
    return {axis: found[axis] for axis in axes if axis in found}
