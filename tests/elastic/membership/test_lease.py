"""Leases: one winner for every roster, whoever asks and however often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from msgspec.structs import replace

from paceline.core.errors import RunDirectoryError
from paceline.elastic.consensus.messages import NodeSet
from paceline.elastic.consensus.witness import FileWitness

ROSTER = NodeSet(7, ("a", "b", "c", "d"))
AB, CD = frozenset("ab"), frozenset("cd")


@pytest.fixture
def leases(tmp_path: Path) -> FileWitness:
    return FileWitness.create(tmp_path)


def test_the_first_to_take_it_holds_it_for_ever(leases: FileWitness) -> None:
    assert leases.acquire(ROSTER, AB) == AB
    assert leases.acquire(ROSTER, CD) == AB
    assert leases.acquire(ROSTER, AB) == AB
    assert leases.acquire(replace(ROSTER, config_epoch=8), CD) == CD


def test_of_many_at_once_one_wins(leases: FileWitness) -> None:
    rosters = [replace(ROSTER, config_epoch=g) for g in range(20)]
    barrier = Barrier(4)

    def ask(winners: frozenset[str]) -> list[frozenset[str]]:
        answers = []
        for roster in rosters:
            barrier.wait(30)
            answers.append(leases.acquire(roster, winners))
        return answers

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, [AB, CD, AB, CD]))
    assert all(len(set(of_roster)) == 1 for of_roster in zip(*answers, strict=True))


def test_nothing_but_leases_stays_behind(leases: FileWitness, tmp_path: Path) -> None:
    leases.acquire(ROSTER, AB)
    leases.acquire(ROSTER, CD)
    assert leases.is_shared()
    [directory] = tmp_path.iterdir()
    assert [path.name for path in directory.iterdir()] == ["roster-00000007"]


def test_another_directory_and_another_job_are_told_apart(leases: FileWitness, tmp_path: Path) -> None:
    assert FileWitness(tmp_path, leases.key).is_shared()
    assert not FileWitness(tmp_path / "elsewhere", leases.key).is_shared()
    assert not FileWitness(tmp_path, "0" * 32).is_shared()
    assert not FileWitness(tmp_path, f"{leases.key}/../leases-{leases.key}").is_shared()
    leases.acquire(ROSTER, AB)
    assert FileWitness.create(tmp_path).acquire(ROSTER, CD) == CD


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"nodes": ["a", "b", "c", "d"]}',
        b'{"nodes": ["a", "b"], "winners": ["a"]}',
        b'{"nodes": ["a", "b", "c", "d"], "winners": ["x", "y"]}',
        b'{"nodes": ["a", "b", "c", "d"], "winners": 7}',
        b'{"nodes": ["a", "b", "c", "d"], "winners": [[]]}',
    ],
)
def test_a_damaged_lease_is_nobodys(leases: FileWitness, tmp_path: Path, content: bytes) -> None:
    leases.acquire(ROSTER, AB)
    [lease] = tmp_path.glob("leases-*/roster-*/*")
    lease.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="is not the witness of the nodes a, b, c, d"):
        leases.acquire(ROSTER, AB)


def test_where_no_lease_can_be_made_nobody_goes_on(leases: FileWitness) -> None:
    [directory] = leases.path.iterdir()
    (directory / "roster-00000007").touch()
    with pytest.raises(RunDirectoryError, match="cannot be used: Not a directory"):
        leases.acquire(ROSTER, AB)
    assert len(list(directory.iterdir())) == 1, "the draft is gone"


def test_a_directory_that_is_gone_is_an_error(leases: FileWitness, tmp_path: Path) -> None:
    [directory] = tmp_path.iterdir()
    directory.rmdir()
    with pytest.raises(RunDirectoryError, match="that all nodes can write"):
        leases.acquire(ROSTER, AB)
