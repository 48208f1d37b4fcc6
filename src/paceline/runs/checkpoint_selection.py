"""The choice of a checkpoint: the best, the last, or that of a step. No torch."""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.core.errors import CheckpointError, ConfigError
from paceline.runs.checkpoint_store import find_version, newest_verified, parse_name, scan

_MOST_STEPS = 5
_log = logging.getLogger(__name__)


def select_checkpoint(directory: Path, which: str | None) -> Path:
    """Return the path of a checkpoint in ``directory``; loading verifies it.

    Args:
        directory: a run's checkpoints.
        which: "best", the best model according to the newest checkpoint that verifies; "last", the newest that
            verifies; or a number of steps. None: the best, or the last without validation.

    Raises:
        ConfigError: ``which`` is not one of these, there is no checkpoint of that step, or no best model.
        CheckpointError: no checkpoint verifies.
    """
    if which not in (None, "best", "last"):
        if not which.isdecimal():
            raise ConfigError(f"a checkpoint must be best, last or a number of steps such as 500, but is {which!r}.")
        return _of_step(directory, int(which))
    newest = newest_verified(directory)
    for reason in newest.skipped:
        _log.warning("skipped a checkpoint: %s", reason)
    if newest.path is None or newest.manifest is None:
        detail = f": {newest.skipped[0]}" if newest.skipped else "."
        raise CheckpointError(f"{directory} holds no checkpoint that verifies{detail}")
    best = newest.manifest.info.best_version
    if which == "last" or (which is None and best is None):
        return newest.path
    if best is None:
        raise ConfigError(f"{directory} has no best model, because the run was not validated. Choose last.")
    return find_version(directory, best)


def _of_step(directory: Path, step: int) -> Path:
    by_step = {parse_name(path.name)[0]: path for path in reversed(scan(directory))}
    if step in by_step:
        return by_step[step]
    if not by_step:
        raise CheckpointError(f"{directory} holds no checkpoint.")
    near = ", ".join(map(str, sorted(sorted(by_step, key=lambda other: abs(other - step))[:_MOST_STEPS])))
    raise ConfigError(f"{directory} holds no checkpoint of step {step}. The nearest: {near}.")
