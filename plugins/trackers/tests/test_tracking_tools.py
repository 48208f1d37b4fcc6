"""Runs side by side on the pages of TensorBoard and MLflow."""

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
from tests.processes import Processes
from tests.runs.made import make_run, make_search

from paceline.core.errors import ConfigError
from paceline_pages.runs_command import runs


def test_a_tool_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    made, other = (make_run(tmp_path / name).path for name in ("a", "c"))
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        runs(compare=(made, other), in_="mlflow")


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
from paceline_pages.comparison import read_runs
from paceline.runs.directory import RunDirectory
from paceline.runs.trackers import RunInfo
from paceline_trackers.mlflow import MlflowTracker, conclude_mlflow_search
from paceline_trackers.tracking_tools import write_mlflow
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
