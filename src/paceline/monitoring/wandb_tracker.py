"""Weights & Biases: into the run's directory, offline, unless ``WANDB_MODE`` says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.monitoring.tracker import Tracked


class WandbTracker:
    """One W&B run, with the id of ours: ``wandb sync RUN/wandb/offline-*`` puts its parts together."""

    def __init__(self) -> None:
        self._run: Any = None
        self._finished = False

    def open(self, run: Tracked, earlier: str | None) -> str:
        import wandb

        there = earlier or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            id=there,
            name=run.name,
            resume="allow",
            dir=run.directory.path,
            mode=_mode(),
            config={**run.options, **run.tags},
            reinit="create_new",
            # Neither the command line, nor the machine, nor what is printed leaves it.
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return there

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "time": at}, step=step)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        self._run.summary.update({**tags, **values})
        self._finished = True

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=0 if self._finished else 1)
        wandb.teardown()  # else its helper process stays as long as this one


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"
