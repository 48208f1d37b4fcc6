"""Which checkpoint of a run somebody means: its best, its last, or that of a step. No torch."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.storage import candidates, find_version, newest_verified, parse_name
from paceline.errors import CheckpointError, ConfigError

_MOST_STEPS = 5


def choose(directory: Path, which: str) -> Path:
    """The checkpoint in ``directory`` that is meant.

    Args:
        directory: a run's checkpoints.
        which: "best", the best model of the newest checkpoint that verifies, or that one itself where no
            model was found the best; "last", the newest that verifies; or a number of steps.

    Returns:
        Its path; it is verified when it is loaded.

    Raises:
        ConfigError: ``which`` is none of these, or there is no checkpoint of that step.
        CheckpointError: there is none that verifies.
    """
    if which.isdigit():
        return _of_step(directory, int(which))
    if which not in ("best", "last"):
        raise ConfigError(f"a checkpoint is best, last or a number of steps, not {which!r}.")
    newest = newest_verified(directory)
    if newest.path is None or newest.manifest is None:
        reasons = "".join(f"\n  {reason}" for reason in newest.skipped)
        raise CheckpointError(f"{directory} holds no checkpoint that verifies.{reasons}")
    best = newest.manifest.info.best_version
    return newest.path if which == "last" or best is None else find_version(directory, best)


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
