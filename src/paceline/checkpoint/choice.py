"""Which checkpoint of a run somebody means: its best, its last, or that of a step. No torch."""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.checkpoint.storage import candidates, find_version, newest_verified, parse_name
from paceline.errors import CheckpointError, ConfigError

_MOST_STEPS = 5
_log = logging.getLogger(__name__)


def choose(directory: Path, which: str | None) -> Path:
    """The checkpoint in ``directory`` that is meant.

    Args:
        directory: a run's checkpoints.
        which: "best", the best model of the newest checkpoint that verifies; "last", the newest that
            verifies; or a number of steps. None: the best, or the last where nothing was validated.

    Returns:
        Its path; it is verified when it is loaded.

    Raises:
        ConfigError: ``which`` is none of these, there is no checkpoint of that step, or no best model.
        CheckpointError: there is none that verifies.
    """
    if which not in (None, "best", "last"):
        if not which.isdecimal():
            raise ConfigError(f"a checkpoint is best, last or a number of steps such as 500, not {which!r}.")
        return _of_step(directory, int(which))
    newest = newest_verified(directory)
    for reason in newest.skipped:
        _log.warning("passed over a checkpoint: %s", reason)
    if newest.path is None or newest.manifest is None:
        why = f": {newest.skipped[0]}" if newest.skipped else "."
        raise CheckpointError(f"{directory} holds no checkpoint that verifies{why}")
    best = newest.manifest.info.best_version
    if which == "last" or (which is None and best is None):
        return newest.path
    if best is None:
        raise ConfigError(f"{directory} knows no best model, since nothing was validated. Choose the last.")
    return find_version(directory, best)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is named as a checkpoint is."""
    try:
        parse_name(path.name)
    except ValueError:
        return False
    return path.is_dir()


def _of_step(directory: Path, step: int) -> Path:
    there = {parse_name(path.name)[0]: path for path in reversed(candidates(directory))}
    if step in there:
        return there[step]
    if not there:
        raise CheckpointError(f"{directory} holds no checkpoint.")
    near = ", ".join(map(str, sorted(sorted(there, key=lambda other: abs(other - step))[:_MOST_STEPS])))
    raise ConfigError(f"{directory} holds no checkpoint of step {step}. The nearest: {near}.")
