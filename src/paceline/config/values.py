"""The values of options that are texts with a form of their own: durations, intervals, counts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config.options import at_least, flag
from paceline.errors import ConfigError


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
        return (
            Interval(steps=int(match[1])) if match[2].startswith("step") else Interval(epochs=int(match[1]))
        )
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

    block: int = 1


def parse_shuffle(text: str) -> Shuffle:
    """Parse "sample", "block:N" or "none".

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "sample":
        return Shuffle(block=1)
    if text == "none":
        return Shuffle(block=0)
    match = re.fullmatch(r"block:(\d+)", text)
    if match and int(match[1]) > 0:
        return Shuffle(block=int(match[1]))
    raise ConfigError(f"--shuffle must be sample, block:N or none, but is {text!r}.")


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
    raise ConfigError(f"--best must be METRIC:min or METRIC:max, such as accuracy:max, but is {text!r}.")


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
