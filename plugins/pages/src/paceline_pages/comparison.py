"""Runs side by side: their configurations and metrics.

No torch: the terminal and the trackers' pages show runs of any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.core.config import configuration
from paceline.core.errors import ConfigError, PackageError, RunDirectoryError
from paceline.runs.code_record import read_code
from paceline.runs.directory import RunDirectory
from paceline.runs.package import read_manifest
from paceline.runs.package_registry import Registry
from paceline_pages.run_status import (
    FOREIGN,
    RunSummary,
    final_metrics,
    is_search,
    last_records,
    search_of,
    summarise,
)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run among those that are compared.

    Attributes:
        name: the shortest end of its path that no other of the runs has.
        settings: what decides what it computes, by name.
        metrics: the last ones of each split: split -> name -> value.
        code: its commit, digests of files and versions of packages, by name; empty if they were not recorded.
        search: the directory of the search of which it is a trial; None if it belongs to no search.
    """

    name: str
    directory: RunDirectory
    summary: RunSummary
    settings: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, float | None]]
    code: Mapping[str, str]
    search: Path | None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "run": str(self.directory.path),
            "state": self.summary.state,
            "step": self.summary.step,
            "seconds": self.summary.seconds,
            "settings": dict(self.settings),
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
        }


def read_runs(paths: Iterable[Path]) -> list[ComparedRun]:
    """Read runs, and the trials of searches, in the order given; each run once.

    Raises:
        ConfigError: there are fewer than two runs.
        RunDirectoryError: a path has neither a run nor a search, or a run is damaged.
    """
    directories: dict[Path, RunDirectory] = {}
    for path in paths:
        for directory in _runs_in(path):
            directories.setdefault(directory.path.resolve(), directory)
    if len(directories) < 2:
        raise ConfigError("--compare needs at least two runs, or a search. Add the directory of another run.")
    return [
        _read(directory, name) for directory, name in zip(directories.values(), _names(list(directories)), strict=True)
    ]


def _runs_in(path: Path) -> list[RunDirectory]:
    if RunDirectory(path).exists():
        return [RunDirectory(path)]
    if not is_search(path):
        raise RunDirectoryError(f"{path} is neither a run (it has no run.toml) nor a search (it has no tune.json).")
    trials = sorted(trial for trial in (path / "trials").glob("*") if RunDirectory(trial).exists())
    if not trials:
        raise RunDirectoryError(f"the search {path} has no trials yet. Wait for its first ones.")
    return [RunDirectory(trial) for trial in trials]


def _read(directory: RunDirectory, name: str) -> ComparedRun:
    try:
        summary = summarise(directory)
        result = directory.read_result() or {}
        return ComparedRun(
            name=name,
            directory=directory,
            summary=summary,
            settings=configuration(directory.read_complete_manifest()),
            metrics=final_metrics(result, last_records(directory.metrics)),
            code=_comparable_code(directory),
            search=search_of(directory),
        )
    except RunDirectoryError:
        raise
    except FOREIGN as error:
        raise RunDirectoryError(f"{directory.path} is damaged: {error!r}. Leave it out of the comparison.") from error


def _comparable_code(directory: RunDirectory) -> dict[str, str]:
    """Return what :func:`read_code` found as rows of a table: a commit, a digest for each file, versions."""
    code = read_code(directory)
    rows = {f"code {name}": str(code[name]) for name in ("commit", "patch", "data") if name in code}
    rows |= {f"code {path}": str(digest) for path, digest in code.get("modules", {}).items()}
    return rows | {f"package {name}": str(version) for name, version in code.get("packages", {}).items()}


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that tells it from the others; of a trial, with its search's name."""
    lengths = [3 if path.parent.name == "trials" else 1 for path in paths]
    while True:
        names = ["/".join(path.parts[-n:]).replace("/trials/", "/") for path, n in zip(paths, lengths, strict=True)]
        counts = Counter(names)
        longer = [
            n + (counts[name] > 1 and n < len(path.parts)) for path, n, name in zip(paths, lengths, names, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ: name -> the value of each run, None if it does not have it."""
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    rows = {name: tuple(of_run.get(name) for of_run in settings) for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def packages_of(run_id: object) -> list[Path]:
    """Return the packages of the user's registry that were exported from a run."""
    registry = Registry.of_user()
    return [path for path in map(registry.path_of, registry.digests()) if _run_of(path) == run_id]


@cache
def _run_of(package: Path) -> str | None:
    with suppress(PackageError):  # a damaged one concerns its own commands
        return read_manifest(package)[0].provenance.run
    return None
