"""Runs in TensorBoard or MLflow: a copy of their records for the tool, which is served on loopback.

Nothing is written into the runs. The copy is in a temporary directory, which goes when the tool has ended.
"""

from __future__ import annotations

import importlib.metadata
import io
import json as json_module
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.files import read_json_lines, write_atomically
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.plugins import install_command
from paceline.core.signals import handle_signals
from paceline.core.sockets import free_loopback_port
from paceline.runs.metric_writers import (
    begin_session,
    end_session,
    final_scalars,
    has_tensorboard,
    plugin_value,
    set_hparam,
)
from paceline.runs.trackers import RunInfo
from paceline_pages.comparison import ComparedRun, differing_settings, packages_of
from paceline_pages.run_status import read_object
from paceline_trackers.mlflow import MlflowStore, mlflow_metrics, mlflow_tags
from paceline_trackers.writer import finite_scalars

Tool = Literal["tensorboard", "mlflow"]

_LOOPBACK = "127.0.0.1"
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
_POLL_S = 0.2
_LOG = "server.log"
_END_S = 3.0  # then the server is killed: it has nothing to save

# --- TensorBoard: links to the runs' own event files, and the HParams page of what differs ---

_LAST_FILE = "events.out.tfevents.9999999999.hparams"  # TensorBoard reads files by name; a restart purges earlier ones


def write_tensorboard(runs: Sequence[ComparedRun], folder: Path) -> None:
    """Fill a folder for ``tensorboard --logdir``: one directory for each run, and the description of the HParams."""
    from tensorboard.plugins.hparams import api_pb2

    def describe(name: str, values: Sequence[Any]) -> Any:
        info = api_pb2.HParamInfo(name=name, type=api_pb2.DATA_TYPE_FLOAT64, differs=True)
        different = {str(value): value for value in values if value is not None}.values()
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in different):
            info.type = api_pb2.DATA_TYPE_STRING
            for value in different:
                set_hparam(info.domain_discrete.values.add(), value)
        return info

    differing = differing_settings([run.settings for run in runs])
    tags = dict.fromkeys(tag for run in runs for tag, _ in final_scalars(run.metrics))
    infos = [describe(name, values) for name, values in differing.items()]
    write_events(folder / _LAST_FILE, 0, [describe_experiment("paceline runs --compare", infos, tags)])
    for run in runs:
        own = folder / run.name
        own.mkdir(parents=True)
        for path in run.directory.tensorboard.glob("events.out.tfevents.*"):
            if path.is_file():  # not a pipe, which would block TensorBoard
                (own / path.name).symlink_to(path.resolve())
        ended = [end_session(succeeded=run.summary.state == "finished")] if run.summary.state != "running" else []
        begun = begin_session({name: run.settings[name] for name in differing if name in run.settings})
        write_events(own / _LAST_FILE, run.summary.step or 0, [begun, *ended], final_scalars(run.metrics))


def describe_experiment(text: str, hparam_infos: Sequence[Any], metrics: Iterable[str]) -> Any:
    """Return the summary value that describes the hyperparameters of runs and the tags of their metrics."""
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    infos = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics]
    experiment = api_pb2.Experiment(description=text, hparam_infos=hparam_infos, metric_infos=infos)
    return plugin_value("experiment", HParamsPluginData(experiment=experiment))


def write_events(path: Path, step: int, values: Sequence[Any], scalars: Iterable[tuple[str, float]] = ()) -> None:
    """Write an event file of one step, whose directory may be missing: summary values, and scalars by tag."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    summary = Summary(value=[*values, *(Summary.Value(tag=tag, simple_value=value) for tag, value in scalars)])
    framed = io.BytesIO()
    for event in (Event(file_version="brain.Event:2"), Event(step=step, summary=summary)):
        event.wall_time = time.time()
        RecordWriter(framed).write(event.SerializeToString())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, framed.getvalue())


# --- MLflow: a database of its own, with searches as parents of their trials ---

_EXPERIMENT = "paceline runs --compare"
_MOST_METRICS = 1000  # in a batch; MLflow's own limit
_STATUS = {"finished": "FINISHED", "running": "RUNNING", "failed": "FAILED"}


def write_mlflow(runs: Sequence[ComparedRun], folder: Path) -> tuple[str, str]:
    """Make a database with the runs in a folder, and return its URI and the id of the runs' experiment."""
    store = MlflowStore(f"sqlite:///{folder}/mlflow.db")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    experiment = store.client.create_experiment(
        _EXPERIMENT,
        artifact_location=(folder / "artifacts").as_uri(),
        tags={"mlflow.experimentKind": "custom_model_development"},  # else its page is that of language models
    )
    parents: dict[Path, str] = {}
    for run in runs:
        if run.search is not None and run.search not in parents:
            parents[run.search] = _add_search(store, run.search, experiment, runs)
        _add_run(store, run, experiment, None if run.search is None else parents[run.search])
    return store.uri, str(experiment)


