"""The stand-in for network file systems does what the tests on it rely on."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.lab.network_file_system import network_file_system
from tests.processes import Processes

pytestmark = pytest.mark.system


@contextmanager
def fails(error: int) -> Iterator[None]:
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        yield
    assert raised.value.errno == error


def lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def test_files_are_the_same_on_both_nodes_and_nothing_stays_mounted(tmp_path: Path) -> None:
    with network_file_system(tmp_path) as fs:
        a, b = (fs[node].path for node in "ab")
        content = os.urandom(3 * 2**20)
        (a / "folder").mkdir()
        (a / "folder" / "file").write_bytes(content)
        assert (b / "folder" / "file").read_bytes() == content
        (b / "folder" / "file").rename(b / "other")
        with (a / "other").open("ab") as file:
            file.write(b"more")
        os.link(a / "other", a / "again")
        (a / "other").unlink()
        assert [path.name for path in sorted(b.iterdir())] == ["again", "folder"]
        assert os.stat(a / "again").st_ino == os.stat(b / "again").st_ino
        with (b / "again").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[-4:] == b"more"
    assert not a.is_mount()
    assert not list(a.iterdir())


def test_times_of_files_and_links(tmp_path: Path) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        file, link = fs["a"].path / "file", fs["a"].path / "link"
        file.touch()
        os.utime(file, (1, 2))
        assert file.stat()[-3:-1] == (1, 2)
        os.utime(file)
        assert abs(file.stat().st_mtime - time.time()) < 60
        link.symlink_to("missing")
        os.utime(link, (1, 2), follow_symlinks=False)
        assert link.lstat().st_mtime == 2


def test_a_mount_ends_with_a_failed_test(tmp_path: Path) -> None:
    def fail_while_away() -> None:
        with network_file_system(tmp_path) as fs:
            fs["a"].set(away=True)
            raise ValueError("of the test")

    with pytest.raises(ValueError, match="of the test"):
        fail_while_away()
    assert not (tmp_path / "a").is_mount()


def test_locks_on_files_hold_on_both_nodes_and_on_folders_on_one(tmp_path: Path, run_processes: Processes) -> None:
    with network_file_system(tmp_path) as fs:
        a, b = (fs[node].path for node in "ab")
        (a / "file").touch()
        held = lock(a / "file")
        with fails(errno.EAGAIN):
            lock(b / "file")
        waits = f"import fcntl, os; fcntl.flock(os.open({str(b / 'file')!r}, os.O_RDWR), fcntl.LOCK_EX)"
        killed = run_processes.start([sys.executable, "-S", "-c", waits])
        waiting = run_processes.start([sys.executable, "-S", "-c", waits])
        time.sleep(0.5)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(10) == -signal.SIGKILL
        assert waiting.poll() is None
        os.close(held)
        assert waiting.wait(10) == 0
        os.close(lock(b / "file"))
        folders = [os.open(path, os.O_RDONLY) for path in (a, b)]
        for folder in folders:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(folder)


def test_locks_within_a_node(tmp_path: Path) -> None:
    with network_file_system(tmp_path, locks="node") as fs:
        (fs["a"].path / "file").touch()
        held = [lock(fs[node].path / "file") for node in "ab"]
        with fails(errno.EAGAIN):
            lock(fs["a"].path / "file")
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize(
    ("operation", "call", "error"),
    [
        ("rename", lambda path: (path / "file").rename(path / "new"), errno.ENOENT),
        ("unlink", lambda path: (path / "file").unlink(), errno.ENOENT),
        ("link", lambda path: os.link(path / "file", path / "new"), errno.EEXIST),
        ("mkdir", lambda path: (path / "new").mkdir(), errno.EEXIST),
    ],
)
def test_what_is_lost_was_done(tmp_path: Path, operation: str, call: Callable[[Path], object], error: int) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        path = fs["a"].path
        (path / "file").touch()
        fs["a"].set(lost=[operation], only="file" if operation == "unlink" else "new")
        with fails(error):
            call(path)
        left = {"rename": {"new"}, "unlink": set(), "link": {"file", "new"}, "mkdir": {"file", "new"}}
        assert {each.name for each in path.iterdir()} == left[operation]


def test_errors_are_those_that_were_asked_for(tmp_path: Path) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        path = fs["a"].path
        (path / "file").write_text("first")
        folder, file = os.open(path, os.O_RDONLY), os.open(path / "file", os.O_WRONLY | os.O_APPEND)
        os.fsync(folder)
        fs["a"].set(folder_fsync_error=errno.EINVAL)
        with fails(errno.EINVAL):
            os.fsync(folder)
        fs["a"].set(link_error=errno.EPERM, lock_error=errno.ENOLCK, only="e")
        with fails(errno.EPERM):
            os.link(path / "file", path / "new")
        with fails(errno.ENOLCK):
            lock(path / "file")
        fs["a"].set(write_error=errno.ENOSPC)
        with fails(errno.ENOSPC):
            os.write(file, b"second")
        fs["a"].set(close_error=errno.EDQUOT)
        os.write(file, b"second")
        assert (path / "file").read_text() == "firstsecond"
        with fails(errno.EDQUOT):
            os.close(file)
        assert (path / "file").read_text() == "first"
        file = os.open(path / "file", os.O_RDONLY)
        fs["a"].set(stale=1)
        with fails(errno.ESTALE):
            os.read(file, 1)
        assert (path / "file").read_text() == "first"
        fs["a"].set(away=True, away_error=errno.ETIMEDOUT, only="file")
        with fails(errno.ETIMEDOUT):
            (path / "file").read_text()
        fs["a"].set()
        for descriptor in (folder, file):
            os.close(descriptor)


def test_a_node_believes_what_it_has_seen_for_a_while(tmp_path: Path) -> None:
    with network_file_system(tmp_path, cache_s=60, absence_s=60) as fs:
        a, b = (fs[node].path for node in "ab")
        assert not (b / "file").exists()
        (a / "file").touch()
        (a / "other").touch()
        assert not (b / "file").exists()
        assert (b / "other").stat().st_size == 0
        (a / "other").write_text("text")
        assert (b / "other").stat().st_size == 0
        assert (b / "other").read_text() == "text"
        assert (b / "other").stat().st_size == 4


def test_a_server_that_is_away_and_a_slow_one(tmp_path: Path, run_processes: Processes) -> None:
    with network_file_system(tmp_path) as fs:
        (fs["a"].path / "file").write_text("text")
        fs["a"].set(away=True)
        reads = run_processes.start(["cat", fs["a"].path / "file"])
        time.sleep(0.5)
        assert reads.poll() is None
        assert (fs["b"].path / "file").read_text() == "text"
        fs["a"].set()
        assert run_processes.finish(reads).stdout == "text"
        fs["a"].set(slow_s=0.2)
        start = time.monotonic()
        assert (fs["a"].path / "file").exists()
        assert time.monotonic() - start >= 0.2


def test_what_some_file_systems_do_not_have(tmp_path: Path) -> None:
    with network_file_system(tmp_path, maps_shared=False, squashes_root=True) as fs:
        a, b = (fs[node].path for node in "ab")
        (a / "file").write_text("text")
        assert os.stat(b / "file").st_uid == 65534
        with (a / "file").open("r+b") as file, fails(errno.ENODEV):
            mmap.mmap(file.fileno(), 0)
        for node in "ab":
            fs[node].set(appends_overwrite=True)
        with (a / "file").open("a") as first, (b / "file").open("a") as second:
            first.write("first")
            second.write("second")
        assert (a / "file").read_text() == "textfirstd"  # the file that was opened last is closed first
