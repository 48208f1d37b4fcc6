from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.core.errors import CheckpointError, CheckpointWriteError
from paceline.core.ownership import boot_id
from paceline.runs.checkpoint_manifest import CheckpointInfo, temporary_directory, verify
from paceline.runs.checkpoint_store import commit, newest_verified, prune, remove_stale

MakeInfo = Callable[..., CheckpointInfo]
CommitStep = Callable[..., Path]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(b"HEAD" + file.read_bytes()[4:])


def test_commit_leaves_the_checkpoint_and_the_hint(tmp_path: Path, commit_step: CommitStep) -> None:
    directory = tmp_path / "run" / "checkpoints"
    path = commit_step(directory, 5)
    assert path == directory / "step-00000005-v00000006"
    assert names(directory) == ["LATEST", "step-00000005-v00000006"]
    assert os.readlink(directory / "LATEST") == "step-00000005-v00000006"
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]


def test_newest_is_by_state_version_and_not_by_step_or_hint(tmp_path: Path, commit_step: CommitStep) -> None:
    old = commit_step(tmp_path, 9, state_version=9)
    new = commit_step(tmp_path, 5, state_version=123_456_789)
    (tmp_path / "LATEST").unlink()
    (tmp_path / "LATEST").symlink_to(old.name)
    (tmp_path / "step-00000099-v9").mkdir()
    (tmp_path / "notes.txt").touch()
    found = newest_verified(tmp_path)
    assert (found.path, found.skipped) == (new, ())
    assert found.manifest == verify(new)


def test_damaged_ones_are_skipped_with_their_reasons(tmp_path: Path, commit_step: CommitStep) -> None:
    good, truncated, flipped = (commit_step(tmp_path, step) for step in (1, 2, 3))
    (truncated / "state.json").write_bytes(b"")
    damage(flipped)
    found = newest_verified(tmp_path)
    assert found.path == good
    first, second = found.skipped
    assert str(flipped) in first
    assert "model.safetensors is damaged" in first
    assert str(truncated) in second
    assert "state.json has 0 bytes" in second


def test_one_under_a_false_name_is_skipped(tmp_path: Path, commit_step: CommitStep) -> None:
    commit_step(tmp_path, 1).rename(tmp_path / "step-00000009-v00000010")
    found = newest_verified(tmp_path)
    assert found.path is None
    assert any("its manifest is that of step-00000001-v00000002" in reason for reason in found.skipped)


def test_a_lost_latest_is_said(tmp_path: Path, commit_step: CommitStep) -> None:
    good, lost = commit_step(tmp_path, 1), commit_step(tmp_path, 2)
    shutil.rmtree(lost)
    found = newest_verified(tmp_path)
    assert found.path == good
    assert found.skipped == (f"LATEST names {lost.name}, which does not exist",)


def test_links_are_no_candidates(tmp_path: Path, commit_step: CommitStep) -> None:
    inside = tmp_path / "checkpoints"
    outside = commit_step(tmp_path / "elsewhere", 5)
    inside.mkdir()
    (inside / outside.name).symlink_to(outside)
    assert newest_verified(inside).path is None


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_nothing_is_found_where_nothing_is(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    found = newest_verified(tmp_path / place)
    assert (found.path, found.manifest, found.skipped) == (None, None, ())


def test_a_good_checkpoint_is_never_written_again(tmp_path: Path, commit_step: CommitStep, make_info: MakeInfo) -> None:
    path = commit_step(tmp_path, 5)
    inode = path.stat().st_ino
    flushed: list[bool] = []
    again = commit(tmp_path, make_info(5), [("other", [b"x"])], lambda: flushed.append(True))
    assert again == path
    assert path.stat().st_ino == inode
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]
    assert flushed == [True]


@pytest.mark.parametrize("kind", ["damaged", "empty", "file", "link"])
def test_what_stands_in_the_way_is_moved_aside(tmp_path: Path, commit_step: CommitStep, kind: str) -> None:
    path = commit_step(tmp_path, 5)
    if kind == "damaged":
        damage(path)
    else:
        path.rename(tmp_path / "away")
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to(tmp_path / "away")
    assert commit_step(tmp_path, 5) == path
    verify(path)
    assert not path.is_symlink()
    aside = [name for name in names(tmp_path) if name.startswith(f".damaged-{path.name}-")]
    assert len(aside) == (0 if kind == "empty" else 1)
    if kind == "damaged":
        assert (tmp_path / aside[0] / "model.safetensors").read_bytes() == b"HEAD5"