def _add_run(store: MlflowStore, run: ComparedRun, experiment: str, parent: str | None) -> None:
    info, report = RunInfo.read(run.directory), run.directory.path / "report.html"
    packages = packages_of(info.id)
    note = [f"`{info.task}`, trained in `{run.directory.path.absolute()}`."]
    tags = dict(info.tags)
    if parent is not None:
        tags["mlflow.parentRunId"] = parent
    if report.is_file():
        tags["paceline.report"] = str(report.absolute())
        note.append(f"Its report is among the artifacts, and in `{report.absolute()}`.")
    if packages:
        tags["paceline.package"] = " ".join(package.name for package in packages)
    note += [f"Exported as the package `{package}`." for package in packages]
    begin_ms, end_ms = _span_ms(run)
    tags |= mlflow_tags(info.task, "\n\n".join(note))
    run_id = store.create_run(experiment, run.name, tags, info.options, start_time=begin_ms)
    metrics: list[Any] = []
    for record in read_json_lines(run.directory.metrics, errors="replace"):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged line
            at = float(record.get("time", begin_ms / 1000))
            metrics += mlflow_metrics(int(record["step"]), at, finite_scalars(record))
    metrics += mlflow_metrics(run.summary.step or 0, end_ms / 1000, dict(final_scalars(run.metrics)))
    for start in range(0, len(metrics), _MOST_METRICS):
        store.client.log_batch(run_id, metrics=metrics[start : start + _MOST_METRICS])
    if report.is_file():
        store.client.log_artifact(run_id, str(report))
    status = _STATUS.get(run.summary.state, "KILLED")
    if status != "RUNNING":
        store.client.set_terminated(run_id, status, end_ms)


def _add_search(store: MlflowStore, search: Path, experiment: str, runs: Sequence[ComparedRun]) -> str:
    trials = [run for run in runs if run.search == search]
    spans = [_span_ms(run) for run in trials]
    begin_ms, end_ms = min(begin for begin, _ in spans), max(end for _, end in spans)
    parent = store.create_search(search, experiment, trials[0].summary.task or "", start_time=begin_ms)
    store.log_best(parent, read_object(search / "result.json"), end_ms / 1000)
    if all(run.summary.state != "running" for run in trials):
        store.client.set_terminated(parent, "FINISHED", end_ms)
    return parent


def _span_ms(run: ComparedRun) -> tuple[int, int]:
    """Return when a run was created, and when it had been active for its time, in Unix ms."""
    begin = run.summary.created or 0.0
    return int(begin * 1000), int((begin + (run.summary.seconds or 0.0)) * 1000)


# --- The tool's server ---


def show_runs(runs: Sequence[ComparedRun], tool: Tool, *, json: bool) -> int:
    """Serve the runs in the tool until Ctrl-C, and print the address of their page; ``json``: as JSON.

    Raises:
        ConfigError: the tool is not installed.
        LaunchError: its server has ended.
    """
    _require(tool)
    ended = threading.Event()
    if not json:
        print(f"Copying {len(runs)} runs for the tool, then starting it ...", file=sys.stderr)
    with (
        handle_signals((signal.SIGINT, signal.SIGTERM), lambda *_: ended.set()),
        tempfile.TemporaryDirectory(prefix="paceline-compare-", ignore_cleanup_errors=True) as created,
    ):
        folder, port = Path(created).resolve(), free_loopback_port()
        if tool == "tensorboard":
            write_tensorboard(runs, folder)
            command = ["-m", "tensorboard.main", "--logdir", str(folder)]
            name, page = "TensorBoard", "#hparams"
        else:
            uri, experiment = write_mlflow(runs, folder)
            command = ["-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
            name, page = "MLflow", f"#/experiments/{experiment}/runs"
        url = f"http://{_LOOPBACK}:{port}/{page}"
        with _server([sys.executable, *command, "--host", _LOOPBACK, "--port", str(port)], folder) as process:
            is_shown = False
            while not ended.wait(_POLL_S):
                if (code := process.poll()) is not None:
                    lines = (folder / _LOG).read_text(errors="replace").strip().splitlines()
                    last = lines[-1] if lines else f"exit code {code}"
                    raise LaunchError(f"{name} has ended: {last}. Run the command again.")
                if not is_shown and _is_listening(port):
                    is_shown = True
                    text = f"{name} shows {len(runs)} runs at {url} (Ctrl-C ends it)"
                    print(json_module.dumps({"url": url}) if json else text, flush=True)
    return 0


def _require(tool: Tool) -> None:
    """Check that the tool's page can be served, before anything is copied."""
    if tool == "tensorboard" and not has_tensorboard():
        raise ConfigError(
            f"--in tensorboard: TensorBoard is not installed. Install it: {install_command('tensorboard')}"
        )
    if tool == "mlflow":
        try:
            importlib.metadata.version("mlflow")  # mlflow-skinny, which --log-to needs, has no pages
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError("--in mlflow shows runs on MLflow's pages. Install them: pip install mlflow") from error


@contextmanager
def _server(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    own = {n: v for n, v in os.environ.items() if not n.startswith("MLFLOW_")} | _SETTINGS
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            kill_with_parent_command(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=own,
            start_new_session=True,  # Ctrl-C is for this command, which then ends the server and its children
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection((_LOOPBACK, port), timeout=_END_S):
        return True
    return False
