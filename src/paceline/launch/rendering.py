"""Texts of jobs: YAML, and variables whose values must not be in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from paceline.core.errors import ConfigError

# --- YAML ---


# Strings that every YAML reader, of version 1.1 or 1.2, reads as strings. PyYAML's own rule is that of 1.1: it
# would not quote "1e3" or "0o17", which Kubernetes reads as numbers.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?:[:=][A-Za-z0-9_./-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes each text that some reader may take for something else, and indents lists in mappings."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="" if is_plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(value: Mapping[str, Any]) -> str:
    """Write a YAML document of mappings, lists, strings, numbers and booleans, in their order."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=math.inf
    )
    return text


# --- Variables that must not stand in a job that others can read ---


_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|(ACCESS|API|PRIVATE|SECRET)_?KEY)$")


def refuse_secrets(env: Mapping[str, str], instead: str) -> None:
    """Reject variables that look like secrets: every user who can see the job can read its variables."""
    for name in env:
        if _SECRET.search(name.upper()):
            raise ConfigError(f"--env {name}: every user who can see the job can read its variables. {instead}")
