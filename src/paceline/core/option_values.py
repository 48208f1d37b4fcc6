"""The values of options, and how their text is parsed: durations, intervals, counts, metrics, meshes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.core.errors import ConfigError


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
