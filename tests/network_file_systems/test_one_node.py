"""A node's disk fails or lies as network file systems do: nothing is lost, and nothing that was done is denied."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.lab.network_file_system import Mount, network_file_system
from tests.network_file_systems.conftest import TASK, Node

from paceline.runs.package import verify_package
from paceline.runs.package_registry import Registry
from paceline_pages.run_status import run_directories

pytestmark = pytest.mark.system

PAUSE_S = 0.1  # of two micro-batches a step: the run lasts for some seconds, in which the disk fails
FAILS_S = 2.0


def steps_done(node: Node) -> int:
    lines = [path.read_text().count("\n") for path in (node.run / "ledger").glob("gen-*.jsonl")]
    return sum(lines) - len(lines)


@pytest.mark.timeout(900)  # a dozen commands
@pytest.mark.parametrize(
    "operation",
    ["rename", "mkdir", pytest.param("unlink", marks=pytest.mark.slow), pytest.param("link", marks=pytest.mark.slow)],
)
def test_answers_that_are_lost(operation: str, tmp_path: Path, node: Callable[[Mount], Node], trained: Path) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        a = node(fs["a"])
        fs["a"].set(lost=[operation])
        done = a.finish(a.train(nproc=2))
        assert done.returncode == 0, done.stderr
        a.require_trained(trained)
        assert sorted(os.listdir(a.run / "checkpoints")) == sorted(os.listdir(trained / "checkpoints"))

        digest = json.loads(a.paceline("export", a.run, "--json"))["digest"]
        a.paceline("registry", "tag", "dots", "dots@prod")
        a.paceline("registry", "untag", "dots@latest")
        registry = Registry(a.path / "registry")
        assert {str(name): tag.digest for name, tag in registry.references().items()} == {"dots@prod": digest}
        assert verify_package(registry.path_of(digest)).digest == digest
        a.paceline("registry", "push", "dots@prod", a.path / "other")
        assert Registry(a.path / "other").digests() == [digest]

        np.save(a.path / "rows.npy", np.zeros((100, 4), np.float32))
        a.paceline("predict", "dots@prod", a.path / "rows.npy", "--output", a.path / "out.csv")
        assert (a.path / "out.csv").read_text().count("\n") == 101
        assert not list(a.path.glob("out.csv.parts/part-*"))

        for fork in ("first", "second"):
            a.paceline("fork", a.run, "--run-dir", a.path / fork, "--step", "18", "--set", "pause_s=0.001")
        a.paceline("gc", a.path, "--keep-last", "1", "--yes")
        # The newest fork stays, and the run as the source of a new package.
        assert len(run_directories(a.path)) == 2
        assert not list(a.path.glob(".*"))


@pytest.mark.parametrize(
    "error",
    [
        errno.EDQUOT,
        pytest.param(errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param(errno.EIO, marks=pytest.mark.slow),
    ],
    ids=errno.errorcode.get,
)
def test_writes_of_the_ledger_that_a_close_reports_as_lost(
    error: int, tmp_path: Path, node: Callable[[Mount], Node], trained: Path, wait_until: Callable[..., None]
) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        a = node(fs["a"])
        training = a.train(pause_s=PAUSE_S)
        wait_until(lambda: steps_done(a) >= 2, "two steps")
        fs["a"].set(close_error=error, only="/ledger/")
        time.sleep(FAILS_S)
        fs["a"].set()
        done = a.finish(training)
        assert done.returncode == 0, done.stderr
        a.require_trained(trained)


@pytest.mark.parametrize(
    "switches",
    [
        {"stale": 1},
        {"away": True, "away_error": errno.ETIMEDOUT},
        pytest.param({"away": True, "away_error": errno.EHOSTDOWN}, marks=pytest.mark.slow),
        pytest.param({"away": True, "away_error": errno.ESTALE}, marks=pytest.mark.slow),
        {"away": True},
    ],
    ids=["stale", "ETIMEDOUT", "EHOSTDOWN", "ESTALE", "silent"],
)
def test_a_server_that_is_away_in_the_middle_of_a_run(
    switches: dict[str, int],
    tmp_path: Path,
    node: Callable[[Mount], Node],
    trained: Path,
    wait_until: Callable[..., None],
) -> None:
    with network_file_system(tmp_path) as fs:
        a, b = node(fs["a"]), node(fs["b"])
        training = a.train(pause_s=PAUSE_S)
        wait_until(lambda: steps_done(b) >= 2, "two steps")
        fs["a"].set(**switches)
        time.sleep(FAILS_S)
        fs["a"].set(stale=switches.get("stale", 0))
        done = a.finish(training)
        assert done.returncode == 0, done.stderr
        a.require_trained(trained)


@pytest.mark.parametrize(
    "error", [errno.EINVAL, pytest.param(errno.ENOTSUP, marks=pytest.mark.slow)], ids=errno.errorcode.get
)
def test_folders_that_cannot_be_synced(
    error: int, tmp_path: Path, node: Callable[[Mount], Node], trained: Path
) -> None:
    with network_file_system(tmp_path, nodes="a") as fs:
        a = node(fs["a"])
        fs["a"].set(folder_fsync_error=error)
        done = a.finish(a.train())
        assert done.returncode == 0, done.stderr
        a.require_trained(trained)
        assert done.stderr.count("cannot sync folders") == 1
        a.paceline("export", a.run)


def test_an_array_that_cannot_be_mapped_is_read(tmp_path: Path, node: Callable[[Mount], Node], packed: Path) -> None:
    with network_file_system(tmp_path, nodes="a", maps_shared=False) as fs:
        a = node(fs["a"])
        shutil.copytree(packed, a.path / "registry")
        np.save(a.path / "rows.npy", np.zeros((100, 4), np.float32))
        a.paceline("predict", "dots", "--task", TASK, a.path / "rows.npy", "--output", a.path / "out.csv")
        assert (a.path / "out.csv").read_text().count("\n") == 101
