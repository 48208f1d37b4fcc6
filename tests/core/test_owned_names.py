"""Names in the temporary directory and in /dev/shm: removed by their process, or for it once it was killed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.ownership import SHARED_MEMORY, Owner, leftovers, remove_leftovers
from paceline_maintenance.gc import gc

# The worker is one of multiprocessing's, as torch's data workers are; it holds a name of torch's for shared memory.
TRAINER = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from paceline.core.ownership import name_multiprocessing, register_process

def work(started):
    register_process()
    Path(f"/dev/shm/torch_{os.getpid()}_1_1").touch()
    started.release()
    time.sleep(600)

name_multiprocessing()
started = multiprocessing.get_context("spawn").Semaphore(0)
worker = multiprocessing.get_context("fork").Process(target=work, args=(started,), daemon=True)
worker.start()
started.acquire()
print(worker.pid, flush=True)
if sys.argv[1] == "killed":
    os.killpg(0, signal.SIGKILL)
"""


def names_of(pid: int, worker: int) -> set[str]:
    """The kinds of what a process and its data worker have named."""
    kinds = {"semaphore": f"sem.paceline-{pid:x}-", "folder": f"paceline-{pid:x}-", "memory": f"torch_{worker}_"}
    named = [path.name for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) for path in place.iterdir()]
    return {kind for kind, start in kinds.items() if any(name.startswith(start) for name in named)}


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_names_go_with_their_process_or_with_the_next_start(run_processes: Any, how: str) -> None:
    popen = run_processes.start([sys.executable, "-c", TRAINER, how])
    worker = int(popen.stdout.readline())
    popen.wait()
    if how == "killed":
        assert names_of(popen.pid, worker) == {"semaphore", "folder", "memory"}
        others = {path.name for path in leftovers("/elsewhere")}
        assert not any(f"-{popen.pid:x}-" in name for name in others)
        remove_leftovers()
    assert names_of(popen.pid, worker) == set()
    run_processes.finish(popen)


def test_names_of_running_processes_and_of_other_namespaces_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "registry"))
    owner = Owner.of(os.getpid())
    assert owner is not None
    other = replace(owner, pid=owner.pid + (1 << 23), namespace=1)
    ended = replace(owner, start=owner.start + 1)  # the number of an earlier process is this one's by now
    paths = [SHARED_MEMORY / f"sem.{each.prefix}x" for each in (owner, other, ended)]
    link = SHARED_MEMORY / f"{ended.prefix}link"
    try:
        for path in paths:
            path.touch()
        link.symlink_to("/tmp")
        assert set(leftovers()) == {paths[2], link}
        assert gc(tmp_path, keep_last=1, json=True) == 0
        assert {str(paths[2]), str(link)} <= set(json.loads(capsys.readouterr().out)["leftovers"])
        assert gc(tmp_path, keep_last=1, yes=True) == 0
        assert "files of killed processes removed" in capsys.readouterr().out
        assert [path.exists() for path in paths] == [True, True, False]
        assert not link.is_symlink()
    finally:
        for path in (*paths, link):
            path.unlink(missing_ok=True)
