"""Runs side by side: in the terminal, and on the pages of TensorBoard and MLflow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.insight.made import make_run, record
from tests.processes import Processes

from paceline.cli.runs import runs
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.insight.comparison import read_runs
from paceline.runs.metric_writers import TensorBoardWriter
from paceline.runs.status import configuration


def make_search(root: Path, trials: int) -> Path:
    """A search whose trials have rising learning rates and accuracies."""
    for number in range(trials):
        directory = make_run(
            root / "search" / "trials" / f"{number:05d}",
            steps=3,
            run_id=f"{number:016x}",
            fields={"lr": 0.1 * (number + 1), "act": "relu" if number % 2 else "tanh"},
            accuracy=number / trials,
        )
        writer = TensorBoardWriter(directory.tensorboard, 1, configuration(directory.read_manifest()))
        for step in (1, 2, 3):
            writer.write(record(step, float(step)))
        writer.close()
    settings = {"options": {"task": "task.py:Task"}, "metric": "accuracy:max", "space": ["lr=log:0.01:1"]}
    (root / "search" / "tune.json").write_text(json.dumps(settings))
    best = {"trial": trials - 1, "accuracy": (trials - 1) / trials}
    (root / "search" / "result.json").write_text(json.dumps({"metric": "accuracy:max", "best": best}))
    return root / "search"


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


def test_what_cannot_be_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    make_run(tmp_path / "c")
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        runs(compare=(made, tmp_path / "c"), in_="mlflow")


def test_a_narrow_terminal_shows_whole_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make_search(tmp_path, 12)
    wide = printed(capsys, search)
    heading = next(line for line in wide.splitlines() if line.strip().startswith("run "))
    width = len(heading.rstrip()) - 10
    monkeypatch.setattr("paceline.cli.runs._PIPE_COLUMNS", width)
    narrow = printed(capsys, search)
    assert max(map(len, narrow.splitlines())) <= width
    words = [word for word in narrow.split() if "─" not in word]
    twice = ["run", *(f"search/{number:05d}" for number in range(12))]
    assert sorted(words) == sorted([word for word in wide.split() if "─" not in word] + twice)


@pytest.mark.system
def test_tensorboard_has_the_hyperparameters_and_final_metrics_of_a_search(
    tmp_path: Path, run_processes: Processes, wait_until: Callable[..., None]
) -> None:
    search = make_search(tmp_path, 32)
    os.mkfifo(search / "trials" / "00003" / "tensorboard" / "events.out.tfevents.1")  # would block a reader
    command = [sys.executable, "-m", "paceline", "runs", "--compare", search, "--in", "tensorboard", "--json"]
    popen = run_processes.start(command)
    assert popen.stdout is not None
    url = json.loads(popen.stdout.readline())["url"].partition("#")[0]
    assert url.startswith("http://127.0.0.1:")

    def ask(path: str, **question: Any) -> Any:
        content = json.dumps(question).encode() if question else None
        request = Request(f"{url}data/{path}", content, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    wait_until(lambda: len(ask("runs")) == 33, "all runs")  # and the description of the experiment
    assert [step for _, step, _ in ask("plugin/scalars/scalars?run=search/00004&tag=train/loss")] == [1, 2, 3]
    groups = ask(
        "plugin/hparams/session_groups",
        experimentName="",
        allowedStatuses=["STATUS_SUCCESS"],
        colParams=[{"metric": {"tag": "final/val/accuracy", "group": ""}, "order": "ORDER_DESC"}],
        startIndex=0,
        sliceSize=64,
    )["sessionGroups"]
    assert len(groups) == 32
    assert groups[0]["name"] == "search/00031"
    hparams = groups[0]["hparams"]
    assert (hparams["lr"], hparams["act"]) == (pytest.approx(3.2), "relu")
    assert groups[0]["metricValues"][0]["value"] == pytest.approx(31 / 32)
    popen.send_signal(signal.SIGINT)
    done = run_processes.finish(popen)
    assert (done.returncode, done.stderr) == (0, "")


IMPORT = """
import json, sys
from pathlib import Path
from paceline.insight.comparison import read_runs
from paceline.insight.tracking_tools import write_mlflow
from paceline.runs.directory import RunDirectory
from paceline.runs.trackers import MlflowTracker, RunInfo, conclude_mlflow_search
from mlflow.tracking import MlflowClient

