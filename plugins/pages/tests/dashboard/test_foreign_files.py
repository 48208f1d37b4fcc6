"""Readers of a run directory neither wait for foreign files in it, nor read without a bound."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from paceline.core.files import open_regular, read_document, read_json_lines
from paceline.launch.job_logs import Tail, _start_of_last_lines
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import read_failure
from paceline_pages.dashboard import RunCache, log_tail
from paceline_pages.run_index import Curves, read_beats
from paceline_pages.run_status import summarise

NAMES = ["run.toml", "events.jsonl", "metrics.jsonl", "result.json", "logs/rank-0.log", "logs/rank-0.error.json"]


def make_run(root: Path) -> RunDirectory:
    directory = RunDirectory(root / "run")
    directory.create()
    directory.write_manifest({"id": "0" * 32, "config": {}, "task": {}})
    directory.events.write_text(json.dumps({"time": 1.0, "event": "created", "task": "t"}) + "\n")
    directory.metrics.write_text("")
    directory.logs.mkdir(exist_ok=True)
    directory.heartbeats.mkdir(exist_ok=True)
    return directory


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("name", [*NAMES, "heartbeats", "lock"])
def test_only_regular_files_are_read(
    tmp_path: Path, name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_run(tmp_path)
    place = {"heartbeats": directory.heartbeats / "rank-0.json", "lock": directory.lock}.get(
        name, directory.path / name
    )
    place.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(place)
        case "socket":
            monkeypatch.chdir(place.parent)  # the path of a socket must be short
            bound = socket.socket(socket.AF_UNIX)
            request.addfinalizer(bound.close)
            bound.bind(place.name)
        case "device":
            place.symlink_to("/dev/zero")
    summary = summarise(directory)
    row = {"name": summary.name}
    RunCache().detail("0" * 16, directory, row)
    Curves(directory.metrics).update()
    assert read_beats(directory) == []
    assert read_failure(directory.logs / "rank-0.error.json") is None
    assert log_tail(directory, 0) is None
    assert not directory.is_running()
    if name in ("run.toml", "events.jsonl"):
        assert summary.state == "damaged"
    with pytest.raises(OSError, match=r"regular|No such device"):
        open_regular(place)


def test_a_document_without_an_end_is_not_read(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    assert read_document(directory.manifest, 1000)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_document(directory.manifest, 10)


def test_records_are_read_up_to_the_end_that_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"number": 1}\n')
    look = os.fstat

    def look_and_write(descriptor: int) -> os.stat_result:
        found = look(descriptor)
        with path.open("a") as file:
            file.write('{"number": 2}\n')
        return found

    monkeypatch.setattr(os, "fstat", look_and_write)
    assert len(read_json_lines(path)) < len(path.read_text().splitlines())


@pytest.mark.parametrize(("count", "first"), [(0, None), (1, 99_999), (3, 99_997), (50_000, 50_000), (200_000, 0)])
def test_the_last_lines_are_read_from_the_end(count: int, first: int | None, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("\n".join(map(str, range(100_000))))
    with open_regular(path) as file:
        start = _start_of_last_lines(file, count)
        file.seek(start)
        expected = [] if first is None else [str(number) for number in range(first, 100_000)]
        assert file.read().decode().split("\n") == (expected or [""])


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"a\n" + b"x" * 3_000_000)
    with Tail(path) as tail:
        first, cut = tail.new_lines()
        assert (first, cut[:5]) == ("a", "xxxxx")
        assert cut.endswith("(cut: this line has more than 1,048,576 bytes)")
        assert len(cut) < 2 * 2**20
        assert tail.unfinished_line() == ""
        with path.open("ab") as file:
            file.write(b"x" * 3_000_000)
        assert list(tail.new_lines()) == []
        with path.open("ab") as file:
            file.write(b"x\nb\n" + b"y" * 10)
        assert list(tail.new_lines()) == ["b"]
        assert tail.unfinished_line() == "y" * 10
