"""Configurations from TOML and from keywords."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.run_config import RunConfig
from paceline.errors import ConfigError


def config_from_mapping(values: Mapping[str, Any], source: str) -> RunConfig:
    """Build a configuration from TOML or keyword values.

    Raises:
        ConfigError: an unknown key (with the nearest ones) or a value that cannot work.
    """
    return RunConfig(**checked_keys(values, source))


def checked_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Refuse keys that are no option, and turn lists, and lone texts where a list is meant, into tuples."""
    import difflib

    known = [f.name for f in dataclasses.fields(RunConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The options: {', '.join(known)}."
            raise ConfigError(f"{source}: there is no option {key!r}. {hint}")
    several = {f.name for f in dataclasses.fields(RunConfig) if isinstance(f.default, tuple)}
    return {
        key: tuple(value)
        if isinstance(value, list)
        else (value,)
        if key in several and isinstance(value, str)
        else value
        for key, value in values.items()
    }


def read_config_file(path: Path) -> dict[str, Any]:
    """The options in a TOML file: its ``[config]`` table, or its top level where there is none.

    Raises:
        ConfigError: the file is missing, is not TOML, or holds an unknown option.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return checked_keys(document.get("config", document), str(path))


def non_defaults(config: RunConfig) -> dict[str, Any]:
    """The options that differ from their defaults, in the order of the fields."""
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != f.default
    }
