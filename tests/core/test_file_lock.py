"""Locks of files by processes of one node, of another node, and where the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.lab.network_file_system import network_file_system

from paceline.core import ownership
from paceline.core.ownership import FileLock, claims, describe_holder, is_locked, locked, own_prefix

OTHER_BOOT = "00000000"

HOLDS = """
import errno, fcntl, sys, time
from pathlib import Path
from paceline.core.ownership import locked

def refuse(descriptor, operation):
    raise OSError(errno.ENOSYS, "")

if sys.argv[2] == "no locks":
    fcntl.flock = refuse
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as Lustre's without ``-o flock``."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "run.lock"
    path.touch()
    return path


def lock_as_another_node(lock: Path, *, ago_s: float = 0.0) -> Path:
    """Make a claim as a process of another node does, whose last heartbeat was some time ago."""
    path = lock.with_name(f".{lock.name}.{OTHER_BOOT}-1f-{own_prefix()}00000000@node-b")
    lock.touch()
    path.touch()
    os.utime(path, (time.time() - ago_s,) * 2)
    return path


def names(lock: Path) -> set[str]:
    return {path.name for path in lock.parent.iterdir()}


def test_nothing_is_left(lock: Path) -> None:
    with locked(lock):
        assert is_locked(lock)
        (claim,) = claims(lock)
        assert claim.owner.pid == os.getpid()
    assert names(lock) == {lock.name}
    assert not is_locked(lock)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_lock_is_exclusive(lock: Path, has_locks: bool, request: pytest.FixtureRequest) -> None:
    if not has_locks:
        request.getfixturevalue("no_locks")
    with locked(lock, wait=False):
        assert is_locked(lock)
        with pytest.raises(BlockingIOError), locked(lock, wait=False):
            pass
    assert names(lock) == {lock.name}


@pytest.mark.usefixtures("no_locks")
def test_without_locks_one_thread_at_a_time_enters(lock: Path) -> None:
    number = lock.with_name("number")
    number.write_text("0")

    def add() -> None:
        for _ in range(10):
            with locked(lock):
                read = int(number.read_text())
                time.sleep(0.001)
                number.write_text(str(read + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number.read_text() == "40"


@pytest.mark.integration
@pytest.mark.cold
@pytest.mark.parametrize("how", ["locks", "no locks"])
def test_what_a_killed_process_held_is_free_at_once(lock: Path, how: str, request: pytest.FixtureRequest) -> None:
    if how == "no locks":
        request.getfixturevalue("no_locks")
    command = [sys.executable, "-c", HOLDS, str(lock), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_locked(lock)
        with pytest.raises(BlockingIOError), locked(lock, wait=False):
            pass
        holder.kill()
        holder.wait()
    assert len(list(claims(lock))) == 1, "its claim is left"
    assert not is_locked(lock)
    with locked(lock, wait=False):
        assert len(list(claims(lock))) == 1, "and was removed"


def test_another_node_that_beats_keeps_its_lock(lock: Path) -> None:
    claim = lock_as_another_node(lock, ago_s=30)
    assert is_locked(lock)
    assert describe_holder(lock).startswith("a process of node-b, seen 3")
    with closing(FileLock(lock)) as own:
        assert not own.try_to_take()
        assert not own.is_certain, "it may be down"
        os.utime(claim)
        assert not own.try_to_take()
        assert own.is_certain
        assert own.rival is not None
        assert own.rival.host == "node-b"
        claim.unlink()
        assert own.try_to_take()
    assert names(lock) == {lock.name}


def test_a_silent_node_loses_its_lock(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ownership, "SILENT_S", 1.6)
    lock_as_another_node(lock, ago_s=-100)  # its clock is ahead
    began = time.monotonic()
    with locked(lock):
        assert time.monotonic() - began >= 1.6
        assert [c.boot != OTHER_BOOT for c in claims(lock)] == [True]
    assert "is in use by a process of node-b" in capsys.readouterr().err


def test_a_node_that_was_seen_long_ago_is_not_waited_for(lock: Path) -> None:
    lock_as_another_node(lock, ago_s=3600)
    assert not is_locked(lock)
    with locked(lock, wait=False):
        pass
    assert names(lock) == {lock.name}


def test_a_leader_succeeds_a_node_that_others_have_given_up(lock: Path) -> None:
    lock_as_another_node(lock)
    with closing(FileLock(lock)) as own:
        assert not own.try_to_take()
        assert own.try_to_take(succeeds=True)
        assert [c.owner.pid for c in claims(lock)] == [os.getpid()]


def test_the_holder_beats(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_S", 0.02)
    with locked(lock):
        (claim,) = claims(lock)
        os.utime(claim.path, (0, 0))
        while claim.path.stat().st_mtime == 0:
            time.sleep(0.01)


def test_names_of_others_are_no_claims(lock: Path) -> None:
    for name in (".run.lock.x", ".run.lock.-1-paceline-1@b", ".run.lock.0-1-y-paceline-1-1-1-00000000@b"):
        lock.with_name(name).touch()
    assert list(claims(lock)) == []
    with locked(lock, wait=False):
        pass


@pytest.mark.system
def test_a_lock_service_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ownership, "_SLOW_S", 0.1)
    with network_file_system(tmp_path, nodes="a") as fs:
        fs["a"].set(locks_wait=True)
        with closing(FileLock(fs["a"].path / "run.lock")) as lock:
            waiting = threading.Thread(target=lock.try_to_take)
            waiting.start()
            told = ""
            while "waiting to lock" not in told and waiting.is_alive():
                time.sleep(0.01)
                told += capsys.readouterr().err
            assert f"{fs['a'].path / 'run.lock'}: its file system does not answer." in told
            fs["a"].set()
            waiting.join()
            assert lock.held
