"""Sets of options, by what each option says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from paceline.config.options import Classification
from paceline.config.run_config import RunConfig

CLASSIFICATIONS: dict[str, Classification] = {
    field.name: field.metadata["classification"] for field in dataclasses.fields(RunConfig)
}
"""What each option says of itself, in the order of the fields."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(RunConfig)}
"""The value of each option where it is not given."""


def select(wanted: Callable[[Classification], bool]) -> tuple[str, ...]:
    """The names of the options of which this is true, in the order of the fields."""
    return tuple(name for name, its in CLASSIFICATIONS.items() if wanted(its))
