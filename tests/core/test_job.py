from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.job import WorkerConfig, default_run_path


@pytest.mark.parametrize(
    "job",
    [
        WorkerConfig(config=RunConfig()),
        WorkerConfig(
            config=RunConfig(
                task='a "b"/ü.py:T',
                set=("lr=0.1", "text=a\nb"),
                nproc=3,
                ema=0.5,
                checkpoint_every=("1epoch", "5min"),
            ),
            quiet=True,
            supervised=True,
        ),
        WorkerConfig(
            config=RunConfig(task="t"),
            fields={"none": None, "sizes": [1, None, 2.5], "text": "ü\n", "on": True},
        ),
    ],
    ids=["defaults", "options", "fields"],
)
def test_a_job_round_trips_through_its_file(job: WorkerConfig, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job.to_toml(), encoding="utf-8")
    assert WorkerConfig.from_toml(path) == job


def test_a_file_holds_only_what_is_not_the_default() -> None:
    text = "quiet = false\nsupervised = false\nstarted = 5.5\nexplicit_options = []\n\n[config]\nseed = 3\n"
    assert WorkerConfig(config=RunConfig(seed=3), started=5.5).to_toml() == text


def test_an_option_of_another_version_is_refused_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(WorkerConfig(config=RunConfig()).to_toml() + "\nwarp = 9\n")
    with pytest.raises(ConfigError, match=r"job\.toml: there is no option 'warp'"):
        WorkerConfig.from_toml(path)


@pytest.mark.parametrize(
    ("spec", "name"),
    [("fashion-mnist", "fashion-mnist"), ("a/b c.py:MyTask_2", "mytask-2"), ("x:", "x"), (":::", "run")],
)
def test_a_run_is_named_after_its_task(spec: str, name: str) -> None:
    assert re.fullmatch(rf"runs/{name}-\d{{8}}-\d{{6}}", default_run_path(spec))
