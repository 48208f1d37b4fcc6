"""Runs side by side in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs.made import make_run, make_search

from paceline.core.errors import ConfigError, RunDirectoryError
from paceline_pages.comparison import read_runs
from paceline_pages.runs_command import runs


def printed(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    assert runs(compare=paths) == 0
    return capsys.readouterr().out


def test_what_differs_is_shown_side_by_side_with_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"lr": 0.1, "epochs": "the task's own"}
    make_run(tmp_path / "a", steps=5, fields=fields, config={"epochs": 4, "seed": 1, "run_dir": "a"}, accuracy=0.25)
    make_run(tmp_path / "b", steps=5, fields=fields | {"lr": 0.5}, config={"epochs": 4, "seed": 1, "run_dir": "b"})
    rows = [line.split() for line in printed(capsys, tmp_path / "a", tmp_path / "b").splitlines() if line.strip()]
    assert rows[0] == ["a", "b"]
    assert ["lr", "0.1", "0.5"] in rows
    assert ["val.accuracy", "0.25", "-"] in rows
    # Equal settings and places are left out.
    assert {row[0] for row in rows[2:]} == {"lr", "state", "steps", "time", "val.accuracy"}

    assert runs(compare=(tmp_path / "a", tmp_path / "b"), json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["differing_settings"] == {"lr": [0.1, 0.5]}
    settings = document["runs"][0]["settings"]
    assert (settings["epochs"], settings["task.epochs"]) == (4, "the task's own")
    assert document["runs"][0]["metrics"] == {"val": {"accuracy": 0.25}}


def test_many_runs_have_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = make_search(tmp_path, 6)
    make_run(tmp_path / "other", steps=3, fields={"lr": 0.1, "act": "\x1b[2J"})
    output = printed(capsys, search, tmp_path / "other")
    lines = [line.split() for line in output.splitlines() if line.strip()]
    assert lines[0] == ["run", "lr", "act", "state", "steps", "time", "val.accuracy"]
    assert [line[0] for line in lines[2:]] == [*(f"search/{number:05d}" for number in range(6)), "other"]
    assert lines[3][1:3] == ["0.2", "relu"]
    assert "\x1b[2J" not in output


def test_equal_names_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for place in ("a/x", "b/x", "y"):
        make_run(tmp_path / place)
    paths = [tmp_path / place for place in ("a/x", "b/x", "y", "b/../a/x")]
    assert [run.name for run in read_runs(paths)] == ["a/x", "b/x", "y"]


def test_what_cannot_be_compared_is_told(tmp_path: Path) -> None:
    made = make_run(tmp_path / "a").path
    with pytest.raises(ConfigError, match="at least two runs"):
        runs(compare=(made, made))
    with pytest.raises(RunDirectoryError, match="neither a run"):
        runs(compare=(made, tmp_path))
    with pytest.raises(ConfigError, match="--compare RUN RUN --in mlflow"):
        runs(in_="mlflow")
    (tmp_path / "search" / "trials").mkdir(parents=True)
    (tmp_path / "search" / "tune.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="no trials yet"):
        runs(compare=(made, tmp_path / "search"))
    make_run(tmp_path / "b").result.write_text("{")
    with pytest.raises(RunDirectoryError, match="b/result"):
        runs(compare=(made, tmp_path / "b"))


def test_a_narrow_terminal_shows_whole_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make_search(tmp_path, 12)
    wide = printed(capsys, search)
    heading = next(line for line in wide.splitlines() if line.strip().startswith("run "))
    width = len(heading.rstrip()) - 10
    monkeypatch.setattr("paceline.core.output._PIPE_COLUMNS", width)
    narrow = printed(capsys, search)
    assert max(map(len, narrow.splitlines())) <= width
    words = [word for word in narrow.split() if "─" not in word]
    twice = ["run", *(f"search/{number:05d}" for number in range(12))]
    assert sorted(words) == sorted([word for word in wide.split() if "─" not in word] + twice)
