"""What is to be verified, and what cannot be. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import config_from_mapping, flag
from paceline.errors import ConfigError
from paceline.task import check_spec
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

_NOT_HERE = (
    *("on", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id", "token_file", "recover", "max_restarts"),
    *("spares", "resume", "checkpoint_every", "keep", "backup_to", "eval_every", "early_stop", "best"),
    *("walltime", "profile", "verify_every", "balance"),
)


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
