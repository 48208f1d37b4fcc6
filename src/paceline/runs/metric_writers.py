"""Metric writers and per-rank telemetry."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psutil

from paceline.core.errors import RunDirectoryError
from paceline.core.files import DISK_ERRORS, ResilientAppendFile, read_json_lines, write_atomically

if TYPE_CHECKING:
    from paceline.runs.monitor import PhaseTimer

# --- ``metrics.jsonl`` and TensorBoard, without duplicate points after a restart ---


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Media(ABC):
    """An image, a text or a histogram of a run.

    Attributes:
        step: steps done.
        path: its file in the run's directory.
        content: of the file.
    """

    name: str
    step: int
    path: Path
    content: bytes

    @abstractmethod
    def summary_value(self) -> Any:
        """Return it as TensorBoard's ``Summary.Value``."""


class Writer(Protocol):
    """Writes the records of a run, in the order of their steps."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record (see :mod:`paceline.runs.monitor` for its keys) before returning."""

    def write_media(self, media: Media) -> None:
        """Write an image, a text or a histogram, of which the run has a file already."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the end of the run; ``result`` is the content of ``result.json``."""

    def close(self) -> None:
        """Write queued records and close the file."""


class JsonlWriter:
    """``metrics.jsonl``: one JSON object per line. NaN and infinite numbers become ``null``.

    (JSON has no NaN; pandas, DuckDB and jq read ``null`` as a missing number.)

    Raises:
        RunDirectoryError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Written at once, so that a killed run loses no record and `tail -f` shows each.
        self._file = ResilientAppendFile(path, _log.warning)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(finite(record), allow_nan=False) + "\n").encode())

    def write_media(self, media: Media) -> None:
        pass  # its file is enough

    def finish(self, result: Mapping[str, Any]) -> None:
        pass  # ``result.json`` has it

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard: ``train/*``, ``eval/SPLIT/NAME``, ``final/SPLIT/NAME`` and ``rank/N/*``.

    The run's configuration is on TensorBoard's HParams page, with the final metrics.

    An event file is a sequence of TFRecords. This class uses TensorBoard's own record
    writer, because its higher-level writer imports TensorFlow if that is installed.

    Args:
        purge_step: TensorBoard drops points of earlier files from this step on.
        hparams: the run's configuration.

    Raises:
        RunDirectoryError: the file cannot be written.
    """

    def __init__(self, directory: Path, purge_step: int, hparams: Mapping[str, Any] = MappingProxyType({})) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        # TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = ResilientAppendFile(directory / name, _log.warning)
        self._frame = RecordWriter
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=purge_step, session_log=restart))
        if hparams:
            self._add(Event(wall_time=time.time(), summary=Summary(value=[begin_session(hparams)])))

    def write(self, record: Mapping[str, Any]) -> None:
        self._write(record["step"], scalars(record))

    def write_media(self, media: Media) -> None:
        self._write(media.step, (), media.summary_value())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final metrics; ``result`` is the content of ``result.json``."""
        self._write(int(result.get("steps", 0)), final_scalars(result.get("metrics", {})), end_session(succeeded=True))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, values: Iterable[tuple[str, float]], *more: Any) -> None:
        summary = self._summary(value=[*(self._summary.Value(tag=n, simple_value=v) for n, v in values), *more])
        self._add(self._event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Any) -> None:
        framed = io.BytesIO()
        self._frame(framed).write(event.SerializeToString())
        self._file.write(framed.getvalue())


def begin_session(hparams: Mapping[str, Any]) -> Any:
    """Return the summary value that gives a run its row on TensorBoard's HParams page."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    start = SessionStartInfo()
    for name, value in hparams.items():
        set_hparam(start.hparams[name], value)
    return plugin_value("session_start_info", HParamsPluginData(session_start_info=start))


def end_session(*, succeeded: bool) -> Any:
    """Return the summary value with which the row says how the run ended."""
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS, STATUS_UNKNOWN
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=STATUS_SUCCESS if succeeded else STATUS_UNKNOWN, end_time_secs=time.time())
    return plugin_value("session_end_info", HParamsPluginData(session_end_info=end))


def set_hparam(message: Any, value: Any) -> None:
    """Set a ``google.protobuf.Value`` to a hyperparameter; lists and tables become text."""
    if isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int | float):
        message.number_value = float(value)
    else:
        message.string_value = json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)


def plugin_value(kind: str, content: Any) -> Any:
    """Return a summary value of the HParams plug-in (``tensorboard/plugins/hparams/plugin_data.proto``)."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
    return Summary.Value(tag=f"_hparams_/{kind}", metadata=SummaryMetadata(plugin_data=plugin))


def has_tensorboard() -> bool:
    """Return whether TensorBoard, an extra, is installed; without it a run has no files for it."""
    return importlib.util.find_spec("tensorboard") is not None


def preload_tensorboard() -> None:
    """Import the modules of :class:`TensorBoardWriter`, if it can be used; that takes a third of a second."""
    if not has_tensorboard():
        return
    import tensorboard.compat.proto.event_pb2
    import tensorboard.compat.proto.summary_pb2
    import tensorboard.plugins.hparams.plugin_data_pb2
    import tensorboard.summary.writer.record_writer  # noqa: F401


def keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records after ``step`` from a ``metrics.jsonl``, and return the rest.

    A killed run leaves records of steps that the resumed run repeats. The file is replaced atomically.
    """
    kept = [r for r in read_json_lines(path, errors="replace") if _is_record(r) and r["step"] <= step]
    content = "".join(json.dumps(r) + "\n" for r in kept).encode()
    try:
        if path.exists() and path.read_bytes() != content:
            write_atomically(path, content)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise RunDirectoryError(
                f"cannot write {path}: {error.strerror}. Make it writable, then resume the run."
            ) from error
        _log.warning("%s keeps records of steps that will be repeated: %s.", path, error.strerror)
    return kept


