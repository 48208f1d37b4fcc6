"""What is to be verified, and what cannot be. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import config_from_mapping, flag
from paceline.config.option_sets import select
from paceline.errors import ConfigError
from paceline.task_loading import check_spec
from paceline.verification.methods import Method

_OURS = {
    "strategy": "--strategies",
    "mesh": "--strategies",
    "reduction": "--strategies",
    "nproc": "--worlds",
    "max_steps": "--steps",
    "epochs": "--steps",
}
"""Options of a run for which this command has its own."""

FIXED: dict[str, Any] = {
    "on": "spawn",
    "resume": "never",
    "recover": "none",
    "eval_every": "never",
    "checkpoint_every": ("never",),
    "workers": 0,  # they could not import the class that is put around the task
    "balance": "equal",
    "log_every": 1_000_000,
}
"""Options of all runs."""

_SCOPES = ("place", "start", "recovery", "evaluation", "records")
_NOT_HERE = dict.fromkeys((*select(lambda its: its.scope in _SCOPES), *FIXED))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to verify.

    Attributes:
        task: as ``paceline train`` takes it.
        options: of all runs.
        methods: which.
        worlds: numbers of processes.
        steps: of each run.
    """

    task: str
    options: Mapping[str, Any]
    methods: Sequence[Method]
    worlds: Sequence[int]
    steps: int

    def check(self) -> None:
        """Refuse what cannot be verified.

        Raises:
            UserError: says what to give instead.
        """
        check_spec(self.task)
        if self.steps < 1:
            raise ConfigError(f"--steps must be at least 1, but is {self.steps}.")
        for name, own in _OURS.items():
            if name in self.options:
                raise ConfigError(f"{flag(name)} is what verify varies itself. Use {own}.")
        for name in _NOT_HERE:
            if name in self.options:
                raise ConfigError(
                    f"{flag(name)} does not matter to verify, which trains a few steps on this machine. "
                    "Leave it out."
                )
        shards = self.options.get("shards")
        if isinstance(shards, int) and shards < max(self.worlds):
            raise ConfigError(
                f"--shards {shards} is too few for --worlds {max(self.worlds)}: each process needs one. "
                f"Use --shards {max(self.worlds)} or more."
            )
        config_from_mapping(dict(self.options), "the command line")