def test_large_and_empty_buffers_are_written_whole(tmp_path: Path, make_info: MakeInfo) -> None:
    big = os.urandom(9 * 2**20 + 3)
    path = commit(tmp_path, make_info(1), [("x", [b"", memoryview(big), b"end"]), ("empty", [])])
    verify(path)
    assert (path / "x").read_bytes() == big + b"end"
    assert (path / "empty").read_bytes() == b""


def test_the_manifest_is_written_last(tmp_path: Path, make_info: MakeInfo) -> None:
    seen: list[list[str]] = []

    def look() -> None:
        (temporary,) = tmp_path.iterdir()
        seen.append(names(temporary))

    commit(tmp_path, make_info(1), [("a", [b"1"]), ("b", [b"2"])], look)
    assert seen == [["a", "b"]]


def test_a_failing_callback_leaves_nothing(tmp_path: Path, commit_step: CommitStep, make_info: MakeInfo) -> None:
    commit_step(tmp_path, 1)
    before = names(tmp_path)

    def fail() -> None:
        raise ValueError("the ledger cannot be flushed")

    with pytest.raises(ValueError, match="ledger"):
        commit(tmp_path, make_info(2), [("a", [b"1"])], fail)
    assert names(tmp_path) == before


def test_retention_keeps_the_last_and_the_best(tmp_path: Path, commit_step: CommitStep) -> None:
    for step in range(1, 9):
        newest = commit_step(tmp_path, step, best_version=3 if step < 8 else 6)
    prune(tmp_path, 3, newest)
    kept = {step: (tmp_path / f"step-{step:08d}-v{step + 1:08d}").exists() for step in range(1, 9)}
    # Version 3 (step 2) is still the best of the kept steps 6 and 7; version 6 (step 5) that of step 8.
    assert [step for step in kept if kept[step]] == [2, 5, 6, 7, 8]
    newest = commit_step(tmp_path, 9, best_version=6)
    prune(tmp_path, 1, newest)
    assert names(tmp_path) == ["LATEST", "step-00000005-v00000006", "step-00000009-v00000010"]


def test_retention_never_deletes_the_one_just_written(tmp_path: Path, commit_step: CommitStep) -> None:
    for step in (5, 6, 7):
        commit_step(tmp_path, step)
    older = commit_step(tmp_path, 2)
    prune(tmp_path, 1, older)
    assert names(tmp_path) == ["LATEST", older.name, "step-00000007-v00000008"]


def test_unreadable_ones_do_not_push_out_good_ones(tmp_path: Path, commit_step: CommitStep) -> None:
    commit_step(tmp_path, 1)
    good = commit_step(tmp_path, 2)
    bad = commit_step(tmp_path, 3)
    (bad / "manifest.json").write_text("{}")
    prune(tmp_path, 1, good)
    assert names(tmp_path) == ["LATEST", good.name, bad.name]


@pytest.mark.integration
def test_only_what_dead_writers_left_is_removed(tmp_path: Path, commit_step: CommitStep) -> None:
    path = commit_step(tmp_path, 1)
    naming = "from paceline.runs.checkpoint_manifest import temporary_name as n; print(n(), n(), n())"
    done = subprocess.run([sys.executable, "-c", naming], capture_output=True, text=True, timeout=60, check=True)
    dead, hint, file = done.stdout.split()
    boot = boot_id()
    elsewhere = dead.replace(boot, "0" * len(boot))
    earlier = ".tmp-0123456789abcdef"
    with temporary_directory(tmp_path) as alive:
        for name in (dead, elsewhere, earlier, f"{earlier}0"):
            (tmp_path / name).mkdir()
        for directory in (alive, tmp_path / dead):
            (directory / "model.safetensors").write_bytes(b"half")
        (tmp_path / hint).symlink_to(path.name)
        (tmp_path / file).touch()
        two_days_ago = time.time() - 48 * 3600
        os.utime(tmp_path / earlier, (two_days_ago, two_days_ago))
        remove_stale(tmp_path)
        kept = sorted([alive.name, elsewhere, f"{earlier}0"])
        assert names(tmp_path) == sorted([*kept, "LATEST", path.name])
    remove_stale(tmp_path / "missing")


def test_concurrent_writers_and_clean_ups_do_not_hurt_each_other(tmp_path: Path, commit_step: CommitStep) -> None:
    def write(writer: int) -> list[Path]:
        paths = []
        for step in range(10):
            remove_stale(tmp_path)
            paths.append(commit_step(tmp_path, step))
        return paths

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(write, range(4)))
    assert all(paths == results[0] for paths in results)
    for path in results[0]:
        verify(path)
    assert names(tmp_path) == ["LATEST", *(path.name for path in results[0])]


