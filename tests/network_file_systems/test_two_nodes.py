"""Two nodes write to one registry, or into one file, at the same time."""

from __future__ import annotations

import csv
import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.lab.network_file_system import Mount, network_file_system
from tests.network_file_systems.conftest import TASK, Node

from paceline.runs.package import verify_package
from paceline.runs.package_manifest import plain_name
from paceline.runs.package_registry import PackageReference, Registry

pytestmark = pytest.mark.system

Nodes = tuple[Node, Node]
LOCKS = [
    "shared",
    "node",
    pytest.param(errno.ENOSYS, id="ENOSYS"),
    pytest.param(errno.EOPNOTSUPP, id="EOPNOTSUPP", marks=pytest.mark.slow),
    pytest.param(errno.ENOLCK, id="ENOLCK", marks=pytest.mark.slow),
]
ROWS = 20_000


@contextmanager
def nodes_with(locks: str | int, directory: Path, node: Callable[[Mount], Node]) -> Iterator[Nodes]:
    """Two nodes where locks hold on both, within each, or nowhere: then a lock fails with this error."""
    with network_file_system(directory, locks="node" if locks == "node" else "shared") as fs:
        if isinstance(locks, int):
            for mount in fs.values():
                mount.set(lock_error=locks)
        yield node(fs["a"]), node(fs["b"])


@pytest.mark.parametrize("locks", LOCKS)
def test_two_exports_at_once(locks: str | int, tmp_path: Path, node: Callable[[Mount], Node], trained: Path) -> None:
    with nodes_with(locks, tmp_path, node) as (a, b):
        shutil.copytree(trained, a.run, symlinks=True)
        commands = [
            each.start("export", each.run, "--tag", tag, "--json") for each, tag in ((a, "first"), (b, "second"))
        ]
        done = [a.finish(command) for command in commands]
        assert [each.returncode for each in done] == [0, 0], "".join(each.stderr for each in done)
        digests = [json.loads(each.stdout)["digest"] for each in done]
        registry = Registry(b.path / "registry")
        assert registry.digests() == sorted(set(digests))
        for digest in digests:
            assert verify_package(registry.path_of(digest)).digest == digest
        tags = {reference.tag: tag.digest for reference, tag in registry.references().items()}
        assert tags == {"first": digests[0], "second": digests[1]}
        assert [path.name for path in registry.packages.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("locks", LOCKS)
def test_a_package_is_not_tagged_while_another_node_removes_it(
    locks: str | int, tmp_path: Path, node: Callable[[Mount], Node], packed: Path
) -> None:
    with nodes_with(locks, tmp_path, node) as (a, b):
        shutil.copytree(packed, a.path / "registry")
        registry = Registry(b.path / "registry")
        [digest] = registry.digests()
        with registry.unchanging():  # as `paceline gc` does, until no tag names the package
            tags = a.start("registry", "tag", digest, "dots@prod")
            time.sleep(5)
            assert tags.poll() is None
            shutil.rmtree(registry.path_of(digest))
        done = a.finish(tags)
        assert done.returncode != 0
        assert f"there is no package {digest}" in done.stderr
        assert registry.find(PackageReference("dots", plain_name("prod", "a tag"))) is None


@pytest.mark.parametrize("locks", LOCKS)
def test_two_predictions_into_one_file(
    locks: str | int, tmp_path: Path, node: Callable[[Mount], Node], packed: Path
) -> None:
    with nodes_with(locks, tmp_path, node) as (a, b):
        shutil.copytree(packed, a.path / "registry")
        np.save(a.path / "rows.npy", np.random.default_rng(0).random((ROWS, 4), np.float32))
        words = ("predict", "dots", "--task", TASK, "--chunk", "1000")
        commands = [each.start(*words, each.path / "rows.npy", "--output", each.path / "out.csv") for each in (a, b)]
        done = [a.finish(command) for command in commands]
        assert 0 in [each.returncode for each in done], "".join(each.stderr for each in done)
        for each in done:
            assert each.returncode == 0 or any(
                told in each.stderr for told in ("another process is writing", "already exists")
            ), each.stderr
        with (b.path / "out.csv").open(newline="") as file:
            assert [int(row["row"]) for row in csv.DictReader(file)] == list(range(ROWS))
        assert not list(a.path.glob("out.csv.parts/part-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a search that lasts longer than a heartbeat
@pytest.mark.parametrize("locks", ["node", pytest.param(errno.ENOLCK, id="ENOLCK")])
def test_a_search_that_another_node_runs(
    locks: str | int, tmp_path: Path, node: Callable[[Mount], Node], wait_until: Callable[..., None]
) -> None:
    with nodes_with(locks, tmp_path, node) as (a, b):
        words = ("tune", TASK, "--search", "pause_s=choice:0.4,0.5", "--trials", "2", "--max-steps", "24")
        searching = a.start(*words, "--metric", "loss:min", "--cpus-per-trial", "1", "--run-dir", a.path / "search")
        wait_until(lambda: [*(b.path / "search").glob("trials/*/ledger/*")], "the search's trials", timeout_s=240)
        again = b.finish(b.start("tune", "--resume", "--run-dir", b.path / "search"))
        assert again.returncode == 2, again.stderr
        assert "is in use by a process of" in again.stderr
        done = a.finish(searching)
        assert done.returncode == 0, done.stderr
        b.paceline("tune", "--resume", "--run-dir", b.path / "search")
        assert len(list((b.path / "search" / "trials").iterdir())) == 2
