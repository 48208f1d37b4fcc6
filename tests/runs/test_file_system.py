"""The probe of a file system, and what ``paceline doctor`` says of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.lab.network_file_system import network_file_system
from tests.processes import Processes

from paceline.core.files import see_listed
from paceline.runs.file_system import probe
from paceline_checks.preflight.facts import can_lock, leave_mark


def test_a_local_disk_lacks_nothing(tmp_path: Path) -> None:
    assert probe(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_times_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path, times=(0, 0): utime(path, times))
    assert [lack.found for lack in probe(tmp_path)] == ["does not renew the time of a file (it stays)"]


@pytest.mark.system
def test_what_a_folder_lists_is_waited_for_where_its_absence_is_cached(tmp_path: Path) -> None:
    with network_file_system(tmp_path, absence_s=5.0) as fs:
        here, there = (fs[node].path / "checkpoints" for node in "ab")
        assert not there.exists()
        see_listed(there)  # at once: it is not listed
        here.mkdir()
        assert not there.exists(), "the absence is not cached"
        see_listed(there)
        assert there.exists()


@pytest.mark.system
@pytest.mark.parametrize(
    ("mounted", "switches", "found"),
    [
        ({}, {}, []),
        ({}, {"lock_error": errno.ENOSYS}, ["has no file locks"]),
        ({}, {"lock_error": errno.ENOLCK}, ["has no file locks"]),
        ({}, {"folder_fsync_error": errno.EINVAL}, ["cannot sync folders (Invalid argument)"]),
        ({"maps_shared": False}, {}, ["cannot map files into memory (No such device)"]),
        ({"squashes_root": True}, {}, ["gives your files to user 65534"]),
        ({}, {"slow_s": 0.03}, ["ms to create or remove a file"]),
    ],
)
def test_what_a_file_system_lacks(
    tmp_path: Path, mounted: Mapping[str, Any], switches: Mapping[str, Any], found: list[str]
) -> None:
    with network_file_system(tmp_path, nodes="a", **mounted) as mounts:
        path = mounts["a"].path
        mounts["a"].set(**switches)
        lacks = probe(path)
        assert len(lacks) == len(found)
        assert all(words in lack.found for words, lack in zip(found, lacks, strict=True))
        assert list(path.iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize("locks", ["shared", "node"])
def test_locks_between_nodes(tmp_path: Path, locks: Any) -> None:
    with network_file_system(tmp_path, locks=locks) as mounts:
        a, b = (mounts[node].path for node in "ab")
        with ExitStack() as stack:
            assert leave_mark(b / "mark", stack) is None
            assert can_lock(a / "mark") == (locks == "node")
        assert not (b / "mark").exists()


@pytest.mark.system
def test_doctor_says_it(tmp_path: Path, run_processes: Processes) -> None:
    with network_file_system(tmp_path, nodes="a") as mounts:
        mounts["a"].set(lock_error=errno.ENOSYS)
        env = {"COLUMNS": "300", "XDG_STATE_HOME": str(tmp_path / "state")}
        done = run_processes.paceline("doctor", "--threads", "1", "--run-dir", mounts["a"].path / "run", env=env)
        assert done.returncode == 0, done.stderr
        assert "has no file locks" in done.stdout
        assert "Mount Lustre with -o flock" in done.stdout
