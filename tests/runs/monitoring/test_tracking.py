"""MLflow and Weights & Biases with their real libraries, offline."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.files import read_json_lines
from paceline.runs.directory import RunDirectory
from paceline.runs.trackers import RunInfo, TrackerWriter, mlflow_metrics, require

TASK = Path(__file__).parents[3] / "plugins/pages/tests/dashboard/paced.py"

READ_WANDB = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

def records(path):
    # LevelDB's log format, after a header of seven bytes.
    content, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""

rows, config, run_ids = [], {}, []
for path in sys.argv[1:]:
    for record in records(path):
        if record.HasField("history"):
            items = record.history.item
            rows.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in items})
        if record.HasField("run"):
            run_ids.append(record.run.run_id)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
print(json.dumps({"rows": rows, "config": config, "ids": run_ids}))
"""


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


@pytest.mark.integration
def test_mlflow_takes_every_name_of_a_metric() -> None:
    from mlflow.utils.validation import _validate_metric_name

    names = [
        "train/acc@5",
        "f1(macro)",
        "f1[macro]",
        "a//b",
        "../x",
        "/x",
        ".",
        "x" * 300,
        "größe",
        "50%",
        "a\tb",
        "Δ",
        "",
    ]
    names += ["eval/val/loss", "a b", "a:b", "a.b-c_d"]
    sent = [metric.key for metric in mlflow_metrics(1, 0, dict.fromkeys(names, 1.0))]
    for name in sent:
        _validate_metric_name(name)
        assert len(name) <= 250
    assert len(set(sent)) == len(names), "each has its own curve"
    assert (sent[0], sent[-4:]) == ("train/acc_at_5", names[-4:])


def test_a_tracker_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--log-to must be mlflow or wandb, but is 'comet'"):
        RunConfig(log_to=("comet",))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    require(("mlflow",))
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[wandb\]'"):
        require(("mlflow", "wandb"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped, and continued to its end, with both trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    processes = Processes(folder)
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1"}
    options = ["--run-dir", folder / "run", "--threads", "1", "--log-every", "2", "--eval-every", "4steps"]
    options += ["--checkpoint-every", "5steps", "--log-to", "mlflow", "--log-to", "wandb"]
    options += ["--max-steps", "16"]
    patch = pytest.MonkeyPatch()
    patch.delenv("WANDB_MODE", raising=False)
    try:
        (folder / "stop.py").write_text(STOP)
        begun = processes.paceline("train", f"{folder}/stop.py:Stopped", *options, env=store, timeout_s=150)
        assert begun.returncode == 75, begun.stderr
        going_on = processes.paceline("resume", folder / "run", env=store, timeout_s=150)
        assert going_on.returncode == 0, going_on.stderr
        # MLflow may not have made its tables when the run is stopped; it gets the rest when it goes on.
        assert "failed" not in begun.stderr + going_on.stderr
        assert "--log-to" not in going_on.stderr
    finally:
        patch.undo()
        processes.end_all()
    return folder


STOP = f"""
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
sys.path.insert(0, {str(TASK.parent)!r})
import paced

@dataclass
class Stopped(paced.Paced):
    def on_batch_begin(self, place):
        mark = Path(__file__).with_name("stopped")
        if place.split == "train" and place.step == 9 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_mlflow_has_each_step_once_in_one_run(resumed: Path, run_processes: Processes) -> None:
    read = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
(run,) = runs
of = lambda name: client.get_metric_history(run.info.run_id, name)
history = {name: [[m.step, m.value] for m in of(name)] for name in run.data.metrics}
print(json.dumps([run.info.status, run.data.params, run.data.tags, history]))
"""
    uri = f"sqlite:///{resumed}/mlflow.db"
    done = run_processes.run([sys.executable, "-c", read, uri], env={"MLFLOW_DISABLE_TELEMETRY": "true"}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    status, params, tags, history = json.loads(done.stdout.splitlines()[-1])
    records = read_json_lines(resumed / "run" / "metrics.jsonl")
    result = json.loads((resumed / "run" / "result.json").read_text())
    assert status == "FINISHED"
    losses = [[r["step"], pytest.approx(r["loss"])] for r in records if r["kind"] == "train"]
    assert sorted(history["train/loss"]) == losses
    assert [step for step, _ in losses] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [step for step, _ in sorted(history["eval/val/accuracy"])] == [4, 8, 12, 16]
    assert history["final/test/accuracy"][0][1] == result["metrics"]["test"]["accuracy"]
    assert (params["max_steps"], params["task.pace"]) == ("16", "")
    assert tags["paceline.model_sha256"] == result["model_sha256"]
    assert Path(tags["paceline.runs"]).is_dir()
    assert not {"token_file", "rdzv_endpoint"} & params.keys()


OPEN = """
import sys
from pathlib import Path
from paceline.runs.trackers import MlflowTracker
from paceline.runs.trackers import RUN_ID, RunInfo
from paceline.runs.directory import RunDirectory

directory, tags = RunDirectory(Path("run")), {RUN_ID: sys.argv[1]}
run = RunInfo(id=sys.argv[1], name="run", task="t.py:T", directory=directory, options={}, tags=tags)
tracker = MlflowTracker()
print(tracker.open(run, None))
tracker.log(1, 1.0, {"train/loss": 0.5})
tracker.close()
"""


@pytest.mark.slow
def test_a_new_database_of_mlflow_is_whole_or_not_there(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    command = [sys.executable, "-c", OPEN]
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new/mlflow.db"}
    first = run_processes.start([*command, "abc"], env=store)
    wait_until(lambda: any(file.stat().st_size for file in tmp_path.rglob("*mlflow.db")), "the first tables")
    first.kill()
    first.communicate()
    both = [run_processes.start([*command, run_id], env=store) for run_id in ("abc", "def")]
    abc, other = [run_processes.finish(popen) for popen in both]
    assert (abc.returncode, other.returncode) == (0, 0), abc.stderr + other.stderr
    # Whoever could not note which run it had begun finds it again.
    again = run_processes.run([*command, "abc"], env=store)
    assert again.stdout == abc.stdout != other.stdout


def test_wandb_has_each_step_once_under_one_id(resumed: Path, run_processes: Processes) -> None:
    parts = sorted((resumed / "run" / "wandb").glob("offline-run-*/*.wandb"))
    done = run_processes.run([sys.executable, "-c", READ_WANDB, *parts], timeout_s=60)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    records = read_json_lines(resumed / "run" / "metrics.jsonl")
    steps = [row["_step"] for row in read["rows"] if "train/loss" in row]
    assert steps == [r["step"] for r in records if r["kind"] == "train"]
    assert [row["_step"] for row in read["rows"] if "eval/val/accuracy" in row] == [4, 8, 12, 16]
    assert len(set(read["ids"])) == 1
    assert read["config"]["max_steps"] == 16
    # Nothing of the machine or the command line was written.
    files = [path.name for path in (resumed / "run" / "wandb").rglob("*") if path.is_file()]
    assert "wandb-metadata.json" not in files
    assert "requirements.txt" not in files
