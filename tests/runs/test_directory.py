from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.core.errors import RunDirectoryError, RunInUseError
from paceline.core.files import read_json_lines, write_atomically
from paceline.runs.directory import RUN_FORMAT, RunDirectory, RunLock


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "a")
    directory.create()
    return directory


def test_naming_a_directory_touches_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a")
    assert not directory.exists()
    assert not directory.is_running()
    assert directory.log_of(3) == tmp_path / "a" / "logs" / "rank-3.log"
    assert directory.error_of(3) == tmp_path / "a" / "logs" / "rank-3.error.json"
    assert list(tmp_path.iterdir()) == []


def test_creating_leaves_no_probe_behind(run: RunDirectory) -> None:
    run.create()
    assert [path.name for path in run.path.iterdir()] == ["logs"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write to the run directory .*file/a: .*another"):
        RunDirectory(tmp_path / "file" / "a").create()


def test_the_manifest_round_trips_without_what_is_none(run: RunDirectory) -> None:
    assert not run.exists()
    run.write_manifest({"config": {"seed": 3, "epochs": None, "checkpoint_every": ("1epoch",)}, "data": {}})
    assert run.exists()
    read = run.read_manifest()
    assert read.pop("format") == RUN_FORMAT
    assert read == {"config": {"seed": 3, "checkpoint_every": ["1epoch"]}, "data": {}}


def test_a_missing_or_damaged_manifest_is_an_error(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not a run directory: it has no run\.toml"):
        run.read_manifest()
    run.manifest.write_text("seed = ")
    with pytest.raises(RunDirectoryError, match=r"run\.toml cannot be read"):
        run.read_manifest()


def test_the_result_is_none_until_there_is_one(run: RunDirectory) -> None:
    assert run.read_result() is None
    run.write_result({"steps": 3})
    assert run.read_result() == {"steps": 3}
    run.result.write_text('{"steps": ')
    with pytest.raises(RunDirectoryError, match=r"result\.json is damaged: .* Remove it"):
        run.read_result()


def test_events_are_appended_with_their_time(run: RunDirectory) -> None:
    assert run.read_events() == []
    run.append_event("started", world_size=2)
    run.append_event("finished")
    events = run.read_events()
    assert [event["event"] for event in events] == ["started", "finished"]
    assert events[0]["world_size"] == 2
    assert events[0]["time"] <= events[1]["time"]


def test_each_node_appends_to_a_file_of_its_own(run: RunDirectory) -> None:
    theirs = [
        {"time": at, "event": kind, "host": "elsewhere", "boot": "b"}
        for at, kind in ((1.0, "created"), (9e9, "finished"))
    ]
    text = "".join(json.dumps(record) + "\n" for record in theirs)
    run.events.write_text(text)
    run.append_event("started")
    run.append_event("view", slot=1)  # of an earlier version
    assert run.events.read_text() == text, "the other node may be appending to it"
    first, own = run.event_files()
    assert (first, own.name.partition("-")[0], len(own.read_text().splitlines())) == (run.events, "events", 2)
    events = run.read_events()
    assert [event["event"] for event in events] == ["created", "started", "group", "finished"]
    assert events[2]["local_index"] == 1


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_json_lines(path) == []
    path.write_text('{"a": 1}\n[2]\n{"b": 2}\n{"c": ')
    assert read_json_lines(path) == [{"a": 1}, {"b": 2}]


def test_only_one_may_hold_the_lock(run: RunDirectory) -> None:
    assert not run.is_running()
    with run.locked():
        assert run.is_running()
        with (
            pytest.raises(RunDirectoryError, match=r"is in use by another process\. Wait for it to end"),
            run.locked(),
        ):
            pass
        assert run.is_running()
    assert not run.is_running()
    with run.locked():
        pass


@pytest.mark.integration
def test_who_inherits_the_lock_holds_it_too_whenever_it_is_taken(run: RunDirectory) -> None:
    lock = RunLock(run)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)) as heir:
        with run.locked():
            assert not lock.try_to_take()
        assert not run.is_running()
        assert lock.try_to_take()
        lock.close()
        assert run.is_running()
        assert heir.stdin is not None
        heir.stdin.close()
    assert not run.is_running()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, (bytes(1 // number) for number in (1, 0)))
    assert os.listdir(tmp_path) == ["a.json"]
    write_atomically(path, json.dumps({"new": 1}).encode())
    assert json.loads(path.read_bytes()) == {"new": 1}


HOLDS = """
import os, sys, time
from pathlib import Path
from paceline.runs.directory import RUN_FORMAT, RunDirectory, RunLock
lock = RunLock(RunDirectory(Path(sys.argv[1])))
lock.take()
os.set_inheritable(lock.fileno(), True)
if os.fork() == 0:  # as a worker does, until it has noticed
    sys.stdout.close()
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print("held", flush=True)
time.sleep(600)
"""


def hold(run: RunDirectory, seconds: float) -> subprocess.Popen[str]:
    """Start a process that holds a run's lock, with a child that outlives it."""
    command = [sys.executable, "-c", HOLDS, str(run.path), str(seconds)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    assert popen.stdout.readline() == "held\n"
    return popen


@pytest.mark.integration
@pytest.mark.cold
def test_the_lock_of_a_killed_process_is_waited_for(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(run, 4.0) as holder:
        with pytest.raises(RunInUseError), closing(RunLock(run)) as lock:
            lock.take()
        assert capsys.readouterr().err == "", "it is refused at once"
        holder.kill()
        run.require_unused()
    assert "waiting for the processes that used" in capsys.readouterr().err
    assert not run.is_running()


@pytest.mark.usefixtures("plain_user")
def test_a_file_of_another_user_is_refused_at_the_start() -> None:
    directory = RunDirectory(Path("a"))
    directory.create()
    directory.metrics.write_text("")
    directory.metrics.chmod(0o444)
    with pytest.raises(RunDirectoryError, match=r"cannot write to the run directory .*Permission denied \(.*metrics"):
        directory.create()


def test_events_wait_for_the_disk(run: RunDirectory) -> None:
    run.logs.rmdir()
    run.path.rename(run.path.with_name("away"))
    run.append_event("fault", step=3)
    run.path.with_name("away").rename(run.path)
    run.append_queued_events()
    run.append_queued_events()
    assert [(event["event"], event["step"]) for event in run.read_events()] == [("fault", 3)]