def _is_record(record: Mapping[str, Any]) -> bool:
    """Return whether a line of ``metrics.jsonl`` is what was written there: a damaged one must not stop a run."""
    try:
        figures = [record["step"], *(value for _, value in scalars(record))]
        if record["kind"] == "train":
            figures.append(record["seconds"])
    except (KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(figure, int | float) for figure in figures) and record["kind"] in ("train", "eval")


def finite(value: Any) -> Any:
    """Replace every NaN and infinity by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a record's numbers under the names that trackers and TensorBoard show."""
    if record["kind"] == "eval":
        for name, value in record["metrics"].items():
            if value is not None:
                yield f"eval/{record['split']}/{name}", value
        return
    for name in ("loss", "lr", "samples_per_s", "imbalance"):
        if record.get(name) is not None:
            yield f"train/{name}", record[name]
    for number, rate in enumerate(record.get("learning_rates", ())):
        yield f"train/lr/{number}", rate
    for name, value in record.get("logged", {}).items():
        yield f"train/{name}", value
    for status in record["ranks"]:
        for name in ("step_ms", "memory_mib", "utilisation"):
            if status[name] is not None and math.isfinite(status[name]):
                yield f"rank/{status['rank']}/{name}", status[name]


def final_scalars(metrics: Mapping[str, Mapping[str, float | None]]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of ``result.json`` under the names that trackers and TensorBoard show."""
    for split, values in metrics.items():
        for name, value in values.items():
            if value is not None:
                yield f"final/{split}/{name}", float(value)


# --- A rank's telemetry, as a few floats that are reduced along with the gradients ---


class RankStatus(NamedTuple):
    """One rank's telemetry since its last sample; the order is the row's.

    Attributes:
        step_s: mean seconds per training step (without evaluations).
        busy_fraction: the part of ``step_s`` not spent waiting for the reduction, 0 to 1.
        memory_bytes: resident memory; on a GPU the peak of torch's allocator.
        utilisation: CPU seconds per second of this process (1.0 is one core); on a GPU the fraction of busy time, NaN
            without the package nvidia-ml-py, and where the driver does not tell, as for a part of a GPU (MIG).
    """

    step_s: float
    busy_fraction: float
    memory_bytes: float
    utilisation: float


STATUS_WIDTH = len(RankStatus._fields)
"""Numbers (float64) in a rank's status."""


class Telemetry:
    """Samples this process's resource use, without system calls between two samples.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N`` (a ``torch.device`` is accepted too).
        timer: the rank's phase timer, which separates work from waiting.
        first_step: steps done before this process started.
    """

    def __init__(self, device: object, timer: PhaseTimer, first_step: int = 0) -> None:
        self._cuda_device = str(device) if str(device).startswith("cuda") else None
        self._tells_utilisation = True
        self._timer = timer
        self._process = psutil.Process()
        self._step = first_step
        self._training_s = timer.training_s()
        self._waiting_s = timer.seconds["reduction"]
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def sample(self, step: int) -> RankStatus:
        """Return the telemetry since the last sample; ``step`` is the current step, counted from 1."""
        training_s, waiting_s = self._timer.training_s(), self._timer.seconds["reduction"]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent_s = training_s - self._training_s
        status = RankStatus(
            step_s=spent_s / max(step - self._step, 1),
            busy_fraction=1.0 - (waiting_s - self._waiting_s) / spent_s if spent_s > 0 else math.nan,
            memory_bytes=self._memory_bytes(),
            utilisation=self._utilisation(cpu_s - self._cpu_s, wall_s - self._wall_s),
        )
        self._step = step
        self._training_s = training_s
        self._waiting_s = waiting_s
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        return status

    def _memory_bytes(self) -> float:
        if self._cuda_device is None:
            return float(self._process.memory_info().rss)
        import torch

        return float(torch.cuda.max_memory_allocated(self._cuda_device))

    def _utilisation(self, cpu_s: float, wall_s: float) -> float:
        if self._cuda_device is None:
            return cpu_s / wall_s if wall_s > 0 else math.nan
        import torch

        if self._tells_utilisation:
            try:
                return torch.cuda.utilization(torch.device(self._cuda_device)) / 100
            except Exception as error:  # pynvml's errors have no base but this one
                self._tells_utilisation = False
                _log.info("the GPU's utilisation is not recorded: %s: %s", type(error).__name__, error)
        return math.nan


class Imbalance(NamedTuple):
    """The busy time of the slowest rank relative to the mean.

    Attributes:
        ratio: busy time of the slowest rank over the mean of all; 1.0 is balanced.
        rank: the slowest rank.
    """

    ratio: float
    rank: int


def imbalance(rows: Sequence[Sequence[float]]) -> Imbalance | None:
    """Compute the imbalance of the ranks' rows; None for one rank or without times.

    It compares busy time, because the step time is equal on all ranks: fast ones wait.
    """
    busy_s = [status.step_s * status.busy_fraction for status in map(RankStatus._make, rows)]
    if len(busy_s) < 2 or not all(math.isfinite(s) for s in busy_s) or sum(busy_s) <= 0:
        return None
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    return Imbalance(busy_s[slowest] * len(busy_s) / sum(busy_s), slowest)
