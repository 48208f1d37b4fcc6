"""Where records go: ``metrics.jsonl`` and TensorBoard, without double points after a restart."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import RunDirectoryError
from paceline.monitoring.patient_file import PatientFile
from paceline.run_directory import DISK_ERRORS, read_json_lines, write_atomically

_log = logging.getLogger(__name__)


class Writer(Protocol):
    """Takes the records of a run, in the order of their steps; each is on its way to disk on return."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one record (see :mod:`paceline.monitoring.monitor` for its keys)."""

    def close(self) -> None:
        """Write what is left and release the file."""


class JsonlWriter:
    """``metrics.jsonl``: one JSON object a line. Numbers that are NaN or infinite become ``null``.

    (JSON has no NaN; ``null`` is what pandas, DuckDB and jq read as a missing number.)

    Raises:
        RunDirectoryError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Written at once: a killed run loses no record, and `tail -f` sees each.
        self._file = PatientFile(path, _log.warning)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write((json.dumps(finite(record), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard: ``train/*``, ``eval/SPLIT/NAME`` and ``rank/N/*``.

    An event file is a sequence of TFRecords; it is written here with TensorBoard's own record
    writer, because its higher-level writer imports TensorFlow where that is installed.

    Args:
        directory: where the event file is made.
        purge_step: TensorBoard forgets points of earlier files from this step on.

    Raises:
        RunDirectoryError: the file cannot be written.
    """

    def __init__(self, directory: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        # TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = PatientFile(directory / name, _log.warning)
        self._frame = RecordWriter
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=purge_step, session_log=restart))

    def write(self, record: Mapping[str, Any]) -> None:
        """Add an event with the record's scalars."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
        summary = self._summary(value=values)
        self._add(self._event(wall_time=time.time(), step=record["step"], summary=summary))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        framed = io.BytesIO()
        self._frame(framed).write(event.SerializeToString())
        self._file.write(framed.getvalue())


def preload_tensorboard() -> None:
    """Import what :class:`TensorBoardWriter` needs; that takes a third of a second."""
    import tensorboard.compat.proto.event_pb2
    import tensorboard.compat.proto.summary_pb2
    import tensorboard.summary.writer.record_writer  # noqa: F401


def keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records after ``step`` from a ``metrics.jsonl``, and return those that stay.

    A killed run leaves records of steps that the resumed run does again. The file is replaced as
    a whole or not at all.
    """
    kept = [r for r in read_json_lines(path) if r["step"] <= step]
    content = "".join(json.dumps(r) + "\n" for r in kept).encode()
    try:
        if path.exists() and path.read_bytes() != content:
            write_atomically(path, content)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise RunDirectoryError(
                f"cannot write {path}: {error.strerror}. Make it writable, then resume the run."
            ) from error
        _log.warning("%s keeps records of steps that are done again: %s.", path, error.strerror)
    return kept


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A record's numbers, as written or read again, by the names that trackers and TensorBoard show."""
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
