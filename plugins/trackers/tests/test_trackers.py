"""MLflow and Weights & Biases with their real libraries, offline."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from tests.processes import Processes

from paceline.core.files import read_json_lines
from paceline_trackers.mlflow import mlflow_metrics

TASK = Path(__file__).parents[3] / "tests/lab/paced.py"

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


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped, and continued to its end, with both trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    processes = Processes(folder)
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1"}
    options = ["--run-dir", folder / "run", "--threads", "1", "--log-every", "2", "--eval-every", "4steps"]
    options += ["--checkpoint-every", "5steps", "--log-to", "mlflow", "--log-to", "wandb"]
    options += ["--max-steps", "16"]
    # As `wandb offline` writes it: W&B's own settings decide.
    (folder / "settings").write_text("[default]\nmode = offline\n")
    store["WANDB_CONFIG_DIR"] = str(folder)
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
import paceline
import torch

class Shown(paceline.Callback):
    def on_step_end(self, step, loss):
        if step % 4 == 0:
            paceline.log_image("samples/grid", torch.full((3, 4, 5), step / 16))
            paceline.log_text("prompt", f"step <{{step}}>")
            paceline.log_histogram("weights", [0.0, step, step, float("nan")])

@dataclass
class Stopped(paced.Paced):
    def build_callback(self, model, schedule):
        return Shown()

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
artifacts = [item.path for folder in ("images", "media/prompt", "media/weights")
             for item in client.list_artifacts(run.info.run_id, folder)]
print(json.dumps([run.info.status, run.data.params, run.data.tags, history, artifacts]))
"""
    uri = f"sqlite:///{resumed}/mlflow.db"
    done = run_processes.run([sys.executable, "-c", read, uri], env={"MLFLOW_DISABLE_TELEMETRY": "true"}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    status, params, tags, history, artifacts = json.loads(done.stdout.splitlines()[-1])
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
    shown = [f"media/{name}/step-{step:08d}{suffix}" for name, suffix in MEDIA[1:] for step in (4, 8, 12, 16)]
    assert [path for path in artifacts if path.startswith("media/")] == shown
    images = [re.findall(r"\+step\+(\d+)", path) for path in artifacts if path.endswith(".png")]
    assert sorted(int(step) for (step,) in images) == [4, 8, 12, 16]


MEDIA = [("samples/grid", ".png"), ("prompt", ".txt"), ("weights", ".json")]


@pytest.mark.integration
def test_tensorboard_and_the_run_have_each_image_text_and_histogram_once(resumed: Path) -> None:
    media = resumed / "run" / "media"
    files = sorted(str(path.relative_to(media)) for path in media.rglob("*") if path.is_file())
    assert files == sorted(f"{name}/step-{step:08d}{suffix}" for name, suffix in MEDIA for step in (4, 8, 12, 16))
    with Image.open(media / "samples/grid/step-00000008.png") as image:
        assert (image.size, image.getpixel((0, 0))) == ((5, 4), (128, 128, 128))
    assert (media / "prompt/step-00000016.txt").read_text() == "step <16>"
    histogram = json.loads((media / "weights/step-00000004.json").read_text())
    assert (histogram["counts"][0], histogram["counts"][-1], len(histogram["edges"])) == (1, 2, 65)
    assert (histogram["sum"], histogram["sum_of_squares"], histogram["nonfinite"]) == (8.0, 32.0, 1)

    events = EventAccumulator(str(resumed / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tags = {"samples/grid": "images", "prompt/text_summary": "text", "weights": "histograms"}
    for tag, plugin in tags.items():
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == plugin
        assert [event.step for event in events.Tensors(tag)] == [4, 8, 12, 16]
    width, height, png = events.Tensors("samples/grid")[1].tensor_proto.string_val[:3]
    assert (width, height, png) == (b"5", b"4", (media / "samples/grid/step-00000008.png").read_bytes())
    assert events.Tensors("prompt/text_summary")[3].tensor_proto.string_val[0] == b"step <16>"
    buckets = make_ndarray(events.Tensors("weights")[0].tensor_proto)
    assert buckets[:, 2].sum() == 3


OPEN = """
import sys
from pathlib import Path
from paceline_trackers.mlflow import MlflowTracker
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


def test_wandb_without_an_api_key_is_one_warning_that_says_what_to_do(
    run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    env = {"WANDB_CONFIG_DIR": str(tmp_path), "NETRC": str(tmp_path / "none")}
    options = ("--run-dir", tmp_path / "run", "--max-steps", "4", "--threads", "1", "--log-every", "2")
    done = run_processes.paceline("train", f"{TASK}:Paced", *options, "--log-to", "wandb", env=env)
    assert done.returncode == 0
    assert done.stderr.count("--log-to wandb failed") == 1
    assert "wandb login, or set WANDB_MODE=offline" in done.stderr


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
    for name in ("samples/grid", "prompt", "weights"):
        assert [row["_step"] for row in read["rows"] if name in row or f"{name}._type" in row] == [4, 8, 12, 16]
    assert read["config"]["max_steps"] == 16
    # Nothing of the machine or the command line was written.
    files = [path.name for path in (resumed / "run" / "wandb").rglob("*") if path.is_file()]
    assert "wandb-metadata.json" not in files
    assert "requirements.txt" not in files