CRASHING_WRITER = """
import os, signal, sys
from pathlib import Path
from paceline.runs.checkpoint_manifest import CheckpointInfo
from paceline.runs.checkpoint_store import commit, remove_stale, prune

directory, calls_left = Path(sys.argv[1]), int(sys.argv[2])
fsync = os.fsync

def before(event, args=()):
    # Die just before the n-th call that touches the file system.
    global calls_left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync"):
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls_left -= 1

def traced_fsync(descriptor):
    before("os.fsync")
    fsync(descriptor)

os.fsync = traced_fsync
sys.addaudithook(before)
info = CheckpointInfo(task="tasks:Demo", step=2, state_version=3, epoch=0, generation=0, microbatches=4, pins={})
remove_stale(directory)
path = commit(directory, info, [("model.safetensors", [b"head2"]), ("state.json", [b"{}"])])
prune(directory, 1, path)
"""


def crash_at_every_point(tmp_path: Path, prepare: Callable[[Path], None]) -> Iterator[Path]:
    """The directory as each crash leaves it: one call further each time, until the writer gets through."""
    for point in range(200):
        directory = tmp_path / f"crash-{point}"
        prepare(directory)
        child = subprocess.run([sys.executable, "-c", CRASHING_WRITER, str(directory), str(point)], timeout=60)
        yield directory
        if child.returncode == 0:
            return
        assert child.returncode == -signal.SIGKILL
    raise AssertionError("the writer never got through")


@pytest.mark.integration
def test_a_crash_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, commit_step: CommitStep) -> None:
    def prepare(directory: Path) -> None:
        commit_step(directory, 1)
        left = directory / ".tmp-of-an-earlier-crash"
        left.mkdir()
        os.utime(left, (0, 0))

    steps = []
    for directory in crash_at_every_point(tmp_path, prepare):
        found = newest_verified(directory)
        assert found.path is not None
        assert found.manifest is not None
        # A LATEST that lags behind retention is the one thing that may be worth a remark.
        assert all(reason.startswith("LATEST names") for reason in found.skipped)
        step = found.manifest.info.step
        assert (found.path / "model.safetensors").read_bytes() == b"head%d" % step
        steps.append(step)
        # The next writer cleans up and goes on.
        remove_stale(directory)
        prune(directory, 1, commit_step(directory, 3))
        assert names(directory) == ["LATEST", "step-00000003-v00000004"]
    assert steps == sorted(steps)
    assert len(steps) > 20
    assert steps.count(1) > 5
    assert steps.count(2) > 5


@pytest.mark.integration
def test_a_full_disk_is_told_and_harms_nothing(small_disk: Path, commit_step: CommitStep, make_info: MakeInfo) -> None:
    good = commit_step(small_disk, 1)
    before = names(small_disk)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 in .*: No space left on device\. Earlier"):
        commit(small_disk, make_info(2), [("model.safetensors", [bytes(200_000)]), ("b", [bytes(200_000)])])
    assert names(small_disk) == before
    assert newest_verified(small_disk).path == good
    # Once there is room again, the same save succeeds.
    commit(small_disk, make_info(2), [("model.safetensors", [bytes(100_000)])])


@pytest.mark.integration
def test_a_disk_without_room_for_the_manifest_alone(
    small_disk: Path, commit_step: CommitStep, make_info: MakeInfo
) -> None:
    good = commit_step(small_disk, 1)
    before = names(small_disk)

    def fill() -> None:
        # What the data files left over goes to somebody else just before the manifest is written.
        with (small_disk / "other").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    with pytest.raises(CheckpointError, match="No space left on device"):
        commit(small_disk, make_info(2), [("model.safetensors", [bytes(50_000)])], fill)
    assert names(small_disk) == [*before[:1], "other", *before[1:]]
    assert newest_verified(small_disk).path == good


@pytest.mark.integration
def test_a_read_only_disk_is_told(small_disk: Path, commit_step: CommitStep) -> None:
    commit_step(small_disk, 1)
    newest = commit_step(small_disk, 2)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system\..*make the directory writable"):
        commit_step(small_disk, 3)
    with pytest.raises(CheckpointError, match=r"cannot delete the old checkpoint .*: Read-only file system"):
        prune(small_disk, 1, newest)
    assert newest_verified(small_disk).path == newest


def test_a_checkpoint_from_which_something_is_missing_is_not_committed(tmp_path: Path, make_info: MakeInfo) -> None:
    def remove_one() -> None:
        next(tmp_path.glob(".tmp-*/state.json")).unlink()

    contents = [("model.safetensors", [b"head"]), ("state.json", [b"{}"])]
    with pytest.raises(CheckpointWriteError, match=r"another program has removed or changed state\.json"):
        commit(tmp_path, make_info(1), contents, before_commit=remove_one)
    assert names(tmp_path) == []