folder = Path(sys.argv[1])

def show(uri):
    client = MlflowClient(uri)
    shown = {}
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        history = lambda name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
        shown[run.info.run_id] = {
            "name": run.info.run_name, "status": run.info.status, "params": run.data.params, "tags": run.data.tags,
            "metrics": {name: history(name) for name in run.data.metrics},
            "artifacts": [item.path for item in client.list_artifacts(run.info.run_id)],
        }
    return shown

uri, _ = write_mlflow(read_runs([folder / "search", folder / "other"]), folder)
copied = show(uri)
# The same search, as trials that log to a tracker while they train.
trackers = [MlflowTracker(), MlflowTracker()]
for number, tracker in enumerate(trackers):
    tracker.open(RunInfo.read(RunDirectory(folder / "search" / "trials" / f"{number:05d}")), None)
for tracker in trackers:
    tracker.conclude({}, {})
    tracker.close()
result = json.loads((folder / "search" / "result.json").read_text())
assert conclude_mlflow_search(folder / "search", {**result, "done": True}) is None
assert conclude_mlflow_search(folder / "other", result) is None
print(json.dumps([copied, show(None)]))
"""


@pytest.mark.system
def test_mlflow_has_a_search_as_the_parent_of_its_trials(tmp_path: Path, run_processes: Processes) -> None:
    make_search(tmp_path, 2)
    other = make_run(tmp_path / "other", steps=3, spikes=[2], run_id="f" * 16, fields={"lr": 2.0})
    (other.path / "report.html").write_text("<p>a report</p>")
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/live/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = run_processes.run([sys.executable, "-c", IMPORT, tmp_path], env=store)
    assert done.returncode == 0, done.stderr
    copied, live = json.loads(done.stdout.splitlines()[-1])
    by_name = {run["name"]: (run_id, run) for run_id, run in copied.items()}
    assert by_name.keys() == {"search", "search/00000", "search/00001", "other"}
    parent_id, parent = by_name["search"]
    trial = by_name["search/00001"][1]
    assert trial["tags"]["mlflow.parentRunId"] == parent_id
    assert (trial["status"], parent["status"]) == ("FINISHED", "FINISHED")
    assert (trial["params"]["task.lr"], trial["params"]["epochs"]) == ("0.2", "4")
    assert trial["metrics"]["final/val/accuracy"] == [[3, 0.5]]
    assert parent["metrics"]["best/val/accuracy"] == [[0, 0.5]]
    assert parent["params"]["space"] == "['lr=log:0.01:1']"
    apart = by_name["other"][1]
    losses = [json.loads(line) for line in other.metrics.read_text().splitlines()]
    assert apart["metrics"]["train/loss"] == [[r["step"], r["loss"]] for r in losses if r["loss"] is not None]
    assert apart["artifacts"] == ["report.html"]
    assert apart["tags"]["paceline.report"] == str(other.path / "report.html")
    assert "report" in apart["tags"]["mlflow.note.content"]
    assert "mlflow.parentRunId" not in apart["tags"]
    parents = [run_id for run_id, run in live.items() if run["name"] == "search"]
    assert len(parents) == 1
    assert live[parents[0]]["metrics"] == parent["metrics"]
    assert live[parents[0]]["tags"]["paceline.best_trial"] == parent["tags"]["paceline.best_trial"] == "00001"
    assert [run["tags"].get("mlflow.parentRunId") for run in live.values() if run["name"] != "search"] == parents * 2
    assert {run["status"] for run in live.values()} == {"FINISHED"}
