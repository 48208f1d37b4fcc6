"""A job: the file with the configuration of a run's workers."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.errors import ConfigError
from paceline.core.files import parse_json, parse_toml, read_document


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker; the content of a ``job.toml``.

    Attributes:
        explicit_options: the names of the options that the user gave, also with their default values.
        fields: the task's fields, if a script gave them.
        quiet: show nothing on the terminal.
        supervised: a launcher of Paceline reports failures to the user.
        world_size: number of processes at the run's start, over all nodes; None if each process knows it.
        device: what the launcher has found on this node, which each process must find too; None if it has not looked.
        started: time of the request, in seconds since the epoch, at which ``--walltime`` begins.
        trial_scheduler: the socket of the scheduler that decides after each evaluation whether the run continues.
    """

    config: RunConfig
    explicit_options: frozenset[str] = frozenset()
    fields: Mapping[str, Any] | None = None
    quiet: bool = False
    supervised: bool = False
    world_size: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    started: float = field(default_factory=time.time)
    trial_scheduler: str | None = None

    def with_run_dir(self, path: Path) -> WorkerConfig:
        """Return the configuration of the run in another directory."""
        return replace(self, config=self.config.replace(run_dir=str(path)))

    def to_toml(self) -> str:
        """Return the job as text."""
        document: dict[str, Any] = {"quiet": self.quiet, "supervised": self.supervised}
        if self.world_size is not None:
            document["world_size"] = self.world_size
        if self.device is not None:
            document["device"] = self.device
        document["started"] = self.started
        if self.trial_scheduler is not None:
            document["trial_scheduler"] = self.trial_scheduler
        document["explicit_options"] = sorted(self.explicit_options)
        document["config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.config.non_defaults().items()}
        if self.fields is not None:
            # As JSON: a field may be None, which TOML has no word for.
            document["fields"] = json.dumps(dict(self.fields))
        return tomli_w.dumps(document)

    @classmethod
    def from_toml(cls, path: Path) -> WorkerConfig:
        """Read a job.

        Raises:
            ConfigError: the file is damaged, or an option is unknown or wrong.
        """
        try:
            document = parse_toml(read_document(path))
            fields = document.get("fields")
            return cls(
                config=config_from_mapping(document["config"], str(path)),
                explicit_options=frozenset(document["explicit_options"]),
                fields=None if fields is None else parse_json(fields),
                quiet=document["quiet"],
                supervised=document["supervised"],
                world_size=document.get("world_size"),
                device=document.get("device"),
                started=document["started"],
                trial_scheduler=document.get("trial_scheduler"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the job file {path} is damaged: {error!r:.200}. Start the run again.") from error


def default_run_path(spec: str) -> str:
    """``runs/TASK-TIME`` for a new run; with a number behind it where that is taken."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", spec.rpartition(":")[2] or spec).strip("-").lower()
    path = f"runs/{name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (f"{path}-{number}" for number in itertools.count(2))
    return path if not Path(path).exists() else next(p for p in numbered if not Path(p).exists())
