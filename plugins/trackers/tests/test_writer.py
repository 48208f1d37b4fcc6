"""The thread that sends a run's records to a tracker, and the names that are refused."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import Media
from paceline.runs.trackers import RunInfo
from paceline_trackers.media import read_media
from paceline_trackers.writer import TrackerWriter, require_trackers


class Recorder:
    """A tracker in memory."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.opened: list[str | None] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tags: dict[str, str] = {}
        self.closed = False
        self._fails_at = fails_at

    def open(self, run: RunInfo, earlier: str | None) -> str:
        self.opened.append(earlier)
        return earlier or "there"

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("https://me:secret@tracker.example does not answer\nand more")
        self.rows.append((step, dict(values)))

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        self.tags = {**tags, **{name: str(value) for name, value in values.items()}}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tracked(tmp_path: Path) -> RunInfo:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return RunInfo(id="abc", name="run", task="t.py:T", directory=directory, options={"seed": 0}, tags={})


def train(step: int, loss: float = 0.5) -> dict[str, Any]:
    return {"kind": "train", "time": 1.0, "step": step, "loss": loss, "lr": 0.1, "ranks": []}


def evaluation(step: int) -> dict[str, Any]:
    return {"kind": "eval", "time": 1.0, "step": step, "split": "val", "metrics": {"accuracy": 0.5}}


def test_steps_that_are_done_again_are_not_sent_again(tracked: RunInfo) -> None:
    first = Recorder()
    writer = TrackerWriter("mlflow", first, tracked)
    for record in (train(10), train(20), evaluation(20), train(30)):
        writer.write(record)
    writer.close()
    assert [step for step, _ in first.rows] == [10, 20, 20, 30]
    assert first.closed
    # The run was killed, and goes on from step 20; its evaluation there was sent.
    second = Recorder()
    writer = TrackerWriter("mlflow", second, tracked)
    for record in (evaluation(20), train(30), evaluation(30), train(40, loss=float("nan"))):
        writer.write(record)
    writer.finish({"model_sha256": "f00d", "metrics": {"test": {"accuracy": 0.75, "nothing": None}}})
    writer.close()
    assert second.opened == ["there"]
    assert second.rows == [(30, {"eval/val/accuracy": 0.5}), (40, {"train/lr": 0.1})]
    assert second.tags == {"paceline.model_sha256": "f00d", "final/test/accuracy": "0.75"}


def test_what_a_tracker_lacks_is_sent_when_the_run_goes_on(tracked: RunInfo) -> None:
    first = Recorder(fails_at=20)
    writer = TrackerWriter("mlflow", first, tracked)
    writer.write(train(10))
    writer.write(train(20))
    writer.close()
    second = Recorder()
    earlier = [train(10), train(20), {**evaluation(20), "metrics": {"accuracy": None}}]
    writer = TrackerWriter("mlflow", second, tracked, earlier)
    writer.write(train(30))
    writer.close()
    assert [step for step, _ in second.rows] == [20, 20, 30]


def test_images_that_a_tracker_lacks_are_sent_when_the_run_goes_on(tracked: RunInfo) -> None:
    class Gallery(Recorder):
        shown: ClassVar[list[tuple[int, str, str]]] = []

        def log_media(self, step: int, at: float, media: Media) -> None:
            self.shown.append((step, media.name, type(media).__name__))

    for step in (2, 4, 90):
        for kind, content in ((".txt", b"x"), (".json", b'{"counts": [1], "edges": [0, 1]}'), (".png", b"damaged")):
            path = tracked.directory.media / "a/b" / f"step-{step:08d}{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    earlier = [train(2), train(4)]
    media = read_media(tracked.directory, last_step=4)
    for _ in range(2):  # the second time, nothing is lacking
        writer = TrackerWriter("mlflow", Gallery(), tracked, [*earlier, *media])
        writer.close()
    kinds = ("LoggedHistogram", "LoggedText")
    assert Gallery.shown == [(step, "a/b", kind) for step in (2, 4) for kind in kinds]


def test_a_tracker_that_fails_is_told_once_and_stops_nothing(
    tracked: RunInfo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    recorder = Recorder(fails_at=20)
    writer = TrackerWriter("mlflow", recorder, tracked)
    for step in (10, 20, 30):
        writer.write(train(step))
    writer.close()
    writer.write(train(40))
    writer.close()
    assert [step for step, _ in recorder.rows] == [10]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == (
        "--log-to mlflow failed: ConnectionError: https://tracker.example does not answer. metrics.jsonl and "
        "TensorBoard have all records. Training continues; a later resume of the run sends the rest."
    )


def test_a_finished_run_promises_no_rest(tracked: RunInfo, caplog: pytest.LogCaptureFixture) -> None:
    """It is not resumed, so nothing would send it."""
    caplog.set_level(logging.WARNING)
    writer = TrackerWriter("mlflow", Recorder(fails_at=20), tracked)
    writer.write(train(20))
    writer.finish({"metrics": {}})
    writer.close()
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.endswith("does not answer. metrics.jsonl and TensorBoard have all records.")


def test_a_tracker_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--log-to must be mlflow or wandb, but is 'comet'"):
        RunConfig(log_to=("comet",))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    require_trackers(("mlflow",))
    with pytest.raises(ConfigError, match=r"pip install 'wandb<"):
        require_trackers(("mlflow", "wandb"))
