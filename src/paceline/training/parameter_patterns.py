"""Patterns that name parts of a model: of layers or of parameters, with ``*`` for any."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from paceline.core.errors import ConfigError

_MOST_NAMES = 6


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a parameter: by its own name, or by that of a layer around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def require_match(option: str, pattern: str, module: nn.Module, others: Iterable[str] = ()) -> None:
    """Refuse a pattern that names nothing in a model.

    Args:
        option: who gave it, such as ``--freeze``.
        pattern: what it gave.
        module: the model.
        others: names that will do, too.

    Raises:
        ConfigError: with the nearest names.
    """
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if any(matches(pattern, name) for name in (*parameters, *others)):
        return
    layers = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters())]
    near = difflib.get_close_matches(pattern.removesuffix(".*"), [*layers, *parameters], n=3, cutoff=0.5)
    hint = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"Its layers with parameters: {join_names(layers or parameters)}."
    )
    raise ConfigError(f"{option} {pattern}: nothing in the model has such a name. {hint}")


def join_names(found: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Names with commas; of many the first, and how many more there are."""
    kept = list(found)
    more = len(kept) - most
    return ", ".join(kept[:most]) + (f" and {more} more" if more > 0 else "")
