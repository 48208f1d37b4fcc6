"""A run in Weights & Biases, in the mode of W&B's own settings; its files are in the run directory."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ConfigError
from paceline.runs.metric_writers import Media
from paceline.runs.trackers import RunInfo
from paceline_trackers.media import LoggedHistogram, LoggedImage

# Send neither the command line, nor details of the node, nor the output.
_WANDB_ON = ("silent", "disable_git", "disable_job_creation", "x_disable_meta", "x_disable_machine_info")
_WANDB_SETTINGS: Any = dict.fromkeys((*_WANDB_ON, "x_disable_stats"), True) | {"console": "off"}
_WANDB_SETTINGS |= dict.fromkeys(("save_code", "x_save_requirements"), False)


class WandbTracker:
    """One W&B run with the same id as this run; ``wandb sync RUN/wandb/offline-*`` joins its parts."""

    def __init__(self) -> None:
        self._run: Any = None
        self._finished = False
        self.url: str | None = None

    def open(self, run: RunInfo, earlier: str | None) -> str:
        import wandb

        mode: Any = wandb.setup().settings.mode
        # Without a prompt, for which a job would wait.
        if mode in ("online", "run", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no API key: run wandb login, or set WANDB_MODE=offline")
        run_id = earlier or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            id=run_id,
            name=run.name,
            resume="allow",
            dir=run.directory.path,
            mode=mode,
            config={**run.options, **run.tags},
            reinit="create_new",
            settings=wandb.Settings(**_WANDB_SETTINGS),
        )
        self.url = self._run.url  # None while offline
        return run_id

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "time": at}, step=step)

    def log_media(self, step: int, at: float, media: Media) -> None:
        import numpy as np
        import wandb

        shown: Any
        if isinstance(media, LoggedImage):
            shown = wandb.Image(str(media.path))
        elif isinstance(media, LoggedHistogram):
            shown = wandb.Histogram(np_histogram=(np.array(media.counts), np.array(media.edges)))
        else:
            shown = wandb.Html(f"<pre>{html.escape(media.content.decode())}</pre>", inject=False)
        self._run.log({media.name: shown}, step=step)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        self._run.summary.update({**tags, **values})
        self._finished = True

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=0 if self._finished else 1)
        wandb.teardown()  # otherwise its helper process stays as long as this one
