"""Options: how their text is parsed, and how a group declares them, each with a help text and a classification."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.plugins import GROUP_OF_TYPE, plugin_names

if TYPE_CHECKING:
    from paceline.core.config import RunConfig


# --- The values of options: durations, intervals, counts, metrics, meshes ---


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def at_least(name: str, value: int, low: int) -> None:
    """Reject a value below ``low``.

    Raises:
        ConfigError: the value is smaller.
    """
    if value < low:
        raise ConfigError(f"{flag(name)} must be at least {low}, but is {value}.")


def require_form(flag: str, pattern: str | re.Pattern[str], text: str, form: str) -> re.Match[str]:
    """Match the whole text of an option, given as ``--name``.

    Raises:
        ConfigError: it must be ``form``, but is the text.
    """
    if (match := re.fullmatch(pattern, text)) is None:
        raise ConfigError(f"{flag} must be {form}, but is {text!r}.")
    return match


Duration = float
"""In seconds."""


@dataclass(frozen=True)
class Interval:
    """How often something is due: at most one of the three is set; none means never."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None


_UNITS_S = {"ms": 0.001, "s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


def parse_duration_s(text: str, name: str) -> float:
    """Parse "90s", "5min", "2h" or "30d" into seconds.

    Raises:
        ConfigError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|sec|min|h|d)", text.strip())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"{flag(name)} must be a duration such as 90s, 5min or 2h, but is {text!r}.")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_walltime_s(text: str) -> float:
    """Parse a job's time limit into seconds: a duration, or one of Slurm's forms.

    These are minutes, M:S, H:M:S, D-H, D-H:M and D-H:M:S.

    Raises:
        ConfigError: the text is neither.
    """
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)|(\d+))", text.strip())
    if match is None:
        try:
            return parse_duration_s(text, "walltime")
        except ConfigError as error:
            raise ConfigError(f"{str(error).rstrip('.')}; or write it as Slurm does, such as 12:00:00.") from None
    day, hour, minute, second, hours, minutes, seconds, only_minutes = (int(number or 0) for number in match.groups())
    total_s = ((day * 24 + hour + hours) * 60 + minute + minutes + only_minutes) * 60 + second + seconds
    if total_s == 0:
        raise ConfigError(f"--walltime must be above 0, but is {text!r}.")
    return float(total_s)


def parse_hang_timeout(text: str) -> float | None:
    """Parse a step timeout into seconds; None for "auto", infinite for "never".

    Raises:
        ConfigError: the text is not one of these and not a duration.
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
        ConfigError: the text is not one of these.
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


class NodeRange(NamedTuple):
    """The least and the greatest number of nodes."""

    least: int
    most: int


def parse_nodes(value: int | str) -> NodeRange:
    """Parse 2, "2" or "1:4".

    Raises:
        ConfigError: the value has another form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
    nodes = NodeRange(int(match[1]), int(match[2] or match[1])) if match else NodeRange(0, 0)
    if not 1 <= nodes.least <= nodes.most:
        raise ConfigError(f"--nodes must be at least 1, or MIN:MAX such as 1:4, but is {value}.")
    return nodes


def parse_gpus(value: int | str) -> tuple[str | None, int]:
    """Parse ``2``, ``a100:2`` or ``1g.5gb:2`` into a type, if it has one, and a number.

    Raises:
        ConfigError: it has another form.
    """
    match = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z0-9_.+-]+):)?(-?\d+)", str(value))
    if match is None:
        raise ConfigError(
            f"--gpus-per-node must be a number, or on Slurm TYPE:NUMBER, such as a100:2, but is {value!r}."
        )
    return match[1], int(match[2])


def parse_nproc(value: int | str) -> tuple[int, ...] | None:
    """Parse 2, "2" or "8,4" into the processes of each node; None for "auto".

    Raises:
        ConfigError: the value has another form.
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
    """The order of an epoch: shuffled by samples (``window`` 1) or by windows of neighbours, or in order (0)."""

    window: int = 1


def parse_shuffle(text: str) -> Shuffle:
    """Parse "sample", "window:N" or "none".

    Raises:
        ConfigError: the text is not one of these.
    """
    if text == "sample":
        return Shuffle(window=1)
    if text == "none":
        return Shuffle(window=0)
    match = re.fullmatch(r"window:(\d+)", text)
    if match and int(match[1]) > 0:
        return Shuffle(window=int(match[1]))
    raise ConfigError(f"--shuffle must be sample, window:N or none, but is {text!r}.")


Direction = Literal["min", "max"]


class EarlyStop(NamedTuple):
    """Stop after ``patience`` evaluations without a better ``metric``. Direction None: the name decides."""

    metric: str
    direction: Direction | None
    patience: int


def parse_early_stop(text: str) -> EarlyStop:
    """Parse "METRIC:PATIENCE" or "METRIC:min:PATIENCE".

    Raises:
        ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(.+?)(?::(min|max))?:0*([1-9]\d*)", text)
    if match is None:
        raise ConfigError(
            f"--early-stop must be METRIC:PATIENCE, such as loss:3, or METRIC:min:PATIENCE, but is {text!r}."
        )
    metric, direction, patience = match.groups()
    return EarlyStop(metric, "min" if direction == "min" else "max" if direction else None, int(patience))


class BestMetric(NamedTuple):
    """The metric that selects the best checkpoint."""

    metric: str
    direction: Direction


def parse_best(text: str) -> BestMetric:
    """Parse "METRIC:min" or "METRIC:max".

    Raises:
        ConfigError: the text has another form.
    """
    metric, _, direction = text.rpartition(":")
    if metric and direction == "min":
        return BestMetric(metric, "min")
    if metric and direction == "max":
        return BestMetric(metric, "max")
    raise ConfigError(f"--best-metric must be METRIC:min or METRIC:max, such as accuracy:max, but is {text!r}.")


def parse_mesh(text: str, axes: Sequence[str]) -> dict[str, int]:
    """Parse "AXIS=SIZE,AXIS=SIZE" into sizes in the order of ``axes``.

    Raises:
        ConfigError: the text has another form or names an unknown axis.
    """
    sizes: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"([a-z]+)=([1-9]\d*)", word.strip())
        if not match or match[1] in sizes:
            raise ConfigError(f"--mesh must be such as {axes[0]}=2,{axes[-1]}=2, but is {text!r}.")
        if match[1] not in axes:
            raise ConfigError(f"--mesh {text}: there is no axis {match[1]!r}. The axes are: {', '.join(axes)}.")
        sizes[match[1]] = int(match[2])
    return {axis: sizes[axis] for axis in axes if axis in sizes}


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
        preparation: changes the task's model before it is trained, as ``module:Class``: a
            :class:`~paceline.training.hooks.ModelPreparation`.
        outer_optimizer: steps when ranks synchronise, as ``module:Class``; a checkpoint has its state.
        sync_every: steps between synchronisations; a run evaluates and saves after one.
        hooks: what is added to the run, each as ``module:Class``: a :class:`~paceline.training.hooks.RunHook`.
        whole_loss: the given options with which a task cannot compute its steps itself, as on the command line.
        own_state: the given options with which ranks have state of their own, as on the command line: none can join,
            leave or save alone, and a task cannot compute its steps itself.
        companions: context managers next to the processes of each node, as ``module:Class``, which is called with the
            configuration and the run directory.
        results: entries of ``result.json``.
    """

    strategy: str | None = None
    reducer: str | None = None
    preparation: str | None = None
    outer_optimizer: str | None = None
    sync_every: int = 1
    hooks: tuple[str, ...] = ()
    whole_loss: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    results: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)  # each method that is made takes time
class OptionGroup:
    """Options of one subject: a frozen dataclass, in a module without torch; :func:`option` makes its fields.

    A group whose options all have their defaults is not asked what it rejects or changes, unless it acts by default.
    """

    acts_by_default = False

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
