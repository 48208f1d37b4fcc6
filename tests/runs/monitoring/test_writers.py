from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.metadata import (
    parse_session_end_info_plugin_data,
    parse_session_start_info_plugin_data,
)

from paceline.core.errors import RunDirectoryError
from paceline.core.files import ResilientAppendFile, write_atomically
from paceline.runs.metric_writers import JsonlWriter, TensorBoardWriter, finite, keep_until


def train_record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    ranks = [
        {"rank": r, "step_ms": 10.0 + r, "busy": 1.0, "memory_mib": 100.0, "utilisation": math.nan} for r in (0, 1)
    ]
    record = {"kind": "train", "step": step, "epoch": 0, "loss": loss, "lr": 0.1, "seconds": 1.0, "ranks": ranks}
    return record | more


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_every_line_is_json_also_where_numbers_are_not_finite(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "loss": math.nan, "ranks": [{"step_ms": math.inf}], "lr": (-math.inf, 0.5)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    writer.close()
    # Read before close: a killed run has its records. `parse_constant` would see NaN or Infinity.
    assert json.loads(lines[0], parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "ranks": [{"step_ms": None}],
        "lr": [None, 0.5],
    }


def test_finite_keeps_everything_else() -> None:
    value = {"a": 1, "b": "nan", "c": [1.5, None, True]}
    assert finite(value) == value


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot write .*absent/a/metrics\.jsonl: No such file"):
        JsonlWriter(tmp_path / "absent" / "a" / "metrics.jsonl")
    (tmp_path / "tensorboard").write_text("a file where a folder belongs")
    with pytest.raises(RunDirectoryError, match=r"cannot write .*tensorboard"):
        TensorBoardWriter(tmp_path / "tensorboard", purge_step=1)


def test_a_full_disk_is_told_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    writer = JsonlWriter(Path("/dev/full"))
    writer.write({"step": 1})
    writer.write({"step": 2})
    writer.close()
    assert [record.message for record in caplog.records] == [
        "cannot write /dev/full: No space left on device. Training continues."
    ]


def test_a_descriptor_that_is_stale_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, close = tmp_path / "log", os.write, os.close
    stale: set[int] = set()

    def stale_write(descriptor: int, content: bytes) -> int:
        if descriptor in stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return write(descriptor, content)

    def closing(descriptor: int) -> None:
        close(descriptor)
        stale.discard(descriptor)

    monkeypatch.setattr(os, "write", stale_write)
    monkeypatch.setattr(os, "close", closing)
    told: list[str] = []
    file = ResilientAppendFile(path, told.append)
    file.write(b"one\n")
    stale.add(file.fileno())
    file.write(b"two\n")
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert told == [
        f"cannot write {path}: Stale file handle. Training continues.",
        f"{path} is written again.",
    ]


def test_lines_that_only_the_close_reports_as_lost_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    file = ResilientAppendFile(tmp_path / "log", told.append)
    file.write(b"one\n")

    def full_close(descriptor: int) -> None:
        os.closerange(descriptor, descriptor + 1)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as failing:
        failing.setattr(os, "close", full_close)
        file.close()
    assert told == [f"cannot write {tmp_path / 'log'}: Disk quota exceeded. Its last lines may be lost."]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_told_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsync = os.fsync

    def fsync_of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    for content in (b"one", b"two"):
        write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == b"two"
    [record] = caplog.records
    assert f"cannot sync folders ({os.strerror(number)})" in record.message


def test_keep_until_drops_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(train_record(s, 0.5)) + "\n" for s in (10, 20, 30)) + '{"kind": "tr')
    kept = keep_until(path, 20)
    assert [r["step"] for r in kept] == [10, 20]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_keep_until_leaves_a_file_with_nothing_to_drop_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(train_record(10, 0.1 + 0.2))
    writer.close()
    before = path.stat().st_ino
    assert len(keep_until(path, 10)) == 1
    assert path.stat().st_ino == before


def test_keep_until_of_a_new_run_makes_no_file(tmp_path: Path) -> None:
    assert keep_until(tmp_path / "metrics.jsonl", 0) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, purge_step=1)
    writer.write(train_record(50, 0.5, samples_per_s=1000.0, imbalance=None, learning_rates=[0.1, 0.2]))
    writer.write({"kind": "eval", "step": 50, "epoch": 0, "split": "val", "metrics": {"accuracy": 0.75}})
    # Read before close: a killed run has its curves.
    scalars = read_scalars(tmp_path)
    writer.close()
    assert scalars == {
        "train/loss": [(50, 0.5)],
        "train/lr": [(50, pytest.approx(0.1))],
        "train/lr/0": [(50, pytest.approx(0.1))],
        "train/lr/1": [(50, pytest.approx(0.2))],
        "train/samples_per_s": [(50, 1000.0)],
        "eval/val/accuracy": [(50, 0.75)],
        "rank/0/step_ms": [(50, 10.0)],
        "rank/1/step_ms": [(50, 11.0)],
        "rank/0/memory_mib": [(50, 100.0)],
        "rank/1/memory_mib": [(50, 100.0)],
    }


def test_tensorboard_has_a_runs_configuration_with_its_final_metrics(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, purge_step=1, hparams={"lr": 0.1, "amp": True, "act": "relu", "mesh": [1, 2]})
    writer.write(train_record(50, 0.5))
    writer.finish({"steps": 60, "metrics": {"test": {"accuracy": 0.75, "f1": None}}})
    writer.close()
    assert read_scalars(tmp_path)["final/test/accuracy"] == [(60, 0.75)]
    assert "final/test/f1" not in read_scalars(tmp_path)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    content = accumulator.PluginTagToContent("hparams")
    start = parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    end = parse_session_end_info_plugin_data(content["_hparams_/session_end_info"])
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert values == {"lr": 0.1, "amp": True, "act": "relu", "mesh": "[1, 2]"}
    assert end.status == STATUS_SUCCESS


def test_a_resumed_run_has_one_point_a_step_in_tensorboard(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path, purge_step=1)
    for step in (10, 20, 30):
        first.write(train_record(step, 1.0))
    first.close()
    second = TensorBoardWriter(tmp_path, purge_step=21)
    for step in (30, 40):
        second.write(train_record(step, 2.0))
    second.close()
    assert read_scalars(tmp_path)["train/loss"] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
