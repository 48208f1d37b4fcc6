"""Texts of jobs: YAML, and variables whose values must not be in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ConfigError

# --- YAML as it is written by hand. Jobs are rendered where no YAML library is installed ---


# What no YAML reader, of version 1.1 or 1.2, takes for anything but a text.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?:[:=][A-Za-z0-9_./-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def to_yaml(value: Mapping[str, Any]) -> str:
    """A document of mappings, lists, texts, numbers and truth values, in the order that they have."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    """A mapping's or list's lines; none where it is empty."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            nested = [] if _is_scalar(inner) else _lines(inner)
            lines += [f"{_scalar(key)}:", *_indented(nested)] if nested else [f"{_scalar(key)}: {_scalar(inner)}"]
    else:
        for inner in value:
            first, *rest = [_scalar(inner)] if _is_scalar(inner) else _lines(inner) or [_scalar(inner)]
            lines += [f"- {first}", *_indented(rest)]
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple))


def _scalar(value: Any) -> str:
    """A text without quotes where it cannot be taken for something else; all else as JSON, which is YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON writes characters beyond 16 bits as two, which YAML would take for two.
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


# --- Variables that must not stand in a job that others can read ---


_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|(ACCESS|API|PRIVATE|SECRET)_?KEY)$")

IN_HOROVODS_SHELL = (
    "horovodrun starts each rank by a shell command with all its variables in it. Have the program read it from a file."
)


def refuse_secrets(env: Mapping[str, str], instead: str) -> None:
    """Refuse variables that look like secrets: whoever may look at the job can read its variables.

    Raises:
        ConfigError: one does; the message says what to do instead.
    """
    for name in env:
        if _SECRET.search(name.upper()):
            raise ConfigError(f"--env {name}: whoever sees the job can read its variables. {instead}")
